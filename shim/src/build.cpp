// What this library is, and whether this CPU can run it. Compiled for the baseline of the architecture.
#include "swarm_shim.h"

#if defined(SWARM_NEEDS_X86_64_V3)
#include <cpuid.h>
#endif

const char * swarm_build_id(void) {
    return SWARM_BUILD_ID;
}

const char * swarm_cpu_missing(void) {
#if defined(SWARM_NEEDS_X86_64_V3)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx"))  { return "AVX"; }
    if (!__builtin_cpu_supports("avx2")) { return "AVX2"; }
    if (!__builtin_cpu_supports("fma"))  { return "FMA"; }
    if (!__builtin_cpu_supports("bmi2")) { return "BMI2"; }
    unsigned eax, ebx, ecx, edx; // not every compiler knows "f16c" by name
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx & bit_F16C)) {
        return "F16C";
    }
#endif
    return nullptr;
}
