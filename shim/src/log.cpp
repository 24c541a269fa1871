#include "log.h"

#include "llama.h"
#include "swarm_shim.h"

namespace swarm {

struct log_state {
    std::mutex     mutex;
    swarm_log_fn   fn   = nullptr;
    void *         user = nullptr;
    ggml_log_level last = GGML_LOG_LEVEL_NONE; // continued lines have the level of the line before

    bool        capturing = false;
    std::string captured;
};

static log_state & state() {
    static log_state instance;
    return instance;
}

static std::mutex & capture_mutex() {
    static std::mutex instance;
    return instance;
}

static void log_line(ggml_log_level level, const char * text, void *) {
    log_state &  log  = state();
    swarm_log_fn fn   = nullptr;
    void *       user = nullptr;
    {
        std::lock_guard<std::mutex> lock(log.mutex);
        if (level == GGML_LOG_LEVEL_CONT) {
            level = log.last;
        }
        log.last = level;
        if (log.capturing && level == GGML_LOG_LEVEL_ERROR) {
            log.captured += text;
        }
        fn   = log.fn;
        user = log.user;
    }
    if (fn) {
        fn(level, text, user);
    }
}

void runtime_init() {
    static std::once_flag once;
    std::call_once(once, [] {
        llama_log_set(log_line, nullptr);
        llama_backend_init();
    });
}

log_capture::log_capture() : only(capture_mutex()) {
    std::lock_guard<std::mutex> lock(state().mutex);
    state().capturing = true;
    state().captured.clear();
}

log_capture::~log_capture() {
    std::lock_guard<std::mutex> lock(state().mutex);
    state().capturing = false;
}

std::string log_capture::text() const {
    std::lock_guard<std::mutex> lock(state().mutex);
    return state().captured;
}

} // namespace swarm

void swarm_log_set(swarm_log_fn fn, void * user) {
    swarm::runtime_init();
    std::lock_guard<std::mutex> lock(swarm::state().mutex);
    swarm::state().fn   = fn;
    swarm::state().user = user;
}
