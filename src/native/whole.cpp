// Products with matrices of whole numbers of which all are stored, without a mask: most of their weights are not zero.
// How their rows are stored is in words.h.
//
// There are two kinds of products. Exact ones are those of the numbers as float32. The others take vectors that were
// rounded to whole numbers of 16 bits, 64 at a time (Rounded), and add up in 32 bits: two products for each lane and
// instruction, instead of one, and fewer conversions. With 8 bits there would be four, but signs to move around, so
// that it is no faster with AVX2; and models with large outliers would lose by it.
//
// Those of rounded vectors with VNNI are of rows in strips: strips.cpp.

#include <algorithm>
#include <limits>

#include "words.h"

namespace niwaki {
namespace {

// Of a rounded vector: its upper byte, rounded, has to be one.
constexpr float MOST = 32639.0f;

template <int dtype, bool rounded>
void portable_rows(const Product& p, std::int64_t b, int vectors, std::int64_t first, std::int64_t last) {
    constexpr int lanes = 8;  // sums that are independent of each other
    const Matrix& m = p.matrix;
    const std::int64_t words = m.stride / 8, each = words / m.groups;
    std::uint8_t room[SIZE<dtype>];
    for (std::int64_t row = first; row < last; ++row) {
        float sums[VECTORS] = {};
        for (std::int64_t group = 0; group < m.groups; ++group) {
            float parts[VECTORS] = {};
            for (std::int64_t word = group * each; word < (group + 1) * each; ++word) {
                std::int8_t numbers[WORD];
                unpack<dtype>(word_of<dtype>(m, row, word, room), numbers);
                for (int v = 0; v < vectors; ++v) {
                    const std::int64_t at = (b + v) * words + word;
                    if constexpr (rounded) {
                        const std::int16_t* x = p.rounded->numbers.data() + at * WORD;
                        std::int32_t sum = 0;
                        for (int i = 0; i < WORD; ++i) sum += numbers[i] * x[i];
                        parts[v] += static_cast<float>(sum) * p.rounded->units[at];
                    } else {
                        const float* x = p.x + at * WORD;
                        float several[lanes] = {};
                        for (int i = 0; i < WORD; i += lanes)
                            for (int j = 0; j < lanes; ++j) several[j] += numbers[i + j] * x[i + j];
                        for (const float part : several) parts[v] += part;
                    }
                }
            }
            const float scale = *scale_of(m, row, group) * UNIT<dtype>;
            for (int v = 0; v < vectors; ++v) sums[v] += parts[v] * scale;
        }
        for (int v = 0; v < vectors; ++v) p.y[(b + v) * m.rows + row] = sums[v];
    }
}

#if defined(NIWAKI_X86)

// A word of `rows` rows, `apart` from each other, times those of the vectors at `at` and `words` behind it, and times
// the `scales` of the rows, added to `total`.
template <int dtype, bool rounded, int vectors, int rows>
TARGET(NIWAKI_AVX2)
inline void avx2_word(const Product& p, std::int64_t at, std::int64_t words, const std::uint8_t* place,
                      std::int64_t apart, const __m256 (&scales)[rows], __m256 (&total)[rows][vectors]) {
    if constexpr (rounded) {
#pragma GCC unroll 4
        for (int r = 0; r < rows; ++r) {
            __m256i numbers[4];
            widen<dtype>(place + r * apart, numbers);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; ++v) {
                const auto* x = reinterpret_cast<const __m256i*>(p.rounded->numbers.data() + (at + v * words) * WORD);
                __m256i sums[4];
#pragma GCC unroll 4
                for (int i = 0; i < 4; ++i) sums[i] = _mm256_madd_epi16(numbers[i], _mm256_loadu_si256(x + i));
                const __m256i both =
                    _mm256_add_epi32(_mm256_add_epi32(sums[0], sums[1]), _mm256_add_epi32(sums[2], sums[3]));
                const __m256 unit = _mm256_broadcast_ss(p.rounded->units.data() + at + v * words);
                total[r][v] = _mm256_fmadd_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(both), unit), scales[r], total[r][v]);
            }
        }
    } else {
        __m256 parts[rows][vectors];
        for (auto& those : parts)
            for (auto& sum : those) sum = _mm256_setzero_ps();
        const std::uint8_t* bytes[rows];
        alignas(32) std::uint8_t unpacked[dtype == INT8 ? 1 : rows][WORD];
        for (int r = 0; r < rows; ++r) {
            bytes[r] = place + r * apart;
            if constexpr (dtype != INT8) {
                __m256i numbers[2];
                unpack<dtype>(bytes[r], numbers);
                for (int half = 0; half < 2; ++half)
                    _mm256_store_si256(reinterpret_cast<__m256i*>(unpacked[r]) + half, numbers[half]);
                bytes[r] = unpacked[r];
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < WORD; i += 8) {
            __m256 x[vectors];
            for (int v = 0; v < vectors; ++v) x[v] = _mm256_loadu_ps(p.x + (at + v * words) * WORD + i);
#pragma GCC unroll 4
            for (int r = 0; r < rows; ++r) {
                const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes[r] + i));
                const __m256 weights = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight));
