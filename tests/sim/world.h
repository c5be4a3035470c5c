// A whole cluster in one thread: the coordinator's real Core on a store that can lose what was not
// synced, the real cores of the daemons on disks of their own, simulated rank processes that step
// together like a training gang, users that submit and cancel, and a network between them. All
// randomness comes from one seed, so that a seed reproduces a bug.
//
// The faults are those that the design promises to survive: crashes of any process at any time
// (also between a write and its sync), hosts that go down, networks that break, delay, repeat and
// reorder messages, or carry them in one direction alone, racks that are cut off, daemons that are
// stopped for a while, operators that cordon, drain and reserve, and that restore a backup, links
// between ranks that break during bootstrap or training, disks of the coordinator and of daemons
// that refuse writes or are slow, hosts that come back with an empty disk, workers that fail or
// refuse while they prepare an attempt, daemons of an older version, and clocks that differ and
// step. A sync that returned is durable.
#ifndef MUSTER_TESTS_SIM_WORLD_H_
#define MUSTER_TESTS_SIM_WORLD_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/rng.h"
#include "coordinator/core/core.h"
#include "coordinator/scheduler/queue_tree.h"
#include "coordinator/store/store.h"
#include "proto/spec/share.h"
#include "tests/sim/queue.h"
#include "worker/daemon/core/daemon_core.h"

namespace muster::sim {

enum class Faults {
  kNone,
  kAll,
  // Only the coordinator and daemons are killed; they start again soon.
  kServices,
  // Only ranks and whole gangs are killed.
  kRanks,
  // Only the coordinator is stopped (SIGSTOP) for a while, or cut off from all workers or from all
  // of a rack or block that has three or more. Half of the clusters have such racks or blocks.
  kReachability,
  // kServices, and now and then the coordinator comes back with an older state, from a backup.
  kRestore,
};

struct Options {
  uint64_t seed = 1;
  bool trace = false;  // print each event
  Faults faults = Faults::kAll;
  // kDay: 24 hours of a small cluster that trains, with steps of seconds and a fault every ten
  // minutes, so that it meets what takes hours. kLarge: 20 to 50 workers and 50 to 200 jobs.
  // In these two, what is checked after every event otherwise is checked after some.
  enum class Scale { kSmall, kLarge, kDay };
  Scale scale = Scale::kSmall;
  bool large() const { return scale == Scale::kLarge; }
  bool day() const { return scale == Scale::kDay; }
  // Jobs share devices. Daemons of the version before do not know of that.
  bool shares() const { return seed % 3 == 0; }
};

struct Result {
  std::string violation;  // empty: every invariant held and every job ended
  uint64_t trace_hash = 0;
  int64_t events = 0;
  absl::Duration time;  // simulated
  // How often each fault and result happened, so that tests can require that they do.
  std::map<std::string, int64_t> counts;
};

// Runs one cluster from empty to the end of its last job.
Result Simulate(const Options& options);

using JobEpoch = std::pair<std::string, uint64_t>;
// The ranks of an attempt that can meet.
struct Members {
  JobEpoch attempt;
  uint32_t membership = 1;
};

// A rank process on a machine. It survives its daemon.
struct Process {
  worker::RankKey key;
  v1::RankAssignment assignment;
  v1::RankAssignment written;  // the newest one in its run directory
  std::string worker;
  std::string device;
  int32_t share = spec::kWholeDevice;  // thousandths of it
  int64_t pid = 0;
  bool alive = true;
  bool terminating = false;  // got SIGTERM: ends at the next step boundary
  bool stopped = false;      // at a step boundary, together with its gang
  bool stray = false;        // a child that survived its rank until the release is verified
  v1::RankExit exit;
  v1::RankProgress progress;
  int64_t step = 0;
  bool bootstrapped = false;                  // its communicators are up
  std::vector<v1::CheckpointRecord> commits;  // requests left in its run directory
  uint64_t generation = 0;  // another one from its end or new start on: later work is dropped
};

struct Machine {
  std::string name;
  int slots = 0;
  std::string rack;
  std::string block;                             // empty: none
  std::map<std::string, std::string> disk;       // the daemon's records
  std::map<worker::RankKey, Process> processes;  // also ended ones: their exit files
  std::unique_ptr<worker::DaemonCore> daemon;    // null: the daemon is dead
  bool up = true;                                // the host
  bool partitioned = false;                      // from the coordinator, in one direction at least
  bool mute = false;                             // what it sends is lost
  bool deaf = false;                             // what it would receive is lost
  bool older = false;                            // its daemon is of the version before
  int disks = 1;                                 // it has had so many
  absl::Duration skew;                           // of its clock
  uint64_t generation = 0;                       // of the daemon process
  std::optional<uint64_t> connection;
  absl::Time timer = absl::InfiniteFuture();
  absl::Time disk_slow_until = absl::InfinitePast();
  absl::Time disk_fails_until = absl::InfinitePast();
  // Outputs whose actions wait for the disk: for their own records or for those before them.
  std::deque<worker::DaemonOutput> unwritten;
  bool writing = false;
  // The newest that was carried out; it is sent again as a heartbeat while others wait.
  std::optional<worker::SendToCoordinator> observed;
  bool paused = false;                      // the daemon does not run: what arrives waits
  std::deque<worker::DaemonEvent> arrived;  // during the pause
  size_t written = 0;                       // outputs whose write ended during the pause
  struct Call {
    worker::RankKey key;
    uint64_t generation = 0;  // of the process
    worker::RankRequest request;
  };
  std::map<uint64_t, Call> calls;  // open calls of rank processes, by call id
};

// One stream between a daemon and a coordinator. A side may take a broken stream for open.
struct Connection {
  uint64_t id = 0;
  std::string worker;
  uint64_t daemon_generation = 0;
  uint64_t coordinator_generation = 0;
  bool worker_open = true;
  bool coordinator_open = true;
  absl::Time to_coordinator = absl::InfinitePast();  // arrival of the last message, for order
  absl::Time to_worker = absl::InfinitePast();
};

class World {
 public:
  explicit World(const Options& options);
  Result Play();

