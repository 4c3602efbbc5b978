// Products of rows of floats and int8 weights on a CPU: one, for `piecegraph::int8_linear`, and those between two calls
// of attention with all that is between them, for `piecegraph::int8_layer_linears`.
//
// A row of x becomes 16-bit fixed point with one scale, q = 256 * hi + lo in two signed bytes, which keeps more of it
// than bfloat16 does. Weights are read as they lie and made unsigned on the way (w + 128), because `vpdpbusd` multiplies
// unsigned by signed bytes; 128 * sum(q) is taken off at the end. So the sum over q is exact: 256 * sum(hi * w) +
// sum(lo * w), each in 32 bits, which hold up to 65,536 numbers of a row. It is scaled in float64, and rounded
// once to float32 (bfloat16 outputs a second time, to bfloat16).
//
// Without AVX512-VNNI, and with PIECEGRAPH_PLAIN, loops in C++ compute the same numbers bit by bit, slowly.
// It needs no header but those of the compiler, and takes a second to build.

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__) && !defined(PIECEGRAPH_PLAIN)
#include <immintrin.h>
#define HAS_VNNI 1
#else
#define HAS_VNNI 0
#endif

namespace {

constexpr float kLargest = 32639.0f;     // 256 * 127 + 127: the largest q whose two bytes are signed
constexpr int64_t kColumns = 4;          // weight rows of a block: their products with a row of x share its loads
constexpr int64_t kMostRows = 128;       // of x that are multiplied together: their bytes stay in the second cache
constexpr int64_t kLeastWork = 1 << 15;  // products for which threads are worth their start
constexpr int64_t kAhead = 16384;        // bytes by which weights are fetched into the second cache before they are read
constexpr float kTiny = 0x1p-64f;        // rows below are multiplied by kRaise first, so that 1 / largest is finite
constexpr float kRaise = 0x1p80f;
constexpr uint32_t kInfinity = 0x7f800000;

int64_t padded(int64_t size) { return (size + 63) / 64 * 64; }

// Memory for the rows as bytes, kept by the thread that calls.
struct Scratch {
    char* data = nullptr;
    size_t bytes = 0;
    ~Scratch() { std::free(data); }
    char* at_least(size_t wanted) {
        if (wanted > bytes) {
            std::free(data);
            data = static_cast<char*>(std::aligned_alloc(64, (wanted + 63) / 64 * 64));
            bytes = data == nullptr ? 0 : wanted;
        }
        return data;
    }
};

// A row of x in fixed point.
struct Row {
    const int8_t* hi;
    const int8_t* lo;
    double scale;       // NaN for a row with an infinity or a NaN
    double correction;  // 128 * sum(q)
};

struct Float32 {
    using Stored = float;
    static float read(float x) { return x; }
    static float rounded(float x) { return x; }
};

struct BFloat16 {
    using Stored = uint16_t;
    static float read(uint16_t x) {
        uint32_t bits = static_cast<uint32_t>(x) << 16;
        float result;
        std::memcpy(&result, &bits, 4);
        return result;
    }
    static uint16_t rounded(float x) {  // to nearest, ties to even
        uint32_t bits;
        std::memcpy(&bits, &x, 4);
        if ((bits & 0x7fffffff) > kInfinity) return 0x7fc0;
        return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    }
};

#if HAS_VNNI
__m512 load16(const float* x, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, x); }
__m512 load16(const uint16_t* x, __mmask16 mask) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, x)), 16));
}
__mmask16 mask_of(int64_t left) { return left >= 16 ? 0xffff : static_cast<__mmask16>((1u << left) - 1); }
#endif

template <class Type>
uint32_t largest_bits(const typename Type::Stored* x, int64_t size) {
#if HAS_VNNI
    const __m512i no_sign = _mm512_set1_epi32(0x7fffffff);
    __m512i largest = _mm512_setzero_si512();
    for (int64_t at = 0; at < size; at += 16) {
        const __m512i bits = _mm512_castps_si512(load16(x + at, mask_of(size - at)));
        largest = _mm512_max_epu32(largest, _mm512_and_si512(bits, no_sign));
    }
    return _mm512_reduce_max_epu32(largest);
#else
    uint32_t largest = 0;
    for (int64_t at = 0; at < size; ++at) {
        const float value = __builtin_fabsf(Type::read(x[at]));
        uint32_t bits;
        std::memcpy(&bits, &value, 4);
        largest = bits > largest ? bits : largest;
    }
    return largest;
#endif
}

