// What the silence of a worker means: nothing, a network that has failed, or its death.
#ifndef MUSTER_COORDINATOR_CORE_REACHABILITY_H_
#define MUSTER_COORDINATOR_CORE_REACHABILITY_H_

#include <string>

#include "absl/time/time.h"
#include "coordinator/core/core.h"
#include "coordinator/core/jobs.h"
#include "coordinator/core/workers.h"

namespace muster::coordinator {

// A worker is given up only after CoreConfig::lost_after of silence that nothing else explains:
// that of most workers at once speaks for a network that has failed, and so do ranks elsewhere that
// go on although they need those of this worker in every step. It judges and changes nothing.
// Thread: the core's.
class Reachability {
 public:
  explicit Reachability(const CoreConfig& config) : config_(config) {}

  // To be called first in every turn, so that it is known when most workers were silent last.
  void Observe(const WorkerTable& workers, absl::Time now);

  struct Verdict {
    enum class Kind {
      kReachable,
      kUnreachable,  // its ranks may train on
      kKept,         // silent for so long that it would be given up, if it were not for `why`
      kLost,
    } kind = Kind::kReachable;
    std::string why;        // of kKept
    absl::Time look_again;  // when the verdict may be another one; not of kLost
  };
  // Requires: the worker is not lost.
  Verdict Judge(const WorkerEntry& worker, const WorkerTable& workers, const JobTable& jobs,
                absl::Time now) const;

 private:
  std::string WhyKept(const WorkerEntry& worker, const WorkerTable& workers, const JobTable& jobs,
                      absl::Time now) const;

  const CoreConfig& config_;
  absl::Time most_silent_at_ = absl::InfinitePast();  // the newest turn with most workers silent
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_REACHABILITY_H_
