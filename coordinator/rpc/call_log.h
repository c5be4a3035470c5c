// What the log says of calls: those that took long and those that failed, each with the id of a
// trace, by which latency, log and the caller's trace are joined (docs/monitoring.md).
#ifndef MUSTER_COORDINATOR_RPC_CALL_LOG_H_
#define MUSTER_COORDINATOR_RPC_CALL_LOG_H_

#include <cstdint>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/rng.h"
#include "coordinator/rpc/rate_limit.h"

namespace muster::coordinator {

// One warning for a call that took `slow` or longer or whose error is the coordinator's own (the
// codes of the alert MusterRpcErrors); of these at most ten a second after the
// first hundred, the others are counted by the next one. One line of the level debug for a call
// with any other error. Thread-safe.
class CallLog {
 public:
  // `seed`: of the ids that are made. `log` outlives this object.
  CallLog(Logger& log, absl::Duration slow, uint64_t seed)
      : log_(log), slow_(slow), rng_(seed), lines_(kPerSecond, kAtOnce, 1) {}

  struct Call {
    std::string method;       // "Submit"
    std::string address;      // of the caller
    std::string traceparent;  // as the caller sent it; empty: not
    absl::Duration took;
    absl::Status status;
  };
  // Whether Ended would do nothing, so that the parts of a call need not be put together.
  bool Ignores(absl::Duration took, bool ok) const { return ok && took < slow_; }
  void Ended(const Call& call, absl::Time now);

 private:
  static constexpr double kPerSecond = 10;
  static constexpr double kAtOnce = 100;

  std::string MakeTraceId();

  Logger& log_;
  const absl::Duration slow_;
  Mutex mutex_;
  Rng rng_ ABSL_GUARDED_BY(mutex_);
  RateLimit lines_;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_RPC_CALL_LOG_H_
