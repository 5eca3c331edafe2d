// Who looks at what: sequences of tokens, cut into tiles of queries that are computed together.
//
// Knows: sequences, tables of blocks. Does not know: ONNX Runtime, threads, how attention is
// computed.
//
// A tile is either some neighbouring tokens of one sequence, or a few tokens each of sequences that
// begin with the same blocks. It goes through the chunks in their order. As long as its sequences
// have the same blocks there, each chunk is read once for all of them.
#pragma once
#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "matrix.h"

namespace quill {
namespace {

constexpr int64_t kMaxGroup = 128;      // heads that share keys and values
constexpr int64_t kQueriesOfTile = 48;  // more only if one token has them

struct Sequences {
  int64_t num;
  const int32_t* starts;   // of each sequence's tokens among all, and where the last one's end
  const int32_t* lengths;  // causal: positions before its first token. Otherwise: all it looks at
  const int32_t* table;    // sequences x width: blocks
  int64_t width;
  bool causal;
  int64_t window;  // a token looks at so many positions, its own included; 0: at all before it

  int64_t tokens(int64_t s) const { return int64_t{starts[s + 1]} - starts[s]; }
  const int32_t* blocks(int64_t s) const { return table + s * width; }
  // Positions that a sequence's token may look at.
  int64_t seen(int64_t s, int64_t token) const { return lengths[s] + (causal ? token + 1 : 0); }
  int64_t position(int64_t s, int64_t token) const { return causal ? lengths[s] + token : token; }
  // The first of them.
  int64_t first(int64_t s, int64_t token) const {
    return window ? std::max(seen(s, token) - window, int64_t{0}) : 0;
  }
};

// Tokens of a sequence, counted in the sequence.
struct Member {
  int64_t sequence, first, last;
};

struct Tile {
  int64_t first, last;  // members
  int64_t queries, chunks;
  int64_t first_chunk;  // before it nobody looks
  int64_t scores;
};

inline int64_t chunks_of(int64_t positions) { return (positions + kChunk - 1) / kChunk; }

class Tiles {
 public:
  std::vector<Member> members;
  std::vector<Tile> tiles;

  void cut(const Sequences& all, int64_t group) {
    members.clear(), tiles.clear(), few_.clear();
    const int64_t most = std::max(kQueriesOfTile / group, int64_t{1});
    for (int64_t s = 0; s < all.num; s++) {
      const int64_t tokens = all.tokens(s);
      if (2 * tokens <= most && tokens > 0) few_.push_back(s);
      else for (int64_t t = 0; t < tokens; t += most) {
        begin();
        add(all, {s, t, std::min(t + most, tokens)}, group);
      }
    }
    if (few_.size() > 2) {
      std::sort(few_.begin(), few_.end(),
                [&](int64_t a, int64_t b) { return compare(all, a, b) < 0; });
    }
    for (size_t i = 0; i < few_.size(); i++) {
      const int64_t s = few_[i], tokens = all.tokens(s);
      if (i == 0 || tiles.back().queries + tokens * group > kQueriesOfTile ||
          !share_chunk(all, few_[i - 1], s, 0)) {
        begin();
      }
      add(all, {s, 0, tokens}, group);
    }
  }

  // Whether both look at all of the same chunk.
  static bool share_chunk(const Sequences& all, int64_t a, int64_t b, int64_t chunk) {
    const int64_t end = (chunk + 1) * kChunk, at = chunk * kBlocksOfChunk;
    return all.seen(a, 0) >= end && all.seen(b, 0) >= end &&
           !std::memcmp(all.blocks(a) + at, all.blocks(b) + at, kBlocksOfChunk * sizeof(int32_t));
  }

 private:
  // Any order will do in which those that begin with the same whole chunks are neighbours.
  static int compare(const Sequences& all, int64_t a, int64_t b) {
    const int64_t of_a = all.seen(a, 0) / kChunk, of_b = all.seen(b, 0) / kChunk;
    const int64_t blocks = std::min(of_a, of_b) * kBlocksOfChunk;
    const int found = std::memcmp(all.blocks(a), all.blocks(b),
                                  static_cast<size_t>(blocks) * sizeof(int32_t));
    return found ? found : of_a < of_b ? -1 : of_a > of_b;
  }

  void begin() {
    const int64_t at = static_cast<int64_t>(members.size());
    tiles.push_back({at, at, 0, 0, std::numeric_limits<int64_t>::max(), 0});
  }

  void add(const Sequences& all, const Member& member, int64_t group) {
    Tile& tile = tiles.back();
    const int64_t queries = (member.last - member.first) * group;
    const int64_t seen = all.seen(member.sequence, member.last - 1);
    const int64_t first = all.first(member.sequence, member.first);
    members.push_back(member);
    tile.last++;
    tile.queries += queries;
    tile.chunks = std::max(tile.chunks, chunks_of(seen));
    tile.first_chunk = std::min(tile.first_chunk, first / kChunk);
    tile.scores += queries * (seen - first);
  }