#pragma GCC unroll 4
                for (int v = 0; v < vectors; ++v) parts[r][v] = _mm256_fmadd_ps(weights, x[v], parts[r][v]);
            }
        }
        for (int r = 0; r < rows; ++r)
            for (int v = 0; v < vectors; ++v) total[r][v] = _mm256_fmadd_ps(parts[r][v], scales[r], total[r][v]);
    }
}

// `rows` rows, `step` apart, and those behind them.
template <int dtype, bool rounded, int vectors, int rows>
TARGET(NIWAKI_AVX2)
void avx2_streams(const Product& p, std::int64_t b, std::int64_t first, std::int64_t step) {
    const Matrix& m = p.matrix;
    const std::int64_t words = m.stride / 8, each = words / m.groups, apart = step * words * SIZE<dtype>;
    const std::uint8_t* place = row_of<dtype>(m, first);
    for (std::int64_t row = first; row < first + step; ++row) {
        __m256 total[rows][vectors];
        for (auto& those : total)
            for (auto& sum : those) sum = _mm256_setzero_ps();
        std::int64_t at = b * words;
        for (std::int64_t group = 0; group < m.groups; ++group) {
            __m256 scales[rows];
            for (int r = 0; r < rows; ++r)
                scales[r] = _mm256_broadcast_ss(m.scales + (row + r * step) * m.groups + group);
            for (const std::int64_t end = at + each; at != end; ++at, place += SIZE<dtype>) {
                ask_for<rows, SIZE<dtype>>(place, apart);
                avx2_word<dtype, rounded>(p, at, words, place, apart, scales, total);
            }
        }
        for (int r = 0; r < rows; ++r)
            for (int v = 0; v < vectors; ++v)
                p.y[(b + v) * m.rows + row + r * step] = sum_of(total[r][v]) * UNIT<dtype>;
    }
}

template <int dtype, bool rounded>
void avx2_rows(const Product& p, std::int64_t b, int vectors, std::int64_t first, std::int64_t last) {
    with_number(vectors, [&](auto number) {
        constexpr int most = number == 1 ? 4 : 2;
        in_streams<most>(first, last, [&](auto rows, std::int64_t from, std::int64_t step) {
            avx2_streams<dtype, rounded, number, rows>(p, b, from, step);
        });
    });
}

#endif

#if defined(NIWAKI_X86) || defined(NIWAKI_EMULATE)

#define NIWAKI_AVX512 "avx512f,avx512bw"

// As avx2_word.
template <int dtype, int vectors, int rows>
TARGET(NIWAKI_AVX512)
inline void avx512_word(const Product& p, std::int64_t at, std::int64_t words, const std::uint8_t* place,
                        std::int64_t apart, const __m512 (&scales)[rows], __m512 (&total)[rows][vectors]) {
    __m512 parts[rows][vectors];
    for (auto& those : parts)
        for (auto& sum : those) sum = _mm512_setzero_ps();
    // Of INT4, by the bits of a number; a look-up takes the lowest four only.
    alignas(64) static constexpr float HALVES[16] = {0,    16,   32,  48,  64,  80,  96,  112,
                                                     -128, -112, -96, -80, -64, -48, -32, -16};
    const __m512 halves = _mm512_loadu_ps(HALVES);
    constexpr bool narrow = dtype != INT4 && dtype != INT8;
    alignas(64) std::int8_t unpacked[narrow ? rows : 1][WORD];
    if constexpr (narrow)
        for (int r = 0; r < rows; ++r) niwaki::unpack<dtype>(place + r * apart, unpacked[r]);
#pragma GCC unroll 4
    for (int i = 0; i < (dtype == INT4 ? WORD / 2 : WORD); i += 16) {
        __m512 x[vectors][2];
        for (int v = 0; v < vectors; ++v)
            for (int half = 0; half < 1 + (dtype == INT4); ++half)
                x[v][half] = _mm512_loadu_ps(p.x + (at + v * words) * WORD + i + half * WORD / 2);
#pragma GCC unroll 4
        for (int r = 0; r < rows; ++r) {
            const void* from = place + r * apart + i;
            if constexpr (narrow) from = unpacked[r] + i;
            const __m128i bytes = _mm_loadu_si128(static_cast<const __m128i*>(from));
            if constexpr (dtype == INT4) {
                const __m512i both = _mm512_cvtepu8_epi32(bytes);
                const __m512 lower = _mm512_permutexvar_ps(both, halves);
                const __m512 upper = _mm512_permutexvar_ps(_mm512_srli_epi32(both, 4), halves);
#pragma GCC unroll 4
                for (int v = 0; v < vectors; ++v)
                    parts[r][v] = _mm512_fmadd_ps(upper, x[v][1], _mm512_fmadd_ps(lower, x[v][0], parts[r][v]));
            } else {
                const __m512 weights = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
#pragma GCC unroll 4
                for (int v = 0; v < vectors; ++v) parts[r][v] = _mm512_fmadd_ps(weights, x[v][0], parts[r][v]);
            }
        }
    }
    for (int r = 0; r < rows; ++r)
        for (int v = 0; v < vectors; ++v) total[r][v] = _mm512_fmadd_ps(parts[r][v], scales[r], total[r][v]);
}

