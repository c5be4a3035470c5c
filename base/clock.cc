#include "base/clock.h"

#include <chrono>

#include "absl/time/clock.h"
#include "base/check.h"

namespace muster {

absl::Time RealClock::Now() const { return absl::Now(); }

absl::Duration RealClock::Monotonic() const {
  return absl::FromChrono(std::chrono::steady_clock::now().time_since_epoch());
}

void SimulatedClock::AdvanceTo(absl::Time to) {
  CHECK(to >= now_) << "simulated time would go backwards";
  now_ = to;
}

}  // namespace muster
