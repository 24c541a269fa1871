#pragma once

#include <mutex>
#include <string>

namespace swarm {

// Starts llama.cpp once per process and routes its log here; quiet until swarm_log_set().
void runtime_init();

// Keeps the error lines that llama.cpp logs while this object lives: its loader says why it failed nowhere else.
// Only one exists at a time; a second one waits.
class log_capture {
public:
    log_capture();
    ~log_capture();

    std::string text() const;

private:
    std::unique_lock<std::mutex> only;
};

} // namespace swarm
