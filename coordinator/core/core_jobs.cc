#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "coordinator/core/core_impl.h"
#include "coordinator/core/limits.h"
#include "coordinator/core/traffic.h"
#include "coordinator/scheduler/placement.h"
#include "proto/job_state.h"
#include "proto/spec/deadline.h"
#include "proto/spec/elastic.h"
#include "proto/spec/names.h"
#include "proto/spec/share.h"
#include "proto/time.h"
#include "security/authorize.h"

namespace muster::coordinator {

v1::Event CoreImpl::About(const JobEntry& job, v1::EventKind kind) {
  v1::Event event;
  event.set_kind(kind);
  event.set_job_id(job.fixed.id());
  event.set_job_name(job.name());
  event.set_epoch(job.state.epoch());
  event.set_rank(-1);
  event.set_step(job.progress.step());
  return event;
}

JobId CoreImpl::NewJobId(const std::string& name) {
  while (true) {
    JobId id(absl::StrCat(name, "-", rng_.Letters(5)));
    if (jobs_.Find(id) == nullptr) return id;
  }
}

absl::Status CoreImpl::CheckRequestId(const std::string& request_id) {
  if (request_id.size() <= kRequestIdBytesMax) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("request_id: ", request_id.size(), " bytes; at most ", kRequestIdBytesMax));
}

void CoreImpl::On(SubmitEvent& event, Turn& turn) {
  ReplyAction reply;
  reply.call = event.call;
  reply.status = Submit(event, reply, turn);
  turn.Act(std::move(reply));
}

absl::Status CoreImpl::Submit(SubmitEvent& event, ReplyAction& reply, Turn& turn) {
  RETURN_IF_ERROR(CheckRequestId(event.request_id));
  if (JobEntry* first = event.request_id.empty() ? nullptr : jobs_.FindRequest(event.request_id)) {
    if (first->fixed.owner() != event.caller.principal.Owner()) {
      return absl::AlreadyExistsError(
          "request_id: another user has sent it; choose a new one for each submission");
    }
    reply.job = first->View();
    reply.existed = true;
    return absl::OkStatus();
  }
  if (jobs_.live_count() >= kLiveJobsMax) {
    RETURN_IF_ERROR(CheckArrayName(event.spec.name()));  // the nearer cause
    return absl::ResourceExhaustedError(
        absl::StrCat("the cluster has as many unfinished jobs as it can hold, ", kLiveJobsMax,
                     "; wait for one to end or cancel one"));
  }
  ASSIGN_OR_RETURN(Submission submission, CheckSubmission(std::move(event.spec), turn.now()));
  JobEntry& entry = Accept(std::move(submission), event.request_id, event.caller, turn);
  while (turn.TakeReschedule()) Schedule(turn);  // before the reply, which says why the job waits
  reply.job = entry.View();
  return absl::OkStatus();
}

absl::StatusOr<CoreImpl::Submission> CoreImpl::CheckSubmission(v1::JobSpec spec,
                                                               absl::Time now) const {
  RETURN_IF_ERROR(CheckArrayName(spec.name()));
  // An elastic job has to fit with its smallest size.
  const std::vector<int32_t> sizes = spec::SizesOf(spec);
  if (sizes.empty()) {
    return absl::InvalidArgumentError("resources.ranks: no number of ranks is possible");
  }
  RETURN_IF_ERROR(scheduling_.tree().CheckJob(spec.queue(), spec.resources().device(),
                                              sizes.front(), spec::ShareOf(spec)));
  RETURN_IF_ERROR(spec::FixDeadline(spec, now));
  Submission submission;
  ASSIGN_OR_RETURN(submission.after, DependenciesOf(spec, jobs_));
  submission.spec = std::move(spec);
  return submission;
}

