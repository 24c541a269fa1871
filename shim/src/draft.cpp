// Drafts of the MTP block: guesses at the tokens to come. They run in a context of their own on the same weights, so
// nothing here changes a bit of the trunk; what fails here costs drafts, never the step.
#include "draft.h"

#include "engine.h"
#include "error.h"
#include "finite.h"

#include "llama-ext.h"

#include <algorithm>

using swarm::fail;

namespace {

// 32 rows at once read a third of the weights that they read one by one (256 experts, 8 used): cheaper for a session
// that wants no drafts. One that does waits for fewer rows than these.
constexpr int32_t k_pending_rows = 32;
// a rollback of this many rows finds the state it goes on from
constexpr int32_t k_kept_rows = 128;

int32_t argmax(const float * values, int32_t n) {
    return (int32_t) (std::max_element(values, values + n) - values);
}

} // namespace

void swarm_engine::draft_clear(swarm::slot & slot) {
    if (llama_context * mtp = contexts[slot.context].mtp.get()) {
        llama_memory_seq_rm(llama_get_memory(mtp), slot.seq_id, -1, -1);
        slot.draft.restart(0);
    }
}

void swarm_engine::draft_cut(swarm::slot & slot, int32_t position) {
    llama_context * mtp = contexts[slot.context].mtp.get();
    if (!mtp) {
        return;
    }
    if (position < slot.draft.position && !llama_memory_seq_rm(llama_get_memory(mtp), slot.seq_id, position, -1)) {
        draft_clear(slot);
    }
    slot.draft.cut(position, n_embd);
}

// Runs rows of the block from position on; true when it worked.
bool swarm_engine::draft_run(const swarm::slot & slot, int32_t position, std::vector<int32_t> tokens,
                             std::vector<float> states, bool output) {
    const int32_t n      = (int32_t) tokens.size();
    llama_seq_id  seq_id = slot.seq_id;
    std::vector<llama_pos>      pos(n);
    std::vector<int32_t>        n_seq_id(n, 1);
    std::vector<llama_seq_id *> seq_ids(n, &seq_id);
    std::vector<int8_t>         outputs(n, 0);
    for (int32_t i = 0; i < n; ++i) {
        pos[i] = position + i;
    }
    outputs.back() = output;

    llama_batch rows = {};
    rows.n_tokens = n;
    rows.token    = tokens.data();
    rows.embd     = states.data();
    rows.pos      = pos.data();
    rows.n_seq_id = n_seq_id.data();
    rows.seq_id   = seq_ids.data();
    rows.logits   = outputs.data();
    return llama_decode(contexts[slot.context].mtp.get(), rows) == 0;
}

// Computes the kept rows below position. Where the state before a row is not kept, zeros stand for it, as they do at
// position 0: that may cost a draft or two.
bool swarm_engine::draft_catch_up(swarm::slot & slot, int32_t position) {
    swarm::draft_stream & stream = slot.draft;
    while (stream.position < position) {
        const int32_t n = std::min(position - stream.position, chunk_tokens);
        const auto first_token = stream.tokens.begin() + (stream.position - stream.first);
        std::vector<int32_t> tokens(first_token, first_token + n);
        std::vector<float>   states((size_t) n * n_embd);
        for (int32_t i = 0; i < n; ++i) {
            if (const float * state = stream.state(stream.position + i - 1, n_embd)) {
                std::copy(state, state + n_embd, states.begin() + (size_t) i * n_embd);
            }
        }
        if (!draft_run(slot, stream.position, std::move(tokens), std::move(states), false)) {
            draft_clear(slot);
            return false;
        }
        stream.position += n;
    }
    return true;
}

void swarm_engine::draft_prepare(const swarm_step & step, swarm::context & context) {
    if (context.mtp) {
        const bool wanted = step.token && is_exit_run(step);
        // states of all rows: those of the output rows when these are all, which costs nothing
        const bool all_outputs = batch.n_outputs() == step.n_rows;
        llama_set_embeddings_nextn(context.ctx.get(), wanted, /*masked=*/ all_outputs);
    }
}

// Keeps the states of a step that was computed.
void swarm_engine::draft_keep(const swarm_step & step, const swarm::context & context) noexcept {
    if (!context.mtp || !step.token || !is_exit_run(step)) {
        return;
    }
    for (int32_t i = 0; i < step.n_rows; ++i) {
        swarm::slot & slot = slots[step.slot[i]];
        try {
            const float * state = llama_get_embeddings_nextn_ith(context.ctx.get(), batch.index_of(i));
            if (step.position[i] == slot.draft.end() && state && swarm::is_finite_f32(state, n_embd)) {
                slot.draft.append(step.token[i], state, n_embd);
            }
            const bool last = i + 1 == step.n_rows || step.slot[i + 1] != step.slot[i];
            if (last && slot.draft.pending() >= k_pending_rows && draft_catch_up(slot, slot.draft.end())) {
                slot.draft.trim(k_kept_rows, n_embd);
            }
        } catch (...) { // out of memory
            draft_clear(slot);
        }
    }
}

std::vector<int32_t> swarm_engine::draft(int32_t slot_id, int32_t n) {
    swarm::slot &         slot   = slot_at(slot_id);
    swarm::draft_stream & stream = slot.draft;
    llama_context *       mtp    = contexts[slot.context].mtp.get();
    if (!mtp) {
        fail(SWARM_ERR_UNSUPPORTED, "no MTP block is loaded");
    }
    const int32_t start = slot.row_position + 1; // of the token that the kept row predicts
    const float * before = stream.state(slot.row_position, n_embd);
    if (slot.row.empty() || !before) {
        return {};
    }
    std::vector<float> state(before, before + n_embd);
    if (stream.position > start) {
        llama_memory_seq_rm(llama_get_memory(mtp), slot.seq_id, start, -1);
        stream.position = start;
    }
    if (!draft_catch_up(slot, start)) {
        return {};
    }
    std::vector<int32_t> ids;
    int32_t token = argmax(slot.row.data(), n_vocab);
    while ((int32_t) ids.size() < n && start + (int32_t) ids.size() < slot.capacity) {
        if (!draft_run(slot, start + (int32_t) ids.size(), { token }, state, true)) {
            draft_clear(slot);
            return ids;
        }
        const float * logits = llama_get_logits_ith(mtp, 0);
        const float * next   = llama_get_embeddings_nextn_ith(mtp, 0);
        if (!logits || !next || !swarm::is_finite_f32(logits, n_vocab) || !swarm::is_finite_f32(next, n_embd)) {
            break;
        }
        token = argmax(logits, n_vocab);
        state.assign(next, next + n_embd);
        ids.push_back(token);
    }
    llama_memory_seq_rm(llama_get_memory(mtp), slot.seq_id, start, -1);
    return ids;
}

int32_t swarm_engine_draft(swarm_engine * engine, int32_t slot, int32_t * ids, int32_t * n_ids) {
    return swarm::guarded([&] {
        if (!engine || !n_ids || *n_ids < 0 || (!ids && *n_ids > 0)) {
            fail(SWARM_ERR_ARGUMENT, "engine or result is missing");
        }
        const std::vector<int32_t> found = engine->draft(slot, *n_ids);
        std::copy(found.begin(), found.end(), ids);
        *n_ids = (int32_t) found.size();
    });
}
