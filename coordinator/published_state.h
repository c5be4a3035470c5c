// The published read model: the jobs and the newest event as of the last synced write. Clients read
// this copy, since the core's own state runs ahead of the disk.
#ifndef MUSTER_COORDINATOR_PUBLISHED_STATE_H_
#define MUSTER_COORDINATOR_PUBLISHED_STATE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "base/loop.h"
#include "base/mutex.h"
#include "coordinator/core/core.h"
#include "coordinator/metrics.h"
#include "muster/v1/job.pb.h"

namespace muster::coordinator {

// A reader that is told when something changed, so that it reads again.
class Watcher {
 public:
  virtual ~Watcher() = default;
  // Called on the watch loop.
  virtual void Wake() = 0;
};

// Thread-safe. Bounds: the jobs that the core keeps, kWatchersMax watchers.
class PublishedState {
 public:
  // Wakes watchers on `watch_loop`; both outlive this object.
  PublishedState(Loop& watch_loop, Metrics& metrics) : watch_loop_(watch_loop), metrics_(metrics) {}

  struct Row {
    uint64_t submit_sequence;
    std::shared_ptr<const v1::Job> job;
  };

  // ---- for the writer
  // Adds a job, or replaces the parts of it that changed. `submit_sequence` counts when the job is
  // new. Returns the state of the job before; JOB_STATE_UNSPECIFIED when it is new.
  v1::JobState PublishJob(const JobChanged& change);
  void RemoveJob(const std::string& id);
  void PublishEvent(const v1::Event& event);
  void SetWorkers(std::vector<v1::Worker> workers);
  void SetFleetUsage(v1::Usage usage);
  // Events up to `sequence` are durable; a lower number than before changes nothing.
  void SetLastEvent(uint64_t sequence);

  // ---- for readers
  // Whether a job has this id or name.
  bool Has(const std::string& name_or_id) const;
  // The whole job, put together from its parts. By id, else the newest job of that name; null when
  // there is none.
  std::shared_ptr<const v1::Job> Find(const std::string& name_or_id) const;
  // kNotFound for a job that Find does not know, with the nearest of at most kNearestNamesMax names
  // of similar length: those that come next to it in alphabetical order. Of an array it says that
  // it is one.
  absl::Status NotFound(const std::string& name_or_id) const;
  // At most `limit` jobs that were submitted before `before` (exclusive; 0 = all) and of which
  // `wanted` is true, newest first. `wanted` is called under the lock. `summary`, `live`: as of
  // ListJobsRequest.
  std::vector<Row> List(uint64_t before, size_t limit,
                        absl::FunctionRef<bool(const v1::JobSpec&)> wanted, bool summary = false,
                        bool live = false) const;
  std::vector<Row> List(uint64_t before, size_t limit) const {
    return List(before, limit, [](const v1::JobSpec&) { return true; });
  }
  // Every job that is not finished, in no particular order.
  std::vector<JobView> UnfinishedJobs() const;
  // As of the last second or two.
  std::shared_ptr<const std::vector<v1::Worker>> workers() const;
  // What the devices that no attempt holds are used for.
  v1::Usage fleet_usage() const;
  uint64_t last_event() const;

  // ---- for watchers
  // Wakes `watcher` when the job with the id `job` changes, or when events were added if `job` is
  // empty. False: there are kWatchersMax watchers already.
  bool Watch(const std::string& job, std::weak_ptr<Watcher> watcher);
  // Drops the destroyed watchers of `job`.
  void DropExpiredWatchers(const std::string& job);
  // Wakes every watcher of every job and of the events.
  void WakeAll();

 private:
  struct Stored {
    uint64_t submit_sequence;
    JobView view;  // with JobPart::kState
  };

  // Null when there is none.
  const Stored* FindLocked(const std::string& name_or_id) const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  std::vector<std::string> SimilarNames(const std::string& name) const;
  void MarkChanged(const std::string& key) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void WakeChanged();

  Loop& watch_loop_;
  Metrics& metrics_;
  mutable Mutex mutex_;
  std::map<std::string, Stored> by_id_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, std::string> id_by_sequence_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::set<uint64_t>> sequences_by_name_ ABSL_GUARDED_BY(mutex_);
  std::map<size_t, std::set<std::string>> names_by_length_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<const std::vector<v1::Worker>> workers_ ABSL_GUARDED_BY(mutex_) =
      std::make_shared<const std::vector<v1::Worker>>();
  v1::Usage fleet_usage_ ABSL_GUARDED_BY(mutex_);
  uint64_t last_event_ ABSL_GUARDED_BY(mutex_) = 0;
  // By job id; "" holds the watchers of events.
  std::map<std::string, std::vector<std::weak_ptr<Watcher>>> watchers_ ABSL_GUARDED_BY(mutex_);
  size_t watcher_count_ ABSL_GUARDED_BY(mutex_) = 0;
  // Keys whose watchers the posted WakeChanged() will wake.
  std::set<std::string> changed_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_PUBLISHED_STATE_H_
