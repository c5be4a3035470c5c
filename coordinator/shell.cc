#include "coordinator/shell.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "proto/job_state.h"

namespace muster::coordinator {
namespace {

absl::Status StoppingError() {
  return absl::UnavailableError("the coordinator is stopping; retry");
}

absl::Status FailedError(const absl::Status& failure) {
  return absl::UnavailableError(
      absl::StrCat("the coordinator cannot write its state and stops: ", failure.message()));
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
  // The loop feeds the writer, and both wake watchers.
  loop_->Stop();
  writer_.reset();
  watch_loop_->Stop();
  backup_loop_->Stop();
}

absl::Status Shell::Recover(Recovery recover) {
  CoreOutput output;
  ASSIGN_OR_RETURN(core_, recover(Now(), &output));
  cluster_id_ = core_->cluster_id();
  leader_term_ = core_->leader_term();
  // The new leader term must be durable before any message carries it.
  if (!output.batch.empty()) RETURN_IF_ERROR(parts_.store.Write({output.batch}));
  sessions_ = std::make_unique<Sessions>(
      Sessions::Leader{cluster_id_, core_->history_id(), leader_term_}, parts_.metrics);
  watch_loop_ = std::make_unique<ThreadLoop>(parts_.clock);
  backup_loop_ = std::make_unique<ThreadLoop>(parts_.clock);
  published_ = std::make_unique<PublishedState>(*watch_loop_, parts_.metrics);
  Publish(output.actions);
  std::erase_if(output.actions, [](const CoreAction& action) {
    return std::holds_alternative<JobChanged>(action) ||
           std::holds_alternative<EventAppended>(action) ||
           std::holds_alternative<FleetUsageChanged>(action) ||
           std::holds_alternative<TokenChanged>(action);
  });
  published_->SetLastEvent(core_->last_event_sequence());
  const absl::Duration took = parts_.clock.Monotonic() - monotonic_start_;
  parts_.metrics.Recovered(leader_term_, took);
  parts_.log.Info("recovered", {{"cluster_id", cluster_id_},
                                {"history_id", core_->history_id()},
                                {"leader_term", leader_term_},
                                {"last_event", published_->last_event()},
                                {"seconds", absl::ToDoubleSeconds(took)}});
  output.batch.changes.clear();
  writer_ = std::make_unique<Writer>(
      Writer::Parts{parts_.store, parts_.clock, parts_.metrics},
      [this](PendingOutput& pending) { Release(pending); },
      [this](const absl::Status& status) { Fail(status); });
  loop_ = std::make_unique<ThreadLoop>(parts_.clock);
  log_relay_ = std::make_unique<LogRelay>(*core_, *sessions_, calls_, *loop_);
  loop_->Post([this, recovered = std::move(output)]() mutable {
    Enqueue({.output = std::move(recovered)});
    Sample(parts_.clock.Monotonic());
  });
  return absl::OkStatus();
}

void Shell::Drain() {
  {
    MutexLock lock(&mutex_);
    if (draining_) return;
    draining_ = true;
    // Under the lock, so that it cannot replace the reason of a failure at the same time.
    if (failure_.ok()) {
      calls_.Refuse(StoppingError());
      sessions_->Refuse(StoppingError());
    }
  }
  // What was taken before is on the loop by now, or with the writer.
  Notification handled;
  loop_->Post([&handled] { handled.Notify(); });
  handled.WaitForNotification();
  writer_->AwaitIdle();
  EndAll(StoppingError());
}

bool Shell::draining() const {
  MutexLock lock(&mutex_);
  return draining_ || !failure_.ok();
}

void Shell::EndAll(const absl::Status& status) {
  calls_.FailAll(status);
  sessions_->CloseAll(status);
  published_->WakeAll();
}

absl::Time Shell::Now() const {
  return wall_start_ + (parts_.clock.Monotonic() - monotonic_start_);
}

// ---- calls --------------------------------------------------------------------------------------

void Shell::Submit(v1::JobSpec spec, std::string request_id, Caller caller, Done<JobReply> done) {
  const auto call = calls_.Add<JobReply>(std::move(done));
  if (!call.has_value()) return;
  loop_->Post(
      [this, event = SubmitEvent{call->id, std::move(spec), std::move(request_id),
                                 std::move(caller)}]() mutable { Handle(std::move(event)); });
}

void Shell::SubmitArray(std::vector<v1::JobSpec> tasks, std::string request_id, Caller caller,
                        Done<JobReply> done) {
  const auto call = calls_.Add<JobReply>(std::move(done));
  if (!call.has_value()) return;
  loop_->Post(
      [this, event = SubmitArrayEvent{call->id, std::move(tasks), std::move(request_id),
                                      std::move(caller)}]() mutable { Handle(std::move(event)); });
}

void Shell::ChangeArray(std::string array, std::optional<ChangeJobEvent::Change> change,
                        std::string reason, Caller caller, Done<JobReply> done) {
  const auto call = calls_.Add<JobReply>(std::move(done));
  if (!call.has_value()) return;
  loop_->Post([this, event = ChangeArrayEvent{call->id, std::move(array), change, std::move(reason),
                                              std::move(caller)}] { Handle(event); });
}

void Shell::Cancel(std::string job, Caller caller, Done<JobReply> done) {
  if (!published_->Has(job)) return done(published_->NotFound(job));
  const auto call = calls_.Add<JobReply>(std::move(done));
  if (!call.has_value()) return;
  loop_->Post(
      [this, event = CancelEvent{call->id, std::move(job), std::move(caller)}] { Handle(event); });
}

void Shell::ChangeJob(std::string job, ChangeJobEvent::Change change, std::string reason,
                      Caller caller, Done<JobReply> done, int32_t ranks) {
  if (!published_->Has(job)) return done(published_->NotFound(job));
  const auto call = calls_.Add<JobReply>(std::move(done));
  if (!call.has_value()) return;
  loop_->Post([this, event = ChangeJobEvent{call->id, std::move(job), change, std::move(reason),
                                            std::move(caller), ranks}] { Handle(event); });
}

void Shell::RemoveWorker(std::string worker, Caller caller, Done<JobReply> done) {
  const auto call = calls_.Add<JobReply>(std::move(done));
  if (!call.has_value()) return;
  loop_->Post([this, event = RemoveWorkerEvent{call->id, std::move(worker), std::move(caller)}] {
    Handle(event);
  });
}

void Shell::ChangeFleet(FleetEvent::Request request, Caller caller, Done<JobReply> done) {
  const auto call = calls_.Add<JobReply>(std::move(done));
  if (!call.has_value()) return;
  loop_->Post([this, event = FleetEvent{call->id, std::move(request), std::move(caller)}] {
    Handle(event);
  });
}

void Shell::CreateToken(v1::TokenRow row, Caller caller, Done<JobReply> done) {
  const auto call = calls_.Add<JobReply>(std::move(done));
  if (!call.has_value()) return;
  loop_->Post([this, event = CreateTokenEvent{call->id, std::move(row), std::move(caller)}] {
    Handle(event);
  });
}

void Shell::RevokeToken(std::string id, Caller caller, Done<JobReply> done) {
  const auto call = calls_.Add<JobReply>(std::move(done));
  if (!call.has_value()) return;
  loop_->Post([this, event = RevokeTokenEvent{call->id, std::move(id), std::move(caller)}] {
    Handle(event);
  });
}

void Shell::Audit(v1::AuditEntry entry) {
  loop_->Post([this, event = AuditEvent{std::move(entry)}] { Handle(event); });
}

void Shell::Backup(std::string directory, absl::AnyInvocable<void(absl::Status)> done) {
  backup_loop_->Post([this, directory = std::move(directory), done = std::move(done)]() mutable {
    done(parts_.store.Backup(directory));
  });
}

absl::StatusOr<std::shared_ptr<const v1::Job>> Shell::GetJob(const std::string& name_or_id) {
  std::shared_ptr<const v1::Job> job = published_->Find(name_or_id);
  if (job == nullptr) return published_->NotFound(name_or_id);
  return job;
}

void Shell::ListWorkers(Done<std::vector<v1::Worker>> done) {
  const auto call = calls_.Add<std::vector<v1::Worker>>(std::move(done));
  if (!call.has_value()) return;
  loop_->Post([this, call = *call] {
    Enqueue({.then = [this, call, workers = core_->ListWorkers()]() mutable {
      calls_.Answer<std::vector<v1::Worker>>(call, std::move(workers));
    }});
  });
}

void Shell::Explain(ExplainQuery about, Done<Explained> done) {
  const auto call = calls_.Add<Explained>(std::move(done));
  if (!call.has_value()) return;
  loop_->Post([this, call = *call, about = std::move(about)] {
    absl::StatusOr<Explained> explained = core_->Explain(about, Now());
    // The core knows arrays too; what is published knows which name may have been meant.
    if (const auto* name = std::get_if<std::string>(&about);
        name != nullptr && absl::IsNotFound(explained.status())) {
      explained = published_->NotFound(*name);
    }
    // Answered once what it rests on is durable.
    Enqueue({.then = [this, call, explained = std::move(explained)]() mutable {
      calls_.Answer<Explained>(call, std::move(explained));
    }});
  });
}

void Shell::Usage(Done<OpenUsage> done) {
  const auto call = calls_.Add<OpenUsage>(std::move(done));
  if (!call.has_value()) return;
  loop_->Post([this, call = *call] {
    // Its rows of the store are durable then.
    Enqueue({.then = [this, call, open = core_->Usage(Now())]() mutable {
      backup_loop_->Post([this, call, open = std::move(open)]() mutable {
        calls_.Answer<OpenUsage>(call, std::move(open));
      });
    }});
  });
}

void Shell::GetQueues(Done<v1::GetQueuesResponse> done) {
  const auto call = calls_.Add<v1::GetQueuesResponse>(std::move(done));
  if (!call.has_value()) return;
  loop_->Post([this, call = *call] {
    Enqueue({.then = [this, call, queues = core_->GetQueues(Now())]() mutable {
      calls_.Answer<v1::GetQueuesResponse>(call, std::move(queues));
    }});
  });
}

void Shell::GetQueuePolicy(Done<v1::QueuePolicy> done) {
  const auto call = calls_.Add<v1::QueuePolicy>(std::move(done));
  if (!call.has_value()) return;
  loop_->Post([this, call = *call] {
    Enqueue({.then = [this, call, policy = core_->queue_policy()]() mutable {
      calls_.Answer<v1::QueuePolicy>(call, std::move(policy));
    }});
  });
}

void Shell::ApplyQueues(v1::QueuePolicy policy, Caller caller, Done<JobReply> done) {
  const auto call = calls_.Add<JobReply>(std::move(done));
  if (!call.has_value()) return;
  loop_->Post([this, event = ApplyQueuesEvent{call->id, std::move(policy), std::move(caller)}] {
    Handle(event);
  });
}

// ---- sessions -----------------------------------------------------------------------------------

absl::StatusOr<SessionId> Shell::OpenSession(Incarnation incarnation, v1::Hello hello,
                                             std::shared_ptr<SessionStream> stream) {
  ASSIGN_OR_RETURN(const SessionId session, sessions_->Add(std::move(stream)));
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
        if (!log_relay_->TakeReply(session, message)) {
          Handle(SessionMessage{session, std::move(message)});
        }
        handled();
      });
}

