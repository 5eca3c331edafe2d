// Chooses tokens: the rules of model/reference/sampling.py for all rows of a step, in parallel.
//
// Knows: logits, settings, a random number for each row. Does not know: text, Python, ONNX Runtime.
//
// With top-k, or with min-p alone, only the best tokens matter: those above a threshold that one look at
// the row gives. Otherwise the weight of the whole vocabulary counts too. It is estimated, and mostly that
// is enough to say which of the best tokens is drawn. If not, the whole vocabulary is weighed, into buckets
// by score. Their masses say in which one a cut or the draw falls, and only that one is sorted.
//
// Weights and sums are right within known bounds: what those leave in doubt is left to the next, and at
// last to the caller.
#include "sampling.h"

#include <cmath>
#include <limits>
#include <new>

#include "exponential.h"
#include "helpers.h"
#include "processor.h"
#include "ranking.h"
#include "sampling_passes.h"

namespace quill {
namespace {

constexpr double kNegligible = 40;    // e to the -40, times a vocabulary, is less than any doubt
constexpr double kTiny = 1e-290;      // settings below are left to the caller: inverses overflow
constexpr double kLeastStep = 1e-9;   // between two buckets' exponents
constexpr int64_t kFewTokens = 1024;  // sorted at once
constexpr int64_t kHeadPart = 8;      // of the groups; the tokens that reach this many are looked at first
constexpr float kNothing = -std::numeric_limits<float>::infinity();

const Passes& passes() {
  static const Passes chosen = [] {
    switch (chosen_instructions().which) {
#ifdef __x86_64__
      case Instructions::avx512:
        return avx512_passes();
      case Instructions::avxvnni:
      case Instructions::avx2:
        return avx2_passes();
#endif
      default:
        return plain_passes();
    }
  }();
  return chosen;
}

Helpers& helpers() {
  static Helpers* const shared = new Helpers;  // never ends: its threads may outlive everything else
  return *shared;
}

// What one thread works with.
struct Room {
  std::vector<float> logits, tops, best;
  std::vector<uint16_t> buckets;
  std::vector<int32_t> ids;
  Items adjusted, items;
};

Room& room() {
  thread_local Room own;
  return own;
}

// Rules 1 to 3.
double adjusted_score(const Draw& draw, int64_t i, float logit) {
  double score = logit;
  if (draw.in_text[i]) {
    score = score > 0 ? score / draw.repetition_penalty : score * draw.repetition_penalty;
  }
  if (draw.counts[i] > 0) {
    score -= draw.frequency_penalty * draw.counts[i] + draw.presence_penalty;
  }
  return score + draw.biases[i];
}

int64_t num_groups(int64_t size) { return (size + kGroup - 1) / kGroup; }

int64_t first_of(const float* x, int64_t size, float wanted, const std::vector<float>& tops) {
  int64_t i = (std::find(tops.begin(), tops.end(), wanted) - tops.begin()) * kGroup;
  while (i < size && x[i] != wanted) i++;
  return i;
}

// A logit that at least k reach, and few more do.
float threshold_of(int64_t k, const std::vector<float>& tops, std::vector<float>& best) {
  if (k > static_cast<int64_t>(tops.size())) return kNothing;
  best = tops;
  std::nth_element(best.begin(), best.begin() + (k - 1), best.end(), std::greater<float>());
  return best[k - 1];
}

// All that reach it but -inf, by id.
void collect(const float* x, int64_t size, double threshold, Room& room) {
  // The least float that reaches it.
  float least = static_cast<float>(threshold);
  if (least < threshold) least = std::nextafter(least, std::numeric_limits<float>::infinity());
  least = std::max(least, -std::numeric_limits<float>::max());
  int32_t found[kGroup];
  for (int64_t group = 0; group < num_groups(size); group++) {
    if (!(room.tops[group] >= least)) continue;
    const int64_t first = group * kGroup, last = std::min(size, first + kGroup);
    int64_t num = 0;
    for (int64_t i = first; i < last; i++) {  // without a branch that nobody could foresee
      found[num] = static_cast<int32_t>(i);
      num += x[i] >= least;
    }
    for (int64_t i = 0; i < num; i++) room.items.push_back({x[found[i]], 0, found[i]});
  }
}

bool is_allowed(const uint32_t* mask, int64_t id) { return mask[id / 32] >> (id % 32) & 1; }

// A row in which tokens that the mask forbids are nothing.
void copy_allowed(const float* x, int64_t size, const uint32_t* mask, float* to) {
  for (int64_t first = 0; first < size; first += 32) {
    const int64_t last = std::min(size, first + 32);
    const uint32_t bits = mask[first / 32];
    if (!bits) {
      std::fill(to + first, to + last, kNothing);
    } else if (bits == ~uint32_t{0}) {
      std::copy(x + first, x + last, to + first);
    } else {
      for (int64_t i = first; i < last; i++) to[i] = bits >> (i - first) & 1 ? x[i] : kNothing;
    }
  }
}

double exponential(double x) {
  return exponential_of<double, uint64_t>(x > kLeast ? x : kLeast);
}

// One row on its way from logits to a token.
class Row {
 public:
  Row(const Logits& logits, const Draw& draw)
      : draw_(draw), x_(logits.row(draw.row)), size_(logits.vocabulary), room_(room()) {}

