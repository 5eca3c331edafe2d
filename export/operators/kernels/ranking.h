// The tokens of a row from the best to the worst, sorted only where somebody looks.
//
// Knows: scores, weights. Does not know: temperature, cuts, randomness.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

namespace quill {

struct Item {
  double score, weight;
  int64_t id;
};

inline bool is_better(const Item& a, const Item& b) {
  return a.score > b.score || (a.score == b.score && a.id < b.id);
}

using Items = std::vector<Item>;

inline void sort_items(Items::iterator first, Items::iterator last) {
  // Equals are in order from the start: a vocabulary of them costs nothing.
  if (!std::is_sorted(first, last, is_better)) std::sort(first, last, is_better);
}

// A place between two tokens: all of the buckets before, and some of this one.
struct Place {
  int64_t bucket, num;
  double mass;  // of all that is before

  bool operator<(const Place& other) const {
    return bucket < other.bucket || (bucket == other.bucket && num < other.num);
  }
};

// Sums may be wrong by `error` times the mass that they are compared with, and so may those of the
// rules' oracle, which adds one by one. What is closer is in doubt.
class Ranking {
 public:
  // `collect(bucket, items)` fills in the items of a bucket.
  using Collect = std::function<void(int64_t bucket, Items& items)>;

  Ranking(const double* masses, int64_t num, double error, const Collect& collect)
      : masses_(masses), num_(num), error_(error), collect_(collect) {}

  bool in_doubt = false;

  Place end() const { return {num_, 0, mass_before(num_)}; }

  // The place behind the token at which the running sum passes `share` of `whole`; its id.
  Place pass(double share, double whole, int64_t& id) {
    const double target = share * whole, error = error_ * whole;
    double sum = 0;
    int64_t bucket = 0;
    while (bucket < num_ && sum + masses_[bucket] < target) sum += masses_[bucket++];
    if (bucket == num_) {
      in_doubt = true;
      return {num_, 0, sum};
    }
    collect_(bucket, items_);
    auto first = items_.begin(), last = items_.end();
    while (last - first > kFew && !std::is_sorted(first, last, is_better)) {
      const auto middle = first + (last - first) / 2;
      std::nth_element(first, middle, last, is_better);
      double half = 0;
      for (auto each = first; each != middle; each++) half += each->weight;
      if (sum + half < target) {
        sum += half;
        first = middle;
      } else {
        last = middle;
      }
    }
    sort_items(first, last);
    auto found = first;
    while (found != last && sum + found->weight < target) sum += (found++)->weight;
    const double through = found == last ? sum : sum + found->weight;
    const bool is_first = bucket == 0 && found == items_.begin();
    if (found == last || through - target <= error || (target - sum <= error && !is_first)) {
      in_doubt = true;
      return {bucket, 0, sum};
    }
    id = found->id;
    return {bucket, found - items_.begin() + 1, through};
  }

  // The place behind the first `wanted` tokens.
  Place after(int64_t wanted, const int64_t* counts) {
    int64_t bucket = 0, num = 0;
    while (bucket < num_ && num + counts[bucket] <= wanted) num += counts[bucket++];
    Place place{bucket, wanted - num, mass_before(bucket)};
    if (bucket == num_ || place.num == 0) return {bucket, 0, place.mass};
    collect_(bucket, items_);
    const auto last = items_.begin() + place.num;
    std::nth_element(items_.begin(), last, items_.end(), is_better);
    for (auto each = items_.begin(); each != last; each++) place.mass += each->weight;
    return place;
  }

  // The place behind the tokens that weigh at least this. It is in this bucket, or beside it.
  Place lighter_than(double least, int64_t bucket) {
    for (int64_t i = bucket > 0 ? bucket - 1 : 0; i < num_ && i <= bucket + 1; i++) {
      Place place{i, 0, mass_before(i)};
      collect_(i, items_);
      bool is_here = false;
      for (const Item& each : items_) {
        // The best one's weight is exactly 1, and so are those of its equals.
        if (each.weight != 1 && std::fabs(each.weight - least) <= 1e-12 * least) in_doubt = true;
        is_here |= each.weight < least;
        if (each.weight >= least) place.num++, place.mass += each.weight;
      }
      if (is_here) return place;
    }
    const int64_t next = bucket + 2 < num_ ? bucket + 2 : num_;
    return {next, 0, mass_before(next)};
  }

 private:
  static constexpr int64_t kFew = 48;   // they are sorted at once

  double mass_before(int64_t bucket) const {
    double sum = 0;
    for (int64_t i = 0; i < bucket; i++) sum += masses_[i];
    return sum;
  }

  const double* masses_;
  const int64_t num_;
  const double error_;
  const Collect& collect_;
  Items items_;
};

}  // namespace quill
