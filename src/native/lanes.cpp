// Products by registers of 16 numbers in float32, for AVX-512 without VBMI2: that expands 32 bits, but neither 16
// nor 8.
//
// 16 values at a time become float32, and then the bits choose where they go; so one loop serves all dtypes. Newer
// processors compute those here that they have nothing better for (rows_of).

#include "streams.h"

#if defined(NIWAKI_X86) || defined(NIWAKI_EMULATE)

#define NIWAKI_AVX512BW "avx512f,avx512bw,popcnt"

namespace niwaki {
namespace {

// 16 values as float32.
template <int dtype>
TARGET(NIWAKI_AVX512BW)
inline __m512 widened(const std::uint8_t* values) {
    if constexpr (dtype == BF16) {
        const __m256i source = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values));
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(source), 16));
    } else if constexpr (dtype == FP16) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(values)));
    } else if constexpr (dtype == FP32) {
        return _mm512_loadu_ps(values);
    } else {
        const __m128i source = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values));
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(source));
    }
}

// 64 numbers of 4 bits as bytes, 16 times what they are.
TARGET(NIWAKI_AVX512BW)
inline void unpack_halves(const std::uint8_t* halves, std::uint8_t* bytes) {
    const __m512i both = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves)));
    const __m512i apart = _mm512_or_si512(_mm512_slli_epi16(both, 4), _mm512_slli_epi16(both, 8));
    _mm512_storeu_si512(bytes, _mm512_and_si512(apart, _mm512_set1_epi32(static_cast<int>(0xf0f0f0f0u))));
}

// `rows` rows, `step` apart, and those behind them. Rows share the loads of x, vectors the decoding.
template <int dtype, int vectors, int rows>
TARGET(NIWAKI_AVX512BW)
void lane_streams(const Product& p, std::int64_t b, std::int64_t first, std::int64_t step) {
    constexpr bool whole = dtype == INT8 || dtype == INT4;
    constexpr int size = whole ? 1 : dtype == FP32 ? 4 : 2;
    const Matrix& m = p.matrix;
    const std::int64_t groups = whole ? m.groups : 1, bytes = m.stride / groups;
    Streams<rows> streams(m, size, first, step);
    alignas(64) std::uint8_t unpacked[rows][64];
    for (std::int64_t row = first; row < first + step; ++row, streams.mask += m.stride) {
        const float* x = p.x + b * 8 * m.stride;
        const std::uint8_t* mask = streams.mask;
        __m512 total[rows][vectors];
        for (auto& those : total)
            for (auto& sum : those) sum = _mm512_setzero_ps();
        for (std::int64_t group = 0; group < groups; ++group) {
            __m512 parts[rows][vectors];
            for (auto& those : parts)
                for (auto& sum : those) sum = _mm512_setzero_ps();
            for (const std::uint8_t* end = mask + bytes; mask != end; mask += 8, x += 64) {
                const std::uint8_t* next[rows];
                for (int r = 0; r < rows; ++r) {
                    const std::uint64_t bits = streams.template bits<size>(r, mask);
                    next[r] = streams.values[r];
                    if constexpr (dtype == INT4) {
                        unpack_halves(next[r], unpacked[r]);
                        next[r] = unpacked[r];
                        streams.values[r] += (__builtin_popcountll(bits) + 1) / 2;
                    }
                }
#pragma GCC unroll 4
                for (int at = 0; at < 4; ++at) {
                    __m512 shared[vectors];
                    for (int v = 0; v < vectors; ++v) shared[v] = _mm512_loadu_ps(x + v * 8 * m.stride + 16 * at);
#pragma GCC unroll 4
                    for (int r = 0; r < rows; ++r) {
                        std::uint64_t ones = load<std::uint16_t>(mask + r * streams.apart + 2 * at);
                        // Or it would be counted in 16 bits of a register, and wait for what the others hold.
                        asm("" : "+r"(ones));
                        const __m512 weights = _mm512_maskz_expand_ps(static_cast<std::uint16_t>(ones),
                                                                      widened<whole ? INT8 : dtype>(next[r]));
                        next[r] += size * __builtin_popcountll(ones);
#pragma GCC unroll 4
                        for (int v = 0; v < vectors; ++v)
                            parts[r][v] = _mm512_fmadd_ps(weights, shared[v], parts[r][v]);
                    }
                }
                if constexpr (dtype != INT4)
                    for (int r = 0; r < rows; ++r) streams.values[r] = next[r];
            }
            for (int r = 0; r < rows; ++r) {
                constexpr float unit = dtype == INT4 ? 0x1p-4f : 1.0f;
                const float scale = whole ? m.scales[(row + r * step) * groups + group] * unit : 1.0f;
                for (int v = 0; v < vectors; ++v)
                    total[r][v] =
                        whole ? _mm512_fmadd_ps(parts[r][v], _mm512_set1_ps(scale), total[r][v]) : parts[r][v];
            }
        }
        for (int r = 0; r < rows; ++r)
            for (int v = 0; v < vectors; ++v)
                p.y[(b + v) * m.rows + row + r * step] = _mm512_reduce_add_ps(total[r][v]);
    }
}

template <int dtype>
void lane_rows(const Product& p, std::int64_t b, int vectors, std::int64_t first, std::int64_t last) {
    with_number(vectors, [&](auto number) {
        in_streams<4>(first, last, [&](auto rows, std::int64_t from, std::int64_t step) {
            lane_streams<dtype, number, rows>(p, b, from, step);
        });
    });
}

}  // namespace

Rows lane_rows_of(int dtype) {
    constexpr Rows rows[] = {lane_rows<BF16>, lane_rows<FP16>, lane_rows<FP32>, lane_rows<INT8>, lane_rows<INT4>};
    return rows[dtype];
}

}  // namespace niwaki

#endif
