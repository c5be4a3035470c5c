// The coordinator's core: a deterministic state machine on one thread. An event and a time go in,
// an output comes out: a batch that must be durable first, then actions that others can see.
// It does no I/O, reads no clock, takes no lock; its randomness is a seeded Rng.
#ifndef MUSTER_COORDINATOR_CORE_CORE_H_
#define MUSTER_COORDINATOR_CORE_CORE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/ids.h"
#include "base/rng.h"
#include "coordinator/core/caller.h"
#include "coordinator/core/job_view.h"
#include "coordinator/scheduler/topology.h"
#include "coordinator/store/store.h"
#include "muster/v1/fleet.pb.h"
#include "muster/v1/job.pb.h"
#include "muster/v1/queue.pb.h"
#include "muster/v1/session.pb.h"
#include "muster/v1/spec.pb.h"
#include "muster/v1/stored.pb.h"

namespace muster::coordinator {

// Chosen by the shell; names one open stream of a daemon. Never reused by a coordinator process.
using SessionId = StrongId<struct SessionIdTag, uint64_t>;
// Chosen by the shell; names one waiting caller.
using CallId = StrongId<struct CallIdTag, uint64_t>;

struct CoreConfig {
  absl::Duration heartbeat_interval = absl::Milliseconds(500);
  // No message for this long: the worker is UNREACHABLE (an event, a metric; training goes on).
  absl::Duration unreachable_after = absl::Seconds(3);
  // No message for this long: LOST, its attempts are given up and restarted elsewhere. After a
  // restart or a pause of the coordinator the count starts again, so that workers can return.
  absl::Duration lost_after = absl::Seconds(30);
  // For up to this long a worker is not given up when more than half of all workers are silent at
  // the same time, or of its zone, block or rack (DomainSilence): then the network or the
  // coordinator's host has failed, and the ranks train on.
  absl::Duration partition_hold = absl::Minutes(15);
  // From SIGTERM to SIGKILL when ranks are ended.
  absl::Duration stop_grace = absl::Seconds(10);
  // No rank of a training attempt finished a step or changed its phase for this long: HANG. Also
  // bounds bootstrapping.
  absl::Duration progress_timeout = absl::Minutes(10);
  TopologyRules topology;
};

// ---- events -------------------------------------------------------------------------------------
// A call with a `caller` leaves an entry in the audit log, durable before its reply.
struct SubmitEvent {
  CallId call;
  v1::JobSpec spec;  // valid and with defaults (proto/spec); the core does not check it again
  std::string request_id;
  Caller caller;
};
// All of them or none.
struct SubmitArrayEvent {
  CallId call;
  std::vector<v1::JobSpec> tasks;  // not empty; as of SubmitEvent, and spec::ValidateArray holds
  std::string request_id;
  Caller caller;
};
struct CancelEvent {
  CallId call;
  std::string job;  // name or id
  Caller caller;
};
// A user changes when a job runs.
struct ChangeJobEvent {
  enum class Change {
    kPreempt,  // stop it at a step boundary; it stays in its queue
    kSuspend,  // the same, but it is held; one that waits is held at once
    kHold,     // one that waits does not start
    kRelease,  // one that is held waits in its queue again
    kRequeue,  // stop it now; it stays in its queue
    kResize,   // give it another number of ranks, `ranks`
  };
  CallId call;
  std::string job;  // name or id
  Change change = Change::kPreempt;
  std::string reason;  // for people; may be empty
  Caller caller;
  int32_t ranks = 0;  // of kResize; 0: the scheduler decides
};
// The same, or a cancellation, for all tasks of an array.
struct ChangeArrayEvent {
  CallId call;
  std::string array;                                            // name or id
  std::optional<ChangeJobEvent::Change> change = std::nullopt;  // none: they are cancelled
  std::string reason;
  Caller caller;
};
struct SessionOpened {  // Hello
  SessionId session;
  Incarnation incarnation;
  v1::Hello hello;
};
struct SessionMessage {
  SessionId session;
  v1::FromWorker message;  // anything but hello and log
};
struct SessionClosed {
  SessionId session;
};
// An operator says that the worker does not come back: it is given up at once and forgotten. Its
// name is free for another daemon.
struct RemoveWorkerEvent {
  CallId call;
  std::string worker;
  Caller caller;
};
// A bearer token; `created` and `created_by` are filled in.
struct CreateTokenEvent {
  CallId call;
  v1::TokenRow row;
  Caller caller;
};
struct RevokeTokenEvent {
  CallId call;
  std::string id;
  Caller caller;
};
// A call that the core does not see otherwise, or that was refused.
struct AuditEvent {
  v1::AuditEntry entry;
};
// What an operator asks of workers. The reply has them as they are then.
struct FleetEvent {
  using Request = std::variant<v1::CordonRequest, v1::UncordonRequest, v1::ForgiveRequest,
                               v1::DrainRequest, v1::ReserveRequest, v1::UnreserveRequest>;
  CallId call;
  Request request;
  Caller caller;
};
// An operator defines the queues anew.
struct ApplyQueuesEvent {
  CallId call;
  v1::QueuePolicy policy;
  Caller caller;
};
struct TimerFired {};
using CoreEvent =
    std::variant<SubmitEvent, SubmitArrayEvent, CancelEvent, ChangeJobEvent, ChangeArrayEvent,
                 SessionOpened, SessionMessage, SessionClosed, RemoveWorkerEvent, FleetEvent,
                 ApplyQueuesEvent, CreateTokenEvent, RevokeTokenEvent, AuditEvent, TimerFired>;

// ---- actions: carried out in order, after the batch is durable ---------------------------------
struct ReplyAction {
  CallId call;
  absl::Status status;
  v1::Job job;
  bool existed = false;
  std::vector<v1::Worker> workers = {};    // of a FleetEvent
  v1::ArrayReport array = {};              // of SubmitArrayEvent and ChangeArrayEvent
  std::vector<std::string> warnings = {};  // of ApplyQueuesEvent
};
struct SendAction {
  SessionId session;
  v1::FromCoordinator message;  // the shell fills in cluster_id, leader_term and history_id
};
// Does nothing when the session is gone.
struct CloseAction {
  SessionId session;
  absl::Status status;
};
// Call Handle(TimerFired) at this time or later. Only the newest counts.
struct TimerAction {
  absl::Time at;
};
// The job as users see it changed, progress included.
struct JobChanged {
  JobId job;
  uint64_t submit_sequence = 0;
  JobView changed;  // every part when the job is new
};
// An old job that had ended was removed.
struct JobForgotten {
  JobId job;
};
// For watchers: an event was appended to the log.
struct EventAppended {
  v1::Event event;
};
// A token was made or revoked; also every token at the start.
struct TokenChanged {
  v1::TokenRow row;
};
struct TokenForgotten {
  std::string id;
};
// For metrics: one duration that the state alone does not tell. coordinator/metrics.cc says what
// each measures.
struct Measured {
  enum class What { kQueueWait, kDetectFailure, kRecover, kCheckpointSave, kPlacement } what;
  double seconds;
};
// What the devices that no attempt holds are used for changed.
struct FleetUsageChanged {
  v1::Usage usage;
  int64_t spares_missing = 0;  // devices that are to be kept free, where none is
};
using CoreAction =
    std::variant<ReplyAction, SendAction, CloseAction, TimerAction, JobChanged, JobForgotten,
                 EventAppended, TokenChanged, TokenForgotten, Measured, FleetUsageChanged>;

struct CoreOutput {
  Batch batch;
  std::vector<CoreAction> actions;
};

// ---- questions --------------------------------------------------------------------------------
// A job's or an array's name or id, or a spec, valid and with defaults, that is not submitted.
using ExplainQuery = std::variant<std::string, v1::JobSpec>;
struct Explained {
  v1::Job job;  // of a spec: name, steps and spec
  std::optional<v1::WaitReason> waiting;
  std::vector<v1::Placement> placements;  // of a spec that would start at once
  // Of a job or spec with a deadline that has not ended.
  std::optional<v1::DeadlineOutlook> deadline = std::nullopt;
  std::optional<v1::ArrayOutlook> array = std::nullopt;  // of an array; then nothing else is set
};
// Device time of the period that is not over, as rows like those of the store.
struct OpenUsage {
  uint64_t last_row = 0;  // key of the newest row in the store; time in later ones is in `rows` too
  int64_t as_of_ms = 0;   // Unix time
  std::vector<v1::UsageRow> rows;
};

// Thread: one. Bound: limits.h.
class Core {
 public:
  // Brings the store to the current schema, rebuilds the state from it and starts a new leader
  // term. The output has a JobChanged of every job and must be carried out before any event is
  // handled. kDataLoss names the row that cannot be read.
  static absl::StatusOr<std::unique_ptr<Core>> Recover(const CoreConfig& config, Store& store,
                                                       Rng rng, absl::Time now, CoreOutput* output);
  virtual ~Core() = default;

