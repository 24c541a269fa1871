// One forward pass. Everything a caller could get wrong is checked before anything is touched: llama.cpp answers some
// of it with an abort.
#include "engine.h"
#include "error.h"
#include "finite.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

using swarm::fail;

namespace {

bool starts_slot(const swarm_step & step, int32_t row) {
    return row == 0 || step.slot[row] != step.slot[row - 1];
}

} // namespace

void swarm_engine::step_validate(const swarm_step & step) const {
    if (step.n_rows < 1 || step.n_rows > chunk_tokens) {
        fail(SWARM_ERR_ARGUMENT, "a step has 1 to %d rows, not %d", chunk_tokens, step.n_rows);
    }
    if (!step.slot || !step.position) {
        fail(SWARM_ERR_ARGUMENT, "slots or positions are missing");
    }
    if (step.run_first < span_first || step.run_last > span_last || step.run_first >= step.run_last) {
        fail(SWARM_ERR_ARGUMENT, "layers %d to %d can't run in the span %d to %d", step.run_first, step.run_last,
             span_first, span_last);
    }
    const bool entry  = step.run_first == 0;
    const bool drafts = n_mtp > 0 && is_exit_run(step); // the MTP block takes tokens too
    if (entry ? !step.token || step.hidden : !step.hidden || (step.token && !drafts)) {
        fail(SWARM_ERR_ARGUMENT, "a run that starts at layer %d takes %s", step.run_first,
             entry ? "tokens" : "hidden states");
    }
    if (is_exit_run(step) != (step.want != nullptr)) {
        fail(SWARM_ERR_ARGUMENT, "wanted rows go with a run to the last layer, and with no other");
    }
    const int32_t most = std::max(wanted_rows, contexts[slot_at(step.slot[0]).context].spec.n_slots);
    if (step.want && std::count_if(step.want, step.want + step.n_rows, [](uint8_t want) { return want; }) > most) {
        fail(SWARM_ERR_ARGUMENT, "a step has up to %d wanted rows", most);
    }
}

void swarm_engine::step_validate_rows(const swarm_step & step) const {
    const int32_t context = slot_at(step.slot[0]).context;
    std::vector<bool> seen(slots.size(), false);
    for (int32_t i = 0; i < step.n_rows; ++i) {
        const swarm::slot & slot     = slot_at(step.slot[i]);
        const int32_t       position = step.position[i];
        if (slot.context != context) {
            fail(SWARM_ERR_ARGUMENT, "slots %d and %d are of different contexts", step.slot[0], step.slot[i]);
        }
        if (position < 0) {
            fail(SWARM_ERR_ARGUMENT, "position %d in row %d", position, i);
        }
        if (position >= slot.capacity) {
            fail(SWARM_ERR_FULL, "position %d is beyond the %d tokens of slot %d", position, slot.capacity,
                 step.slot[i]);
        }
        if (!starts_slot(step, i)) {
            if (position != step.position[i - 1] + 1) {
                fail(SWARM_ERR_ARGUMENT, "position %d follows %d in row %d", position, step.position[i - 1], i);
            }
            continue;
        }
        if (seen[step.slot[i]]) {
            fail(SWARM_ERR_ARGUMENT, "the rows of slot %d are not consecutive", step.slot[i]);
        }
        seen[step.slot[i]] = true;
        const int32_t held = slot.held_by(step.run_first - span_first, step.run_last - span_first);
        if (position > held) {
            fail(SWARM_ERR_GAP, "slot %d holds %d tokens, the step starts at %d", step.slot[i], held, position);
        }
    }
}

void swarm_engine::step_validate_values(const swarm_step & step, const float * hidden, const float * logits) const {
    if (step.token) {
        for (int32_t i = 0; i < step.n_rows; ++i) {
            if (step.token[i] < 0 || step.token[i] >= n_vocab) {
                fail(SWARM_ERR_ARGUMENT, "token %d is outside the vocabulary of %d", step.token[i], n_vocab);
            }
        }
    }
    if (step.hidden && !swarm::is_finite_f32(step.hidden, (size_t) step.n_rows * n_embd)) {
        fail(SWARM_ERR_ARGUMENT, "a hidden state is not finite");
    }
    if (is_exit_run(step) ? hidden != nullptr : hidden == nullptr || logits != nullptr) {
        fail(SWARM_ERR_ARGUMENT, "a run to layer %d of %d gives %s", step.run_last, n_layers,
             is_exit_run(step) ? "logits" : "hidden states");
    }
}

