// The shell around the core: it makes the core's outputs happen. It owns the loop that the core
// runs on and the core's timer, and puts together the four parts that carry outputs out: the writer
// (writer.h), the waiting calls (pending_calls.h), the daemons' streams (sessions.h) and the relay
// of logs (log_relay.h). No gRPC here; the reactors in rpc/ call it.
//
//   reactor --Post--> loop: core.Handle --output--> writer: one synced write for several outputs
//                                                     `--> then their actions, in order
//
// Persist before act: nothing that an output says or publishes leaves before its batch is synced.
// When a write fails, nothing more is published, every waiting call gets UNAVAILABLE and
// `on_failure` is called once: the process should end, a restart is cheap.
#ifndef MUSTER_COORDINATOR_SHELL_H_
#define MUSTER_COORDINATOR_SHELL_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/loop.h"
#include "base/mutex.h"
#include "base/probes.h"
#include "coordinator/core/core.h"
#include "coordinator/limits.h"
#include "coordinator/log_relay.h"
#include "coordinator/metrics.h"
#include "coordinator/pending_calls.h"
#include "coordinator/published_state.h"
#include "coordinator/published_tokens.h"
#include "coordinator/sessions.h"
#include "coordinator/store/store.h"
#include "coordinator/writer.h"

namespace muster::coordinator {

// Lifecycle: Start, calls from any thread, Drain, then destruction once no call is under way.
class Shell {
 public:
  using Recovery =
      absl::AnyInvocable<absl::StatusOr<std::unique_ptr<Core>>(absl::Time now, CoreOutput* output)>;
  struct Parts {  // all outlive the shell
    Store& store;
    const Clock& clock;
    Logger& log;
    Metrics& metrics;
    // How long a job that has ended keeps its series, so that its last values are scraped.
    absl::Duration ended_job_series_kept = kEndedJobSeriesKept;
    Probes* probes = nullptr;  // told that the loop turns; may be null
  };

  // Runs `recover` and makes its output durable before it returns. `on_failure` is called on the
  // writer thread, at most once. Status: that of `recover` or of the store.
  static absl::StatusOr<std::unique_ptr<Shell>> Start(
      const Parts& parts, Recovery recover,
      absl::AnyInvocable<void(const absl::Status&)> on_failure);
  ~Shell();

  // ---- for users. Each `done` is called exactly once, on the writer thread, the loop or the
  // caller's thread. kUnavailable: draining, or the store failed. kResourceExhausted: too many
  // calls wait.
  void Submit(v1::JobSpec spec, std::string request_id, Caller caller, Done<JobReply> done);
  // JobReply::array says what was submitted, or changed; without `change` its tasks are cancelled.
  // Requires: spec::ValidateArray accepts the tasks.
  void SubmitArray(std::vector<v1::JobSpec> tasks, std::string request_id, Caller caller,
                   Done<JobReply> done);
  void ChangeArray(std::string array, std::optional<ChangeJobEvent::Change> change,
                   std::string reason, Caller caller, Done<JobReply> done);
  // kNotFound names the nearest job name.
  void Cancel(std::string job, Caller caller, Done<JobReply> done);
  // kNotFound as Cancel; else as Core says.
  void ChangeJob(std::string job, ChangeJobEvent::Change change, std::string reason, Caller caller,
                 Done<JobReply> done, int32_t ranks = 0);
  // By name.
  void ListWorkers(Done<std::vector<v1::Worker>> done);
  // Why a job waits, or what would become of a spec. kNotFound as Cancel.
  void Explain(ExplainQuery about, Done<Explained> done);
  // Device time of the period that is not over. Answered on a thread on which the store may be read
  // for long.
  void Usage(Done<OpenUsage> done);
  // The queues as they are used now, and as they were last defined.
  void GetQueues(Done<v1::GetQueuesResponse> done);
  void GetQueuePolicy(Done<v1::QueuePolicy> done);
  // kInvalidArgument: one line per broken rule.
  void ApplyQueues(v1::QueuePolicy policy, Caller caller, Done<JobReply> done);
  // kNotFound. The worker is forgotten and what it held is given up when `done` is called.
  void RemoveWorker(std::string worker, Caller caller, Done<JobReply> done);
  void CreateToken(v1::TokenRow row, Caller caller, Done<JobReply> done);
  // kNotFound. No token() gives it back when `done` is called.
  void RevokeToken(std::string id, Caller caller, Done<JobReply> done);
  // Adds an entry to the audit log, soon; its number and time are filled in.
  void Audit(v1::AuditEntry entry);
  // JobReply::workers are those of the request, as they are then. Errors: admin_service.proto.
  void ChangeFleet(FleetEvent::Request request, Caller caller, Done<JobReply> done);
  // Writes the durable state to `directory`, which must not exist, on a thread of its own.
  void Backup(std::string directory, absl::AnyInvocable<void(absl::Status)> done);
  // Asks the worker that holds the rank's log; LogRelay::Ask has the errors. Request is LogRequest,
  // CollectivesRequest or ProfileRequest, Reply what answers it.
  template <typename Request, typename Reply>
  void AskRank(Request request, Done<Reply> done) {
    const std::optional<PendingCall<Reply>> call = calls_.Add<Reply>(std::move(done));
    if (!call.has_value()) return;
    loop_->Post(
        [this, request = std::move(request), call = *call] { log_relay_->Ask(request, call); });
  }

