// Attention of one query of each request over a paged cache on a CPU, for the backend `sdpa`, and the norm and rotary
// embedding of queries and keys before it (at the end of the file).
//
// Each key and value is read once for all heads that share it, from where it lies in the cache. The keys of a request
// are divided into parts, which threads share; a part has its own largest score, sum and values, which are added up at
// the end (FlashDecoding, https://crfm.stanford.edu/2023/10/12/flashdecoding.html). The parts depend on the number of
// keys alone, so a request's numbers are the same in every batch and with any number of threads. Everything is computed
// in float32 and rounded once.
//
// Scores of a few keys and heads, and values of a few heads, are added up in registers, by the vectors of GCC and clang
// (https://gcc.gnu.org/onlinedocs/gcc/Vector-Extensions.html), whose size is that of the processor's. Other loops are
// left to the compiler.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <type_traits>

// Products and sums become one instruction; which of them do is the same for every request.
#pragma GCC optimize("fp-contract=fast")

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kMostHeads = 4;
#elif defined(__AVX__)
constexpr int kLanes = 8, kMostHeads = 2;
#else
constexpr int kLanes = 4, kMostHeads = 2;
#endif
constexpr int kKeys = 4;     // whose scores are added up at the same time
constexpr int kVectors = 4;  // of the values of a head
constexpr int64_t kValueKeys = 16;  // whose values stay in the nearest cache from one head to the next

typedef float Lanes __attribute__((vector_size(kLanes * 4)));
typedef uint16_t HalfLanes __attribute__((vector_size(kLanes * 2)));
typedef uint32_t WordLanes __attribute__((vector_size(kLanes * 4)));

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

Lanes lanes(const float* from) {
    Lanes result;
    std::memcpy(&result, from, sizeof result);
    return result;
}

Lanes lanes(const BFloat16* from) {
    HalfLanes bits;
    std::memcpy(&bits, from, sizeof bits);
    const WordLanes words = __builtin_convertvector(bits, WordLanes) << 16;
    Lanes result;
    std::memcpy(&result, &words, sizeof result);
    return result;
}