  std::vector<int64_t> few_;
};

// A tile's way through some chunks, for one group of heads.
class Walk {
 public:
  Walk(const Kernels& kernels, const Heads& heads, const Sequences& all, const Tiles& cut,
       const Tile& tile, int64_t kv_head, const float* queries)
      : kernels_(kernels), heads_(heads), all_(all), members_(cut.members.data()), tile_(tile),
        kv_head_(kv_head), queries_(queries) {}

  // What a query has seen is at `seen`, one after another. `apart`: of each chunk, all the chunks
  // of a query one after another; otherwise all that it has seen up to now.
  void go(int64_t first, int64_t last, float* seen, bool apart) const {
    const int64_t room = room_of_seen(heads_.value_size), step = apart ? tile_.chunks * room : room;
    for (int64_t c = first; c < last; c++) {
      float* of_chunk = seen + (apart ? c * room : 0);
      for (int64_t m = tile_.first, query = 0; m < tile_.last;) {
        const int64_t begin = m++, num = num_queries(begin);
        if (!looks_at(begin, c)) {
          query += num;
          continue;
        }
        while (m < tile_.last && Tiles::share_chunk(all_, members_[begin].sequence,
                                                    members_[m].sequence, c)) m++;
        query += look(begin, m, c, of_chunk + query * step, step, apart);
      }
    }
  }

  void finish(float* seen, bool apart, float* out) const {
    const int64_t width = heads_.value_size;
    const int64_t room = room_of_seen(width), step = apart ? tile_.chunks * room : room;
    for (int64_t m = tile_.first; m < tile_.last; m++) {
      for (int64_t token = members_[m].first; token < members_[m].last; token++) {
        const int64_t s = members_[m].sequence;
        const int64_t before = apart ? all_.first(s, token) / kChunk : 0;
        const int64_t chunks = apart ? chunks_of(all_.seen(s, token)) - before : 1;
        for (int64_t h = 0; h < heads_.group(); h++, seen += step) {
          const float* sinks = heads_.sinks;
          const float* sink = sinks ? sinks + kv_head_ * heads_.group() + h : nullptr;
          kernels_.finish(seen + before * room, chunks, width, sink, out + place(s, token, h) * width);
        }
      }
    }
  }

 private:
  int64_t num_queries(int64_t m) const {
    return (members_[m].last - members_[m].first) * heads_.group();
  }
  bool looks_at(int64_t m, int64_t c) const {
    const Member& of = members_[m];
    return all_.seen(of.sequence, of.last - 1) > c * kChunk &&
           all_.first(of.sequence, of.first) < (c + 1) * kChunk;
  }
  // Of a query among all.
  int64_t place(int64_t s, int64_t token, int64_t h) const {
    return (all_.starts[s] + token) * heads_.num + kv_head_ * heads_.group() + h;
  }

  // Of a key that is so far behind its query, and those after it.
  const float* bias(int64_t h, int64_t distance) const {
    if (!heads_.bias) return nullptr;
    const int64_t head = kv_head_ * heads_.group() + h;
    return heads_.bias + head * heads_.bias_width + heads_.bias_center + distance;
  }

  // Some members look at a chunk that is the same for all of them. Returns how many queries.
  int64_t look(int64_t begin, int64_t end, int64_t c, float* seen, int64_t step, bool apart) const {
    Query queries[kMaxGroup];
    int64_t num = 0, passed = 0;
    for (int64_t m = begin; m < end; m++) {
      const int64_t s = members_[m].sequence;
      for (int64_t token = members_[m].first; token < members_[m].last; token++) {
        const int64_t left = all_.seen(s, token) - c * kChunk;
        const int64_t first = all_.first(s, token) - c * kChunk;
        for (int64_t h = 0; h < heads_.group(); h++, passed++) {
          if (left <= 0 || first >= kChunk) continue;
          queries[num++] = {queries_ + place(s, token, h) * heads_.size,
                            bias(h, c * kChunk - all_.position(s, token)), seen + passed * step,
                            std::max(first, int64_t{0}), std::min(left, kChunk),
                            apart || c == 0 || first >= 0};
        }
      }
    }
    // If there are several members, each of them looks at all of it.
    const Member& any = members_[begin];
    const int64_t left = all_.seen(any.sequence, any.last - 1) - c * kChunk;
    Chunk chunk{{}, {}, {}, heads_.size, heads_.value_size, heads_.soft_cap, heads_.halves};
    const int32_t* blocks = all_.blocks(any.sequence) + c * kBlocksOfChunk;
    for (int64_t b = 0; b < kBlocksOfChunk && b * kPositions < left; b++) {
      chunk.keys[b] = heads_.keys_of(blocks[b], kv_head_);
      chunk.values[b] = heads_.values_of(blocks[b], kv_head_);
    }
    for (int64_t b = kBlocksOfChunk; b < 2 * kBlocksOfChunk && b * kPositions < left; b++) {
      chunk.next_keys[b - kBlocksOfChunk] = heads_.keys_of(blocks[b], kv_head_);
    }
    kernels_.attend(chunk, queries, num);
    return passed;
  }

  const Kernels& kernels_;
  const Heads& heads_;
  const Sequences& all_;
  const Member* members_;
  const Tile& tile_;
  int64_t kv_head_;
  const float* queries_;
};

}  // namespace
}  // namespace quill