// Writes `padded(size)` bytes to hi and lo, zeros behind the row.
template <class Type>
Row to_fixed_point(const typename Type::Stored* x, int64_t size, int8_t* hi, int8_t* lo) {
    const uint32_t bits = largest_bits<Type>(x, size);
    float largest;
    std::memcpy(&largest, &bits, 4);
    const float raise = largest < kTiny ? kRaise : 1.0f;
    if (bits >= kInfinity || !(largest * raise > 0)) {  // the latter also where the process flushes denormals to zero
        std::memset(hi, 0, padded(size));
        std::memset(lo, 0, padded(size));
        return {hi, lo, bits >= kInfinity ? std::numeric_limits<double>::quiet_NaN() : 0.0, 0.0};
    }
    const float factor = kLargest / (largest * raise);
    int32_t sum = 0;
#if HAS_VNNI
    __m512i sums = _mm512_setzero_si512();
    for (int64_t at = 0; at < padded(size); at += 16) {
        const __mmask16 mask = at < size ? mask_of(size - at) : 0;
        const __m512 raised = _mm512_mul_ps(load16(x + (mask ? at : 0), mask), _mm512_set1_ps(raise));
        const __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(raised, _mm512_set1_ps(factor)));
        const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(128)), 8);
        const __m512i low = _mm512_sub_epi32(q, _mm512_slli_epi32(high, 8));
        _mm_store_si128(reinterpret_cast<__m128i*>(hi + at), _mm512_cvtepi32_epi8(high));
        _mm_store_si128(reinterpret_cast<__m128i*>(lo + at), _mm512_cvtepi32_epi8(low));
        sums = _mm512_add_epi32(sums, q);
    }
    sum = _mm512_reduce_add_epi32(sums);
#else
    for (int64_t at = 0; at < padded(size); ++at) {
        const float value = at < size ? Type::read(x[at]) * raise * factor : 0.0f;
        const int32_t q = static_cast<int32_t>(__builtin_rintf(value));
        const int32_t high = (q + 128) >> 8;
        hi[at] = static_cast<int8_t>(high);
        lo[at] = static_cast<int8_t>(q - 256 * high);
        sum += q;
    }
#endif
    return {hi, lo, static_cast<double>(largest) / kLargest, 128.0 * sum};
}

#if HAS_VNNI
// Returns the sums of four registers.
inline __m256d total(__m512i a, __m512i b, __m512i c, __m512i d) {
    const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    const __m512i all = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
    return _mm256_cvtepi32_pd(_mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1)));
}

inline __m256d both(__m256d high, __m256d low) {
    return _mm256_add_pd(_mm256_mul_pd(high, _mm256_set1_pd(256.0)), low);
}

// Adds the products of the bytes of x and of four weight rows. In assembly because GCC 12 copies all sums to other
// registers and back around its own function for it.
inline void add(__m512i& a, __m512i& b, __m512i& c, __m512i& d, const __m512i (&weight)[kColumns], const int8_t* x) {
    const __m512i bytes = _mm512_load_si512(x);
    __asm__("vpdpbusd %2, %1, %0" : "+v"(a) : "v"(weight[0]), "v"(bytes));
    __asm__("vpdpbusd %2, %1, %0" : "+v"(b) : "v"(weight[1]), "v"(bytes));
    __asm__("vpdpbusd %2, %1, %0" : "+v"(c) : "v"(weight[2]), "v"(bytes));
    __asm__("vpdpbusd %2, %1, %0" : "+v"(d) : "v"(weight[3]), "v"(bytes));
}
#endif

