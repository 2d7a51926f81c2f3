// A plain dense product in bfloat16, as fast as reading the weights allows: what a packed one has to be compared with.

#include <immintrin.h>

#include <cstdint>

#define TARGET __attribute__((target("avx2,fma")))

// y (rows,) = W x, where W is (rows, columns) bfloat16, columns a multiple of 32, and `x` has of each 16 numbers first
// those at even places. One thread.
extern "C" TARGET void dense(std::int64_t rows, std::int64_t columns, const std::uint16_t* W, const float* x,
                             float* y) {
    const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    for (std::int64_t row = 0; row < rows; ++row, W += columns) {
        __m256 sums[4];
        for (auto& sum : sums) sum = _mm256_setzero_ps();
        for (std::int64_t at = 0; at < columns; at += 32)
            for (int half = 0; half < 2; ++half) {
                const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(W + at + 16 * half));
                const float* those = x + at + 16 * half;
                sums[2 * half] = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)),
                                                 _mm256_loadu_ps(those), sums[2 * half]);
                sums[2 * half + 1] = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(pairs, upper)),
                                                     _mm256_loadu_ps(those + 8), sums[2 * half + 1]);
            }
        const __m256 sum = _mm256_add_ps(_mm256_add_ps(sums[0], sums[1]), _mm256_add_ps(sums[2], sums[3]));
        alignas(32) float parts[8];
        _mm256_store_ps(parts, sum);
        y[row] = ((parts[0] + parts[1]) + (parts[2] + parts[3])) + ((parts[4] + parts[5]) + (parts[6] + parts[7]));
    }
}