void Shell::CloseSession(SessionId session) {
  if (!sessions_->Remove(session)) return;
  parts_.log.Info("session closed", {{"session", session.value()}});
  loop_->Post([this, session] {
    Handle(SessionClosed{session});
    log_relay_->OnSessionClosed(session);
  });
}

// ---- on the loop --------------------------------------------------------------------------------

void Shell::Handle(CoreEvent event) {
  {
    MutexLock lock(&mutex_);
    if (!failure_.ok()) return;
  }
  Enqueue({.output = core_->Handle(std::move(event), Now())});
}

void Shell::Enqueue(PendingOutput pending) {
  CHECK(loop_->OnLoop());
  for (const CoreAction& action : pending.output.actions) {
    if (const auto* timer = std::get_if<TimerAction>(&action)) ArmTimer(timer->at);
  }
  std::erase_if(pending.output.actions, [](const CoreAction& action) {
    return std::holds_alternative<TimerAction>(action);
  });
  // A heartbeat that told nothing new waits for no write.
  if (pending.output.batch.empty() && pending.output.actions.empty() && !pending.then) return;
  pending.last_event = core_->last_event_sequence();
  writer_->Push(std::move(pending));
}

void Shell::ArmTimer(absl::Time at) {
  timer_wanted_ = at;
  // An armed timer that is due earlier stays armed: OnTimer finds that the wanted time has not come
  // and arms another one.
  if (at == absl::InfiniteFuture() || timer_armed_ <= at) return;
  timer_armed_ = at;
  const uint64_t generation = ++timer_generation_;
  loop_->PostAfter(at - Now(), [this, generation] { OnTimer(generation); });
}

