// Registers of whole numbers, a row in each lane, and numbers of matrices in strips (words.h) in them: strips.cpp,
// panels.cpp.

#ifndef NIWAKI_STRIPS_H
#define NIWAKI_STRIPS_H

#include "words.h"

#if defined(NIWAKI_X86) || defined(NIWAKI_EMULATE)

#define NIWAKI_AVX512VNNI "avx512f,avx512bw,avx512vnni"

namespace niwaki {
namespace {

#pragma GCC diagnostic ignored "-Wpsabi"  // functions that hand on vectors all become parts of others

// Lanes have 32 bits. Functions of the same name and arguments in two of these do the same.
struct Avx512Vnni {
    using Ints = __m512i;
    using Floats = __m512;
    static constexpr int LANES = 16;
#define NIWAKI_HERE TARGET(NIWAKI_AVX512VNNI) static inline
    NIWAKI_HERE Ints at(const void* place) { return _mm512_loadu_si512(place); }
    NIWAKI_HERE void put(void* place, Ints numbers) { _mm512_storeu_si512(place, numbers); }
    NIWAKI_HERE Ints all(std::uint32_t value) { return _mm512_set1_epi32(static_cast<int>(value)); }
    NIWAKI_HERE Ints left(Ints a, int by) { return _mm512_slli_epi32(a, by); }
    NIWAKI_HERE Ints right(Ints a, int by) { return _mm512_srli_epi32(a, by); }
    // Each half of a lane divided by 256.
    NIWAKI_HERE Ints upper(Ints a) { return _mm512_srai_epi16(a, 8); }
    NIWAKI_HERE Ints both(Ints a, Ints b) { return _mm512_and_si512(a, b); }
    NIWAKI_HERE Ints one_of(Ints a, Ints b) { return _mm512_xor_si512(a, b); }
    NIWAKI_HERE Ints sum(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
    // Of each lane the bytes with the numbers that are in the bytes of `places`.
    NIWAKI_HERE Ints bytes_of(Ints a, int places) {
        return _mm512_shuffle_epi8(
            a, _mm512_set4_epi32(0x0c0c0c0c + places, 0x08080808 + places, 0x04040404 + places, places));
    }
    // `value` in each byte of `a` that has the bit in `bits`, and 0 in the others.
    NIWAKI_HERE Ints where(Ints a, Ints bits, int value) {
        return _mm512_maskz_set1_epi8(_mm512_test_epi8_mask(a, bits), static_cast<char>(value));
    }
    // The products of four bytes without a sign and four with one, or of two numbers of 16 bits, added to `sum`.
    NIWAKI_HERE Ints bytes(Ints a, Ints b, Ints sum) { return _mm512_dpbusd_epi32(sum, a, b); }
    NIWAKI_HERE Ints pairs(Ints a, Ints b, Ints sum) { return _mm512_dpwssd_epi32(sum, a, b); }
    // Sums stay in their registers: or compilers copy them to others and back, and read the numbers of all vectors
    // first.
    NIWAKI_HERE void keep([[maybe_unused]] Ints& a, [[maybe_unused]] Ints& b) {
#if !defined(NIWAKI_EMULATE)
        __asm__("" : "+v"(a), "+v"(b)::"memory");
#endif
    }
    NIWAKI_HERE Floats floats(const float* place) { return _mm512_loadu_ps(place); }
    NIWAKI_HERE Floats floats(float value) { return _mm512_set1_ps(value); }
    NIWAKI_HERE void put(float* place, Floats numbers) { _mm512_storeu_ps(place, numbers); }
    // `sums` times a unit and scales, added to `total`.
    NIWAKI_HERE Floats scaled(Ints sums, Floats unit, Floats scales, Floats total) {
        return _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(sums), unit), scales, total);
    }
#undef NIWAKI_HERE
};

#if defined(NIWAKI_X86)

struct Avx2 {
    using Ints = __m256i;
    using Floats = __m256;
    static constexpr int LANES = 8;
#define NIWAKI_HERE TARGET(NIWAKI_AVX2) static inline
    NIWAKI_HERE Ints at(const void* place) { return _mm256_loadu_si256(static_cast<const __m256i*>(place)); }
    NIWAKI_HERE void put(void* place, Ints numbers) { _mm256_storeu_si256(static_cast<__m256i*>(place), numbers); }
    NIWAKI_HERE Ints all(std::uint32_t value) { return _mm256_set1_epi32(static_cast<int>(value)); }
    NIWAKI_HERE Ints left(Ints a, int by) { return _mm256_slli_epi32(a, by); }
    NIWAKI_HERE Ints right(Ints a, int by) { return _mm256_srli_epi32(a, by); }
    NIWAKI_HERE Ints upper(Ints a) { return _mm256_srai_epi16(a, 8); }
    NIWAKI_HERE Ints both(Ints a, Ints b) { return _mm256_and_si256(a, b); }
    NIWAKI_HERE Ints one_of(Ints a, Ints b) { return _mm256_xor_si256(a, b); }
    NIWAKI_HERE Ints sum(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
    NIWAKI_HERE Ints bytes_of(Ints a, int places) {
        const __m256i first =
            _mm256_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c, 0, 0x04040404, 0x08080808, 0x0c0c0c0c);
        return _mm256_shuffle_epi8(a, _mm256_add_epi32(first, _mm256_set1_epi32(places)));
    }
    NIWAKI_HERE Ints where(Ints a, Ints bits, int value) {
        const __m256i is = _mm256_cmpeq_epi8(_mm256_and_si256(a, bits), bits);
        return _mm256_and_si256(is, _mm256_set1_epi8(static_cast<char>(value)));
    }
    NIWAKI_HERE Ints pairs(Ints a, Ints b, Ints sum) { return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b)); }
    NIWAKI_HERE void keep(Ints& a, Ints& b) { __asm__("" : "+x"(a), "+x"(b)::"memory"); }
    NIWAKI_HERE Floats floats(const float* place) { return _mm256_loadu_ps(place); }
    NIWAKI_HERE Floats floats(float value) { return _mm256_set1_ps(value); }
    NIWAKI_HERE void put(float* place, Floats numbers) { _mm256_storeu_ps(place, numbers); }
    NIWAKI_HERE Floats scaled(Ints sums, Floats unit, Floats scales, Floats total) {
        return _mm256_fmadd_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(sums), unit), scales, total);
    }
