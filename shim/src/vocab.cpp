// Vocabulary, special tokens and template text of a GGUF, loaded without any tensor.
#include "error.h"
#include "load.h"
#include "log.h"

#include "llama.h"

#include <algorithm>
#include <memory>
#include <vector>

struct swarm_vocab {
    swarm::model_ptr    model;
    const llama_vocab * vocab;
    int32_t             n_tokens;

    bool has(int32_t token) const { return token >= 0 && token < n_tokens; }
};

int32_t swarm_vocab_init(const char * path, swarm_vocab ** out) {
    return swarm::guarded([&] {
        if (!path || !out) {
            swarm::fail(SWARM_ERR_ARGUMENT, "path or result is missing");
        }
        llama_model_params params = llama_model_default_params();
        params.vocab_only   = true;
        params.n_gpu_layers = 0;
        auto result = std::make_unique<swarm_vocab>();
        result->model    = swarm::model_load(path, params);
        result->vocab    = llama_model_get_vocab(result->model.get());
        result->n_tokens = llama_vocab_n_tokens(result->vocab);
        if (llama_vocab_type(result->vocab) == LLAMA_VOCAB_TYPE_NONE) {
            swarm::fail(SWARM_ERR_MODEL, "%s has no tokenizer", path);
        }
        *out = result.release();
    });
}

void swarm_vocab_free(swarm_vocab * vocab) {
    delete vocab;
}

int32_t swarm_vocab_size(const swarm_vocab * vocab) {
    return vocab->n_tokens;
}

int32_t swarm_vocab_bos(const swarm_vocab * vocab) {
    return llama_vocab_bos(vocab->vocab);
}

int32_t swarm_vocab_eos(const swarm_vocab * vocab) {
    return llama_vocab_eos(vocab->vocab);
}

bool swarm_vocab_adds_bos(const swarm_vocab * vocab) {
    return llama_vocab_get_add_bos(vocab->vocab);
}

bool swarm_vocab_is_stop(const swarm_vocab * vocab, int32_t token) {
    return vocab->has(token) && llama_vocab_is_eog(vocab->vocab, token);
}

bool swarm_vocab_is_control(const swarm_vocab * vocab, int32_t token) {
    return vocab->has(token) && llama_vocab_is_control(vocab->vocab, token);
}

int32_t swarm_vocab_encode(const swarm_vocab * vocab, const char * text, int32_t n_bytes, bool add_bos,
                           bool parse_special, int32_t * tokens, int32_t * n_tokens) {
    return swarm::guarded([&] {
        if (!vocab || !n_tokens || n_bytes < 0 || (!text && n_bytes > 0) || (!tokens && *n_tokens > 0)) {
            swarm::fail(SWARM_ERR_ARGUMENT, "text or result is missing");
        }
        const int32_t bos = add_bos ? llama_vocab_bos(vocab->vocab) : -1;
        // a token takes at least one byte of text, but a tokenizer may put a space in front
        std::vector<llama_token> found((size_t) n_bytes + 8);
        const int32_t n = llama_tokenize(vocab->vocab, text, n_bytes, found.data(), (int32_t) found.size(),
                                         /*add_special=*/ false, parse_special);
        if (n < 0) {
            swarm::fail(SWARM_ERR_ARGUMENT, "a text of %d bytes can't be tokenized", n_bytes);
        }
        found.resize(n);
        if (bos >= 0) {
            found.insert(found.begin(), bos);
        }
        const int32_t capacity = *n_tokens;
        *n_tokens = (int32_t) found.size();
        if (capacity < *n_tokens) {
            swarm::fail(SWARM_ERR_FULL, "%d tokens don't fit in %d", *n_tokens, capacity);
        }
        std::copy(found.begin(), found.end(), tokens);
    });
}

int32_t swarm_vocab_piece(const swarm_vocab * vocab, int32_t token, bool special, char * bytes, int32_t * n_bytes) {
    return swarm::guarded([&] {
        if (!vocab || !n_bytes || (!bytes && *n_bytes > 0)) {
            swarm::fail(SWARM_ERR_ARGUMENT, "result is missing");
        }
        if (!vocab->has(token)) {
            swarm::fail(SWARM_ERR_ARGUMENT, "token %d is outside the vocabulary of %d", token, vocab->n_tokens);
        }
        const int32_t capacity = *n_bytes;
        const int32_t n = llama_token_to_piece(vocab->vocab, token, bytes, capacity, 0, special);
        *n_bytes = n < 0 ? -n : n;
        if (n < 0) {
            swarm::fail(SWARM_ERR_FULL, "%d bytes don't fit in %d", *n_bytes, capacity);
        }
    });
}

const char * swarm_vocab_template(const swarm_vocab * vocab) {
    return llama_model_chat_template(vocab->model.get(), nullptr);
}
