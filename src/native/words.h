// How matrices of whole numbers of which all are stored, without a mask, have their rows: whole.cpp, panels.cpp.
//
// Rows are whole words of 64 columns, 64 bytes each of INT8. Those of fewer bits have fields of four, of two and of one
// bit of all columns, one after the other, as many as their bits are made of (INT6 has four and two, INT3 two and one),
// the first with the lowest bits. Byte i of a field of four bits has column i in its lower half and column i + 32 in
// the upper one, so that a shift and a mask make bytes of them; byte i of one of two bits has the columns i, i + 16,
// i + 32 and i + 48, the first in its lowest bits; bit i of the 64 of the last field is that of column i. Here the
// bytes that come of it are 2 to 64 times what the numbers are, which keeps signs where they are.
//
// Rows from the first on may be in strips, 16 side by side: of each word the first four bytes of each row, then the
// next four, and so on, and of each group the scales of all 16. A strip takes the place of the same rows one after the
// other.

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
                     : dtype == INT4 ? 4
                     : dtype == INT3 ? 3
                                     : 2;
template <int dtype>
constexpr std::int64_t SIZE = WORD / 8 * BITS<dtype>;
template <int dtype>
constexpr float UNIT = 1.0f / (1 << (8 - BITS<dtype>));

// Which fields numbers of fewer than 8 bits have, and where in a word those of two bits and of one begin.
template <int dtype>
constexpr bool HAS_FOUR = (BITS<dtype> & 4) != 0;
template <int dtype>
constexpr bool HAS_TWO = (BITS<dtype> & 2) != 0;
template <int dtype>
constexpr bool HAS_ONE = (BITS<dtype> & 1) != 0;
template <int dtype>
constexpr int TWOS = HAS_FOUR<dtype> ? WORD / 2 : 0;
template <int dtype>
constexpr int ONES = TWOS<dtype> + (HAS_TWO<dtype> ? WORD / 4 : 0);

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
        case INT3:
            return function(std::integral_constant<int, INT3>{});
        case INT2:
            return function(std::integral_constant<int, INT2>{});
        default:
            return function(std::integral_constant<int, INT4>{});
    }
}

template <int dtype>
const std::uint8_t* row_of(const Matrix& m, std::int64_t row) {
    return static_cast<const std::uint8_t*>(m.values) + row * (m.stride / 8) * SIZE<dtype>;
}

// A word of a row: where it is, or, of a row in a strip, brought together in `room`.
template <int dtype>
PART_OF_CALLER const std::uint8_t* word_of(const Matrix& m, std::int64_t row, std::int64_t word, std::uint8_t* room) {
    if (row >= m.in_strips) return row_of<dtype>(m, row) + word * SIZE<dtype>;
    const std::int64_t lane = row % STRIP;
    const std::uint8_t* place = row_of<dtype>(m, row - lane) + word * STRIP * SIZE<dtype> + 4 * lane;
    for (int i = 0; i < SIZE<dtype>; i += 4) std::memcpy(room + i, place + i * STRIP, 4);
    return room;
}

// Where the scale of a group of a row is; in a strip those of the rows behind it follow.
inline const float* scale_of(const Matrix& m, std::int64_t row, std::int64_t group) {
    const std::int64_t lane = row % STRIP;
    return m.scales + (row < m.in_strips ? (row - lane) * m.groups + group * STRIP + lane : row * m.groups + group);
}

template <int dtype>
PART_OF_CALLER void unpack(const std::uint8_t* word, std::int8_t* numbers) {
    if constexpr (dtype == INT8) {
        std::memcpy(numbers, word, WORD);
    } else {
        constexpr int others = 8 - BITS<dtype>;  // bits of a byte that are 0
        if constexpr (HAS_FOUR<dtype>)
            for (int i = 0; i < WORD / 2; ++i) {
                numbers[i] = static_cast<std::int8_t>((word[i] & 0x0f) << others);
                numbers[i + WORD / 2] = static_cast<std::int8_t>(word[i] >> 4 << others);
            }
        else
            std::memset(numbers, 0, WORD);
        if constexpr (HAS_TWO<dtype>) {
            constexpr int place = HAS_FOUR<dtype> ? others + 4 : others;
            for (int part = 0; part < 4; ++part)
                for (int i = 0; i < 16; ++i) {
                    std::int8_t& number = numbers[16 * part + i];
                    number = static_cast<std::int8_t>(number | (word[TWOS<dtype> + i] >> 2 * part & 3) << place);
                }
        }
        if constexpr (HAS_ONE<dtype>)
            for (int i = 0; i < WORD; ++i)
                numbers[i] = static_cast<std::int8_t>(numbers[i] | (word[ONES<dtype> + i / 8] >> i % 8 & 1) << 7);
    }
}

#if defined(NIWAKI_X86)

template <int dtype>
TARGET(NIWAKI_AVX2)
inline void unpack(const std::uint8_t* word, __m256i (&numbers)[2]) {
    const auto* place = reinterpret_cast<const __m256i*>(word);
    if constexpr (dtype == INT8) {
        numbers[0] = _mm256_loadu_si256(place);
        numbers[1] = _mm256_loadu_si256(place + 1);
        return;
    }
    constexpr int others = 8 - BITS<dtype>;
    if constexpr (HAS_FOUR<dtype>) {
        const __m256i both = _mm256_loadu_si256(place), lower = _mm256_set1_epi8(static_cast<char>(0x0f << others));
        numbers[0] = _mm256_and_si256(_mm256_slli_epi16(both, others), lower);
        numbers[1] = _mm256_and_si256(_mm256_srli_epi16(both, 4 - others), lower);
    }
    if constexpr (HAS_TWO<dtype>) {
        const __m128i once = _mm_loadu_si128(reinterpret_cast<const __m128i*>(word + TWOS<dtype>));
        const __m256i twice = _mm256_broadcastsi128_si256(once), ends = _mm256_set1_epi8(static_cast<char>(0xc0));
        const __m256i moved[2] = {_mm256_sllv_epi64(twice, _mm256_setr_epi64x(6, 6, 4, 4)),
                                  _mm256_sllv_epi64(twice, _mm256_setr_epi64x(2, 2, 0, 0))};
        for (int half = 0; half < 2; ++half) {
            // Two bits at the end of each byte, which with one more bit are further down: none leaves its byte.
            const __m256i fields = _mm256_srli_epi16(_mm256_and_si256(moved[half], ends), HAS_ONE<dtype> ? 1 : 0);
            numbers[half] = HAS_FOUR<dtype> ? _mm256_or_si256(numbers[half], fields) : fields;
        }
    }
    if constexpr (HAS_ONE<dtype>) {
        // A byte of these bits for each eight columns, then of each of them one bit.
        const __m256i places = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
        const __m256i ones = _mm256_set1_epi64x(static_cast<std::int64_t>(0x8040201008040201));
        for (int half = 0; half < 2; ++half) {
            const __m256i four = _mm256_set1_epi32(load<std::int32_t>(word + ONES<dtype> + 4 * half));
            const __m256i bits = _mm256_and_si256(_mm256_shuffle_epi8(four, places), ones);
            const __m256i upper = _mm256_and_si256(_mm256_cmpeq_epi8(bits, ones), _mm256_set1_epi8(-128));
            numbers[half] = _mm256_or_si256(numbers[half], upper);
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
