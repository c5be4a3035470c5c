// The workers of the cluster: their rows, sessions, and which attempt holds which of their slots.
#ifndef MUSTER_COORDINATOR_CORE_WORKERS_H_
#define MUSTER_COORDINATOR_CORE_WORKERS_H_

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "coordinator/core/core.h"
#include "coordinator/core/desired_list.h"
#include "coordinator/core/turn.h"
#include "coordinator/scheduler/slot_index.h"
#include "muster/v1/stored.pb.h"

namespace muster::coordinator {

// A rank that holds a slot or a part of it, from the durable placement until its daemon has proven
// the release or is lost.
struct SlotHolder {
  JobId job;
  Epoch epoch;
  int32_t rank = 0;
  int32_t share = kWholeDevice;  // thousandths of the device
};

struct WorkerEntry {
  v1::Worker row;  // durable, except last_heard and the numbers of slots
  std::optional<SessionId> session;
  absl::Time last_heard;
  // By device, those that are held: by one attempt, or by several whose shares are 1000 thousandths
  // at most together.
  std::map<std::string, std::vector<SlotHolder>> held;
  // By device: the jobs that wait and for which the slot is kept, held or not, with their shares.
  std::map<std::string, std::map<JobId, int32_t>> kept_for;

  // ---- of the current session
  DesiredList desired;
  bool takes_spec_once = false;    // Hello.protocol_version: DesiredAttempt.spec
  bool runs_commands = false;      // the same: JobSpec.command
  bool knows_memberships = false;  // the same: DesiredAttempt.membership
  bool shares_devices = true;  // the same: ResourceSpec.share; as in its last one until the next
  bool keeps_specs = false;    // the same: ObservedAttempt.has_spec
  // The attempts that it held when it last told, and whether it had their specs.
  std::map<std::pair<JobId, Epoch>, bool> observed;
  // The newest Desired left specs out that the daemon needs.
  bool specs_wait = false;
  // It was silent for lost_after and was not given up; set until it is heard again.
  bool kept = false;
  // Attempts with processes on this worker that the coordinator does not want there: they were
  // given up, or are of an earlier epoch. Until the daemon reports that they are gone, no slot of
  // the worker counts as free.
  std::set<std::string> stale_attempts;
  // Attempts that the daemon holds of another history of the cluster, where this one has the same
  // epoch of the job here: nothing that is told of them is about that.
  std::set<std::pair<JobId, Epoch>> foreign_attempts;

  WorkerId id() const { return WorkerId(row.name()); }
  bool Ready() const {
    return row.state() == v1::WORKER_STATE_READY && session.has_value() && stale_attempts.empty() &&
           !row.has_cordon();
  }
  // It would be ready if it were not cordoned or drained.
  bool InMaintenance() const {
    return row.state() == v1::WORKER_STATE_READY && session.has_value() && stale_attempts.empty() &&
           row.has_cordon();
  }
  // The jobs that hold a slot here.
  std::set<JobId> Jobs() const;
  // What is held of the device, in thousandths.
  int32_t HeldOf(const std::string& device) const;
};

// Whether the reservation, which is one of a worker, keeps this device of it.
bool Covers(const v1::Reservation& reservation, const std::string& device);
// Thousandths of devices, by whether they are of use to anybody.
struct FleetTally {
  int64_t held = 0;
  int64_t idle = 0;
  int64_t away = 0;         // their worker is not ready
  int64_t maintenance = 0;  // it is ready but for a cordon
  int64_t unusable = 0;     // on a ready worker

