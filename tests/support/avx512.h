// The intrinsics that src/native uses of AVX-512, in plain C++, after Intel's Intrinsics Guide.

#include <cmath>
#include <cstdint>
#include <cstring>

#define _MM_HINT_T0 0
inline void _mm_prefetch(const char*, int) {}

struct __m512i {
    std::uint16_t lane[32];
};
struct __m512bh {
    std::uint16_t lane[32];
};
struct __m512 {
    float lane[16];
};

struct __m256i {
    std::uint8_t lane[32];
};
struct __m128i {
    std::uint8_t lane[16];
};

inline __m128i _mm_load_si128(const __m128i* place) {
    return *place;
}

inline __m128i _mm_loadu_si128(const __m128i* place) {
    __m128i all;
    std::memcpy(&all, place, sizeof all);
    return all;
}

inline __m256i _mm256_loadu_si256(const __m256i* place) {
    __m256i all;
    std::memcpy(&all, place, sizeof all);
    return all;
}

inline __m512i _mm512_broadcast_i32x4(__m128i from) {
    __m512i all;
    for (int i = 0; i < 4; ++i) std::memcpy(all.lane + 8 * i, from.lane, sizeof from);
    return all;
}

inline __m512i _mm512_cvtepu8_epi16(__m256i from) {
    __m512i all;
    for (int i = 0; i < 32; ++i) all.lane[i] = from.lane[i];
    return all;
}

inline __m512i _mm512_cvtepu8_epi32(__m128i from) {
    __m512i all{};
    for (int i = 0; i < 16; ++i) all.lane[2 * i] = from.lane[i];
    return all;
}

inline __m512i _mm512_slli_epi16(__m512i from, unsigned count) {
    for (auto& lane : from.lane) lane = static_cast<std::uint16_t>(lane << count);
    return from;
}

inline __m512i _mm512_or_si512(__m512i a, __m512i b) {
    for (int i = 0; i < 32; ++i) a.lane[i] |= b.lane[i];
    return a;
}

// Of 32 bits: 16 numbers without a sign from 16 bits, or with one from 8.
inline __m512i _mm512_cvtepu16_epi32(__m256i from) {
    __m512i all{};
    for (int i = 0; i < 16; ++i) std::memcpy(all.lane + 2 * i, from.lane + 2 * i, 2);
    return all;
}

inline __m512i _mm512_cvtepi8_epi32(__m128i from) {
    __m512i all;
    for (int i = 0; i < 16; ++i) {
        const std::int32_t value = static_cast<std::int8_t>(from.lane[i]);
        std::memcpy(all.lane + 2 * i, &value, sizeof value);
    }
    return all;
}

inline __m512 _mm512_cvtepi32_ps(__m512i from) {
    __m512 all;
    for (int i = 0; i < 16; ++i) {
        std::int32_t value;
        std::memcpy(&value, from.lane + 2 * i, sizeof value);
        all.lane[i] = static_cast<float>(value);
    }
    return all;
}

// From float16: a sign, 5 bits of exponent, 10 of fraction.
inline __m512 _mm512_cvtph_ps(__m256i from) {
    __m512 all;
    for (int i = 0; i < 16; ++i) {
        const int bits = from.lane[2 * i] | from.lane[2 * i + 1] << 8;
        const int exponent = bits >> 10 & 31, fraction = bits & 1023;
        const float size = exponent == 31 ? (fraction ? NAN : INFINITY)
                           : exponent     ? std::ldexp(1024.0f + static_cast<float>(fraction), exponent - 25)
                                          : std::ldexp(static_cast<float>(fraction), -24);
        all.lane[i] = std::copysign(size, bits >> 15 ? -1.0f : 1.0f);
    }
    return all;
}

// What `byte(i)` gives for each byte i.
template <typename Function>
inline __m512i of_bytes(Function&& byte) {
    __m512i all;
    std::uint8_t bytes[64];
    for (int i = 0; i < 64; ++i) bytes[i] = byte(i);
    std::memcpy(&all, bytes, sizeof all);
    return all;
}

inline __m512i _mm512_maskz_set1_epi8(std::uint64_t mask, char value) {
    return of_bytes([&](int i) { return mask >> i & 1 ? static_cast<std::uint8_t>(value) : std::uint8_t{}; });
}

inline std::uint8_t byte_of(const __m512i& from, int i) {
    return static_cast<std::uint8_t>(from.lane[i / 2] >> i % 2 * 8);
}

