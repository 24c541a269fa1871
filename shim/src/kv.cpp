// KV rows of one layer in and out. The layout is described in swarm_shim.h.
#include "kv.h"

#include "engine.h"
#include "error.h"
#include "finite.h"

#include "ggml-backend.h"
#include "llama-context.h"
#include "llama-kv-cache-dsa.h"
#include "llama-kv-cache.h"

#include <algorithm>

using swarm::fail;

namespace {

struct kv_caches {
    llama_kv_cache * main;
    llama_kv_cache * indexer; // nullptr when the model has none
};

kv_caches caches_of(llama_context * ctx) {
    if (!ctx->get_cparams().flash_attn) {
        fail(SWARM_ERR_UNSUPPORTED, "without flash attention the values are stored transposed");
    }
    llama_memory_t memory = llama_get_memory(ctx);
    if (auto * dsa = dynamic_cast<llama_kv_cache_dsa *>(memory)) {
        return { dsa->get_mla(), dsa->get_lid() };
    }
    if (auto * plain = dynamic_cast<llama_kv_cache *>(memory)) {
        return { plain, nullptr };
    }
    fail(SWARM_ERR_UNSUPPORTED, "the KV cache of this architecture has no rows");
}

bool has_layer(const llama_kv_cache & cache, int32_t layer) {
    const std::vector<uint32_t> layers = cache.get_layer_ids();
    return std::find(layers.begin(), layers.end(), (uint32_t) layer) != layers.end();
}

} // namespace

namespace swarm {

size_t kv_tensor::row_bytes() const {
    return data ? data->nb[1] : 0;
}

size_t kv_tensor::offset(llama_seq_id seq_id, int32_t first, int32_t n) const {
    const llama_kv_cells & cells = cache->get_cells(seq_id);
    for (int32_t i = first; i < first + n; ++i) {
        if (cells.is_empty(i) || cells.pos_get(i) != i) {
            fail(SWARM_ERR_COMPUTE, "position %d is not in its KV cell", i);
        }
    }
    return cache->get_stream(seq_id) * data->nb[2] + first * data->nb[1];
}

void kv_tensor::read(llama_seq_id seq_id, int32_t first, int32_t n, uint8_t * rows) const {
    if (data) {
        ggml_backend_tensor_get(data, rows, offset(seq_id, first, n), n * data->nb[1]);
    }
}

void kv_tensor::write(llama_seq_id seq_id, int32_t first, int32_t n, const uint8_t * rows) const {
    if (data) {
        ggml_backend_tensor_set(data, rows, offset(seq_id, first, n), n * data->nb[1]);
    }
}

bool kv_tensor::is_finite(const uint8_t * rows, int32_t n) const {
    if (!data) {
        return true;
    }
    const size_t n_bytes = n * data->nb[1];
    switch (data->type) {
        case GGML_TYPE_F32:  return is_finite_f32((const float *) rows, n_bytes / sizeof(float));
        case GGML_TYPE_F16:  return is_finite_f16(rows, n_bytes / sizeof(ggml_fp16_t), sizeof(ggml_fp16_t));
        case GGML_TYPE_Q8_0: { // a block is its F16 scale and 32 integers
            const size_t block = ggml_type_size(GGML_TYPE_Q8_0);
            return is_finite_f16(rows, n_bytes / block, block);
        }
        default: fail(SWARM_ERR_UNSUPPORTED, "KV rows of type %s", ggml_type_name(data->type));
    }
}

kv_layer kv_layer_of(llama_context * ctx, int32_t layer) {
    const kv_caches caches = caches_of(ctx);
    if (!has_layer(*caches.main, layer)) {
        fail(SWARM_ERR_ARGUMENT, "layer %d has no KV cache", layer);
    }
    kv_layer result;
    result[0] = kv_tensor(caches.main, caches.main->get_k_storage(layer));
    result[1] = kv_tensor(caches.main, caches.main->get_v_storage(layer));
    if (caches.indexer && has_layer(*caches.indexer, layer)) {
        result[2] = kv_tensor(caches.indexer, caches.indexer->get_k_storage(layer));
    }
    return result;
}

size_t kv_row_bytes(const kv_layer & layer) {
    size_t bytes = 0;
    for (const kv_tensor & tensor : layer) {
        bytes += tensor.row_bytes();
    }
    return bytes;
}

void kv_fill(llama_context * ctx, llama_seq_id seq_id, int32_t first, int32_t last) {
    const kv_caches caches = caches_of(ctx);
    const bool filled = caches.main->seq_fill(seq_id, first, last) &&
                        (!caches.indexer || caches.indexer->seq_fill(seq_id, first, last));
    if (!filled) {
        fail(SWARM_ERR_COMPUTE, "the KV cells %d to %d are taken", first, last);
    }
}

} // namespace swarm

// The MTP block is the layer after the last one, in a context of its own.
swarm::kv_layer swarm_engine::kv_layer_at(const swarm::slot & slot, int32_t layer) const {
    const swarm::context & context = contexts[slot.context];
    if (layer == n_layers && context.mtp) {
        return swarm::kv_layer_of(context.mtp.get(), layer);
    }
    if (layer < span_first || layer >= span_last) {
        fail(SWARM_ERR_ARGUMENT, "layer %d is not in the span %d to %d", layer, span_first, span_last);
    }
    return swarm::kv_layer_of(context.ctx.get(), layer);
}

