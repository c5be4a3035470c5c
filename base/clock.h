// The clock, which tests and simulation replace. Deterministic code takes `now` as an argument
// instead.
#ifndef MUSTER_BASE_CLOCK_H_
#define MUSTER_BASE_CLOCK_H_

#include "absl/time/time.h"

namespace muster {

// Thread-safe.
class Clock {
 public:
  virtual ~Clock() = default;
  // Wall time, for records that people read.
  virtual absl::Time Now() const = 0;
  // Time since an arbitrary start that never goes backwards: for intervals and deadlines.
  virtual absl::Duration Monotonic() const = 0;
};

class RealClock : public Clock {
 public:
  absl::Time Now() const override;
  absl::Duration Monotonic() const override;
};

// A clock that only AdvanceTo and Advance move. Single-threaded.
class SimulatedClock : public Clock {
 public:
  explicit SimulatedClock(absl::Time start = absl::UnixEpoch()) : start_(start), now_(start) {}
  absl::Time Now() const override { return now_; }
  absl::Duration Monotonic() const override { return now_ - start_; }
  // Requires: to >= Now().
  void AdvanceTo(absl::Time to);
  void Advance(absl::Duration by) { AdvanceTo(now_ + by); }

 private:
  absl::Time start_;
  absl::Time now_;
};

}  // namespace muster

#endif  // MUSTER_BASE_CLOCK_H_
