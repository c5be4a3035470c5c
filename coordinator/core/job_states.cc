#include "coordinator/core/job_states.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "coordinator/core/planned_job.h"
#include "proto/job_state.h"
#include "proto/spec/names.h"
#include "proto/time.h"

namespace muster::coordinator {

void JobStates::Transition(JobEntry& job, JobEvent event, const std::string& why, Turn& turn) {
  const v1::JobState from = job.state.state();
  const v1::JobState to = Next(from, event);
  CHECK(to != v1::JOB_STATE_UNSPECIFIED)
      << "job " << job.id() << ": no transition from " << spec::EnumName(from) << " by event "
      << static_cast<int>(event);
  job.state.set_state(to);
  if (to != v1::JOB_STATE_QUEUED && to != v1::JOB_STATE_RECOVERING) job.waiting.Clear();
  if (IsFinal(to)) job.state.clear_held_by();
  if (IsFinal(to)) job.state.clear_held_since();
  if (IsFinal(to) || to == v1::JOB_STATE_HELD) job.state.clear_queued();
  if (to == v1::JOB_STATE_HELD) jobs_.arrays().Leave(job);
  if (to == v1::JOB_STATE_QUEUED) job.queued_at = turn.now();
  v1::Event row = About(job, v1::EVENT_KIND_JOB_STATE);
  row.set_from(spec::EnumName(from));
  row.set_to(spec::EnumName(to));
  row.set_message(why);
  turn.Log(std::move(row));
  turn.Persist(job.id());
  if (IsFinal(to)) {
    *job.state.mutable_ended() = ToProto(turn.now());
    deadlines_.Clear({DeadlineKey::Kind::kJobDeadline, job.fixed.id()});
    jobs_.Ended(job);
    dependents_.Ended(job.id());
  }
}

void JobStates::Wait(JobEntry& job, Turn& turn) {
  if (!job.state.after().empty()) return AwaitDependencies(job, turn);
  if (!jobs_.arrays().Admit(job)) return Explain(job, WaitForTurn(job), turn);
  if (!job.state.has_queued()) {
    *job.state.mutable_queued() = ToProto(turn.now());
    turn.Persist(job.id());
  }
  // A plan of a later coordinator, or of a replay, knows no more than what is stored.
  const absl::Duration rest = absl::Trunc(RestOf(job), absl::Milliseconds(1));
  if (rest == absl::InfiniteDuration()
          ? job.state.has_rest()
          : FromProto(job.state.rest()) != rest || !job.state.has_rest()) {
    job.state.clear_rest();
    if (rest != absl::InfiniteDuration()) *job.state.mutable_rest() = ToProto(rest);
    turn.Persist(job.id());
  }
  WaitingJob waiting = AsWaiting(job, reservations_);
  Explain(job, scheduling_.BeforePlan(waiting), turn);
  if (scheduling_.Add(std::move(waiting))) turn.Reschedule();
}

void JobStates::AwaitDependencies(JobEntry& job, Turn& turn) {
  dependents_.Await(job, jobs_);
  Explain(job, WaitFor(job.spec(), job.state.after()), turn);
}

void JobStates::ResolveDependents(Turn& turn) {
  using Kind = Dependents::Change::Kind;
  while (dependents_.pending()) {
    for (const Dependents::Change& change : dependents_.TakeNext(jobs_, turn)) {
      JobEntry& job = *jobs_.Find(change.job);
      if (!job.live()) continue;  // an earlier change has failed it
      switch (change.kind) {
        case Kind::kCannotStart:
          job.state.set_message(change.why);
          Transition(job, JobEvent::kCannotStart, change.why, turn);
          break;
        case Kind::kWaitsOn:
          Explain(job, WaitFor(job.spec(), job.state.after()), turn);
          break;
        case Kind::kIsFree:
          job.queued_at = turn.now();
          Wait(job, turn);
          break;
      }
    }
  }
}

void JobStates::Explain(JobEntry& job, v1::WaitReason reason, Turn& turn) {
  if (job.waiting.SerializeAsString() == reason.SerializeAsString()) return;
  job.waiting = std::move(reason);
  turn.Changed(job.id());
}

v1::WaitReason JobStates::WaitForTurn(const JobEntry& job) {
  v1::WaitReason reason;
  reason.set_code(v1::WAIT_CODE_ARRAY);
  reason.set_queue(job.spec().queue());
  reason.set_ranks(job.allowed_sizes().front());
  reason.set_device(job.spec().resources().device());
  reason.set_group(1);
  reason.set_limit(job.spec().array_task().max_running());
  return reason;
}

void JobStates::AdmitTasks(Turn& turn) {
  for (const JobId& id : jobs_.arrays().TakeNext()) {
    JobEntry& job = *jobs_.Find(id);
    job.queued_at = turn.now();
    Wait(job, turn);
  }
}

v1::WaitReason JobStates::HeldReason(const JobEntry& job) {
  v1::WaitReason reason;
  reason.set_code(v1::WAIT_CODE_HELD);
  reason.set_queue(job.spec().queue());
  reason.set_ranks(job.allowed_sizes().front());
  reason.set_device(job.spec().resources().device());
  reason.set_held_by(job.state.held_by());
  *reason.mutable_held_since() = job.state.held_since();
  return reason;
}

void JobStates::ReservationsChanged(Turn& turn) {
  for (const auto& live : jobs_.live()) {
    const JobId& id = live.second;
    scheduling_.ChangeRunning(id, [&](RunningJob& running) {
      if (running.elastic != nullptr)
        running.elastic = ElasticityOf(*jobs_.Find(id), reservations_);
    });
    if (!scheduling_.Waits(id)) continue;
    scheduling_.Remove(id);
    scheduling_.Add(AsWaiting(*jobs_.Find(id), reservations_));
  }
  turn.Reschedule();
}

}  // namespace muster::coordinator
