#pragma once

#include "llama.h"

#include <memory>

namespace swarm {

struct model_deleter {
    void operator()(llama_model * model) const { llama_model_free(model); }
};
struct context_deleter {
    void operator()(llama_context * context) const { llama_free(context); }
};
using model_ptr   = std::unique_ptr<llama_model, model_deleter>;
using context_ptr = std::unique_ptr<llama_context, context_deleter>;

// Both throw an error that says why; llama.cpp itself only logs it.
model_ptr   model_load(const char * path, llama_model_params params);
context_ptr context_init(llama_model * model, const llama_context_params & params);

} // namespace swarm
