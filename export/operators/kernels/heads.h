// Attention heads, their blocks of keys and values, and what is done with them.
//
// Does not know: ONNX Runtime, processors, sequences.
#pragma once
#include <cstdint>

namespace quill {

constexpr int64_t kPositions = 16;                          // of a block
constexpr int64_t kBlocksOfChunk = 8;                       // that are looked at from nothing
constexpr int64_t kChunk = kBlocksOfChunk * kPositions;
constexpr int64_t kMaxHeadSize = 256;

struct Heads {
  int64_t num, num_kv, size;  // queries share keys and values in groups of num / num_kv
  float scale;
  const float* cosines;  // positions x half a head; null: heads aren't turned
  const float* sines;
  bool halves;   // blocks are kept in 16 bits, not 32
  void* keys;    // blocks x kv heads x size x positions: 16 keys lie side by side
  void* values;  // blocks x kv heads x positions x size

  int64_t group() const { return num / num_kv; }
  int64_t block_size() const { return size * kPositions; }  // of one head
  int64_t element() const { return halves ? 2 : 4; }
  const void* of_block(const void* all, int64_t block, int64_t head) const {
    return static_cast<const char*>(all) + (block * num_kv + head) * block_size() * element();
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
  int64_t size;
  bool halves;
  bool is_first;  // what the queries have seen so far is nothing
};

// What a query has seen: its weighted values, then the largest score and the sum of its weights.
struct Query {
  const float* from;
  float* seen;
  int64_t num;  // of the chunk's positions, one at least, that it may look at
};

constexpr int64_t room_of_seen(int64_t size) { return size + 16; }

}  // namespace quill
