// One token through a decoder block with packed matrices: norm, queries, keys and values, rotary positions, attention
// to the cache, and a gated MLP, in two calls; between them the caller puts keys and values into its cache. Or through
// all blocks in one call. And its product with a dense matrix, the head. The tokens of a prompt go through a block in
// two calls likewise, with attention between them, which is torch's.
//
// A token's products take less time than the hundreds of calls around them if each is one of its own. What would be
// rounded to bfloat16 between torch's operations is rounded here too, so that results agree with theirs to the last
// digits that bfloat16 has. Sums are float32.

#include "products.h"
#include "streams.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <thread>

namespace niwaki {
namespace {

// Of numbers that are as activations are, where there is a choice.
struct Linear {
    Matrix weight;
    const void* bias;    // may be null
    Matrix right;        // of two factors, whose left one is `weight` then
    std::int64_t inner;  // its rows; 0: there is none
};

struct Norm {
    const void* weight;  // null: there is none
    float epsilon;
};

}  // namespace

// As niwaki/packed/decoding.py has it.
struct Block {
    int path;
    int half;                                       // activations are bfloat16, or else float32
    int rounds;                                     // as niwaki_multiply has it
    std::int64_t width, heads, pairs, size, inner;  // heads of queries; those of keys and values; their size
    float scaling;                                  // of the products of queries and keys
    Norm before_attention, before_mlp, queries, keys;
    Linear q, k, v, o, gate, up, down;
};

namespace {

PART_OF_CALLER std::uint16_t to_bf16(float value) {
    const auto bits = load<std::uint32_t>(&value);
    const std::uint32_t nearest = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16, no_number = bits >> 16 | 64;
    return static_cast<std::uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? no_number : nearest);
}

PART_OF_CALLER float rounded(float value, bool half) {
    return half ? from_bits(static_cast<std::uint32_t>(to_bf16(value)) << 16) : value;
}

PART_OF_CALLER float number(const float* place) {
    return *place;
}
PART_OF_CALLER float number(const std::uint16_t* place) {
    return from_bits(static_cast<std::uint32_t>(*place) << 16);
}

PART_OF_CALLER float number(const void* values, bool half, std::int64_t i) {
    return half ? number(static_cast<const std::uint16_t*>(values) + i) : static_cast<const float*>(values)[i];
}

void put(void* values, bool half, std::int64_t i, float value) {
    if (half)
        static_cast<std::uint16_t*>(values)[i] = to_bf16(value);
    else
        static_cast<float*>(values)[i] = value;
}

// e^x for x <= 0, to 2 units in the last place: 2^n times a polynomial in the rest, which has no more than 0.35.
PART_OF_CALLER float exponential(float x) {
    x = x > -87.0f ? x : -87.0f;
    const float n = std::floor(x * 1.44269504f + 0.5f);
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float sum = 1.9875691500e-4f;
    sum = sum * r + 1.3981999507e-3f;
    sum = sum * r + 8.3334519073e-3f;
    sum = sum * r + 4.1665795894e-2f;
    sum = sum * r + 1.6666665459e-1f;
    sum = sum * r + 5.0000001201e-1f;
    return (sum * r * r + r + 1.0f) * from_bits(static_cast<std::uint32_t>(static_cast<int>(n) + 127) << 23);
}

#pragma GCC diagnostic ignored "-Wpsabi"  // functions that hand on vectors all become parts of others

// A register's numbers, for sums that are independent of each other: compilers keep the order of floats.
struct Plain {
    typedef float Vector __attribute__((vector_size(16)));
    static constexpr int LANES = 4;
    static PART_OF_CALLER Vector all(float value) { return Vector{value, value, value, value}; }
    template <typename T>
    static PART_OF_CALLER Vector at(const T* place) {
        return Vector{number(place), number(place + 1), number(place + 2), number(place + 3)};
    }
    static PART_OF_CALLER Vector added(Vector a, Vector b, Vector sum) { return sum + a * b; }
    static PART_OF_CALLER float sum(Vector numbers) { return numbers[0] + numbers[1] + (numbers[2] + numbers[3]); }
    static PART_OF_CALLER void put(float* place, Vector numbers) { std::memcpy(place, &numbers, sizeof numbers); }
};

#if defined(NIWAKI_X86)

struct Avx2 {
    using Vector = __m256;
    static constexpr int LANES = 8;
    TARGET(NIWAKI_AVX2) static inline Vector all(float value) { return _mm256_set1_ps(value); }
    TARGET(NIWAKI_AVX2) static inline Vector at(const float* place) { return _mm256_loadu_ps(place); }
    TARGET(NIWAKI_AVX2) static inline Vector at(const std::uint16_t* place) {
        const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(place));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
    }
    TARGET(NIWAKI_AVX2) static inline Vector added(Vector a, Vector b, Vector sum) {
        return _mm256_fmadd_ps(a, b, sum);
    }
    TARGET(NIWAKI_AVX2) static inline float sum(Vector numbers) { return sum_of(numbers); }
    TARGET(NIWAKI_AVX2) static inline void put(float* place, Vector numbers) { _mm256_storeu_ps(place, numbers); }
};

