// All exponent bits set is infinity or NaN; comparing integers vectorises without -ffast-math.
#include "finite.h"

#include <cstring>

namespace {

inline bool all_finite_f16(const uint8_t * values, size_t n, size_t stride) {
    constexpr uint16_t exponent = 0x7c00u;
    uint16_t bad = 0;
    for (size_t i = 0; i < n; ++i) {
        uint16_t bits;
        memcpy(&bits, values + i * stride, sizeof(bits));
        bad |= (bits & exponent) == exponent;
    }
    return !bad;
}

} // namespace

namespace swarm {

bool is_finite_f32(const float * values, size_t n) {
    constexpr uint32_t exponent = 0x7f800000u;
    constexpr size_t   block    = 4096;
    for (size_t first = 0; first < n; first += block) {
        const size_t end = n - first < block ? n : first + block;
        uint32_t bad = 0;
        for (size_t i = first; i < end; ++i) {
            uint32_t bits;
            memcpy(&bits, &values[i], sizeof(bits));
            bad |= (bits & exponent) == exponent;
        }
        if (bad) {
            return false;
        }
    }
    return true;
}

bool is_finite_f16(const uint8_t * values, size_t n, size_t stride) {
    // a stride the compiler knows lets the loop vectorise
    return stride == sizeof(uint16_t) ? all_finite_f16(values, n, sizeof(uint16_t)) : all_finite_f16(values, n, stride);
}

} // namespace swarm
