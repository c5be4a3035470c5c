// Named deadlines in time order. A heartbeat does not move a deadline: when it is due, its handler
// checks whether the time has really run out, and else sets the next deadline.
#ifndef MUSTER_COORDINATOR_CORE_DEADLINES_H_
#define MUSTER_COORDINATOR_CORE_DEADLINES_H_

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"

namespace muster::coordinator {

struct DeadlineKey {
  enum class Kind {
    kWorker,
    kAttempt,
    kTimeLimit,
    kJobDeadline,
    kSchedule,
    kPublish,
    kDrain,
    kReservations,
    kReputation
  } kind;
  std::string id;  // name of a worker or id of a job; empty where there is one of a kind

  friend auto operator<=>(const DeadlineKey&, const DeadlineKey&) = default;
};

class Deadlines {
 public:
  // Replaces the deadline of this key; InfiniteFuture clears it.
  void Set(const DeadlineKey& key, absl::Time at) {
    Clear(key);
    if (at == absl::InfiniteFuture()) return;
    at_.emplace(key, at);
    queue_.emplace(at, key);
  }
  void Clear(const DeadlineKey& key) {
    const auto it = at_.find(key);
    if (it == at_.end()) return;
    queue_.erase({it->second, key});
    at_.erase(it);
  }
  // InfiniteFuture when there is none.
  absl::Time next() const {
    return queue_.empty() ? absl::InfiniteFuture() : queue_.begin()->first;
  }
  // Removes and returns those at or before `now`, earliest first.
  std::vector<DeadlineKey> TakeDue(absl::Time now) {
    std::vector<DeadlineKey> due;
    while (!queue_.empty() && queue_.begin()->first <= now) {
      due.push_back(queue_.begin()->second);
      Clear(due.back());
    }
    return due;
  }

 private:
  std::map<DeadlineKey, absl::Time> at_;
  std::set<std::pair<absl::Time, DeadlineKey>> queue_;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_DEADLINES_H_
