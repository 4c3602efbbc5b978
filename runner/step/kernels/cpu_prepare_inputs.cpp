// A step's inputs from the requests' states on a CPU, as `runner/step/prepare_inputs.py` describes them.

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

// At most as many as a row of the tables has.
int64_t blocks_of(int64_t num_tokens, int64_t block_size, int64_t most) {
    return std::min((num_tokens + block_size - 1) / block_size, most);
}

}  // namespace

// idx_mapping [num_reqs] and query_start_loc [num_reqs + 1] are read, and of the states token_ids (rows
// `token_ids_stride` numbers apart), num_computed_tokens, and state_block_table [num_groups, rows, max_blocks]. Written are
// the first num_tokens numbers of input_ids, positions and slot_mapping [num_groups, num_tokens], the first num_reqs of
// seq_lens and logits_indices, and the blocks in use of block_table [num_groups, num_reqs, max_blocks]. Strides count
// numbers. Returns 0.
extern "C" int piecegraph_prepare_inputs(
    const int32_t* idx_mapping, const int32_t* query_start_loc, const int32_t* token_ids, int64_t token_ids_stride,
    const int32_t* num_computed_tokens, const int32_t* state_block_table, int64_t state_group_stride,
    int64_t state_row_stride, int64_t* input_ids, int64_t* positions, int64_t* slot_mapping, int64_t slot_group_stride,
    int32_t* seq_lens, int32_t* block_table, int64_t table_group_stride, int64_t table_row_stride,
    int64_t* logits_indices, int64_t num_groups, int64_t max_blocks, int64_t num_reqs, int64_t num_tokens,
    int64_t block_size, int64_t pad_slot) {
    for (int64_t request = 0; request < num_reqs; ++request) {
        const int64_t row = idx_mapping[request], start = query_start_loc[request];
        const int64_t count = query_start_loc[request + 1] - start, computed = row < 0 ? 0 : num_computed_tokens[row];
        const int64_t num_blocks = blocks_of(computed + count, block_size, max_blocks);
        seq_lens[request] = static_cast<int32_t>(computed + count);
        logits_indices[request] = count > 0 ? start + count - 1 : 0;
        for (int64_t token = 0; token < count; ++token) {
            positions[start + token] = computed + token;
            input_ids[start + token] = row < 0 ? 0 : token_ids[row * token_ids_stride + computed + token];
        }
        for (int64_t group = 0; group < num_groups; ++group) {
            int64_t* slots = slot_mapping + group * slot_group_stride + start;
            int32_t* table = block_table + group * table_group_stride + request * table_row_stride;
            if (row < 0) {
                for (int64_t token = 0; token < count; ++token) slots[token] = pad_slot;
                std::memset(table, 0, num_blocks * sizeof(int32_t));
                continue;
            }
            const int32_t* blocks = state_block_table + group * state_group_stride + row * state_row_stride;
            std::memcpy(table, blocks, num_blocks * sizeof(int32_t));
            for (int64_t token = 0; token < count; ++token) {
                const int64_t position = computed + token;
                slots[token] = blocks[position / block_size] * block_size + position % block_size;
            }
        }
    }
    for (int64_t token = query_start_loc[num_reqs]; token < num_tokens; ++token) {
        input_ids[token] = positions[token] = 0;
        for (int64_t group = 0; group < num_groups; ++group) slot_mapping[group * slot_group_stride + token] = pad_slot;
    }
    return 0;
}