#undef NIWAKI_HERE
};

#endif

#if defined(NIWAKI_AVXVNNI)

struct AvxVnni : Avx2 {
    TARGET(NIWAKI_AVXVNNI) static inline Ints bytes(Ints a, Ints b, Ints sum) {
        return _mm256_dpbusd_avx_epi32(sum, a, b);
    }
    TARGET(NIWAKI_AVXVNNI) static inline Ints pairs(Ints a, Ints b, Ints sum) {
        return _mm256_dpwssd_avx_epi32(sum, a, b);
    }
};

#endif

// Numbers of 32 bits that a word has.
template <int dtype>
constexpr int LINES = static_cast<int>(SIZE<dtype> / 4);
// What is added to a number, so that none is below 0.
template <int dtype>
constexpr int MORE = 1 << (BITS<dtype> - 1);

// `bits` of all bytes, after moving them by `right`, and then by `left`.
template <typename V, int bits, int right, int left>
PART_OF_CALLER typename V::Ints field(typename V::Ints line) {
    constexpr int by = right - left;
    if constexpr (by > 0) line = V::right(line, by);
    if constexpr (by < 0) line = V::left(line, -by);
    return V::both(line, V::all(((1 << bits) - 1) * 0x01010101u << left));
}

// Columns 4 j to 4 j + 3 of a word of all rows, MORE than they are.
template <typename V, int dtype, int j>
PART_OF_CALLER typename V::Ints columns(const typename V::Ints* lines) {
    const auto more = V::all(MORE<dtype> * 0x01010101u);
    if constexpr (dtype == INT8) return V::one_of(lines[j], more);
    auto numbers = more;
    if constexpr (HAS_FOUR<dtype>) numbers = V::one_of(numbers, field<V, 4, j / 8 * 4, 0>(lines[j % 8]));
    if constexpr (HAS_TWO<dtype>) {
        constexpr int place = HAS_FOUR<dtype> ? 4 : 0;
        numbers = V::one_of(numbers, field<V, 2, j / 4 * 2, place>(lines[TWOS<dtype> / 4 + j % 4]));
    }
    if constexpr (HAS_ONE<dtype>) {
        // The byte that has their bits, four times, and of each another bit.
        const auto bytes = V::bytes_of(lines[ONES<dtype> / 4 + j / 8], j / 2 % 4 * 0x01010101);
        const auto bits = V::all(j % 2 ? 0x80402010u : 0x08040201u);
        numbers = V::one_of(numbers, V::where(bytes, bits, MORE<dtype>));
    }
    return numbers;
}

// How many bytes ahead strips are asked for, or 0: a Zen 5 is up to a fifth faster with it, and a Zen 4, which has no
// AVX-VNNI, up to half slower.
inline std::int64_t bytes_ahead() {
    static const std::int64_t bytes = usable(AVX2_VNNI) == AVX2_VNNI ? 8192 : 0;
    return bytes;
}

// The lines of a word in a strip of all rows that a register has, from the first one on.
template <typename V, int dtype>
PART_OF_CALLER void read_lines(const std::uint8_t* place, std::int64_t ahead, typename V::Ints (&lines)[LINES<dtype>]) {
#pragma GCC unroll 16
    for (int i = 0; i < LINES<dtype>; ++i, place += 4 * STRIP) {
        _mm_prefetch(reinterpret_cast<const char*>(place + ahead), _MM_HINT_T0);
        lines[i] = V::at(place);
    }
}

}  // namespace
}  // namespace niwaki

#endif

#endif
