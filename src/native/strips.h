// Numbers of matrices in strips (words.h) in the registers of AVX-512: strips.cpp, panels.cpp.

#ifndef NIWAKI_STRIPS_H
#define NIWAKI_STRIPS_H

#include "words.h"

#if defined(NIWAKI_X86) || defined(NIWAKI_EMULATE)

#define NIWAKI_AVX512VNNI "avx512f,avx512bw,avx512vnni"

namespace niwaki {
namespace {

// Numbers of 32 bits that a word has.
template <int dtype>
constexpr int LINES = static_cast<int>(SIZE<dtype> / 4);
// What is added to a number, so that none is below 0.
template <int dtype>
constexpr int MORE = 1 << (BITS<dtype> - 1);

// `bits` of all bytes, after moving them by `right`, and then by `left`.
template <int bits, int right, int left>
TARGET(NIWAKI_AVX512VNNI)
inline __m512i field(__m512i line) {
    constexpr int by = right - left;
    if constexpr (by > 0) line = _mm512_srli_epi32(line, by);
    if constexpr (by < 0) line = _mm512_slli_epi32(line, -by);
    return _mm512_and_si512(line, _mm512_set1_epi32(((1 << bits) - 1) * 0x01010101 << left));
}

// Columns 4 j to 4 j + 3 of a word of all rows, MORE than they are.
template <int dtype, int j>
TARGET(NIWAKI_AVX512VNNI)
inline __m512i columns(const __m512i* lines) {
    const __m512i more = _mm512_set1_epi32(static_cast<int>(MORE<dtype> * 0x01010101u));
    if constexpr (dtype == INT8) return _mm512_xor_si512(lines[j], more);
    __m512i numbers = more;
    if constexpr (HAS_FOUR<dtype>) numbers = _mm512_xor_si512(numbers, field<4, j / 8 * 4, 0>(lines[j % 8]));
    if constexpr (HAS_TWO<dtype>) {
        constexpr int place = HAS_FOUR<dtype> ? 4 : 0;
        numbers = _mm512_xor_si512(numbers, field<2, j / 4 * 2, place>(lines[TWOS<dtype> / 4 + j % 4]));
    }
    if constexpr (HAS_ONE<dtype>) {
        // The byte that has their bits, four times, and of each another bit.
        constexpr int byte = j / 2 % 4 * 0x01010101;
        const __m512i from = _mm512_set4_epi32(0x0c0c0c0c + byte, 0x08080808 + byte, 0x04040404 + byte, byte);
        const __m512i bytes = _mm512_shuffle_epi8(lines[ONES<dtype> / 4 + j / 8], from);
        const __m512i bits = _mm512_set1_epi32(static_cast<int>(j % 2 ? 0x80402010u : 0x08040201u));
        const std::uint64_t ones = _mm512_test_epi8_mask(bytes, bits);
        numbers = _mm512_xor_si512(numbers, _mm512_maskz_set1_epi8(ones, MORE<dtype>));
    }
    return numbers;
}

}  // namespace
}  // namespace niwaki

#endif

#endif
