#include "coordinator/core/run_clock.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "coordinator/core/planned_job.h"
#include "proto/time.h"

namespace muster::coordinator {
namespace {

// An expected end is moved when it has changed by so much, and by a twentieth of the rest.
constexpr absl::Duration kEndTolerance = absl::Seconds(1);

DeadlineKey TimeLimit(const JobEntry& job) {
  return {DeadlineKey::Kind::kTimeLimit, job.fixed.id()};
}

}  // namespace

void RunClock::Start(JobEntry& job, Turn& turn) {
  *job.state.mutable_running_since() = ToProto(turn.now());
  ExpectEnd(job, turn);
}

void RunClock::Resume(JobEntry& job, Turn& turn) {
  // A state of a version that did not count has no beginning.
  if (job.up() && job.state.attempt_state() != v1::ATTEMPT_STATE_ALLOCATED &&
      !job.state.has_running_since()) {
    *job.state.mutable_running_since() = ToProto(turn.now());
    turn.Persist(job.id());
  }
  deadlines_.Set(TimeLimit(job), turn.now());
}

void RunClock::Stop(JobEntry& job, Turn& turn) {
  if (!job.state.has_running_since()) return;
  // The clock may have been set back.
  const absl::Duration ran =
      std::max(absl::ZeroDuration(), turn.now() - FromProto(job.state.running_since()));
  *job.state.mutable_ran() = ToProto(FromProto(job.state.ran()) + ran);
  job.state.clear_running_since();
  deadlines_.Clear(TimeLimit(job));
}

std::optional<StopReason> RunClock::CheckLimit(const JobEntry& job, Turn& turn) {
  if (!job.up() || !job.spec().has_time_limit() || !job.state.has_running_since()) {
    return std::nullopt;
  }
  const absl::Duration limit = FromProto(job.spec().time_limit());
  const absl::Time due = FromProto(job.state.running_since()) + limit - FromProto(job.state.ran());
  if (turn.now() < due) {
    deadlines_.Set(TimeLimit(job), due);
    return std::nullopt;
  }
  return StopReason{v1::CAUSE_TIME_LIMIT,
                    absl::StrCat("it has run for its time_limit, ", absl::FormatDuration(limit))};
}

void RunClock::ExpectEnd(JobEntry& job, Turn& turn) {
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

}  // namespace muster::coordinator
