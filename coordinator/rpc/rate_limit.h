// How often each of many callers may do something.
#ifndef MUSTER_COORDINATOR_RPC_RATE_LIMIT_H_
#define MUSTER_COORDINATOR_RPC_RATE_LIMIT_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "base/mutex.h"

namespace muster::coordinator {

// A token bucket for each key. Thread-safe. Bound: `keys_max` keys; those whose bucket is full are
// forgotten first, and when none is, all are.
class RateLimit {
 public:
  RateLimit(double per_second, double burst, size_t keys_max)
      : per_second_(per_second), burst_(burst), keys_max_(keys_max) {}

  struct Answer {
    bool may = true;
    int64_t refused_before = 0;  // of this key since it last might
  };
  Answer Take(const std::string& key, absl::Time now) {
    MutexLock lock(&mutex_);
    if (buckets_.size() >= keys_max_ && !buckets_.contains(key)) Shrink(now);
    Bucket& bucket = buckets_.try_emplace(key, Bucket{burst_, now, 0}).first->second;
    Fill(bucket, now);
    if (bucket.tokens < 1) {
      ++bucket.refused;
      return {.may = false};
    }
    bucket.tokens -= 1;
    return {.may = true, .refused_before = std::exchange(bucket.refused, 0)};
  }

 private:
  struct Bucket {
    double tokens;
    absl::Time at;
    int64_t refused;
  };

  void Fill(Bucket& bucket, absl::Time now) const {
    const double seconds = std::max(0.0, absl::ToDoubleSeconds(now - bucket.at));
    bucket.tokens = std::min(burst_, bucket.tokens + seconds * per_second_);
    bucket.at = now;
  }
  void Shrink(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    for (auto it = buckets_.begin(); it != buckets_.end();) {
      Fill(it->second, now);
      it = it->second.tokens >= burst_ ? buckets_.erase(it) : std::next(it);
    }
    if (buckets_.size() >= keys_max_) buckets_.clear();
  }

  const double per_second_;
  const double burst_;
  const size_t keys_max_;
  Mutex mutex_;
  std::map<std::string, Bucket> buckets_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_RPC_RATE_LIMIT_H_
