// The intrinsics that src/native/kernels.cpp uses of AVX-512, in plain C++, after Intel's Intrinsics Guide.

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

inline __m512i _mm512_loadu_si512(const void* place) {
    __m512i all;
    std::memcpy(&all, place, sizeof all);
    return all;
}

inline void _mm512_storeu_si512(void* place, __m512i all) {
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

// The numbers of `from`, from the first on, go to the lanes of the ones of `mask`; the other lanes are 0.
inline __m512i _mm512_maskz_expand_epi16(std::uint32_t mask, __m512i from) {
    __m512i all{};
    int next = 0;
    for (int i = 0; i < 32; ++i)
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
