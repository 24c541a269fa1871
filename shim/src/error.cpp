#include "error.h"

#include <cstdarg>
#include <cstdio>

namespace swarm {

static std::string & last_error() {
    thread_local std::string text;
    return text;
}

void fail(swarm_status status, const char * format, ...) {
    char text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    throw error(status, text);
}

void last_error_set(const std::string & text) {
    last_error() = text;
}

const char * last_error_get() {
    return last_error().c_str();
}

} // namespace swarm

const char * swarm_last_error(void) {
    return swarm::last_error_get();
}
