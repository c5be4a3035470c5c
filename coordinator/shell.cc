#include "coordinator/shell.h"

#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "coordinator/limits.h"

namespace muster::coordinator {
namespace {

size_t BytesOf(const Batch& batch) {
  size_t bytes = 0;
  for (const Batch::Change& change : batch.changes) {
    bytes += change.key.size() + (change.value.has_value() ? change.value->size() : 0);
  }
  return bytes;
}

absl::Status StoppingError() {
  return absl::UnavailableError("the coordinator is stopping; retry");
}

}  // namespace

// ---- start and stop -----------------------------------------------------------------------------

absl::StatusOr<std::unique_ptr<Shell>> Shell::Start(
    const Parts& parts, Recovery recover,
    absl::AnyInvocable<void(const absl::Status&)> on_failure) {
  std::unique_ptr<Shell> shell(new Shell(parts, std::move(on_failure)));
  RETURN_IF_ERROR(shell->Recover(std::move(recover)));
  return shell;
}

Shell::Shell(const Parts& parts, absl::AnyInvocable<void(const absl::Status&)> on_failure)
    : parts_(parts),
      wall_start_(parts.clock.Now()),
      monotonic_start_(parts.clock.Monotonic()),
      on_failure_(std::move(on_failure)) {}

Shell::~Shell() {
  if (loop_ == nullptr) return;  // never started
  Drain();
  loop_->Stop();
  {
    MutexLock lock(&queue_mutex_);
    writer_stop_ = true;
  }
  writer_.join();
  watch_loop_->Stop();
}

absl::Status Shell::Recover(Recovery recover) {
  CoreOutput output;
  ASSIGN_OR_RETURN(core_, recover(Now(), &output));
  cluster_id_ = core_->cluster_id();
  leader_term_ = core_->leader_term();
  // The new leader term must be durable before anything of it is said.
  if (!output.batch.empty()) RETURN_IF_ERROR(parts_.store.Write({output.batch}));
  watch_loop_ = std::make_unique<ThreadLoop>(parts_.clock);
  shown_ = std::make_unique<Shown>(*watch_loop_, parts_.metrics);
  RETURN_IF_ERROR(ShowRecovered());
  const absl::Duration took = parts_.clock.Monotonic() - monotonic_start_;
  parts_.metrics.Recovered(leader_term_, took);
  parts_.log.Info("recovered", {{"cluster_id", cluster_id_},
                                {"leader_term", leader_term_},
                                {"last_event", shown_->last_event()},
                                {"seconds", absl::ToDoubleSeconds(took)}});
  output.batch.changes.clear();
  StartThreads(std::move(output));
  return absl::OkStatus();
}

absl::Status Shell::ShowRecovered() {
  absl::Status bad;
  RETURN_IF_ERROR(parts_.store.Scan(
      Table::kJobs, "", "", [&](const std::string& key, const std::string& value) {
        v1::JobRecord record;
        if (!record.ParseFromString(value)) {
          bad = absl::DataLossError(absl::StrCat("the row of job ", key, " cannot be read"));
          return false;
        }
        absl::StatusOr<v1::Job> job = core_->GetJob(record.job().id());
        if (job.ok()) {
          shown_->ShowJob(std::make_shared<const v1::Job>(*std::move(job)),
                          record.submit_sequence());
        }
        return true;
      }));
  RETURN_IF_ERROR(bad);
  shown_->SetLastEvent(core_->last_event_sequence());
  return absl::OkStatus();
}

void Shell::StartThreads(CoreOutput recovered) {
  writer_ = std::thread([this] { RunWriter(); });
  loop_ = std::make_unique<ThreadLoop>(parts_.clock);
  loop_->Post([this, recovered = std::move(recovered)]() mutable {
    Enqueue({.output = std::move(recovered)});
    SampleWorkers();
  });
}

void Shell::Drain() {
  {
    MutexLock lock(&mutex_);
    if (draining_) return;
    draining_ = true;
  }
  // What was taken before is on the loop by now, or in the writer's queue.
  Notification handled;
  loop_->Post([&handled] { handled.Notify(); });
  handled.WaitForNotification();
  {
    MutexLock lock(&queue_mutex_);
    auto idle = [this]() ABSL_SHARED_LOCKS_REQUIRED(queue_mutex_) {
      return writer_failed_ || (queue_.empty() && !writer_busy_);
    };
    queue_mutex_.Await(Condition(&idle));
  }
  EndAll(StoppingError());
}

bool Shell::draining() const {
  MutexLock lock(&mutex_);
  return draining_ || !failure_.ok();
}

void Shell::EndAll(const absl::Status& status) {
  std::map<CallId, JobDone> calls;
  std::map<SessionId, std::shared_ptr<SessionStream>> sessions;
  {
    MutexLock lock(&mutex_);
    calls.swap(calls_);
    sessions = sessions_;
  }
  for (auto& [id, done] : calls) done(status);
  for (auto& [id, stream] : sessions) stream->Close(status);
  shown_->WakeAll();
}

absl::Time Shell::Now() const {
  return wall_start_ + (parts_.clock.Monotonic() - monotonic_start_);
}

// ---- calls --------------------------------------------------------------------------------------

absl::Status Shell::Refusal() const {
  if (!failure_.ok()) {
    return absl::UnavailableError(
        absl::StrCat("the coordinator cannot write its state and stops: ", failure_.message()));
  }
  return draining_ ? StoppingError() : absl::OkStatus();
}

std::optional<CallId> Shell::AddCall(JobDone done) {
  absl::Status refusal;
  {
    MutexLock lock(&mutex_);
    refusal = Refusal();
    if (refusal.ok() && calls_.size() >= kCallsWaitingMax) {
      refusal = absl::ResourceExhaustedError(
          absl::StrCat("more than ", kCallsWaitingMax, " calls wait for the coordinator; retry"));
    }
    if (refusal.ok()) {
      const CallId call(next_call_++);
      calls_.emplace(call, std::move(done));
      return call;
    }
  }
  done(refusal);
  return std::nullopt;
}

void Shell::Answer(CallId call, absl::StatusOr<JobReply> reply) {
  JobDone done;
  {
    MutexLock lock(&mutex_);
    const auto found = calls_.find(call);
    if (found == calls_.end()) return;
    done = std::move(found->second);
    calls_.erase(found);
  }
  done(std::move(reply));
}

void Shell::Submit(v1::JobSpec spec, std::string request_id, JobDone done) {
  const std::optional<CallId> call = AddCall(std::move(done));
  if (!call.has_value()) return;
  loop_->Post([this, event = SubmitEvent{*call, std::move(spec), std::move(request_id)}] {
    Handle(event);
  });
}

void Shell::Cancel(std::string job, JobDone done) {
  const std::optional<CallId> call = AddCall(std::move(done));
  if (!call.has_value()) return;
  loop_->Post([this, event = CancelEvent{*call, std::move(job)}] { Handle(event); });
}

void Shell::GetJob(const std::string& name_or_id,
                   absl::AnyInvocable<void(absl::StatusOr<std::shared_ptr<const v1::Job>>)> done) {
  if (std::shared_ptr<const v1::Job> job = shown_->Find(name_or_id)) {
    done(std::move(job));
    return;
  }
  // The core words the miss; if it knows the job by now, the answer waits for the sync.
  const std::optional<CallId> call =
      AddCall([done = std::move(done)](absl::StatusOr<JobReply> reply) mutable {
        if (!reply.ok()) {
          done(reply.status());
        } else {
          done(std::make_shared<const v1::Job>(std::move(reply->job)));
        }
      });
  if (!call.has_value()) return;
  loop_->Post([this, call = *call, name_or_id] {
    absl::StatusOr<v1::Job> job = core_->GetJob(name_or_id);
    Enqueue({.then = [this, call, job = std::move(job)]() mutable {
      if (job.ok()) {
        Answer(call, JobReply{*std::move(job)});
      } else {
        Answer(call, job.status());
      }
    }});
  });
}

void Shell::ListWorkers(absl::AnyInvocable<void(absl::StatusOr<std::vector<v1::Worker>>)> done) {
  auto workers = std::make_shared<std::vector<v1::Worker>>();
  const std::optional<CallId> call =
      AddCall([workers, done = std::move(done)](absl::StatusOr<JobReply> reply) mutable {
        if (!reply.ok()) {
          done(reply.status());
        } else {
          done(std::move(*workers));
        }
      });
  if (!call.has_value()) return;
  loop_->Post([this, call = *call, workers] {
    *workers = core_->ListWorkers();
    Enqueue({.then = [this, call] { Answer(call, JobReply{}); }});
  });
}

// ---- logs ---------------------------------------------------------------------------------------

void Shell::ReadLog(v1::LogRequest request,
                    absl::AnyInvocable<void(absl::StatusOr<v1::LogReply>)> done) {
  auto found = std::make_shared<v1::LogReply>();
  const std::optional<CallId> call =
      AddCall([found, done = std::move(done)](absl::StatusOr<JobReply> reply) mutable {
        if (!reply.ok()) {
          done(reply.status());
        } else {
          done(std::move(*found));
        }
      });
  if (!call.has_value()) return;
  loop_->Post([this, request = std::move(request), call = *call, found] {
    AskForLog(request, call, found);
  });
}

void Shell::AskForLog(v1::LogRequest request, CallId call, std::shared_ptr<v1::LogReply> reply) {
  const absl::StatusOr<WorkerId> worker =
      core_->LogHolder(JobId(request.job_id()), Epoch(request.epoch()), request.rank());
  if (!worker.ok()) return Answer(call, worker.status());
  const std::optional<SessionId> session = core_->SessionOf(*worker);
  const std::shared_ptr<SessionStream> stream = session.has_value() ? StreamOf(*session) : nullptr;
  if (stream == nullptr) {
    return Answer(call, absl::UnavailableError(absl::StrCat(
                            "worker ", worker->value(), ", which holds the log of rank ",
                            request.rank(), " of job ", request.job_id(), ", is not connected")));
  }
  const uint64_t number = next_log_request_++;
  request.set_request(number);
  waiting_logs_[number] = {*session, call, std::move(reply)};
  v1::FromCoordinator message;
  message.set_cluster_id(cluster_id_);
  message.set_leader_term(leader_term_);
  *message.mutable_log() = std::move(request);
  stream->Send(std::move(message));
  loop_->PostAfter(kLogReplyTimeout, [this, number, name = worker->value()] {
    const auto waiting = waiting_logs_.extract(number);
    if (waiting.empty()) return;
    Answer(waiting.mapped().call,
           absl::UnavailableError(absl::StrCat("worker ", name, " did not send its log within ",
                                               absl::FormatDuration(kLogReplyTimeout))));
  });
}

void Shell::OnLogReply(SessionId session, v1::LogReply reply) {
  const auto found = waiting_logs_.find(reply.request());
  if (found == waiting_logs_.end() || found->second.session != session) return;
  const WaitingLog waiting = std::move(found->second);
  waiting_logs_.erase(found);
  if (reply.status_code() != 0) {
    return Answer(waiting.call, absl::Status(static_cast<absl::StatusCode>(reply.status_code()),
                                             reply.status_message()));
  }
  *waiting.reply = std::move(reply);
  Answer(waiting.call, JobReply{});
}

void Shell::FailLogsOf(SessionId session) {
  for (auto waiting = waiting_logs_.begin(); waiting != waiting_logs_.end();) {
    if (waiting->second.session != session) {
      ++waiting;
      continue;
    }
    const CallId call = waiting->second.call;
    waiting = waiting_logs_.erase(waiting);
    Answer(call, absl::UnavailableError("the worker that holds the log has disconnected"));
  }
}

// ---- sessions -----------------------------------------------------------------------------------

absl::StatusOr<SessionId> Shell::OpenSession(Incarnation incarnation, v1::Hello hello,
                                             std::shared_ptr<SessionStream> stream) {
  SessionId session;
  {
    MutexLock lock(&mutex_);
    RETURN_IF_ERROR(Refusal());
    if (sessions_.size() >= kSessionsMax) {
      return absl::ResourceExhaustedError(
          absl::StrCat("more than ", kSessionsMax, " daemons are connected"));
    }
    session = SessionId(next_session_++);
    sessions_.emplace(session, std::move(stream));
    parts_.metrics.Sessions(sessions_.size());
  }
  parts_.log.Info("session opened", {{"worker", hello.worker()},
                                     {"session", session.value()},
                                     {"incarnation", incarnation.value()}});
  loop_->Post(
      [this, event = SessionOpened{session, incarnation, std::move(hello)}] { Handle(event); });
  return session;
}

void Shell::Deliver(SessionId session, v1::FromWorker message, absl::AnyInvocable<void()> handled) {
  loop_->Post(
      [this, session, message = std::move(message), handled = std::move(handled)]() mutable {
        if (message.has_log()) {
          OnLogReply(session, std::move(*message.mutable_log()));
        } else {
          Handle(SessionMessage{session, std::move(message)});
        }
        handled();
      });
}

void Shell::CloseSession(SessionId session) {
  {
    MutexLock lock(&mutex_);
    if (sessions_.erase(session) == 0) return;
    parts_.metrics.Sessions(sessions_.size());
  }
  parts_.log.Info("session closed", {{"session", session.value()}});
  loop_->Post([this, session] {
    Handle(SessionClosed{session});
    FailLogsOf(session);
  });
}

std::shared_ptr<SessionStream> Shell::StreamOf(SessionId session) {
  MutexLock lock(&mutex_);
  const auto found = sessions_.find(session);
  return found == sessions_.end() ? nullptr : found->second;
}

// ---- on the loop --------------------------------------------------------------------------------

void Shell::Handle(const CoreEvent& event) {
  {
    MutexLock lock(&mutex_);
    if (!failure_.ok()) return;
  }
  Enqueue({.output = core_->Handle(event, Now())});
}

void Shell::Enqueue(Pending pending) {
  CHECK(loop_->OnLoop());
  std::set<JobId> changed;
  for (const CoreAction& action : pending.output.actions) {
    if (const auto* timer = std::get_if<TimerAction>(&action)) ArmTimer(timer->at);
    const auto* job = std::get_if<JobChanged>(&action);
    if (job == nullptr || !changed.insert(job->job).second) continue;
    absl::StatusOr<v1::Job> now = core_->GetJob(job->job.value());
    if (now.ok()) pending.changed.push_back(std::make_shared<const v1::Job>(*std::move(now)));
  }
  pending.last_event = core_->last_event_sequence();

  MutexLock lock(&queue_mutex_);
  auto room = [this]() ABSL_SHARED_LOCKS_REQUIRED(queue_mutex_) {
    return writer_failed_ || queue_.size() < kOutputsWaitingMax;
  };
  queue_mutex_.Await(Condition(&room));
  if (!writer_failed_) queue_.push_back(std::move(pending));
}

void Shell::ArmTimer(absl::Time at) {
  timer_wanted_ = at;
  // One that rings earlier is kept and finds out then.
  if (at == absl::InfiniteFuture() || timer_armed_ <= at) return;
  timer_armed_ = at;
  const uint64_t generation = ++timer_generation_;
  loop_->PostAfter(at - Now(), [this, generation] { OnTimer(generation); });
}

void Shell::OnTimer(uint64_t generation) {
  if (generation != timer_generation_) return;
  timer_armed_ = absl::InfiniteFuture();
  if (Now() < timer_wanted_) return ArmTimer(timer_wanted_);
  timer_wanted_ = absl::InfiniteFuture();
  Handle(TimerFired{});
}

void Shell::SampleWorkers() {
  parts_.metrics.Workers(core_->ListWorkers());
  loop_->PostAfter(kWorkerSampleInterval, [this] { SampleWorkers(); });
}

// ---- on the writer ------------------------------------------------------------------------------

void Shell::RunWriter() {
  while (true) {
    std::vector<Pending> group;
    {
      MutexLock lock(&queue_mutex_);
      writer_busy_ = false;
      auto work = [this]() ABSL_SHARED_LOCKS_REQUIRED(queue_mutex_) {
        return writer_stop_ || !queue_.empty();
      };
      queue_mutex_.Await(Condition(&work));
      if (queue_.empty()) return;
      writer_busy_ = true;
      for (size_t bytes = 0; !queue_.empty() && bytes < kWriteBytesMax;) {
        bytes += BytesOf(queue_.front().output.batch);
        group.push_back(std::move(queue_.front()));
        queue_.pop_front();
      }
    }
    if (const absl::Status written = WriteGroup(group); !written.ok()) return Fail(written);
    for (Pending& pending : group) Release(pending);
  }
}

absl::Status Shell::WriteGroup(const std::vector<Pending>& group) {
  std::vector<Batch> batches;
  size_t bytes = 0;
  for (const Pending& pending : group) {
    if (pending.output.batch.empty()) continue;
    bytes += BytesOf(pending.output.batch);
    batches.push_back(pending.output.batch);
  }
  if (batches.empty()) return absl::OkStatus();
  const absl::Duration start = parts_.clock.Monotonic();
  RETURN_IF_ERROR(parts_.store.Write(batches));
  parts_.metrics.Wrote(batches.size(), bytes, parts_.clock.Monotonic() - start);
  return absl::OkStatus();
}

void Shell::Release(Pending& pending) {
  // What changed is shown first, so that whoever gets a reply can read what it speaks of.
  ShowChanges(pending);
  for (CoreAction& action : pending.output.actions) Act(action);
  if (pending.then) pending.then();
}

void Shell::ShowChanges(const Pending& pending) {
  for (const auto& job : pending.changed) {
    uint64_t submit_sequence = 0;
    if (!shown_->Has(job->id())) {
      for (const Batch::Change& change : pending.output.batch.changes) {
        v1::JobRecord record;
        if (change.table == Table::kJobs && change.value.has_value() &&
            record.ParseFromString(*change.value) && record.job().id() == job->id()) {
          submit_sequence = record.submit_sequence();
        }
      }
      CHECK(submit_sequence != 0) << "job " << job->id() << " changed before its row was written";
    }
    const std::shared_ptr<const v1::Job> before = shown_->Find(job->id());
    shown_->ShowJob(job, submit_sequence);
    if (IsFinal(job->state()) && before != nullptr && !IsFinal(before->state())) {
      loop_->PostAfter(parts_.ended_job_series_kept, [this, name = job->name()] {
        const auto newest = shown_->Find(name);
        if (newest == nullptr || IsFinal(newest->state())) parts_.metrics.ForgetJob(name);
      });
    }
  }
  for (const Batch::Change& change : pending.output.batch.changes) {
    if (change.table == Table::kJobs && !change.value.has_value()) shown_->ForgetJob(change.key);
  }
  for (const CoreAction& action : pending.output.actions) {
    if (const auto* appended = std::get_if<EventAppended>(&action)) {
      shown_->ShowEvent(appended->event);
    }
  }
  shown_->SetLastEvent(pending.last_event);
}

void Shell::Act(CoreAction& action) {
  if (auto* reply = std::get_if<ReplyAction>(&action)) {
    if (reply->status.ok()) {
      Answer(reply->call, JobReply{std::move(reply->job), reply->existed});
    } else {
      Answer(reply->call, reply->status);
    }
  } else if (auto* send = std::get_if<SendAction>(&action)) {
    send->message.set_cluster_id(cluster_id_);
    send->message.set_leader_term(leader_term_);
    if (const auto stream = StreamOf(send->session)) stream->Send(std::move(send->message));
  } else if (const auto* close = std::get_if<CloseAction>(&action)) {
    if (const auto stream = StreamOf(close->session)) stream->Close(close->status);
  } else if (const auto* measured = std::get_if<Measured>(&action)) {
    parts_.metrics.Observe(*measured);
  }
  // JobChanged and EventAppended were shown, TimerAction was armed on the loop.
}

void Shell::Fail(const absl::Status& status) {
  parts_.log.Error("cannot write the state; the coordinator refuses service and stops",
                   {{"status", status.ToString()}});
  {
    MutexLock lock(&mutex_);
    failure_ = status;
  }
  {
    MutexLock lock(&queue_mutex_);
    writer_failed_ = true;
    queue_.clear();
  }
  EndAll(absl::UnavailableError(
      absl::StrCat("the coordinator cannot write its state and stops: ", status.message())));
  if (on_failure_) on_failure_(status);
}

}  // namespace muster::coordinator