inline __m512i _mm512_xor_si512(__m512i a, __m512i b) {
    return of_bytes([&](int i) { return byte_of(a, i) ^ byte_of(b, i); });
}

// Numbers of 32 bits as a function of such numbers.
template <typename Function, typename... Registers>
inline __m512i of_words(Function&& word, const Registers&... from) {
    __m512i all;
    for (int i = 0; i < 16; ++i) {
        const auto number = [&](const __m512i& of) {
            std::uint32_t value;
            std::memcpy(&value, of.lane + 2 * i, sizeof value);
            return value;
        };
        const std::uint32_t found = word(number(from)...);
        std::memcpy(all.lane + 2 * i, &found, sizeof found);
    }
    return all;
}

inline __m512i _mm512_add_epi32(__m512i a, __m512i b) {
    return of_words([](std::uint32_t x, std::uint32_t y) { return x + y; }, a, b);
}

inline __m512i _mm512_andnot_si512(__m512i a, __m512i b) {
    return of_words([](std::uint32_t x, std::uint32_t y) { return ~x & y; }, a, b);
}

// Four products of bytes, of which the first have no sign, added to each number of 32 bits.
inline __m512i _mm512_dpbusd_epi32(__m512i sums, __m512i a, __m512i b) {
    const auto add = [](std::uint32_t sum, std::uint32_t x, std::uint32_t y) {
        for (int i = 0; i < 32; i += 8)
            sum += static_cast<std::uint32_t>(static_cast<int>(x >> i & 255) * static_cast<std::int8_t>(y >> i & 255));
        return sum;
    };
    return of_words(add, sums, a, b);
}

// The first number is the last argument.
inline __m512i _mm512_set4_epi32(int d, int c, int b, int a) {
    __m512i all;
    const int four[4] = {a, b, c, d};
    for (int i = 0; i < 4; ++i) std::memcpy(all.lane + 8 * i, four, sizeof four);
    return all;
}

inline __m512i _mm512_srai_epi16(__m512i from, unsigned count) {
    for (auto& lane : from.lane) lane = static_cast<std::uint16_t>(static_cast<std::int16_t>(lane) >> count);
    return from;
}

inline std::uint64_t _mm512_test_epi8_mask(__m512i a, __m512i b) {
    std::uint64_t ones = 0;
    for (int i = 0; i < 64; ++i) ones |= static_cast<std::uint64_t>((byte_of(a, i) & byte_of(b, i)) != 0) << i;
    return ones;
}

inline void _mm512_mask_storeu_ps(void* place, std::uint16_t mask, __m512 all) {
    for (int i = 0; i < 16; ++i)
        if (mask >> i & 1) std::memcpy(static_cast<float*>(place) + i, &all.lane[i], sizeof(float));
}

// Two products of 16 bits, added to each number of 32.
inline __m512i _mm512_dpwssd_epi32(__m512i sums, __m512i a, __m512i b) {
    for (int i = 0; i < 16; ++i) {
        std::int32_t sum;
        std::memcpy(&sum, sums.lane + 2 * i, sizeof sum);
        for (int j = 2 * i; j < 2 * i + 2; ++j)
            sum += static_cast<std::int16_t>(a.lane[j]) * static_cast<std::int16_t>(b.lane[j]);
        std::memcpy(sums.lane + 2 * i, &sum, sizeof sum);
    }
    return sums;
}

inline __m512i _mm512_mask_expand_epi8(__m512i others, std::uint64_t mask, __m512i from) {
    int next = 0;
    return of_bytes([&](int i) { return byte_of(mask >> i & 1 ? from : others, mask >> i & 1 ? next++ : i); });
}

// Each 16 bytes are a table of their own.
inline __m512i _mm512_shuffle_epi8(__m512i table, __m512i at) {
    return of_bytes([&](int i) {
        const std::uint8_t place = byte_of(at, i);
        return place & 128 ? std::uint8_t{} : byte_of(table, i / 16 * 16 + (place & 15));
    });
}

inline __m512i _mm512_unpacklo_epi8(__m512i a, __m512i b) {
    return of_bytes([&](int i) { return byte_of(i % 2 ? b : a, i / 16 * 16 + i % 16 / 2); });
}

