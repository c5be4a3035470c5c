// What the coordinator measures: the catalogue, and the places that feed it. Listed in
// docs/metrics.md through Catalogue().
#ifndef MUSTER_COORDINATOR_METRICS_H_
#define MUSTER_COORDINATOR_METRICS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/metrics.h"
#include "base/mutex.h"
#include "coordinator/core/core.h"
#include "muster/v1/job.pb.h"

namespace muster::coordinator {

bool IsFinal(v1::JobState state);

// Thread-safe. Everything that it is told is durable already.
class Metrics {
 public:
  // `registry` outlives this object.
  explicit Metrics(metrics::Registry& registry);

  // Every family, in the order of the documentation.
  static std::vector<const metrics::Family*> Catalogue();

  void Recovered(uint64_t leader_term, absl::Duration took);
  // One synced write of `batches` transitions.
  void Wrote(size_t batches, size_t bytes, absl::Duration took);
  // A job as it was shown before (null when new) and is shown now (null when forgotten).
  void JobShown(const v1::Job* before, const v1::Job* after);
  // Forgets the per-job series of a job that ended some time ago.
  void ForgetJob(const std::string& name);
  void EventShown(const v1::Event& event);
  void Workers(const std::vector<v1::Worker>& workers);
  void Sessions(size_t open);
  void Watchers(size_t open);
  void Observe(const Measured& measured);
  void RpcDone(absl::string_view method, absl::string_view code);

 private:
  void ShowJobSeries(const v1::Job& job);

  metrics::Registry& registry_;
  Mutex mutex_;
  std::map<v1::JobState, int64_t> jobs_by_state_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_METRICS_H_