#endif

template <typename V, int count = 2, typename T>
PART_OF_CALLER float dot(const float* a, const T* b, std::int64_t size) {
    typename V::Vector sums[count];
    for (auto& sum : sums) sum = V::all(0);
    std::int64_t i = 0;
    for (; i + count * V::LANES <= size; i += count * V::LANES)
        for (int j = 0; j < count; ++j)
            sums[j] = V::added(V::at(a + i + j * V::LANES), V::at(b + i + j * V::LANES), sums[j]);
    float all = 0;
    for (const auto& sum : sums) all += V::sum(sum);
    for (; i < size; ++i) all += a[i] * number(b + i);
    return all;
}

template <typename V>
PART_OF_CALLER void normalize(const Norm& norm, const float* x, std::int64_t size, bool half, float* out) {
    const float scale = 1.0f / std::sqrt(dot<V>(x, x, size) / static_cast<float>(size) + norm.epsilon);
    for (std::int64_t i = 0; i < size; ++i)
        out[i] = rounded(number(norm.weight, half, i) * rounded(x[i] * scale, half), half);
}

// silu(gate) up, into gate.
template <bool half>
PART_OF_CALLER void gated(float* __restrict gate, const float* __restrict up, std::int64_t size) {
    for (std::int64_t i = 0; i < size; ++i) {
        const float e = exponential(-std::fabs(gate[i]));
        const float share = gate[i] < 0 ? e : 1.0f;
        gate[i] = rounded(rounded(gate[i] * share / (1.0f + e), half) * up[i], half);
    }
}

// The cache of a layer: the first number of each head and position is `head` and `position` numbers behind the one
// before.
struct Cache {
    const void* numbers;
    std::int64_t head, position;
};

struct Attention {
    Cache keys, values;
    const std::uint8_t* mask;  // for each position, whether it is seen; null: all are
    std::int64_t length;
};

// Positions that are attended to at a time: few, so that there is work for all threads.
constexpr std::int64_t POSITIONS = 64;

// What a head of queries finds at some positions: how large the largest product with a key is, what shares with respect
// to that one add up to, and values in these shares.
struct Found {
    float *most, *sum, *values;
    Found(float* place, std::int64_t size, std::int64_t i)
        : most(place + i * (size + 2)), sum(most + 1), values(most + 2) {}
};

// What `count` heads of queries that share keys find at positions `first` to `last`.
template <typename V, typename T, int count>
PART_OF_CALLER void attend(const Attention& a, const float* queries, std::int64_t head, std::int64_t size,
                           float scaling, std::int64_t first, std::int64_t last, float* out) {
    const T* keys = static_cast<const T*>(a.keys.numbers) + head * a.keys.head;
    const T* values = static_cast<const T*>(a.values.numbers) + head * a.values.head;
    constexpr int wide = 2;  // vectors of values at a time
    const std::int64_t whole = size / (wide * V::LANES) * (wide * V::LANES), length = last - first;
    float scores[count][POSITIONS];
    for (std::int64_t t = 0; t < length; ++t) {
        const T* key = keys + (first + t) * a.keys.position;
        const bool seen = !a.mask || a.mask[first + t];
        typename V::Vector sums[count];
        for (auto& sum : sums) sum = V::all(0);
        for (std::int64_t i = 0; i < whole; i += V::LANES) {
            const auto part = V::at(key + i);
            for (int q = 0; q < count; ++q) sums[q] = V::added(V::at(queries + q * size + i), part, sums[q]);
        }
        for (int q = 0; q < count; ++q) {
            float sum = V::sum(sums[q]);
            for (std::int64_t i = whole; i < size; ++i) sum += queries[q * size + i] * number(key + i);
            scores[q][t] = seen ? scaling * sum : -INFINITY;
        }
    }
    for (int q = 0; q < count; ++q) {
        const Found found(out, size, q);
        float most = -INFINITY, sum = 0;
        for (std::int64_t t = 0; t < length; ++t) {
            if (scores[q][t] != scores[q][t]) sum = scores[q][t];  // what is not a number stays so
            most = std::max(most, scores[q][t]);
        }
        if (most == INFINITY) sum = NAN;
        for (std::int64_t t = 0; t < length; ++t)
            scores[q][t] = scores[q][t] == -INFINITY ? 0.0f : exponential(scores[q][t] - most);
        for (std::int64_t t = 0; t < length; ++t) sum += scores[q][t];
        *found.most = most;
        *found.sum = sum;
    }
    for (std::int64_t i = 0; i < whole; i += wide * V::LANES) {
        typename V::Vector sums[count][wide];
        for (auto& head_of : sums)
            for (auto& sum : head_of) sum = V::all(0);
        for (std::int64_t t = 0; t < length; ++t) {
            if (a.mask && !a.mask[first + t]) continue;  // whose value may be no number
            const T* value = values + (first + t) * a.values.position + i;
            for (int w = 0; w < wide; ++w) {
                const auto part = V::at(value + w * V::LANES);
                for (int q = 0; q < count; ++q) sums[q][w] = V::added(V::all(scores[q][t]), part, sums[q][w]);
            }
        }
        for (int q = 0; q < count; ++q)
            for (int w = 0; w < wide; ++w) V::put(Found(out, size, q).values + i + w * V::LANES, sums[q][w]);
    }
    for (std::int64_t i = whole; i < size; ++i)
        for (int q = 0; q < count; ++q) {
            float sum = 0;
            for (std::int64_t t = 0; t < length; ++t)
                if (!a.mask || a.mask[first + t])
                    sum += scores[q][t] * number(values + (first + t) * a.values.position + i);
            Found(out, size, q).values[i] = sum;
        }
}

