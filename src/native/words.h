// How matrices of whole numbers of which all are stored, without a mask, have their rows: whole.cpp, panels.cpp.
//
// Rows are whole words of 64 columns, 64 bytes each of INT8 and 32 of INT4, of which byte i has column i in its lower
// half and column i + 32 in the upper one: a shift and a mask make bytes of them. Here these bytes are 16 times what
// the numbers are, which keeps signs where they are.

#ifndef NIWAKI_WORDS_H
#define NIWAKI_WORDS_H

#include "streams.h"

namespace niwaki {
namespace {

constexpr int WORD = 64;  // columns

// Bytes of a word, and what its unpacked numbers have to be multiplied with.
template <int dtype>
constexpr std::int64_t SIZE = dtype == INT4 ? WORD / 2 : WORD;
template <int dtype>
constexpr float UNIT = dtype == INT4 ? 0x1p-4f : 1.0f;

template <int dtype>
const std::uint8_t* row_of(const Matrix& m, std::int64_t row) {
    return static_cast<const std::uint8_t*>(m.values) + row * (m.stride / 8) * SIZE<dtype>;
}

template <int dtype>
PART_OF_CALLER void unpack(const std::uint8_t* word, std::int8_t* numbers) {
    if constexpr (dtype == INT8) {
        std::memcpy(numbers, word, WORD);
    } else {
        for (int i = 0; i < WORD / 2; ++i) {
            numbers[i] = static_cast<std::int8_t>(word[i] << 4);
            numbers[i + WORD / 2] = static_cast<std::int8_t>(word[i] & 0xf0);
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
        const __m256i upper = _mm256_set1_epi8(static_cast<char>(0xf0));
        numbers[1] = _mm256_and_si256(numbers[0], upper);
        numbers[0] = _mm256_and_si256(_mm256_slli_epi16(numbers[0], 4), upper);
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
