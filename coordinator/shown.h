// What clients may see: the jobs and the newest event as of the last synced write. The core's own
// state runs ahead of the disk; this copy never does.
#ifndef MUSTER_COORDINATOR_SHOWN_H_
#define MUSTER_COORDINATOR_SHOWN_H_

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "base/loop.h"
#include "base/mutex.h"
#include "coordinator/metrics.h"
#include "muster/v1/job.pb.h"

namespace muster::coordinator {

// Someone who wants to look again when something changed.
class Watcher {
 public:
  virtual ~Watcher() = default;
  // On the watch loop.
  virtual void Wake() = 0;
};

// Thread-safe. Bound: the jobs that the core keeps, kWatchersMax watchers.
class Shown {
 public:
  // Wakes watchers on `watch_loop`; both outlive this object.
  Shown(Loop& watch_loop, Metrics& metrics) : watch_loop_(watch_loop), metrics_(metrics) {}

  struct Row {
    uint64_t submit_sequence;
    std::shared_ptr<const v1::Job> job;
  };

  // ---- the writer's side
  // `submit_sequence` is looked at for a new job only.
  void ShowJob(std::shared_ptr<const v1::Job> job, uint64_t submit_sequence);
  void ForgetJob(const std::string& id);
  void ShowEvent(const v1::Event& event);
  void SetLastEvent(uint64_t sequence);

  // ---- readers
  bool Has(const std::string& id) const;
  // By id, else the newest of that name; null when there is none.
  std::shared_ptr<const v1::Job> Find(const std::string& name_or_id) const;
  // Newest first, submitted before `before` (exclusive; 0 = from the newest).
  std::vector<Row> List(uint64_t before, size_t limit) const;
  uint64_t last_event() const;

  // ---- watchers
  // `job` is an id; empty = events. False: too many watchers.
  bool Watch(const std::string& job, std::weak_ptr<Watcher> watcher);
  // Forgets watchers that are gone.
  void Unwatch(const std::string& job);
  // Wakes every watcher of every job and of the events.
  void WakeAll();

 private:
  void Changed(const std::string& key) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void WakeChanged();
  void Prune(const std::string& key) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Loop& watch_loop_;
  Metrics& metrics_;
  mutable Mutex mutex_;
  std::map<std::string, Row> by_id_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, std::string> id_by_sequence_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::set<uint64_t>> sequences_by_name_ ABSL_GUARDED_BY(mutex_);
  uint64_t last_event_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<std::string, std::vector<std::weak_ptr<Watcher>>> watchers_ ABSL_GUARDED_BY(mutex_);
  size_t watcher_count_ ABSL_GUARDED_BY(mutex_) = 0;
  // Keys whose watchers the posted WakeChanged will wake.
  std::set<std::string> changed_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_SHOWN_H_
