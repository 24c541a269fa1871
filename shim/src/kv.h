#pragma once

#include "llama.h"

#include <array>
#include <cstddef>
#include <cstdint>

class llama_kv_cache;
struct ggml_tensor;

namespace swarm {

// One cached tensor of a layer. Cell i of a slot's stream holds position i: slots only grow and are cut at their end.
class kv_tensor {
public:
    kv_tensor() = default;
    kv_tensor(const llama_kv_cache * cache, ggml_tensor * data) : cache(cache), data(data) {}

    size_t row_bytes() const; // 0 when the layer has no such tensor

    // the rows of the positions [first, first + n); the caller has checked the range
    void read (llama_seq_id seq_id, int32_t first, int32_t n, uint8_t * rows) const;
    void write(llama_seq_id seq_id, int32_t first, int32_t n, const uint8_t * rows) const;

    // whether every value of n rows is finite
    bool is_finite(const uint8_t * rows, int32_t n) const;

private:
    size_t offset(llama_seq_id seq_id, int32_t first, int32_t n) const;

    const llama_kv_cache * cache = nullptr;
    ggml_tensor *          data  = nullptr;
};

using kv_layer = std::array<kv_tensor, 3>; // keys, values, indexer keys

kv_layer kv_layer_of(llama_context * ctx, int32_t layer);

// bytes of one position in all tensors of a layer
size_t kv_row_bytes(const kv_layer & layer);

// lets seq_id hold the positions [first, last) on top of those below
void kv_fill(llama_context * ctx, llama_seq_id seq_id, int32_t first, int32_t last);

} // namespace swarm
