// Products of many vectors, such as those of a prompt, with matrices without a mask, in whole numbers.
//
// Some rows at a time, a panel, are unpacked for all vectors: to numbers of 16 bits, two columns after each other and
// then the same two of the next row. So each lane of a register is a row, a pair of columns of a vector goes to all
// lanes, and nothing is summed over lanes. Vectors were rounded to 16 bits (Rounded), and products of a word are added
// up in 32 bits, as those of single vectors are in whole.cpp.

#include <algorithm>
#include <utility>
#include <vector>

#include "strips.h"

namespace niwaki {
namespace {

constexpr int PAIRS = WORD / 2;
// Of a panel at a time: 32 KiB of 16 rows, which a core keeps beside itself.
constexpr std::int64_t MOST_WORDS = 16;

// Some words of a panel of `rows` rows: pairs (words, PAIRS, rows) and what to multiply them with (words, rows).
template <int rows>
struct Panel {
    std::vector<std::int32_t> pairs = std::vector<std::int32_t>(MOST_WORDS * PAIRS * rows);
    std::vector<float> scales = std::vector<float>(MOST_WORDS * rows);
};

// What comes of products of a panel's words with vectors, (vectors, rows); `x` and `units` are those of the first
// vector, and those of the next one `stride` words behind them.
template <int rows>
using Kernel = void (*)(const Panel<rows>&, std::int64_t words, const std::int16_t* x, const float* units,
                        std::int64_t stride, float* sums);

// Row `to` of a panel.
template <int dtype, int rows>
PART_OF_CALLER void unpack_row(const std::uint8_t* place, std::int64_t words, int to, std::int32_t* pairs) {
    for (std::int64_t word = 0; word < words; ++word, place += SIZE<dtype>) {
        std::int8_t numbers[WORD];
        unpack<dtype>(place, numbers);
        for (int pair = 0; pair < PAIRS; ++pair) {
            const auto first = static_cast<std::uint16_t>(static_cast<std::int16_t>(numbers[2 * pair]));
            const std::uint32_t both = first | static_cast<std::uint32_t>(numbers[2 * pair + 1]) << 16;
            pairs[(word * PAIRS + pair) * rows + to] = static_cast<std::int32_t>(both);
        }
    }
}

#if defined(NIWAKI_X86)

// Eight registers of eight numbers, which change places as those of a matrix do.
TARGET(NIWAKI_AVX2)
inline void transpose(__m256i (&lines)[8]) {
    __m256i twos[8], fours[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        twos[i] = _mm256_unpacklo_epi32(lines[i], lines[i + 1]);
        twos[i + 1] = _mm256_unpackhi_epi32(lines[i], lines[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        fours[i] = _mm256_unpacklo_epi64(twos[i], twos[i + 2]);
        fours[i + 1] = _mm256_unpackhi_epi64(twos[i], twos[i + 2]);
        fours[i + 2] = _mm256_unpacklo_epi64(twos[i + 1], twos[i + 3]);
        fours[i + 3] = _mm256_unpackhi_epi64(twos[i + 1], twos[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        lines[i] = _mm256_permute2x128_si256(fours[i], fours[i + 4], 0x20);
        lines[i + 4] = _mm256_permute2x128_si256(fours[i], fours[i + 4], 0x31);
    }
}

// Eight rows of a panel, from `to` on, which are `apart` in the matrix.
template <int dtype, int rows>
TARGET(NIWAKI_AVX2)
void avx2_unpack_rows(const std::uint8_t* place, std::int64_t apart, std::int64_t words, int to, std::int32_t* pairs) {
    for (std::int64_t word = 0; word < words; ++word, place += SIZE<dtype>) {
        __m256i numbers[8][4];
        for (int r = 0; r < 8; ++r) widen<dtype>(place + r * apart, numbers[r]);
        for (int part = 0; part < 4; ++part) {
            __m256i lines[8];
            for (int r = 0; r < 8; ++r) lines[r] = numbers[r][part];
            transpose(lines);
            for (int pair = 0; pair < 8; ++pair) {
                std::int32_t* at = pairs + (word * PAIRS + 8 * part + pair) * rows + to;
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), lines[pair]);
            }
        }
    }
}

constexpr int AVX2_ROWS = 16;

template <int vectors>
TARGET(NIWAKI_AVX2)
void avx2_panel(const Panel<AVX2_ROWS>& panel, std::int64_t words, const std::int16_t* x, const float* units,
                std::int64_t stride, float* out) {
    __m256 total[2][vectors];
    for (auto& those : total)
        for (auto& sum : those) sum = _mm256_setzero_ps();
    const auto* pairs = reinterpret_cast<const __m256i*>(panel.pairs.data());
    for (std::int64_t word = 0; word < words; ++word) {
        __m256i sums[2][vectors];
        for (auto& those : sums)
            for (auto& sum : those) sum = _mm256_setzero_si256();
#pragma GCC unroll 4
        for (int pair = 0; pair < PAIRS; ++pair, pairs += 2) {
            const __m256i rows[2] = {_mm256_loadu_si256(pairs), _mm256_loadu_si256(pairs + 1)};
#pragma GCC unroll 4
            for (int v = 0; v < vectors; ++v) {
                const auto both = load<std::int32_t>(x + (v * stride + word) * WORD + 2 * pair);
                const __m256i numbers = _mm256_set1_epi32(both);
#pragma GCC unroll 2
                for (int half = 0; half < 2; ++half)
                    sums[half][v] = _mm256_add_epi32(sums[half][v], _mm256_madd_epi16(rows[half], numbers));
                // Or compilers would read the numbers of all vectors first, and have too few registers for the sums.
                __asm__("" : "+x"(sums[0][v]), "+x"(sums[1][v])::"memory");
            }
        }
        for (int v = 0; v < vectors; ++v) {
            const __m256 unit = _mm256_broadcast_ss(units + v * stride + word);
            for (int half = 0; half < 2; ++half) {
                const __m256 scales = _mm256_loadu_ps(panel.scales.data() + word * AVX2_ROWS + 8 * half);
                const __m256 sum = _mm256_mul_ps(_mm256_cvtepi32_ps(sums[half][v]), unit);
                total[half][v] = _mm256_fmadd_ps(sum, scales, total[half][v]);
            }
        }
    }
    for (int v = 0; v < vectors; ++v)
        for (int half = 0; half < 2; ++half) _mm256_storeu_ps(out + v * AVX2_ROWS + 8 * half, total[half][v]);
}

#endif

#if defined(NIWAKI_X86) || defined(NIWAKI_EMULATE)

constexpr int AVX512_ROWS = 32;

// Columns 4 j to 4 j + 3 of a strip's rows as two pairs of each, from `pairs` on.
template <int dtype, int j>
TARGET(NIWAKI_AVX512VNNI)
inline void unpack_columns(const __m512i* lines, std::int32_t* pairs) {
    // Signs are where those of bytes are, as everywhere here.
    const __m512i few = columns<dtype, j>(lines), moved = _mm512_slli_epi32(few, 8 - BITS<dtype>);
    const __m512i numbers = _mm512_xor_si512(moved, _mm512_set1_epi32(static_cast<int>(0x80808080u)));
    const __m512i evens = _mm512_srai_epi16(_mm512_slli_epi16(numbers, 8), 8), odds = _mm512_srai_epi16(numbers, 8);
    const __m512i lower = _mm512_set1_epi32(0xffff);
    const __m512i first = _mm512_or_si512(_mm512_and_si512(evens, lower), _mm512_slli_epi32(odds, 16));
    const __m512i second = _mm512_or_si512(_mm512_srli_epi32(evens, 16), _mm512_andnot_si512(lower, odds));
    _mm512_storeu_si512(pairs + 2 * j * AVX512_ROWS, first);
    _mm512_storeu_si512(pairs + (2 * j + 1) * AVX512_ROWS, second);
}

// A strip as rows `pairs` of a panel and those behind it.
template <int dtype, int... j>
TARGET(NIWAKI_AVX512VNNI)
void unpack_strip(const std::uint8_t* place, std::int64_t words, std::int32_t* pairs,
                  std::integer_sequence<int, j...>) {
    for (std::int64_t word = 0; word < words; ++word, pairs += PAIRS * AVX512_ROWS) {
        __m512i lines[LINES<dtype>];
#pragma GCC unroll 16
        for (int i = 0; i < LINES<dtype>; ++i, place += 4 * STRIP) lines[i] = _mm512_loadu_si512(place);
        (unpack_columns<dtype, j>(lines, pairs), ...);
    }
}

template <int vectors>
TARGET(NIWAKI_AVX512VNNI)
void avx512_panel(const Panel<AVX512_ROWS>& panel, std::int64_t words, const std::int16_t* x, const float* units,
                  std::int64_t stride, float* out) {
    __m512 total[2][vectors];
    for (auto& those : total)
        for (auto& sum : those) sum = _mm512_setzero_ps();
    const std::int32_t* pairs = panel.pairs.data();
    for (std::int64_t word = 0; word < words; ++word) {
        __m512i sums[2][vectors];
        for (auto& those : sums)
            for (auto& sum : those) sum = _mm512_setzero_si512();
#pragma GCC unroll 4
        for (int pair = 0; pair < PAIRS; ++pair, pairs += AVX512_ROWS) {
            const __m512i rows[2] = {_mm512_loadu_si512(pairs), _mm512_loadu_si512(pairs + 16)};
#pragma GCC unroll 6
            for (int v = 0; v < vectors; ++v) {
                const auto both = load<std::int32_t>(x + (v * stride + word) * WORD + 2 * pair);
                const __m512i numbers = _mm512_set1_epi32(both);
#pragma GCC unroll 2
                for (int half = 0; half < 2; ++half)
                    sums[half][v] = _mm512_dpwssd_epi32(sums[half][v], rows[half], numbers);
            }
        }
        for (int v = 0; v < vectors; ++v) {
            const __m512 unit = _mm512_set1_ps(units[v * stride + word]);
            for (int half = 0; half < 2; ++half) {
                const __m512 scales = _mm512_loadu_ps(panel.scales.data() + word * AVX512_ROWS + 16 * half);
                const __m512 sum = _mm512_mul_ps(_mm512_cvtepi32_ps(sums[half][v]), unit);
                total[half][v] = _mm512_fmadd_ps(sum, scales, total[half][v]);
            }
        }
    }
    for (int v = 0; v < vectors; ++v)
        for (int half = 0; half < 2; ++half) _mm512_storeu_ps(out + v * AVX512_ROWS + 16 * half, total[half][v]);
}

// Some words of `count` rows of the matrix, from `row` on, and zeros in the place of those that a panel has more.
template <int dtype, int rows>
void fill(const Matrix& m, std::int64_t row, int count, std::int64_t word, std::int64_t words, Panel<rows>& panel) {
    const std::int64_t all = m.stride / 8, each = all / m.groups;
    const std::uint8_t* place = row_of<dtype>(m, row) + word * SIZE<dtype>;
    int done = 0;
#if defined(NIWAKI_X86) || defined(NIWAKI_EMULATE)
    if constexpr (rows == AVX512_ROWS)
        for (; row + done < m.in_strips && done < count; done += STRIP)
            unpack_strip<dtype>(row_of<dtype>(m, row + done) + word * STRIP * SIZE<dtype>, words,
                                panel.pairs.data() + done, std::make_integer_sequence<int, WORD / 4>{});
#endif
#if defined(NIWAKI_X86)
    for (; done + 8 <= count; done += 8)
        avx2_unpack_rows<dtype, rows>(place + done * all * SIZE<dtype>, all * SIZE<dtype>, words, done,
                                      panel.pairs.data());
#endif
    for (; done < count; ++done)
        unpack_row<dtype, rows>(place + done * all * SIZE<dtype>, words, done, panel.pairs.data());
    for (std::int64_t at = 0; at < words; ++at) {
        for (int r = 0; r < rows; ++r)
            panel.scales[at * rows + r] = r < count ? scale_of(m, row + r, (word + at) / each) : 0.0f;
        for (int pair = 0; count < rows && pair < PAIRS; ++pair)
            std::fill_n(panel.pairs.data() + (at * PAIRS + pair) * rows + count, rows - count, 0);
    }
}

// `most` vectors at a time, by `kernels` for 1 to so many.
template <int dtype, int rows, int most>
void panels(const Kernel<rows> (&kernels)[most], const Product& p, std::int64_t first, std::int64_t last) {
    const Matrix& m = p.matrix;
    const std::int64_t all = m.stride / 8;
    static thread_local Panel<rows> panel;  // or it would be made, of zeros, for each few rows
    float sums[most * rows];
    for (std::int64_t row = first; row < last; row += rows) {
        const int count = static_cast<int>(std::min<std::int64_t>(rows, last - row));
        for (std::int64_t word = 0; word < all; word += MOST_WORDS) {
            const std::int64_t words = std::min(MOST_WORDS, all - word);
            fill<dtype>(m, row, count, word, words, panel);
            for (std::int64_t b = 0; b < p.batch; b += most) {
                const int vectors = static_cast<int>(std::min<std::int64_t>(most, p.batch - b));
                const std::int64_t at = b * all + word;
                kernels[vectors - 1](panel, words, p.rounded->numbers.data() + at * WORD, p.rounded->units.data() + at,
                                     all, sums);
                for (int v = 0; v < vectors; ++v) {
                    float* y = p.y + (b + v) * m.rows + row;
                    for (int r = 0; r < count; ++r) y[r] = (word ? y[r] : 0.0f) + sums[v * rows + r] * UNIT<dtype>;
                }
            }
        }
    }
}

template <int dtype>
void avx512_panels(const Product& p, std::int64_t first, std::int64_t last) {
    static constexpr Kernel<AVX512_ROWS> KERNELS[] = {avx512_panel<1>, avx512_panel<2>, avx512_panel<3>,
                                                      avx512_panel<4>, avx512_panel<5>, avx512_panel<6>};
    panels<dtype>(KERNELS, p, first, last);
}

#endif

#if defined(NIWAKI_X86)

template <int dtype>
void avx2_panels(const Product& p, std::int64_t first, std::int64_t last) {
    static constexpr Kernel<AVX2_ROWS> KERNELS[] = {avx2_panel<1>, avx2_panel<2>, avx2_panel<3>, avx2_panel<4>};
    panels<dtype>(KERNELS, p, first, last);
}

#endif

}  // namespace

Panels panels_of([[maybe_unused]] int path, const Product& product) {
    if (!product.rounded || product.batch < MANY) return nullptr;
    return with_dtype(product.matrix.dtype, [&](auto dtype) -> Panels {
#if defined(NIWAKI_X86) || defined(NIWAKI_EMULATE)
        if (path >= AVX512) return avx512_panels<dtype>;
#endif
#if defined(NIWAKI_X86)
        if (path >= AVX2 && !product.matrix.in_strips) return avx2_panels<dtype>;
#endif
        return nullptr;
    });
}

}  // namespace niwaki