float total(Lanes x) {
    float found[kLanes];
    std::memcpy(found, &x, sizeof found);
    for (int width = kLanes / 2; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) found[i] += found[i + width];
    return found[0];
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

// Calls `run` with a number of heads as a constant.
template <class Run>
void of_heads(int64_t num_heads, const Run& run) {
    if (num_heads == 1) return run(std::integral_constant<int, 1>());
    if (num_heads == 2) return run(std::integral_constant<int, 2>());
    if (num_heads == 3) return run(std::integral_constant<int, std::min(3, kMostHeads)>());
    run(std::integral_constant<int, kMostHeads>());
}

// Writes scores[head * score_stride + key]: the products of some heads' queries, `key_dim` numbers apart, with `num_keys`
// keys.
template <int num_heads, int num_keys, class Number>
void score_some(const float* queries, int64_t key_dim, const Number* const* keys, float scale, float* scores,
                int64_t score_stride) {
    Lanes sums[num_heads][num_keys] = {};
    int64_t at = 0;
    for (; at + kLanes <= key_dim; at += kLanes) {
        Lanes numbers[num_keys];
        for (int key = 0; key < num_keys; ++key) numbers[key] = lanes(keys[key] + at);
        for (int head = 0; head < num_heads; ++head) {
            const Lanes query = lanes(queries + head * key_dim + at);
            for (int key = 0; key < num_keys; ++key) sums[head][key] += query * numbers[key];
        }
    }
    for (int head = 0; head < num_heads; ++head)
        for (int key = 0; key < num_keys; ++key) {
            float sum = total(sums[head][key]);
            for (int64_t rest = at; rest < key_dim; ++rest)
                sum = std::fma(queries[head * key_dim + rest], number(keys[key][rest]), sum);
            scores[head * score_stride + key] = sum * scale;
        }
}

// Adds to `to`, `value_dim` numbers for each of some heads, the values of `count` keys times their weights.
template <int num_heads, class Number>
void weigh_some(const float* weights, int64_t weight_stride, int64_t count, const int64_t* slots, const Number* values,
                int64_t slot_stride, int64_t value_dim, float* to) {
    int64_t at = 0;
    for (; at + kVectors * kLanes <= value_dim; at += kVectors * kLanes) {
        Lanes sums[num_heads][kVectors];
        for (int head = 0; head < num_heads; ++head)
            std::memcpy(sums[head], to + head * value_dim + at, sizeof sums[head]);
        for (int64_t i = 0; i < count; ++i) {
            const Number* value = values + slots[i] * slot_stride + at;
            Lanes numbers[kVectors];
            for (int vector = 0; vector < kVectors; ++vector) numbers[vector] = lanes(value + vector * kLanes);
            for (int head = 0; head < num_heads; ++head) {
                const float weight = weights[head * weight_stride + i];
                for (int vector = 0; vector < kVectors; ++vector) sums[head][vector] += weight * numbers[vector];
            }
        }
        for (int head = 0; head < num_heads; ++head)
            std::memcpy(to + head * value_dim + at, sums[head], sizeof sums[head]);
    }
    if (at == value_dim) return;
    for (int64_t i = 0; i < count; ++i) {
        const Number* value = values + slots[i] * slot_stride;
        for (int head = 0; head < num_heads; ++head) {
            const float weight = weights[head * weight_stride + i];
            float* of_head = to + head * value_dim;
#pragma omp simd
            for (int64_t d = at; d < value_dim; ++d) of_head[d] = std::fma(weight, number(value[d]), of_head[d]);
        }
    }
}

template <class Number>
void score(int64_t num_heads, int64_t num_keys, const float* queries, int64_t key_dim, const Number* const* keys,
           float scale, float* scores, int64_t stride) {
    const auto run = [&](auto heads) {
        constexpr int count = decltype(heads)::value;
        if (num_keys == kKeys) return score_some<count, kKeys>(queries, key_dim, keys, scale, scores, stride);
        for (int64_t key = 0; key < num_keys; ++key)
            score_some<count, 1>(queries, key_dim, keys + key, scale, scores + key, stride);
    };
    of_heads(num_heads, run);
}

// The exponentials of scores of one head in their place; their largest and their sum.
void exponentials(float* scores, int64_t count, float& largest, float& sum) {
    largest = largest_of(scores, count);
    const float base = largest == -kInfinity ? 0.0f : largest;  // other parts may have finite scores
    float found = 0;
#pragma omp simd reduction(+ : found)
    for (int64_t i = 0; i < count; ++i) {
        scores[i] = exp_of(scores[i] - base);
        found += scores[i];
    }
    sum = found;
}

// A part of a request's keys, for some KV heads: `query`, `keys` and `values` begin with the first of them. Keys and
// values are read in the order in which they lie in the cache. The results of a KV head are `step` numbers from the
// next one's.
template <class Number>
void attend_part(const Shape& shape, const Number* query, const Number* keys, const Number* values,
                 const int64_t* slots, int64_t count, int64_t num_kv_heads, float scale, float* work, float* results,
                 int64_t step) {
    const int64_t group = shape.group, key_dim = shape.key_dim, value_dim = shape.value_dim;
    const int64_t key_stride = shape.num_kv_heads * key_dim, value_stride = shape.num_kv_heads * shape.value_stride;
    float* scores = work + num_kv_heads * group * key_dim;
    for (int64_t i = 0; i < num_kv_heads * group * key_dim; ++i) work[i] = number(query[i]);
    for (int64_t first = 0; first < count; first += kKeys) {
        const int64_t num_keys = std::min<int64_t>(count - first, kKeys);
        for (int64_t kv_head = 0; kv_head < num_kv_heads; ++kv_head) {
            const Number* some[kKeys];
            for (int64_t key = 0; key < num_keys; ++key)
                some[key] = keys + slots[first + key] * key_stride + kv_head * key_dim;
            for (int64_t head = 0; head < group; head += kMostHeads)
                score(std::min<int64_t>(group - head, kMostHeads), num_keys, work + (kv_head * group + head) * key_dim,
                      key_dim, some, scale, scores + (kv_head * group + head) * count + first, count);
        }
    }
    for (int64_t kv_head = 0; kv_head < num_kv_heads; ++kv_head) {
        float* of_head = results + kv_head * step;
        for (int64_t head = 0; head < group; ++head)
            exponentials(scores + (kv_head * group + head) * count, count, of_head[head], of_head[group + head]);
        std::fill(of_head + 2 * group, of_head + 2 * group + group * value_dim, 0.0f);
    }
    for (int64_t first = 0; first < count; first += kValueKeys) {
        const int64_t num_keys = std::min(count - first, kValueKeys);
        for (int64_t kv_head = 0; kv_head < num_kv_heads; ++kv_head)
            for (int64_t head = 0; head < group; head += kMostHeads) {
                const float* weights = scores + (kv_head * group + head) * count + first;
                float* to = results + kv_head * step + 2 * group + head * value_dim;
                of_heads(std::min<int64_t>(group - head, kMostHeads), [&](auto heads) {
                    weigh_some<decltype(heads)::value>(weights, count, num_keys, slots + first,
                                                       values + kv_head * shape.value_stride, value_stride, value_dim,
                                                       to);
                });
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
bool attend(const Shape& shape, const Number* query, int64_t query_stride, const Number* keys, const Number* values,
            const int64_t* slots, const int32_t* num_keys, Number* out, float scale, int num_threads) {
    static thread_local Scratch kept;
    const int64_t step = shape.results_of_part(), max_parts = shape.max_parts();
    const int64_t num_heads = shape.num_reqs * shape.num_kv_heads;
    float* results = kept.at_least(num_heads * max_parts * step);
    if (results == nullptr) return false;
    // Rows are read best as a whole; where that leaves threads without work, a task is one KV head.
    const int64_t of_task = shape.num_reqs * max_parts < num_threads ? 1 : shape.num_kv_heads;
    const int64_t num_tasks = num_heads / of_task * max_parts;
    bool has_memory = true;
#pragma omp parallel for schedule(dynamic, 1) num_threads(num_threads) if (num_threads > 1 && num_tasks > 1)
    for (int64_t task = 0; task < num_tasks; ++task) {
        static thread_local Scratch own;
        const int64_t at = task / max_parts * of_task, part = task % max_parts;
        const int64_t request = at / shape.num_kv_heads, kv_head = at % shape.num_kv_heads;
        const int64_t length = part_length(num_keys[request]), first = part * length;
        const int64_t count = std::min(length, num_keys[request] - first);
        if (count <= 0) continue;
        float* work = own.at_least(of_task * shape.group * (shape.key_dim + count));
        if (work == nullptr) {
#pragma omp atomic write
            has_memory = false;
            continue;
        }
        attend_part(shape, query + request * query_stride + kv_head * shape.group * shape.key_dim,
                    keys + kv_head * shape.key_dim, values + kv_head * shape.value_stride,
                    slots + request * shape.max_keys + first, count, of_task, scale, work,
                    results + (at * max_parts + part) * step, max_parts * step);
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
int step(const void* query, int64_t query_stride, const void* key, int64_t key_stride, const void* value,
         int64_t value_row_stride, const int64_t* write_slots, void* keys, void* values, const int64_t* slots,
         const int32_t* num_keys, void* out, const Shape& shape, float scale, int num_threads) {
    auto* cached_keys = static_cast<Number*>(keys);
    auto* cached_values = static_cast<Number*>(values);
    if (key != nullptr)
        write_rows(static_cast<const Number*>(key), key_stride, write_slots, shape.num_reqs,
                   shape.num_kv_heads * shape.key_dim, cached_keys);
    if (value != nullptr)
        write_rows(static_cast<const Number*>(value), value_row_stride, write_slots, shape.num_reqs,
                   shape.num_kv_heads * shape.value_dim, cached_values);
    const bool is_done = attend(shape, static_cast<const Number*>(query), query_stride, cached_keys, cached_values,
                                slots, num_keys, static_cast<Number*>(out), scale, num_threads);
    return is_done ? 0 : 1;
}

constexpr int64_t kMaxKeyDim = 1024;       // of a rotated head
constexpr int64_t kLeastNumbers = 1 << 15;  // to rotate for which threads are worth their start

// What is done to each head: see `Rotary`. `dim` numbers are rotated.
struct Rotation {
    const void *cos, *sin;
    int64_t cos_stride, sin_stride, dim;
    bool has_norm;
    float eps, offset;
};

// Heads of some rows, which lie anywhere, and what their norm multiplies by, or null.
template <class Number>
struct Heads {
    const Number* from;
    int64_t row_stride, head_stride;
    Number* to;
    int64_t to_row_stride, to_head_stride;
    int64_t count;
    const float* weight;
};

template <class Number>
void rotate_head(const Number* from, const float* cos, const float* sin, const float* weight, int64_t size,
                 const Rotation& by, Number* to) {
    float x[kMaxKeyDim];
    for (int64_t i = 0; i < size; ++i) x[i] = number(from[i]);
    if (by.has_norm) {
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < size; ++i) sum += x[i] * x[i];
        const float factor = 1.0f / std::sqrt(sum / static_cast<float>(size) + by.eps);
        for (int64_t i = 0; i < size; ++i) x[i] *= factor;
        if (weight != nullptr)
            for (int64_t i = 0; i < size; ++i) x[i] *= weight[i];
    }
    const int64_t half = by.dim / 2;
    for (int64_t i = 0; i < half; ++i) {
        const float first = x[i], second = x[i + half];
        store(first * cos[i] - second * sin[i], to + i);
        store(second * cos[i + half] + first * sin[i + half], to + i + half);
    }
    for (int64_t i = by.dim; i < size; ++i) store(x[i], to + i);
}

template <class Number>
void rotate_row(const Heads<Number>& heads, int64_t row, const float* cos, const float* sin, int64_t size,
                const Rotation& by) {
    for (int64_t head = 0; head < heads.count; ++head)
        rotate_head(heads.from + row * heads.row_stride + head * heads.head_stride, cos, sin, heads.weight, size, by,
                    heads.to + row * heads.to_row_stride + head * heads.to_head_stride);
}

template <class Number>
void to_floats(const void* from, int64_t first, int64_t count, float* to) {
    for (int64_t i = 0; i < count; ++i) to[i] = number(static_cast<const Number*>(from)[first + i]);
}

template <class Number>
void rotate(const Heads<Number>& queries, const Heads<Number>& keys, int64_t num_rows, int64_t size, const Rotation& by,
            bool tables_are_bfloat16, int num_threads) {
    const auto read = tables_are_bfloat16 ? to_floats<BFloat16> : to_floats<float>;
    const bool is_small = num_rows * (queries.count + keys.count) * size < kLeastNumbers;
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1 && !is_small)
    for (int64_t row = 0; row < num_rows; ++row) {
        float cos[kMaxKeyDim], sin[kMaxKeyDim];
        read(by.cos, row * by.cos_stride, by.dim, cos);
        read(by.sin, row * by.sin_stride, by.dim, sin);
        rotate_row(queries, row, cos, sin, size, by);
        rotate_row(keys, row, cos, sin, size, by);
    }
}

// The weight of a norm and its offset together, or null.
const float* factors_of(const void* weight, bool is_bfloat16, int64_t size, float offset, float* to) {
    if (weight == nullptr) return nullptr;
    (is_bfloat16 ? to_floats<BFloat16> : to_floats<float>)(weight, 0, size, to);
    for (int64_t i = 0; i < size; ++i) to[i] += offset;
    return to;
}

template <class Number>
void norm_and_rotate(void* query, int64_t query_row, int64_t query_head, int64_t num_q_heads, const void* key,
                     int64_t key_row, int64_t key_head, int64_t num_kv_heads, void* key_out, const void* q_weight,
                     const void* k_weight, bool weights_are_bfloat16, int64_t num_rows, int64_t size,
                     const Rotation& by, bool tables_are_bfloat16, int num_threads) {
    float q_factors[kMaxKeyDim], k_factors[kMaxKeyDim];
    auto* rows = static_cast<Number*>(query);
    const Heads<Number> queries{rows, query_row, query_head, rows, query_row, query_head, num_q_heads,
                                factors_of(q_weight, weights_are_bfloat16, size, by.offset, q_factors)};
    const Heads<Number> keys{static_cast<const Number*>(key), key_row, key_head, static_cast<Number*>(key_out),
                             num_kv_heads * size, size, num_kv_heads,
                             factors_of(k_weight, weights_are_bfloat16, size, by.offset, k_factors)};
    rotate(queries, keys, num_rows, size, by, tables_are_bfloat16, num_threads);
}

}  // namespace

extern "C" {

// One query of each request, float32 or bfloat16. First `key` and `value` [num_reqs, num_kv_heads, key_dim or
// value_dim], rows `key_stride` and `value_row_stride` numbers apart, are written to `write_slots` of the cache; null:
// nothing is. Rows of query, [num_reqs, num_kv_heads * group, key_dim], are `query_stride` numbers apart. All else is
// contiguous: keys [num_slots, num_kv_heads, key_dim], values [num_slots, num_kv_heads, value_stride], of which the
// first value_dim numbers count, slots [num_reqs, max_keys], of which the first num_keys[request] >= 1 count, out
// [num_reqs, num_kv_heads * group, value_dim]. `value_dim` is at most 1,024. Returns 0, or 1 where memory has run out.
int piecegraph_decode_attention(int is_bfloat16, const void* query, int64_t query_stride, const void* key,
                                int64_t key_stride, const void* value, int64_t value_row_stride,
                                const int64_t* write_slots, void* keys, void* values, const int64_t* slots,
                                const int32_t* num_keys, void* out, int64_t num_reqs, int64_t max_keys,
                                int64_t num_kv_heads, int64_t group, int64_t key_dim, int64_t value_dim,
                                int64_t value_stride, float scale, int num_threads) {
    const Shape shape{num_reqs, max_keys, num_kv_heads, group, key_dim, value_dim, value_stride};
    return (is_bfloat16 ? step<BFloat16> : step<float>)(query, query_stride, key, key_stride, value, value_row_stride,
                                                        write_slots, keys, values, slots, num_keys, out, shape, scale,
                                                        num_threads);
}

// The norm, if there is one, and the rotary embedding of queries, in their place, and of keys, into `key_out`: rows of
// heads of `size` numbers, float32 or bfloat16, by the rules of `Rotary` (attention/interface/rotary.py). A row of cos
// and sin has `rotary_dim` numbers. Rows and heads of query and key lie as their strides say; `key_out` [num_rows,
// num_kv_heads, size] and the weights [size], or null, are contiguous. `size` is at most 1,024. Returns 0.
int piecegraph_norm_and_rotate(int is_bfloat16, void* query, int64_t query_row, int64_t query_head, int64_t num_q_heads,
                               const void* key, int64_t key_row, int64_t key_head, int64_t num_kv_heads, void* key_out,
                               const void* cos, const void* sin, int64_t cos_stride, int64_t sin_stride,
                               int64_t rotary_dim, int tables_are_bfloat16, const void* q_weight, const void* k_weight,
                               int weights_are_bfloat16, int has_norm, float eps, float offset, int64_t num_rows,
                               int64_t size, int num_threads) {
    const Rotation by{cos, sin, cos_stride, sin_stride, rotary_dim, has_norm != 0, eps, offset};
    (is_bfloat16 ? norm_and_rotate<BFloat16> : norm_and_rotate<float>)(
        query, query_row, query_head, num_q_heads, key, key_row, key_head, num_kv_heads, key_out, q_weight, k_weight,
        weights_are_bfloat16 != 0, num_rows, size, by, tables_are_bfloat16 != 0, num_threads);
    return 0;
}

}  // extern "C"
