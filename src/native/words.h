// How matrices of whole numbers of which all are stored, without a mask, have their rows: whole.cpp, panels.cpp.
//
// Rows are whole words of 64 columns, 64 bytes each of INT8 and 32 of INT4, of which byte i has column i in its lower
// half and column i + 32 in the upper one: a shift and a mask make bytes of them. INT5 and INT6 have the lowest four
// bits of all columns like that, and behind them the others: of INT5 bit i of 64 is that of column i, of INT6 byte i
// of 16 has the two of columns i, i + 16, i + 32 and i + 48, the first in its lowest bits. Here the bytes that come of
// it are 16, 8 or 4 times what the numbers are, which keeps signs where they are.

#ifndef NIWAKI_WORDS_H
#define NIWAKI_WORDS_H

#include <type_traits>

#include "streams.h"

namespace niwaki {
namespace {

constexpr int WORD = 64;  // columns

// Bits of a number, bytes of a word, and what its unpacked numbers have to be multiplied with.
template <int dtype>
constexpr int BITS = dtype == INT8   ? 8
                     : dtype == INT6 ? 6
                     : dtype == INT5 ? 5
                                     : 4;
template <int dtype>
constexpr std::int64_t SIZE = WORD / 8 * BITS<dtype>;
template <int dtype>
constexpr float UNIT = 1.0f / (1 << (8 - BITS<dtype>));

// `function` with the dtype as a constant.
template <typename Function>
auto with_dtype(int dtype, Function&& function) {
    switch (dtype) {
        case INT8:
            return function(std::integral_constant<int, INT8>{});
        case INT6:
            return function(std::integral_constant<int, INT6>{});
        case INT5:
            return function(std::integral_constant<int, INT5>{});
        default:
            return function(std::integral_constant<int, INT4>{});
    }
}

template <int dtype>
const std::uint8_t* row_of(const Matrix& m, std::int64_t row) {
    return static_cast<const std::uint8_t*>(m.values) + row * (m.stride / 8) * SIZE<dtype>;
}

template <int dtype>
PART_OF_CALLER void unpack(const std::uint8_t* word, std::int8_t* numbers) {
    if constexpr (dtype == INT8) {
        std::memcpy(numbers, word, WORD);
    } else {
        constexpr int others = 8 - BITS<dtype>;  // bits of a byte that are 0
        for (int i = 0; i < WORD / 2; ++i) {
            numbers[i] = static_cast<std::int8_t>((word[i] & 0x0f) << others);
            numbers[i + WORD / 2] = static_cast<std::int8_t>(word[i] >> 4 << others);
        }
        const std::uint8_t* upper = word + WORD / 2;
        if constexpr (dtype == INT5)
            for (int i = 0; i < WORD; ++i)
                numbers[i] = static_cast<std::int8_t>(numbers[i] | (upper[i / 8] >> i % 8 & 1) << 7);
        if constexpr (dtype == INT6)
            for (int part = 0; part < 4; ++part)
                for (int i = 0; i < 16; ++i) {
                    std::int8_t& number = numbers[16 * part + i];
                    number = static_cast<std::int8_t>(number | (upper[i] >> 2 * part & 3) << 6);
                }
    }
}

#if defined(NIWAKI_X86)

template <int dtype>
TARGET(NIWAKI_AVX2)
inline void unpack(const std::uint8_t* word, __m256i (&numbers)[2]) {
    const auto* place = reinterpret_cast<const __m256i*>(word);
    numbers[0] = _mm256_loadu_si256(place);
    if constexpr (dtype == INT8) {
        numbers[1] = _mm256_loadu_si256(place + 1);
    } else {
        constexpr int others = 8 - BITS<dtype>;
        const __m256i lower = _mm256_set1_epi8(0x0f << others);
        numbers[1] = _mm256_and_si256(_mm256_srli_epi16(numbers[0], 4 - others), lower);
        numbers[0] = _mm256_and_si256(_mm256_slli_epi16(numbers[0], others), lower);
        if constexpr (dtype == INT5) {
            // A byte of these bits for each eight columns, then of each of them one bit.
            const __m256i places = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
            const __m256i ones = _mm256_set1_epi64x(static_cast<std::int64_t>(0x8040201008040201));
            for (int half = 0; half < 2; ++half) {
                const __m256i four = _mm256_set1_epi32(load<std::int32_t>(word + WORD / 2 + 4 * half));
                const __m256i bits = _mm256_and_si256(_mm256_shuffle_epi8(four, places), ones);
                const __m256i upper = _mm256_and_si256(_mm256_cmpeq_epi8(bits, ones), _mm256_set1_epi8(-128));
                numbers[half] = _mm256_or_si256(numbers[half], upper);
            }
        }
        if constexpr (dtype == INT6) {
            const __m128i once = _mm_loadu_si128(reinterpret_cast<const __m128i*>(word + WORD / 2));
            const __m256i both = _mm256_broadcastsi128_si256(once), ends = _mm256_set1_epi8(static_cast<char>(0xc0));
            const __m256i first = _mm256_sllv_epi64(both, _mm256_setr_epi64x(6, 6, 4, 4));
            const __m256i last = _mm256_sllv_epi64(both, _mm256_setr_epi64x(2, 2, 0, 0));
            numbers[0] = _mm256_or_si256(numbers[0], _mm256_and_si256(first, ends));
            numbers[1] = _mm256_or_si256(numbers[1], _mm256_and_si256(last, ends));
        }
    }
}

// The numbers of a word as 16 bits each.
template <int dtype>
TARGET(NIWAKI_AVX2)
inline void widen(const std::uint8_t* word, __m256i (&numbers)[4]) {
    if constexpr (dtype == INT8) {
        for (int i = 0; i < 4; ++i)
            numbers[i] = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(word) + i));
    } else {
        __m256i bytes[2];
        unpack<dtype>(word, bytes);
        for (int i = 0; i < 2; ++i) {
            numbers[2 * i] = _mm256_cvtepi8_epi16(_mm256_castsi256_si128(bytes[i]));
            numbers[2 * i + 1] = _mm256_cvtepi8_epi16(_mm256_extracti128_si256(bytes[i], 1));
        }
    }
}

#endif

}  // namespace
}  // namespace niwaki

#endif