inline __m512i _mm512_unpackhi_epi8(__m512i a, __m512i b) {
    return of_bytes([&](int i) { return byte_of(i % 2 ? b : a, i / 16 * 16 + 8 + i % 16 / 2); });
}

inline __m512 _mm512_set1_ps(float value) {
    __m512 all;
    for (auto& lane : all.lane) lane = value;
    return all;
}

inline __m512i _mm512_loadu_si512(const void* place) {
    __m512i all;
    std::memcpy(&all, place, sizeof all);
    return all;
}

inline void _mm512_storeu_si512(void* place, __m512i all) {
    std::memcpy(place, &all, sizeof all);
}

inline void _mm512_storeu_ps(float* place, __m512 all) {
    std::memcpy(place, &all, sizeof all);
}

inline __m512 _mm512_loadu_ps(const void* place) {
    __m512 all;
    std::memcpy(&all, place, sizeof all);
    return all;
}

inline __m512 _mm512_setzero_ps() {
    return __m512{};
}

inline __m512i _mm512_set1_epi32(int value) {
    __m512i all;
    for (int i = 0; i < 16; ++i) std::memcpy(all.lane + 2 * i, &value, sizeof value);
    return all;
}

inline __m512i _mm512_setzero_si512() {
    return __m512i{};
}

// The numbers of `from`, from the first on, go to the lanes of the ones of `mask`; the other lanes stay as they are.
inline __m512i _mm512_mask_expand_epi16(__m512i all, std::uint32_t mask, __m512i from) {
    int next = 0;
    for (int i = 0; i < 32; ++i)
        if (mask >> i & 1) all.lane[i] = from.lane[next++];
    return all;
}

inline __m512 _mm512_maskz_expand_ps(std::uint16_t mask, __m512 from) {
    __m512 all{};
    int next = 0;
    for (int i = 0; i < 16; ++i)
        if (mask >> i & 1) all.lane[i] = from.lane[next++];
    return all;
}

inline __m512i _mm512_slli_epi32(__m512i from, unsigned count) {
    __m512i all;
    for (int i = 0; i < 16; ++i) {
        std::uint32_t value;
        std::memcpy(&value, from.lane + 2 * i, sizeof value);
        value <<= count;
        std::memcpy(all.lane + 2 * i, &value, sizeof value);
    }
    return all;
}

inline __m512i _mm512_srli_epi32(__m512i from, unsigned count) {
    for (int i = 0; i < 16; ++i) {
        std::uint32_t value;
        std::memcpy(&value, from.lane + 2 * i, sizeof value);
        value >>= count;
        std::memcpy(from.lane + 2 * i, &value, sizeof value);
    }
    return from;
}

inline __m512i _mm512_and_si512(__m512i a, __m512i b) {
    for (int i = 0; i < 32; ++i) a.lane[i] &= b.lane[i];
    return a;
}

inline __m512 _mm512_castsi512_ps(__m512i from) {
    __m512 all;
    std::memcpy(&all, &from, sizeof all);
    return all;
}

inline __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
    for (int i = 0; i < 16; ++i) c.lane[i] = std::fma(a.lane[i], b.lane[i], c.lane[i]);
    return c;
}

inline __m512 _mm512_mul_ps(__m512 a, __m512 b) {
    for (int i = 0; i < 16; ++i) a.lane[i] *= b.lane[i];
    return a;
}

// By the lowest four bits of each number.
inline __m512 _mm512_permutexvar_ps(__m512i at, __m512 table) {
    __m512 all;
    for (int i = 0; i < 16; ++i) all.lane[i] = table.lane[at.lane[2 * i] & 15];
    return all;
}

inline __m512 _mm512_add_ps(__m512 a, __m512 b) {
    for (int i = 0; i < 16; ++i) a.lane[i] += b.lane[i];
    return a;
}

// Products of pairs of bfloat16, added to float32.
inline __m512 _mm512_dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
    for (int i = 0; i < 32; ++i) {
        const std::uint32_t left = static_cast<std::uint32_t>(a.lane[i]) << 16,
                            right = static_cast<std::uint32_t>(b.lane[i]) << 16;
        float x, y;
        std::memcpy(&x, &left, sizeof x);
        std::memcpy(&y, &right, sizeof y);
        sum.lane[i / 2] += x * y;
    }
    return sum;
}

inline float _mm512_reduce_add_ps(__m512 from) {
    float sum = 0;
    for (float value : from.lane) sum += value;
    return sum;
}