 private:
  // ---- coordinator (coordinator.cc)
  void StartCoordinator();
  void ReadJobsBack(uint64_t generation);
  void ReadEventsBack();
  void SeeEvent(const v1::Event& event);
  // Checks the event against what the events before it say.
  void FoldEvent(const v1::Event& event);
  void CrashCoordinator(absl::string_view why);
  void TakeBackup();
  void RestoreBackup();
  // Restores the backup, or takes a newer one.
  void ReturnToBackup();
  // After a restore: what the checks know of the history is that of the restored one.
  void FoldRestoredEvents();
  // The process does not run for `time`: what arrives waits.
  void PauseCoordinator(absl::Duration time);
  void ResumeCoordinator();
  void Feed(coordinator::CoreEvent event);
  void CarryOut(coordinator::CoreOutput output);
  void SyncDone();
  void Release(const coordinator::CoreAction& action);
  void Receive(const coordinator::ReplyAction& reply);

  // ---- network (network.cc)
  absl::Duration Delay();
  void Dial(Machine& machine);
  void ToCoordinator(Connection& connection, v1::FromWorker message);
  void ToWorker(Connection& connection, v1::FromCoordinator message);
  void Break(uint64_t connection);
  void CloseWorkerSide(uint64_t connection);
  void CloseCoordinatorSide(uint64_t connection);

  // ---- machines (machines.cc)
  void StartDaemon(Machine& machine);
  void KillDaemon(Machine& machine);
  void KillHost(Machine& machine);
  // The process does not run for `time`; its ranks do.
  void PauseDaemon(Machine& machine, absl::Duration time);
  void ResumeDaemon(Machine& machine);
  void StrikeDisk(Machine& machine);
  void Feed(Machine& machine, worker::DaemonEvent event);
  void CarryOut(Machine& machine, worker::DaemonOutput output);
  // False: the daemon died, or its disk refused a record, which ends it.
  bool WriteRecords(Machine& machine, std::vector<worker::DaemonRecord>& records);
  static void ToDisk(Machine& machine, worker::DaemonRecord& record);
  void Await(Machine& machine, worker::DaemonOutput output);
  void WriteNext(Machine& machine);
  void DiskDone(Machine& machine, size_t outputs);
  void LoseUnwritten(Machine& machine);
  void Carry(Machine& machine, const std::vector<worker::DaemonAction>& actions);
  void Do(Machine& machine, const worker::PrepareAttempt& action);
  void Do(Machine& machine, const worker::StartRank& action);
  void Do(Machine& machine, const worker::AttachRank& action);
  void Do(Machine& machine, const worker::ReassignRank& action);
  void Do(Machine& machine, const worker::SignalRank& action);
  void Do(Machine& machine, const worker::VerifyRelease& action);
  void Do(Machine& machine, const worker::AttemptForgotten& action);
  void Do(Machine& machine, const worker::SendToCoordinator& action);
  void Do(Machine& machine, const worker::ReplyToRank& action);
  void Do(Machine& machine, const worker::Reconnect& action);
  void Do(Machine& machine, const worker::ArmTimer& action);
  // Feeds `event` to the daemon after `delay`, unless its process has ended by then.
  void Answer(Machine& machine, absl::Duration delay, worker::DaemonEvent event);