void Shell::OnTimer(uint64_t generation) {
  if (generation != timer_generation_) return;  // replaced by an earlier one
  timer_armed_ = absl::InfiniteFuture();
  if (Now() < timer_wanted_) return ArmTimer(timer_wanted_);
  timer_wanted_ = absl::InfiniteFuture();
  Handle(TimerFired{});
}

void Shell::Sample(absl::Duration due) {
  const absl::Duration now = parts_.clock.Monotonic();
  parts_.metrics.LoopDelay(std::max(absl::ZeroDuration(), now - due));
  if (parts_.probes != nullptr) parts_.probes->Turned();
  if (now >= workers_due_) {
    std::vector<v1::Worker> workers = core_->ListWorkers();
    workers_due_ = now + kWorkerSampleInterval * std::max(1.0, static_cast<double>(workers.size()) /
                                                                   kWorkersSampledPerInterval);
    parts_.metrics.Workers(workers);
    published_->SetWorkers(std::move(workers));
  }
  const absl::Duration next = now + kWorkerSampleInterval;
  loop_->PostAfter(kWorkerSampleInterval, [this, next] { Sample(next); });
}

// ---- on the writer thread -----------------------------------------------------------------------

void Shell::Release(PendingOutput& pending) {
  // Published before the replies leave, so that a caller can read what its reply is about.
  Publish(pending.output.actions);
  published_->SetLastEvent(pending.last_event);
  for (CoreAction& action : pending.output.actions) Act(action);
  if (pending.then) pending.then();
}

