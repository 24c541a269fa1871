// Summing up one row of logits.
#include "error.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace {

struct entry {
    float   value;
    int32_t id;
};

bool better(const entry & a, const entry & b) {
    return a.value != b.value ? a.value > b.value : a.id < b.id;
}

// The n best entries, best first. Ids come in ascending order, so an equal value never displaces an earlier one.
std::vector<entry> best_entries(const float * logits, int32_t n_vocab, int32_t n) {
    std::vector<entry> heap; // the worst kept entry on top
    heap.reserve(n);
    for (int32_t id = 0; id < n_vocab; ++id) {
        if ((int32_t) heap.size() < n) {
            heap.push_back({ logits[id], id });
            std::push_heap(heap.begin(), heap.end(), better);
        } else if (logits[id] > heap.front().value) {
            std::pop_heap(heap.begin(), heap.end(), better);
            heap.back() = { logits[id], id };
            std::push_heap(heap.begin(), heap.end(), better);
        }
    }
    std::sort_heap(heap.begin(), heap.end(), better);
    return heap;
}

// exp for x <= 0 to 2e-7 relative, without branches so that the compiler vectorises the loop around it; libm's takes a
// millisecond for the 154,880 logits of a GLM row.
inline float exp_nonpositive(float x) {
    x = x < -87.0f ? -87.0f : x;
    const int32_t n = (int32_t) (x * 1.44269504f - 0.5f);
    const float   f = (float) n;
    const float   r = (x - f * 0.693359375f) + f * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const int32_t bits = (n + 127) << 23;
    float scale;
    std::memcpy(&scale, &bits, sizeof(scale));
    return p * scale;
}

// std::max_element compares one by one
float largest(const float * values, size_t n) {
    float lanes[8];
    std::fill(lanes, lanes + 8, -std::numeric_limits<float>::infinity());
    for (size_t i = 0; i + 8 <= n; i += 8) {
        for (size_t lane = 0; lane < 8; ++lane) {
            lanes[lane] = values[i + lane] > lanes[lane] ? values[i + lane] : lanes[lane];
        }
    }
    for (size_t i = n / 8 * 8; i < n; ++i) {
        lanes[0] = std::max(lanes[0], values[i]);
    }
    return *std::max_element(lanes, lanes + 8);
}

double rest_log_sum_exp(std::vector<float> & rest, float temperature) {
    const float max = largest(rest.data(), rest.size());
    if (!(max > -std::numeric_limits<float>::infinity())) {
        return -std::numeric_limits<double>::infinity();
    }
    const float scale = 1.0f / temperature;
    double sum = 0.0;
    constexpr size_t block = 1024;
    for (size_t first = 0; first < rest.size(); first += block) {
        const size_t n = std::min(block, rest.size() - first);
        float lanes[8] = { 0 };
        for (size_t i = 0; i + 8 <= n; i += 8) {
            for (size_t lane = 0; lane < 8; ++lane) {
                lanes[lane] += exp_nonpositive((rest[first + i + lane] - max) * scale);
            }
        }
        for (size_t i = n / 8 * 8; i < n; ++i) {
            lanes[0] += exp_nonpositive((rest[first + i] - max) * scale);
        }
        for (float lane : lanes) {
            sum += lane;
        }
    }
    return (double) max / temperature + std::log(sum);
}

} // namespace

int32_t swarm_logits_top(const float * logits, int32_t n_vocab, float temperature, int32_t n_top,
                         int32_t * ids, float * values, double * rest_lse) {
    return swarm::guarded([&] {
        if (!logits || !rest_lse || n_vocab < 1) {
            swarm::fail(SWARM_ERR_ARGUMENT, "a row of logits is missing");
        }
        if (n_top < 0 || n_top > n_vocab || (n_top > 0 && (!ids || !values))) {
            swarm::fail(SWARM_ERR_ARGUMENT, "%d of %d logits asked for", n_top, n_vocab);
        }
        if (!(temperature > 0.0f) || !std::isfinite(temperature)) {
            temperature = 1.0f;
        }
        thread_local std::vector<float> rest; // kept: fresh pages cost more than the copy into them
        rest.assign(logits, logits + n_vocab);
        const std::vector<entry> top = n_top > 0 ? best_entries(logits, n_vocab, n_top) : std::vector<entry>();
        for (size_t i = 0; i < top.size(); ++i) {
            ids[i]    = top[i].id;
            values[i] = top[i].value;
            rest[top[i].id] = -std::numeric_limits<float>::infinity();
        }
        *rest_lse = rest_log_sum_exp(rest, temperature);
    });
}
