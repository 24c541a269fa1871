// An engine: one model span, its contexts and their slots.
#include "engine.h"

#include "error.h"

#include "llama-ext.h"

#include <algorithm>
#include <cstring>

using swarm::fail;

namespace {

// host buffers of llama.cpp for one context, and the rows this engine keeps
uint64_t output_bytes(const swarm_engine & engine) {
    const bool exits = engine.span_last == engine.n_layers;
    uint64_t floats = 0;
    for (const swarm::context & context : engine.contexts) {
        floats += (uint64_t) context.n_outputs_max * (exits ? engine.n_vocab : engine.n_embd);
        if (context.mtp) { // the trunk's states of a whole step, and the block's own rows
            floats += (uint64_t) llama_n_batch(context.ctx.get()) * engine.n_embd;
            floats += (uint64_t) context.spec.n_slots * (engine.n_vocab + engine.n_embd);
        }
    }
    for (const swarm::slot & slot : engine.slots) {
        floats += slot.row.capacity() + slot.draft.states.capacity();
    }
    return floats * sizeof(float);
}

void breakdown_update(const swarm_engine & engine, swarm_engine_info & info) {
    info.kv_bytes      = 0;
    info.compute_bytes = 0;
    for (const swarm::context & context : engine.contexts) {
        for (const llama_context * ctx : { context.ctx.get(), context.mtp.get() }) {
            if (!ctx) {
                continue;
            }
            for (const auto & [type, bytes] : llama_get_memory_breakdown(ctx)) {
                info.kv_bytes      += bytes.context;
                info.compute_bytes += bytes.compute;
            }
        }
    }
    info.output_bytes = output_bytes(engine);
}

} // namespace

swarm::slot & swarm_engine::slot_at(int32_t slot) {
    if (slot < 0 || slot >= (int32_t) slots.size()) {
        fail(SWARM_ERR_ARGUMENT, "slot %d of %zu", slot, slots.size());
    }
    return slots[slot];
}

const swarm::slot & swarm_engine::slot_at(int32_t slot) const {
    return const_cast<swarm_engine *>(this)->slot_at(slot);
}

void swarm_engine::slot_truncate(swarm::slot & slot, int32_t position) {
    draft_cut(slot, position);
    if (position >= slot.position) {
        return;
    }
    llama_memory_t memory = llama_get_memory(contexts[slot.context].ctx.get());
    if (!llama_memory_seq_rm(memory, slot.seq_id, position, -1)) {
        slot_clear(slot);
        fail(SWARM_ERR_COMPUTE, "the KV cache can't be cut at %d; the slot is empty now", position);
    }
    slot.position = position;
    for (int32_t & held : slot.held) {
        held = std::min(held, position);
    }
    if (slot.row_position >= position) {
        slot.row_drop();
    }
}

void swarm_engine::slot_clear(swarm::slot & slot) {
    draft_clear(slot);
    // dropping a whole sequence never fails
    llama_memory_seq_rm(llama_get_memory(contexts[slot.context].ctx.get()), slot.seq_id, -1, -1);
    slot.position = 0;
    std::fill(slot.held.begin(), slot.held.end(), 0);
    slot.row_drop();
}

void swarm_engine_free(swarm_engine * engine) {
    delete engine;
}

int32_t swarm_engine_info_get(const swarm_engine * engine, swarm_engine_info * out) {
    return swarm::guarded([&] {
        if (!engine || !out) {
            fail(SWARM_ERR_ARGUMENT, "engine or result is missing");
        }
        *out = engine->info;
        breakdown_update(*engine, *out);
    });
}

int32_t swarm_engine_step(swarm_engine * engine, const swarm_step * step, float * hidden, float * logits) {
    return swarm::guarded([&] {
        if (!engine || !step) {
            fail(SWARM_ERR_ARGUMENT, "engine or step is missing");
        }
        engine->step(*step, hidden, logits);
    });
}

int32_t swarm_engine_row(const swarm_engine * engine, int32_t slot, float * logits) {
    return swarm::guarded([&] {
        if (!engine || !logits) {
            fail(SWARM_ERR_ARGUMENT, "engine or result is missing");
        }
        const std::vector<float> & row = engine->slot_at(slot).row;
        if (row.empty()) {
            fail(SWARM_ERR_ARGUMENT, "slot %d keeps no row", slot);
        }
        memcpy(logits, row.data(), row.size() * sizeof(float));
    });
}

int32_t swarm_engine_position(const swarm_engine * engine, int32_t slot, int32_t * out) {
    return swarm::guarded([&] {
        if (!engine || !out) {
            fail(SWARM_ERR_ARGUMENT, "engine or result is missing");
        }
        *out = engine->slot_at(slot).position;
    });
}

int32_t swarm_engine_truncate(swarm_engine * engine, int32_t slot, int32_t position) {
    return swarm::guarded([&] {
        if (!engine || position < 0) {
            fail(SWARM_ERR_ARGUMENT, "engine is missing or position %d is negative", position);
        }
        engine->slot_truncate(engine->slot_at(slot), position);
    });
}

int32_t swarm_engine_capacity(const swarm_engine * engine, int32_t slot, int32_t * out) {
    return swarm::guarded([&] {
        if (!engine || !out) {
            fail(SWARM_ERR_ARGUMENT, "engine or result is missing");
        }
        *out = engine->slot_at(slot).capacity;
    });
}
