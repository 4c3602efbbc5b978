// The draw of one token of each row of logits on a CPU, as `runner/sampling/gumbel_sample.py` describes it.
//
// A row is read once, in blocks: Philox gives four numbers for four tokens, two logarithms make noise of each, and the
// best token of a block is compared with that of the blocks before it. Philox equals Triton's to the bit; a logarithm
// may differ from torch's in the last place. Rows are shared among threads. Loops are left to the compiler's vectors.

#include <cstdint>
#include <cstring>
#include <limits>

namespace {

constexpr int64_t kBlock = 512;  // tokens
constexpr int64_t kFours = kBlock / 4;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kTiny = 1e-20f;             // keeps log(0) away
constexpr float kIntToUnit = 4.6566127342e-10f;  // Triton's: the largest for which every int32 stays below 1

struct BFloat16 {
    uint16_t bits;
};

inline float number(float x) { return x; }

inline float number(BFloat16 x) {
    const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
}

// The natural logarithm of a normal number above 0, with an error of about one in the last place (Cephes' logf).
inline float log_of(float x) {
    constexpr int32_t kRootOfHalf = 0x3f3504f3;
    int32_t bits;
    std::memcpy(&bits, &x, 4);
    const int32_t exponent = (bits - kRootOfHalf) >> 23;
    bits -= exponent * (1 << 23);  // of x * 2 ** -exponent, in [sqrt(1/2), sqrt(2))
    float part;
    std::memcpy(&part, &bits, 4);
    part -= 1.0f;
    const float square = part * part, whole = static_cast<float>(exponent);
    float series = 7.0376836292e-2f;
    series = series * part - 1.1514610310e-1f;
    series = series * part + 1.1676998740e-1f;
    series = series * part - 1.2420140846e-1f;
    series = series * part + 1.4249322787e-1f;
    series = series * part - 1.6668057665e-1f;
    series = series * part + 2.0000714765e-1f;
    series = series * part - 2.4999993993e-1f;
    series = series * part + 3.3333331174e-1f;
    const float rest = series * part * square - 2.12194440e-4f * whole - 0.5f * square;
    return part + rest + 0.693359375f * whole;
}

struct Key {
    uint32_t low, high;
};

// Philox4x32-10 of the counters (first[i], 0, 0, 0); four words for each of `count`, in `words`.
inline void philox(Key key, const uint32_t* first, int64_t count, uint32_t (*words)[kFours]) {
    uint32_t *c0 = words[0], *c1 = words[1], *c2 = words[2], *c3 = words[3];
    for (int64_t i = 0; i < count; ++i) {
        c0[i] = first[i];
        c1[i] = c2[i] = c3[i] = 0;
    }
    for (int round = 0; round < 10; ++round) {
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) {
            const uint64_t a = static_cast<uint64_t>(c0[i]) * 0xD2511F53u, b = static_cast<uint64_t>(c2[i]) * 0xCD9E8D57u;
            const uint32_t next0 = static_cast<uint32_t>(b >> 32) ^ c1[i] ^ key.low;
            const uint32_t next2 = static_cast<uint32_t>(a >> 32) ^ c3[i] ^ key.high;
            c1[i] = static_cast<uint32_t>(b);
            c3[i] = static_cast<uint32_t>(a);
            c0[i] = next0;
            c2[i] = next2;
        }
        key.low += 0x9E3779B9u;
        key.high += 0xBB67AE85u;
    }
}

// The key of a position's own numbers.
Key key_of_position(int64_t seed, int32_t position) {
    const Key key{static_cast<uint32_t>(seed), static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32)};
    const uint32_t counter = static_cast<uint32_t>(position);
    uint32_t words[4][kFours];
    philox(key, &counter, 1, words);
    return {words[1][0], words[0][0]};
}

// Adds the noise of the tokens from `4 * first` on to `scores`.
void add_noise(Key key, int64_t first, float* scores) {
    uint32_t counters[kFours], words[4][kFours];
    float noise[4][kFours];
    for (int64_t i = 0; i < kFours; ++i) counters[i] = static_cast<uint32_t>(first + i);
    philox(key, counters, kFours, words);
    for (int64_t word = 0; word < 4; ++word) {
#pragma omp simd
        for (int64_t i = 0; i < kFours; ++i) {
            const int32_t bits = static_cast<int32_t>(words[word][i]);
            const float uniform = static_cast<float>(bits < 0 ? ~bits : bits) * kIntToUnit;
            noise[word][i] = -log_of(-log_of(uniform + kTiny) + kTiny);
        }
    }
    for (int64_t i = 0; i < kFours; ++i) {
        scores[4 * i] += noise[0][i];
        scores[4 * i + 1] += noise[1][i];
        scores[4 * i + 2] += noise[2][i];
        scores[4 * i + 3] += noise[3][i];
    }
}

