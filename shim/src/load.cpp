// Loading with a reason: files are checked first, and llama.cpp's log is read for the rest.
#include "load.h"

#include "error.h"
#include "log.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>

namespace swarm {

static void check_gguf(const char * path) {
    std::unique_ptr<FILE, int (*)(FILE *)> file(fopen(path, "rb"), fclose);
    if (!file) {
        fail(SWARM_ERR_MODEL, "can't open %s: %s", path, strerror(errno));
    }
    char magic[4] = { 0 };
    if (fread(magic, 1, sizeof(magic), file.get()) != sizeof(magic) || memcmp(magic, "GGUF", 4) != 0) {
        fail(SWARM_ERR_MODEL, "%s is not a GGUF file", path);
    }
}

static bool has(const std::string & text, const char * part) {
    return text.find(part) != std::string::npos;
}

// "llama_model_load: error loading model: tensor ..." -> "tensor ..."
static std::string without_prefixes(std::string line) {
    for (const char * prefix : { "error loading model: ", "error loading model hyperparameters: ",
                                 "failed to initialize the context: " }) {
        const size_t at = line.find(prefix);
        if (at != std::string::npos) {
            line = line.substr(at + strlen(prefix));
        }
    }
    return line;
}

// the most telling line of what llama.cpp logged: the one that names the cause, else the first
static std::string cause_of(const std::string & log) {
    std::string first;
    for (size_t begin = 0; begin < log.size();) {
        const size_t end  = std::min(log.find('\n', begin), log.size());
        const std::string line = log.substr(begin, end - begin);
        if (has(line, "error loading model: ") || has(line, "failed to initialize the context: ")) {
            return without_prefixes(line);
        }
        if (first.empty()) {
            first = line;
        }
        begin = end + 1;
    }
    return first.empty() ? "llama.cpp gave no reason" : first;
}

static swarm_status status_of(const std::string & log, swarm_status otherwise) {
    if (has(log, "invalid span [")) {
        return SWARM_ERR_ARGUMENT;
    }
    if (has(log, "unsupported span [") || has(log, "unknown model architecture") || has(log, "does not support") ||
        has(log, "cache type")) {
        return SWARM_ERR_UNSUPPORTED;
    }
    if (has(log, "failed to allocate") || has(log, "unable to allocate") || has(log, "bad_alloc") ||
        has(log, "mmap failed") || has(log, "out of memory")) {
        return SWARM_ERR_MEMORY;
    }
    return otherwise;
}

model_ptr model_load(const char * path, llama_model_params params) {
    runtime_init();
    check_gguf(path);
    const log_capture capture;
    model_ptr model(llama_model_load_from_file(path, params));
    if (!model) {
        const std::string log = capture.text();
        fail(status_of(log, SWARM_ERR_MODEL), "%s", cause_of(log).c_str());
    }
    return model;
}

context_ptr context_init(llama_model * model, const llama_context_params & params) {
    const log_capture capture;
    context_ptr context(llama_init_from_model(model, params));
    if (!context) {
        const std::string log = capture.text();
        fail(status_of(log, SWARM_ERR_MEMORY), "%s", cause_of(log).c_str());
    }
    return context;
}

} // namespace swarm