// Writes to `sums` the products of one or two rows of x and of four weight rows, without corrections: exact numbers.
// `is_first`: whether the weights come from memory, and have not been read for other rows of x.
template <int num_rows, bool is_first>
void products(const Row* rows, const int8_t* const* weights, int64_t size, double (*sums)[kColumns]) {
    static_assert(num_rows == 1 || num_rows == 2);
#if HAS_VNNI
    const int8_t *hi = rows[0].hi, *lo = rows[0].lo, *other_hi = rows[num_rows - 1].hi, *other_lo = rows[num_rows - 1].lo;
    const int8_t *from0 = weights[0], *from1 = weights[1], *from2 = weights[2], *from3 = weights[3];
    const __m512i zero = _mm512_setzero_si512(), flip = _mm512_set1_epi8(static_cast<char>(0x80));
    __m512i high0 = zero, high1 = zero, high2 = zero, high3 = zero, low0 = zero, low1 = zero, low2 = zero, low3 = zero;
    __m512i other_high0 = zero, other_high1 = zero, other_high2 = zero, other_high3 = zero;
    __m512i other_low0 = zero, other_low1 = zero, other_low2 = zero, other_low3 = zero;
    for (int64_t at = 0; at < size; at += 64) {
        if (is_first)  // weight rows lie behind each other, so that this many bytes are read per step
            for (int64_t line = 0; line < kColumns; ++line)
                __builtin_prefetch(from0 + kAhead + kColumns * at + 64 * line, 0, 2);
        __m512i weight[kColumns];
        if (__builtin_expect(size - at >= 64, 1)) {
            weight[0] = _mm512_loadu_si512(from0 + at);
            weight[1] = _mm512_loadu_si512(from1 + at);
            weight[2] = _mm512_loadu_si512(from2 + at);
            weight[3] = _mm512_loadu_si512(from3 + at);
        } else {  // x is zero behind the row, whatever the weights
            const __mmask64 mask = (uint64_t{1} << (size - at)) - 1;
            weight[0] = _mm512_maskz_loadu_epi8(mask, from0 + at);
            weight[1] = _mm512_maskz_loadu_epi8(mask, from1 + at);
            weight[2] = _mm512_maskz_loadu_epi8(mask, from2 + at);
            weight[3] = _mm512_maskz_loadu_epi8(mask, from3 + at);
        }
        for (int64_t i = 0; i < kColumns; ++i) weight[i] = _mm512_xor_si512(weight[i], flip);  // plus 128, unsigned
        add(high0, high1, high2, high3, weight, hi + at);
        add(low0, low1, low2, low3, weight, lo + at);
        if (num_rows == 2) {
            add(other_high0, other_high1, other_high2, other_high3, weight, other_hi + at);
            add(other_low0, other_low1, other_low2, other_low3, weight, other_lo + at);
        }
    }
    _mm256_storeu_pd(sums[0], both(total(high0, high1, high2, high3), total(low0, low1, low2, low3)));
    if (num_rows == 2)
        _mm256_storeu_pd(sums[1], both(total(other_high0, other_high1, other_high2, other_high3),
                                       total(other_low0, other_low1, other_low2, other_low3)));
#else
    for (int row = 0; row < num_rows; ++row)
        for (int column = 0; column < kColumns; ++column) {
            int32_t high = 0, low = 0;
            for (int64_t at = 0; at < size; ++at) {
                const int32_t weight = weights[column][at] + 128;
                high += weight * rows[row].hi[at];
                low += weight * rows[row].lo[at];
            }
            sums[row][column] = 256.0 * high + low;
        }
#endif
}

template <class Type>
struct Linear {
    using Stored = typename Type::Stored;
    const Row* rows;
    int64_t num_rows;
    const int8_t* weight;
    const Stored* scale;
    const Stored* bias;
    Stored* out;
    int64_t num_columns;
    int64_t size;

    template <int count, bool is_first>
    void write(int64_t row, int64_t column, const int8_t* const* weights) const {
        double sums[count][kColumns];
        products<count, is_first>(rows + row, weights, size, sums);
        const int64_t filled = num_columns - column < kColumns ? num_columns - column : kColumns;
        Stored results[count][kColumns], scales[kColumns] = {}, biases[kColumns] = {};
        std::memcpy(scales, scale + column, filled * sizeof(Stored));
        if (bias != nullptr) std::memcpy(biases, bias + column, filled * sizeof(Stored));
        for (int i = 0; i < count; ++i) {
            const double correction = rows[row + i].correction, of_row = rows[row + i].scale;
            for (int j = 0; j < kColumns; ++j) {  // -0.0 + 0.0 is 0.0 where there is no bias
                const double scaled = (sums[i][j] - correction) * of_row * Type::read(scales[j]);
                results[i][j] = Type::rounded(static_cast<float>(scaled + Type::read(biases[j])));
            }
            std::memcpy(out + (row + i) * num_columns + column, results[i], filled * sizeof(Stored));
        }
    }

