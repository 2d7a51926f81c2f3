// Products with matrices that are a bit mask and the values of its ones: y = x W^T without a dense W.
//
// Plain C functions on plain pointers, so that the library depends on no version of Python or torch. The format is that
// of docs/format.md: `stride` bytes of mask for each row, bit j % 8 of byte j / 8 for column j, and the values of all
// rows one after the other, those of row r from values[starts[r]] on, with at least 64 readable bytes behind the last.
//
// What limits these kernels is decoding: 8 to 64 weights at a time, the bits choose where the next values go. The
// address of the next values depends on the bits through one count and one addition only. Rows that are computed
// together lie far apart, so that values and mask of each are read on and on, which the hardware foresees.

#include "products.h"
#include "streams.h"

#include <algorithm>
#include <cstdlib>
#include <system_error>
#include <thread>

#if defined(NIWAKI_X86)
#include <cpuid.h>
#endif

// Of the OpenMP runtime that torch has loaded; null where none has it. A weak name rather than dlsym, which glibc moved
// to another library in 2.34, so that a wheel built with a newer glibc loads with an older one.
extern "C" __attribute__((weak)) void GOMP_parallel(void (*)(void*), void*, unsigned, unsigned);

namespace niwaki {
namespace {

float from_fp16(std::uint16_t half) {
    const std::uint32_t sign = (half & 0x8000u) << 16, exponent = (half >> 10) & 31u, fraction = half & 0x3ffu;
    if (exponent == 31) return from_bits(sign | 0x7f800000u | fraction << 13);
    if (exponent == 0) return (sign ? -1.0f : 1.0f) * static_cast<float>(fraction) * 0x1p-24f;
    return from_bits(sign | (exponent + 112) << 23 | fraction << 13);
}

float value(const Matrix& matrix, std::int64_t index) {
    switch (matrix.dtype) {
        case BF16:
            return from_bits(static_cast<std::uint32_t>(static_cast<const std::uint16_t*>(matrix.values)[index]) << 16);
        case FP16:
            return from_fp16(static_cast<const std::uint16_t*>(matrix.values)[index]);
        case FP32:
            return static_cast<const float*>(matrix.values)[index];
        case INT8:
            return static_cast<const std::int8_t*>(matrix.values)[index];
        default: {  // `index` counts halves of bytes
            const auto byte = static_cast<const std::uint8_t*>(matrix.values)[index / 2];
            return static_cast<std::int8_t>(index % 2 ? byte & 0xf0 : byte << 4) / 16;
        }
    }
}

bool scaled(const Matrix& matrix) {
    return matrix.dtype == INT8 || matrix.dtype == INT4;
}

void portable_rows(const Product& p, std::int64_t b, int vectors, std::int64_t first, std::int64_t last) {
    const Matrix& m = p.matrix;
    // Of inputs that share a scale.
    const std::int64_t groups = scaled(m) ? m.groups : 1, words = m.stride / 8 / groups;
    for (std::int64_t row = first; row < last; ++row) {
        const std::uint8_t* bits = m.mask + row * m.stride;
        std::int64_t at = m.dtype == INT4 ? 2 * m.starts[row] : m.starts[row];
        float sums[VECTORS] = {};
        for (std::int64_t group = 0; group < groups; ++group) {
            float parts[VECTORS] = {};
            for (std::int64_t word = group * words; word < (group + 1) * words; ++word) {
                for (std::uint64_t rest = load<std::uint64_t>(bits + 8 * word); rest; rest &= rest - 1) {
                    const float weight = value(m, at++);
                    const float* x = p.x + b * 8 * m.stride + 64 * word + __builtin_ctzll(rest);
                    for (int v = 0; v < vectors; ++v) parts[v] += weight * x[v * 8 * m.stride];
                }
                if (m.dtype == INT4) at += at % 2;
            }
            const float scale = scaled(m) ? m.scales[row * groups + group] : 1.0f;
            for (int v = 0; v < vectors; ++v) sums[v] += parts[v] * scale;
        }
        for (int v = 0; v < vectors; ++v) p.y[(b + v) * m.rows + row] = sums[v];
    }
}

#if defined(NIWAKI_X86)

// For each byte of a mask, the bytes of a register that go to the lanes of its ones; 128 gives a zero.
struct Tables {
    alignas(32) std::uint8_t halves[256][32];  // 2-byte values as the upper halves of 8 x 4 bytes
    alignas(32) std::uint8_t dense[256][16];   // 2-byte values as 8 x 2 bytes
    alignas(32) std::uint8_t bytes[256][32];   // 1-byte values as the highest of 4
    alignas(32) std::int32_t lanes[256][8];    // 4-byte values: which one; and which lanes have one
    alignas(32) std::int32_t there[256][8];
    Tables() {
        for (int byte = 0; byte < 256; ++byte) {
            std::memset(halves[byte], 128, 32);
            std::memset(dense[byte], 128, 16);
            std::memset(bytes[byte], 128, 32);
            int next = 0;
            for (int lane = 0; lane < 8; ++lane) {
                const bool one = byte >> lane & 1;
                lanes[byte][lane] = one ? next : 0;
                there[byte][lane] = one ? -1 : 0;
                if (!one) continue;
                for (int i = 0; i < 2; ++i)
                    halves[byte][4 * lane + 2 + i] = dense[byte][2 * lane + i] =
                        static_cast<std::uint8_t>(2 * next + i);
                bytes[byte][4 * lane + 3] = static_cast<std::uint8_t>(next);
                ++next;
            }
        }
    }
};
const Tables tables;

// The entry that is `place` bytes behind the start of a table.
template <typename Register, typename T>
inline const Register* entry(const T& table, std::uint64_t place) {
    return reinterpret_cast<const Register*>(reinterpret_cast<const std::uint8_t*>(table) + place);
}

// Up to 8 values, where the bits of a byte are 1; `place` is 32 times the byte.
template <int dtype>
TARGET(NIWAKI_AVX2)
inline __m256 expand(const std::uint8_t* values, std::uint64_t place) {
    const auto* source = reinterpret_cast<const __m128i*>(values);
    if constexpr (dtype == BF16) {
        const __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128(source));
        return _mm256_castsi256_ps(_mm256_shuffle_epi8(both, _mm256_load_si256(entry<__m256i>(tables.halves, place))));
    } else if constexpr (dtype == FP16) {
        return _mm256_cvtph_ps(
            _mm_shuffle_epi8(_mm_loadu_si128(source), _mm_load_si128(entry<__m128i>(tables.dense, place / 2))));
    } else if constexpr (dtype == FP32) {
        const __m256 all = _mm256_loadu_ps(reinterpret_cast<const float*>(values));
        return _mm256_and_ps(_mm256_permutevar8x32_ps(all, _mm256_load_si256(entry<__m256i>(tables.lanes, place))),
                             _mm256_castsi256_ps(_mm256_load_si256(entry<__m256i>(tables.there, place))));
    } else {
        const __m256i all = _mm256_set1_epi64x(load<std::int64_t>(values));
        return _mm256_cvtepi32_ps(
            _mm256_shuffle_epi8(all, _mm256_load_si256(entry<__m256i>(tables.bytes, place))));  // times 2^24
    }
}

// 64 numbers of 4 bits as bytes, 16 times what they are.
TARGET(NIWAKI_AVX2)
inline void unpack_halves(const std::uint8_t* halves, std::uint8_t* bytes) {
    for (int i = 0; i < 2; ++i) {
        const __m256i both = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves + 16 * i)));
        const __m256i lower = _mm256_and_si256(_mm256_slli_epi16(both, 4), _mm256_set1_epi16(0x00f0));
        const __m256i upper = _mm256_and_si256(_mm256_slli_epi16(both, 8), _mm256_set1_epi16(-4096));
        _mm256_store_si256(reinterpret_cast<__m256i*>(bytes + 32 * i), _mm256_or_si256(lower, upper));
    }
}

