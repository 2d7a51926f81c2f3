// Products of few vectors, such as those of a token, with matrices in strips (words.h), in whole numbers, for AVX-512
// with VNNI.
//
// Each lane of a register is a row and has four of its columns as bytes, four columns of a vector go to all lanes, and
// nothing is summed over lanes; what makes a float of a sum is done once for 16 rows. An instruction multiplies bytes
// without a sign with bytes that have one: numbers are 2^(bits - 1) more here than they are, and the upper and the
// lower bytes of a vector's numbers of 16 bits (Rounded) are multiplied apart. Sums are whole numbers of 32 bits, the
// same as in panels.cpp. Memory is read from one place on and on, faster than with any prefetching.

#include <utility>

#include "strips.h"

#if defined(NIWAKI_X86) || defined(NIWAKI_EMULATE)

namespace niwaki {
namespace {

// A word's columns 4 j to 4 j + 3 of 16 rows times those of the vectors, whose words are `apart` bytes from each other:
// a sum of each by upper bytes and one by lower ones.
template <int dtype, int vectors, int j>
TARGET(NIWAKI_AVX512VNNI)
inline void add_columns(const __m512i* lines, const std::int8_t* x, std::int64_t apart, __m512i (&sums)[vectors][2]) {
    const __m512i numbers = columns<dtype, j>(lines);
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v)
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            const auto four = load<std::int32_t>(x + v * apart + half * WORD + 4 * j);
            sums[v][half] = _mm512_dpbusd_epi32(sums[v][half], numbers, _mm512_set1_epi32(four));
        }
}

template <int dtype, int vectors, int... j>
TARGET(NIWAKI_AVX512VNNI)
inline void add_word(const __m512i* lines, const std::int8_t* x, std::int64_t apart, __m512i (&sums)[vectors][2],
                     std::integer_sequence<int, j...>) {
    (add_columns<dtype, vectors, j>(lines, x, apart, sums), ...);
}

// Rows `row` to `row` + 15, of which those that are `wanted` are written.
template <int dtype, int vectors>
TARGET(NIWAKI_AVX512VNNI)
void strip(const Product& p, std::int64_t b, std::int64_t row, std::uint16_t wanted) {
    const Matrix& m = p.matrix;
    const std::int64_t words = m.stride / 8, each = words / m.groups;
    const std::uint8_t* place = row_of<dtype>(m, row);
    const float* scales = m.scales + row * m.groups;
    __m512 total[vectors];
    for (auto& sum : total) sum = _mm512_setzero_ps();
    std::int64_t at = b * words;
    for (std::int64_t group = 0; group < m.groups; ++group, scales += STRIP) {
        const __m512 scale = _mm512_loadu_ps(scales);
        for (const std::int64_t end = at + each; at != end; ++at) {
            __m512i lines[LINES<dtype>];
#pragma GCC unroll 16
            for (int i = 0; i < LINES<dtype>; ++i, place += 4 * STRIP) lines[i] = _mm512_loadu_si512(place);
            __m512i sums[vectors][2];
            for (int v = 0; v < vectors; ++v) {
                sums[v][0] = _mm512_setzero_si512();
                sums[v][1] = _mm512_set1_epi32(-MORE<dtype> * p.rounded->sums[at + v * words]);
            }
            add_word<dtype, vectors>(lines, p.rounded->bytes.data() + 2 * WORD * at, 2 * WORD * words, sums,
                                     std::make_integer_sequence<int, WORD / 4>{});
            for (int v = 0; v < vectors; ++v) {
                const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(sums[v][0], 8), sums[v][1]);
                const __m512 unit = _mm512_set1_ps(p.rounded->units[at + v * words]);
                total[v] = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(sum), unit), scale, total[v]);
            }
        }
    }
    for (int v = 0; v < vectors; ++v) _mm512_mask_storeu_ps(p.y + (b + v) * m.rows + row, wanted, total[v]);
}

template <int dtype>
void rows(const Product& p, std::int64_t b, int vectors, std::int64_t first, std::int64_t last) {
    const std::int64_t end = std::min(last, p.matrix.in_strips);
    with_number(vectors, [&](auto number) {
        for (std::int64_t row = first / STRIP * STRIP; row < end; row += STRIP) {
            const std::int64_t from = std::max(first, row) - row, to = std::min(end, row + STRIP) - row;
            strip<dtype, number>(p, b, row, static_cast<std::uint16_t>((1 << to) - (1 << from)));
        }
    });
    if (end < last) rows_behind_strips(p, b, vectors, std::max(first, end), last);
}

}  // namespace

Rows strip_rows_of(int dtype) {
    return with_dtype(dtype, [](auto number) -> Rows { return rows<number>; });
}

}  // namespace niwaki

#endif
