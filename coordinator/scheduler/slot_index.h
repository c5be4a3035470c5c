// The slots of a cluster with the sums that placement needs, kept up to date change by change.
#ifndef MUSTER_COORDINATOR_SCHEDULER_SLOT_INDEX_H_
#define MUSTER_COORDINATOR_SCHEDULER_SLOT_INDEX_H_

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "base/ids.h"
#include "muster/v1/schedule.pb.h"

namespace muster::coordinator {

struct SlotView {
  std::string device;  // "cpu:0"
  v1::DeviceKind kind = v1::DEVICE_KIND_CPU;
  bool usable = true;
  JobId held_by = {};  // empty: by none

  bool held() const { return !held_by.value().empty(); }
  bool free() const { return usable && !held(); }
  friend bool operator==(const SlotView&, const SlotView&) = default;
};
struct WorkerView {
  WorkerId id;
  bool ready = false;                                 // only ready workers get new ranks
  v1::AwayReason away = v1::AWAY_REASON_UNSPECIFIED;  // why it is not ready
  std::string ends_attempt = {};                      // AwayWorker.ends_attempt
  std::vector<SlotView> slots;                        // in device order

  friend bool operator==(const WorkerView&, const WorkerView&) = default;
};

// Value type. Thread: one at a time. A change of a worker costs O(its slots + log workers).
class SlotIndex {
 public:
  // All slots of one kind.
  struct Kind {
    int64_t total = 0;
    int64_t free = 0;  // on ready workers
    // Workers by how many slots of this kind they have.
    std::map<int, int> workers_by_total;
    // Ready workers by how many free slots of this kind they have, without those that have none.
    std::map<int, std::set<WorkerId>> workers_by_free;
    std::map<JobId, int64_t> held;  // slots on ready workers, by the job that holds them
    std::set<WorkerId> away;        // workers that are not ready
    int64_t away_slots = 0;

    friend bool operator==(const Kind&, const Kind&) = default;
  };

  // Adds or replaces a worker.
  void Put(WorkerView worker);
  void Remove(const WorkerId& id);
  // Null when the worker is unknown.
  const WorkerView* Find(const WorkerId& id) const;
  // Marks a slot as held by this job; with an empty id, by none. Does nothing when the worker or
  // the device is unknown.
  void SetHolder(const WorkerId& id, const std::string& device, const JobId& job);

  bool empty() const { return workers_.empty(); }
  const std::map<WorkerId, WorkerView>& workers() const { return workers_; }
  // Empty sums for a kind that no worker has.
  const Kind& Of(v1::DeviceKind kind) const;
  // The workers on which the job holds slots.
  const std::set<WorkerId>& WorkersOf(const JobId& job) const;

  // Changes that hold for a while: all are taken back at once, when it is destroyed at the latest.
  class Trial {
   public:
    explicit Trial(SlotIndex& index) : index_(index) {}
    ~Trial() { Rollback(); }
    Trial(const Trial&) = delete;
    Trial& operator=(const Trial&) = delete;
    const SlotIndex& index() const { return index_; }
    // Takes up to `count` free slots of this kind on a worker, in device order; returns their
    // devices.
    std::vector<std::string> Take(const WorkerId& id, v1::DeviceKind kind, int count,
                                  const JobId& job);
    // Frees every slot that the job holds.
    void Release(const JobId& job);
    void Rollback();

   private:
    SlotIndex& index_;
    std::vector<std::tuple<WorkerId, std::string, JobId>> before_;  // who held what was changed
  };

  friend bool operator==(const SlotIndex& a, const SlotIndex& b) {
    return a.workers_ == b.workers_ && a.kinds_ == b.kinds_ && a.workers_of_ == b.workers_of_;
  }

 private:
  // Adds what a worker contributes to the sums, or takes it away.
  void Count(const WorkerView& worker, int sign);
  template <typename Change>
  void Update(const WorkerId& id, Change change);

  std::map<WorkerId, WorkerView> workers_;
  std::map<v1::DeviceKind, Kind> kinds_;            // those that a worker has
  std::map<JobId, std::set<WorkerId>> workers_of_;  // those that hold a slot
};

// Slots of one kind that new ranks can take; 0 on a worker that is not ready.
int FreeSlots(const WorkerView& worker, v1::DeviceKind kind);
// Slots of one kind that it has.
int TotalSlots(const WorkerView& worker, v1::DeviceKind kind);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_SCHEDULER_SLOT_INDEX_H_
