// The worker daemon's core: a deterministic state machine on one thread. An event and a time go in,
// an output comes out: records that must be durable first, then actions that others can see.
// It does no I/O, reads no clock, takes no lock. The shell (daemon.h) carries the output out; the
// simulator drives the same class with simulated time, network, disk and processes.
//
// It makes what the machine runs equal to what the coordinator wants (Desired), level-triggered:
// any message may be lost, repeated or come late. It never restarts a rank, and never ends one
// because the coordinator is out of reach: only a Desired of the current session can do that.
#ifndef MUSTER_WORKER_AGENT_AGENT_CORE_H_
#define MUSTER_WORKER_AGENT_AGENT_CORE_H_

#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/ids.h"
#include "muster/v1/daemon_state.pb.h"
#include "muster/v1/job.pb.h"
#include "muster/v1/rank.pb.h"
#include "muster/v1/session.pb.h"

namespace muster::worker {

// Chosen by the shell; names one open stream to the coordinator. Never reused by a process.
using SessionId = StrongId<struct SessionIdTag, uint64_t>;
// Chosen by the shell; names one waiting caller of RankService.
using CallId = StrongId<struct CallIdTag, uint64_t>;

struct AttemptKey {
  JobId job;
  Epoch epoch;
  friend auto operator<=>(const AttemptKey&, const AttemptKey&) = default;
};
// One rank of one attempt: the unit that is started, signalled and reaped.
struct RankKey {
  AttemptKey attempt;
  int32_t rank = 0;
  friend auto operator<=>(const RankKey&, const RankKey&) = default;
};
// "gpt-kjv-x7k2p epoch 3 rank 1", for messages.
std::string ToString(const AttemptKey& key);
std::string ToString(const RankKey& key);
// "<job id>.e<epoch>", safe as a file name whatever the id holds.
std::string DirectoryName(const AttemptKey& key);
// "<job id>.e<epoch>/rank-<n>", under AgentConfig::attempts_directory.
std::string RunDirectoryName(const RankKey& key);

struct AgentConfig {
  v1::Hello hello;  // all but cluster_id and observed: who this daemon is and what it offers
  Incarnation incarnation;
  // Copied into each RankAssignment.
  std::string rank_socket;
  std::string cache_directory;     // where ranks keep what later ones can use
  std::string attempts_directory;  // run directories are ATTEMPTS/<job id>.e<epoch>/rank-<n>
  int32_t threads_per_slot = 1;    // for a spec that asks for 0 threads
  std::string rank_metrics_address = "127.0.0.1:0";  // HOST:0, each rank gets a port of its own
  std::string rank_ports;                            // "20000-20999"; empty = any

