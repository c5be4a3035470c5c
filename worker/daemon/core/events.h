// The vocabulary of the daemon's core: events that go in; records and actions that come out.
#ifndef MUSTER_WORKER_DAEMON_CORE_EVENTS_H_
#define MUSTER_WORKER_DAEMON_CORE_EVENTS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/ids.h"
#include "muster/v1/job.pb.h"
#include "muster/v1/rank.pb.h"
#include "muster/v1/session.pb.h"
#include "worker/daemon/core/keys.h"

namespace muster::worker {

// Chosen by the shell; names one open stream to the coordinator. Never reused by a process.
using SessionId = StrongId<struct SessionIdTag, uint64_t>;
// Chosen by the shell; names one caller of RankService who waits for a reply.
using CallId = StrongId<struct CallIdTag, uint64_t>;

// ---- events -------------------------------------------------------------------------------------
struct SessionUp {  // a stream is open; nothing has been sent on it
  SessionId session;
  // This worker's addresses as of this dial (v1::Hello). Empty: not known; the last known ones
  // stay.
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
// StartRank and AttachRank are answered by exactly one of RankStarted, RankNotStarted and
// RankExited.
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
struct RankExited {  // after RankStarted, or instead of it when the rank had ended by then
  RankKey rank;
  int64_t pid = 0;
  v1::RankExit exit;
  std::optional<v1::RankProgress> progress;        // from the rank's own exit report
  std::vector<v1::CheckpointRecord> commits = {};  // as in RankStarted
};
struct RankReassigned {  // answer to ReassignRank
  RankKey rank;
  uint32_t membership = 1;  // of the assignment
  absl::Status status;
};
// Answer to VerifyRelease: no process of the rank is left, nobody holds a socket on which it
// listened, and the memory of its device is back, or the device is reported by DeviceFailed.
struct ReleaseProven {
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
// No rank can be started on the device from now on; a rank that runs there is left alone. The
// coordinator learns it from the Hello of the next session, which the core asks for.
struct DeviceFailed {
  std::string device;  // "cuda:0"
  std::string why;     // with what to do
};
struct TimerFired {};
using DaemonEvent =
    std::variant<SessionUp, SessionDown, CoordinatorMessage, AttemptPrepared, RankStarted,
                 RankNotStarted, RankExited, RankReassigned, ReleaseProven, RankCall,
                 RankCallCancelled, DeviceFailed, TimerFired>;

// ---- actions: carried out in order, after the records are durable -------------------------------
// Makes the run directories and checks that the ranks could start. Answered by AttemptPrepared.
struct PrepareAttempt {
  AttemptKey attempt;
  std::vector<v1::RankAssignment> ranks;  // completed with what this worker knows
};
// Starts the rank process. Should this rank of this attempt ever have been started, attaches to
// what is left of it instead.
struct StartRank {
  RankKey rank;
  v1::RankAssignment assignment;  // completed with what this worker knows
};
// Finds a rank that this daemon, or the one before it, may have started. Starts nothing.
struct AttachRank {
  RankKey rank;
};
// Writes a new assignment for a rank that runs into its run directory. Once that is answered, by
// RankReassigned, the rank learns of it with its next report, and starts anew from it.
struct ReassignRank {
  RankKey rank;
  v1::RankAssignment assignment;  // completed with what this worker knows
};
struct SignalRank {
  RankKey rank;
  bool kill = false;  // SIGKILL, else SIGTERM; to its whole process group
};
// Kills what is left of the rank. Answered by ReleaseProven once nothing is.
struct VerifyRelease {
  RankKey rank;
};
// The attempt is not held any more: its files may be pruned. Logs stay readable until then.
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
// Closes this session and dials again.
struct Reconnect {
  SessionId session;
  std::string reason;
};
// Asks for TimerFired at this time or later. Only the newest counts.
struct ArmTimer {
  absl::Time at;
};
using DaemonAction =
    std::variant<PrepareAttempt, StartRank, AttachRank, ReassignRank, SignalRank, VerifyRelease,
                 AttemptForgotten, SendToCoordinator, ReplyToRank, Reconnect, ArmTimer>;

// Durable state is a small map of names to bytes. Names are safe as file names: "cluster",
// "attempt.<job>.e<epoch>", "commit.<job>.e<epoch>.<step>".
struct DaemonRecord {
  std::string name;
  std::optional<std::string> value;  // no value: the record is deleted
};

struct DaemonOutput {
  std::vector<DaemonRecord> records;  // to be written in order; they need not be atomic together
  std::vector<DaemonAction> actions;
};

}  // namespace muster::worker

#endif  // MUSTER_WORKER_DAEMON_CORE_EVENTS_H_
