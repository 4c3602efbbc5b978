// Attention of one query of each request over a paged cache on a CPU, for the backend `sdpa`.
//
// Each key and value is read once for all heads that share it, from where it lies in the cache. The keys of a request
// are divided into parts, which threads share; a part has its own largest score, sum and values, which are added up at
// the end (FlashDecoding, https://crfm.stanford.edu/2023/10/12/flashdecoding.html). The parts depend on the number of
// keys alone, so a request's numbers are the same in every batch and with any number of threads. Everything is computed
// in float32 and rounded once. Loops are left to the compiler's vectors.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>

namespace {

constexpr int64_t kLeastKeys = 64;  // of a part, if there are several
constexpr int64_t kMostParts = 16;  // of a request's keys
constexpr int64_t kMaxValueDim = 1024;

int64_t divided(int64_t count, int64_t size) { return (count + size - 1) / size; }

// The keys of each part but the last, which may have fewer.
int64_t part_length(int64_t num_keys) { return divided(num_keys, std::min(divided(num_keys, kLeastKeys), kMostParts)); }

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Memory for the parts, kept by the thread that calls.
struct Scratch {
    float* data = nullptr;
    size_t count = 0;
    ~Scratch() { std::free(data); }
    float* at_least(size_t wanted) {
        if (wanted > count) {
            std::free(data);
            data = static_cast<float*>(std::malloc(wanted * sizeof(float)));
            count = data == nullptr ? 0 : wanted;
        }
        return data;
    }
};

struct BFloat16 {
    uint16_t bits;
};

float number(float x) { return x; }

float number(BFloat16 x) {
    const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
}

void store(float x, float* to) { *to = x; }

void store(float x, BFloat16* to) {  // to nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    to->bits = x != x ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// exp(x) of x <= 0 with a relative error of 3e-7: 0 below -87, where normal floats end; NaN of NaN.
inline float exp_of(float x) {
    constexpr float kLog2E = 1.44269504f, kRestOfLog2E = 1.925963e-8f;
    const float whole = std::nearbyint(std::max(x * kLog2E, -126.0f));
    const float rest = std::fma(x, kLog2E, -whole) + x * kRestOfLog2E;
    float power = 1.5353362e-4f;  // 2 ** rest, by the series of exp(rest * log(2)) adjusted to [-1/2, 1/2]
    power = std::fma(power, rest, 1.3398874e-3f);
    power = std::fma(power, rest, 9.6184373e-3f);
    power = std::fma(power, rest, 5.5503324e-2f);
    power = std::fma(power, rest, 2.4022648e-1f);
    power = std::fma(power, rest, 6.9314718e-1f);
    power = std::fma(power, rest, 1.0f);
    const int32_t bits = (static_cast<int32_t>(whole) + 127) << 23;
    float of_whole;
    std::memcpy(&of_whole, &bits, 4);
    return x < -87.0f ? 0.0f : power * of_whole;
}

// The largest score, NaN if there is a NaN.
float largest_of(const float* scores, int64_t count) {
    float largest = -kInfinity;
    bool has_nan = false;
    for (int64_t i = 0; i < count; ++i) {
        largest = std::max(largest, scores[i]);
        has_nan |= scores[i] != scores[i];
    }
    return has_nan ? kNaN : largest;
}

struct Shape {
    int64_t num_reqs, max_keys, num_kv_heads, group, key_dim, value_dim, value_stride;

    int64_t max_parts() const { return std::min(divided(max_keys, kLeastKeys), kMostParts); }
    int64_t results_of_part() const { return group * (2 + value_dim); }  // for each head largest score, sum, values
};

template <class Number>
void attend_part(const Shape& shape, const Number* query, const Number* keys, const Number* values,
                 const int64_t* slots, int64_t count, int64_t head, float scale, float* work, float* results) {
    const int64_t group = shape.group, key_dim = shape.key_dim, value_dim = shape.value_dim;
    float* scores = work + group * key_dim;
    float* largest = results;
    float* sums = largest + group;
    float* sums_of_values = sums + group;
    for (int64_t i = 0; i < group * key_dim; ++i) work[i] = number(query[i]);
    for (int64_t i = 0; i < count; ++i) {
        const Number* key = keys + (slots[i] * shape.num_kv_heads + head) * key_dim;
        for (int64_t g = 0; g < group; ++g) {
            const float* one = work + g * key_dim;
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t d = 0; d < key_dim; ++d) sum = std::fma(one[d], number(key[d]), sum);
            scores[g * count + i] = sum * scale;
        }
    }
    for (int64_t g = 0; g < group; ++g) {
        float* of_head = scores + g * count;
        const float most = largest_of(of_head, count);
        const float base = most == -kInfinity ? 0.0f : most;  // other parts may have finite scores
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < count; ++i) {
            of_head[i] = exp_of(of_head[i] - base);
            sum += of_head[i];
        }
        largest[g] = most;
        sums[g] = sum;
    }
    std::fill(sums_of_values, sums_of_values + group * value_dim, 0.0f);
    for (int64_t i = 0; i < count; ++i) {
        const Number* value = values + (slots[i] * shape.num_kv_heads + head) * shape.value_stride;
        for (int64_t g = 0; g < group; ++g) {
            const float weight = scores[g * count + i];
            float* to = sums_of_values + g * value_dim;
#pragma omp simd
            for (int64_t d = 0; d < value_dim; ++d) to[d] = std::fma(weight, number(value[d]), to[d]);
        }
    }
}