JobEntry& CoreImpl::Accept(Submission submission, const std::string& request_id,
                           const Caller& caller, Turn& turn) {
  JobEntry fresh;
  fresh.fixed.set_id(NewJobId(submission.spec.name()).value());
  fresh.fixed.set_name(submission.spec.name());
  *fresh.fixed.mutable_spec() = std::move(submission.spec);
  fresh.fixed.set_request_id(request_id);
  fresh.fixed.set_submit_sequence(jobs_.NextSequence());
  *fresh.fixed.mutable_submitted() = ToProto(turn.now());
  fresh.fixed.set_owner(caller.principal.Owner());
  fresh.state.set_state(v1::JOB_STATE_PENDING);
  fresh.state.set_stop_rank(-1);
  fresh.state.mutable_after()->Add(submission.after.begin(), submission.after.end());
  fresh.queued_at = fresh.progress_stored_at = turn.now();
  JobEntry& entry = jobs_.Add(std::move(fresh));
  entry.PutSpec(turn.batch());
  const JobId id = entry.id();
  if (!request_id.empty()) {
    turn.batch().Put(Table::kRequests, request_id, id.value());
  }
  v1::Event accepted = About(entry, v1::EVENT_KIND_JOB_STATE);
  accepted.set_to(spec::EnumName(v1::JOB_STATE_PENDING));
  accepted.set_message("accepted");
  turn.Log(std::move(accepted));
  turn.Persist(id);
  Transition(entry, JobEvent::kAdmitted, absl::StrCat("joins queue ", entry.spec().queue()), turn);
  Wait(entry, turn);
  CheckJobDeadline(entry, turn);
  return entry;
}

void CoreImpl::On(const CancelEvent& event, Turn& turn) {
  ReplyAction reply;
  reply.call = event.call;
  const absl::StatusOr<const JobEntry*> found = jobs_.Resolve(event.job);
  if (!found.ok()) {
    reply.status = found.status();
    turn.Act(std::move(reply));
    return;
  }
  JobEntry& job = *jobs_.Find((*found)->id());
  reply.status =
      security::AuthorizeChange(event.caller.principal, job.fixed.owner(), job.spec().queue());
  if (!reply.status.ok()) {
    turn.Act(std::move(reply));
    return;
  }
  CancelJob(job, turn);
  reply.job = job.View();
  turn.Act(std::move(reply));
}

void CoreImpl::CancelJob(JobEntry& job, Turn& turn) {
  if (!job.live() || job.state.state() == v1::JOB_STATE_STOPPING) return;
  const std::string why = "cancelled by a user";
  if (job.state.after_release() != v1::JOB_STATE_SUCCEEDED) DropKept(job, turn);
  if (!job.has_attempt()) {
    job.state.set_message(why);
    if (scheduling_.Remove(job.id())) turn.Reschedule();
    Transition(job, JobEvent::kCancelIdle, why, turn);
  } else if (job.up()) {
    Stop(job, {v1::CAUSE_CANCELLED, why}, turn);
  } else if (job.state.after_release() != v1::JOB_STATE_SUCCEEDED) {
    // Its attempt is already being released for another reason. A job that has trained all its
    // steps is not cancelled any more.
    job.state.set_after_release(v1::JOB_STATE_CANCELLED);
    Transition(job, JobEvent::kCancel, why, turn);
  }
}