  int64_t all() const { return held + idle + away + maintenance + unusable; }
  void Add(const FleetTally& other, int sign);
  friend bool operator==(const FleetTally&, const FleetTally&) = default;
};

// An event about a worker and none of its ranks, not yet numbered or dated.
v1::Event AboutWorker(const std::string& worker, v1::EventKind kind, std::string message);

// Ordered by name. Bound: kWorkersMax.
class WorkerTable {
 public:
  WorkerEntry* Find(const WorkerId& id);
  const WorkerEntry* Find(const WorkerId& id) const;
  WorkerEntry* FindSession(SessionId session);
  const WorkerEntry* FindSession(SessionId session) const;
  // Adds the entry when it is new, in place of the worker that was lost longest ago when the table
  // is full. kResourceExhausted: there are kWorkersMax that are not lost.
  absl::StatusOr<WorkerEntry*> Add(const WorkerId& id, Batch& batch);
  void Recover(v1::Worker row, absl::Time now);
  // Requires: nothing is held.
  void Remove(const WorkerId& id, Batch& batch);
  // Every change of row.state() goes through it.
  void SetState(WorkerEntry& worker, v1::WorkerState state);
  int Count(v1::WorkerState state) const { return by_state_[state]; }

  // kInvalidArgument: there are no names, or too many. kNotFound: no worker has one of them.
  absl::Status CheckKnown(const std::vector<std::string>& names) const;

  void OpenSession(WorkerEntry& worker, SessionId session);
  void CloseSession(WorkerEntry& worker);

  // To be called before any worker is there.
  void SetTopology(TopologyRules topology) { topology_ = std::move(topology); }
  const TopologyRules& topology() const { return topology_; }
  // To be called after a change of devices, labels or reservations, or of what Ready() looks at.
  void Refresh(const WorkerEntry& worker);

  // `share`: thousandths of the device. Requires: so much of it is not held.
  void Hold(const v1::Placement& placement, const JobId& job, Epoch epoch, int32_t share);
  // Frees the slot if this attempt holds it.
  void Free(const v1::Placement& placement, const JobId& job, Epoch epoch);
  bool Holds(const v1::Placement& placement, const JobId& job, Epoch epoch) const;
  // Once it is not held any more, the slot counts as held by this job; where it is shared, so much
  // of it does from now on. Does nothing when the worker is unknown.
  void Keep(const WorkerId& id, const std::string& device, const JobId& job, int32_t share);
  // The slot is not kept any more, if it is for this job.
  void DropKept(const WorkerId& id, const std::string& device, const JobId& job);

  // Thousandths of devices that the job holds.
  int64_t HeldBy(const JobId& job) const;
  // Of all workers, lost ones too. Costs O(devices) of workers that changed since the last call.
  const FleetTally& Tally();
  // False: the tally, as of its last call, differs from what the entries say.
  bool TallyIsRight() const;

  static void Persist(const WorkerEntry& worker, Turn& turn);
  // Workers that would be Ready() by their rows, and are not: they are not connected, or have
  // processes of ended attempts.
  const std::set<WorkerId>& away() const { return away_; }
  // Those that are not lost and whose daemons cannot share devices.
  const std::set<WorkerId>& undivided() const { return undivided_; }
  // The slots of all workers that are not lost.
  SlotIndex& slots() { return slots_; }
  // False: the index of slots differs from what the entries say.
  bool SlotsAreRight() const;
  std::map<WorkerId, WorkerEntry>& entries() { return entries_; }
  const std::map<WorkerId, WorkerEntry>& entries() const { return entries_; }

 private:
  WorkerView ViewOf(const WorkerEntry& worker) const;
  static FleetTally TallyOf(const WorkerEntry& worker);

  TopologyRules topology_;
  std::map<WorkerId, WorkerEntry> entries_;
  SlotIndex slots_;
  std::map<SessionId, WorkerId> sessions_;
  std::set<WorkerId> away_;
  std::set<WorkerId> undivided_;
  std::map<JobId, int64_t> held_by_;  // none of the numbers is 0
  FleetTally tally_;
  std::map<WorkerId, FleetTally> tallies_;  // what each worker has added to tally_
  std::set<WorkerId> untallied_;            // workers that changed since
  std::array<int, v1::WorkerState_ARRAYSIZE> by_state_ = {};
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_WORKERS_H_