// `rows` rows, `step` apart, and those behind them. What limits it are loads, of which two are possible at a time: 8
// weights need one of values and one of the table. Rows share those of x, vectors the decoding.
template <int dtype, int vectors, int rows>
TARGET(NIWAKI_AVX2)
void avx2_streams(const Product& p, std::int64_t b, std::int64_t first, std::int64_t step) {
    constexpr int size = dtype == FP32 ? 4 : dtype == INT8 || dtype == INT4 ? 1 : 2;
    constexpr bool whole = dtype == INT8 || dtype == INT4;
    // Of 8 weights, as many as leave x in registers.
    constexpr int blocks = vectors == 1 ? 8 : vectors < 4 ? 2 : 1;
    const Matrix& m = p.matrix;
    const std::int64_t groups = whole ? m.groups : 1, bytes = m.stride / groups;
    Streams<rows> streams(m, size, first, step);
    alignas(32) std::uint8_t unpacked[dtype == INT4 ? rows : 1][64 + 32];  // and what is read behind them
    for (std::int64_t row = first; row < first + step; ++row, streams.mask += m.stride) {
        const float* x = p.x + b * 8 * m.stride;
        const std::uint8_t* mask = streams.mask;
        __m256 total[rows][vectors];
        for (auto& those : total)
            for (auto& sum : those) sum = _mm256_setzero_ps();
        for (std::int64_t group = 0; group < groups; ++group) {
            __m256 parts[rows][vectors];
            for (auto& those : parts)
                for (auto& sum : those) sum = _mm256_setzero_ps();
            for (const std::uint8_t* end = mask + bytes; mask != end; mask += 8, x += 64) {
                std::uint64_t bits[rows];
                const std::uint8_t* next[rows];
                for (int r = 0; r < rows; ++r) {
                    bits[r] = streams.template bits<size>(r, mask);
                    next[r] = streams.values[r];
                    if constexpr (dtype == INT4) {
                        unpack_halves(next[r], unpacked[r]);
                        next[r] = unpacked[r];
                        streams.values[r] += (__builtin_popcountll(bits[r]) + 1) / 2;
                    }
                }
#pragma GCC unroll 8
                for (int at = 0; at < 8; at += blocks) {
                    __m256 shared[vectors][blocks];
                    for (int v = 0; v < vectors; ++v)
#pragma GCC unroll 8
                        for (int i = 0; i < blocks; ++i) {
                            shared[v][i] = _mm256_loadu_ps(x + v * 8 * m.stride + 8 * (at + i));
                            asm("" : "+x"(shared[v][i]));  // or it would be loaded again for each row
                        }
#pragma GCC unroll 4
                    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 8
                        for (int i = at; i < at + blocks; ++i) {
                            // 32 times byte i: where a table has its entry, and as many ones.
                            const std::uint64_t place = (i ? bits[r] >> (8 * i - 5) : bits[r] << 5) & 32 * 255;
                            const __m256 weights = expand<whole ? INT8 : dtype>(next[r], place);
#pragma GCC unroll 4
                            for (int v = 0; v < vectors; ++v)
                                parts[r][v] = _mm256_fmadd_ps(weights, shared[v][i - at], parts[r][v]);
                            next[r] += size * __builtin_popcountll(place);
                        }
                    }
                }
                if constexpr (dtype != INT4)
                    for (int r = 0; r < rows; ++r) streams.values[r] = next[r];
            }
            for (int r = 0; r < rows; ++r) {
                constexpr float unit = dtype == INT4 ? 0x1p-28f : 0x1p-24f;
                const float scale = whole ? m.scales[(row + r * step) * groups + group] * unit : 1.0f;
                for (int v = 0; v < vectors; ++v)
                    total[r][v] =
                        !whole ? parts[r][v] : _mm256_fmadd_ps(parts[r][v], _mm256_set1_ps(scale), total[r][v]);
            }
        }
        for (int r = 0; r < rows; ++r)
            for (int v = 0; v < vectors; ++v) p.y[(b + v) * m.rows + row + r * step] = sum_of(total[r][v]);
    }
}