void Shell::Publish(const std::vector<CoreAction>& actions) {
  for (const CoreAction& action : actions) {
    if (const auto* changed = std::get_if<JobChanged>(&action)) {
      const v1::JobState before = published_->PublishJob(*changed);
      const v1::Job& now = *changed->changed[JobPart::kState];
      if (IsFinal(now.state()) && before != v1::JOB_STATE_UNSPECIFIED && !IsFinal(before)) {
        ForgetSeriesLater(now.name());
      }
    } else if (const auto* forgotten = std::get_if<JobForgotten>(&action)) {
      published_->RemoveJob(forgotten->job.value());
    } else if (const auto* appended = std::get_if<EventAppended>(&action)) {
      published_->PublishEvent(appended->event);
    } else if (const auto* fleet = std::get_if<FleetUsageChanged>(&action)) {
      published_->SetFleetUsage(fleet->usage);
      int64_t spares = 0;
      for (const v1::ClassTime& time : fleet->usage.times()) {
        if (time.usage_class() == v1::USAGE_CLASS_SPARE) spares += time.devices();
      }
      parts_.metrics.Spares(spares, fleet->spares_missing);
    } else if (const auto* token = std::get_if<TokenChanged>(&action)) {
      tokens_.Put(token->row);
    } else if (const auto* gone = std::get_if<TokenForgotten>(&action)) {
      tokens_.Remove(gone->id);
    }
  }
}

void Shell::ForgetSeriesLater(const std::string& job_name) {
  loop_->PostAfter(parts_.ended_job_series_kept, [this, job_name] {
    // A newer job of this name may run by then: the series are its own.
    const auto newest = published_->Find(job_name);
    if (newest == nullptr || IsFinal(newest->state())) parts_.metrics.ForgetJob(job_name);
  });
}

void Shell::Act(CoreAction& action) {
  if (auto* reply = std::get_if<ReplyAction>(&action)) {
    const PendingCall<JobReply> call{reply->call};
    if (reply->status.ok()) {
      calls_.Answer<JobReply>(
          call, JobReply{std::move(reply->job), reply->existed, std::move(reply->workers),
                         std::move(reply->array), std::move(reply->warnings)});
    } else {
      calls_.Answer<JobReply>(call, reply->status);
    }
  } else if (auto* send = std::get_if<SendAction>(&action)) {
    sessions_->Send(send->session, std::move(send->message));
  } else if (const auto* close = std::get_if<CloseAction>(&action)) {
    sessions_->Close(close->session, close->status);
  } else if (const auto* measured = std::get_if<Measured>(&action)) {
    parts_.metrics.Observe(*measured);
  }
  // Publish() has done what is published.
}

void Shell::Fail(const absl::Status& status) {
  parts_.log.Error("cannot write the state; the coordinator refuses service and stops",
                   {{"status", status.ToString()}});
  const absl::Status failed = FailedError(status);
  {
    MutexLock lock(&mutex_);
    failure_ = status;
    calls_.Refuse(failed);
    sessions_->Refuse(failed);
  }
  EndAll(failed);
  if (on_failure_) on_failure_(status);
}

}  // namespace muster::coordinator