  Outcome choose(int64_t& token) {
    room_.tops.resize(num_groups(size_));
    bool is_number = true;
    if (!set_adjusted_apart(is_number)) return kInDoubt;
    scan_ = passes().scan(x_, size_, room_.tops.data());
    raw_top_ = std::max(raw_top_, scan_.top);
    if (!is_number || scan_.has_nan || !std::isfinite(raw_top_)) return kNotFinite;
    if (draw_.temperature == 0) {
      token = greedy();
      return kChosen;
    }
    top_ = scan_.top;
    for (const Item& each : room_.adjusted) top_ = std::max(top_, each.score);
    if (!std::isfinite(top_) || draw_.temperature < kTiny) return kInDoubt;
    if (draw_.min_p > 0 && draw_.min_p < kTiny) return kInDoubt;
    scale_ = {top_, 1 / draw_.temperature, 0};
    double threshold;
    if (has_threshold(threshold)) return choose_of_best(threshold, token);
    const Outcome outcome = draw_.top_k ? kInDoubt : choose_of_head(token);
    return outcome == kInDoubt ? choose_of_all(token) : outcome;
  }

 private:
  // Their scores are in `adjusted`; in the row, which is copied, they are nothing, and so are those
  // that can't be chosen. False: one isn't a token, which is the caller's to say.
  bool set_adjusted_apart(bool& is_number) {
    room_.adjusted.clear();
    if (!draw_.num_adjusted && !draw_.mask) return true;
    room_.logits.resize(size_);
    if (draw_.mask) {
      copy_allowed(x_, size_, draw_.mask, room_.logits.data());
    } else {
      std::copy(x_, x_ + size_, room_.logits.data());
    }
    for (int64_t i = 0; i < draw_.num_adjusted; i++) {
      const int64_t id = draw_.ids[i];
      if (id < 0 || id >= size_) return false;
      if (draw_.mask && !is_allowed(draw_.mask, id)) continue;
      const float raw = x_[id];
      is_number &= raw == raw;
      raw_top_ = std::max(raw_top_, raw);
      room_.adjusted.push_back({adjusted_score(draw_, i, raw), 0, id});
      room_.logits[id] = kNothing;
    }
    x_ = room_.logits.data();
    return true;
  }

  int64_t greedy() const {
    Item best{kNothing, 0, 0};
    if (scan_.top > kNothing) best = {scan_.top, 0, first_of(x_, size_, scan_.top, room_.tops)};
    for (const Item& each : room_.adjusted) {
      if (is_better(each, best)) best = each;
    }
    return best.id;
  }

  // Whether nothing below some score matters.
  bool has_threshold(double& threshold) {
    threshold = kNothing;
    if (size_ <= kFewTokens) return true;
    const auto num = static_cast<int64_t>(room_.tops.size());
    if (draw_.top_k > 0 && draw_.top_k <= num / 2) {
      threshold = threshold_of(draw_.top_k, room_.tops, room_.best);
      return true;
    }
    if (draw_.top_k || draw_.top_p < 1 || draw_.min_p == 0) return false;
    const double below = draw_.temperature * std::log(draw_.min_p);
    threshold = top_ + below - 1e-9 * (std::fabs(top_) - below + draw_.temperature);
    return true;
  }

  double weight(double score) const { return exponential((top_ - score) * -scale_.inverse); }

  int64_t bucket(double score) const {
    const double place = (top_ - score) * scale_.buckets;
    return static_cast<int64_t>(place < kBuckets - 1 ? place : kBuckets - 1);
  }