  virtual CoreOutput Handle(CoreEvent event, absl::Time now) = 0;

  // ---- reads, for replies and metrics; state includes changes whose batch is still being synced,
  // so the shell answers reads from a copy taken after the sync (see shell.h).
  virtual uint64_t leader_term() const = 0;
  virtual const std::string& cluster_id() const = 0;
  // FromCoordinator.history_id.
  virtual const std::string& history_id() const = 0;
  // By id, else the newest of that name. kNotFound.
  virtual absl::StatusOr<v1::Job> GetJob(const std::string& name_or_id) const = 0;
  // Newest first by submit sequence; `before` is exclusive, 0 = from the newest.
  virtual std::vector<v1::Job> ListJobs(uint64_t before, int limit, uint64_t* next) const = 0;
  virtual std::vector<v1::Worker> ListWorkers() const = 0;
  virtual uint64_t last_event_sequence() const = 0;
  // The worker that has this rank's log, also of ended attempts while their placement is known.
  // Epoch 0 = the newest. kNotFound, kFailedPrecondition (nothing started), kInvalidArgument
  // (rank).
  virtual absl::StatusOr<WorkerId> LogHolder(const JobId& job, Epoch epoch, int rank) const = 0;
  virtual std::optional<SessionId> SessionOf(const WorkerId& worker) const = 0;
  // Why a job waits, or what would become of a spec; changes nothing. kNotFound.
  virtual absl::StatusOr<Explained> Explain(const ExplainQuery& about, absl::Time now) = 0;
  virtual OpenUsage Usage(absl::Time now) = 0;
  // The queues as they are used at this time, and as they were last defined.
  virtual v1::GetQueuesResponse GetQueues(absl::Time now) = 0;
  virtual const v1::QueuePolicy& queue_policy() const = 0;
  // For the simulator: whether a plan made now would start, stop or give up anything.
  virtual bool WouldDecide(absl::Time now) = 0;
  // For the simulator: the invariants that do not hold; empty when all do. The index of slots is
  // compared with one built anew, which costs more than all other checks, if `index` is true.
  virtual std::vector<std::string> CheckInvariants(bool index = true) const = 0;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_CORE_H_