    // Four columns, which are read from memory once, and from the nearest cache for each pair of rows.
    void block(int64_t column) const {
        const int8_t* weights[kColumns];
        for (int64_t j = 0; j < kColumns; ++j)
            weights[j] = weight + (column + j < num_columns ? column + j : num_columns - 1) * size;
        if (num_rows == 1) return write<1, true>(0, column, weights);
        write<2, true>(0, column, weights);
        int64_t row = 2;
        for (; row + 2 <= num_rows; row += 2) write<2, false>(row, column, weights);
        if (row < num_rows) write<1, false>(row, column, weights);
    }
};

template <class Type>
int linear(const void* x, int64_t stride, const int8_t* weight, const void* scale, const void* bias, void* out,
           int64_t num_rows, int64_t num_columns, int64_t size, int num_threads) {
    using Stored = typename Type::Stored;
    static thread_local Scratch scratch;
    const int64_t bytes = padded(size), most_rows = num_rows < kMostRows ? num_rows : kMostRows;
    const int64_t of_rows = (most_rows * static_cast<int64_t>(sizeof(Row)) + 63) / 64 * 64;
    char* memory = scratch.at_least(of_rows + 2 * most_rows * bytes);
    if (memory == nullptr) return 1;
    Row* rows = reinterpret_cast<Row*>(memory);
    int8_t* fixed = reinterpret_cast<int8_t*>(memory + of_rows);
    for (int64_t first = 0; first < num_rows; first += kMostRows) {
        const int64_t count = num_rows - first < kMostRows ? num_rows - first : kMostRows;
        const Stored* from = static_cast<const Stored*>(x) + first * stride;
        const bool has_many = count * size >= kLeastWork && num_threads > 1;
#pragma omp parallel for schedule(static) num_threads(num_threads) if (has_many)
        for (int64_t row = 0; row < count; ++row) {
            int8_t* hi = fixed + 2 * row * bytes;
            rows[row] = to_fixed_point<Type>(from + row * stride, size, hi, hi + bytes);
        }
        const Linear<Type> work{rows, count, weight, static_cast<const Stored*>(scale), static_cast<const Stored*>(bias),
                                static_cast<Stored*>(out) + first * num_columns, num_columns, size};
        const bool is_small = count * num_columns * size < kLeastWork;
#pragma omp parallel for schedule(static) num_threads(num_threads) if (!is_small && num_threads > 1)
        for (int64_t column = 0; column < num_columns; column += kColumns) work.block(column);
    }
    return 0;
}

constexpr float kMostExponent = 88.72283f;  // exp of more is no float32

// exp(x) to 1e-7 of itself, for x up to `kMostExponent`; a loop over it becomes one over vectors.
inline float exp_of(float x) {
    x = x > kMostExponent ? kMostExponent : x;
    x = x < -87.0f ? -87.0f : x;
    const float power = __builtin_rintf(x * 1.44269504f);
    const float rest = (x - power * 0.693359375f) + power * 2.12194440e-4f;
    float sum = 1.9875691500e-4f;
    sum = sum * rest + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    const int32_t bits = (static_cast<int32_t>(power) + 126) << 23;  // half of it, which is a float32 for all of x
    float scale;
    std::memcpy(&scale, &bits, 4);
    return sum * scale * 2.0f;
}

// A linear's weight, `[num_columns, size]` int8, its scales and its bias or null.
struct Weights {
    const int8_t* values;
    const void* scale;
    const void* bias;
    int64_t num_columns;
    int64_t size;
};

// A norm over rows, with a weight or null.
struct Norm {
    const void* weight;
    float eps;
    float offset;