// Sets up what llama_decode reads besides the batch. The run range comes first: it may be refused.
void swarm_engine::step_prepare(const swarm_step & step, swarm::context & context) {
    llama_context * ctx = context.ctx.get();
    if (!llama_set_run_range(ctx, step.run_first, step.run_last)) {
        fail(SWARM_ERR_ARGUMENT, "this model can't run layers %d to %d on their own", step.run_first, step.run_last);
    }
    llama_set_tiled_mm(ctx, step.tiled);

    std::vector<int32_t> seq_id(step.n_rows);
    for (int32_t i = 0; i < step.n_rows; ++i) {
        seq_id[i] = slots[step.slot[i]].seq_id;
    }
    batch.fill(step, seq_id, n_embd, !is_exit_run(step));
    draft_prepare(step, context);
}

void swarm_engine::step_fetch_hidden(llama_context * ctx, const swarm_step & step, float * hidden) {
    for (int32_t i = 0; i < step.n_rows; ++i) {
        const float * row = llama_get_embeddings_ith(ctx, batch.index_of(i));
        if (!row) {
            fail(SWARM_ERR_COMPUTE, "no hidden state for row %d", i);
        }
        memcpy(hidden + (size_t) i * n_embd, row, n_embd * sizeof(float));
    }
    if (!swarm::is_finite_f32(hidden, (size_t) step.n_rows * n_embd)) {
        fail(SWARM_ERR_COMPUTE, "layers %d to %d gave a hidden state that is not finite", step.run_first,
             step.run_last);
    }
}

void swarm_engine::step_fetch_logits(llama_context * ctx, const swarm_step & step, float * logits) {
    for (int32_t i = 0; i < step.n_rows; ++i) {
        if (!step.want[i]) {
            continue;
        }
        const float * row = llama_get_logits_ith(ctx, batch.index_of(i));
        if (!row || !swarm::is_finite_f32(row, n_vocab)) {
            fail(SWARM_ERR_COMPUTE, "no finite logits for row %d", i);
        }
        swarm::slot & slot = slots[step.slot[i]];
        slot.row.assign(row, row + n_vocab);
        slot.row_position = step.position[i];
        if (logits) {
            memcpy(logits, row, n_vocab * sizeof(float));
            logits += n_vocab;
        }
    }
}

void swarm_engine::step_commit(const swarm_step & step) {
    for (int32_t i = 0; i < step.n_rows; ++i) {
        swarm::slot & slot = slots[step.slot[i]];
        slot.position = step.position[i] + 1;
        for (int32_t layer = step.run_first; layer < step.run_last; ++layer) {
            slot.held[layer - span_first] = slot.position;
        }
    }
}

// What a failed graph left in the KV cache is unknown, so the slots it touched start over.
void swarm_engine::step_failed(const swarm_step & step) {
    for (int32_t i = 0; i < step.n_rows; ++i) {
        slot_clear(slots[step.slot[i]]);
    }
}

void swarm_engine::step(const swarm_step & step, float * hidden, float * logits) {
    step_validate(step);
    step_validate_rows(step);
    step_validate_values(step, hidden, logits);

    swarm::context & context = contexts[slots[step.slot[0]].context];
    llama_context *  ctx     = context.ctx.get();
    step_prepare(step, context);
    try {
        for (int32_t i = 0; i < step.n_rows; ++i) {
            if (starts_slot(step, i)) {
                swarm::slot & slot = slots[step.slot[i]];
                slot.row_drop();
                slot_truncate(slot, step.position[i]);
            }
        }
        const int32_t status = llama_decode(ctx, batch.view());
        if (status != 0) {
            fail(SWARM_ERR_COMPUTE, "llama.cpp could not compute the step (status %d)", status);
        }
        if (is_exit_run(step)) {
            step_fetch_logits(ctx, step, logits);
        } else {
            step_fetch_hidden(ctx, step, hidden);
        }
    } catch (...) {
        step_failed(step);
        throw;
    }
    step_commit(step);
    draft_keep(step, context);
    context.n_outputs_max = std::max(context.n_outputs_max, batch.n_outputs());
}
