// Attention heads and their cache, and what is done with them.
//
// Does not know: ONNX Runtime, processors.
#pragma once
#include <cstdint>

namespace quill {

constexpr int64_t kMaxQueries = 64;  // of a tile
constexpr int64_t kMaxHeadSize = 128;

struct Heads {
  int64_t num, num_kv, size;  // queries share keys and values in groups of num / num_kv
  int64_t capacity;           // positions of a row of the cache
  int64_t num_new;            // tokens of each row, the last ones of its length
  float scale;
  const float* cosines;  // positions x half a head; null: heads aren't turned
  const float* sines;
  const int64_t* lengths;  // of each row, the new tokens included
  const float* qkv;        // rows x new tokens x all heads, as the product made them
  float* queries;          // turned and scaled
  uint16_t* keys;          // rows x kv heads x capacity x size, as halves
  uint16_t* values;
  float* out;  // rows x new tokens x heads
};

// Some new tokens of a row, in one group of heads.
struct Tile {
  int64_t row, kv_head, first, last;
};

inline bool has_kernel(int64_t size) {
  return size == 16 || size == 32 || size == 64 || size == 80 || size == 96 || size == 128;
}

// Floats that a tile needs: its scores, and two sums of values for each query.
inline int64_t room_of(const Heads& heads, const Tile& tile) {
  const int64_t queries = (tile.last - tile.first) * (heads.num / heads.num_kv);
  const int64_t keys = (heads.lengths[tile.row] + 15) / 16 * 16;
  return queries * (keys + 2 * heads.size);
}

}  // namespace quill