template <int dtype>
void avx2_rows_of(const Product& p, std::int64_t b, int vectors, std::int64_t first, std::int64_t last) {
    with_number(vectors, [&](auto number) {
        constexpr int most = number == 1 ? 4 : number < 4 ? 3 : 2;
        in_streams<most>(first, last, [&](auto rows, std::int64_t from, std::int64_t step) {
            avx2_streams<dtype, number, rows>(p, b, from, step);
        });
    });
}

#endif

#if defined(NIWAKI_X86) || defined(NIWAKI_EMULATE)

#define NIWAKI_AVX512 "avx512f,avx512bw,avx512vl,avx512vbmi2,popcnt"

// Numbers in the places of `ones`, and zeros. From memory some processors take many times as long to expand them; and
// with the form that clears the register by itself they wait until what it had before is there.
TARGET(NIWAKI_AVX512)
inline __m512i expand_words(std::uint32_t ones, __m512i numbers) {
    __m512i clear = _mm512_setzero_si512();
#if defined(NIWAKI_X86)
    asm("" : "+v"(numbers), "+v"(clear));
#endif
    return _mm512_mask_expand_epi16(clear, ones, numbers);
}

TARGET(NIWAKI_AVX512)
inline __m512i expand_bytes(std::uint64_t ones, __m512i numbers) {
    __m512i clear = _mm512_setzero_si512();
#if defined(NIWAKI_X86)
    asm("" : "+v"(numbers), "+v"(clear));
#endif
    return _mm512_mask_expand_epi8(clear, ones, numbers);
}