  // ---- rank processes (ranks.cc)
  void Launch(Machine& machine, Process& process);
  // Goes on as the same process, in the membership of its newest assignment.
  void StartAnew(Process& process);
  void TryStep(const Members& gang);
  void FinishStep(const Members& gang, int64_t step);
  void Finish(const Members& gang);
  void StopAtBoundary(const Members& gang);
  void AskToStop(Process& process);
  void Save(const Members& gang, int64_t step);
  void Report(Process& process);
  // Reports again and again until its gang steps, which reports too.
  void KeepReporting(const worker::RankKey& key, uint64_t generation);
  // Calls the daemon until it has answered OK, as DaemonClient does.
  void CallDaemon(const worker::RankKey& key, uint64_t generation, worker::RankRequest request);
  void Answered(const worker::RankKey& key, uint64_t generation, const worker::RankRequest& request,
                const absl::StatusOr<worker::RankResponse>& response);
  void End(Process& process, v1::Cause cause, int code, int signal, const std::string& message);
  // The two cannot reach each other any more: one of them, or both, end with `cause` and say so.
  void BreakLink(Process& process, Process& peer, v1::Cause cause);
  // Null: it has ended, or started anew. Where ranks were replaced, several machines have a process
  // of one key.
  Process* Find(const worker::RankKey& key, uint64_t generation);
  std::vector<Process*> Gang(const Members& gang);

  // ---- users and faults (play.cc)
  void Submit(int number);
  struct Submission;
  void SubmitArray(int number, const Submission& like, Rng rng);
  void TrySubmitArray(const std::string& request_id, std::vector<v1::JobSpec> tasks);
  void TakeArrayReply(const std::string& request_id, const coordinator::ReplyAction& reply);
  void AddBounds(int number, v1::JobSpec& spec);
  void TrySubmit(const std::string& request_id, v1::JobSpec spec);
  void TryCancel(const std::string& id);
  // False: it has ended, or was forgotten in a restore, so that its user wants nothing of it.
  bool Awaited(const std::string& id) const;
  // False: no coordinator is there, or one that may not know the queues again.
  bool MaySubmit() const;
  // Drops what it waits for and a restore has forgotten.
  void DropForgotten(v1::JobSpec& spec) const;
  void DefineQueues();
  void TryApplyQueues();
  void ScheduleChange();
  void ChangeSomeJob();
  void TryRelease(const std::string& id);
  // A worker fails while it prepares an attempt or starts its ranks.
  void StrikeWhilePreparing(const std::string& name);
  // What operators do: some worker is cordoned, drained or reserved for a while.
  void DisturbFleet(Machine& machine, uint64_t kind);
  void AskFleet(coordinator::FleetEvent::Request request);
  // Asks again and again that every worker gets ranks of every job.
  void OpenFleet();
  void ScheduleFault();
  void InjectFault();
  // All workers of the rack or block of this one.
  void CutOffDomain(const Machine& machine);
  // What the machine sends, what it would receive, or both is lost for `time`.
  enum class Cut { kBoth, kSent, kReceived };
  void CutOff(Machine& machine, absl::Duration time, Cut cut = Cut::kBoth);
  void Heal();
  // True when every job has ended and no process or fault is left.
  bool Finished() const;
  // True while network, disks and launches may fail: in a day for some minutes around each fault.
  bool Disturbed() const {
    return faults_on_ && options_.faults == Faults::kAll &&
           (!options_.day() || queue_.now() < rough_until_);
  }
  // A random time up to `soon_ms`; with Faults::kAll sometimes up to `late_ms`.
  absl::Duration Outage(double late_chance, uint64_t late_ms, uint64_t soon_ms);

  // ---- checks (checks.cc)
  void CheckAll();
  void CheckMachines();
  void CheckDesired(const std::string& worker, const v1::Desired& desired);
  void CheckReplay(const Process& process, int64_t replayed);
  void CheckFencing(const v1::Event& event);
  void CheckMembership(const v1::Event& event);
  void CheckCordons(const v1::Event& event);
  void CheckReservations(const coordinator::CoreOutput& output);
  void CheckTenants(const v1::Event& event);
  void CheckBudget(const v1::Job& job);
  void CheckHistory(const v1::Job& job);
  void CheckJob(const v1::Job& job, bool history);
  void Publish(const coordinator::JobChanged& change);
  void CheckQueues();
  void CheckRecovery();
  // The device time that is stored is that of all devices, to the millisecond.
  void CheckLedger();
  void CheckEnd();
  void Violate(const std::string& what);

  void Trace(absl::string_view line);
  void Count(const std::string& what) { ++result_.counts[what]; }

  const Options options_;
  Rng rng_;
  Queue queue_;
  Result result_;

