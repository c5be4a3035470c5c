#include "coordinator/core/decisions.h"

#include <algorithm>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "coordinator/core/plan_record.h"

namespace muster::coordinator {

void Decisions::Schedule(Turn& turn) {
  for (const JobId& id : scheduling_.TakeRetries(turn.now())) {
    JobEntry& job = *jobs_.Find(id);
    if (job.state.state() != v1::JOB_STATE_RECOVERING) continue;
    states_.Transition(job, JobEvent::kRetry, "its devices are released, and no back-off keeps it",
                       turn);
  }
  muster::coordinator::Schedule plan = scheduling_.MakePlan(turn.now());
  if (std::any_of(plan.decisions.begin(), plan.decisions.end(), ChangesState)) {
    *turn.log_entry().add_plans() = RecordPlan(plan.decisions, jobs_, scheduling_, workers_);
  }
  for (const Decision& decision : plan.decisions) {
    std::visit([&](const auto& decided) { CarryOut(decided, turn); }, decision);
  }
  for (const Explanation& explanation : plan.explanations) {
    // One that this plan explained may have started by one of its later decisions.
    if (!scheduling_.Waits(explanation.job)) continue;
    v1::WaitReason reason = explanation.reason();
    if (const v1::SetAside* set_aside = scheduling_.SetAsideFor(explanation.job)) {
      *reason.mutable_set_aside() = *set_aside;
    }
    JobStates::Explain(*jobs_.Find(explanation.job), std::move(reason), turn);
  }
  deadlines_.Set({DeadlineKey::Kind::kSchedule, ""}, std::min(plan.wake_at, plan.again_at));
}

void Decisions::CarryOut(const Start& start, Turn& turn) {
  scheduling_.Remove(start.job);
  if (start.in_turn) scheduling_.TookTurn(jobs_.Find(start.job)->spec().queue(), turn.now());
  kept_.Drop(*jobs_.Find(start.job), turn);
  attempts_.Allocate(*jobs_.Find(start.job), start.placements, turn);
}

void Decisions::CarryOut(const Preempt& preempt, Turn& turn) {
  JobEntry& winner = *jobs_.Find(preempt.job);
  const Eviction& eviction = preempt.eviction;
  for (const JobId& id : eviction.outbid) kept_.Drop(*jobs_.Find(id), turn);
  kept_.Drop(winner, turn);
  const v1::JobSpec& spec = winner.spec();
  kept_.Keep(winner, eviction.slots);
  std::vector<std::string> stopped;
  for (const JobId& id : eviction.stopped) {
    const JobEntry& job = *jobs_.Find(id);
    stopped.push_back(absl::StrCat("job ", job.name(), " (priority ", job.spec().priority(), ")"));
  }
  v1::Event row = About(winner, v1::EVENT_KIND_SLOTS_KEPT);
  row.set_message(
      absl::StrCat(eviction.slots.size(), " slot(s) are kept for it (priority ", spec.priority(),
                   ")", stopped.empty() ? "" : "; stopped for it: ", absl::StrJoin(stopped, ", ")));
  turn.Log(std::move(row));
  turn.Persist(winner.id());
  for (const JobId& id : eviction.stopped) {
    life_.Yield(*jobs_.Find(id),
                absl::StrCat("its devices are wanted for job ", winner.name(), " (priority ",
                             spec.priority(), ")"),
                turn);
  }
}

void Decisions::CarryOut(const Resize& resize, Turn& turn) {
  JobEntry& job = *jobs_.Find(resize.resized.job);
  const size_t ranks = resize.resized.slots.size();
  std::string why = absl::StrCat("from ", job.size(), " to ", ranks, " rank(s): ");
  if (!resize.for_job.value().empty()) {
    const JobEntry& other = *jobs_.Find(resize.for_job);
    absl::StrAppend(&why, "devices are wanted for job ", other.name(), " (priority ",
                    other.spec().priority(), ")");
  } else if (job.state.ranks_wanted() != 0) {
    absl::StrAppend(&why, "a user asked for it");
  } else {
    absl::StrAppend(&why, "devices are free that no job waits for");
  }
  kept_.Keep(job, resize.resized.slots);
  v1::Event row = About(job, v1::EVENT_KIND_SLOTS_KEPT);
  row.set_message(absl::StrCat(ranks, " slot(s) are kept for it, with which it goes on"));
  turn.Log(std::move(row));
  attempts_.Stop(job, {.cause = v1::CAUSE_RESIZED, .message = why, .yields = true, .resizes = true},
                 turn);
}

void Decisions::CarryOut(const GiveUpKept& give_up, Turn& turn) {
  JobEntry& job = *jobs_.Find(give_up.job);
  v1::Event row = About(job, v1::EVENT_KIND_SLOTS_KEPT);
  row.set_message("the slots kept for it are given up: one of them is gone");
  turn.Log(std::move(row));
  kept_.Drop(job, turn);
}

}  // namespace muster::coordinator
