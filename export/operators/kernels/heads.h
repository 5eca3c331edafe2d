// Attention heads, their blocks of keys and values, and what is done with them.
//
// Does not know: ONNX Runtime, processors, sequences.
#pragma once
#include <cstdint>

namespace quill {

constexpr int64_t kPositions = 16;                          // of a block
constexpr int64_t kBlocksOfChunk = 8;                       // that are looked at from nothing
constexpr int64_t kChunk = kBlocksOfChunk * kPositions;
constexpr int64_t kMaxHeadSize = 640;

struct Heads {
  int64_t num, num_kv, size;  // queries share keys and values in groups of num / num_kv
  int64_t value_size;   // of values; size is that of queries and keys
  int64_t rotary_size;  // the last so many numbers of a query or key are turned
  float scale;
  float soft_cap;  // scores become cap * tanh(score / cap); 0: they don't
  const float* cosines;  // positions x half of what is turned; null: heads aren't turned
  const float* sines;
  const float* sinks;  // of each head, a score that has a weight and no value; null: there are none
  const float* bias;   // heads x bias_width: added to scores, by how far a key is from its query;
  int64_t bias_width;  // null: nothing is
  int64_t bias_center;  // where that of a query's own position is
  bool halves;   // blocks are kept in 16 bits, not 32
  void* keys;    // blocks x kv heads x size x positions: 16 keys lie side by side
  void* values;  // blocks x kv heads x positions x value size

  int64_t group() const { return num / num_kv; }
  int64_t key_block() const { return size * kPositions; }  // of one head
  int64_t value_block() const { return value_size * kPositions; }
  int64_t element() const { return halves ? 2 : 4; }
  const void* keys_of(int64_t block, int64_t head) const {
    return static_cast<const char*>(keys) + (block * num_kv + head) * key_block() * element();
  }
  const void* values_of(int64_t block, int64_t head) const {
    return static_cast<const char*>(values) + (block * num_kv + head) * value_block() * element();
  }
};

// A token that has just been computed, and where it belongs.
struct Token {
  const float* queries;  // null: it has none
  const float* keys;     // null: it has neither keys nor values
  const float* values;
  float* turned;  // where its queries are looked for: turned and scaled
  int64_t position, block;
};

// Up to 128 neighbouring positions of one head: those that some queries look at together.
struct Chunk {
  const void* keys[kBlocksOfChunk];
  const void* values[kBlocksOfChunk];
  const void* next_keys[kBlocksOfChunk];  // what will be looked at next; null: unknown
  int64_t size, value_size;
  float soft_cap;
  bool halves;
};

// What a query has seen: its weighted values, then the largest score and the sum of its weights.
struct Query {
  const float* from;
  const float* bias;  // of the chunk's positions; null: they have none
  float* seen;
  int64_t first, num;  // of the chunk's positions it may look at those from the first, one at least
  bool is_new;         // what it has seen so far is nothing
};

constexpr int64_t room_of_seen(int64_t size) { return size + 16; }

}  // namespace quill