// The sum of the parts, of one head.
template <class Number>
void add_parts(const Shape& shape, int64_t num_parts, const float* first, int64_t g, Number* out) {
    const int64_t step = shape.results_of_part();
    float most = first[g];
    for (int64_t part = 1; part < num_parts; ++part) {
        const float one = first[part * step + g];
        most = one > most || one != one ? one : most;  // a NaN stays
    }
    float sum = 0, found[kMaxValueDim] = {};
    for (int64_t part = 0; part < num_parts; ++part) {
        const float* of_part = first + part * step;
        const float factor = num_parts == 1 ? 1.0f : exp_of(of_part[g] - most);
        const float* from = of_part + 2 * shape.group + g * shape.value_dim;
        sum += of_part[shape.group + g] * factor;
        for (int64_t d = 0; d < shape.value_dim; ++d) found[d] += from[d] * factor;
    }
    for (int64_t d = 0; d < shape.value_dim; ++d) store(found[d] / sum, out + d);
}

template <class Number>
bool attend(const Shape& shape, const Number* query, const Number* keys, const Number* values, const int64_t* slots,
            const int32_t* num_keys, Number* out, float scale, int num_threads) {
    static thread_local Scratch kept;
    const int64_t step = shape.results_of_part(), max_parts = shape.max_parts();
    const int64_t num_heads = shape.num_reqs * shape.num_kv_heads, num_tasks = num_heads * max_parts;
    float* results = kept.at_least(num_tasks * step);
    if (results == nullptr) return false;
    bool has_memory = true;
#pragma omp parallel for schedule(dynamic, 1) num_threads(num_threads) if (num_threads > 1 && num_tasks > 1)
    for (int64_t task = 0; task < num_tasks; ++task) {
        static thread_local Scratch own;
        const int64_t at = task / max_parts, part = task % max_parts, request = at / shape.num_kv_heads;
        const int64_t length = part_length(num_keys[request]), first = part * length;
        const int64_t count = std::min(length, num_keys[request] - first);
        if (count <= 0) continue;
        float* work = own.at_least(shape.group * (shape.key_dim + count));
        if (work == nullptr) {
#pragma omp atomic write
            has_memory = false;
            continue;
        }
        attend_part(shape, query + at * shape.group * shape.key_dim, keys, values,
                    slots + request * shape.max_keys + first, count, at % shape.num_kv_heads, scale, work,
                    results + task * step);
    }
    if (!has_memory) return false;
    for (int64_t at = 0; at < num_heads; ++at) {
        const int64_t count = num_keys[at / shape.num_kv_heads];
        const float* first = results + at * max_parts * step;
        for (int64_t g = 0; g < shape.group; ++g)
            add_parts(shape, divided(count, part_length(count)), first, g,
                      out + (at * shape.group + g) * shape.value_dim);
    }
    return true;
}

// Writes the rows of a step to the cache: each a key or a value of all heads, `stride` numbers from the next.
template <class Number>
void write_rows(const Number* rows, int64_t stride, const int64_t* slots, int64_t num_rows, int64_t size, Number* to) {
    for (int64_t row = 0; row < num_rows; ++row)
        std::memcpy(to + slots[row] * size, rows + row * stride, size * sizeof(Number));
}

template <class Number>
int step(const void* query, const void* key, int64_t key_stride, const void* value, int64_t value_row_stride,
         const int64_t* write_slots, void* keys, void* values, const int64_t* slots, const int32_t* num_keys, void* out,
         const Shape& shape, float scale, int num_threads) {
    auto* cached_keys = static_cast<Number*>(keys);
    auto* cached_values = static_cast<Number*>(values);
    if (key != nullptr)
        write_rows(static_cast<const Number*>(key), key_stride, write_slots, shape.num_reqs,
                   shape.num_kv_heads * shape.key_dim, cached_keys);
    if (value != nullptr)
        write_rows(static_cast<const Number*>(value), value_row_stride, write_slots, shape.num_reqs,
                   shape.num_kv_heads * shape.value_dim, cached_values);
    const bool is_done = attend(shape, static_cast<const Number*>(query), cached_keys, cached_values, slots, num_keys,
                                static_cast<Number*>(out), scale, num_threads);
    return is_done ? 0 : 1;
}

}  // namespace

// One query of each request, float32 or bfloat16. First `key` and `value` [num_reqs, num_kv_heads, key_dim or
// value_dim], rows `key_stride` and `value_row_stride` numbers apart, are written to `write_slots` of the cache; null:
// nothing is. All else is contiguous: query [num_reqs, num_kv_heads * group, key_dim], keys [num_slots, num_kv_heads,
// key_dim], values [num_slots, num_kv_heads, value_stride], of which the first value_dim numbers count, slots
// [num_reqs, max_keys], of which the first num_keys[request] >= 1 count, out [num_reqs, num_kv_heads * group,
// value_dim]. `value_dim` is at most 1,024. Returns 0, or 1 where memory has run out.
extern "C" int piecegraph_decode_attention(int is_bfloat16, const void* query, const void* key, int64_t key_stride,
                                           const void* value, int64_t value_row_stride, const int64_t* write_slots,
                                           void* keys, void* values, const int64_t* slots, const int32_t* num_keys,
                                           void* out, int64_t num_reqs, int64_t max_keys, int64_t num_kv_heads,
                                           int64_t group, int64_t key_dim, int64_t value_dim, int64_t value_stride,
                                           float scale, int num_threads) {
    const Shape shape{num_reqs, max_keys, num_kv_heads, group, key_dim, value_dim, value_stride};
    return (is_bfloat16 ? step<BFloat16> : step<float>)(query, key, key_stride, value, value_row_stride, write_slots,
                                                        keys, values, slots, num_keys, out, shape, scale, num_threads);
}
