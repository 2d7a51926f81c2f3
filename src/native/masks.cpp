// Numbers of which some are made 0: weights and gradients of a pruned model that is trained (finetuning/zeros.py).

#include "products.h"

namespace niwaki {
namespace {

// Bytes of a mask that a thread takes at a time.
constexpr std::int64_t PIECE = 1 << 13;

// Keeps those of `count` numbers whose bit is set, the first in the lowest of a byte.
template <typename T>
PART_OF_CALLER void mask_some(T* numbers, const std::uint8_t* bits, std::int64_t count) {
    for (std::int64_t byte = 0; byte < count / 8; ++byte)
#pragma GCC unroll 8
        for (int bit = 0; bit < 8; ++bit)  // compared, because no instructions shift 16 bits by different numbers
            numbers[8 * byte + bit] &= bits[byte] & 1 << bit ? static_cast<T>(-1) : T{0};
    for (std::int64_t i = count / 8 * 8; i < count; ++i)
        if (!(bits[i / 8] & 1 << i % 8)) numbers[i] = 0;
}

template <typename T>
void mask_plain(T* numbers, const std::uint8_t* bits, std::int64_t count) {
    mask_some(numbers, bits, count);
}

#if defined(NIWAKI_X86)
template <typename T>
TARGET(NIWAKI_AVX2)
void mask_avx2(T* numbers, const std::uint8_t* bits, std::int64_t count) {
    mask_some(numbers, bits, count);
}
#endif

template <typename T>
void mask(int path, void* values, const std::uint8_t* bits, std::int64_t count, int threads) {
    auto* function = mask_plain<T>;
#if defined(NIWAKI_X86)
    if (path >= AVX2) function = mask_avx2<T>;
#else
    static_cast<void>(path);
#endif
    for_rows((count + 7) / 8, PIECE, threads, [&](std::int64_t first, std::int64_t last) {
        function(static_cast<T*>(values) + 8 * first, bits + first, std::min(8 * last, count) - 8 * first);
    });
}

}  // namespace
}  // namespace niwaki

extern "C" {

// Makes 0 what of `count` numbers, of `width` bytes each, has no bit set: in any dtype, NaN too.
void niwaki_mask(int path, void* values, int width, std::int64_t count, const std::uint8_t* bits, int threads) {
    using namespace niwaki;
    path = usable(path);
    switch (width) {
        case 1:
            return mask<std::uint8_t>(path, values, bits, count, threads);
        case 2:
            return mask<std::uint16_t>(path, values, bits, count, threads);
        case 4:
            return mask<std::uint32_t>(path, values, bits, count, threads);
        default:
            return mask<std::uint64_t>(path, values, bits, count, threads);
    }
}

}  // extern "C"
