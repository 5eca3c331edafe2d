// Attention, written once for all processors.
//
// Knows: heads, blocks, lanes. Does not know: sequences, threads, ONNX Runtime.
//
// Each query is computed as if it were alone. A score is one chain of sums over the head, and so is
// a weighted value over the positions. Chunks of 128 positions are each computed from nothing and
// merged in their order. So it makes no difference which others are computed beside a query, who
// computes a chunk and when, or into how many pieces a prompt was cut.
#pragma once
#include <limits>

#include "heads.h"
#include "kernels.h"

namespace quill {
namespace {

constexpr int64_t kRowsOfTable = 24;  // queries whose weights stay in the nearest cache
constexpr int64_t kRow = kChunk + 16;  // weights of a query: a power of two would be slower
constexpr float kNothing = -std::numeric_limits<float>::infinity();

INLINE uint8_t* bytes(uint16_t* p) { return reinterpret_cast<uint8_t*>(p); }
INLINE Floats load(const uint16_t* p) { return load_halves(reinterpret_cast<const uint8_t*>(p)); }
INLINE void keep(uint16_t* p, Floats x) { store_halves(bytes(p), x); }
INLINE void keep(float* p, Floats x) { store(p, x); }
INLINE Floats subtracted(Floats a, Floats b) { return fused(b, all(-1.f), a); }

// Turns a head to its position: pairs are half a head apart.
INLINE void turn(const Heads& heads, const float* from, int64_t position, float factor, float* to) {
  const int64_t half = heads.rotary_size / 2, still = heads.size - heads.rotary_size;
  if (!heads.cosines) {
    for (int64_t i = 0; i < heads.size; i++) to[i] = from[i] * factor;
    return;
  }
  for (int64_t i = 0; i < still; i++) to[i] = from[i] * factor;
  from += still, to += still;
  const float* cosines = heads.cosines + position * half;
  const float* sines = heads.sines + position * half;
  for (int64_t i = 0; i < half; i++) {
    const float a = from[i] * factor, b = from[half + i] * factor;
    const float cosine = cosines[i], sine = sines[i];
    to[i] = a * cosine - b * sine;
    to[half + i] = b * cosine + a * sine;
  }
}

template <typename T>
INLINE void keep_token(const Heads& heads, const Token& token) {
  const int64_t size = heads.size, width = heads.value_size, lane = token.position % kPositions;
  for (int64_t h = 0; h < heads.num_kv; h++) {
    const int64_t block = token.block * heads.num_kv + h;
    T* keys = static_cast<T*>(heads.keys) + block * heads.key_block() + lane;
    T* values = static_cast<T*>(heads.values) + block * heads.value_block() + lane * width;
    float turned[kMaxHeadSize];
    T key[kMaxHeadSize];
    turn(heads, token.keys + h * size, token.position, 1.f, turned);
    for (int64_t i = 0; i < size; i += 16) keep(key + i, load(turned + i));
    for (int64_t i = 0; i < width; i += 16) keep(values + i, load(token.values + h * width + i));
    for (int64_t i = 0; i < size; i++) keys[i * kPositions] = key[i];
  }
}

void append(const Heads& heads, const Token& token) {
  if (token.queries) {
    for (int64_t i = 0; i < heads.num * heads.size; i += heads.size) {
      turn(heads, token.queries + i, token.position, heads.scale, token.turned + i);
    }
  }
  if (!token.keys) return;
  if (heads.halves) keep_token<uint16_t>(heads, token);
  else keep_token<float>(heads, token);
}

// Memory takes its time: a block is asked for while another one is multiplied.
INLINE void expect(const Chunk& chunk, const void* block, int64_t width) {
  const char* from = static_cast<const char*>(block);
  const int64_t size = block ? width * kPositions * (chunk.halves ? 2 : 4) : 0;
  for (int64_t i = 0; i < size; i += 64) __builtin_prefetch(from + i);
}

// Some queries with some blocks of 16 keys.
template <typename T, int ROWS, int WIDE>
INLINE void score_tile(const Chunk& chunk, const Query* queries, int64_t block, float* to) {
  const T* keys[WIDE];
  const float* from[ROWS];
  Floats sums[ROWS][WIDE];
  UNROLLED
  for (int w = 0; w < WIDE; w++) keys[w] = static_cast<const T*>(chunk.keys[block + w]);
  UNROLLED
  for (int r = 0; r < ROWS; r++) {
    from[r] = queries[r].from;
    UNROLLED
    for (int w = 0; w < WIDE; w++) sums[r][w] = all(0.f);
  }
  for (int64_t i = 0; i < chunk.size; i++) {
    UNROLLED
    for (int w = 0; w < WIDE; w++) {
      const Floats key = load(keys[w] + i * kPositions);
      UNROLLED
      for (int r = 0; r < ROWS; r++) sums[r][w] = fused(all(from[r][i]), key, sums[r][w]);
    }
  }
  UNROLLED
  for (int r = 0; r < ROWS; r++) {
    UNROLLED
    for (int w = 0; w < WIDE; w++) store(to + r * kRow + (block + w) * kPositions, sums[r][w]);
  }
}

// How old and new are weighted where they are merged, and what weighed most.
struct Merged {
  Floats of_old, of_new, most;
};

INLINE Merged merged(Floats old_most, Floats new_most) {
  const Floats most = larger(new_most, old_most);
  return {exponential(subtracted(old_most, most)), exponential(subtracted(new_most, most)), most};
}

// Some queries with 16, or a few times 16, numbers of their values. What lies behind a query's
// positions may be anything: it is never multiplied, not even by zero. What lies before them are its
// own tokens, with weights of zero.
template <typename T, int ROWS, int WIDE>
INLINE void value_tile(const Chunk& chunk, const Query* queries, const float* weights,
                       const float* of_old, const float* of_new, int64_t at) {
  Floats sums[ROWS][WIDE];
  int64_t common = queries[0].num, longest = common, earliest = queries[0].first;
  UNROLLED
  for (int r = 0; r < ROWS; r++) {
    earliest = queries[r].first < earliest ? queries[r].first : earliest;
    common = queries[r].num < common ? queries[r].num : common;
    longest = queries[r].num > longest ? queries[r].num : longest;
    UNROLLED
    for (int w = 0; w < WIDE; w++) sums[r][w] = all(0.f);
  }
  earliest = earliest / kPositions * kPositions;
  for (int64_t start = earliest; start < common; start += kPositions) {
    const T* values = static_cast<const T*>(chunk.values[start / kPositions]) + at;
    const int64_t end = common - start < kPositions ? common : start + kPositions;
    for (int64_t i = start; i < end; i++, values += chunk.value_size) {
      UNROLLED
      for (int w = 0; w < WIDE; w++) {
        const Floats value = load(values + 16 * w);
        UNROLLED
        for (int r = 0; r < ROWS; r++) {
          sums[r][w] = fused(all(weights[r * kRow + i]), value, sums[r][w]);
        }
      }
    }
  }
  for (int64_t i = common; i < longest; i++) {
    const T* values = static_cast<const T*>(chunk.values[i / kPositions]) + at;
    values += i % kPositions * chunk.value_size;
    UNROLLED
    for (int r = 0; r < ROWS; r++) {
      if (i >= queries[r].num) continue;
      UNROLLED
      for (int w = 0; w < WIDE; w++) {
        sums[r][w] = fused(all(weights[r * kRow + i]), load(values + 16 * w), sums[r][w]);
      }
    }
  }
  UNROLLED
  for (int r = 0; r < ROWS; r++) {
    UNROLLED
    for (int w = 0; w < WIDE; w++) {
      float* to = queries[r].seen + at + 16 * w;
      const Floats sum = sums[r][w];
      if (queries[r].is_new) store(to, sum);
      else store(to, fused(sum, all(of_new[r]), multiply(load(to), all(of_old[r]))));
    }
  }
}

// Scores are kept between -cap and cap. What isn't finite stays so.
INLINE void soften(float* scores, int64_t num, float cap) {
  const Floats inverse = all(2.f / cap), one = all(1.f);
  for (int64_t i = 0; i < num; i += 16) {
    const Floats twice = multiply(load(scores + i), inverse);
    const Floats part = divide(all(-2.f), add(exponential(twice), one));
    store(scores + i, multiply(fused(twice, all(0.f), add(part, one)), all(cap)));
  }
}

INLINE void add_bias(float* scores, const float* bias, int64_t num) {
  const int64_t whole = num / 16 * 16;  // what follows the bias may not be there
  for (int64_t i = 0; i < whole; i += 16) store(scores + i, add(load(scores + i), load(bias + i)));
  for (int64_t i = whole; i < num; i++) scores[i] += bias[i];
}

// Scores become weights that aren't divided by their sum yet. What isn't finite stays so. The first
// `skipped` ones, fewer than 16, don't count.
INLINE void weigh(float* scores, int64_t skipped, int64_t num, float* most, float* total) {
  if (skipped) {
    store(scores, first_of(skipped, all(kNothing), load(scores)));
  }
  const int64_t whole = num / 16 * 16, rest = num - whole;
  Floats top = all(kNothing), sum = all(0.f);
  for (int64_t i = 0; i < whole; i += 16) top = larger(load(scores + i), top);
  if (rest) top = larger(first_of(rest, load(scores + whole), all(kNothing)), top);
  *most = most_of(top);
  top = all(*most);
  if (skipped) store(scores, first_of(skipped, top, load(scores)));  // finite; no weight below
  const auto weight = [&](const float* score) INLINE_LAMBDA {
    const Floats below = subtracted(load(score), top);
    return fused(below, all(0.f), exponential(below));
  };
  for (int64_t i = 0; i < whole; i += 16) {
    Floats w = weight(scores + i);
    if (skipped && i == 0) w = first_of(skipped, all(0.f), w);
    store(scores + i, w);
    sum = add(sum, w);
  }
  if (rest) {
    Floats w = first_of(rest, weight(scores + whole), all(0.f));
    if (skipped && whole == 0) w = first_of(skipped, all(0.f), w);
    store(scores + whole, w);
    sum = add(sum, w);
  }
  *total = added_up(sum);
}

// Calls `f` with tiles of neighbouring rows, each a number that the compiler knows.
template <int ROWS>
struct Rows {
  static constexpr int value = ROWS;
};

template <typename F>
INLINE void tiles_of_rows(int64_t num, F f) {
  const int64_t tiles = (num + kMaxQueries - 1) / kMaxQueries;
  for (int64_t t = 0; t < tiles; t++) {
    const int64_t row = num * t / tiles, rows = num * (t + 1) / tiles - row;
    if (kMaxQueries == 1 || rows == 1) f(Rows<1>{}, row);
    else if (rows == 2) f(Rows<kMaxQueries < 2 ? 1 : 2>{}, row);
    else if (rows == 3) f(Rows<kMaxQueries < 3 ? 1 : 3>{}, row);
    else if (rows == 4) f(Rows<kMaxQueries < 4 ? 1 : 4>{}, row);
    else if (rows == 5) f(Rows<kMaxQueries < 5 ? 1 : 5>{}, row);
    else f(Rows<kMaxQueries < 6 ? 1 : 6>{}, row);
  }
}

template <typename T>
void attend_rows(const Chunk& chunk, const Query* queries, int64_t num) {
  alignas(64) float weights[kRowsOfTable * kRow];
  alignas(64) float old_most[kRowsOfTable + 8], new_most[kRowsOfTable + 8], total[kRowsOfTable];
  tiles_of_rows(num, [&](auto rows, int64_t row) {
    constexpr int kRows = decltype(rows)::value, kWide = wide(kRows);
    int64_t longest = 0, earliest = kChunk;
    for (int64_t r = row; r < row + kRows; r++) {
      longest = queries[r].num > longest ? queries[r].num : longest;
      earliest = queries[r].first < earliest ? queries[r].first : earliest;
    }
    const int64_t blocks = (longest + kPositions - 1) / kPositions;
    int64_t block = earliest / kPositions;
    for (; block + kWide <= blocks; block += kWide) {
      for (int64_t b = block; row == 0 && b < block + kWide; b++) {
        expect(chunk, chunk.values[b], chunk.value_size);
      }
      score_tile<T, kRows, kWide>(chunk, queries + row, block, weights + row * kRow);
    }
    if constexpr (kWide > 1) {
      for (; block < blocks; block++) {
        score_tile<T, kRows, 1>(chunk, queries + row, block, weights + row * kRow);
      }
    }
  });
  const int64_t size = chunk.value_size;
  bool all_new = true;
  for (int64_t r = 0; r < num; r++) {
    const int64_t start = queries[r].first / kPositions * kPositions;
    float* scores = weights + r * kRow + start;
    if (chunk.soft_cap > 0) soften(scores, queries[r].num - start, chunk.soft_cap);
    if (queries[r].bias) add_bias(scores, queries[r].bias + start, queries[r].num - start);
    weigh(scores, queries[r].first - start, queries[r].num - start, new_most + r, total + r);
    for (int64_t i = 0; i < start; i++) weights[r * kRow + i] = 0;
    old_most[r] = queries[r].is_new ? new_most[r] : queries[r].seen[size];
    all_new = all_new && queries[r].is_new;
  }
  alignas(64) float of_old[kRowsOfTable + 8], of_new[kRowsOfTable + 8];
  for (int64_t r = 0; r < num; r++) {
    if (!queries[r].is_new) continue;
    queries[r].seen[size] = new_most[r];
    queries[r].seen[size + 1] = total[r];
  }
  if (!all_new) {
    for (int64_t r = num; r < (num + 15) / 16 * 16; r++) old_most[r] = new_most[r] = 0;
    for (int64_t r = 0; r < num; r += 16) {
      const Merged both = merged(load(old_most + r), load(new_most + r));
      store(of_old + r, both.of_old), store(of_new + r, both.of_new), store(old_most + r, both.most);
    }
    for (int64_t r = 0; r < num; r++) {
      if (queries[r].is_new) continue;
      float* seen = queries[r].seen + size;
      seen[0] = old_most[r];
      seen[1] = seen[1] * of_old[r] + total[r] * of_new[r];
    }
  }
  tiles_of_rows(num, [&](auto rows, int64_t row) {
    constexpr int kRows = decltype(rows)::value, kWide = wide(kRows);
    const float* of_rows = weights + row * kRow;
    int64_t at = 0, asked = 0;
    for (; at + 16 * kWide <= size; at += 16 * kWide) {
      const int64_t due = kBlocksOfChunk * (at + 16 * kWide) / size;
      for (; row == 0 && asked < due; asked++) {
        expect(chunk, chunk.next_keys[asked], chunk.size);
      }
      value_tile<T, kRows, kWide>(chunk, queries + row, of_rows, of_old + row, of_new + row, at);
    }
    if constexpr (kWide > 1) {
      for (; at < size; at += 16) {
        value_tile<T, kRows, 1>(chunk, queries + row, of_rows, of_old + row, of_new + row, at);
      }
    }
  });
}

void attend(const Chunk& chunk, const Query* queries, int64_t num) {
  for (int64_t done = 0; done < num; done += kRowsOfTable) {
    const int64_t rows = num - done < kRowsOfTable ? num - done : kRowsOfTable;
    if (chunk.halves) attend_rows<uint16_t>(chunk, queries + done, rows);
    else attend_rows<float>(chunk, queries + done, rows);
  }
}

void finish(float* seen, int64_t num_chunks, int64_t size, const float* sink, float* to) {
  const float* more = seen;
  for (int64_t chunk = 1; chunk < num_chunks; chunk++) {
    more += room_of_seen(size);
    const Merged both = merged(all(seen[size]), all(more[size]));
    for (int64_t i = 0; i < size; i += 16) {
      store(seen + i, fused(load(more + i), both.of_new, multiply(load(seen + i), both.of_old)));
    }
    seen[size] = first(both.most);
    seen[size + 1] = seen[size + 1] * first(both.of_old) + more[size + 1] * first(both.of_new);
  }
  Floats inverse = all(1.f / seen[size + 1]);
  if (sink) {
    const Merged both = merged(all(seen[size]), all(*sink));
    const Floats total = fused(all(seen[size + 1]), both.of_old, both.of_new);
    inverse = divide(both.of_old, fused(all(*sink), all(0.f), total));  // what isn't finite stays so
  }
  for (int64_t i = 0; i < size; i += 16) store(to + i, multiply(load(seen + i), inverse));
}

}  // namespace
}  // namespace quill
