#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "coordinator/core/restore.h"
#include "coordinator/core/schema.h"
#include "muster/v1/stored.pb.h"
#include "proto/job_state.h"
#include "tests/sim/world.h"

namespace muster::sim {

using coordinator::Core;
using coordinator::CoreConfig;
using coordinator::CoreEvent;
using coordinator::CoreOutput;

namespace {

// Limits shorter than the defaults, so that each is reached within a simulated minute or two.
CoreConfig Config(const Options& options) {
  CoreConfig config;
  // Of the events of a day, most are heartbeats.
  if (options.day()) config.heartbeat_interval = absl::Seconds(1);
  config.lost_after = absl::Seconds(12);
  config.partition_hold = absl::Seconds(75);
  config.stop_grace = absl::Seconds(2);
  config.progress_timeout = absl::Seconds(40);
  return config;
}

}  // namespace

void World::StartCoordinator() {
  if (core_ != nullptr) return;
  ++coordinator_generation_;
  syncing_ = false;
  unsynced_.clear();
  published_.clear();
  core_timer_ = absl::InfiniteFuture();
  ReadEventsBack();
  if (faults_on_ && options_.faults != Faults::kNone && rng_.Chance(0.3)) {
    core_skew_ = absl::Seconds(static_cast<int64_t>(rng_.Below(7200)) - 3600);
    Count("clock step");
  }
  CoreOutput output;
  absl::StatusOr<std::unique_ptr<Core>> core =
      Core::Recover(Config(options_), *store_, Rng(rng_.Next()), CoreNow(), &output);
  if (!core.ok()) return Violate(absl::StrCat("recovery failed: ", core.status().ToString()));
  core_ = *std::move(core);
  Trace(absl::StrCat("coordinator starts, term ", core_->leader_term()));
  CarryOut(std::move(output));
  ReadJobsBack(coordinator_generation_);
}

// Changes that became durable right before a crash were not published; users see them when they ask
// again.
void World::ReadJobsBack(uint64_t generation) {
  if (generation != coordinator_generation_ || core_ == nullptr) return;
  if (!unsynced_.empty() || syncing_) {
    queue_.After(absl::Milliseconds(10), [this, generation] { ReadJobsBack(generation); });
    return;
  }
  uint64_t next = 0;
  for (const v1::Job& job : core_->ListJobs(0, 1000, &next)) CheckJob(job, /*history=*/true);
}

void World::CrashCoordinator(absl::string_view why) {
  if (core_ == nullptr) return;
  Trace(absl::StrCat("coordinator crashes: ", why, ", ", unsynced_.size(), " outputs unsynced"));
  Count("coordinator crash");
  // Of the outputs that were being written when the process died, any prefix may have reached the
  // disk.
  const size_t reached = unsynced_.empty() ? 0 : rng_.Below(unsynced_.size() + 1);
  for (size_t i = 0; i < reached; ++i) {
    // A disk that refuses writes keeps none of them.
    if (rng_.Chance(0.5)) {
      if (!store_->Write({unsynced_[i].batch}).ok()) break;
    } else {
      if (store_->WriteUnsynced({unsynced_[i].batch}).ok()) Count("lost fsync");
      break;
    }
  }
  store_->Crash();
  store_->FailWrites(false);
  crash_in_write_ = false;
  paused_ = synced_ = false;
  arrived_.clear();
  core_.reset();
  unsynced_.clear();
  syncing_ = false;
  ++coordinator_generation_;
  submit_calls_.clear();
  array_calls_.clear();
  for (auto& [id, connection] : connections_) {
    connection.coordinator_open = false;
    if (connection.worker_open) Break(id);
  }
  const uint64_t generation = coordinator_generation_;
  queue_.After(absl::Milliseconds(100) + Outage(0.2, 20000, 2000), [this, generation] {
    if (generation == coordinator_generation_) StartCoordinator();
  });
}

void World::TakeBackup() {
  if (core_ == nullptr || !unsynced_.empty() || syncing_) return;
  Trace("a backup is written");
  backup_ = Backup{store_->Copy(), committed_, epochs_, final_states_};
}

void World::RestoreBackup() {
  if (!backup_.has_value() || core_ == nullptr) return;
  CrashCoordinator("its disk is gone");
  Count("backup restored");
  // It stays: an operator may restore it again. That machine's clock is not behind the one that
  // restored it before, as the steps of CoreNow() may be.
  store_ = backup_->store->Copy();
  if (std::exchange(backup_->restored, true)) Count("backup restored again");
  CHECK_OK(coordinator::MarkRestored(*store_, rng_, queue_.now()));
  committed_ = backup_->committed;
  epochs_ = backup_->epochs;
  final_states_ = backup_->final_states;
  // Users find that what they did after the backup is forgotten, and do it again.
  for (auto& [request, submission] : submissions_) {
    if (submission.id.empty()) continue;
    const auto row = store_->Get(coordinator::Table::kSpecs, submission.id);
    if (!row.ok() || !row->has_value()) {
      submission.id.clear();
      queue_.After(absl::Seconds(1),
                   [this, request = request, spec = submission.spec] { TrySubmit(request, spec); });
    } else if (submission.cancel) {
      queue_.After(absl::Seconds(1), [this, id = submission.id] { TryCancel(id); });
    }
  }
}

void World::ReturnToBackup() {
  if (!backup_.has_value() || rng_.Chance(0.3)) return TakeBackup();
  if (core_ == nullptr) return;
  RestoreBackup();
  returned_ = true;
  FoldRestoredEvents();
  CHECK_OK(store_->Scan(coordinator::Table::kStates, "", "",
                        [this](const std::string& id, const std::string& value) {
                          v1::StateRow state;
                          CHECK(state.ParseFromString(value));
                          if (!IsFinal(state.state())) {
                            leapt_[id] = {state.epoch(), state.epoch_floor()};
                          }
                          return true;
                        }));
  // An operator looks whether the queues are as they should be.
  if (std::exchange(queues_applied_, false)) TryApplyQueues();
  // Arrays that were forgotten are submitted as a whole.
  std::map<std::string, std::vector<v1::JobSpec>> forgotten;
  for (const auto& [request, array] : array_ids_) {
    for (int i = 0;; ++i) {
      const auto task = submissions_.find(absl::StrCat(request, "/", i));
      if (task == submissions_.end() || !task->second.id.empty()) break;
      forgotten[request].push_back(task->second.spec);
    }
  }
  for (auto& [request, tasks] : forgotten) {
    array_ids_.erase(request);
    TrySubmitArray(request, std::move(tasks));
  }
}

// It is a prefix of what was seen, so that the checks of its events hold again.
void World::FoldRestoredEvents() {
  committed_by_.clear();
  ended_epochs_.clear();
  memberships_.clear();
  cordoned_.clear();
  holding_.clear();
  CHECK_OK(store_->Scan(coordinator::Table::kEvents, "", "",
                        [this](const std::string&, const std::string& value) {
                          v1::Event event;
                          CHECK(event.ParseFromString(value));
                          FoldEvent(event);
                          return true;
                        }));
}

void World::PauseCoordinator(absl::Duration time) {
  if (core_ == nullptr || paused_) return;
  Trace(absl::StrCat("coordinator is stopped for ", absl::FormatDuration(time)));
  Count("coordinator pause");
  paused_ = true;
  const uint64_t generation = coordinator_generation_;
  queue_.After(time, [this, generation] {
    if (generation == coordinator_generation_) ResumeCoordinator();
  });
}

// Whether the timer or a message runs first is up to the operating system.
void World::ResumeCoordinator() {
  Trace(absl::StrCat("coordinator goes on, ", arrived_.size(), " events wait"));
  paused_ = false;
  if (std::exchange(synced_, false)) SyncDone();
  const bool due = core_timer_ <= CoreNow();
  const bool timer_first = rng_.Chance(0.5);
  const uint64_t generation = coordinator_generation_;
  if (due) core_timer_ = absl::InfiniteFuture();
  if (due && timer_first) Feed(coordinator::TimerFired{});
  std::deque<CoreEvent> arrived = std::exchange(arrived_, {});
  for (CoreEvent& event : arrived) {
    if (generation == coordinator_generation_) Feed(std::move(event));
  }
  if (due && !timer_first && generation == coordinator_generation_) {
    Feed(coordinator::TimerFired{});
  }
}

void World::Feed(CoreEvent event) {
  if (core_ == nullptr) return;
  if (paused_) {
    arrived_.push_back(std::move(event));
    return;
  }
  CarryOut(core_->Handle(std::move(event), CoreNow()));
}

// Like the shell's writer thread: outputs queue up while a sync runs. The next sync takes them all,
// and after it their actions are carried out, in order.
void World::CarryOut(CoreOutput output) {
  CheckReservations(output);
  if (output.batch.empty() && output.actions.empty()) return;
  unsynced_.push_back(std::move(output));
  if (syncing_) return;
  syncing_ = true;
  const uint64_t generation = coordinator_generation_;
  absl::Duration takes = absl::Microseconds(100 + rng_.Below(4000));
  if (queue_.now() < slow_disk_until_) takes += absl::Milliseconds(rng_.Below(2500));
  queue_.After(takes, [this, generation] {
    if (generation == coordinator_generation_) SyncDone();
  });
}

void World::SyncDone() {
  if (paused_) {
    synced_ = true;
    return;
  }
  std::vector<coordinator::Batch> batches;
  for (const CoreOutput& output : unsynced_) {
    if (!output.batch.empty()) batches.push_back(output.batch);
  }
  if (!batches.empty()) {
    if (crash_in_write_) return CrashCoordinator("killed during a write");
    if (absl::Status written = store_->Write(batches); !written.ok()) {
      return CrashCoordinator("its disk refused a write");
    }
  }
  syncing_ = false;
  std::deque<CoreOutput> released = std::move(unsynced_);
  unsynced_.clear();
  const uint64_t generation = coordinator_generation_;
  for (const CoreOutput& output : released) {
    for (const coordinator::CoreAction& action : output.actions) {
      Release(action);
      if (generation != coordinator_generation_) return;
    }
  }
}

void World::Release(const coordinator::CoreAction& action) {
  if (const auto* reply = std::get_if<coordinator::ReplyAction>(&action)) {
    Receive(*reply);
  } else if (const auto* send = std::get_if<coordinator::SendAction>(&action)) {
    auto found = connections_.find(send->session.value());
    if (found == connections_.end() || !found->second.coordinator_open) return;
    v1::FromCoordinator message = send->message;
    message.set_cluster_id(core_->cluster_id());
    message.set_history_id(core_->history_id());
    message.set_leader_term(core_->leader_term());
    if (message.has_desired()) CheckDesired(found->second.worker, message.desired());
    ToWorker(found->second, std::move(message));
  } else if (const auto* close = std::get_if<coordinator::CloseAction>(&action)) {
    Trace(
        absl::StrCat("session ", close->session.value(), " is closed: ", close->status.message()));
    CloseCoordinatorSide(close->session.value());
  } else if (const auto* timer = std::get_if<coordinator::TimerAction>(&action)) {
    core_timer_ = timer->at;
    if (timer->at == absl::InfiniteFuture()) return;
    const uint64_t generation = coordinator_generation_;
    queue_.At(timer->at - core_skew_, [this, generation, at = timer->at] {
      if (generation != coordinator_generation_ || core_timer_ != at || paused_) return;
      core_timer_ = absl::InfiniteFuture();
      Feed(coordinator::TimerFired{});
    });
  } else if (const auto* changed = std::get_if<coordinator::JobChanged>(&action)) {
    Publish(*changed);
  } else if (const auto* forgotten = std::get_if<coordinator::JobForgotten>(&action)) {
    published_.erase(forgotten->job.value());
  } else if (const auto* appended = std::get_if<coordinator::EventAppended>(&action)) {
    SeeEvent(appended->event);
  }
}

// Users see what was published before with the parts that changed.
void World::Publish(const coordinator::JobChanged& change) {
  v1::Job& job = published_[change.job.value()];
  using coordinator::JobPart;
  if (const auto& state = change.changed[JobPart::kState]; state != nullptr) {
    v1::Job before = std::exchange(job, *state);
    job.mutable_spec()->Swap(before.mutable_spec());
    job.mutable_ranks()->Swap(before.mutable_ranks());
    job.mutable_replacements()->Swap(before.mutable_replacements());
    job.mutable_losses()->Swap(before.mutable_losses());
    job.mutable_causes()->Swap(before.mutable_causes());
    job.mutable_checkpoints()->Swap(before.mutable_checkpoints());
  }
  for (const JobPart part : {JobPart::kSpec, JobPart::kRanks, JobPart::kCurve, JobPart::kHistory}) {
    const auto& changed = change.changed[part];
    if (changed == nullptr) continue;
    if (part == JobPart::kSpec) job.clear_spec();
    if (part == JobPart::kRanks) {
      job.clear_ranks();
      job.clear_replacements();
    }
    if (part == JobPart::kCurve) job.clear_losses();
    if (part == JobPart::kHistory) {
      job.clear_causes();
      job.clear_checkpoints();
    }
    job.MergeFrom(*changed);
  }
  CheckJob(job, change.changed[JobPart::kHistory] != nullptr);
}

// Checks an event as users see it: published, or read from the store after a crash.
void World::SeeEvent(const v1::Event& event) {
  Trace(absl::StrCat("event ", event.sequence(), " ", v1::EventKind_Name(event.kind()), " ",
                     event.job_id(), " e", event.epoch(), " ", event.worker(), " ", event.from(),
                     "->", event.to(), " ", event.message()));
  if (event.sequence() <= last_event_) {
    Violate(absl::StrCat("event ", event.sequence(), " was published after ", last_event_));
  }
  last_event_ = event.sequence();
  if (event.kind() == v1::EVENT_KIND_WORKER_LOST) {
    for (const auto& [key, process] : machines_[event.worker()].processes) {
      lost_.emplace(key.attempt.job.value(), key.attempt.epoch.value());
    }
  }
  if (event.kind() == v1::EVENT_KIND_ATTEMPT_STATE && event.from().empty() &&
      !allocated_.emplace(event.job_id(), event.epoch()).second) {
    Violate(absl::StrCat(event.job_id(), ": epoch ", event.epoch(), " was allocated twice"));
  }
  if (event.kind() == v1::EVENT_KIND_RANKS_GIVEN_UP) lost_.emplace(event.job_id(), event.epoch());
  FoldEvent(event);
  Count(v1::EventKind_Name(event.kind()));
}

void World::FoldEvent(const v1::Event& event) {
  if (event.kind() == v1::EVENT_KIND_CHECKPOINT_COMMITTED) {
    int64_t& newest = committed_by_[event.job_id()][event.epoch()];
    newest = std::max(newest, event.step());
  }
  CheckFencing(event);
  CheckMembership(event);
  CheckCordons(event);
  CheckTenants(event);
}

// Reads the events that became durable in a crash before they were published.
void World::ReadEventsBack() {
  const absl::Status read =
      store_->Scan(coordinator::Table::kEvents, coordinator::schema::EventKey(last_event_ + 1), "",
                   [this](const std::string&, const std::string& value) {
                     v1::Event event;
                     if (!event.ParseFromString(value)) Violate("an event is damaged");
                     SeeEvent(event);
                     return true;
                   });
  if (!read.ok()) Violate(absl::StrCat("events cannot be read: ", read.ToString()));
}

void World::Receive(const coordinator::ReplyAction& reply) {
  if (queues_call_ != 0 && reply.call.value() == queues_call_) {
    queues_applied_ = true;
    Count("queues defined");
    return;
  }
  if (const auto array = array_calls_.extract(reply.call.value())) {
    return TakeArrayReply(array.mapped(), reply);
  }
  auto call = submit_calls_.find(reply.call.value());
  if (call == submit_calls_.end()) return;  // the reply to a cancellation, or lost
  Submission& submission = submissions_[call->second];
  submit_calls_.erase(call);
  if (!reply.status.ok()) {
    return Violate(absl::StrCat("submission refused: ", reply.status.ToString()));
  }
  if (!submission.id.empty() && submission.id != reply.job.id()) {
    return Violate(absl::StrCat("request ", submission.request_id,
                                " made two jobs: ", submission.id, " and ", reply.job.id()));
  }
  submission.id = reply.job.id();
  Trace(absl::StrCat("user: job ", reply.job.id(), " accepted"));
  if (submission.cancel) {
    const std::string id = submission.id;
    queue_.After(absl::Milliseconds(rng_.Below(20000)), [this, id] { TryCancel(id); });
  }
}

}  // namespace muster::sim
