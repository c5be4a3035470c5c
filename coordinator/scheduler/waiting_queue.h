// The jobs that wait for devices, in the order in which their queues serve them.
#ifndef MUSTER_COORDINATOR_SCHEDULER_WAITING_QUEUE_H_
#define MUSTER_COORDINATOR_SCHEDULER_WAITING_QUEUE_H_

#include <cstdint>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "base/check.h"
#include "base/ids.h"
#include "muster/v1/job.pb.h"
#include "proto/spec/share.h"

namespace muster::coordinator {

// The order of a queue: higher priority first, then earlier deadline, then earlier submission.
struct QueueOrder {
  int32_t priority = 0;
  uint64_t submit_sequence = 0;
  absl::Time deadline = absl::InfiniteFuture();

  friend bool operator<(const QueueOrder& a, const QueueOrder& b) {
    if (a.priority != b.priority) return a.priority > b.priority;
    if (a.deadline != b.deadline) return a.deadline < b.deadline;
    return a.submit_sequence < b.submit_sequence;
  }
};

// JobSpec.placement.
struct PlacementRule {
  v1::TopologyLevel required = v1::TOPOLOGY_LEVEL_UNSPECIFIED;
  v1::TopologyLevel preferred = v1::TOPOLOGY_LEVEL_UNSPECIFIED;
  v1::TopologyLevel spread = v1::TOPOLOGY_LEVEL_UNSPECIFIED;
  int32_t segment = 0;

  friend auto operator<=>(const PlacementRule&, const PlacementRule&) = default;
};

// The groups of ranks along an axis of the mesh, and what they send.
struct AxisTraffic {
  v1::MeshAxis axis = v1::MESH_AXIS_DATA;
  int32_t degree = 1;  // ranks of a group
  int32_t stride = 1;  // between neighbouring ranks of a group
  double bytes = 0;    // that a rank sends in a step, or a weight that stands for them
};

// What a gang needs. Of jobs of one shape either all fit at a time or none does.
struct GangShape {
  v1::DeviceKind device = v1::DEVICE_KIND_CPU;
  int32_t ranks = 0;
  int32_t group = 1;  // WaitingJob::group
  PlacementRule placement;
  std::vector<std::string> reservations;
  std::string tenant = {};
  bool recovers = false;               // it may take spares
  int32_t share = spec::kWholeDevice;  // WaitingJob::share

  friend auto operator<=>(const GangShape&, const GangShape&) = default;
};

struct WaitingJob {
  JobId id;
  std::string name;
  std::string queue;
  int32_t priority = 0;
  uint64_t submit_sequence = 0;                  // no two jobs share one
  absl::Time deadline = absl::InfiniteFuture();  // JobSpec.deadline
  int32_t ranks = 0;
  v1::DeviceKind device = v1::DEVICE_KIND_CPU;
  // Ranks of a tensor group, a divisor of `ranks`. They communicate most, so that a group is placed
  // on one worker wherever a worker has as many slots. Ranks r, r + stride, r + 2 stride, ... are
  // one group: stride is the product of the degrees of the axes that vary faster than the tensor
  // axis in the numbering of ranks.
  int32_t group = 1;
  int32_t stride = 1;
  PlacementRule placement = {};
  std::vector<AxisTraffic> traffic =
      {};                      // empty: not known, and one ring of all ranks stands for it
  bool traffic_known = false;  // AxisTraffic::bytes are bytes
  std::vector<std::string> reservations = {};    // whose devices it may take, by name
  absl::Time not_before = absl::InfinitePast();  // end of its back-off
  // How long it trains once it has started; InfiniteDuration: not known.
  absl::Duration runtime = absl::InfiniteDuration();
  std::string tenant = {};                        // label `tenant`
  absl::Time queued_at = absl::InfiniteFuture();  // since when it waits
  // Of an elastic job: the numbers of ranks that it may start with, ascending, of which `ranks` is
  // the first: it waits only for so many. Empty: `ranks` alone.
  std::vector<int32_t> sizes = {};
  std::vector<AxisTraffic> traffic_of_largest = {};  // `traffic` with the last of `sizes`
  // StateRow.recovering_ranks: with up to so many ranks it may take spares.
  int32_t recovering = 0;
  int32_t share = spec::kWholeDevice;  // thousandths that each rank takes of its device

