// Products of few vectors, such as those of a token, with matrices in strips (words.h), in whole numbers, for
// processors with VNNI, in AVX-512 or beside AVX2.
//
// Each lane of a register is a row and has four of its columns as bytes, four columns of a vector go to all lanes, and
// nothing is summed over lanes; what makes a float of a sum is done once for 8 or 16 rows. An instruction multiplies
// bytes without a sign with bytes that have one: numbers are 2^(bits - 1) more here than they are, and the upper and
// the lower bytes of a vector's numbers of 16 bits (Rounded) are multiplied apart. Sums are whole numbers of 32 bits,
// the same as in panels.cpp. Memory is read from one place on and on.

#include <utility>

#include "strips.h"

#if defined(NIWAKI_X86) || defined(NIWAKI_EMULATE)

namespace niwaki {
namespace {

// A word's columns 4 j to 4 j + 3 of all rows times those of the vectors, whose words are `apart` bytes from each
// other: a sum of each by upper bytes and one by lower ones.
template <typename V, int dtype, int vectors, int j>
PART_OF_CALLER void add_columns(const typename V::Ints* lines, const std::int8_t* x, std::int64_t apart,
                                typename V::Ints (&sums)[vectors][2]) {
    const auto numbers = columns<V, dtype, j>(lines);
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v)
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            const auto four = load<std::uint32_t>(x + v * apart + half * WORD + 4 * j);
            sums[v][half] = V::bytes(numbers, V::all(four), sums[v][half]);
        }
}

template <typename V, int dtype, int vectors, int... j>
PART_OF_CALLER void add_word(const typename V::Ints* lines, const std::int8_t* x, std::int64_t apart,
                             typename V::Ints (&sums)[vectors][2], std::integer_sequence<int, j...>) {
    (add_columns<V, dtype, vectors, j>(lines, x, apart, sums), ...);
}

// The products of the strip that begins with `row`, for `vectors`, into out (vectors, STRIP).
template <typename V, int dtype, int vectors>
PART_OF_CALLER void strip(const Product& p, std::int64_t b, std::int64_t row, float* out) {
    constexpr int parts = STRIP / V::LANES;
    const Matrix& m = p.matrix;
    const std::int64_t words = m.stride / 8, each = words / m.groups, ahead = bytes_ahead();
    const std::uint8_t* place = row_of<dtype>(m, row);
    const float* scales = scale_of(m, row, 0);
    typename V::Floats total[parts][vectors];
    for (auto& those : total)
        for (auto& sum : those) sum = V::floats(0.0f);
    std::int64_t at = b * words;
    for (std::int64_t group = 0; group < m.groups; ++group, scales += STRIP)
        for (const std::int64_t end = at + each; at != end; ++at, place += STRIP * SIZE<dtype>)
#pragma GCC unroll 2
            for (int part = 0; part < parts; ++part) {
                typename V::Ints lines[LINES<dtype>], sums[vectors][2];
                read_lines<V, dtype>(place + 4 * V::LANES * part, part ? 0 : ahead, lines);
                for (int v = 0; v < vectors; ++v) {
                    sums[v][0] = V::all(0);
                    sums[v][1] = V::all(static_cast<std::uint32_t>(-MORE<dtype> * p.rounded->sums[at + v * words]));
                }
                add_word<V, dtype, vectors>(lines, p.rounded->bytes.data() + 2 * WORD * at, 2 * WORD * words, sums,
                                            std::make_integer_sequence<int, WORD / 4>{});
                const auto scale = V::floats(scales + V::LANES * part);
                for (int v = 0; v < vectors; ++v)
                    total[part][v] = V::scaled(V::sum(V::left(sums[v][0], 8), sums[v][1]),
                                               V::floats(p.rounded->units[at + v * words]), scale, total[part][v]);
            }
    for (int part = 0; part < parts; ++part)
        for (int v = 0; v < vectors; ++v) V::put(out + STRIP * v + V::LANES * part, total[part][v]);
}

using Strip = void (*)(const Product&, std::int64_t b, std::int64_t row, float* out);

template <int dtype, int vectors>
TARGET(NIWAKI_AVX512VNNI)
void avx512_strip(const Product& p, std::int64_t b, std::int64_t row, float* out) {
    strip<Avx512Vnni, dtype, vectors>(p, b, row, out);
}

#if defined(NIWAKI_AVXVNNI)

template <int dtype, int vectors>
TARGET(NIWAKI_AVXVNNI)
void vnni_strip(const Product& p, std::int64_t b, std::int64_t row, float* out) {
    strip<AvxVnni, dtype, vectors>(p, b, row, out);
}

#endif

// By `strips` for 1 to VECTORS vectors.
void rows(const Strip (&strips)[VECTORS], const Product& p, std::int64_t b, int vectors, std::int64_t first,
          std::int64_t last) {
    const std::int64_t end = std::min(last, p.matrix.in_strips);
    for (std::int64_t row = first / STRIP * STRIP; row < end; row += STRIP) {
        float found[VECTORS * STRIP];
        strips[vectors - 1](p, b, row, found);
        const std::int64_t from = std::max(first, row), to = std::min(end, row + STRIP);
        for (int v = 0; v < vectors; ++v) {
            const float* of_vector = found + STRIP * v;
            std::copy(of_vector + from - row, of_vector + to - row, p.y + (b + v) * p.matrix.rows + from);
        }
    }
    if (end < last) rows_behind_strips(p, b, vectors, std::max(first, end), last);
}

template <int dtype>
void avx512_rows(const Product& p, std::int64_t b, int vectors, std::int64_t first, std::int64_t last) {
    static constexpr Strip STRIPS[] = {avx512_strip<dtype, 1>, avx512_strip<dtype, 2>, avx512_strip<dtype, 3>,
                                       avx512_strip<dtype, 4>};
    rows(STRIPS, p, b, vectors, first, last);
}

#if defined(NIWAKI_AVXVNNI)

template <int dtype>
void vnni_rows(const Product& p, std::int64_t b, int vectors, std::int64_t first, std::int64_t last) {
    static constexpr Strip STRIPS[] = {vnni_strip<dtype, 1>, vnni_strip<dtype, 2>, vnni_strip<dtype, 3>,
                                       vnni_strip<dtype, 4>};
    rows(STRIPS, p, b, vectors, first, last);
}

#endif

}  // namespace

Rows strip_rows_of([[maybe_unused]] int path, int dtype) {
    return with_dtype(dtype, [&](auto number) -> Rows {
#if defined(NIWAKI_AVXVNNI)
        if (path == AVX2_VNNI) return vnni_rows<number>;
#endif
        return avx512_rows<number>;
    });
}

}  // namespace niwaki

#endif