  // Until Welcome says otherwise.
  absl::Duration heartbeat_interval = absl::Milliseconds(500);
  // Progress alone (steps, loss) is reported at most this often; state changes at once.
  absl::Duration progress_interval = absl::Milliseconds(200);
  // A session without Welcome for this long is dropped and dialled again.
  absl::Duration welcome_timeout = absl::Seconds(5);
  // A checkpoint commit without a verdict is sent again this often.
  absl::Duration commit_resend_interval = absl::Seconds(5);
  // From SIGTERM to SIGKILL when Desired does not say.
  absl::Duration stop_grace = absl::Seconds(10);
};

// ---- events -------------------------------------------------------------------------------------
struct SessionUp {  // a stream is open; nothing has been sent on it
  SessionId session;
  // As of this dial (v1::Hello); empty: not known, those of the dial before stay.
  std::string address = {};
  std::string outside_address = {};
};
struct SessionDown {
  SessionId session;
};
struct CoordinatorMessage {
  SessionId session;
  v1::FromCoordinator message;  // anything but a log request, which the shell answers from disk
};
struct AttemptPrepared {  // answer to PrepareAttempt
  AttemptKey attempt;
  absl::Status status;
  v1::Cause cause = v1::CAUSE_UNSPECIFIED;  // when not OK
};
// Answers to StartRank and AttachRank: exactly one of started, exited, or "not started".
struct RankStarted {
  RankKey rank;
  int64_t pid = 0;
  // Commit requests that the rank left in its run directory while no daemon took them.
  std::vector<v1::CheckpointRecord> commits = {};
};
struct RankNotStarted {
  RankKey rank;
  absl::Status why;  // OK: AttachRank found that it had never been started
  v1::Cause cause = v1::CAUSE_UNSPECIFIED;
};
struct RankExited {  // after RankStarted, or in its place when it ended before anybody looked
  RankKey rank;
  int64_t pid = 0;
  v1::RankExit exit;
  std::optional<v1::RankProgress> progress;        // from the rank's own exit report
  std::vector<v1::CheckpointRecord> commits = {};  // as in RankStarted
};
struct ReleaseProven {  // answer to VerifyRelease: no process of the rank is left
  RankKey rank;
};
using RankRequest = std::variant<v1::ReportRequest, v1::PutRequest, v1::GetRequest,
                                 v1::CommitRequest, v1::NotifyRequest>;
struct RankCall {
  CallId call;
  RankRequest request;
};
struct RankCallCancelled {  // its caller is gone; no reply is wanted
  CallId call;
};
// No rank can be started on the device any more. One that runs there is left alone. The coordinator
// learns it with the next Hello, hence a new session.
struct DeviceFailed {
  std::string device;  // "cuda:0"
  std::string why;     // and what to do
};
struct TimerFired {};
using AgentEvent = std::variant<SessionUp, SessionDown, CoordinatorMessage, AttemptPrepared,
                                RankStarted, RankNotStarted, RankExited, ReleaseProven, RankCall,
                                RankCallCancelled, DeviceFailed, TimerFired>;

// ---- actions: carried out in order, after the records are durable -------------------------------
// Makes the run directories and checks that the ranks could start (working directory). Answered by
// AttemptPrepared.
struct PrepareAttempt {
  AttemptKey attempt;
  std::vector<v1::RankAssignment> ranks;  // completed
};
// Starts the rank process unless this rank of this attempt was ever started, in which case it
// attaches to what is there.
struct StartRank {
  RankKey rank;
  v1::RankAssignment assignment;  // completed
};
// Finds a rank that this daemon, or the one before it, may have started. Starts nothing.
struct AttachRank {
  RankKey rank;
};
struct SignalRank {
  RankKey rank;
  bool kill = false;  // SIGKILL, else SIGTERM; to its whole process group
};
// Kills whatever the rank left behind and answers ReleaseProven once nothing is left.
struct VerifyRelease {
  RankKey rank;
};
// The attempt is held no more; its files may be pruned (logs stay readable meanwhile).
struct AttemptForgotten {
  AttemptKey attempt;
};
struct SendToCoordinator {
  SessionId session;
  v1::FromWorker message;
};
using RankResponse = std::variant<v1::ReportResponse, v1::PutResponse, v1::GetResponse,
                                  v1::CommitResponse, v1::NotifyResponse>;
struct ReplyToRank {
  CallId call;
  absl::StatusOr<RankResponse> response;
};
// Close this session and dial again.
struct Reconnect {
  SessionId session;
  std::string reason;
};
// Handle(TimerFired) at this time or later. Only the newest counts.
struct ArmTimer {
  absl::Time at;
};
using AgentAction =
    std::variant<PrepareAttempt, StartRank, AttachRank, SignalRank, VerifyRelease, AttemptForgotten,
                 SendToCoordinator, ReplyToRank, Reconnect, ArmTimer>;

// Durable state is a small ordered map of names to bytes; absent = delete. Names are safe as file
// names: "cluster", "attempt.<job>.e<epoch>", "commit.<job>.e<epoch>.<step>".
struct AgentRecord {
  std::string name;
  std::optional<std::string> value;
};

struct AgentOutput {
  std::vector<AgentRecord> records;  // one atomic write is not needed: each stands for itself
  std::vector<AgentAction> actions;
};

// For metrics and messages.
struct AgentSummary {
  bool session_welcomed = false;
  int attempts = 0;
  int slots_used = 0;
  int commits_pending = 0;
  int key_value_pending = 0;
  std::map<v1::RankState, int> ranks;  // by state
};

// Thread: one. Bounds: limits.h.
class AgentCore {
 public:
  // Rebuilds the state from what is durable. The output (it attaches to every rank that may run)
  // must be carried out before any event is handled. kDataLoss names the record that cannot be
  // read.
  static absl::StatusOr<std::unique_ptr<AgentCore>> Recover(
      AgentConfig config, const std::map<std::string, std::string>& records, absl::Time now,
      AgentOutput* output);

