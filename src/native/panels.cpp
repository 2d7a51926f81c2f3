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

// Rows of a panel, for registers V.
template <typename V>
constexpr int ROWS = 2 * V::LANES;

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

// Makes rows of a panel, from `pairs` on, of some words of a strip.
using Unpack = void (*)(const std::uint8_t* place, std::int64_t words, std::int32_t* pairs);

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

#endif

#if defined(NIWAKI_X86) || defined(NIWAKI_EMULATE)

// Columns 4 j to 4 j + 3 of a strip's rows as two pairs of each, from `pairs` on.
template <typename V, int dtype, int j>
PART_OF_CALLER void unpack_columns(const typename V::Ints* lines, std::int32_t* pairs) {
    // Signs are where those of bytes are, as everywhere here.
    const auto few = columns<V, dtype, j>(lines);
    const auto numbers = V::one_of(V::left(few, 8 - BITS<dtype>), V::all(0x80808080u));
    // Each number as the upper byte of one of 16 bits.
    V::put(pairs + 2 * j * ROWS<V>, V::upper(V::bytes_of(numbers, 0x01010000)));
    V::put(pairs + (2 * j + 1) * ROWS<V>, V::upper(V::bytes_of(numbers, 0x03030202)));
}

// A strip as rows `pairs` of a panel and those behind it.
template <typename V, int dtype, int... j>
PART_OF_CALLER void unpack_strip(const std::uint8_t* place, std::int64_t words, std::int32_t* pairs,
                                 std::integer_sequence<int, j...>) {
    const std::int64_t ahead = bytes_ahead();
    for (std::int64_t word = 0; word < words; ++word, place += STRIP * SIZE<dtype>, pairs += PAIRS * ROWS<V>)
#pragma GCC unroll 2
        for (int part = 0; part < STRIP / V::LANES; ++part) {
            typename V::Ints lines[LINES<dtype>];
            read_lines<V, dtype>(place + 4 * V::LANES * part, part ? 0 : ahead, lines);
            (unpack_columns<V, dtype, j>(lines, pairs + V::LANES * part), ...);
        }
}

template <typename V, int vectors>
PART_OF_CALLER void multiply_panel(const Panel<ROWS<V>>& panel, std::int64_t words, const std::int16_t* x,
                                   const float* units, std::int64_t stride, float* out) {
    typename V::Floats total[2][vectors];
    for (auto& those : total)
        for (auto& sum : those) sum = V::floats(0.0f);
    const std::int32_t* pairs = panel.pairs.data();
    for (std::int64_t word = 0; word < words; ++word) {
        typename V::Ints sums[2][vectors];
        for (auto& those : sums)
            for (auto& sum : those) sum = V::all(0);
#pragma GCC unroll 4
        for (int pair = 0; pair < PAIRS; ++pair, pairs += ROWS<V>) {
            const typename V::Ints rows[2] = {V::at(pairs), V::at(pairs + V::LANES)};
#pragma GCC unroll 6
            for (int v = 0; v < vectors; ++v) {
                const auto numbers = V::all(load<std::uint32_t>(x + (v * stride + word) * WORD + 2 * pair));
#pragma GCC unroll 2
                for (int half = 0; half < 2; ++half) sums[half][v] = V::pairs(rows[half], numbers, sums[half][v]);
                V::keep(sums[0][v], sums[1][v]);
            }
        }
        for (int v = 0; v < vectors; ++v) {
            const auto unit = V::floats(units[v * stride + word]);
            for (int half = 0; half < 2; ++half) {
                const auto scales = V::floats(panel.scales.data() + word * ROWS<V> + V::LANES * half);
                total[half][v] = V::scaled(sums[half][v], unit, scales, total[half][v]);
            }
        }
    }
    for (int v = 0; v < vectors; ++v)
        for (int half = 0; half < 2; ++half) V::put(out + v * ROWS<V> + V::LANES * half, total[half][v]);
}

// Those above with the instructions that they are for.
template <int vectors, typename... Given>
TARGET(NIWAKI_AVX512VNNI)
void avx512_panel(Given... given) {
    multiply_panel<Avx512Vnni, vectors>(given...);
}

template <int dtype>
TARGET(NIWAKI_AVX512VNNI)
void avx512_unpack(const std::uint8_t* place, std::int64_t words, std::int32_t* pairs) {
    unpack_strip<Avx512Vnni, dtype>(place, words, pairs, std::make_integer_sequence<int, WORD / 4>{});
}

#if defined(NIWAKI_X86)

template <int vectors, typename... Given>
TARGET(NIWAKI_AVX2)
void avx2_panel(Given... given) {
    multiply_panel<Avx2, vectors>(given...);
}

#endif

#if defined(NIWAKI_AVXVNNI)

template <int vectors, typename... Given>
TARGET(NIWAKI_AVXVNNI)
void vnni_panel(Given... given) {
    multiply_panel<AvxVnni, vectors>(given...);
}

