// What the silence of a worker means: nothing, a network that has failed, or its death.
#ifndef MUSTER_COORDINATOR_CORE_REACHABILITY_H_
#define MUSTER_COORDINATOR_CORE_REACHABILITY_H_

#include <string>
#include <vector>

#include "absl/time/time.h"
#include "coordinator/core/core.h"
#include "coordinator/core/domain_silence.h"
#include "coordinator/core/jobs.h"
#include "coordinator/core/workers.h"

namespace muster::coordinator {

// A worker is given up only after CoreConfig::lost_after of silence that nothing else explains:
// that of most workers at once speaks for a network that has failed, also when it is that of a
// zone, a block or a rack alone, and so do ranks elsewhere that go on although they need those of
// this worker in every step. It judges, and changes nothing of what it judges. Thread: the core's.
class Reachability {
 public:
  explicit Reachability(const CoreConfig& config)
      : config_(config), domains_(config.unreachable_after) {}

  // To be called first in every turn, so that it is known when most workers were silent last.
  void Observe(const WorkerTable& workers, absl::Time now);
  // To be called after every change of the worker's state or labels.
  void Note(const WorkerEntry& worker, const WorkerTable& workers, absl::Time now) {
    domains_.Note(worker, workers.topology(), now);
  }
  void Check(const WorkerTable& workers, std::vector<std::string>& broken) const {
    domains_.Check(workers, broken);
  }

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
  DomainSilence domains_;
  absl::Time most_silent_at_ = absl::InfinitePast();  // the newest turn with most workers silent
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_REACHABILITY_H_
