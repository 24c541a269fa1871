// Opening an engine: parameters are checked, the span is loaded, contexts and slots are made.
#include "engine.h"
#include "error.h"

#include "llama-ext.h"
#include "llama-model.h"

#include <algorithm>
#include <set>
#include <string>

using swarm::fail;

namespace {

constexpr int32_t k_max_slots_per_context = 256;     // LLAMA_MAX_SEQ
constexpr int32_t k_max_slot_tokens       = 131072;  // upstream's flash attention gives NaN beyond (issue 23574)
constexpr int32_t k_cell_padding          = 256;     // llama.cpp rounds a stream up to this many cells

void params_validate(const swarm_engine_params & params) {
    if (!params.model_path) {
        fail(SWARM_ERR_ARGUMENT, "the model path is missing");
    }
    if (params.span_first < 0 || (params.span_last != -1 && params.span_last <= params.span_first)) {
        fail(SWARM_ERR_ARGUMENT, "layers %d to %d are no span", params.span_first, params.span_last);
    }
    if (params.n_contexts < 1 || !params.contexts) {
        fail(SWARM_ERR_ARGUMENT, "an engine needs at least one context");
    }
    for (int32_t i = 0; i < params.n_contexts; ++i) {
        const swarm_context_spec & spec = params.contexts[i];
        if (spec.n_slots < 1 || spec.n_slots > k_max_slots_per_context) {
            fail(SWARM_ERR_ARGUMENT, "a context has 1 to %d slots, not %d", k_max_slots_per_context, spec.n_slots);
        }
        if (spec.n_tokens < 1) {
            fail(SWARM_ERR_ARGUMENT, "a slot has 1 to %d tokens, not %d", k_max_slot_tokens, spec.n_tokens);
        }
        if (spec.n_tokens > k_max_slot_tokens) {
            fail(SWARM_ERR_UNSUPPORTED, "a slot has at most %d tokens, not %d: llama.cpp's flash attention gives NaN "
                 "beyond that", k_max_slot_tokens, spec.n_tokens);
        }
    }
    if (params.n_threads < 1 || params.n_threads > GGML_MAX_N_THREADS) {
        fail(SWARM_ERR_ARGUMENT, "1 to %d threads, not %d", GGML_MAX_N_THREADS, params.n_threads);
    }
    if (params.chunk_tokens < 1 || params.chunk_tokens > k_max_slot_tokens) {
        fail(SWARM_ERR_ARGUMENT, "a chunk has 1 to %d tokens, not %d", k_max_slot_tokens, params.chunk_tokens);
    }
    if (params.wanted_rows < 1 || params.wanted_rows > params.chunk_tokens) {
        fail(SWARM_ERR_ARGUMENT, "1 to %d wanted rows, not %d", params.chunk_tokens, params.wanted_rows);
    }
    if (params.kv_type != GGML_TYPE_F32 && params.kv_type != GGML_TYPE_F16 && params.kv_type != GGML_TYPE_Q8_0) {
        fail(SWARM_ERR_ARGUMENT, "the KV type is F32, F16 or Q8_0, not ggml type %d", params.kv_type);
    }
}

struct load_progress {
    swarm_progress_fn fn;
    void *            user;
    bool              cancelled = false;
};

bool on_progress(float fraction, void * user) {
    load_progress & progress = *(load_progress *) user;
    progress.cancelled = !progress.fn(fraction, progress.user);
    return !progress.cancelled;
}

swarm::model_ptr span_load(const swarm_engine_params & params) {
    load_progress progress = { params.progress, params.progress_user };

    llama_model_params model_params = llama_model_default_params();
    model_params.span_first      = params.span_first;
    model_params.span_last       = params.span_last;
    model_params.load_mode       = params.lock_weights ? LLAMA_LOAD_MODE_MMAP_MLOCK : LLAMA_LOAD_MODE_MMAP;
    model_params.load_mtp        = params.load_mtp;
    model_params.n_gpu_layers    = llama_supports_gpu_offload() ? -1 : 0;
    // repacked copies would double the memory, and crash on CPUs with AMX (upstream PR 26954)
    model_params.use_extra_bufts = false;
    if (params.progress) {
        model_params.progress_callback           = on_progress;
        model_params.progress_callback_user_data = &progress;
    }
    try {
        return swarm::model_load(params.model_path, model_params);
    } catch (const swarm::error &) {
        if (progress.cancelled) {
            fail(SWARM_ERR_CANCELLED, "loading %s was cancelled", params.model_path);
        }
        throw;
    }
}

// What the MTP graph takes for granted, it aborts without.
void mtp_check(const llama_model * model, int32_t n_layers) {
    const std::string block = "blk." + std::to_string(n_layers) + ".";
    std::set<std::string> names;
    for (const auto & [name, tensor] : llama_internal_get_tensor_map(model)) {
        names.insert(name);
    }
    if (model->arch != LLM_ARCH_GLM_DSA || llama_model_n_layer_nextn(model) != 1 ||
        !names.count(block + "nextn.eh_proj.weight") || !names.count(block + "ffn_gate_inp.weight")) {
        fail(SWARM_ERR_UNSUPPORTED, "the model has no MTP block that can draft; load it without");
    }
}

llama_context_params context_params(const swarm_engine_params & params, const swarm_context_spec & spec) {
    llama_context_params result = llama_context_default_params();
    result.n_seq_max       = spec.n_slots;
    result.n_ctx           = spec.n_slots * (uint32_t) GGML_PAD(spec.n_tokens, k_cell_padding);
    result.n_batch         = std::max(params.chunk_tokens, spec.n_slots);
    result.n_ubatch        = result.n_batch; // a chunk is one graph, never cut again
    result.n_outputs_max   = std::max(params.wanted_rows, spec.n_slots); // the graph's room for logits
    result.n_threads       = params.n_threads;
    result.n_threads_batch = params.n_threads;
    result.type_k          = (ggml_type) params.kv_type;
    result.type_v          = (ggml_type) params.kv_type;
    result.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    result.kv_unified      = false; // one KV stream per slot
    result.no_perf         = true;
    return result;
}

// The MTP block's context: the same slots, and the logits of one draft at a time.
swarm::context_ptr mtp_init(const swarm_engine & engine, const swarm_engine_params & params,
                            const swarm_context_spec & spec) {
    llama_context_params mtp_params = context_params(params, spec);
    mtp_params.ctx_type      = LLAMA_CONTEXT_TYPE_MTP;
    mtp_params.n_outputs_max = spec.n_slots;
    swarm::context_ptr result = swarm::context_init(engine.model.get(), mtp_params);
    llama_set_embeddings_nextn(result.get(), true, /*masked=*/ true);
    return result;
}

void contexts_init(swarm_engine & engine, const swarm_engine_params & params) {
    for (int32_t i = 0; i < params.n_contexts; ++i) {
        const swarm_context_spec & spec = params.contexts[i];
        swarm::context context;
        context.ctx           = swarm::context_init(engine.model.get(), context_params(params, spec));
        context.spec          = spec;
        context.first_slot    = (int32_t) engine.slots.size();
        context.n_outputs_max = spec.n_slots;
        if (engine.n_mtp > 0) {
            context.mtp = mtp_init(engine, params, spec);
        }
        for (llama_context * ctx : { context.ctx.get(), context.mtp.get() }) {
            if (ctx && engine.threads) {
                llama_attach_threadpool(ctx, engine.threads.get(), nullptr);
            }
        }
        for (int32_t s = 0; s < spec.n_slots; ++s) {
            swarm::slot slot;
            slot.context  = i;
            slot.seq_id   = s;
            slot.capacity = spec.n_tokens;
            slot.held.resize(engine.span_last - engine.span_first);
            engine.slots.push_back(std::move(slot));
        }
        engine.contexts.push_back(std::move(context));
    }
}

// Without a pool every graph starts and joins its threads. No polling: the nodes of one machine share its cores.
void threads_init(swarm_engine & engine, int32_t n_threads) {
    if (n_threads < 2) {
        return;
    }
    ggml_threadpool_params params = ggml_threadpool_params_default(n_threads);
    params.poll = 0;
    engine.threads.reset(ggml_threadpool_new(&params));
    if (!engine.threads) {
        fail(SWARM_ERR_MEMORY, "could not start %d threads", n_threads);
    }
}

uint64_t weights_bytes(const llama_model * model) {
    uint64_t bytes = 0;
    std::set<const void *> seen; // a tied output shares the embedding's bytes
    for (const auto & [name, tensor] : llama_internal_get_tensor_map(model)) {
        if (tensor && seen.insert(tensor->data).second) {
            bytes += ggml_nbytes(tensor);
        }
    }
    return bytes;
}

void info_init(swarm_engine & engine) {
    const llama_model * model = engine.model.get();
    swarm_engine_info & info  = engine.info;
    llama_model_meta_val_str(model, "general.architecture", info.arch, sizeof(info.arch));
    info.n_layers    = engine.n_layers;
    info.n_embd      = engine.n_embd;
    info.n_vocab     = engine.n_vocab;
    info.n_ctx_train = llama_model_n_ctx_train(model);
    info.span_first  = engine.span_first;
    info.span_last   = engine.span_last;
    info.n_slots     = (int32_t) engine.slots.size();
    info.n_mtp       = engine.n_mtp;
    info.weights_bytes = weights_bytes(model);
}

} // namespace