void CoreImpl::Transition(JobEntry& job, JobEvent event, const std::string& why, Turn& turn) {
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

namespace {

// An expected end is moved when it has changed by so much, and by a twentieth of the rest.
constexpr absl::Duration kEndTolerance = absl::Seconds(1);
constexpr double kEstimateSecondsMax = 10 * 365 * 86'400.0;  // longer: nobody knows

// The distance between neighbouring ranks of a tensor group in the numbering of ranks.
int32_t TensorStride(const v1::ParallelSpec& parallel) {
  int32_t stride = 1;
  for (const int axis : parallel.order()) {
    switch (axis) {
      case v1::MESH_AXIS_DATA:
        stride *= std::max(1, parallel.data());
        break;
      case v1::MESH_AXIS_CONTEXT:
        stride *= std::max(1, parallel.context());
        break;
      case v1::MESH_AXIS_PIPELINE:
        stride *= std::max(1, parallel.pipeline());
        break;
      default:  // the tensor axis
        return stride;
    }
  }
  return 1;  // no order: the tensor axis comes first
}

}  // namespace

absl::Duration LimitOf(const JobEntry& job, absl::Time now) {
  if (!job.spec().has_time_limit()) return absl::InfiniteDuration();
  absl::Duration ran = FromProto(job.state.ran());
  if (job.state.has_running_since()) {
    ran += std::max(absl::ZeroDuration(), now - FromProto(job.state.running_since()));
  }
  return std::max(absl::ZeroDuration(), FromProto(job.spec().time_limit()) - ran);
}

absl::Duration RestOf(const JobEntry& job) {
  const double left = static_cast<double>(std::max<int64_t>(0, job.steps() - job.progress.step()));
  const double seconds = left * job.progress.step_seconds();
  // Daemons report any number.
  if (job.progress.step_seconds() > 0 && seconds < kEstimateSecondsMax) {
    return absl::Seconds(seconds);
  }
  return absl::InfiniteDuration();
}

void CoreImpl::ExpectEnd(JobEntry& job, Turn& turn) {
  const absl::Duration rest = std::min(RestOf(job), LimitOf(job, turn.now()));
  if (!job.up() || rest == absl::InfiniteDuration()) return;
  const absl::Time end = turn.now() + rest;
  // Reports come several times a second and differ a little.
  if (job.state.has_expected_end() && absl::AbsDuration(FromProto(job.state.expected_end()) - end) <
                                          std::max(kEndTolerance, rest / 20)) {
    return;
  }
  *job.state.mutable_expected_end() = ToProto(end);
  scheduling_.ChangeRunning(job.id(), [&](RunningJob& running) {
    running.ends_at = FromProto(job.state.expected_end());
  });
  turn.Persist(job.id());
  if (scheduling_.waiting() > 0) turn.Reschedule();
}

WaitingJob AsWaiting(const JobEntry& job, const Reservations& reservations) {
  const std::vector<int32_t> sizes = job.allowed_sizes();
  v1::JobSpec largest;
  if (job.elastic()) largest = spec::AtSize(job.spec(), sizes.back());
  const v1::JobSpec& spec = job.elastic() ? largest : job.spec();
  WaitingJob waiting;
  waiting.id = job.id();
  waiting.name = job.name();
  waiting.queue = spec.queue();
  waiting.priority = spec.priority();
  waiting.submit_sequence = job.fixed.submit_sequence();
  waiting.deadline = spec::DeadlineOf(spec);
  waiting.ranks = spec.resources().ranks();
  waiting.device = spec.resources().device();
  waiting.group = std::max(1, spec.engine().parallel().tensor());
  waiting.stride = TensorStride(spec.engine().parallel());
  waiting.placement = {spec.placement().required(), spec.placement().preferred(),
                       spec.placement().spread(), spec.placement().segment()};
  AddTraffic(spec, waiting);
  waiting.reservations = reservations.For(spec);
  if (job.state.has_not_before()) waiting.not_before = FromProto(job.state.not_before());
  waiting.runtime = LimitOf(job, absl::InfinitePast());
  if (job.state.has_rest())
    waiting.runtime = std::min(waiting.runtime, FromProto(job.state.rest()));
  waiting.tenant = TenantOf(spec);
  waiting.recovering = job.state.recovering_ranks();
  waiting.share = spec::ShareOf(spec);
  if (job.state.has_queued()) waiting.queued_at = FromProto(job.state.queued());
  if (!job.elastic()) return waiting;
  waiting.sizes = sizes;
  waiting.traffic_of_largest = waiting.traffic;
  WaitingJob smallest = AtSize(waiting, sizes.front());
  smallest.sizes = std::move(waiting.sizes);
  smallest.traffic_of_largest = std::move(waiting.traffic_of_largest);
  return smallest;
}

std::shared_ptr<const Elasticity> ElasticityOf(const JobEntry& job,
                                               const Reservations& reservations) {
  if (!spec::ResizesWhileRunning(job.spec())) return nullptr;
  const bool asked = job.state.ranks_wanted() != 0;
  if (!asked && job.sizes().size() < 2) return nullptr;
  return std::make_shared<const Elasticity>(Elasticity{
      AsWaiting(job, reservations), FromProto(job.spec().preemption().grow_after()), asked});
}

void CoreImpl::Wait(JobEntry& job, Turn& turn) {
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
  WaitingJob waiting = AsWaiting(job);
  Explain(job, scheduling_.BeforePlan(waiting), turn);
  if (scheduling_.Add(std::move(waiting))) turn.Reschedule();
}

void CoreImpl::AwaitDependencies(JobEntry& job, Turn& turn) {
  dependents_.Await(job, jobs_);
  Explain(job, WaitFor(job.spec(), job.state.after()), turn);
}

void CoreImpl::ResolveDependents(Turn& turn) {
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

absl::Time SavedAt(const JobEntry& job) {
  absl::Time saved_at = FromProto(job.attempt.started());
  for (const v1::CheckpointRecord& record : job.checkpoints.records()) {
    if (record.epoch() != job.epoch().value() || record.damaged() || record.removed()) continue;
    saved_at = std::max(saved_at, FromProto(record.committed()));
  }
  return saved_at;
}

RunningJob AsRunning(const JobEntry& job, const Reservations& reservations) {
  const v1::JobSpec& spec = job.spec();
  RunningJob running;
  running.name = job.name();
  running.queue = spec.queue();
  running.priority = spec.priority();
  running.device = spec.resources().device();
  running.ranks = job.size();
  running.share = spec::ShareOf(spec);
  running.elastic = ElasticityOf(job, reservations);
  running.stopping = job.has_attempt() && !job.up();
  running.started_at = FromProto(job.attempt.started());
  running.saved_at = SavedAt(job);
  running.tenant = TenantOf(spec);
  running.min_runtime = FromProto(spec.preemption().min_runtime());
  if (job.state.has_expected_end()) running.ends_at = FromProto(job.state.expected_end());
  return running;
}

void CoreImpl::Explain(JobEntry& job, v1::WaitReason reason, Turn& turn) {
  if (job.waiting.SerializeAsString() == reason.SerializeAsString()) return;
  job.waiting = std::move(reason);
  turn.Changed(job.id());
}

void CoreImpl::CarryOut(const Start& start, Turn& turn) {
  scheduling_.Remove(start.job);
  if (start.in_turn) scheduling_.TookTurn(jobs_.Find(start.job)->spec().queue(), turn.now());
  DropKept(*jobs_.Find(start.job), turn);
  Allocate(*jobs_.Find(start.job), start.placements, turn);
}

absl::StatusOr<Explained> CoreImpl::Explain(const ExplainQuery& about, absl::Time now) {
  if (const auto* name = std::get_if<std::string>(&about); name != nullptr) {
    const Array* array = jobs_.FindArray(*name);
    const absl::StatusOr<const JobEntry*> job = jobs_.Resolve(*name);
    if (array != nullptr && (!job.ok() || (*job)->fixed.submit_sequence() < array->sequence)) {
      Explained out;
      out.array = OutlookOf(*array, now);
      return out;
    }
  }
  ASSIGN_OR_RETURN(Explained out, ExplainWait(about, now));
  const v1::WaitReason* waiting = out.waiting.has_value() ? &*out.waiting : nullptr;
  if (const JobEntry* job = jobs_.Find(JobId(out.job.id())); job != nullptr) {
    out.deadline = OutlookOf(*job, waiting, now);
  } else {
    JobEntry entry;
    *entry.fixed.mutable_spec() = out.job.spec();
    out.deadline = OutlookOf(entry, waiting, now);
  }
  return out;
}

absl::StatusOr<Explained> CoreImpl::ExplainWait(const ExplainQuery& about, absl::Time now) {
  Explained out;
  std::optional<WaitingJob> added;
  JobId id;
  if (const auto* name = std::get_if<std::string>(&about)) {
    ASSIGN_OR_RETURN(const JobEntry* job, jobs_.Resolve(*name));
    out.job = job->View();
    if (out.job.has_waiting()) out.waiting = out.job.waiting();
    id = job->id();
    if (!scheduling_.Waits(id)) return out;
  } else {
    JobEntry entry;
    entry.fixed.set_name(std::get<v1::JobSpec>(about).name());
    entry.fixed.set_id("(the spec)");  // no job has such an id
    *entry.fixed.mutable_spec() = std::get<v1::JobSpec>(about);
    RETURN_IF_ERROR(spec::FixDeadline(*entry.fixed.mutable_spec(), now));
    *entry.state.mutable_queued() = ToProto(now);
    RETURN_IF_ERROR(
        scheduling_.tree().CheckJob(entry.spec().queue(), entry.spec().resources().device(),
                                    entry.sizes().front(), spec::ShareOf(entry.spec())));
    entry.fixed.set_submit_sequence(jobs_.NextSequence());
    out.job.set_name(entry.name());
    out.job.set_steps(entry.steps());
    *out.job.mutable_spec() = entry.spec();
    ASSIGN_OR_RETURN(const std::vector<v1::Dependency> after, DependenciesOf(entry.spec(), jobs_));
    if (!after.empty()) {
      entry.state.mutable_after()->Add(after.begin(), after.end());
      out.waiting = WaitFor(entry.spec(), entry.state.after());
      return out;
    }
    id = entry.id();
    added = AsWaiting(entry);
  }
  Forecast forecast = scheduling_.Explain(id, std::move(added), now);
  if (!forecast.start.has_value()) {
    out.waiting = std::move(forecast.reason);
  } else if (std::holds_alternative<v1::JobSpec>(about)) {
    out.waiting.reset();
    out.placements = std::move(forecast.start->placements);
    JobEntry entry;
    *entry.fixed.mutable_spec() = std::get<v1::JobSpec>(about);
    WaitingJob placed = AsWaiting(entry);
    if (entry.elastic()) placed = AtSize(placed, static_cast<int32_t>(out.placements.size()));
    *out.job.mutable_placement_cost() = CostOf(workers_.slots(), placed, out.placements);
    for (v1::Placement& placement : out.placements) {
      placement.set_host(workers_.Find(WorkerId(placement.worker()))->row.host());
    }
  }
  return out;
}

void CoreImpl::Schedule(Turn& turn) {
  for (const JobId& id : scheduling_.TakeRetries(turn.now())) {
    JobEntry& job = *jobs_.Find(id);
    if (job.state.state() != v1::JOB_STATE_RECOVERING) continue;
    Transition(job, JobEvent::kRetry, "its devices are released, and no back-off keeps it", turn);
  }
  muster::coordinator::Schedule plan = scheduling_.MakePlan(turn.now());
  if (!plan.decisions.empty()) {
    *turn.log_entry().add_plans() = RecordPlan(plan.decisions, jobs_, scheduling_, workers_);
  }
  for (const Decision& decision : plan.decisions) {
    std::visit([&](const auto& decided) { CarryOut(decided, turn); }, decision);
  }
  for (const Explanation& explanation : plan.explanations) {
    // One that this plan explained may have started by one of its later decisions.
    if (!scheduling_.Waits(explanation.job)) continue;
    Explain(*jobs_.Find(explanation.job), explanation.reason(), turn);
  }
  deadlines_.Set({DeadlineKey::Kind::kSchedule, ""}, std::min(plan.wake_at, plan.again_at));
}

}  // namespace muster::coordinator