int32_t swarm_engine::kv_held(const swarm::slot & slot, int32_t layer) const {
    return layer == n_layers ? slot.draft.position : slot.held[layer - span_first];
}

void swarm_engine::kv_validate(const swarm::slot & slot, const swarm::kv_layer & layer, int32_t first, int32_t n,
                               uint64_t n_bytes) const {
    if (first < 0 || n < 1 || n > slot.capacity) {
        fail(SWARM_ERR_ARGUMENT, "%d rows from position %d on", n, first);
    }
    if (first > slot.capacity - n) {
        fail(SWARM_ERR_FULL, "positions %d to %d are beyond the %d tokens of the slot", first, first + n,
             slot.capacity);
    }
    if (n_bytes != n * swarm::kv_row_bytes(layer)) {
        fail(SWARM_ERR_ARGUMENT, "%d KV rows have %zu bytes, not %llu", n, n * swarm::kv_row_bytes(layer),
             (unsigned long long) n_bytes);
    }
}

void swarm_engine::kv_read(int32_t slot_id, int32_t layer, int32_t first, int32_t n, uint8_t * data,
                           uint64_t n_bytes) {
    swarm::slot &         slot = slot_at(slot_id);
    const swarm::kv_layer kv   = kv_layer_at(slot, layer);
    kv_validate(slot, kv, first, n, n_bytes);
    if (layer == n_layers) {
        draft_catch_up(slot, slot.draft.end());
    }
    const int32_t held = kv_held(slot, layer);
    if (first + n > held) {
        fail(SWARM_ERR_GAP, "slot %d holds %d tokens of layer %d, positions %d to %d are asked for", slot_id, held,
             layer, first, first + n);
    }
    for (const swarm::kv_tensor & tensor : kv) {
        tensor.read(slot.seq_id, first, n, data);
        data += n * tensor.row_bytes();
    }
}

void swarm_engine::kv_write(int32_t slot_id, int32_t layer, int32_t first, int32_t n, const uint8_t * data,
                            uint64_t n_bytes) {
    swarm::slot &         slot = slot_at(slot_id);
    const swarm::kv_layer kv   = kv_layer_at(slot, layer);
    kv_validate(slot, kv, first, n, n_bytes);
    const int32_t held = kv_held(slot, layer);
    if (first > held) {
        fail(SWARM_ERR_GAP, "slot %d holds %d tokens of layer %d, the rows start at %d", slot_id, held, layer, first);
    }
    const uint8_t * rows = data;
    for (const swarm::kv_tensor & tensor : kv) {
        if (!tensor.is_finite(rows, n)) {
            fail(SWARM_ERR_ARGUMENT, "a KV row of layer %d is not finite", layer);
        }
        rows += n * tensor.row_bytes();
    }
    slot.row_drop();
    try {
        kv_place(slot, layer, first, n);
        for (const swarm::kv_tensor & tensor : kv) {
            tensor.write(slot.seq_id, first, n, data);
            data += n * tensor.row_bytes();
        }
    } catch (...) {
        slot_clear(slot);
        throw;
    }
}

// Lets the layer hold [0, first + n), whose cells are about to be written.
void swarm_engine::kv_place(swarm::slot & slot, int32_t layer, int32_t first, int32_t n) {
    const int32_t          end     = first + n;
    const swarm::context & context = contexts[slot.context];
    if (layer == n_layers) {
        draft_cut(slot, first);
        swarm::kv_fill(context.mtp.get(), slot.seq_id, first, end);
        slot.draft.restart(end);
        return;
    }
    if (end > slot.position) {
        swarm::kv_fill(context.ctx.get(), slot.seq_id, slot.position, end);
        slot.position = end;
    }
    slot.held[layer - span_first] = end;
}

int32_t swarm_engine_kv_row_bytes(const swarm_engine * engine, int32_t layer, int32_t * row_bytes) {
    return swarm::guarded([&] {
        if (!engine || !row_bytes) {
            fail(SWARM_ERR_ARGUMENT, "engine or result is missing");
        }
        const swarm::kv_layer kv = engine->kv_layer_at(engine->slots[0], layer);
        for (size_t i = 0; i < kv.size(); ++i) {
            row_bytes[i] = (int32_t) kv[i].row_bytes();
        }
    });
}

int32_t swarm_engine_kv_read(swarm_engine * engine, int32_t slot, int32_t layer, int32_t first, int32_t n_rows,
                             void * data, uint64_t n_bytes) {
    return swarm::guarded([&] {
        if (!engine || !data) {
            fail(SWARM_ERR_ARGUMENT, "engine or result is missing");
        }
        engine->kv_read(slot, layer, first, n_rows, (uint8_t *) data, n_bytes);
    });
}

int32_t swarm_engine_kv_write(swarm_engine * engine, int32_t slot, int32_t layer, int32_t first, int32_t n_rows,
                              const void * data, uint64_t n_bytes) {
    return swarm::guarded([&] {
        if (!engine || !data) {
            fail(SWARM_ERR_ARGUMENT, "engine or rows are missing");
        }
        engine->kv_write(slot, layer, first, n_rows, (const uint8_t *) data, n_bytes);
    });
}
