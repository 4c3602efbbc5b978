// The options min_p, top_k and top_p of rows of logits on a CPU, as `runner/sampling/options/truncation.py` describes
// them, without sorting a row.
//
// Tokens are counted in bins of how far their logits lie below the largest, and so are their probabilities. Only the
// bin in which top_k or top_p is reached is looked at token by token. Rows are shared among threads.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>

namespace {

constexpr int kBins = 2048;
constexpr float kBinsOfANat = 64.0f;  // 32 nats; the last bin has all that lie lower
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// What a thread needs for a row.
struct Work {
    float* scaled;    // logits divided by the temperature, -inf where a token is masked
    int16_t* bins;    // of each token
    int32_t* tokens;  // of the bin that is looked at
    int64_t vocab_size;
    float largest;  // of `scaled`

    void find_bins() const {
#pragma omp simd
        for (int64_t i = 0; i < vocab_size; ++i) {
            const float below = (largest - scaled[i]) * kBinsOfANat;
            bins[i] = static_cast<int16_t>(below < kBins - 1 ? below : kBins - 1);
        }
    }

    // Fills `tokens` with those of `bin` that are not masked and returns how many they are.
    int64_t collect(int bin) const {
        int64_t count = 0;
        for (int64_t i = 0; i < vocab_size; ++i) {
            if (bins[i] == bin && scaled[i] > -kInfinity) tokens[count++] = static_cast<int32_t>(i);
        }
        return count;
    }

    void mask_below(float least) const {
        for (int64_t i = 0; i < vocab_size; ++i) scaled[i] = scaled[i] < least ? -kInfinity : scaled[i];
    }
};

// The k-th largest of `scaled`, -inf if fewer are not masked.
float kth_largest(const Work& work, int64_t k) {
    int64_t counts[kBins] = {};
    for (int64_t i = 0; i < work.vocab_size; ++i) counts[work.bins[i]] += work.scaled[i] > -kInfinity;
    int64_t before = 0;
    for (int bin = 0; bin < kBins; ++bin) {
        if (before + counts[bin] >= k) {
            const int64_t count = work.collect(bin);
            const auto is_larger = [&](int32_t a, int32_t b) { return work.scaled[a] > work.scaled[b]; };
            std::nth_element(work.tokens, work.tokens + (k - 1 - before), work.tokens + count, is_larger);
            return work.scaled[work.tokens[k - 1 - before]];
        }
        before += counts[bin];
    }
    return -kInfinity;
}

// Masks the tokens before which the likelier ones already have `top_p` of all probability; the first one stays.
void mask_outside_of_nucleus(const Work& work, float top_p) {
    double masses[kBins] = {}, total = 0;
    for (int64_t i = 0; i < work.vocab_size; ++i) {
        if (work.scaled[i] > -kInfinity) masses[work.bins[i]] += std::exp(work.scaled[i] - work.largest);
    }
    for (int bin = 0; bin < kBins; ++bin) total += masses[bin];
    const double wanted = top_p * total;
    double before = 0;
    int last = 0;
    while (last < kBins - 1 && before + masses[last] < wanted) before += masses[last++];
    const int64_t count = work.collect(last);
    std::sort(work.tokens, work.tokens + count, [&](int32_t a, int32_t b) {
        return work.scaled[a] > work.scaled[b] || (work.scaled[a] == work.scaled[b] && a < b);
    });
    bool is_first = before == 0;
    for (int64_t i = 0; i < count; ++i) {
        float& logit = work.scaled[work.tokens[i]];
        const double probability = std::exp(logit - work.largest);
        if (!is_first && before >= wanted) logit = -kInfinity;
        before += probability;
        is_first = false;
    }
    for (int64_t i = 0; i < work.vocab_size; ++i) {
        if (work.bins[i] > last) work.scaled[i] = -kInfinity;
    }
}

// `parameters`: top_k, 0 for off; the bits of top_p, 1 for off; those of the logarithm of min_p, -inf for off.
void truncate(float* logits, float temperature, const int32_t* parameters, Work work) {
    const int64_t top_k = parameters[0];
    float top_p, log_min_p, largest = -kInfinity;
    std::memcpy(&top_p, parameters + 1, 4);
    std::memcpy(&log_min_p, parameters + 2, 4);
    for (int64_t i = 0; i < work.vocab_size; ++i) {
        const float one = logits[i] / temperature;
        work.scaled[i] = one == one ? one : -kInfinity;
    }
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < work.vocab_size; ++i) largest = work.scaled[i] > largest ? work.scaled[i] : largest;
    work.largest = largest;
    work.mask_below(largest + log_min_p);
    const bool is_finite = largest < kInfinity && largest > -kInfinity;
    if (is_finite) work.find_bins();
    if (top_k > 0 && top_k < work.vocab_size && is_finite) {
        work.mask_below(kth_largest(work, top_k));
    } else if (top_k > 0 && top_k < work.vocab_size) {  // there are no bins
        for (int64_t i = 0; i < work.vocab_size; ++i) work.tokens[i] = static_cast<int32_t>(i);
        const auto is_larger = [&](int32_t a, int32_t b) { return work.scaled[a] > work.scaled[b]; };
        std::nth_element(work.tokens, work.tokens + top_k - 1, work.tokens + work.vocab_size, is_larger);
        work.mask_below(work.scaled[work.tokens[top_k - 1]]);
    }
    if (top_p < 1 && is_finite) mask_outside_of_nucleus(work, top_p);
    for (int64_t i = 0; i < work.vocab_size; ++i) logits[i] = work.scaled[i] == -kInfinity ? -kInfinity : logits[i];
}

}  // namespace

// logits [num_reqs, vocab_size] float32, contiguous, of which the rows `selected` [num_selected] are changed in place;
// idx_mapping [num_reqs]; temperature, above 0, and table, `table_width` numbers each, by state row. Returns 0, or 1
// where memory has run out: some rows may be changed then.
extern "C" int piecegraph_truncate(float* logits, const int32_t* selected, const int32_t* idx_mapping,
                                   const float* temperature, const int32_t* table, int64_t table_width,
                                   int64_t num_selected, int64_t vocab_size, int num_threads) {
    bool has_memory = true;
#pragma omp parallel for schedule(dynamic, 1) num_threads(num_threads) if (num_threads > 1 && num_selected > 1)
    for (int64_t at = 0; at < num_selected; ++at) {
        const int64_t request = selected[at], row = idx_mapping[request];
        auto* memory = static_cast<char*>(std::malloc(vocab_size * (2 * sizeof(int32_t) + sizeof(int16_t))));
        if (memory == nullptr) {
#pragma omp atomic write
            has_memory = false;
            continue;
        }
        Work work;
        work.scaled = reinterpret_cast<float*>(memory);
        work.tokens = reinterpret_cast<int32_t*>(work.scaled + vocab_size);
        work.bins = reinterpret_cast<int16_t*>(work.tokens + vocab_size);
        work.vocab_size = vocab_size;
        truncate(logits + request * vocab_size, temperature[row], table + row * table_width, work);
        std::free(memory);
    }
    return has_memory ? 0 : 1;
}