template <class Number>
int64_t best_token(const Number* logits, int64_t vocab_size, float temperature, const Key* key) {
    float best = -kInfinity, scores[kBlock];
    int64_t token = 0;
    for (int64_t start = 0; start < vocab_size; start += kBlock) {
        const int64_t count = vocab_size - start < kBlock ? vocab_size - start : kBlock;
        for (int64_t i = 0; i < count; ++i) scores[i] = number(logits[start + i]);
        if (key != nullptr) {
            for (int64_t i = count; i < kBlock; ++i) scores[i] = 0.0f;
            for (int64_t i = 0; i < count; ++i) scores[i] /= temperature;
            add_noise(*key, start / 4, scores);
        }
        float largest = -kInfinity;
#pragma omp simd reduction(max : largest)
        for (int64_t i = 0; i < count; ++i) largest = scores[i] > largest ? scores[i] : largest;  // passes over NaN
        if (!(largest > best)) continue;
        best = largest;
        for (int64_t i = 0; i < count; ++i) {
            if (scores[i] == largest) {
                token = start + i;
                break;
            }
        }
    }
    return token;
}

template <class Number>
void draw(const Number* logits, int64_t stride, const int32_t* idx_mapping, const float* temperature,
          const int64_t* seeds, const int32_t* positions, int64_t* out, int64_t num_reqs, int64_t vocab_size,
          int num_threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(num_threads) if (num_threads > 1 && num_reqs > 1)
    for (int64_t request = 0; request < num_reqs; ++request) {
        const int64_t row = idx_mapping[request];
        if (row < 0) {
            out[request] = 0;
            continue;
        }
        const Number* of_row = logits + request * stride;
        if (temperature[row] > 0) {
            const Key key = key_of_position(seeds[row], positions[request]);
            out[request] = best_token(of_row, vocab_size, temperature[row], &key);
        } else {
            out[request] = best_token(of_row, vocab_size, 1.0f, nullptr);
        }
    }
}

// The states to which drawn tokens are added, by state row; `token_ids` is null where none are.
struct Record {
    int32_t* token_ids;  // rows `stride` numbers apart, of `size` tokens each
    int64_t stride, size;
    const int32_t* prefill_lens;
    int32_t* num_computed_tokens;
};

void add_tokens(const Record& record, const int32_t* idx_mapping, const int32_t* positions, const int64_t* tokens,
                int64_t num_reqs) {
    for (int64_t request = 0; request < num_reqs; ++request) {
        const int64_t row = idx_mapping[request], position = positions[request];
        if (row < 0) continue;
        if (position >= record.prefill_lens[row] && position < record.size)
            record.token_ids[row * record.stride + position] = static_cast<int32_t>(tokens[request]);
        record.num_computed_tokens[row] = static_cast<int32_t>(position);
    }
}

}  // namespace

// logits [num_reqs, vocab_size], float32 or bfloat16, rows `stride` numbers apart; idx_mapping and positions [num_reqs];
// temperature and seeds by state row; the token of each row is written to out [num_reqs], and to the states of `Record`
// as `record_tokens` in runner/common/token_record.py does. Returns 0.
extern "C" int piecegraph_gumbel_sample(int is_bfloat16, const void* logits, int64_t stride, const int32_t* idx_mapping,
                                        const float* temperature, const int64_t* seeds, const int32_t* positions,
                                        int64_t* out, int64_t num_reqs, int64_t vocab_size, int32_t* token_ids,
                                        int64_t token_ids_stride, int64_t num_token_ids, const int32_t* prefill_lens,
                                        int32_t* num_computed_tokens, int num_threads) {
    if (is_bfloat16)
        draw(static_cast<const BFloat16*>(logits), stride, idx_mapping, temperature, seeds, positions, out, num_reqs,
             vocab_size, num_threads);
    else
        draw(static_cast<const float*>(logits), stride, idx_mapping, temperature, seeds, positions, out, num_reqs,
             vocab_size, num_threads);
    if (token_ids != nullptr)
        add_tokens({token_ids, token_ids_stride, num_token_ids, prefill_lens, num_computed_tokens}, idx_mapping, positions,
                   out, num_reqs);
    return 0;
}