// `rows` rows, `step` apart, and those behind them, of BF16 only. The vectors are in another order: of 32 numbers first
// those at even places, as they come out of a register of pairs; for `pairs` they are bfloat16, in their own order, and
// so are the products.
template <int vectors, bool pairs, int rows>
TARGET(NIWAKI_AVX512 ",avx512bf16")
void avx512_streams(const Product& p, std::int64_t b, std::int64_t first, std::int64_t step) {
    const Matrix& m = p.matrix;
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    Streams<rows> streams(m, 2, first, step);
    for (std::int64_t row = first; row < first + step; ++row, streams.mask += m.stride) {
        // One for each, because how many there are is to change no result, and four times four fit into registers.
        __m512 sums[rows][vectors];
        for (auto& those : sums)
            for (auto& sum : those) sum = _mm512_setzero_ps();
        for (std::int64_t at = 0; at < m.stride; at += 8) {
            std::uint64_t bits[rows];
            for (int r = 0; r < rows; ++r) bits[r] = streams.template bits<2>(r, streams.mask + at);
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half)
#pragma GCC unroll 4
                for (int r = 0; r < rows; ++r) {
                    const auto ones = static_cast<std::uint32_t>(bits[r] >> 32 * half);
                    const __m512i weights = expand_words(ones, _mm512_loadu_si512(streams.values[r]));
                    streams.values[r] += 2 * __builtin_popcount(ones);
#pragma GCC unroll 4
                    for (int v = 0; v < vectors; ++v) {
                        const std::int64_t place = (b + v) * 8 * m.stride + 8 * at + 32 * half;
                        auto& sum = sums[r][v];
                        if constexpr (pairs) {
                            const __m512i x = _mm512_loadu_si512(p.x_bf16 + place);
                            sum = _mm512_dpbf16_ps(sum, reinterpret_cast<const __m512bh&>(weights),
                                                   reinterpret_cast<const __m512bh&>(x));
                        } else {
                            const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(weights, 16));
                            const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(weights, upper));
                            sum = _mm512_fmadd_ps(even, _mm512_loadu_ps(p.x + place), sum);
                            sum = _mm512_fmadd_ps(odd, _mm512_loadu_ps(p.x + place + 16), sum);
                        }
                    }
                }
        }
        for (int r = 0; r < rows; ++r)
            for (int v = 0; v < vectors; ++v) p.y[(b + v) * m.rows + row + r * step] = _mm512_reduce_add_ps(sums[r][v]);
    }
}