int32_t swarm_engine_init(const swarm_engine_params * params, swarm_engine ** out) {
    return swarm::guarded([&] {
        if (!params || !out) {
            fail(SWARM_ERR_ARGUMENT, "parameters or result are missing");
        }
        if (const char * missing = swarm_cpu_missing()) {
            fail(SWARM_ERR_UNSUPPORTED, "this CPU lacks %s", missing);
        }
        params_validate(*params);

        auto engine = std::make_unique<swarm_engine>();
        engine->model        = span_load(*params);
        engine->n_layers     = llama_model_n_layer(engine->model.get());
        engine->n_embd       = llama_model_n_embd_inp(engine->model.get());
        engine->n_vocab      = llama_vocab_n_tokens(llama_model_get_vocab(engine->model.get()));
        engine->span_first   = params->span_first;
        engine->span_last    = params->span_last == -1 ? engine->n_layers : params->span_last;
        engine->chunk_tokens = params->chunk_tokens;
        if (engine->span_last > engine->n_layers || engine->span_first >= engine->n_layers) {
            fail(SWARM_ERR_ARGUMENT, "layers %d to %d of a model with %d", engine->span_first, engine->span_last,
                 engine->n_layers);
        }
        engine->wanted_rows = params->wanted_rows;
        if (params->load_mtp && engine->span_last == engine->n_layers) {
            mtp_check(engine->model.get(), engine->n_layers);
            engine->n_mtp = 1;
        }
        threads_init(*engine, params->n_threads);
        contexts_init(*engine, *params);
        info_init(*engine);
        *out = engine.release();
    });
}
