#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace swarm {

// What the MTP block knows of a slot. Its row i takes token i and the trunk's hidden state of position i - 1. The
// trunk's newest rows are kept here: the block computes them many at once or when a draft is asked for, and a rollback
// finds the state before the row it goes back to.
struct draft_stream {
    int32_t position = 0; // rows that the block has computed
    int32_t first    = 0; // position of the first kept row

    std::vector<float>   states; // of the kept rows, after the output norm
    std::vector<int32_t> tokens;

    // the next row of the trunk that can be kept; the others leave a hole, and there are no drafts behind it
    int32_t end() const { return first + (int32_t) tokens.size(); }

    int32_t pending() const { return end() - position; }

    // the state of a position, nullptr when it is not kept
    const float * state(int32_t at, int32_t n_embd) const {
        return at < first || at >= end() ? nullptr : &states[(size_t) (at - first) * n_embd];
    }

    void append(int32_t token, const float * state, int32_t n_embd) {
        tokens.push_back(token);
        states.insert(states.end(), state, state + n_embd);
    }

    // forgets what is kept of [at, ...)
    void cut(int32_t at, int32_t n_embd) {
        if (at < end()) {
            first = std::min(first, at);
            tokens.resize(at - first);
            states.resize((size_t) (at - first) * n_embd);
        }
        position = std::min(position, at);
    }

    // holds the rows [0, at), of which none is kept
    void restart(int32_t at) {
        position = first = at;
        tokens.clear();
        states.clear();
    }

    // keeps the newest n rows
    void trim(int32_t n, int32_t n_embd) {
        const int32_t n_old = std::max(0, (int32_t) tokens.size() - n);
        tokens.erase(tokens.begin(), tokens.begin() + n_old);
        states.erase(states.begin(), states.begin() + (size_t) n_old * n_embd);
        states.shrink_to_fit();
        first += n_old;
    }
};

} // namespace swarm