// 64 numbers of 4 bits at a time: as bytes, in the places of the ones, then by two look-ups the halves of each as
// bfloat16. Of 64 numbers the vectors have first those that come out together: 0 to 7, 16 to 23, ... and then the
// others, each half as avx512_streams has its 32.
template <int vectors, bool pairs, int rows>
TARGET(NIWAKI_AVX512 ",avx512bf16")
void avx512_halves(const Product& p, std::int64_t b, std::int64_t first, std::int64_t step) {
    const Matrix& m = p.matrix;
    const std::int64_t bytes = m.stride / m.groups;
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    const __m512i low_halves = _mm512_set1_epi32(0x0f0f0f0f);
    // bfloat16 of 0 to 7 and -8 to -1
    alignas(64) static constexpr std::uint8_t HIGH[16] = {0x00, 0x3f, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40,
                                                          0xc1, 0xc0, 0xc0, 0xc0, 0xc0, 0xc0, 0xc0, 0xbf};
    alignas(64) static constexpr std::uint8_t LOW[16] = {0x00, 0x80, 0x00, 0x40, 0x80, 0xa0, 0xc0, 0xe0,
                                                         0x00, 0xe0, 0xc0, 0xa0, 0x80, 0x40, 0x00, 0x80};
    const __m512i high = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(HIGH)));
    const __m512i low = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(LOW)));
    Streams<rows> streams(m, 1, first, step);
    for (std::int64_t row = first; row < first + step; ++row, streams.mask += m.stride) {
        __m512 total[rows][vectors];
        for (auto& those : total)
            for (auto& sum : those) sum = _mm512_setzero_ps();
        for (std::int64_t group = 0; group < m.groups; ++group) {
            __m512 sums[rows][vectors][2];
            for (auto& those : sums)
                for (auto& sum : those) sum[0] = sum[1] = _mm512_setzero_ps();
            for (std::int64_t at = group * bytes; at < (group + 1) * bytes; at += 8)
#pragma GCC unroll 4
                for (int r = 0; r < rows; ++r) {
                    const std::uint64_t ones = streams.template bits<1>(r, streams.mask + at);
                    const __m512i both =
                        _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(streams.values[r])));
                    const __m512i codes =
                        _mm512_and_si512(_mm512_or_si512(both, _mm512_slli_epi16(both, 4)), low_halves);
                    const __m512i placed = expand_bytes(ones, codes);
                    streams.values[r] += (__builtin_popcountll(ones) + 1) / 2;
                    const __m512i above = _mm512_shuffle_epi8(high, placed), below = _mm512_shuffle_epi8(low, placed);
                    const __m512i weights[2] = {_mm512_unpacklo_epi8(below, above), _mm512_unpackhi_epi8(below, above)};
#pragma GCC unroll 4
                    for (int v = 0; v < vectors; ++v)
#pragma GCC unroll 2
                        for (int half = 0; half < 2; ++half) {
                            const std::int64_t place = (b + v) * 8 * m.stride + 8 * at + 32 * half;
                            auto& sum = sums[r][v];
                            if constexpr (pairs) {
                                const __m512i x = _mm512_loadu_si512(p.x_bf16 + place);
                                sum[half] =
                                    _mm512_dpbf16_ps(sum[half], reinterpret_cast<const __m512bh&>(weights[half]),
                                                     reinterpret_cast<const __m512bh&>(x));
                            } else {
                                const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(weights[half], 16));
                                const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(weights[half], upper));
                                sum[0] = _mm512_fmadd_ps(even, _mm512_loadu_ps(p.x + place), sum[0]);
                                sum[1] = _mm512_fmadd_ps(odd, _mm512_loadu_ps(p.x + place + 16), sum[1]);
                            }
                        }
                }
            for (int r = 0; r < rows; ++r) {
                const __m512 scale = _mm512_set1_ps(m.scales[(row + r * step) * m.groups + group]);
                for (int v = 0; v < vectors; ++v)
                    total[r][v] = _mm512_fmadd_ps(_mm512_add_ps(sums[r][v][0], sums[r][v][1]), scale, total[r][v]);
            }
        }
        for (int r = 0; r < rows; ++r)
            for (int v = 0; v < vectors; ++v)
                p.y[(b + v) * m.rows + row + r * step] = _mm512_reduce_add_ps(total[r][v]);
    }
}

#endif

#if defined(NIWAKI_X86) || defined(NIWAKI_EMULATE)

template <bool pairs, bool halves>
void avx512_rows_of(const Product& p, std::int64_t b, int vectors, std::int64_t first, std::int64_t last) {
    with_number(vectors, [&](auto number) {
        constexpr int most = halves && number > 2 ? 2 : 4;
        in_streams<most>(first, last, [&](auto rows, std::int64_t from, std::int64_t step) {
            if constexpr (halves)
                avx512_halves<number, pairs, rows>(p, b, from, step);
            else
                avx512_streams<number, pairs, rows>(p, b, from, step);
        });
    });
}