  // The best tokens, in any order. Their mass.
  double find_best(double threshold) {
    Items& items = room_.items;
    items.clear();
    collect(x_, size_, threshold, room_);
    for (const Item& each : room_.adjusted) {
      if (each.score >= threshold && each.score > kNothing) items.push_back(each);
    }
    if (draw_.top_k && draw_.top_k < static_cast<int64_t>(items.size())) {
      if (!std::is_sorted(items.begin(), items.end(), is_better)) {
        std::nth_element(items.begin(), items.begin() + draw_.top_k, items.end(), is_better);
      }
      items.resize(draw_.top_k);
    }
    double mass = 0;
    for (Item& each : items) mass += each.weight = weight(each.score);
    return mass;
  }

  // One bucket has them all.
  Outcome choose_of_best(double threshold, int64_t& token) {
    const double mass = find_best(threshold);
    const Ranking::Collect all = [&](int64_t, Items& to) { to = room_.items; };
    Ranking ranking(&mass, 1, error(), all);
    return decide(ranking, ranking.end(), token);
  }

  // One bucket has the best. Of the rest only the mass is known, and not to the last digit.
  Outcome choose_of_head(int64_t& token) {
    const double inverse = scale_.inverse;
    if (!(inverse > 1e-30 && inverse < 1e30)) return kInDoubt;
    double total = 0;
    if (scan_.top > kNothing) {
      total = passes().estimate(x_, size_, scan_.top, static_cast<float>(inverse));
      total *= weight(scan_.top);
    }
    for (const Item& each : room_.adjusted) total += weight(each.score);
    const int64_t num = std::max<int64_t>(1, room_.tops.size() / kHeadPart);
    const double mass = find_best(threshold_of(num, room_.tops, room_.best));
    const Ranking::Collect best = [&](int64_t, Items& to) { to = room_.items; };
    Ranking ranking(&mass, 1, estimate_error(), best);
    const Place end{1, 0, total};
    if (draw_.min_p > 0 && !(ranking.lighter_than(draw_.min_p, 0) < end)) return kInDoubt;
    return decide(ranking, end, token);
  }

  Outcome choose_of_all(int64_t& token) {
    double masses[kBuckets] = {};
    weigh_all(masses);
    // Then weights of many buckets are the same, or almost, and min-p can't be found by score.
    if (draw_.min_p > 0 && scale_.inverse < kLeastStep * scale_.buckets) return kInDoubt;
    const Ranking::Collect some = [&](int64_t wanted, Items& to) { collect_bucket(wanted, to); };
    Ranking ranking(masses, kBuckets, error(), some);
    Place end = ranking.end();
    if (draw_.top_k) {
      int64_t counts[kBuckets] = {};
      for (int64_t i = 0; i < size_; i++) counts[room_.buckets[i]]++;
      for (const Item& each : room_.adjusted) counts[bucket(each.score)]++;
      end = std::min(end, ranking.after(draw_.top_k, counts));
    }
    return decide(ranking, end, token);
  }

  void weigh_all(double* masses) {
    double least = std::min<double>(scan_.least, top_);
    for (const Item& each : room_.adjusted) {
      if (each.score > kNothing) least = std::min(least, each.score);
    }
    const double range = std::min(top_ - least, kNegligible * draw_.temperature);
    scale_.buckets = range > 0 ? (kBuckets - 2) / range : 0;
    room_.buckets.resize(size_);
    passes().weigh(x_, size_, scale_, masses, room_.buckets.data());
    for (Item& each : room_.adjusted) {
      each.weight = weight(each.score);
      masses[bucket(each.score)] += each.weight;
    }
  }

  void collect_bucket(int64_t wanted, Items& to) {
    to.clear();
    room_.ids.resize(size_ + 1);
    int32_t* const ids = room_.ids.data();
    const auto number = static_cast<uint16_t>(wanted);
    const int64_t num = passes().find(room_.buckets.data(), size_, number, ids);
    for (int64_t i = 0; i < num; i++) to.push_back({x_[ids[i]], weight(x_[ids[i]]), ids[i]});
    for (const Item& each : room_.adjusted) {
      if (bucket(each.score) == wanted) to.push_back(each);
    }
  }