template <int dtype>
TARGET(NIWAKI_AVXVNNI)
void vnni_unpack(const std::uint8_t* place, std::int64_t words, std::int32_t* pairs) {
    unpack_strip<AvxVnni, dtype>(place, words, pairs, std::make_integer_sequence<int, WORD / 4>{});
}

#endif

#endif

// Some words of `count` rows of the matrix, from `row` on, and zeros in the place of those that a panel has more.
template <int dtype, int rows>
void fill(const Matrix& m, std::int64_t row, int count, std::int64_t word, std::int64_t words, Unpack unpack_strip,
          Panel<rows>& panel) {
    const std::int64_t all = m.stride / 8, each = all / m.groups;
    const std::uint8_t* place = row_of<dtype>(m, row) + word * SIZE<dtype>;
    int done = 0;
    for (; row + done < m.in_strips && done < count; done += STRIP)
        unpack_strip(row_of<dtype>(m, row + done) + word * STRIP * SIZE<dtype>, words, panel.pairs.data() + done);
#if defined(NIWAKI_X86)
    for (; done + 8 <= count; done += 8)
        avx2_unpack_rows<dtype, rows>(place + done * all * SIZE<dtype>, all * SIZE<dtype>, words, done,
                                      panel.pairs.data());
#endif
    for (; done < count; ++done)
        unpack_row<dtype, rows>(place + done * all * SIZE<dtype>, words, done, panel.pairs.data());
    for (std::int64_t at = 0; at < words; ++at) {
        const std::int64_t group = (word + at) / each;
        float* scales = panel.scales.data() + at * rows;
        for (int r = 0; r < rows; r += STRIP) {
            if (row + r < m.in_strips && r < count)
                std::copy_n(scale_of(m, row + r, group), STRIP, scales + r);
            else
                for (int lane = r; lane < r + STRIP; ++lane)
                    scales[lane] = lane < count ? *scale_of(m, row + lane, group) : 0.0f;
        }
        for (int pair = 0; count < rows && pair < PAIRS; ++pair)
            std::fill_n(panel.pairs.data() + (at * PAIRS + pair) * rows + count, rows - count, 0);
    }
}

// `most` vectors at a time, by `kernels` for 1 to so many; a matrix in strips needs `unpack_strip`.
template <int dtype, int rows, int most>
void panels(const Kernel<rows> (&kernels)[most], Unpack unpack_strip, const Product& p, std::int64_t first,
            std::int64_t last) {
    const Matrix& m = p.matrix;
    const std::int64_t all = m.stride / 8;
    static thread_local Panel<rows> panel;  // or it would be made, of zeros, for each few rows
    float sums[most * rows];
    for (std::int64_t row = first; row < last; row += rows) {
        const int count = static_cast<int>(std::min<std::int64_t>(rows, last - row));
        for (std::int64_t word = 0; word < all; word += MOST_WORDS) {
            const std::int64_t words = std::min(MOST_WORDS, all - word);
            fill<dtype>(m, row, count, word, words, unpack_strip, panel);
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

#if defined(NIWAKI_X86) || defined(NIWAKI_EMULATE)

template <int dtype>
void avx512_panels(const Product& p, std::int64_t first, std::int64_t last) {
    static constexpr Kernel<ROWS<Avx512Vnni>> KERNELS[] = {avx512_panel<1>, avx512_panel<2>, avx512_panel<3>,
                                                           avx512_panel<4>, avx512_panel<5>, avx512_panel<6>};
    panels<dtype>(KERNELS, avx512_unpack<dtype>, p, first, last);
}

#endif

#if defined(NIWAKI_X86)

template <int dtype>
void avx2_panels(const Product& p, std::int64_t first, std::int64_t last) {
    static constexpr Kernel<ROWS<Avx2>> KERNELS[] = {avx2_panel<1>, avx2_panel<2>, avx2_panel<3>, avx2_panel<4>};
    panels<dtype>(KERNELS, nullptr, p, first, last);
}

#endif

#if defined(NIWAKI_AVXVNNI)

template <int dtype>
void vnni_panels(const Product& p, std::int64_t first, std::int64_t last) {
    static constexpr Kernel<ROWS<AvxVnni>> KERNELS[] = {vnni_panel<1>, vnni_panel<2>, vnni_panel<3>, vnni_panel<4>};
    panels<dtype>(KERNELS, vnni_unpack<dtype>, p, first, last);
}

#endif

}  // namespace

Panels panels_of([[maybe_unused]] int path, const Product& product) {
    if (!product.rounded || product.batch < MANY) return nullptr;
    return with_dtype(product.matrix.dtype, [&](auto dtype) -> Panels {
#if defined(NIWAKI_X86) || defined(NIWAKI_EMULATE)
        if (path >= AVX512) return avx512_panels<dtype>;
#endif
#if defined(NIWAKI_AVXVNNI)
        if (path == AVX2_VNNI) return vnni_panels<dtype>;
#endif
#if defined(NIWAKI_X86)
        if (path >= AVX2 && !product.matrix.in_strips) return avx2_panels<dtype>;
#endif
        return nullptr;
    });
}

}  // namespace niwaki