#endif

}  // namespace

#if defined(NIWAKI_X86)

// A bit of leaf 7, part 1 of CPUID: of AVX-VNNI and of bfloat16 some compilers have instructions, and no name here.
static bool has_bit(int bit) {
    // Once: on a virtual machine it takes microseconds.
    static const unsigned int bits = [] {
        unsigned int a = 0, b = 0, c = 0, d = 0;
        return __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 ? a : 0;
    }();
    return (bits >> bit & 1) != 0;
}

#endif

static bool has([[maybe_unused]] int path) {
#if defined(NIWAKI_EMULATE)
    return path <= AVX512_BF16;
#elif defined(NIWAKI_X86)
#define THERE(feature) (__builtin_cpu_supports(feature) != 0)
    switch (path) {
        case AVX2:
            return THERE("avx2") && THERE("fma") && THERE("f16c");
#if defined(NIWAKI_AVXVNNI)
        case AVX2_VNNI:
            return has(AVX2) && has_bit(4);
#endif
        case AVX512BW:
            return has(AVX2) && THERE("avx512bw");
        case AVX512:
            return has(AVX512BW) && THERE("avx512vl") && THERE("avx512vbmi2") && THERE("avx512vnni");
        case AVX512_BF16:
            return has(AVX512) && has_bit(5);
    }
#undef THERE
#endif
    return path == PORTABLE;
}

int usable(int path) {
    while (!has(path)) --path;
    return path;
}

Rows rows_of([[maybe_unused]] int path, [[maybe_unused]] const Product& product) {
    if (is_whole(product.matrix)) return whole_rows_of(path, product);
#if defined(NIWAKI_X86) || defined(NIWAKI_EMULATE)
    const int dtype = product.matrix.dtype;
    if (path >= AVX512 && dtype == BF16)
        return product.x_bf16 ? avx512_rows_of<true, false> : avx512_rows_of<false, false>;
    if (path >= AVX512 && dtype == INT4)
        return product.x_bf16 ? avx512_rows_of<true, true> : avx512_rows_of<false, true>;
    if (path >= AVX512BW) return lane_rows_of(dtype);
#endif
#if defined(NIWAKI_X86)
    if (path >= AVX2) switch (product.matrix.dtype) {
            case BF16:
                return avx2_rows_of<BF16>;
            case FP16:
                return avx2_rows_of<FP16>;
            case FP32:
                return avx2_rows_of<FP32>;
            case INT8:
                return avx2_rows_of<INT8>;
            default:
                return avx2_rows_of<INT4>;
        }
#endif
    return portable_rows;
}

// Which number of x comes at place `i`: as it is, or as avx512_halves wants it, of 64 first the lower 8 of each 16.
static std::int64_t source(std::int64_t i, bool halves) {
    return halves ? (i & ~INT64_C(63)) + (i & 24) * 2 + (i & 32) / 4 + (i & 7) : i;
}

Product Operand::with(const Matrix& matrix, float* y) {
    Product product{matrix, x, nullptr, batch, y, nullptr};
    if (is_whole(matrix)) {
        if (rounds && !rounded) rounded.emplace(path, x, batch * width, threads);
        if (rounds && matrix.in_strips && batch < MANY) rounded->split(path);
        if (rounds) product.rounded = &*rounded;
        return product;
    }
    const bool halves = matrix.dtype == INT4;
    if (path < AVX512 || (matrix.dtype != BF16 && !halves)) return product;
    const std::int64_t size = batch * width;
    if (path == AVX512_BF16 && exact) {
        auto& ordered = pairs[halves];
        if (ordered.empty()) {
            ordered.resize(size);
            for (std::int64_t i = 0; i < size; ++i)
                ordered[i] = static_cast<std::uint16_t>(load<std::uint32_t>(x + source(i, halves)) >> 16);
        }
        product.x_bf16 = ordered.data();
    } else {
        auto& ordered = mixed[halves];
        if (ordered.empty()) {
            ordered.resize(size);
            for (std::int64_t at = 0; at < size; at += 32)
                for (int i = 0; i < 32; ++i) ordered[at + i / 2 + i % 2 * 16] = x[source(at + i, halves)];
        }
        product.x = ordered.data();
    }
    return product;
}