  // The job as published, at once: one whose submission is not durable yet, and so not answered, is
  // not there. kNotFound as above.
  absl::StatusOr<std::shared_ptr<const v1::Job>> GetJob(const std::string& name_or_id);
  PublishedState& published() { return *published_; }
  // Tokens as of the last synced write.
  const PublishedTokens& tokens() const { return tokens_; }
  Store& store() { return parts_.store; }
  // The loop on which watchers run. Lives until the shell is destroyed.
  Loop& watch_loop() { return *watch_loop_; }
  Metrics& metrics() { return parts_.metrics; }
  Logger& log() { return parts_.log; }
  const Clock& clock() const { return parts_.clock; }
  const std::string& cluster_id() const { return cluster_id_; }
  uint64_t leader_term() const { return leader_term_; }

  // ---- for daemons. `stream` is kept until CloseSession.
  // kUnavailable, kResourceExhausted as above.
  absl::StatusOr<SessionId> OpenSession(Incarnation incarnation, v1::Hello hello,
                                        std::shared_ptr<SessionStream> stream);
  // `handled` is called on the loop when the next message may be read: a daemon cannot fill the
  // coordinator's memory.
  void Deliver(SessionId session, v1::FromWorker message, absl::AnyInvocable<void()> handled);
  void CloseSession(SessionId session);

  // Stops taking calls, finishes what was taken, then closes the daemons' streams and wakes every
  // watcher, which sees draining(). Blocks for about one write. Safe to call twice.
  void Drain();
  // True once no calls are taken any more, because of Drain or a failed write.
  bool draining() const;

 private:
  Shell(const Parts& parts, absl::AnyInvocable<void(const absl::Status&)> on_failure);

  absl::Status Recover(Recovery recover);
  // Time that follows the wall clock at the start and then never jumps, so that a step of the
  // machine's clock loses no worker.
  absl::Time Now() const;

  // ---- on the loop
  void Handle(CoreEvent event);
  void Enqueue(PendingOutput pending);
  void ArmTimer(absl::Time at);
  void OnTimer(uint64_t generation);
  // Once in kWorkerSampleInterval, this one due at `due` of the monotonic clock.
  void Sample(absl::Duration due);

  // ---- on the writer thread
  void Release(PendingOutput& pending);
  void Publish(const std::vector<CoreAction>& actions);
  void ForgetSeriesLater(const std::string& job_name);
  void Act(CoreAction& action);
  void Fail(const absl::Status& status);

  // ---- any thread
  // Every waiting call and every daemon's stream ends with `status`, and watchers wake.
  void EndAll(const absl::Status& status);

  const Parts parts_;
  const absl::Time wall_start_;
  const absl::Duration monotonic_start_;
  std::string cluster_id_;
  uint64_t leader_term_ = 0;

  mutable Mutex mutex_;
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);

  // Used on the loop only.
  std::unique_ptr<Core> core_;
  absl::Time timer_wanted_ = absl::InfiniteFuture();
  absl::Time timer_armed_ = absl::InfiniteFuture();
  absl::Duration workers_due_ =
      -absl::InfiniteDuration();  // of the monotonic clock: when Sample() looks at the workers next
  uint64_t timer_generation_ = 0;

  absl::AnyInvocable<void(const absl::Status&)> on_failure_;  // used on the writer thread only

  PublishedTokens tokens_;
  PendingCalls calls_;
  std::unique_ptr<Sessions> sessions_;
  std::unique_ptr<ThreadLoop> watch_loop_;
  std::unique_ptr<ThreadLoop> backup_loop_;  // for what reads or writes the store for long
  std::unique_ptr<PublishedState> published_;
  std::unique_ptr<Writer> writer_;
  std::unique_ptr<ThreadLoop> loop_;
  std::unique_ptr<LogRelay> log_relay_;  // used on the loop only
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_SHELL_H_
