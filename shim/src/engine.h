#pragma once

#include "batch.h"
#include "load.h"
#include "swarm_shim.h"

#include "ggml-cpu.h"

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
    int32_t position = 0;

    std::vector<float> row;              // logits of the last wanted row, empty when there is none
    int32_t            row_position = 0; // where that row's token sits

    void row_drop() { row.clear(); }
};

struct context {
    context_ptr        ctx;
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

    swarm_engine_info info = {};

    bool is_exit_run(const swarm_step & step) const { return step.run_last == n_layers; }

    swarm::slot &       slot_at(int32_t slot);
    const swarm::slot & slot_at(int32_t slot) const;

    // drops what the slot holds at or above position
    void slot_truncate(swarm::slot & slot, int32_t position);

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
};