// They are those of the OpenMP runtime that torch has loaded: threads
// of two pools, each spinning while it waits, take the cores from each other.
void in_threads(int threads, void (*body)(void*), void* data) {
    static const auto parallel = std::getenv("NIWAKI_NO_OPENMP") ? nullptr : GOMP_parallel;
    if (threads <= 1) {
        body(data);
    } else if (parallel) {
        parallel(body, data, static_cast<unsigned>(threads), 0);
    } else {
        std::vector<std::thread> others;
        try {
            for (int i = 1; i < threads; ++i) others.emplace_back(body, data);
        } catch (const std::system_error&) {  // no more threads: the others do their work
        }
        body(data);
        for (auto& other : others) other.join();
    }
}

namespace {

// Where a row goes on that was expanded up to some column.
template <typename T>
struct Row {
    const std::uint8_t* bits;
    const T* values;
    std::int64_t columns;
    T* out;
    std::int64_t done;
};

#if defined(NIWAKI_X86)

// As many columns as are whole bytes of the mask.
TARGET(NIWAKI_AVX2)
void expand_avx2(Row<std::uint16_t>& row) {
    for (; row.done + 8 <= row.columns; row.done += 8) {
        const std::uint8_t byte = row.bits[row.done / 8];
        const __m128i order = _mm_load_si128(reinterpret_cast<const __m128i*>(tables.dense[byte]));
        const __m128i source = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row.values));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(row.out + row.done), _mm_shuffle_epi8(source, order));
        row.values += __builtin_popcount(byte);
    }
}

#endif

#if defined(NIWAKI_X86) || defined(NIWAKI_EMULATE)

// As many columns as are whole registers.
TARGET(NIWAKI_AVX512)
void expand_avx512(Row<std::uint16_t>& row) {
    for (; row.done + 32 <= row.columns; row.done += 32) {
        const auto ones = load<std::uint32_t>(row.bits + row.done / 8);
        _mm512_storeu_si512(row.out + row.done, expand_words(ones, _mm512_loadu_si512(row.values)));
        row.values += __builtin_popcount(ones);
    }
}

#endif

template <typename T>
void expand_row([[maybe_unused]] int path, Row<T> row) {
    if constexpr (sizeof(T) == 2) {
#if defined(NIWAKI_X86) || defined(NIWAKI_EMULATE)
        if (path >= AVX512) expand_avx512(row);
#endif
#if defined(NIWAKI_X86)
        if (path >= AVX2) expand_avx2(row);
#endif
    }
    for (; row.done < row.columns; ++row.done)
        row.out[row.done] = row.bits[row.done / 8] >> row.done % 8 & 1 ? *row.values++ : T{};
}

#if defined(NIWAKI_X86)

// 64 numbers, where `ones` says, times a scale.
TARGET(NIWAKI_AVX2)
void scaled_avx2(bool halves, const std::uint8_t* values, std::uint64_t ones, float scale, float* out) {
    alignas(32) std::uint8_t unpacked[64 + 8];  // and what is read behind them
    if (halves) {
        unpack_halves(values, unpacked);
        values = unpacked;
    }
    // Not as one factor: with it a small scale would lose digits.
    const __m256 unit = _mm256_set1_ps(halves ? 0x1p-28f : 0x1p-24f), factor = _mm256_set1_ps(scale);
    for (int i = 0; i < 8; ++i) {
        const std::uint64_t place = 32 * (ones >> 8 * i & 255);
        const __m256 numbers = _mm256_mul_ps(expand<INT8>(values, place), unit);
        _mm256_storeu_ps(out + 8 * i, _mm256_mul_ps(numbers, factor));
        values += __builtin_popcountll(place);
    }
}

#endif

