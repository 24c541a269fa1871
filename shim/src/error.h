#pragma once

#include "swarm_shim.h"

#include <exception>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

namespace swarm {

// A failure with the status the caller gets.
class error : public std::runtime_error {
public:
    error(swarm_status status, const std::string & text) : std::runtime_error(text), status(status) {}

    const swarm_status status;
};

// printf-style text of an error
[[noreturn]] void fail(swarm_status status, const char * format, ...) __attribute__((format(printf, 2, 3)));

void        last_error_set(const std::string & text);
const char * last_error_get();

// Runs fn and turns whatever it throws into a status and swarm_last_error(): no exception crosses the ABI.
template <typename F> int32_t guarded(F && fn) noexcept {
    try {
        std::forward<F>(fn)();
        return SWARM_OK;
    } catch (const error & e) {
        last_error_set(e.what());
        return e.status;
    } catch (const std::bad_alloc &) {
        last_error_set("out of memory");
        return SWARM_ERR_MEMORY;
    } catch (const std::exception & e) {
        last_error_set(e.what());
        return SWARM_ERR_COMPUTE;
    } catch (...) {
        last_error_set("unknown error");
        return SWARM_ERR_COMPUTE;
    }
}

} // namespace swarm