  // Rules 8 to 10, of what top-k leaves.
  Outcome decide(Ranking& ranking, Place end, int64_t& token) {
    const Place all = end;
    if (draw_.top_p < 1) end = std::min(end, ranking.pass(draw_.top_p, all.mass, token));
    if (draw_.min_p > 0) {
      const double score = top_ + draw_.temperature * std::log(draw_.min_p);
      end = std::min(end, ranking.lighter_than(draw_.min_p, bucket(score)));
    }
    ranking.pass(draw_.u, end.mass, token);
    return ranking.in_doubt ? kInDoubt : kChosen;
  }

  // Of sums of weights: the oracle's, one by one, and ours.
  double error() const { return 5e-16 * static_cast<double>(size_) + 1e-12; }

  // Exponents are off by 3 roundings, which weigh most where they are as large as the logarithm of the
  // vocabulary; the rest is for exp and for sums.
  double estimate_error() const { return 0x1p-24 * (3 * std::log(size_) + 30); }

  const Draw& draw_;
  const float* x_;
  const int64_t size_;
  Room& room_;
  float raw_top_ = kNothing;
  double top_ = 0;
  Scan scan_{};
  Scale scale_{};
};

Outcome find_tops(const Logits& logits, Tops& wanted, int64_t* ids, double* values) {
  const float* x = logits.row(wanted.row);
  const int64_t size = logits.vocabulary;
  Room& own = room();
  own.tops.resize(num_groups(size));
  const Scan scan = passes().scan(x, size, own.tops.data());
  wanted.num_found = 0;
  wanted.log_total = std::numeric_limits<double>::quiet_NaN();
  if (scan.has_nan || !std::isfinite(scan.top)) return kNotFinite;
  wanted.log_total = scan.top + std::log(passes().total(x, size, scan.top));
  if (!wanted.num_wanted) return kChosen;
  own.items.clear();
  collect(x, size, threshold_of(wanted.num_wanted, own.tops, own.best), own);
  sort_items(own.items.begin(), own.items.end());
  wanted.num_found = std::min<int64_t>(wanted.num_wanted, own.items.size());
  for (int64_t i = 0; i < wanted.num_found; i++) {
    ids[i] = own.items[i].id;
    values[i] = own.items[i].score;
  }
  return kChosen;
}

// A row that is only looked through costs a nanosecond for four tokens, one whose total counts six
// times as much. Less than a quarter of a millisecond isn't worth waking anybody.
constexpr int64_t kWorthwhile = 1'000'000;

bool is_costly(const Draw& draw) {
  return draw.temperature > 0 && !draw.top_k && (draw.top_p < 1 || draw.min_p == 0);
}

int64_t worthwhile(int64_t threads, const Logits& logits, const Draw* draws, int64_t num) {
  int64_t cost = 0;
  for (int64_t i = 0; i < num; i++) cost += logits.vocabulary * (is_costly(draws[i]) ? 6 : 1);
  return std::min(threads, cost / kWorthwhile);
}

template <typename Work>
void for_each_row(int64_t rows, int64_t threads, uint8_t* outcomes, const Work& work) {
  helpers().run(rows, threads, [&](int64_t i) {
    try {
      outcomes[i] = work(i);
    } catch (const std::bad_alloc&) {
      outcomes[i] = kNoMemory;
    }
  });
}

}  // namespace
}  // namespace quill

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED void QuillChoose(const float* x, int64_t stride, int64_t vocabulary, int64_t rows,
                          const quill::Draw* draws, int64_t threads, int64_t* tokens,
                          uint8_t* outcomes) {
  using namespace quill;
  const Logits logits{x, stride, vocabulary};
  for_each_row(rows, worthwhile(threads, logits, draws, rows), outcomes,
               [&](int64_t i) { return Row(logits, draws[i]).choose(tokens[i]); });
}

// `ids` and `values` have room for the most that a row wants.
EXPORTED void QuillTops(const float* x, int64_t stride, int64_t vocabulary, int64_t rows,
                        quill::Tops* tops, int64_t most, int64_t threads, int64_t* ids,
                        double* values, uint8_t* outcomes) {
  using namespace quill;
  const Logits logits{x, stride, vocabulary};
  const int64_t most_threads = std::min(threads, 6 * rows * vocabulary / kWorthwhile);
  for_each_row(rows, most_threads, outcomes, [&](int64_t i) {
    return find_tops(logits, tops[i], ids + i * most, values + i * most);
  });
}