// A row of whole numbers times their scales.
void expand_scaled([[maybe_unused]] int path, const Matrix& m, std::int64_t row, std::int64_t columns, float* out) {
    const bool halves = m.dtype == INT4;
    const std::uint8_t* values = static_cast<const std::uint8_t*>(m.values) + m.starts[row];
    const std::int64_t words = m.stride / 8, each = words / m.groups;
    for (std::int64_t word = 0; word < words; ++word) {
        const auto ones = load<std::uint64_t>(m.mask + row * m.stride + 8 * word);
        const float scale = m.scales[row * m.groups + word / each];
        const std::int64_t count = std::min<std::int64_t>(64, columns - 64 * word);
        float line[64];
#if defined(NIWAKI_X86)
        if (path >= AVX2)
            scaled_avx2(halves, values, ones, scale, line);
        else
#endif
        {
            Matrix rest = m;
            rest.values = values;
            for (int column = 0, at = 0; column < 64; ++column)
                line[column] = (ones >> column & 1 ? value(rest, at++) : 0.0f) * scale;
        }
        std::memcpy(out + 64 * word, line, count * sizeof(float));
        const int ahead = __builtin_popcountll(ones);
        values += halves ? (ahead + 1) / 2 : ahead;
    }
}

}  // namespace

std::atomic<bool> counted{false};
std::atomic<std::int64_t> nanoseconds{0};

void multiply(int path, Operand& operand, const Matrix& matrix, std::int64_t batch, float* y, int threads) {
    const Product p = operand.with(matrix, y);
    const std::int64_t rows = matrix.rows;
    if (const Panels panels = panels_of(path, p)) {
        for_rows(rows, PANELS, threads, [&](std::int64_t first, std::int64_t last) {
            const InProduct in_product;
            panels(p, first, last);
        });
        return;
    }
    const Rows function = rows_of(path, p);
    // Many rows at a time, so that they are read on for long; few, where they are to stay in the cache for more
    // vectors.
    const std::int64_t each =
        batch > VECTORS ? 48 : whole_strips(std::max<std::int64_t>(48, rows / (8 * std::max(threads, 1))));
    for_rows(rows, each, threads, [&](std::int64_t first, std::int64_t last) {
        const InProduct in_product;
        for (std::int64_t b = 0; b < batch; b += VECTORS)
            function(p, b, static_cast<int>(std::min<std::int64_t>(VECTORS, batch - b)), first, last);
    });
}

}  // namespace niwaki

using namespace niwaki;

extern "C" {

// The best path of this machine that is not above `path`.
int niwaki_best_path(int path) {
    return usable(path);
}

// Nanoseconds that threads have spent in products since this was called last, if they were counted; and whether to
// count them from now on.
std::int64_t niwaki_time_in_products(int counts) {
    counted = counts != 0;
    return nanoseconds.exchange(0);
}

// y = x W^T, where x is (batch, 8 stride) with zeros behind the last column and y is (batch, rows). `exact`: every x is
// a bfloat16. `rounds`: for a matrix without a mask x may be rounded to whole numbers, 64 at a time.
void niwaki_multiply(int path, const Matrix* matrix, const float* x, int exact, int rounds, std::int64_t batch,
                     float* y, int threads) {
    path = usable(path);
    Operand operand(path, x, batch, 8 * matrix->stride, exact, rounds, threads);
    multiply(path, operand, *matrix, batch, y, threads);
}

// Some `rows`, or if these are null those from `first` on, as they were, (count, columns) numbers; whole ones times
// their scales, as float32.
void niwaki_expand(int path, const Matrix* matrix, std::int64_t columns, const std::int64_t* rows, std::int64_t first,
                   std::int64_t count, void* out, int threads) {
    path = usable(path);
    for_rows(count, 16, threads, [&](std::int64_t from, std::int64_t to) {
        for (std::int64_t i = from; i < to; ++i) {
            const std::int64_t row = rows ? rows[i] : first + i;
            const auto as_they_are = [&](auto number) {
                using T = decltype(number);
                const T* values = static_cast<const T*>(matrix->values) + matrix->starts[row];
                const std::uint8_t* bits = matrix->mask + row * matrix->stride;
                expand_row(path, Row<T>{bits, values, columns, static_cast<T*>(out) + i * columns, 0});
            };
            if (is_whole(*matrix))
                expand_whole(path, *matrix, row, columns, static_cast<float*>(out) + i * columns);
            else if (scaled(*matrix))
                expand_scaled(path, *matrix, row, columns, static_cast<float*>(out) + i * columns);
            else if (matrix->dtype == FP32)
                as_they_are(std::uint32_t{});
            else
                as_they_are(std::uint16_t{});
        }
    });
}

}  // extern "C"