// As above, with from 1 to VECTORS heads of queries.
template <typename V, typename T, typename... Others>
PART_OF_CALLER void attend(int count, const Others&... others) {
    if (count == 1) return attend<V, T, 1>(others...);
    if (count == 2) return attend<V, T, 2>(others...);
    if (count == 3) return attend<V, T, 3>(others...);
    attend<V, T, VECTORS>(others...);
}

// What a head of queries finds at all positions, from what it has `found` at each `count` of them, `apart` from
// another.
PART_OF_CALLER void join(const float* found, std::int64_t count, std::int64_t apart, std::int64_t size, float* out) {
    float most = -INFINITY, sum = 0;
    for (std::int64_t c = 0; c < count; ++c) most = std::max(most, found[c * apart]);
    std::fill(out, out + size, 0.0f);
    for (std::int64_t c = 0; c < count; ++c) {
        const float* part = found + c * apart;
        if (part[0] == -INFINITY && part[1] == 0) continue;  // nothing is seen there
        const float share = exponential(part[0] - most);     // of no number that of -87
        sum += share * part[1];
        for (std::int64_t i = 0; i < size; ++i) out[i] += share * part[2 + i];
    }
    if (most == -INFINITY && sum == 0) return;  // nothing is seen at all: zeros, as torch has it
    for (std::int64_t i = 0; i < size; ++i) out[i] /= sum;
}

// x and `other`, numbers as activations are or null.
PART_OF_CALLER void added(const float* x, const void* other, std::int64_t size, bool half, float* out) {
    if (other)
        for (std::int64_t i = 0; i < size; ++i) out[i] = rounded(x[i] + number(other, half, i), half);
    else
        for (std::int64_t i = 0; i < size; ++i) out[i] = rounded(x[i], half);
}

// The products of rows `first` to `last` of a dense W (rows, columns) with x.
template <typename V>
PART_OF_CALLER void dense_rows(const std::uint16_t* W, const float* x, std::int64_t columns, std::int64_t first,
                               std::int64_t last, std::uint16_t* y) {
    for (std::int64_t row = first; row < last; ++row) y[row] = to_bf16(dot<V, 4>(x, W + row * columns, columns));
}

// The functions above with the instructions of a path.
struct Parts {
    void (*normalize)(const Norm&, const float* x, std::int64_t size, bool half, float* out);
    void (*gated)(float* gate, const float* up, std::int64_t size, bool half);
    void (*added)(const float* x, const void* other, std::int64_t size, bool half, float* out);
    void (*attend)(const Attention&, const float* queries, int count, std::int64_t head, std::int64_t size,
                   float scaling, bool half, std::int64_t first, std::int64_t last, float* out);
    void (*join)(const float* found, std::int64_t count, std::int64_t apart, std::int64_t size, float* out);
    void (*dense_rows)(const std::uint16_t* W, const float* x, std::int64_t columns, std::int64_t first,
                       std::int64_t last, std::uint16_t* y);
};

