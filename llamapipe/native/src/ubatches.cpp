// How llama.cpp cuts a batch into ubatches.
#include "ubatches.hpp"

#include <algorithm>

namespace lp {

namespace {

// With a unified KV cache: runs of at most n_ubatch entries, in the order of the batch.
void cut_runs(int n_tokens, const int8_t * outputs, const UbatchLimits & limits, std::vector<int32_t> & order,
              std::vector<Ubatch> & ubatches) {
    Ubatch ubatch = { 0, 0, 0, 0 };
    for (int i = 0; i < n_tokens; i++) {
        order.push_back(i);
        const int n_more = outputs[i] ? 1 : 0;
        if (ubatch.n == limits.n_ubatch || ubatch.n_outputs + n_more > limits.n_rows) {
            ubatches.push_back(ubatch);
            ubatch = { i, 0, ubatch.first_output + ubatch.n_outputs, 0 };
        }
        ubatch.n++;
        ubatch.n_outputs += n_more;
    }
    ubatches.push_back(ubatch);
}

// With per-sequence KV streams: equally long parts of consecutive sequences. A ubatch starts at the first entry that is
// left; it takes further sequences as long as each has the next id.
void cut_streams(int n_tokens, const int32_t * ids, const int8_t * flags, const UbatchLimits & limits,
                 std::vector<int32_t> & order, std::vector<Ubatch> & ubatches) {
    // The remaining entries of each sequence as a linked list.
    int32_t top = 0;
    for (int i = 0; i < n_tokens; i++) {
        top = std::max(top, ids[i]);
    }
    std::vector<int32_t> head((size_t) top + 1, -1), tail((size_t) top + 1, -1), n_left((size_t) top + 1, 0);
    std::vector<int32_t> next((size_t) n_tokens, -1);
    std::vector<char>    used((size_t) n_tokens, 0);
    for (int i = 0; i < n_tokens; i++) {
        const int32_t s = ids[i];
        (tail[s] < 0 ? head[s] : next[tail[s]]) = i;
        tail[s]                                 = i;
        n_left[s]++;
    }
    int  first = 0;
    Ubatch ubatch = { 0, 0, 0, 0 };
    while (ubatch.first < n_tokens) {
        while (used[first]) {
            first++;
        }
        const int32_t first_seq = ids[first];
        int32_t       last_seq  = first_seq;
        for (int i = first; i < n_tokens && last_seq - first_seq + 1 < limits.n_ubatch; i++) {
            if (!used[i] && ids[i] == last_seq + 1) {
                last_seq++;
            }
        }
        const int n_seqs = last_seq - first_seq + 1;
        int       length = std::max(limits.n_ubatch / n_seqs, 1);
        for (int32_t s = first_seq; s <= last_seq; s++) {
            length = std::min(length, (int) n_left[s]);
        }
        // Shorter parts where they would have too many outputs; one entry of each sequence always has room.
        std::vector<int32_t> at(head.begin() + first_seq, head.begin() + last_seq + 1);
        for (int j = 0, n_rows = 0; j < length; j++) {
            for (int32_t & e : at) {
                n_rows += flags[e] ? 1 : 0;
                e = next[e];
            }
            if (n_rows > limits.n_rows && j > 0) {
                length = j;
            }
        }
        for (int32_t s = first_seq; s <= last_seq; s++) {
            for (int j = 0; j < length; j++) {
                const int32_t e = head[s];
                order.push_back(e);
                used[e] = 1;
                ubatch.n_outputs += flags[e] ? 1 : 0;
                head[s] = next[e];
            }
            n_left[s] -= length;
        }
        ubatch.n = n_seqs * length;
        ubatches.push_back(ubatch);
        ubatch = { ubatch.first + ubatch.n, 0, ubatch.first_output + ubatch.n_outputs, 0 };
    }
}

}  // namespace

void cut_into_ubatches(int n, const int32_t * seq_ids, const int8_t * outputs, const UbatchLimits & limits,
                       std::vector<int32_t> & order, std::vector<Ubatch> & ubatches) {
    if (limits.kv_streams) {
        cut_streams(n, seq_ids, outputs, limits, order, ubatches);
    } else {
        cut_runs(n, outputs, limits, order, ubatches);
    }
}

}  // namespace lp