// As avx2_streams.
template <int dtype, int vectors, int rows>
TARGET(NIWAKI_AVX512)
void avx512_streams(const Product& p, std::int64_t b, std::int64_t first, std::int64_t step) {
    const Matrix& m = p.matrix;
    const std::int64_t words = m.stride / 8, each = words / m.groups, apart = step * words * SIZE<dtype>;
    const std::uint8_t* place = row_of<dtype>(m, first);
    for (std::int64_t row = first; row < first + step; ++row) {
        __m512 total[rows][vectors];
        for (auto& those : total)
            for (auto& sum : those) sum = _mm512_setzero_ps();
        std::int64_t at = b * words;
        for (std::int64_t group = 0; group < m.groups; ++group) {
            __m512 scales[rows];
            for (int r = 0; r < rows; ++r) scales[r] = _mm512_set1_ps(m.scales[(row + r * step) * m.groups + group]);
            for (const std::int64_t end = at + each; at != end; ++at, place += SIZE<dtype>) {
                ask_for<rows, SIZE<dtype>>(place, apart);
                avx512_word<dtype>(p, at, words, place, apart, scales, total);
            }
        }
        for (int r = 0; r < rows; ++r)
            for (int v = 0; v < vectors; ++v)
                p.y[(b + v) * m.rows + row + r * step] = _mm512_reduce_add_ps(total[r][v]) * UNIT<dtype>;
    }
}

template <int dtype>
void avx512_rows(const Product& p, std::int64_t b, int vectors, std::int64_t first, std::int64_t last) {
    with_number(vectors, [&](auto number) {
        in_streams<4>(first, last, [&](auto rows, std::int64_t from, std::int64_t step) {
            avx512_streams<dtype, number, rows>(p, b, from, step);
        });
    });
}

#endif

template <int dtype>
Rows rows_of_dtype([[maybe_unused]] int path, bool rounded, bool in_strips) {
#if defined(NIWAKI_X86) || defined(NIWAKI_EMULATE)
    if ((path >= AVX512 || path == AVX2_VNNI) && rounded && in_strips) return strip_rows_of(path, dtype);
    if (path >= AVX512 && !rounded && !in_strips) return avx512_rows<dtype>;
#endif
#if defined(NIWAKI_X86)
    if (path >= AVX2 && !in_strips) return rounded ? avx2_rows<dtype, true> : avx2_rows<dtype, false>;
#endif
    return rounded ? portable_rows<dtype, true> : portable_rows<dtype, false>;
}

template <int dtype>
PART_OF_CALLER void expand(const Matrix& m, std::int64_t row, std::int64_t columns, float* out) {
    const std::int64_t each = m.stride / 8 / m.groups;
    std::uint8_t room[SIZE<dtype>];
    for (std::int64_t word = 0; word * WORD < columns; ++word) {
        std::int8_t numbers[WORD];
        unpack<dtype>(word_of<dtype>(m, row, word, room), numbers);
        const float scale = *scale_of(m, row, word / each);
        const int count = static_cast<int>(std::min<std::int64_t>(WORD, columns - word * WORD));
        // Not as one factor: with it a small scale would lose digits.
        for (int i = 0; i < count; ++i) out[word * WORD + i] = numbers[i] * UNIT<dtype> * scale;
    }
}

template <int dtype>
void portable_expand(const Matrix& m, std::int64_t row, std::int64_t columns, float* out) {
    expand<dtype>(m, row, columns, out);
}

#if defined(NIWAKI_X86)