#define NIWAKI_PARTS(name, V, target)                                                                               \
    target void name##_normalize(const Norm& norm, const float* x, std::int64_t size, bool half, float* out) {      \
        normalize<V>(norm, x, size, half, out);                                                                     \
    }                                                                                                               \
    target void name##_gated(float* gate, const float* up, std::int64_t size, bool half) {                          \
        if (half)                                                                                                   \
            gated<true>(gate, up, size);                                                                            \
        else                                                                                                        \
            gated<false>(gate, up, size);                                                                           \
    }                                                                                                               \
    target void name##_added(const float* x, const void* other, std::int64_t size, bool half, float* out) {         \
        added(x, other, size, half, out);                                                                           \
    }                                                                                                               \
    target void name##_attend(const Attention& a, const float* queries, int count, std::int64_t head,               \
                              std::int64_t size, float scaling, bool half, std::int64_t first, std::int64_t last,   \
                              float* out) {                                                                         \
        if (half)                                                                                                   \
            attend<V, std::uint16_t>(count, a, queries, head, size, scaling, first, last, out);                     \
        else                                                                                                        \
            attend<V, float>(count, a, queries, head, size, scaling, first, last, out);                             \
    }                                                                                                               \
    target void name##_join(const float* found, std::int64_t count, std::int64_t apart, std::int64_t size,          \
                            float* out) {                                                                           \
        join(found, count, apart, size, out);                                                                       \
    }                                                                                                               \
    target void name##_dense_rows(const std::uint16_t* W, const float* x, std::int64_t columns, std::int64_t first, \
                                  std::int64_t last, std::uint16_t* y) {                                            \
        dense_rows<V>(W, x, columns, first, last, y);                                                               \
    }                                                                                                               \
    constexpr Parts name{name##_normalize, name##_gated, name##_added, name##_attend, name##_join, name##_dense_rows};

NIWAKI_PARTS(portable, Plain, )
#if defined(NIWAKI_X86)
NIWAKI_PARTS(avx2, Avx2, TARGET(NIWAKI_AVX2))
#endif

const Parts& parts_of([[maybe_unused]] int path) {
#if defined(NIWAKI_X86)
    if (path >= AVX2) return avx2;
#endif
    return portable;
}

// A step of which all parts have to be done before the next begins. Threads take parts as they come, so that one that
// wakes late, or never, holds up nobody.
class Step {
  public:
    explicit Step(std::int64_t count) : count(count) {}
    template <typename Function>
    void work(Function&& function) {
        for (std::int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) {
            function(i);
            done.fetch_add(1, std::memory_order_release);
        }
        for (int turn = 0; done.load(std::memory_order_acquire) < count; ++turn) wait(turn);
    }

  private:
    static void wait([[maybe_unused]] int turn) {
#if defined(NIWAKI_X86)
        if (turn % 1024 != 1023) return _mm_pause();
#endif
        std::this_thread::yield();
    }
    const std::int64_t count;
    std::atomic<std::int64_t> next{0}, done{0};
};

// Rows that are computed at a time: enough to be read on for long, and some times as many parts as threads.
struct Tiles {
    std::int64_t rows, each, count;
    Tiles(std::int64_t rows, int threads)
        : rows(rows),
          each(whole_strips(std::max<std::int64_t>(48, rows / (4 * std::max(threads, 1))))),
          count((rows + each - 1) / each) {}
    std::int64_t first(std::int64_t i) const { return i * each; }
    std::int64_t last(std::int64_t i) const { return std::min(rows, (i + 1) * each); }
};

// Columns with the zeros behind them that products read.
std::int64_t padded(std::int64_t size) {
    return (size + 63) / 64 * 64;
}

// A vector, which has to stay where it is, with zeros behind its `size`.
Operand operand_of(const Block& b, const float* x, std::int64_t size) {
    return Operand(b.path, x, 1, padded(size), b.half, b.rounds);
}

void rows_of_product(const Block& b, const Product& product, std::int64_t first, std::int64_t last) {
    const InProduct in_product;
    rows_of(b.path, product)(product, 0, 1, first, last);
}

// Rows `first` to `last` of a layer for one vector, into `out`, which has all of them.
void rows_of_layer(const Block& b, const Linear& layer, Operand& operand, std::int64_t first, std::int64_t last,
                   float* out) {
    rows_of_product(b, operand.with(layer.weight, out), first, last);
    for (std::int64_t row = first; row < last; ++row)
        out[row] = rounded(out[row] + (layer.bias ? number(layer.bias, b.half, row) : 0.0f), b.half);
}

// Of a layer with two factors: what the right one makes of a vector, for the left one to read.
class Middle {
  public:
    const Tiles tiles;  // of the right factor's rows; none where there is no such factor
    Middle(const Linear& layer, int threads)
        : tiles(layer.inner, threads), layer(layer), numbers(padded(layer.inner)) {}
    void part(const Block& b, Operand& x, std::int64_t i) {
        rows_of_product(b, x.with(layer.right, numbers.data()), tiles.first(i), tiles.last(i));
        for (std::int64_t row = tiles.first(i); row < tiles.last(i); ++row)
            numbers[row] = rounded(numbers[row], b.half);
    }
    // What the layer's weight is multiplied with: `x` if that is not a left factor; each thread has its `own` else.
    Operand& operand(const Block& b, Operand& x, std::vector<Operand>& own) {
        if (!layer.inner) return x;
        if (own.empty()) own.push_back(operand_of(b, numbers.data(), layer.inner));
        return own[0];
    }

  private:
    const Linear& layer;
    std::vector<float> numbers;
};

// Turns the first `rotary` numbers of a head by its position's angles: each of the first half with one of the second.
void rotate(float* head, const void* cosines, const void* sines, std::int64_t rotary, bool half) {
    const std::int64_t middle = rotary / 2;
    for (std::int64_t i = 0; i < middle; ++i) {
        const float x = head[i], y = head[i + middle];
        head[i] = rounded(x * number(cosines, half, i) - y * number(sines, half, i), half);
        head[i + middle] = rounded(y * number(cosines, half, i + middle) + x * number(sines, half, i + middle), half);
    }
}

template <typename Function>
void in_each_thread(int threads, Function&& function) {
    in_threads(threads, [](void* data) { (*static_cast<Function*>(data))(); }, &function);
}

// Where each head's numbers of one position are to be written.
struct Place {
    void* numbers;
    std::int64_t head;  // numbers from one head to the next
};

// The first half of a block: queries, keys and values of a token. All threads of a team work at it together.
class Projections {
  public:
    Projections(const Block& block, int threads)
        : b(block),
          all(b.heads + 2 * b.pairs),
          each(std::max<std::int64_t>(1, all / (4 * std::max(threads, 1)))),
          found(all * b.size),
          middles{{b.q, threads}, {b.k, threads}, {b.v, threads}},
          rights(middles[0].tiles.count + middles[1].tiles.count + middles[2].tiles.count),
          heads((all + each - 1) / each) {}

    void work(const void* x, const void* cosines, const void* sines, std::int64_t rotary, Place queries, Place keys,
              Place values) {
        const Parts& parts = parts_of(b.path);
        std::vector<float> state, normal;
        std::vector<Operand> operand, own[3];
        const auto normalized = [&]() -> Operand& {
            if (operand.empty()) {
                state.resize(b.width);
                normal.resize(padded(b.width));
                for (std::int64_t i = 0; i < b.width; ++i) state[i] = number(x, b.half, i);
                parts.normalize(b.before_attention, state.data(), b.width, b.half, normal.data());
                operand.push_back(operand_of(b, normal.data(), b.width));
            }
            return operand[0];
        };
        rights.work([&](std::int64_t i) {
            Middle* middle = middles;
            for (; i >= middle->tiles.count; ++middle) i -= middle->tiles.count;
            middle->part(b, normalized(), i);
        });
        heads.work([&](std::int64_t part) {
            for (std::int64_t head = part * each; head < std::min(all, (part + 1) * each); ++head) {
                const bool query = head < b.heads, key = !query && head < b.heads + b.pairs;
                const Linear& layer = query ? b.q : key ? b.k : b.v;
                const int kind = query ? 0 : key ? 1 : 2;
                Operand& seen = middles[kind].operand(b, normalized(), own[kind]);
                const Norm& norm = query ? b.queries : b.keys;
                const std::int64_t before = query ? 0 : key ? b.heads : b.heads + b.pairs;
                const std::int64_t row = (head - before) * b.size;
                rows_of_layer(b, layer, seen, row, row + b.size, found.data() + before * b.size);
                float* numbers = found.data() + head * b.size;
                if (query || key) {
                    if (norm.weight) parts.normalize(norm, numbers, b.size, b.half, numbers);
                    rotate(numbers, cosines, sines, rotary, b.half);
                }
                const Place& out = query ? queries : key ? keys : values;
                for (std::int64_t i = 0; i < b.size; ++i)
                    put(out.numbers, b.half, (head - before) * out.head + i, numbers[i]);
            }
        });
    }

  private:
    const Block& b;
    const std::int64_t all, each;  // a part is some heads, as many as are worth a thread's while
    std::vector<float> found;
    Middle middles[3];
    Step rights, heads;
};

// The second half of a block: attention to the cache, and the MLP.
class Rest {
  public:
    Rest(const Block& block, std::int64_t length, int threads)
        : b(block),
          seen(b.heads * b.size),
          shared(b.heads / b.pairs),
          chunks((length + POSITIONS - 1) / POSITIONS),
          parts_found(b.heads * chunks * (b.size + 2)),
          left(b.pairs),
          found(padded(seen)),
          projected(b.width),
          state(b.width),
          gate(padded(b.inner)),
          up(b.inner),
          last(b.width),
          narrow(b.width, threads),
          wide(b.inner, threads),
          to_output(b.o, threads),
          to_gate(b.gate, threads),
          to_up(b.up, threads),
          to_down(b.down, threads),
          heads(b.pairs * chunks),
          output_rights(to_output.tiles.count),
          outputs(narrow.count),
          gate_rights(to_gate.tiles.count + to_up.tiles.count),
          gates(wide.count),
          down_rights(to_down.tiles.count),
          downs(narrow.count) {
        for (auto& each : left) each.store(chunks, std::memory_order_relaxed);
    }

    void work(const void* x, const void* queries, const Attention& attention, void* out) {
        const Parts& parts = parts_of(b.path);
        std::vector<float> query, normal;
        std::vector<Operand> of_output, of_gate, of_up, of_down, operand;
        heads.work([&](std::int64_t part) {
            const std::int64_t pair = part / chunks, chunk = part % chunks, first = pair * shared * b.size;
            query.resize(shared * b.size);
            for (std::int64_t i = 0; i < shared * b.size; ++i) query[i] = number(queries, b.half, first + i);
            for (std::int64_t q = 0; q < shared; q += VECTORS)
                parts.attend(attention, query.data() + q * b.size, std::min<std::int64_t>(VECTORS, shared - q), pair,
                             b.size, b.scaling, b.half, chunk * POSITIONS,
                             std::min((chunk + 1) * POSITIONS, attention.length), found_at(chunk, pair * shared + q));
            // Who finds the last part of a pair's heads has all of them.
            if (left[pair].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
            for (std::int64_t head = pair * shared; head < (pair + 1) * shared; ++head) {
                float* place = found.data() + head * b.size;
                parts.join(found_at(0, head), chunks, found_at(1, 0) - found_at(0, 0), b.size, place);
                for (std::int64_t i = 0; i < b.size; ++i) place[i] = rounded(place[i], b.half);
            }
        });
        Operand attended = operand_of(b, found.data(), seen);
        output_rights.work([&](std::int64_t i) { to_output.part(b, attended, i); });
        outputs.work([&](std::int64_t i) {
            Operand& operand = to_output.operand(b, attended, of_output);
            rows_of_layer(b, b.o, operand, narrow.first(i), narrow.last(i), projected.data());
            for (std::int64_t row = narrow.first(i); row < narrow.last(i); ++row)
                state[row] = rounded(number(x, b.half, row) + projected[row], b.half);
        });
        const auto normalized = [&]() -> Operand& {
            if (operand.empty()) {
                normal.resize(padded(b.width));
                parts.normalize(b.before_mlp, state.data(), b.width, b.half, normal.data());
                operand.push_back(operand_of(b, normal.data(), b.width));
            }
            return operand[0];
        };
        gate_rights.work([&](std::int64_t i) {
            const std::int64_t count = to_gate.tiles.count;
            i < count ? to_gate.part(b, normalized(), i) : to_up.part(b, normalized(), i - count);
        });
        gates.work([&](std::int64_t i) {
            Operand& for_gate = to_gate.operand(b, normalized(), of_gate);
            Operand& for_up = to_up.operand(b, normalized(), of_up);
            rows_of_layer(b, b.gate, for_gate, wide.first(i), wide.last(i), gate.data());
            rows_of_layer(b, b.up, for_up, wide.first(i), wide.last(i), up.data());
            parts.gated(gate.data() + wide.first(i), up.data() + wide.first(i), wide.last(i) - wide.first(i), b.half);
        });
        Operand inner = operand_of(b, gate.data(), b.inner);
        down_rights.work([&](std::int64_t i) { to_down.part(b, inner, i); });
        downs.work([&](std::int64_t i) {
            rows_of_layer(b, b.down, to_down.operand(b, inner, of_down), narrow.first(i), narrow.last(i), last.data());
            for (std::int64_t row = narrow.first(i); row < narrow.last(i); ++row)
                put(out, b.half, row, state[row] + last[row]);
        });
    }

  private:
    // What a head finds at a chunk of positions.
    float* found_at(std::int64_t chunk, std::int64_t head) {
        return parts_found.data() + (chunk * b.heads + head) * (b.size + 2);
    }
    const Block& b;
    const std::int64_t seen, shared, chunks;  // numbers of all heads; heads that share keys; POSITIONS at a time
    std::vector<float> parts_found;
    std::vector<std::atomic<std::int64_t>> left;  // chunks of each pair that are not found yet
    std::vector<float> found, projected, state, gate, up, last;
    const Tiles narrow, wide;
    Middle to_output, to_gate, to_up, to_down;
    Step heads, output_rights, outputs, gate_rights, gates, down_rights, downs;
};

// A block among others, with what it hands to the next. Each has its own: a thread that wakes late still reads them.
struct Link {
    Projections projections;
    Rest rest;
    std::vector<float> queries, out;  // numbers as activations are, for which there is more room than they need
    Link(const Block& b, std::int64_t length, int threads)
        : projections(b, threads), rest(b, length, threads), queries(b.heads * b.size), out(b.width) {}
};

// Many tokens at once, as of a prompt: a step after the other, each for all tokens and by all threads.

// Vectors of `size` numbers, as activations are, with the zeros behind each that products read.
struct Vectors {
    std::int64_t stride;
    std::vector<float> numbers;
    Vectors(std::int64_t count, std::int64_t size) : stride(padded(size)), numbers(count * stride) {}
    float* at(std::int64_t i) { return numbers.data() + i * stride; }
};

class Tokens {
  public:
    const std::int64_t count;
    Tokens(const Block& b, std::int64_t count, int threads)
        : count(count), b(b), parts(parts_of(b.path)), threads(threads) {}
    template <typename Function>
    void each(Function&& function) const {
        for_rows(count, 1, threads, [&](std::int64_t first, std::int64_t last) {
            for (std::int64_t i = first; i < last; ++i) function(i);
        });
    }
    // Token i's vector of `values` (count, size), behind which more may be added.
    const void* at(const void* values, std::int64_t i, std::int64_t size) const {
        return static_cast<const char*>(values) + i * size * (b.half ? 2 : 4);
    }
    Operand operand(Vectors& x) const {
        return Operand(b.path, x.numbers.data(), count, x.stride, b.half, b.rounds, threads);
    }
    // What a layer makes of them.
    Vectors product(const Linear& layer, Operand& x) const {
        if (!layer.inner) return product(layer.weight, layer.bias, x);
        Vectors middle = product(layer.right, nullptr, x);
        Operand between = operand(middle);
        return product(layer.weight, layer.bias, between);
    }

  private:
    Vectors product(const Matrix& matrix, const void* bias, Operand& x) const {
        std::vector<float> found(count * matrix.rows);
        multiply(b.path, x, matrix, count, found.data(), threads);
        Vectors out(count, matrix.rows);
        each(
            [&](std::int64_t i) { parts.added(found.data() + i * matrix.rows, bias, matrix.rows, b.half, out.at(i)); });
        return out;
    }
    const Block& b;
    const Parts& parts;
    const int threads;
};

}  // namespace

// As niwaki/packed/block.py has it: the caches of all blocks, which have the same shape and room for more positions.
struct Caches {
    void* const* keys;  // of each block
    void* const* values;
    std::int64_t head, position;  // numbers from one to the next
    std::int64_t length;          // positions, of which the last is the token's
};

}  // namespace niwaki

