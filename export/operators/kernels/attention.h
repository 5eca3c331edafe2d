// Attention with its cache, written once for all processors.
//
// Knows: heads, positions, lanes. Does not know: threads, ONNX Runtime.
//
// Each query is computed as if it were alone: its scores in blocks of 16 keys that begin at position
// 0, its values added up in the order of their positions. So it makes no difference which others
// are computed beside it, or into how many chunks a prompt was cut. The cache is kept in halves:
// reading it is most of the work, and they lose next to nothing of it.
#pragma once
#include "heads.h"
#include "kernels.h"

namespace quill {
namespace {

constexpr int64_t kKeys = 16;

INLINE uint8_t* bytes(uint16_t* p) { return reinterpret_cast<uint8_t*>(p); }
INLINE Floats load(const uint16_t* p) { return load_halves(reinterpret_cast<const uint8_t*>(p)); }
INLINE Floats subtracted(Floats a, Floats b) { return fused(b, all(-1.f), a); }

// Turns a head to its position: pairs are half a head apart.
INLINE void turn(const Heads& heads, const float* from, int64_t position, float factor, float* to) {
  const int64_t half = heads.size / 2;
  if (!heads.cosines) {
    for (int64_t i = 0; i < heads.size; i++) to[i] = from[i] * factor;
    return;
  }
  const float* cosines = heads.cosines + position * half;
  const float* sines = heads.sines + position * half;
  for (int64_t i = 0; i < half; i++) {
    const float a = from[i] * factor, b = from[half + i] * factor;
    const float cosine = cosines[i], sine = sines[i];
    to[i] = a * cosine - b * sine;
    to[half + i] = b * cosine + a * sine;
  }
}

void append(const Heads& heads, int64_t row, int64_t token) {
  const int64_t size = heads.size, position = heads.lengths[row] - heads.num_new + token;
  const int64_t at = row * heads.num_new + token;
  const float* from = heads.qkv + at * (heads.num + 2 * heads.num_kv) * size;
  float* queries = heads.queries + at * heads.num * size;
  for (int64_t h = 0; h < heads.num; h++) {
    turn(heads, from + h * size, position, heads.scale, queries + h * size);
  }
  for (int64_t h = 0; h < heads.num_kv; h++) {
    const int64_t to = ((row * heads.num_kv + h) * heads.capacity + position) * size;
    const float* value = from + (heads.num + heads.num_kv + h) * size;
    float key[kMaxHeadSize];
    turn(heads, from + (heads.num + h) * size, position, 1.f, key);
    for (int64_t i = 0; i < size; i += 16) {
      store_halves(bytes(heads.keys + to + i), load(key + i));
      store_halves(bytes(heads.values + to + i), load(value + i));
    }
  }
}

// One query against 16 keys.
template <int SIZE>
INLINE Floats scores(const float* query, const uint16_t* keys) {
  Floats q[SIZE / 16];
  UNROLLED
  for (int i = 0; i < SIZE / 16; i++) q[i] = load(query + 16 * i);
  Floats products[16];
  UNROLLED_16
  for (int key = 0; key < 16; key++) {
    Floats sum = multiply(q[0], load(keys + key * SIZE));
    UNROLLED
    for (int i = 1; i < SIZE / 16; i++) sum = fused(q[i], load(keys + key * SIZE + 16 * i), sum);
    products[key] = sum;
  }
  return sums(products);
}

// Scores of the last block, whose keys beyond `num` are not to be looked at.
template <int SIZE>
INLINE void last_scores(const float* query, const uint16_t* keys, int64_t num, float* to) {
  for (int64_t key = 0; key < num; key++) {
    Floats sum = multiply(load(query), load(keys + key * SIZE));
    for (int i = 1; i < SIZE / 16; i++) {
      sum = fused(load(query + 16 * i), load(keys + key * SIZE + 16 * i), sum);
    }
    to[key] = added_up(sum);
  }
}

// Scores become weights that aren't divided by their sum yet. What isn't finite stays so.
INLINE float weigh(float* scores, int64_t num) {
  const int64_t padded = (num + 15) / 16 * 16;
  for (int64_t i = num; i < padded; i++) scores[i] = scores[0];
  Floats most = load(scores);
  for (int64_t i = 16; i < padded; i += 16) most = larger(load(scores + i), most);
  float v[16];
  store(v, most);
  for (int i = 1; i < 16; i++) v[0] = v[i] > v[0] ? v[i] : v[0];
  const Floats top = all(v[0]);
  Floats total = all(0.f);
  for (int64_t i = 0; i < padded; i += 16) {
    const Floats below = subtracted(load(scores + i), top);
    store(scores + i, fused(below, all(0.f), exponential(below)));
    if (i + 16 > num) {
      for (int64_t j = num; j < padded; j++) scores[j] = 0;
    }
    total = add(total, load(scores + i));
  }
  return added_up(total);
}

// Adds up weighted values, those at even and at odd positions apart: two chains of sums.
template <int SIZE>
INLINE void add_values(const float* weights, const uint16_t* values, int64_t num, float* to) {
  Floats even[SIZE / 16], odd[SIZE / 16];
  UNROLLED
  for (int i = 0; i < SIZE / 16; i++) {
    even[i] = load(to + 16 * i);
    odd[i] = load(to + SIZE + 16 * i);
  }
  int64_t key = 0;
  for (; key + 2 <= num; key += 2, values += 2 * SIZE) {
    const Floats first = all(weights[key]), second = all(weights[key + 1]);
    UNROLLED
    for (int i = 0; i < SIZE / 16; i++) {
      even[i] = fused(first, load(values + 16 * i), even[i]);
      odd[i] = fused(second, load(values + SIZE + 16 * i), odd[i]);
    }
  }
  if (key < num) {
    const Floats first = all(weights[key]);
    UNROLLED
    for (int i = 0; i < SIZE / 16; i++) even[i] = fused(first, load(values + 16 * i), even[i]);
  }
  UNROLLED
  for (int i = 0; i < SIZE / 16; i++) {
    store(to + 16 * i, even[i]);
    store(to + SIZE + 16 * i, odd[i]);
  }
}

// The queries of some neighbouring tokens that look at the same keys. A block of keys, then of
// values, stays in the nearest cache while all of them pass.
template <int SIZE>
void attend_sized(const Heads& heads, const Tile& tile, float* room) {
  const int64_t group = heads.num / heads.num_kv, first = heads.lengths[tile.row] - heads.num_new;
  const int64_t num_queries = (tile.last - tile.first) * group;
  const int64_t longest = first + tile.last, stride = (longest + 15) / 16 * 16;
  const int64_t cache = (tile.row * heads.num_kv + tile.kv_head) * heads.capacity * SIZE;
  const uint16_t *keys = heads.keys + cache, *values = heads.values + cache;
  float* sums_of_values = room + num_queries * stride;
  const auto num_keys = [&](int64_t query) { return first + tile.first + query / group + 1; };
  const auto place = [&](int64_t query) {
    const int64_t token = tile.row * heads.num_new + tile.first + query / group;
    return (token * heads.num + tile.kv_head * group + query % group) * SIZE;
  };
  for (int64_t at = 0; at < longest; at += kKeys) {
    for (int64_t query = 0; query < num_queries; query++) {
      const int64_t num = num_keys(query) - at;
      float* to = room + query * stride + at;
      const float* of_query = heads.queries + place(query);
      if (num >= kKeys) store(to, scores<SIZE>(of_query, keys + at * SIZE));
      else if (num > 0) last_scores<SIZE>(of_query, keys + at * SIZE, num, to);
    }
  }
  float total[kMaxQueries];
  for (int64_t query = 0; query < num_queries; query++) {
    total[query] = weigh(room + query * stride, num_keys(query));
  }
  std::memset(sums_of_values, 0, static_cast<size_t>(num_queries * 2 * SIZE) * sizeof(float));
  for (int64_t at = 0; at < longest; at += kKeys) {
    for (int64_t query = 0; query < num_queries; query++) {
      const int64_t left = num_keys(query) - at, num = left < kKeys ? left : kKeys;
      if (num > 0) {
        add_values<SIZE>(room + query * stride + at, values + at * SIZE, num,
                         sums_of_values + query * 2 * SIZE);
      }
    }
  }
  for (int64_t query = 0; query < num_queries; query++) {
    const Floats inverse = all(1.f / total[query]);
    const float* from = sums_of_values + query * 2 * SIZE;
    float* to = heads.out + place(query);
    for (int i = 0; i < SIZE; i += 16) {
      store(to + i, multiply(add(load(from + i), load(from + SIZE + i)), inverse));
    }
  }
}

void attend(const Heads& heads, const Tile& tile, float* room) {
  switch (heads.size) {
    case 16: attend_sized<16>(heads, tile, room); break;
    case 32: attend_sized<32>(heads, tile, room); break;
    case 64: attend_sized<64>(heads, tile, room); break;
    case 80: attend_sized<80>(heads, tile, room); break;
    case 96: attend_sized<96>(heads, tile, room); break;
    case 128: attend_sized<128>(heads, tile, room); break;
  }
}

}  // namespace
}  // namespace quill
