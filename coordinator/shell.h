// Everything around the core that makes its outputs happen: the loop it runs on, the writer that
// makes batches durable, the streams that its messages leave by, its timer. No gRPC here; the
// reactors in rpc/ call it.
//
//   reactor --Post--> loop: core.Handle --output--> writer: one synced write for several outputs
//                                                     `--> then their actions, in order
//
// Persist before act: nothing that an output says or shows leaves before its batch is synced. When
// a write fails, nothing more is shown, every waiting call gets UNAVAILABLE and `on_failure` is
// called once: the process should end, a restart is cheap.
#ifndef MUSTER_COORDINATOR_SHELL_H_
#define MUSTER_COORDINATOR_SHELL_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
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
#include "coordinator/core/core.h"
#include "coordinator/limits.h"
#include "coordinator/metrics.h"
#include "coordinator/shown.h"
#include "coordinator/store/store.h"

namespace muster::coordinator {

// One daemon's stream as the shell sees it. Any thread; calls do not block and never call back.
class SessionStream {
 public:
  virtual ~SessionStream() = default;
  virtual void Send(v1::FromCoordinator message) = 0;
  // Ends the stream after what was sent before. Later calls do nothing.
  virtual void Close(const absl::Status& status) = 0;
};

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
  };
  struct JobReply {
    v1::Job job;
    bool existed = false;
  };

  // Runs `recover` and makes its output durable before it returns. `on_failure` is called on the
  // writer thread, at most once. Status: that of `recover` or of the store.
  static absl::StatusOr<std::unique_ptr<Shell>> Start(
      const Parts& parts, Recovery recover,
      absl::AnyInvocable<void(const absl::Status&)> on_failure);
  ~Shell();

  // ---- for users. Each `done` is called exactly once, on the writer thread or the caller's.
  // kUnavailable: draining or the store failed. kResourceExhausted: too many calls wait.
  void Submit(v1::JobSpec spec, std::string request_id,
              absl::AnyInvocable<void(absl::StatusOr<JobReply>)> done);
  void Cancel(std::string job, absl::AnyInvocable<void(absl::StatusOr<JobReply>)> done);
  // kNotFound names the nearest job name.
  void GetJob(const std::string& name_or_id,
              absl::AnyInvocable<void(absl::StatusOr<std::shared_ptr<const v1::Job>>)> done);
  // By name.
  void ListWorkers(absl::AnyInvocable<void(absl::StatusOr<std::vector<v1::Worker>>)> done);
  // Asks the worker that holds the log; `request.request` is filled in here. kNotFound: nobody
  // knows that attempt. kUnavailable: its worker is unreachable or does not answer.
  void ReadLog(v1::LogRequest request, absl::AnyInvocable<void(absl::StatusOr<v1::LogReply>)> done);

  Shown& shown() { return *shown_; }
  Store& store() { return parts_.store; }
  // Where everything that watches runs. Lives until the shell is destroyed.
  Loop& watch_loop() { return *watch_loop_; }
  Metrics& metrics() { return parts_.metrics; }
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
  bool draining() const;

 private:
  // One output on its way to the disk, with what its actions need of the core at that moment.
  struct Pending {
    CoreOutput output;
    std::vector<std::shared_ptr<const v1::Job>> changed;
    uint64_t last_event = 0;
    absl::AnyInvocable<void()> then;  // after the actions; may be empty
  };
  // Every waiting caller, reads included; what a read found is captured by its `done`.
  using JobDone = absl::AnyInvocable<void(absl::StatusOr<JobReply>)>;
  struct WaitingLog {
    SessionId session;
    CallId call;
    std::shared_ptr<v1::LogReply> reply;  // shared with the call's `done`
  };

  Shell(const Parts& parts, absl::AnyInvocable<void(const absl::Status&)> on_failure);

  absl::Status Recover(Recovery recover);
  absl::Status ShowRecovered();
  void StartThreads(CoreOutput recovered);
  // Time that follows the wall clock at the start and then never jumps, so that a step of the
  // machine's clock loses no worker.
  absl::Time Now() const;

  // ---- on the loop
  void Handle(const CoreEvent& event);
  void Enqueue(Pending pending);
  void ArmTimer(absl::Time at);
  void OnTimer(uint64_t generation);
  void SampleWorkers();
  void AskForLog(v1::LogRequest request, CallId call, std::shared_ptr<v1::LogReply> reply);
  void OnLogReply(SessionId session, v1::LogReply reply);
  void FailLogsOf(SessionId session);

  // ---- on the writer
  void RunWriter();
  absl::Status WriteGroup(const std::vector<Pending>& group);
  void Release(Pending& pending);
  void ShowChanges(const Pending& pending);
  void Act(CoreAction& action);
  void Fail(const absl::Status& status);

  // ---- any thread
  // Calls `done` with the reason and returns nothing when no call can be taken.
  std::optional<CallId> AddCall(JobDone done);
  // A call that has been answered or failed already is left alone.
  void Answer(CallId call, absl::StatusOr<JobReply> reply);
  absl::Status Refusal() const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  // Every waiting call and every daemon's stream ends with `status`, and watchers wake.
  void EndAll(const absl::Status& status);
  std::shared_ptr<SessionStream> StreamOf(SessionId session);

  const Parts parts_;
  const absl::Time wall_start_;
  const absl::Duration monotonic_start_;
  std::string cluster_id_;
  uint64_t leader_term_ = 0;

  mutable Mutex mutex_;
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_call_ ABSL_GUARDED_BY(mutex_) = 1;
  uint64_t next_session_ ABSL_GUARDED_BY(mutex_) = 1;
  std::map<CallId, JobDone> calls_ ABSL_GUARDED_BY(mutex_);
  std::map<SessionId, std::shared_ptr<SessionStream>> sessions_ ABSL_GUARDED_BY(mutex_);

  Mutex queue_mutex_;
  std::deque<Pending> queue_ ABSL_GUARDED_BY(queue_mutex_);
  bool writer_stop_ ABSL_GUARDED_BY(queue_mutex_) = false;
  bool writer_failed_ ABSL_GUARDED_BY(queue_mutex_) = false;
  // Taken from the queue and not released yet.
  bool writer_busy_ ABSL_GUARDED_BY(queue_mutex_) = false;

  // The loop's own.
  std::unique_ptr<Core> core_;
  absl::Time timer_wanted_ = absl::InfiniteFuture();
  absl::Time timer_armed_ = absl::InfiniteFuture();
  uint64_t timer_generation_ = 0;
  uint64_t next_log_request_ = 1;
  std::map<uint64_t, WaitingLog> waiting_logs_;

  absl::AnyInvocable<void(const absl::Status&)> on_failure_;  // the writer's

  // Threads last, so that they stop before what they use goes: the loop feeds the writer, and both
  // wake watchers.
  std::unique_ptr<ThreadLoop> watch_loop_;
  std::unique_ptr<Shown> shown_;
  std::thread writer_;
  std::unique_ptr<ThreadLoop> loop_;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_SHELL_H_