using namespace niwaki;

extern "C" {

// Queries, keys and values (heads, size) of the token whose state is `x` (width), at the position of these angles.
void niwaki_block_begin(const Block* block, const void* x, const void* cosines, const void* sines, std::int64_t rotary,
                        void* queries, void* keys, void* values, int threads) {
    Projections projections(*block, threads);
    const std::int64_t size = block->size;
    in_each_thread(threads,
                   [&] { projections.work(x, cosines, sines, rotary, {queries, size}, {keys, size}, {values, size}); });
}

// The state of the token behind the block, from the one before and its queries; keys and values are those of all
// positions up to its own.
void niwaki_block_end(const Block* block, const void* x, const void* queries, const Attention* attention, void* out,
                      int threads) {
    Rest rest(*block, attention->length, threads);
    in_each_thread(threads, [&] { rest.work(x, queries, *attention, out); });
}

// As niwaki_block_begin for `count` tokens, with x (count, width), angles (count, rotary), and queries, keys and values
// (heads, count, size).
void niwaki_tokens_begin(const Block* block, std::int64_t count, const void* x, const void* cosines, const void* sines,
                         std::int64_t rotary, void* queries, void* keys, void* values, int threads) {
    const Block& b = *block;
    const Tokens tokens(b, count, threads);
    const Parts& parts = parts_of(b.path);
    Vectors normal(count, b.width);
    tokens.each([&](std::int64_t i) {
        float* place = normal.at(i);
        for (std::int64_t j = 0; j < b.width; ++j) place[j] = number(x, b.half, i * b.width + j);
        parts.normalize(b.before_attention, place, b.width, b.half, place);
    });
    Operand operand = tokens.operand(normal);
    const auto projected = [&](const Linear& layer, const Norm* norm, std::int64_t heads, void* out) {
        Vectors found = tokens.product(layer, operand);
        tokens.each([&](std::int64_t i) {
            for (std::int64_t head = 0; head < heads; ++head) {
                float* numbers = found.at(i) + head * b.size;
                if (norm && norm->weight) parts.normalize(*norm, numbers, b.size, b.half, numbers);
                if (norm) rotate(numbers, tokens.at(cosines, i, rotary), tokens.at(sines, i, rotary), rotary, b.half);
                for (std::int64_t j = 0; j < b.size; ++j) put(out, b.half, (head * count + i) * b.size + j, numbers[j]);
            }
        });
    };
    projected(b.q, &b.queries, b.heads, queries);
    projected(b.k, &b.keys, b.pairs, keys);
    projected(b.v, nullptr, b.pairs, values);
}

// The states `out` of tokens behind the block, from those before and what attention has `found` (count, heads * size).
void niwaki_tokens_end(const Block* block, std::int64_t count, const void* x, const void* found, void* out,
                       int threads) {
    const Block& b = *block;
    const Tokens tokens(b, count, threads);
    const Parts& parts = parts_of(b.path);
    const std::int64_t seen = b.heads * b.size;
    Vectors attended(count, seen), normal(count, b.width);
    tokens.each([&](std::int64_t i) {
        for (std::int64_t j = 0; j < seen; ++j) attended.at(i)[j] = number(found, b.half, i * seen + j);
    });
    Operand of_attention = tokens.operand(attended);
    Vectors state = tokens.product(b.o, of_attention);
    tokens.each([&](std::int64_t i) {
        parts.added(state.at(i), tokens.at(x, i, b.width), b.width, b.half, state.at(i));
        parts.normalize(b.before_mlp, state.at(i), b.width, b.half, normal.at(i));
    });
    Operand operand = tokens.operand(normal);
    Vectors gate = tokens.product(b.gate, operand), up = tokens.product(b.up, operand);
    tokens.each([&](std::int64_t i) { parts.gated(gate.at(i), up.at(i), b.inner, b.half); });
    Operand inner = tokens.operand(gate);
    Vectors last = tokens.product(b.down, inner);
    tokens.each([&](std::int64_t i) {
        for (std::int64_t j = 0; j < b.width; ++j) put(out, b.half, i * b.width + j, state.at(i)[j] + last.at(i)[j]);
    });
}

// The state `out` of a token behind `count` blocks of the same shape, from `x` before them. Its keys and values are
// written into the caches, of which it sees all positions.
void niwaki_blocks(const Block* blocks, std::int64_t count, const void* x, const void* cosines, const void* sines,
                   std::int64_t rotary, const Caches* caches, void* out, int threads) {
    std::deque<Link> links;
    for (std::int64_t i = 0; i < count; ++i) links.emplace_back(blocks[i], caches->length, threads);
    const std::int64_t bytes = blocks[0].half ? 2 : 4, last = (caches->length - 1) * caches->position;
    const auto at = [&](void* numbers, std::int64_t i) { return static_cast<char*>(numbers) + i * bytes; };
    in_each_thread(threads, [&] {
        const void* state = x;
        for (std::int64_t i = 0; i < count; ++i) {
            Link& link = links[i];
            void *keys = caches->keys[i], *values = caches->values[i];
            void *queries = link.queries.data(), *next = i + 1 < count ? link.out.data() : out;
            link.projections.work(state, cosines, sines, rotary, {queries, blocks[i].size},
                                  {at(keys, last), caches->head}, {at(values, last), caches->head});
            const Attention attention{{keys, caches->head, caches->position},
                                      {values, caches->head, caches->position},
                                      nullptr,
                                      caches->length};
            link.rest.work(state, queries, attention, next);
            state = next;
        }
    });
}

// y = W x in bfloat16, all of them, with W (rows, columns) dense; added up in float32.
void niwaki_dense(int path, const std::uint16_t* W, std::int64_t rows, std::int64_t columns, const std::uint16_t* x,
                  std::uint16_t* y, int threads) {
    const Parts& parts = parts_of(path);
    const Tiles tiles(rows, 4 * threads);
    std::vector<float> wide(columns);
    for (std::int64_t i = 0; i < columns; ++i) wide[i] = number(x + i);
    Step step(tiles.count);
    in_each_thread(threads, [&] {
        step.work([&](std::int64_t i) {
            const InProduct in_product;
            parts.dense_rows(W, wide.data(), columns, tiles.first(i), tiles.last(i), y);
        });
    });
}

}  // extern "C"
