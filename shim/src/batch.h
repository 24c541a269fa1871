#pragma once

#include "llama.h"
#include "swarm_shim.h"

#include <cstdint>
#include <vector>

namespace swarm {

// The rows of a step as llama.cpp takes them: blocks of one slot, ordered by sequence id. It computes neighbouring
// sequences in one go only in ascending order (llama_batch_allocr::split_equal), any other order runs them one by one.
class batch {
public:
    // seq_id[i] is the sequence of row i; rows of one sequence are consecutive
    void fill(const swarm_step & step, const std::vector<int32_t> & seq_id, int32_t n_embd, bool all_outputs);

    llama_batch view();

    int32_t n_outputs() const;

    // where row i of the step stands in the batch
    int32_t index_of(int32_t row) const { return index[row]; }

private:
    std::vector<int32_t>        index; // step row -> batch row
    std::vector<llama_token>    token;
    std::vector<float>          embd;
    std::vector<llama_pos>      pos;
    std::vector<int32_t>        n_seq_id;
    std::vector<llama_seq_id>   seq;
    std::vector<llama_seq_id *> seq_ptr;
    std::vector<int8_t>         output;
};

} // namespace swarm
