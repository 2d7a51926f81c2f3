// Products with matrices of whole numbers of which all are stored, without a mask: most of their weights are not zero.
// How their rows are stored is in words.h.
//
// There are two kinds of products. Exact ones are those of the numbers as float32. The others take vectors that were
// rounded to whole numbers of 16 bits, 64 at a time (Rounded), and add up in 32 bits: two products for each lane and
// instruction, instead of one, and fewer conversions. With 8 bits there would be four, but signs to move around, so
// that it is no faster with AVX2; and models with large outliers would lose by it.

#include <algorithm>
#include <limits>

#include "words.h"

namespace niwaki {
namespace {

constexpr float MOST = 32767.0f;  // of a rounded vector

template <int dtype, bool rounded>
void portable_rows(const Product& p, std::int64_t b, int vectors, std::int64_t first, std::int64_t last) {
    constexpr int lanes = 8;  // sums that are independent of each other
    const Matrix& m = p.matrix;
    const std::int64_t words = m.stride / 8, each = words / m.groups;
    const std::uint8_t* place = row_of<dtype>(m, first);
    for (std::int64_t row = first; row < last; ++row) {
        float sums[VECTORS] = {};
        for (std::int64_t group = 0; group < m.groups; ++group) {
            float parts[VECTORS] = {};
            for (std::int64_t word = group * each; word < (group + 1) * each; ++word, place += SIZE<dtype>) {
                std::int8_t numbers[WORD];
                unpack<dtype>(place, numbers);
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
            const float scale = m.scales[row * m.groups + group] * UNIT<dtype>;
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

#define NIWAKI_AVX512VNNI "avx512f,avx512bw,avx512vnni"

template <int dtype>
TARGET(NIWAKI_AVX512VNNI)
inline __m512i unpack(const std::uint8_t* word) {
    if constexpr (dtype == INT8) {
        return _mm512_loadu_si512(word);
    } else {
        __m512i numbers = _mm512_setzero_si512();
        if constexpr (HAS_FOUR<dtype>) {
            const __m512i twice = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(word)));
            const __m512i apart = _mm512_sllv_epi64(twice, _mm512_set_epi64(0, 0, 0, 0, 4, 4, 4, 4));
            constexpr int ends = BITS<dtype> - 4;  // how far they are from where they belong
            const __m512i moved = ends ? _mm512_srli_epi32(apart, ends) : apart;
            numbers = _mm512_and_si512(moved, _mm512_set1_epi32(static_cast<int>((0xf0u >> ends) * 0x01010101u)));
        }
        if constexpr (HAS_TWO<dtype>) {
            const __m128i once = _mm_loadu_si128(reinterpret_cast<const __m128i*>(word + TWOS<dtype>));
            const __m512i moved =
                _mm512_sllv_epi64(_mm512_broadcast_i32x4(once), _mm512_set_epi64(0, 0, 2, 2, 4, 4, 6, 6));
            const __m512i fields = _mm512_and_si512(moved, _mm512_set1_epi32(static_cast<int>(0xc0c0c0c0u)));
            // None leaves its byte.
            numbers = _mm512_or_si512(numbers, HAS_ONE<dtype> ? _mm512_srli_epi32(fields, 1) : fields);
        }
        if constexpr (HAS_ONE<dtype>)
            numbers = _mm512_or_si512(numbers, _mm512_maskz_set1_epi8(load<std::uint64_t>(word + ONES<dtype>), -128));
        return numbers;
    }
}

// As avx2_word.
template <int dtype, bool rounded, int vectors, int rows>
TARGET(NIWAKI_AVX512VNNI)
inline void avx512_word(const Product& p, std::int64_t at, std::int64_t words, const std::uint8_t* place,
                        std::int64_t apart, const __m512 (&scales)[rows], __m512 (&total)[rows][vectors]) {
    if constexpr (rounded) {
#pragma GCC unroll 4
        for (int r = 0; r < rows; ++r) {
            const __m512i bytes = unpack<dtype>(place + r * apart);
            const __m512i numbers[2] = {_mm512_cvtepi8_epi16(_mm512_castsi512_si256(bytes)),
                                        _mm512_cvtepi8_epi16(_mm512_extracti64x4_epi64(bytes, 1))};
#pragma GCC unroll 4
            for (int v = 0; v < vectors; ++v) {
                const std::int64_t word = at + v * words;
                const std::int16_t* x = p.rounded->numbers.data() + word * WORD;
                __m512i sums = _mm512_setzero_si512();
#pragma GCC unroll 2
                for (int half = 0; half < 2; ++half)
                    sums = _mm512_dpwssd_epi32(sums, numbers[half], _mm512_loadu_si512(x + half * WORD / 2));
                const __m512 unit = _mm512_set1_ps(p.rounded->units[word]);
                total[r][v] = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(sums), unit), scales[r], total[r][v]);
            }
        }
    } else {
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
}

// As avx2_streams.
template <int dtype, bool rounded, int vectors, int rows>
TARGET(NIWAKI_AVX512VNNI)
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
                avx512_word<dtype, rounded>(p, at, words, place, apart, scales, total);
            }
        }
        for (int r = 0; r < rows; ++r)
            for (int v = 0; v < vectors; ++v)
                p.y[(b + v) * m.rows + row + r * step] = _mm512_reduce_add_ps(total[r][v]) * UNIT<dtype>;
    }
}

template <int dtype, bool rounded>
void avx512_rows(const Product& p, std::int64_t b, int vectors, std::int64_t first, std::int64_t last) {
    with_number(vectors, [&](auto number) {
        in_streams<4>(first, last, [&](auto rows, std::int64_t from, std::int64_t step) {
            avx512_streams<dtype, rounded, number, rows>(p, b, from, step);
        });
    });
}

#endif

template <int dtype>
Rows rows_of_dtype([[maybe_unused]] int path, bool rounded) {
#if defined(NIWAKI_X86) || defined(NIWAKI_EMULATE)
    if (path >= AVX512) return rounded ? avx512_rows<dtype, true> : avx512_rows<dtype, false>;
#endif
#if defined(NIWAKI_X86)
    if (path >= AVX2) return rounded ? avx2_rows<dtype, true> : avx2_rows<dtype, false>;
#endif
    return rounded ? portable_rows<dtype, true> : portable_rows<dtype, false>;
}

template <int dtype>
PART_OF_CALLER void expand(const Matrix& m, std::int64_t row, std::int64_t columns, float* out) {
    const std::int64_t each = m.stride / 8 / m.groups;
    const std::uint8_t* place = row_of<dtype>(m, row);
    for (std::int64_t word = 0; word * WORD < columns; ++word, place += SIZE<dtype>) {
        std::int8_t numbers[WORD];
        unpack<dtype>(place, numbers);
        const float scale = m.scales[row * m.groups + word / each];
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

Rows whole_rows_of(int path, const Product& product) {
    const bool rounded = product.rounded != nullptr;
    return with_dtype(product.matrix.dtype, [&](auto dtype) { return rows_of_dtype<dtype>(path, rounded); });
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
