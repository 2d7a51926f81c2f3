// How kernels with vector instructions go through the rows of a matrix: several at a time, and asking for what comes.

#ifndef NIWAKI_STREAMS_H
#define NIWAKI_STREAMS_H

#include <type_traits>

#include "products.h"

#if defined(NIWAKI_EMULATE)
#include NIWAKI_EMULATE  // the intrinsics of AVX-512 in plain C++, for tests on machines without it
#elif defined(NIWAKI_X86)
#include <immintrin.h>
#endif

#if defined(NIWAKI_X86) || defined(NIWAKI_EMULATE)

namespace niwaki {
namespace {

// How many bytes of values ahead are asked for.
constexpr std::int64_t PREFETCH = 4096;

// `rows` rows that are computed together, `apart` from each other; then those behind them, and so on.
template <int rows>
struct Streams {
    const std::uint8_t* values[rows];
    const std::uint8_t* mask;
    std::int64_t apart;
    Streams(const Matrix& m, int size, std::int64_t first, std::int64_t step)
        : mask(m.mask + first * m.stride), apart(step * m.stride) {
        for (int r = 0; r < rows; ++r)
            values[r] = static_cast<const std::uint8_t*>(m.values) + size * m.starts[first + r * step];
    }
    // The 64 bits at `place` of the first row's mask, for row `r`; asks for what `values` will be later on.
    template <int size>
    std::uint64_t bits(int r, const std::uint8_t* place) const {
        for (int line = 0; line < 32 * size; line += 64)
            _mm_prefetch(reinterpret_cast<const char*>(values[r] + PREFETCH + line), _MM_HINT_T0);
        return load<std::uint64_t>(place + r * apart);
    }
};

// Asks for what `rows` rows, `apart` from each other, have later on, as much as `size` bytes of each are.
template <int rows, int size>
inline void ask_for(const std::uint8_t* place, std::int64_t apart) {
    for (int r = 0; r < rows; ++r)
        if (size == 64 || (reinterpret_cast<std::uintptr_t>(place + r * apart) & 32) == 0)
            _mm_prefetch(reinterpret_cast<const char*>(place + r * apart + PREFETCH), _MM_HINT_T0);
}

#if defined(NIWAKI_X86)

TARGET(NIWAKI_AVX2)
inline float sum_of(__m256 numbers) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(numbers), _mm256_extractf128_ps(numbers, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_shuffle_ps(half, half, 1)));
}

#endif

// Calls `function` for rows `first` to `last`, with how many are computed together, where the first of them begin, and
// how far they are apart: `rows` at a time, then those that are left.
template <int rows, typename Function>
void in_streams(std::int64_t first, std::int64_t last, Function&& function) {
    const std::int64_t step = (last - first) / rows, rest = first + rows * step;
    function(std::integral_constant<int, rows>{}, first, step);
    function(std::integral_constant<int, 1>{}, rest, last - rest);
}

// Calls `function` with a number from 1 to VECTORS that the compiler knows.
template <typename Function>
void with_number(int number, Function&& function) {
    switch (number) {
        case 1:
            return function(std::integral_constant<int, 1>{});
        case 2:
            return function(std::integral_constant<int, 2>{});
        case 3:
            return function(std::integral_constant<int, 3>{});
        default:
            return function(std::integral_constant<int, VECTORS>{});
    }
}

}  // namespace
}  // namespace niwaki

#endif

#endif
