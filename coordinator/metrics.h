// What the coordinator measures: the catalogue of metrics, and one method for each thing that feeds
// them. docs/metrics.md lists the catalogue.
#ifndef MUSTER_COORDINATOR_METRICS_H_
#define MUSTER_COORDINATOR_METRICS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/metrics.h"
#include "base/mutex.h"
#include "coordinator/core/core.h"
#include "coordinator/core/job_view.h"
#include "muster/v1/job.pb.h"

namespace muster::coordinator {

// What the jobs that are not finished want and hold, by kind of device.
struct QueueSample {
  std::map<v1::DeviceKind, double> wanted, allocated;  // devices, shared ones by their shares
  std::map<v1::DeviceKind, int64_t> smallest_waiting;  // ranks; none where no job waits
  absl::Duration oldest_wait = absl::ZeroDuration();
};

// Thread-safe. Everything that it is told is durable already.
class Metrics {
 public:
  // `registry` outlives this object.
  explicit Metrics(metrics::Registry& registry);

  // Every family, in the order in which the documentation lists them.
  static std::vector<const metrics::Family*> Catalogue();

  void Recovered(uint64_t leader_term, absl::Duration took);
  // One synced write of `batches` transitions.
  void Wrote(size_t batches, size_t bytes, absl::Duration took);
  // A published job changed from `before` (null when it is new) to `after` (null when removed).
  void JobPublished(const v1::Job* before, const v1::Job* after);
  // The same change with all parts; those of a new job are null in `before`.
  void JobPartsPublished(const JobView& before, const JobView& after);
  // Removes the series of a job that ended some time ago.
  void ForgetJob(const std::string& name);
  void EventPublished(const v1::Event& event);
  void Workers(const std::vector<v1::Worker>& workers);
  void Spares(int64_t free, int64_t missing);
  void Sessions(size_t open);
  void Watchers(size_t open);
  void Observe(const Measured& measured);
  void Queue(const QueueSample& sample);
  // Empty `queue`: of devices that no attempt holds.
  void DeviceSeconds(v1::UsageClass usage_class, const std::string& queue, double seconds);
  void StateDisk(int64_t state_bytes, int64_t free_bytes, int64_t total_bytes);
  // What the file of a flag holds: both the Unix epoch where it cannot be read.
  void CertificateFile(const std::string& flag, absl::Time not_before, absl::Time not_after);
  void LoopDelay(absl::Duration delay);
  void Version(const std::string& version);
  // Of the exporter of traces. `reason`: "queue_full" or "refused".
  void TraceSpansDropped(const std::string& reason, size_t spans);
  void RpcTook(absl::string_view method, absl::Duration took);
  void RpcDone(absl::string_view method, absl::string_view code);

 private:
  void SetJobSeries(const v1::Job& job);

  metrics::Registry& registry_;
  Mutex mutex_;
  std::map<v1::JobState, int64_t> jobs_by_state_ ABSL_GUARDED_BY(mutex_);
  std::set<std::string> queues_ ABSL_GUARDED_BY(mutex_);  // with series of kDeviceSeconds
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_METRICS_H_
