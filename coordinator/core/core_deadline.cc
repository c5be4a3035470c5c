// JobSpec.deadline: jobs that have not ended by then end, and those that are not going to are told.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "coordinator/core/core_impl.h"
#include "proto/job_state.h"
#include "proto/spec/deadline.h"
#include "proto/time.h"

namespace muster::coordinator {

void CoreImpl::CheckJobDeadline(JobEntry& job, Turn& turn) {
  const absl::Time deadline = spec::DeadlineOf(job.spec());
  if (!job.live() || deadline == absl::InfiniteFuture()) return;
  if (turn.now() < deadline) {
    deadlines_.Set({DeadlineKey::Kind::kJobDeadline, job.fixed.id()}, deadline);
    return;
  }
  const std::string why =
      absl::StrCat("it had not ended by its deadline, ", spec::DeadlineText(deadline));
  if (job.up()) return attempts_.Stop(job, {v1::CAUSE_DEADLINE, why}, turn);
  if (job.has_attempt()) return;  // Release looks at it again, if it has not ended then
  kept_.Drop(job, turn);
  if (scheduling_.Remove(job.id())) turn.Reschedule();
  job.state.set_message(absl::StrCat("deadline: ", why));
  states_.Transition(
      job,
      job.state.state() == v1::JOB_STATE_RECOVERING ? JobEvent::kGivenUp : JobEvent::kCannotStart,
      job.state.message(), turn);
}

std::optional<v1::DeadlineOutlook> CoreImpl::OutlookOf(const JobEntry& job,
                                                       const v1::WaitReason* waiting,
                                                       absl::Time now) {
  const absl::Time deadline = spec::DeadlineOf(job.spec());
  if (deadline == absl::InfiniteFuture() || !job.live()) return std::nullopt;
  v1::DeadlineOutlook outlook;
  *outlook.mutable_deadline() = ToProto(deadline);
  absl::Time start = now;
  outlook.set_start_known(waiting == nullptr || waiting->has_estimated_start());
  if (waiting != nullptr && waiting->has_estimated_start()) {
    start = std::max(now, FromProto(waiting->estimated_start()));
  }
  const absl::Duration rest = RestOf(job);
  const absl::Duration limit = LimitOf(job, now);
  outlook.set_by_time_limit(limit < rest);
  if (std::min(rest, limit) != absl::InfiniteDuration()) {
    *outlook.mutable_expected_end() = ToProto(start + std::min(rest, limit));
  }
  return outlook;
}

}  // namespace muster::coordinator