  AgentOutput Handle(const AgentEvent& event, absl::Time now);

  // ---- reads
  AgentSummary Summary() const;
  // What the next Observed would say.
  v1::Observed Observe() const;
  const std::string& cluster_id() const { return cluster_.cluster_id(); }
  uint64_t leader_term() const { return cluster_.leader_term(); }
  bool Holds(const AttemptKey& key) const { return attempts_.count(key) > 0; }
  // DirectoryName of every attempt that is held.
  std::set<std::string> HeldDirectories() const;
  // Absent before the rank has ended, or when it is not held.
  std::optional<v1::RankExit> ExitOf(const RankKey& key) const;
  // "cuda:0"; empty when the rank is not held.
  std::string DeviceOf(const RankKey& key) const;
  // The rank learns with its next report that this record of its collectives is wanted.
  // kFailedPrecondition: it does not run here.
  absl::Status AskForCollectives(const RankKey& key, uint64_t number);
  // Broken invariants, for tests and the simulator; empty when sound.
  std::vector<std::string> CheckInvariants() const;

 private:
  struct Rank {
    v1::StoredRank stored;
    v1::RankAssignment assignment;  // of the newest Desired; empty after a restart until one comes
    v1::RankProgress progress;
    bool attaching = false;             // AttachRank is under way: start and signal nothing yet
    bool start_failed = false;          // in this process; the attempt is refused
    std::optional<absl::Time> kill_at;  // SIGTERM was sent
    bool killed = false;                // SIGKILL was sent
    uint64_t collectives = 0;           // the newest record that somebody asked for; 0: nobody has
  };
  struct Attempt {
    v1::StoredAttempt stored;  // without ranks: they are below
    std::map<int32_t, Rank> ranks;
    bool prepared_asked = false;  // PrepareAttempt is under way or done in this process
  };
  struct PendingCommit {
    v1::CheckpointCommit commit;
    std::optional<absl::Time> sent_at;  // in this session
  };
  struct PendingPut {
    CallId call;
    v1::KeyValuePut put;
  };
  // All callers that wait for one key share one request.
  struct PendingGet {
    uint64_t request = 0;
    std::set<CallId> calls;
  };
  struct PendingNotice {
    CallId call;
    v1::RankNotice notice;
  };
  using CommitKey = std::pair<AttemptKey, int64_t>;  // step
  using GetKey = std::pair<AttemptKey, std::string>;

  explicit AgentCore(AgentConfig config) : config_(std::move(config)) {}
  absl::Status Load(const std::map<std::string, std::string>& records);

  void On(const SessionUp& event);
  void On(const SessionDown& event);
  void On(const CoordinatorMessage& event);
  void On(const AttemptPrepared& event);
  void On(const RankStarted& event);
  void On(const RankNotStarted& event);
  void On(const RankExited& event);
  void On(const ReleaseProven& event);
  void On(const RankCall& event);
  void On(const RankCallCancelled& event);
  void On(const DeviceFailed& event);
  void On(const TimerFired& event);