    template <class Type>
    void write(const typename Type::Stored* x, typename Type::Stored* out, int64_t size) const {
        constexpr int64_t kLanes = 16;
        float lanes[kLanes] = {};
        const int64_t whole = size / kLanes * kLanes;
        for (int64_t at = 0; at < whole; at += kLanes)
            for (int64_t lane = 0; lane < kLanes; ++lane) {
                const float value = Type::read(x[at + lane]);
                lanes[lane] += value * value;
            }
        float sum = 0.0f;
        for (int64_t at = whole; at < size; ++at) sum += Type::read(x[at]) * Type::read(x[at]);
        for (int64_t lane = 0; lane < kLanes; ++lane) sum += lanes[lane];
        const float factor = 1.0f / std::sqrt(sum / static_cast<float>(size) + eps);
        const auto* weights = static_cast<const typename Type::Stored*>(weight);
        if (weights == nullptr) {
            for (int64_t at = 0; at < size; ++at) out[at] = Type::rounded(Type::read(x[at]) * factor);
            return;
        }
        for (int64_t at = 0; at < size; ++at)
            out[at] = Type::rounded(Type::read(x[at]) * factor * (Type::read(weights[at]) + offset));
    }
};

struct Layer {
    Weights out, gate_up, down, next;
    Norm norm, next_norm;
};

// total = x + y, rounded, and its norm, row by row.
template <class Type>
void add_and_norm(const typename Type::Stored* x, const typename Type::Stored* y, typename Type::Stored* total,
                  typename Type::Stored* normed, const Norm& norm, int64_t num_rows, int64_t size, int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_rows * size >= kLeastWork && num_threads > 1)
    for (int64_t row = 0; row < num_rows; ++row) {
        const int64_t first = row * size;
        for (int64_t at = first; at < first + size; ++at) total[at] = Type::rounded(Type::read(x[at]) + Type::read(y[at]));
        norm.write<Type>(total + first, normed + first, size);
    }
}

// silu(gate) * up, the halves of a row.
template <class Type>
void gate_rows(const typename Type::Stored* gate_up, typename Type::Stored* out, int64_t num_rows, int64_t size,
               int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_rows * size >= kLeastWork && num_threads > 1)
    for (int64_t row = 0; row < num_rows; ++row) {
        const typename Type::Stored *gates = gate_up + row * 2 * size, *ups = gates + size;
        for (int64_t at = 0; at < size; ++at) {
            const float gate = Type::read(gates[at]);
            const float below = gate < -kMostExponent ? std::numeric_limits<float>::infinity() : 1.0f + exp_of(-gate);
            out[row * size + at] = Type::rounded(gate / below * Type::read(ups[at]));
        }
    }
}

// All of a layer for `kMostRows` rows at a time, so that what is between its linears stays in the caches.
template <class Type>
int layer(const void* x, const void* residual, void* out, void* total_out, const Layer& of, int64_t num_rows,
          int num_threads) {
    using Stored = typename Type::Stored;
    static thread_local Scratch scratch;
    const int64_t hidden = of.out.num_columns, inner = of.down.size;
    const int64_t most_rows = num_rows < kMostRows ? num_rows : kMostRows;
    Stored* memory = reinterpret_cast<Stored*>(scratch.at_least(most_rows * 3 * (hidden + inner) * sizeof(Stored)));
    if (memory == nullptr) return 1;
    Stored *added = memory, *total = added + most_rows * hidden, *normed = total + most_rows * hidden;
    Stored *gate_up = normed + most_rows * hidden, *product = gate_up + most_rows * 2 * inner;
    const auto multiply = [&](const Stored* rows, const Weights& by, Stored* to, int64_t count) {
        return linear<Type>(rows, by.size, by.values, by.scale, by.bias, to, count, by.num_columns, by.size, num_threads);
    };
    for (int64_t first = 0; first < num_rows; first += kMostRows) {
        const int64_t count = num_rows - first < kMostRows ? num_rows - first : kMostRows;
        const Stored* before = static_cast<const Stored*>(residual) + first * hidden;
        Stored* after = static_cast<Stored*>(total_out) + first * hidden;
        if (multiply(static_cast<const Stored*>(x) + first * of.out.size, of.out, added, count)) return 1;
        add_and_norm<Type>(added, before, total, normed, of.norm, count, hidden, num_threads);
        if (multiply(normed, of.gate_up, gate_up, count)) return 1;
        gate_rows<Type>(gate_up, product, count, inner, num_threads);
        if (multiply(product, of.down, added, count)) return 1;
        add_and_norm<Type>(added, total, after, normed, of.next_norm, count, hidden, num_threads);
        if (multiply(normed, of.next, static_cast<Stored*>(out) + first * of.next.num_columns, count)) return 1;
    }
    return 0;
}

}  // namespace

