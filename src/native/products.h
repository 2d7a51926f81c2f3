// What the files of the native library share: packed matrices, products with some of their rows, threads.

#ifndef NIWAKI_PRODUCTS_H
#define NIWAKI_PRODUCTS_H

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#if defined(NIWAKI_EMULATE)
#define TARGET(features)
#elif defined(__x86_64__)
#define NIWAKI_X86
#define TARGET(features) __attribute__((target(features)))
#endif

#define NIWAKI_AVX2 "avx2,fma,f16c,popcnt"
// Which older compilers do not know.
#if defined(NIWAKI_X86) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#define NIWAKI_AVXVNNI NIWAKI_AVX2 ",avxvnni"
#endif

// Loops are written so that compilers make vectors of them, with the instructions of the function that they are part
// of.
#define PART_OF_CALLER inline __attribute__((always_inline))

namespace niwaki {

enum Dtype : int { BF16 = 0, FP16 = 1, FP32 = 2, INT8 = 3, INT4 = 4, INT5 = 5, INT6 = 6, INT2 = 7, INT3 = 8 };
// Each has what those before it have; AVX2_VNNI alone has AVX-VNNI, which few processors with AVX-512 have.
enum Path : int { PORTABLE = 0, AVX2 = 1, AVX2_VNNI = 2, AVX512BW = 3, AVX512 = 4, AVX512_BF16 = 5 };

// Where values begin, and where the next ones: of INT4 two share a byte, the first of which is the lower half, and
// those of a word of the mask begin with one; `starts` counts bytes then. Without a mask all whole numbers are there
// (words.h), and no `starts`; other numbers of fewer bits than 8 are never with one.
struct Matrix {
    int dtype;
    std::int64_t rows, stride;
    const std::uint8_t* mask;  // may be null
    const void* values;
    const std::int64_t* starts;
    const float* scales;  // (rows, groups), of whole numbers
    std::int64_t groups;
    std::int64_t in_strips;  // rows, of whole numbers without a mask (words.h): a multiple of STRIP, or 0
};

inline bool is_whole(const Matrix& matrix) {
    return !matrix.mask && matrix.scales;
}

// Vectors as whole numbers: of each 64 in a row, from -32639 to 32639 and what to multiply them with. What is infinite
// or no number makes that no number.
struct Rounded {
    Rounded(int path, const float* x, std::int64_t count, int threads);
    // What products of few of them with strips want, too.
    void split(int path);
    std::vector<std::int16_t> numbers;
    std::vector<float> units;
    std::vector<std::int8_t> bytes;  // of each 64 the upper ones, rounded, and behind them what these lack
    std::vector<std::int32_t> sums;  // of each 64
};

struct Product {
    Matrix matrix;
    const float* x;  // (batch, 8 stride), with zeros behind the last column
    const std::uint16_t* x_bf16;
    std::int64_t batch;
    float* y;                // (batch, rows)
    const Rounded* rounded;  // instead of x, where products are to be those of whole numbers; or null
};

// Computes `vectors` columns of y from `b` on, at most VECTORS, in rows `first` to `last`.
using Rows = void (*)(const Product&, std::int64_t b, int vectors, std::int64_t first, std::int64_t last);

// Rows that a thread takes at a time for many vectors, in panels of 16 or 32.
constexpr std::int64_t PANELS = 32;
// Up to so many vectors share the work of decoding.
constexpr int VECTORS = 4;
// From so many vectors on panels of rows are unpacked for all; for fewer that would be more work than products.
constexpr std::int64_t MANY = 8;
// Rows side by side, in the lanes of a register.
constexpr std::int64_t STRIP = 16;
constexpr std::int64_t whole_strips(std::int64_t rows) {
    return (rows + STRIP - 1) / STRIP * STRIP;
}

// Vectors in the order in which the products of a path want them.
class Operand {
  public:
    // Of x (batch, width); `exact`: every number is a bfloat16; `rounds`: may be rounded to whole numbers for matrices
    // without a mask, by so many `threads`. x has to stay where it is.
    Operand(int path, const float* x, std::int64_t batch, std::int64_t width, bool exact, bool rounds, int threads = 1)
        : path(path), x(x), batch(batch), width(width), exact(exact), rounds(rounds), threads(threads) {}
    // The product of `matrix`, whose rows have `width` columns, with them.
    Product with(const Matrix& matrix, float* y);

  private:
    int path;
    const float* x;
    std::int64_t batch, width;
    bool exact, rounds;
    int threads;
    std::vector<float> mixed[2];  // in the order of BF16, and of INT4
    std::vector<std::uint16_t> pairs[2];
    std::optional<Rounded> rounded;
};

// The best path of this machine that is not above `path`.
int usable(int path);
// The function for products of a path.
Rows rows_of(int path, const Product& product);
// The one of lanes.cpp for a dtype.
Rows lane_rows_of(int dtype);
// Computes rows `first` to `last` of y for all vectors.
using Panels = void (*)(const Product&, std::int64_t first, std::int64_t last);
// The function of panels.cpp for a path; null where other products are as fast, or there is none.
Panels panels_of(int path, const Product& product);
// The one of whole.cpp, for a matrix without a mask; of strips.cpp, for one in strips; and of the rows behind these.
Rows whole_rows_of(int path, const Product& product);
Rows strip_rows_of(int path, int dtype);
void rows_behind_strips(const Product&, std::int64_t b, int vectors, std::int64_t first, std::int64_t last);
// A row of such a matrix as float32.
void expand_whole(int path, const Matrix& matrix, std::int64_t row, std::int64_t columns, float* out);
// Product of `matrix` with all vectors of an operand, of which there are `batch`, into y (batch, rows).
void multiply(int path, Operand& operand, const Matrix& matrix, std::int64_t batch, float* y, int threads);
// Calls `body(data)` in up to `threads` threads at once.
void in_threads(int threads, void (*body)(void*), void* data);

// How long all threads together have been in products, counted while somebody wants to know it.
extern std::atomic<bool> counted;
extern std::atomic<std::int64_t> nanoseconds;

// Is there while a thread is in a product.
class InProduct {
  public:
    InProduct() : counts(counted.load(std::memory_order_relaxed)) {
        if (counts) began = Clock::now();
    }
    ~InProduct() {
        if (counts) nanoseconds += std::chrono::nanoseconds(Clock::now() - began).count();
    }

  private:
    using Clock = std::chrono::steady_clock;
    const bool counts;
    Clock::time_point began;
};

// Work on rows, some at a time, by whichever thread is free.
template <typename Function>
void for_rows(std::int64_t rows, std::int64_t each, int threads, Function&& function) {
    struct Work {
        std::int64_t rows, each;
        Function& function;
        std::atomic<std::int64_t> next{0};
    } work{rows, each, function};
    in_threads(
        static_cast<int>(std::min<std::int64_t>(threads, (rows + each - 1) / each)),
        [](void* data) {
            auto& mine = *static_cast<Work*>(data);
            for (std::int64_t at; (at = mine.next.fetch_add(mine.each)) < mine.rows;)
                mine.function(at, std::min(at + mine.each, mine.rows));
        },
        &work);
}

template <typename T>
inline T load(const void* place) {
    T value;
    std::memcpy(&value, place, sizeof value);
    return value;
}

inline float from_bits(std::uint32_t bits) {
    return load<float>(&bits);
}

}  // namespace niwaki

#endif
