#include "batch.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace swarm {

void batch::fill(const swarm_step & step, const std::vector<int32_t> & seq_id, int32_t n_embd, bool all_outputs) {
    const int32_t n = step.n_rows;

    std::vector<int32_t> order(n); // batch row -> step row
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return seq_id[a] < seq_id[b]; });

    index.resize(n);
    pos.resize(n);
    n_seq_id.assign(n, 1);
    seq.resize(n);
    seq_ptr.resize(n);
    output.resize(n);
    token.resize(step.hidden ? 0 : n); // the MTP block's tokens may lie beside hidden states
    embd.resize(step.hidden ? (size_t) n * n_embd : 0);

    for (int32_t i = 0; i < n; ++i) {
        const int32_t row = order[i];
        index[row] = i;
        pos[i]     = step.position[row];
        seq[i]     = seq_id[row];
        seq_ptr[i] = &seq[i];
        output[i]  = all_outputs || (step.want && step.want[row]);
        if (step.hidden) {
            memcpy(&embd[(size_t) i * n_embd], &step.hidden[(size_t) row * n_embd], n_embd * sizeof(float));
        } else {
            token[i] = step.token[row];
        }
    }
}

int32_t batch::n_outputs() const {
    return (int32_t) std::count(output.begin(), output.end(), (int8_t) 1);
}

llama_batch batch::view() {
    llama_batch view = {};
    view.n_tokens = (int32_t) pos.size();
    view.token    = token.empty() ? nullptr : token.data();
    view.embd     = embd.empty()  ? nullptr : embd.data();
    view.pos      = pos.data();
    view.n_seq_id = n_seq_id.data();
    view.seq_id   = seq_ptr.data();
    view.logits   = output.data();
    return view;
}

} // namespace swarm
