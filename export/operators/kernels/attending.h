// Attention of packed sequences, shared out to threads.
//
// Knows: the runtime's threads, tiles. Does not know: operators, how attention is computed.
#pragma once
#include <atomic>
#include <new>
#include <vector>

#include "glue.h"
#include "sequences.h"

namespace quill {
namespace {

constexpr int64_t kTasksWanted = 8;        // fewer are cut into ranges of chunks
constexpr int64_t kScoresToShare = 4000;   // fewer are computed faster alone
constexpr int64_t kTokensToShare = 16;
constexpr int64_t kScoresOfTask = 1000;

struct Attending {
  Heads heads;
  Sequences all;
  const float* queries;  // where they are taken from: tokens x stride
  const float* keys;     // null: no token has any
  const float* values;
  int64_t query_stride, key_stride, value_stride;
  int64_t tokens;
  float* turned;  // tokens x heads x size
  float* out;     // the same

  const Tiles* cut;
  int64_t ranges;  // of chunks, in which a tile is computed
  float* apart;    // what was seen of each chunk, if there are several ranges
  std::vector<int64_t> places;  // of each tile there

  std::atomic<int64_t> next;
  std::atomic<bool> no_memory;
  int64_t parts;

  int64_t num_tiles() const { return static_cast<int64_t>(cut->tiles.size()); }
  int64_t tasks() const { return num_tiles() * heads.num_kv * ranges; }
  Walk walk(int64_t tile, int64_t kv_head) const {
    return {kernels, heads, all, *cut, cut->tiles[static_cast<size_t>(tile)], kv_head, turned};
  }
  float* place(int64_t tile, int64_t kv_head) const {
    const Tile& of = cut->tiles[static_cast<size_t>(tile)];
    return apart + places[static_cast<size_t>(tile)] +
           kv_head * of.queries * of.chunks * room_of_seen(heads.value_size);
  }
};

void append_part(void* data, size_t part) {
  const Attending& work = *static_cast<Attending*>(data);
  const int64_t index = static_cast<int64_t>(part), size = work.heads.num * work.heads.size;
  const int64_t first = work.tokens * index / work.parts;
  const int64_t last = work.tokens * (index + 1) / work.parts;
  const Sequences& all = work.all;
  int64_t s = std::upper_bound(all.starts, all.starts + all.num + 1, first) - all.starts - 1;
  for (int64_t t = first; t < last; t++) {
    while (t >= all.starts[s + 1]) s++;
    const int64_t position = t - all.starts[s] + (all.causal ? all.lengths[s] : 0);
    Token token{nullptr, nullptr, nullptr, nullptr, position, 0};
    if (work.queries) {
      token.queries = work.queries + t * work.query_stride;
      token.turned = work.turned + t * size;
    }
    if (work.keys) {
      token.keys = work.keys + t * work.key_stride;
      token.values = work.values + t * work.value_stride;
      token.block = all.blocks(s)[position / kPositions];
    }
    kernels.append(work.heads, token);
  }
}

// Whoever is free takes the next task. Late tiles first: of a prompt, they have the most to look at.
void attend_part(void* data, size_t) {
  static thread_local std::vector<float> room;
  Attending& work = *static_cast<Attending*>(data);
  for (int64_t i; (i = work.next.fetch_add(1, std::memory_order_relaxed)) < work.tasks();) {
    const int64_t each = work.heads.num_kv * work.ranges;
    const int64_t tile = work.num_tiles() - 1 - i / each, kv_head = i % each / work.ranges;
    const Tile& of = work.cut->tiles[static_cast<size_t>(tile)];
    const Walk walk = work.walk(tile, kv_head);
    if (work.ranges > 1) {
      const int64_t range = i % work.ranges, first = of.first_chunk, num = of.chunks - first;
      walk.go(first + num * range / work.ranges, first + num * (range + 1) / work.ranges,
              work.place(tile, kv_head), true);
      continue;
    }
    const size_t needed = static_cast<size_t>(of.queries * room_of_seen(work.heads.value_size));
    try {
      if (room.size() < needed) room.resize(needed);
    } catch (const std::bad_alloc&) {
      work.no_memory = true;  // an exception would end the process in the runtime's thread
      return;
    }
    walk.go(of.first_chunk, of.chunks, room.data(), false);
    walk.finish(room.data(), false, work.out);
  }
}

void finish_part(void* data, size_t) {
  Attending& work = *static_cast<Attending*>(data);
  const int64_t num_kv = work.heads.num_kv, all = work.num_tiles() * num_kv;
  for (int64_t i; (i = work.next.fetch_add(1, std::memory_order_relaxed)) < all;) {
    work.walk(i / num_kv, i % num_kv).finish(work.place(i / num_kv, i % num_kv), true, work.out);
  }
}

Status* append_tokens(Context* context, Attending* work) {
  return share(context, append_part, work->tokens < kTokensToShare ? 1 : work->tokens / 4, work);
}

// Few tasks that are long are cut into ranges of chunks, whose results are merged afterwards.
void cut_into_ranges(Attending* work, int64_t scores) {
  static thread_local std::vector<float> apart;
  const int64_t tasks = work->tasks();
  work->ranges = std::min((kTasksWanted + tasks - 1) / tasks, scores / kScoresOfTask / tasks);
  int64_t longest = 0, size = 0;
  work->places.clear();
  for (const Tile& tile : work->cut->tiles) {
    work->places.push_back(size);
    longest = std::max(longest, tile.chunks - tile.first_chunk);
    size += work->heads.num_kv * tile.queries * tile.chunks * room_of_seen(work->heads.value_size);
  }
  work->ranges = std::max(std::min(work->ranges, longest), int64_t{1});
  if (work->ranges == 1) return;
  grow(&apart, {size});
  work->apart = apart.data();
}

Status* attend_all(Context* context, Attending* work) {
  static thread_local Tiles cut;
  cut.cut(work->all, work->heads.group());
  work->cut = &cut;
  work->ranges = 1;
  work->next = 0;
  int64_t scores = 0;
  for (const Tile& tile : cut.tiles) scores += tile.scores * work->heads.num_kv;
  if (scores < kScoresToShare) {
    work->parts = 1;
    attend_part(work, 0);
  } else {
    if (work->tasks() < kTasksWanted) cut_into_ranges(work, scores);
    TRY(share(context, attend_part, work->tasks(), work));
    if (work->ranges > 1) {
      work->next = 0;
      TRY(share(context, finish_part, scores < 16 * kScoresToShare ? 1 : work->tasks(), work));
    }
  }
  return work->no_memory ? no_memory() : nullptr;
}

}  // namespace
}  // namespace quill