  std::unique_ptr<coordinator::MemoryStore> store_;
  // A copy of the durable state, and what users knew then.
  struct Backup {
    std::unique_ptr<coordinator::MemoryStore> store;
    std::map<std::string, int64_t> committed;
    std::map<std::string, uint64_t> epochs;
    std::map<std::string, v1::JobState> final_states;
    bool restored = false;  // before
  };
  std::optional<Backup> backup_;
  bool returned_ = false;  // a backup was restored in this run
  // Jobs that were live in a restored backup: their epochs leap.
  struct Leap {
    uint64_t epoch = 0;  // in the backup
    uint64_t floor = 0;  // of those that follow
  };
  std::map<std::string, Leap> leapt_;
  // The clock of the coordinator's process. It runs evenly; the wall clock steps between processes.
  absl::Time CoreNow() const { return queue_.now() + core_skew_; }
  absl::Duration core_skew_;
  absl::Time rough_until_ = absl::InfinitePast();      // in a day
  absl::Time slow_disk_until_ = absl::InfinitePast();  // of the coordinator
  std::unique_ptr<coordinator::Core> core_;            // null: the coordinator is dead
  uint64_t coordinator_generation_ = 0;
  std::deque<coordinator::CoreOutput> unsynced_;
  bool syncing_ = false;
  bool crash_in_write_ = false;  // the coordinator dies while it writes its next outputs
  absl::Time core_timer_ = absl::InfiniteFuture();  // by CoreNow()
  bool paused_ = false;
  std::deque<coordinator::CoreEvent> arrived_;  // during the pause
  bool synced_ = false;                         // a sync ended during the pause
  uint64_t next_id_ = 1;

  v1::QueuePolicy policy_;
  coordinator::QueueTree tree_;
  bool queues_applied_ = false;  // the coordinator has acknowledged them
  uint64_t queues_call_ = 0;

  std::map<std::string, Machine> machines_;
  std::map<uint64_t, Connection> connections_;

  // A job from its user's point of view.
  struct Submission {
    v1::JobSpec spec;
    std::string request_id;
    std::string id;  // once acknowledged
    bool cancel = false;
    bool feasible = true;
    bool poisoned = false;  // its ranks fail with a user error
  };
  std::map<std::string, Submission> submissions_;  // by request id
  std::map<uint64_t, std::string> submit_calls_;   // call id -> request id
  std::map<uint64_t, std::string> array_calls_;    // call id -> request id of an array
  std::map<std::string, std::string> array_ids_;   // by request id, once acknowledged

  // What really happened, for the checks to compare with.
  std::set<std::pair<std::string, int64_t>> saved_;  // (checkpoint path, step) complete on disk
  std::map<std::string, int64_t> committed_;         // job id -> newest acknowledged step
  // job id -> epoch -> newest step that it committed, by the events
  std::map<std::string, std::map<uint64_t, int64_t>> committed_by_;
  std::map<std::string, uint64_t> ended_epochs_;   // job id -> newest whose end was published
  std::map<std::string, uint64_t> epochs_;         // job id -> newest epoch seen by anybody
  std::map<JobEpoch, uint32_t> memberships_;       // by the events; of those that were replaced
  std::map<JobEpoch, int64_t> restored_;           // step an attempt started from
  std::set<JobEpoch> stopped_;                     // attempts that stopped at a step boundary
  std::set<JobEpoch> lost_;                        // attempts with a rank on a lost worker
  std::map<JobEpoch, int64_t> reached_;            // step an attempt got to
  std::map<std::string, int64_t> finished_ranks_;  // job id -> ranks that trained all steps
  std::map<std::string, v1::Job> published_;       // by id; of this coordinator
  std::set<std::pair<std::string, std::string>> started_after_;  // job id, entry of its `after`
  std::map<std::string, v1::JobState> final_states_;             // job id -> as first acknowledged
  std::set<JobEpoch> allocated_;                                 // every attempt that ever was
  std::set<std::string> cordoned_;                               // workers, by the events
  // By attempt: the worker and device of each rank, as the coordinator placed it last.
  std::map<JobEpoch, std::map<int32_t, std::pair<std::string, std::string>>> placed_;
  // What attempts hold, by the events.
  struct Holds {
    int queue = coordinator::QueueTree::kNone;
    int64_t thousandths = 0;  // of devices
    std::string tenant;
  };
  std::map<JobEpoch, Holds> holding_;
  uint64_t last_event_ = 0;
  bool faults_on_ = true;
  uint64_t hash_ = 14695981039346656037ull;  // FNV-1a
};

}  // namespace muster::sim

#endif  // MUSTER_TESTS_SIM_WORLD_H_
