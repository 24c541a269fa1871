#pragma once

#include "batch.h"
#include "draft.h"
#include "kv.h"
#include "load.h"
#include "swarm_shim.h"

#include "ggml-cpu.h"

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

namespace swarm {

struct threadpool_deleter {
    void operator()(ggml_threadpool * pool) const { ggml_threadpool_free(pool); }
};

// One KV stream of a context. position is what the stream holds; llama.cpp is never asked for it.
struct slot {
    int32_t context;
    int32_t seq_id;
    int32_t capacity;
    int32_t position = 0; // the most that any layer holds

    std::vector<int32_t> held; // per layer of the span: the rows of the positions [0, held) are there

    draft_stream draft;

    std::vector<float> row;              // logits of the last wanted row, empty when there is none
    int32_t            row_position = 0; // where that row's token sits

    void row_drop() { row.clear(); }

    // tokens that all layers [first, last), counted from the span's first, hold
    int32_t held_by(int32_t first, int32_t last) const {
        return *std::min_element(held.begin() + first, held.begin() + last);
    }
};

struct context {
    context_ptr        ctx;
    context_ptr        mtp; // of the MTP block, with the same slots; NULL when it is not loaded
    swarm_context_spec spec;
    int32_t            first_slot;
    int32_t            n_outputs_max = 0; // llama.cpp's output buffer grows to the largest step
};

} // namespace swarm

struct swarm_engine {
    std::unique_ptr<ggml_threadpool, swarm::threadpool_deleter> threads; // outlives the contexts that use it
    swarm::model_ptr            model;
    std::vector<swarm::context> contexts;
    std::vector<swarm::slot>    slots;
    swarm::batch                batch;

    int32_t n_layers     = 0;
    int32_t n_embd       = 0;
    int32_t n_vocab      = 0;
    int32_t span_first   = 0;
    int32_t span_last    = 0;
    int32_t chunk_tokens = 0;
    int32_t wanted_rows  = 0;
    int32_t n_mtp        = 0;

    swarm_engine_info info = {};

    bool is_exit_run(const swarm_step & step) const { return step.run_last == n_layers; }

    swarm::slot &       slot_at(int32_t slot);
    const swarm::slot & slot_at(int32_t slot) const;

    // drops what the slot holds at or above position
    void slot_truncate(swarm::slot & slot, int32_t position);
    void slot_clear(swarm::slot & slot);

    // see swarm_engine_kv_read, swarm_engine_kv_write
    swarm::kv_layer kv_layer_at(const swarm::slot & slot, int32_t layer) const;
    void kv_read (int32_t slot, int32_t layer, int32_t first, int32_t n, uint8_t * data, uint64_t n_bytes);
    void kv_write(int32_t slot, int32_t layer, int32_t first, int32_t n, const uint8_t * data, uint64_t n_bytes);

    // up to n drafts; see swarm_engine_draft
    std::vector<int32_t> draft(int32_t slot, int32_t n);

    // one forward pass; see swarm_engine_step
    void step(const swarm_step & step, float * hidden, float * logits);

private:
    void step_validate(const swarm_step & step) const;
    void step_validate_rows(const swarm_step & step) const;
    void step_validate_values(const swarm_step & step, const float * hidden, const float * logits) const;
    void step_prepare(const swarm_step & step, swarm::context & context);
    void step_fetch_hidden(llama_context * ctx, const swarm_step & step, float * hidden);
    void step_fetch_logits(llama_context * ctx, const swarm_step & step, float * logits);
    void step_commit(const swarm_step & step);
    void step_failed(const swarm_step & step);
    void kv_place(swarm::slot & slot, int32_t layer, int32_t first, int32_t n);
    void kv_validate(const swarm::slot & slot, const swarm::kv_layer & layer, int32_t first, int32_t n,
                     uint64_t n_bytes) const;

    int32_t kv_held(const swarm::slot & slot, int32_t layer) const;

    void draft_clear(swarm::slot & slot);
    void draft_cut(swarm::slot & slot, int32_t position);
    bool draft_run(const swarm::slot & slot, int32_t position, std::vector<int32_t> tokens, std::vector<float> states,
                   bool output);
    bool draft_catch_up(swarm::slot & slot, int32_t position);
    void draft_prepare(const swarm_step & step, swarm::context & context);
    void draft_keep(const swarm_step & step, const swarm::context & context) noexcept;
};
