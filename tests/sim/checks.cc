#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "base/check.h"
#include "coordinator/core/decision_replay.h"
#include "coordinator/core/schema.h"
#include "coordinator/core/state_log.h"
#include "muster/v1/stored.pb.h"
#include "proto/class_time.h"
#include "proto/job_state.h"
#include "proto/spec/deadline.h"
#include "proto/spec/share.h"
#include "proto/time.h"
#include "tests/sim/world.h"

namespace muster::sim {

using coordinator::Core;
using coordinator::CoreConfig;
using coordinator::CoreOutput;

namespace {

double DeviceSecondsAt(absl::Time now, const v1::Usage& usage) {
  const double since =
      usage.has_as_of() ? std::max(0.0, absl::ToDoubleSeconds(now - FromProto(usage.as_of()))) : 0;
  double sum = 0;
  for (const v1::ClassTime& time : usage.times()) {
    sum += time.device_seconds() + DevicesIn(time) * since;
  }
  return sum;
}

}  // namespace

void World::Violate(const std::string& what) {
  if (!result_.violation.empty()) return;
  result_.violation = absl::StrCat(
      "at ", absl::FormatDuration(queue_.now() - absl::FromUnixSeconds(1'000'000'000)), ": ", what);
  Trace(absl::StrCat("VIOLATION ", what));
}

void World::Trace(absl::string_view line) {
  for (const char c : line) {
    hash_ = (hash_ ^ static_cast<unsigned char>(c)) * 1099511628211ull;
  }
  hash_ = (hash_ ^ static_cast<uint64_t>(absl::ToUnixNanos(queue_.now()))) * 1099511628211ull;
  if (!options_.trace) return;
  std::printf("%10.4f  %s\n",
              absl::ToDoubleSeconds(queue_.now() - absl::FromUnixSeconds(1'000'000'000)),
              std::string(line).c_str());
}

void World::CheckAll() {
  // In a large cluster a check costs as much as many events, and a day has a million of them. What
  // is broken stays so until the next check.
  if (options_.large() && result_.events % 101 != 0) return;
  if (options_.day() && result_.events % 307 != 0) return;
  CheckMachines();
  if (core_ == nullptr) return;
  // An index that is wrong stays so.
  const bool index = options_.scale != Options::Scale::kSmall || result_.events % 11 == 0;
  for (const std::string& broken : core_->CheckInvariants(index)) Violate(broken);
  CheckQueues();
  // Its costs grow with the length of the log.
  if (result_.events % (options_.day() ? 307 * 257 : 97) == 0) CheckRecovery();
}

// No queue uses more than it may.
void World::CheckQueues() {
  if (!queues_applied_) return;
  const v1::GetQueuesResponse queues = core_->GetQueues(CoreNow());
  for (const v1::QueueStatus& queue : queues.queues()) {
    for (const v1::QueueUse& use : queue.uses()) {
      if (use.has_limit() && use.used() > use.limit()) {
        Violate(absl::StrCat("queue ", queue.name(), " uses ", use.used(), " ", use.device(),
                             " of ", use.limit()));
      }
      if (use.used() < 0) Violate(absl::StrCat("queue ", queue.name(), " uses ", use.used()));
    }
    if (queue.has_running_jobs_max() && queue.running_jobs() > queue.running_jobs_max()) {
      Violate(absl::StrCat("queue ", queue.name(), " runs ", queue.running_jobs(), " jobs of ",
                           queue.running_jobs_max()));
    }
  }
}

void World::CheckMachines() {
  for (const auto& [name, machine] : machines_) {
    struct Holder {
      const Process* last = nullptr;
      int32_t taken = 0;  // thousandths of the device
    };
    std::map<std::string, Holder> holders;
    for (const auto& [key, process] : machine.processes) {
      if (!process.alive && !process.stray) continue;
      Holder& holder = holders[process.device];
      holder.taken += process.share;
      if (holder.last != nullptr) Count("device shared");
      if (holder.taken > spec::kWholeDevice) {
        Violate(absl::StrCat(name, " ", process.device, " runs ", ToString(key), " and ",
                             ToString(holder.last->key)));
      }
      holder.last = &process;
    }
    if (machine.daemon == nullptr) continue;
    for (const std::string& broken : machine.daemon->CheckInvariants()) {
      Violate(absl::StrCat(name, ": ", broken));
    }
  }
}

// A Desired must be durable before it leaves, and must place nothing on a device that is not proven
// free. The ranks of a lost worker that has returned occupy their devices until they have ended.
void World::CheckDesired(const std::string& worker, const v1::Desired& desired) {
  for (const v1::DesiredAttempt& attempt : desired.attempts()) {
    if (attempt.phase() != v1::DESIRED_PHASE_PREPARED) continue;
    std::map<std::string, int32_t> taken;  // thousandths
    for (const auto& [key, process] : machines_[worker].processes) {
      if (!process.alive && !process.stray) continue;
      for (const v1::RankAssignment& rank : attempt.ranks()) {
        // Its own process, when others were replaced after it had started.
        const bool own = key.attempt.job.value() == attempt.job_id() &&
                         key.attempt.epoch.value() == attempt.epoch() && key.rank == rank.rank();
        if (rank.device() != process.device || own) continue;
        // A daemon that holds the spec is not sent it again.
        const auto row = store_->Get(coordinator::Table::kSpecs, attempt.job_id());
        v1::SpecRow stored;
        if (row.ok() && row->has_value()) stored.ParseFromString(**row);
        const int32_t share = spec::ShareOf(stored.spec());
        if ((taken[rank.device()] += process.share) + share > spec::kWholeDevice) {
          Violate(absl::StrCat(attempt.job_id(), " epoch ", attempt.epoch(), " was placed on ",
                               worker, " ", process.device, ", which still runs ", ToString(key)));
        }
      }
    }
  }
  for (const v1::DesiredAttempt& attempt : desired.attempts()) {
    const absl::StatusOr<std::optional<std::string>> row =
        store_->Get(coordinator::Table::kStates, attempt.job_id());
    v1::StateRow state;
    if (!row.ok() || !row->has_value() || !state.ParseFromString(**row) ||
        state.epoch() < attempt.epoch()) {
      Violate(absl::StrCat(attempt.job_id(), ": epoch ", attempt.epoch(),
                           " left before it was durable"));
    }
  }
}

// A failure costs at most the steps since the newest checkpoint, which are fewer than every_steps.
void World::CheckReplay(const Process& process, int64_t replayed) {
  if (replayed > 0) Count("steps replayed");
  Count("attempt repeated");
  const v1::JobSpec& spec = process.assignment.spec();
  if (!spec.has_checkpoint()) return;
  const JobEpoch before = {process.key.attempt.job.value(), process.key.attempt.epoch.value() - 1};
  // Commits on a lost worker do not reach the coordinator.
  if (lost_.count(before) > 0 && options_.faults == Faults::kAll) return;
  // What a membership trained after all, before it heard of the next one, does not count.
  if (memberships_.count(before) > 0) return;
  if (stopped_.count(before) > 0 && replayed > 0) {
    Violate(absl::StrCat(ToString(process.key), " replays ", replayed,
                         " steps of an attempt that had saved them before it stopped"));
  }
  // The step that completes an interval is saved in the event that finishes it.
  if (replayed >= spec.checkpoint().every_steps()) {
    Violate(absl::StrCat(ToString(process.key), " replays ", replayed, " steps of at most ",
                         spec.checkpoint().every_steps() - 1));
  }
}

// An attempt that is over commits nothing.
void World::CheckFencing(const v1::Event& event) {
  uint64_t& ended = ended_epochs_[event.job_id()];
  if (event.kind() == v1::EVENT_KIND_ATTEMPT_ENDED) ended = std::max(ended, event.epoch());
  if (event.kind() == v1::EVENT_KIND_CHECKPOINT_COMMITTED && event.epoch() <= ended) {
    Violate(absl::StrCat(event.job_id(), ": epoch ", event.epoch(), " committed step ",
                         event.step(), " although epoch ", ended, " had ended"));
  }
}

// Memberships follow each other, and only the newest commits.
void World::CheckMembership(const v1::Event& event) {
  const JobEpoch attempt = {event.job_id(), event.epoch()};
  if (event.kind() == v1::EVENT_KIND_RANKS_REPLACED) {
    uint32_t& known = memberships_.try_emplace(attempt, 1).first->second;
    if (!absl::StartsWith(event.message(), absl::StrCat("membership ", known + 1, ": "))) {
      Violate(absl::StrCat(event.job_id(), " epoch ", event.epoch(), " was in membership ", known,
                           ", then: ", event.message()));
    }
    ++known;
    if (event.cause() == v1::CAUSE_MAINTENANCE) Count("replaced for a drain");
    for (const std::string& cordoned : cordoned_) {
      if (absl::StrContains(event.message(), absl::StrCat(" to ", cordoned, ","))) {
        Violate(
            absl::StrCat(event.job_id(), ": its ranks went to ", cordoned, ", which is cordoned"));
      }
    }
  }
  if (event.kind() == v1::EVENT_KIND_CHECKPOINT_COMMITTED) {
    const auto known = memberships_.find(attempt);
    const uint32_t membership = known == memberships_.end() ? 1 : known->second;
    if (!absl::EndsWith(event.message(), absl::StrCat(".m", membership))) {
      Violate(absl::StrCat(event.job_id(), " is in membership ", membership,
                           ", and another one committed: ", event.message()));
    }
  }
}

// A cordoned worker gets no ranks, and one that is drained has none.
void World::CheckCordons(const v1::Event& event) {
  switch (event.kind()) {
    case v1::EVENT_KIND_WORKER_CORDONED:
    case v1::EVENT_KIND_WORKER_DRAINING:
      cordoned_.insert(event.worker());
      return;
    case v1::EVENT_KIND_WORKER_UNCORDONED:
      cordoned_.erase(event.worker());
      return;
    default:
      break;
  }
  if (event.kind() != v1::EVENT_KIND_ATTEMPT_STATE || !event.from().empty()) return;
  // "2 rank(s) on w1, w2".
  const std::string& message = event.message();
  const size_t begin = message.find(" on ");
  if (begin == std::string::npos) return Violate(absl::StrCat("no workers in: ", message));
  for (const absl::string_view worker : absl::StrSplit(message.substr(begin + 4), ", ")) {
    if (cordoned_.contains(std::string(worker))) {
      Violate(absl::StrCat(event.job_id(), " epoch ", event.epoch(), " was placed on ", worker,
                           ", which is cordoned"));
    }
  }
}

// A rank that is placed on a reserved device is of a job that the reservation is for. Those that
// had the device before stay. To be called before the coordinator handles another event, so that it
// has the reservations with which it placed them.
void World::CheckReservations(const CoreOutput& output) {
  std::set<JobEpoch> attempts;
  for (const coordinator::CoreAction& action : output.actions) {
    const auto* appended = std::get_if<coordinator::EventAppended>(&action);
    if (appended == nullptr) continue;
    const v1::Event& event = appended->event;
    const bool placed = event.kind() == v1::EVENT_KIND_ATTEMPT_STATE && event.from().empty();
    if (placed || event.kind() == v1::EVENT_KIND_RANKS_REPLACED) {
      attempts.emplace(event.job_id(), event.epoch());
    }
  }
  if (attempts.empty()) return;
  std::map<std::pair<std::string, std::string>, v1::Reservation> reserved;  // by worker and device
  for (const v1::Worker& worker : core_->ListWorkers()) {
    for (const v1::Reservation& reservation : worker.reservations()) {
      for (const v1::Device& device : worker.devices()) {
        const bool all = reservation.devices().empty();
        if (all || std::count(reservation.devices().begin(), reservation.devices().end(),
                              device.name()) > 0) {
          reserved[{worker.name(), device.name()}] = reservation;
        }
      }
    }
  }
  for (const JobEpoch& attempt : attempts) {
    const absl::StatusOr<v1::Job> job = core_->GetJob(attempt.first);
    if (!job.ok() || job->epoch() != attempt.second) continue;
    for (const v1::RankStatus& rank : job->ranks()) {
      const std::pair<std::string, std::string> at(rank.worker(), rank.device());
      auto& known = placed_[attempt][rank.rank()];
      if (std::exchange(known, at) == at || !reserved.contains(at)) continue;
      Count("placed on a reserved device");
      const std::pair<std::string, std::string> label =
          absl::StrSplit(reserved[at].label(), absl::MaxSplits('=', 1));
      const auto of = job->spec().labels().find(label.first);
      if (of != job->spec().labels().end() && of->second == label.second) continue;
      Violate(absl::StrCat(attempt.first, " epoch ", attempt.second, " was placed on ", at.first,
                           " ", at.second, ", which is reserved as ", reserved[at].name()));
    }
  }
}

// What the jobs of a tenant hold, by the events, is within what they may in their queue and in
// those above it.
void World::CheckTenants(const v1::Event& event) {
  if (event.kind() == v1::EVENT_KIND_ATTEMPT_ENDED) {
    holding_.erase({event.job_id(), event.epoch()});
    return;
  }
  if (event.kind() != v1::EVENT_KIND_ATTEMPT_STATE || !event.from().empty()) return;
  // Its user may not know its id yet: that is its name, "-" and five letters.
  const v1::JobSpec* spec = nullptr;
  for (const auto& [request, submission] : submissions_) {
    if (event.job_id().substr(0, event.job_id().rfind('-')) == submission.spec.name()) {
      spec = &submission.spec;
    }
  }
  int64_t ranks = 0;  // "2 rank(s) on w1, w2"
  if (spec == nullptr ||
      !absl::SimpleAtoi(event.message().substr(0, event.message().find(' ')), &ranks)) {
    return Violate(absl::StrCat(event.job_id(), " was placed, but how: ", event.message()));
  }
  const auto tenant = spec->labels().find("tenant");
  holding_[{event.job_id(), event.epoch()}] = {
      tree_.Find(spec->queue()), ranks * spec::ShareOf(*spec),
      tenant == spec->labels().end() ? "" : tenant->second};
  for (size_t queue = 0; queue < tree_.queues().size(); ++queue) {
    const auto limit = tree_.queues()[queue].tenant_limit[v1::DEVICE_KIND_CPU];
    if (!limit.has_value()) continue;
    std::map<std::string, int64_t> used;
    for (const auto& [attempt, holds] : holding_) {
      if (holds.queue == coordinator::QueueTree::kNone) continue;
      const std::vector<int>& path = tree_.Path(holds.queue);
      if (std::count(path.begin(), path.end(), static_cast<int>(queue)) > 0) {
        used[holds.tenant] += holds.thousandths;
      }
    }
    for (const auto& [name, thousandths] : used) {
      if (thousandths == *limit * spec::kWholeDevice) Count("tenant at its limit");
      if (thousandths <= *limit * spec::kWholeDevice) continue;
      Violate(absl::StrCat("tenant '", name, "' uses ", thousandths, " thousandths of ", *limit,
                           " devices in queue ", tree_.queues()[queue].name));
    }
  }
}

// Derives which attempts count as failures from the causes and checkpoints alone.
void World::CheckBudget(const v1::Job& job) {
  std::vector<std::string> pair_before;
  for (const v1::AttemptEnd& end : job.causes()) {
    const std::vector<std::string> pair(end.between().begin(), end.between().end());
    const bool again = !pair.empty() && pair == std::exchange(pair_before, pair);
    if (pair.empty()) pair_before.clear();
    if (!pair.empty()) Count(again ? "ended between the same two again" : "ended between two");
    const bool may_name_two = end.cause() == v1::CAUSE_NETWORK || end.cause() == v1::CAUSE_LAUNCH;
    const bool names_two = !pair.empty();
    if ((end.cause() == v1::CAUSE_NETWORK && !names_two) || (names_two && !may_name_two) ||
        !std::is_sorted(pair.begin(), pair.end()) || pair.size() > 2) {
      Violate(absl::StrCat(job.id(), ": epoch ", end.epoch(), " ended by ",
                           v1::Cause_Name(end.cause()), " between ", absl::StrJoin(pair, ", ")));
    }
    if (end.cause() == v1::CAUSE_MAINTENANCE) Count("ended for maintenance");
    if (end.cause() == v1::CAUSE_RESIZED) Count("resized");
    int64_t before = 0, during = 0;
    // A job keeps the records of its newest checkpoints only.
    for (const auto& [epoch, step] : committed_by_[job.id()]) {
      if (epoch > end.epoch()) continue;
      int64_t& newest = epoch < end.epoch() ? before : during;
      newest = std::max(newest, step);
    }
    for (const v1::CheckpointRecord& record : job.checkpoints()) {
      if (record.damaged()) return;  // then the committed step has gone back meanwhile
      if (record.epoch() > end.epoch()) continue;
      int64_t& newest = record.epoch() < end.epoch() ? before : during;
      newest = std::max(newest, record.step());
    }
    // Causes outside the job, and causes that are not retried.
    static const std::set<v1::Cause> kNotCounted = {
        v1::CAUSE_COMPLETED,  v1::CAUSE_CANCELLED,   v1::CAUSE_LAUNCH,      v1::CAUSE_PREEMPTED,
        v1::CAUSE_RESIZED,    v1::CAUSE_WORKER_LOST, v1::CAUSE_NETWORK,     v1::CAUSE_USER_ERROR,
        v1::CAUSE_DATA,       v1::CAUSE_NUMERIC,     v1::CAUSE_COORDINATOR, v1::CAUSE_MAINTENANCE,
        v1::CAUSE_TIME_LIMIT, v1::CAUSE_DEADLINE};
    const bool free = kNotCounted.count(end.cause()) > 0 && !again;
    if (end.counted() != (!free && during <= before)) {
      Violate(absl::StrCat(job.id(), ": epoch ", end.epoch(), " ended by ",
                           v1::Cause_Name(end.cause()), end.counted() ? " was" : " was not",
                           " counted"));
    }
  }
}

void World::CheckHistory(const v1::Job& job) {
  std::set<std::pair<int64_t, uint64_t>> seen;
  for (const v1::CheckpointRecord& record : job.checkpoints()) {
    if (!seen.emplace(record.step(), record.epoch()).second) {
      Violate(absl::StrCat(job.id(), ": checkpoint of step ", record.step(), " twice"));
    }
    if (saved_.count({record.path(), record.step()}) == 0) {
      Violate(absl::StrCat(job.id(), ": committed ", record.path(),
                           ", which was never written completely"));
    }
  }
  CheckBudget(job);
}

// Checks a job as users see it, each time that it is published; its checkpoints and ends only where
// they are not those of the last time.
void World::CheckJob(const v1::Job& job, bool history) {
  const std::string& id = job.id();
  const auto violate = [&](const std::string& what) { Violate(absl::StrCat(id, ": ", what)); };
  if (job.epoch() < epochs_[id]) {
    violate(absl::StrCat("epoch ", job.epoch(), " after ", epochs_[id], " was seen"));
  }
  epochs_[id] = std::max(epochs_[id], job.epoch());
  const bool leaps = leapt_.contains(id);
  if (leaps ? static_cast<uint64_t>(job.attempts()) > job.epoch()
            : static_cast<uint64_t>(job.attempts()) != job.epoch()) {
    violate(absl::StrCat(job.attempts(), " attempts, epoch ", job.epoch()));
  }
  if (history) CheckHistory(job);
  if (job.last_committed_step() < committed_[id]) {
    violate(absl::StrCat("committed step went back from ", committed_[id], " to ",
                         job.last_committed_step()));
  }
  committed_[id] = job.last_committed_step();
  int counted = 0;
  for (const v1::AttemptEnd& end : job.causes()) counted += end.counted() ? 1 : 0;
  if (counted != job.failures()) {
    violate(absl::StrCat(job.failures(), " failures, but ", counted, " causes count"));
  }
  for (const std::string& after : job.spec().after()) {
    if (job.attempts() == 0 || !started_after_.emplace(id, after).second) continue;
    const std::string other = after.substr(0, after.find(':'));
    const absl::StatusOr<v1::Job> dependency = core_->GetJob(other);
    if (!dependency.ok() || !IsFinal(dependency->state())) {
      violate(absl::StrCat("started before job ", other, " had ended"));
    }
  }
  const bool poisoned = job.spec().labels().count("poisoned") > 0;
  switch (job.state()) {
    case v1::JOB_STATE_SUCCEEDED:
      if (finished_ranks_[id] < job.ranks_size()) {
        violate(absl::StrCat("succeeded, but only ", finished_ranks_[id], " ranks finished"));
      }
      break;
    case v1::JOB_STATE_FAILED:
      if (absl::StartsWith(job.message(), "deadline: ")) {
        Count(job.attempts() > 0 ? "missed its deadline" : "missed its deadline without a start");
        // A clock that is set back while the ranks stop dates the end before what caused it.
        const bool stepped = result_.counts.contains("clock step");
        if (!stepped && FromProto(job.ended()) < spec::DeadlineOf(job.spec())) {
          violate("failed for its deadline, which had not passed");
        }
      } else if (!job.causes().empty() && job.causes().rbegin()->cause() == v1::CAUSE_TIME_LIMIT) {
        Count("ran for its time limit");
        if (!job.spec().has_time_limit() ||
            FromProto(job.ran()) < FromProto(job.spec().time_limit())) {
          violate("failed for its time limit, which it has not reached");
        }
      } else if (job.failures() <= job.spec().restart().max_failures() && !poisoned) {
        violate(absl::StrCat("failed with ", job.failures(), " of ",
                             job.spec().restart().max_failures(), " failures: ", job.message()));
      }
      break;
    case v1::JOB_STATE_QUEUED:
      if (!job.has_waiting()) violate("waits without saying why");
      break;
    default:
      break;
  }
  auto known = final_states_.find(id);
  if (known != final_states_.end() && known->second != job.state()) {
    violate(absl::StrCat("was ", v1::JobState_Name(known->second), ", now ",
                         v1::JobState_Name(job.state())));
  }
  if (IsFinal(job.state())) final_states_[id] = job.state();
}

// A coordinator that recovered now from the durable state would have the same jobs.
void World::CheckRecovery() {
  if (!unsynced_.empty() || syncing_) return;
  // A timer that is due now would have fired in the recovered coordinator and not yet in this one.
  if (core_timer_ <= CoreNow()) return;
  // Shares of queues and reservations change with time alone. A recovered coordinator plans at
  // once, this one a minute after its last plan at the latest.
  if (core_->WouldDecide(CoreNow())) return Count("recovery not compared: a plan is due");
  Count("recovery compared");
  // Every plan since the beginning is made again, so that now and then is enough.
  const bool again = result_.counts["recovery compared"] % 4 == 0;
  coordinator::DecisionReplay decisions;
  const absl::StatusOr<coordinator::Replayed> replayed =
      coordinator::Replay(*store_, nullptr, 0, again ? &decisions : nullptr);
  if (!replayed.ok()) return Violate(absl::StrCat("replay: ", replayed.status().ToString()));
  for (const std::string& difference : replayed->differences) {
    Violate(absl::StrCat("the state is not the fold of its log: ", difference));
  }
  for (const coordinator::DecisionDifference& difference : decisions.report().differences) {
    Violate(absl::StrCat("entry ", difference.entry, ": job ", difference.job, " ", difference.then,
                         ", by a plan made again ", difference.now));
  }
  for (const auto& [reason, plans] : decisions.report().not_comparable) {
    Count(absl::StrCat("plan not made again: ", reason));
  }
  if (decisions.report().plans > 0) Count("plans made again");
  CheckLedger();
  CoreOutput output;
  absl::StatusOr<std::unique_ptr<Core>> other =
      Core::Recover(CoreConfig(), *store_, Rng(1), CoreNow(), &output);
  if (!other.ok()) return Violate(absl::StrCat("recovery: ", other.status().ToString()));
  uint64_t next = 0;
  for (const v1::Job& job : core_->ListJobs(0, 1000, &next)) {
    absl::StatusOr<v1::Job> twin = (*other)->GetJob(job.id());
    if (!twin.ok()) {
      Violate(absl::StrCat(job.id(), " is not durable"));
      continue;
    }
    if (const double mine = DeviceSecondsAt(CoreNow(), job.usage()),
        theirs = DeviceSecondsAt(CoreNow(), twin->usage());
        std::abs(mine - theirs) > 0.01) {
      Violate(absl::StrCat(job.id(), ": ", mine, " device-seconds, after recovery ", theirs));
    }
    v1::Job mine = job;
    // Progress is persisted only about once a second, and the state of rank processes not at all.
    for (v1::Job* both : {&mine, &*twin}) {
      both->clear_step();
      both->clear_train_loss();
      both->clear_best_train_loss();
      both->clear_tokens_per_second();
      both->clear_model_flops_utilization();
      both->clear_hardware_flops_utilization();
      both->clear_step_seconds();
      both->clear_consumed_tokens();
      both->clear_losses();
      both->clear_usage();  // the time is compared above; which class it is of is told late
      both->clear_phase();
      both->clear_waiting();
      for (v1::RankStatus& rank : *both->mutable_ranks()) {
        rank.clear_state();
        rank.clear_pid();
        rank.clear_step();
        rank.clear_metrics_address();
        rank.clear_times();
        rank.clear_memory();
      }
    }
    if (coordinator::schema::Serialize(mine) != coordinator::schema::Serialize(*twin)) {
      Violate(absl::StrCat(job.id(), " differs after recovery:\n", mine.DebugString(),
                           "--- durable\n", twin->DebugString()));
    }
  }
}

namespace {

struct Stored {
  v1::FleetAccount fleet;
  int64_t sum_us = 0;  // device-microseconds
  std::map<v1::UsageClass, int64_t> by_class;

  void Add(v1::UsageClass usage_class, int64_t us) {
    sum_us += us;
    by_class[usage_class] += us;
  }
  void Add(const v1::UsageRow& row) {
    for (const v1::AccountEntry& entry : row.entries()) {
      Add(entry.usage_class(), entry.period_ms() * 1000 + entry.period_rest_us());
    }
  }
  // Time of the period that is not over.
  void Add(const v1::Account& account) {
    for (const v1::AccountEntry& entry : account.entries()) {
      Add(entry.usage_class(), entry.period_ms() * 1000 + entry.period_rest_us() +
                                   entry.thousandths() * (fleet.clock_ms() - account.clock_ms()));
    }
  }
};

// What the log alone tells: how many devices the workers had, and for how long by the clock of the
// coordinators that wrote it.
int64_t DeviceMsOf(coordinator::Store& store) {
  std::map<std::string, int> devices;
  int64_t all = 0, sum = 0, before = 0;
  CHECK_OK(store.Scan(
      coordinator::Table::kLog, "", "", [&](const std::string&, const std::string& value) {
        v1::LogEntry entry;
        CHECK(entry.ParseFromString(value));
        for (const v1::RowChange& change : entry.changes()) {
          v1::FleetAccount fleet;
          if (change.table() != "usage" || change.key() != coordinator::schema::kFleetAccount) {
            continue;
          }
          CHECK(fleet.ParseFromString(change.value()));
          if (before != 0) sum += all * std::max<int64_t>(0, fleet.wall_ms() - before);
          before = fleet.wall_ms();
        }
        for (const v1::RowChange& change : entry.changes()) {
          if (change.table() != "workers") continue;
          v1::Worker worker;
          if (change.has_value()) CHECK(worker.ParseFromString(change.value()));
          int& known = devices[change.key()];
          all += worker.devices_size() - known;
          known = worker.devices_size();
        }
        return true;
      }));
  return sum;
}

}  // namespace

void World::CheckLedger() {
  Stored stored;
  const auto fleet =
      store_->Get(coordinator::Table::kUsage, coordinator::schema::kFleetAccount).value();
  if (!fleet.has_value() || !stored.fleet.ParseFromString(*fleet)) {
    return Violate("the fleet has no account");
  }
  stored.Add(stored.fleet.account());
  uint64_t rows = 0;
  CHECK_OK(store_->Scan(coordinator::Table::kUsage, "", coordinator::schema::kFleetAccount,
                        [&](const std::string&, const std::string& value) {
                          v1::UsageRow row;
                          CHECK(row.ParseFromString(value));
                          stored.Add(row);
                          ++rows;
                          return true;
                        }));
  if (rows != stored.fleet.last_row()) {
    Violate(absl::StrCat(rows, " rows of device time, the newest is ", stored.fleet.last_row()));
  }
  CHECK_OK(store_->Scan(coordinator::Table::kStates, "", "",
                        [&](const std::string&, const std::string& value) {
                          v1::StateRow state;
                          CHECK(state.ParseFromString(value));
                          stored.Add(state.account());
                          return true;
                        }));
  const int64_t all_us = stored.fleet.device_ms() * 1000 + stored.fleet.device_rest_us();
  if (stored.sum_us != all_us) {
    Violate(absl::StrCat("the classes have ", stored.sum_us, " device-microseconds, the devices ",
                         all_us));
  }
  if (const int64_t logged = DeviceMsOf(*store_); logged != stored.fleet.device_ms()) {
    Violate(absl::StrCat("the devices have ", stored.fleet.device_ms(),
                         " device-milliseconds, the log ", logged));
  }
  for (const auto& [usage_class, us] : stored.by_class) {
    if (us < 0) Violate(absl::StrCat(v1::UsageClass_Name(usage_class), ": ", us, " us"));
    if (us > 0) Count(v1::UsageClass_Name(usage_class));
    if (us > 0 && options_.faults == Faults::kNone &&
        (usage_class == v1::USAGE_CLASS_REPLAYED || usage_class == v1::USAGE_CLASS_HUNG)) {
      Violate(absl::StrCat(v1::UsageClass_Name(usage_class), " without a fault: ", us, " us"));
    }
  }
  if (options_.faults == Faults::kNone) {
    int64_t slots = 0;
    for (const auto& [name, machine] : machines_) slots += machine.slots;
    const int64_t wall = stored.fleet.wall_ms() - 1'000'000'000'000;
    if (std::abs(stored.fleet.device_ms() - slots * wall) > slots * (wall / 1000 + 100)) {
      Violate(absl::StrCat(stored.fleet.device_ms(), " device-milliseconds of ", slots,
                           " slots in ", wall, " ms"));
    }
  }
}

void World::CheckEnd() {
  for (const auto& [request, submission] : submissions_) {
    if (submission.id.empty()) {
      Violate(absl::StrCat(request, " was never acknowledged"));
      continue;
    }
    auto ended = final_states_.find(submission.id);
    if (ended == final_states_.end()) {
      absl::StatusOr<v1::Job> job = core_ == nullptr ? absl::UnavailableError("no coordinator")
                                                     : core_->GetJob(submission.id);
      Violate(absl::StrCat(submission.id, " has not ended: ",
                           job.ok() ? job->ShortDebugString() : job.status().ToString()));
      continue;
    }
    Count(v1::JobState_Name(ended->second));
    if (ended->second == v1::JOB_STATE_FAILED && !submission.poisoned) {
      const absl::StatusOr<v1::Job> job = core_ == nullptr
                                              ? absl::UnavailableError("no coordinator")
                                              : core_->GetJob(submission.id);
      const bool limited =
          job.ok() &&
          (absl::StartsWith(job->message(), "deadline: ") ||
           (!job->causes().empty() && job->causes().rbegin()->cause() == v1::CAUSE_TIME_LIMIT));
      Count(limited ? "time limit reached" : "sound job failed");
    }
    if (ended->second == v1::JOB_STATE_CANCELLED && !submission.cancel) {
      Violate(absl::StrCat(submission.id, " was cancelled, though no user asked for it"));
    }
  }
  if (!Finished()) return Violate("the cluster did not finish all work");
  CheckLedger();
}

}  // namespace muster::sim
