// Simulated time: runs work in order of (time, order of posting).
#ifndef MUSTER_TESTS_SIM_QUEUE_H_
#define MUSTER_TESTS_SIM_QUEUE_H_

#include <cstdint>
#include <map>
#include <utility>

#include "absl/functional/any_invocable.h"
#include "absl/time/time.h"
#include "base/check.h"

namespace muster::sim {

class Queue {
 public:
  absl::Time now() const { return now_; }
  void At(absl::Time time, absl::AnyInvocable<void()> work) {
    work_.emplace(std::make_pair(std::max(time, now_), next_order_++), std::move(work));
  }
  void After(absl::Duration delay, absl::AnyInvocable<void()> work) {
    At(now_ + delay, std::move(work));
  }
  // Advances the time to the next work and runs it; false when there is none until `until`.
  bool Step(absl::Time until) {
    if (work_.empty() || work_.begin()->first.first > until) return false;
    auto next = work_.begin();
    now_ = next->first.first;
    absl::AnyInvocable<void()> work = std::move(next->second);
    work_.erase(next);
    std::move(work)();
    return true;
  }

 private:
  absl::Time now_ = absl::FromUnixSeconds(1'000'000'000);
  uint64_t next_order_ = 0;
  std::map<std::pair<absl::Time, uint64_t>, absl::AnyInvocable<void()>> work_;
};

}  // namespace muster::sim

#endif  // MUSTER_TESTS_SIM_QUEUE_H_