  QueueOrder order() const { return {priority, submit_sequence, deadline}; }
  GangShape shape() const {
    return {device, ranks, group, placement, reservations, "", ranks <= recovering, share};
  }
};

// An elastic job as one of so many ranks, one of its sizes: the data axis varies, and with it what
// is behind it in the numbering of ranks.
WaitingJob AtSize(const WaitingJob& job, int32_t ranks);

// Value type. Thread: one at a time. Adding and removing take O(log jobs).
class WaitingQueue {
 public:
  using Jobs = std::map<QueueOrder, WaitingJob>;
  using Queue = std::map<GangShape, Jobs>;

  void Add(WaitingJob job) {
    CHECK(where_.emplace(job.id, Place{job.queue, job.shape(), job.order()}).second)
        << "job " << job.id << " waits twice";
    if (job.not_before != absl::InfinitePast()) retries_.emplace(job.not_before, job.id);
    queues_[job.queue][job.shape()].emplace(job.order(), std::move(job));
  }
  // Does nothing when the job does not wait.
  void Remove(const JobId& id) {
    const auto where = where_.find(id);
    if (where == where_.end()) return;
    const auto queue = queues_.find(where->second.queue);
    const auto jobs = queue->second.find(where->second.shape);
    const auto job = jobs->second.find(where->second.order);
    retries_.erase({job->second.not_before, id});
    jobs->second.erase(job);
    if (jobs->second.empty()) queue->second.erase(jobs);
    if (queue->second.empty()) queues_.erase(queue);
    where_.erase(where);
  }
  bool Contains(const JobId& id) const { return where_.contains(id); }
  // Null when the job does not wait.
  const WaitingJob* Find(const JobId& id) const {
    const auto where = where_.find(id);
    if (where == where_.end()) return nullptr;
    const Place& place = where->second;
    return &queues_.find(place.queue)->second.find(place.shape)->second.find(place.order)->second;
  }
  // The jobs of the same queue that go before it. O(those).
  int64_t CountBefore(const WaitingJob& job) const {
    const auto queue = queues_.find(job.queue);
    if (queue == queues_.end()) return 0;
    int64_t before = 0;
    for (const auto& [shape, jobs] : queue->second) {
      before += std::distance(jobs.begin(), jobs.lower_bound(job.order()));
    }
    return before;
  }
  size_t size() const { return where_.size(); }
  // By queue name, then by shape; only queues and shapes with jobs.
  const std::map<std::string, Queue>& queues() const { return queues_; }

  // The jobs whose back-off has ended; each is returned once.
  std::vector<JobId> TakeRetries(absl::Time now) {
    std::vector<JobId> due;
    while (!retries_.empty() && retries_.begin()->first <= now) {
      due.push_back(retries_.begin()->second);
      retries_.erase(retries_.begin());
    }
    return due;
  }
  // The end of the back-off that ends first after `now`; InfiniteFuture when there is none.
  absl::Time NextRetry(absl::Time now) const {
    for (auto it = retries_.lower_bound({now, JobId()}); it != retries_.end(); ++it) {
      if (it->first > now) return it->first;
    }
    return absl::InfiniteFuture();
  }

 private:
  struct Place {
    std::string queue;
    GangShape shape;
    QueueOrder order;
  };

  std::map<std::string, Queue> queues_;
  std::map<JobId, Place> where_;
  std::set<std::pair<absl::Time, JobId>> retries_;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_SCHEDULER_WAITING_QUEUE_H_
