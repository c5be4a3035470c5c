// The jobs that hold devices, with what the scheduler asks about them.
#ifndef MUSTER_COORDINATOR_SCHEDULER_RUNNING_JOBS_H_
#define MUSTER_COORDINATOR_SCHEDULER_RUNNING_JOBS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "absl/time/time.h"
#include "base/check.h"
#include "base/ids.h"
#include "coordinator/scheduler/waiting_queue.h"
#include "muster/v1/job.pb.h"

namespace muster::coordinator {

// How a running job may be resized.
struct Elasticity {
  WaitingJob gang;            // as it would wait; its sizes are those that it may have
  absl::Duration grow_after;  // PreemptionSpec.grow_after
  bool asked = false;         // by its user: it gets the one size that there is, and keeps it
};

// A job that holds slots.
struct RunningJob {
  std::string name;
  std::string queue;
  int32_t priority = 0;
  v1::DeviceKind device = v1::DEVICE_KIND_CPU;
  int32_t ranks = 0;
  absl::Time ends_at = absl::InfiniteFuture();   // at its measured pace; InfiniteFuture: not known
  bool stopping = false;                         // its attempt is being ended
  absl::Time started_at = absl::InfinitePast();  // when it got its devices
  // What it has done since then is lost with the attempt: its newest checkpoint, else its start.
  absl::Time saved_at = absl::InfinitePast();
  absl::Duration min_runtime = absl::ZeroDuration();    // PreemptionSpec.min_runtime
  std::string tenant = {};                              // label `tenant`
  std::shared_ptr<const Elasticity> elastic = nullptr;  // null: it keeps its size
  int32_t share = spec::kWholeDevice;  // thousandths that each rank takes of its device

  friend bool operator==(const RunningJob&, const RunningJob&) = default;
};

// Value type. Thread: one at a time. Changes take O(log jobs).
class RunningJobs {
 public:
  // Jobs of one kind of device, queue and priority.
  struct Peers {
    std::set<JobId> jobs;
    int64_t ranks = 0;
  };
  using ByPriority = std::map<int32_t, Peers>;

  // Adds or replaces.
  void Put(const JobId& id, RunningJob job) {
    Remove(id);
    Index(id, job, 1);
    jobs_.emplace(id, std::move(job));
  }
  // Does nothing when the job holds no slot.
  void Remove(const JobId& id) {
    const auto found = jobs_.find(id);
    if (found == jobs_.end()) return;
    Index(id, found->second, -1);
    jobs_.erase(found);
  }
  bool Contains(const JobId& id) const { return jobs_.contains(id); }
  // Null when the job holds no slot.
  const RunningJob* Find(const JobId& id) const {
    const auto found = jobs_.find(id);
    return found == jobs_.end() ? nullptr : &found->second;
  }
  const std::map<JobId, RunningJob>& all() const { return jobs_; }
  // Those that may be resized and are not being stopped.
  const std::set<JobId>& elastic() const { return elastic_; }
  // Those that are not being stopped, the smallest priority first.
  const ByPriority& Of(v1::DeviceKind device, const std::string& queue) const {
    static const auto* const none = new ByPriority();
    const auto found = by_priority_.find({device, queue});
    return found == by_priority_.end() ? *none : found->second;
  }
  // Those that are not being stopped and whose end is known, the earliest first.
  const std::set<std::pair<absl::Time, JobId>>& by_end() const { return by_end_; }
  // Those that are being stopped, and the ranks that they have in all.
  const Peers& Stopping(v1::DeviceKind device) const {
    static const auto* const none = new Peers();
    const auto found = stopping_.find(device);
    return found == stopping_.end() ? *none : found->second;
  }

 private:
  void Index(const JobId& id, const RunningJob& job, int sign) {
    if (job.stopping) {
      Count(stopping_[job.device], id, job, sign);
      return;
    }
    if (job.elastic != nullptr) {
      if (sign > 0) {
        elastic_.insert(id);
      } else {
        elastic_.erase(id);
      }
    }
    if (job.ends_at != absl::InfiniteFuture()) {
      if (sign > 0) {
        by_end_.emplace(job.ends_at, id);
      } else {
        by_end_.erase({job.ends_at, id});
      }
    }
    const std::pair<v1::DeviceKind, std::string> queue(job.device, job.queue);
    ByPriority& of_queue = by_priority_[queue];
    Count(of_queue[job.priority], id, job, sign);
    if (of_queue[job.priority].jobs.empty()) of_queue.erase(job.priority);
    if (of_queue.empty()) by_priority_.erase(queue);
  }
  static void Count(Peers& peers, const JobId& id, const RunningJob& job, int sign) {
    peers.ranks += sign * job.ranks;
    if (sign > 0) {
      peers.jobs.insert(id);
    } else {
      peers.jobs.erase(id);
    }
  }

  std::map<JobId, RunningJob> jobs_;
  std::map<std::pair<v1::DeviceKind, std::string>, ByPriority> by_priority_;
  std::map<v1::DeviceKind, Peers> stopping_;
  std::set<JobId> elastic_;
  std::set<std::pair<absl::Time, JobId>> by_end_;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_SCHEDULER_RUNNING_JOBS_H_