extern "C" {

// Whether the instructions were there when this was compiled: else it is correct and slow.
int piecegraph_has_vnni() { return HAS_VNNI; }

// out[row, column] = sum(x[row] * weight[column]) * scale[column] + bias[column]
//
// x, scale, bias (or null) and out are float32, or bfloat16 if `is_bfloat16`; rows of x are `stride` numbers apart, all
// else is contiguous. A row with an infinity or a NaN gives NaN. Returns 0, or 1 where there is no memory.
int piecegraph_int8_linear(const void* x, int64_t stride, const int8_t* weight, const void* scale, const void* bias,
                           void* out, int64_t num_rows, int64_t num_columns, int64_t size, int is_bfloat16,
                           int num_threads) {
    return (is_bfloat16 ? linear<BFloat16> : linear<Float32>)(x, stride, weight, scale, bias, out, num_rows, num_columns,
                                                              size, num_threads);
}

// The linears between two calls of attention, with the sums and norms around an MLP whose activation is silu:
//
//   total = x * out + residual
//   total_out = (silu(gate) * up) * down + total, where gate and up are the halves of norm(total) * gate_up
//   next_out = next_norm(total_out) * next
//
// Each product is what `piecegraph_int8_linear` computes. Rows are contiguous and num_columns or size numbers long.
// Norms are computed in float32 and rounded once. Returns 0, or 1 where there is no memory.
int piecegraph_int8_layer(const void* x, const void* residual, void* next_out, void* total_out,
                          const int8_t* out, const void* out_scale, const void* out_bias, const void* norm,
                          const int8_t* gate_up, const void* gate_up_scale, const void* gate_up_bias,
                          const int8_t* down, const void* down_scale, const void* down_bias, const void* next_norm,
                          const int8_t* next, const void* next_scale, const void* next_bias, float eps, float offset,
                          float next_eps, float next_offset, int64_t num_rows, int64_t size, int64_t hidden,
                          int64_t inner, int64_t num_columns, int is_bfloat16, int num_threads) {
    const Layer of{{out, out_scale, out_bias, hidden, size},
                   {gate_up, gate_up_scale, gate_up_bias, 2 * inner, hidden},
                   {down, down_scale, down_bias, hidden, inner},
                   {next, next_scale, next_bias, num_columns, hidden},
                   {norm, eps, offset},
                   {next_norm, next_eps, next_offset}};
    return (is_bfloat16 ? layer<BFloat16> : layer<Float32>)(x, residual, next_out, total_out, of, num_rows, num_threads);
}

// total = x + residual, and its norm: rows of `size` numbers, as above.
int piecegraph_add_and_norm(const void* x, const void* residual, void* total, void* normed, const void* weight,
                            float eps, float offset, int64_t num_rows, int64_t size, int is_bfloat16, int num_threads) {
    const Norm norm{weight, eps, offset};
    if (is_bfloat16)
        add_and_norm<BFloat16>(static_cast<const uint16_t*>(x), static_cast<const uint16_t*>(residual),
                               static_cast<uint16_t*>(total), static_cast<uint16_t*>(normed), norm, num_rows, size,
                               num_threads);
    else
        add_and_norm<Float32>(static_cast<const float*>(x), static_cast<const float*>(residual),
                              static_cast<float*>(total), static_cast<float*>(normed), norm, num_rows, size,
                              num_threads);
    return 0;
}

// out = silu(gate) * up: rows of `size` numbers, and twice as many.
int piecegraph_gate_rows(const void* gate_up, void* out, int64_t num_rows, int64_t size, int is_bfloat16,
                         int num_threads) {
    if (is_bfloat16)
        gate_rows<BFloat16>(static_cast<const uint16_t*>(gate_up), static_cast<uint16_t*>(out), num_rows, size,
                            num_threads);
    else
        gate_rows<Float32>(static_cast<const float*>(gate_up), static_cast<float*>(out), num_rows, size, num_threads);
    return 0;
}
}