template <int dtype>
TARGET(NIWAKI_AVX2)
void avx2_expand(const Matrix& m, std::int64_t row, std::int64_t columns, float* out) {
    expand<dtype>(m, row, columns, out);
}

#endif

// Words of vectors as whole numbers and their units.
PART_OF_CALLER void round_words(const float* from, std::int64_t words, std::int16_t* to, float* units) {
    for (std::int64_t word = 0; word < words; ++word, from += WORD, to += WORD) {
        // As whole numbers, of which that of infinity is larger than all others, and that of what is no number above
        // it.
        std::int32_t most = 0;
        for (int i = 0; i < WORD; ++i) most = std::max(most, load<std::int32_t>(from + i) & 0x7fffffff);
        const float largest = from_bits(static_cast<std::uint32_t>(most));
        if (most >= 0x7f800000) {
            units[word] = std::numeric_limits<float>::quiet_NaN();
        } else if (largest >= 0x1p-100f) {  // or its reciprocal might be infinite: nobody misses what is smaller
            units[word] = largest / MOST;
            // Behind a number of this size there is no room for fractions: they are rounded, to even.
            constexpr float large = 0x1.8p23f;
            const float factor = MOST / largest;
            for (int i = 0; i < WORD; ++i) {
                const float moved = from[i] * factor + large;
                to[i] = static_cast<std::int16_t>(load<std::int32_t>(&moved) - 0x4b400000);
            }
        }
    }
}

void portable_round(const float* from, std::int64_t words, std::int16_t* to, float* units) {
    round_words(from, words, to, units);
}

#if defined(NIWAKI_X86)

// Without instructions that round a product and a sum once: a number between two others would go to the other one.
TARGET("avx2")
void avx2_round(const float* from, std::int64_t words, std::int16_t* to, float* units) {
    round_words(from, words, to, units);
}

#endif

// Numbers of words as 256 times one byte and another, and their sums.
PART_OF_CALLER void split_words(const std::int16_t* from, std::int64_t words, std::int8_t* to, std::int32_t* sums) {
    for (std::int64_t word = 0; word < words; ++word, from += WORD, to += 2 * WORD) {
        std::int32_t sum = 0;
        for (int i = 0; i < WORD; ++i) {
            to[i] = static_cast<std::int8_t>((from[i] + 128) >> 8);
            to[i + WORD] = static_cast<std::int8_t>(from[i]);
            sum += from[i];
        }
        sums[word] = sum;
    }
}

void portable_split(const std::int16_t* from, std::int64_t words, std::int8_t* to, std::int32_t* sums) {
    split_words(from, words, to, sums);
}

#if defined(NIWAKI_X86)

TARGET("avx2")
void avx2_split(const std::int16_t* from, std::int64_t words, std::int8_t* to, std::int32_t* sums) {
    split_words(from, words, to, sums);
}

#endif

}  // namespace

Rounded::Rounded([[maybe_unused]] int path, const float* x, std::int64_t count, int threads)
    : numbers(count), units(count / WORD) {
    auto* function = portable_round;
#if defined(NIWAKI_X86)
    if (path >= AVX2) function = avx2_round;
#endif
    for_rows(count / WORD, 256, threads, [&](std::int64_t first, std::int64_t last) {
        function(x + first * WORD, last - first, numbers.data() + first * WORD, units.data() + first);
    });
}

void Rounded::split([[maybe_unused]] int path) {
    if (!bytes.empty()) return;
    auto* function = portable_split;
#if defined(NIWAKI_X86)
    if (path >= AVX2) function = avx2_split;
#endif
    bytes.resize(2 * numbers.size());
    sums.resize(units.size());
    function(numbers.data(), static_cast<std::int64_t>(units.size()), bytes.data(), sums.data());
}

Rows whole_rows_of(int path, const Product& product) {
    const Matrix& m = product.matrix;
    return with_dtype(
        m.dtype, [&](auto dtype) { return rows_of_dtype<dtype>(path, product.rounded != nullptr, m.in_strips != 0); });
}

void rows_behind_strips(const Product& p, std::int64_t b, int vectors, std::int64_t first, std::int64_t last) {
    with_dtype(p.matrix.dtype,
               [&](auto dtype) { rows_of_dtype<dtype>(AVX2, true, false)(p, b, vectors, first, last); });
}

void expand_whole([[maybe_unused]] int path, const Matrix& m, std::int64_t row, std::int64_t columns, float* out) {
    with_dtype(m.dtype, [&](auto dtype) {
#if defined(NIWAKI_X86)
        if (path >= AVX2) return avx2_expand<dtype>(m, row, columns, out);
#endif
        portable_expand<dtype>(m, row, columns, out);
    });
}

}  // namespace niwaki
