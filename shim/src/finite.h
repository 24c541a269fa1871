#pragma once

#include <cstddef>
#include <cstdint>

namespace swarm {

// whether no value is infinite or NaN
bool is_finite_f32(const float * values, size_t n);

// n F16 values that lie stride bytes apart
bool is_finite_f16(const uint8_t * values, size_t n, size_t stride);

} // namespace swarm