  bool AcceptLeader(const CoordinatorMessage& event);
  void OnWelcome(const v1::Welcome& welcome);
  void OnDesired(const v1::Desired& desired);
  void OnKeyValueReply(const v1::KeyValueReply& reply);
  void OnVerdict(const v1::CheckpointVerdict& verdict);

  void Serve(CallId call, const v1::ReportRequest& request);
  void Serve(CallId call, const v1::PutRequest& request);
  void Serve(CallId call, const v1::GetRequest& request);
  void Serve(CallId call, const v1::CommitRequest& request);
  void Serve(CallId call, const v1::NotifyRequest& request);

  // Takes what Desired says about one attempt; Converge acts on it.
  void Adopt(const AttemptKey& key, const v1::DesiredAttempt& desired);
  void Refuse(const AttemptKey& key, Attempt& attempt, v1::Cause cause, const std::string& why);
  std::string WhyRefuse(const v1::DesiredAttempt& desired) const;
  void CompleteAssignment(const AttemptKey& key, v1::RankAssignment& assignment) const;
  // An address that others can dial in the place of a wildcard.
  std::string Reachable(const std::string& listening) const;
  // One step from what is held towards what is wanted, for every attempt; safe to call at any time.
  void Converge();
  void ConvergeAttempt(const AttemptKey& key, Attempt& attempt);
  void StopRank(const RankKey& key, const Attempt& attempt, Rank& rank);
  void EnterExited(const RankKey& key, Rank& rank);
  bool DeviceBusy(const std::string& device) const;
  void EndCalls(const AttemptKey& key, absl::string_view why);
  void Fail(CallId call, absl::Status status);

  Rank* Find(const RankKey& key);
  Attempt* FindAttempt(const AttemptKey& key);
  // kAborted: this daemon does not hold the caller's attempt, or is ending it as stale.
  absl::StatusOr<Attempt*> Authorize(const v1::RankIdentity& identity);
  void AddCommit(const AttemptKey& key, const v1::CheckpointRecord& checkpoint);
  void AddCommits(const RankKey& key, const std::vector<v1::CheckpointRecord>& commits);
  bool HasPendingCommits(const AttemptKey& key) const;

  void PersistAttempt(const AttemptKey& key);
  void SendCommits();
  void SendObserved();
  void SendGet(const GetKey& key, const PendingGet& get);
  void Send(v1::FromWorker message);
  void Reply(CallId call, RankResponse response);
  template <typename Action>
  void Act(Action action) {
    output_->actions.push_back(std::move(action));
  }
  absl::Time NextDeadline() const;
  void Finish();

  AgentConfig config_;  // constant, but for hello's addresses and what is unusable of its devices
  v1::StoredCluster cluster_;
  std::map<AttemptKey, Attempt> attempts_;
  std::map<CommitKey, PendingCommit> commits_;
  std::map<uint64_t, PendingPut> puts_;
  std::map<GetKey, PendingGet> gets_;
  std::vector<PendingNotice> notices_;  // until a session can carry them
  uint64_t next_request_ = 1;

  std::optional<SessionId> session_;
  bool welcomed_ = false;
  absl::Time welcome_deadline_ = absl::InfiniteFuture();
  std::optional<uint64_t> applied_revision_;  // of this session
  absl::Duration heartbeat_interval_;
  absl::Time observed_at_ = absl::InfinitePast();
  absl::Time armed_ = absl::InfiniteFuture();  // the newest ArmTimer
  bool state_changed_ = false;                 // send Observed at once
  bool progress_changed_ = false;              // send it within progress_interval

  // The rest lives for one Handle.
  absl::Time now_;
  std::set<AttemptKey> dirty_;  // to persist
  AgentOutput* output_ = nullptr;
};

}  // namespace muster::worker

#endif  // MUSTER_WORKER_AGENT_AGENT_CORE_H_
