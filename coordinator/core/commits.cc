#include "coordinator/core/commits.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "coordinator/core/gang.h"
#include "coordinator/core/limits.h"
#include "coordinator/core/planned_job.h"
#include "coordinator/core/schema.h"
#include "proto/time.h"

namespace muster::coordinator {
namespace {

void Put(JobEntry& job, const v1::CheckpointRecord& record, Turn& turn) {
  turn.batch().Put(Table::kCheckpoints, schema::CheckpointKey(job.id(), record),
                   schema::Serialize(record));
  job.history_changed = true;
}

}  // namespace

void Commits::UpdateCommitted(JobEntry& job) {
  scheduling_.ChangeRunning(job.id(),
                            [&job](RunningJob& running) { running.saved_at = SavedAt(job); });
  const int64_t newest = job.checkpoints.newest();
  job.state.set_last_committed_step(newest);
  // Steps lost with a damaged checkpoint count as an advance when they are committed again.
  job.state.set_committed_step_at_attempt_start(
      std::min(job.state.committed_step_at_attempt_start(), newest));
}

absl::Status Commits::Accept(const WorkerEntry& worker, const v1::CheckpointCommit& commit,
                             Turn& turn) {
  JobEntry* job = jobs_.Find(JobId(commit.job_id()));
  const int64_t step = commit.checkpoint().step();
  const std::string what = absl::StrCat("job ", Bounded(commit.job_id()), " epoch ", commit.epoch(),
                                        ": checkpoint of step ", step);
  if (job == nullptr) return absl::AbortedError(absl::StrCat(what, ": no such job"));
  if (const v1::CheckpointRecord* known = job->checkpoints.Find(step, commit.epoch())) {
    if (known->manifest_checksum() == commit.checkpoint().manifest_checksum()) {
      return absl::OkStatus();  // repeated, because its verdict was lost
    }
    return absl::AlreadyExistsError(absl::StrCat(what, " is committed with manifest ",
                                                 known->manifest_checksum(), ", not ",
                                                 commit.checkpoint().manifest_checksum()));
  }
  const bool foreign = worker.foreign_attempts.contains({job->id(), Epoch(commit.epoch())});
  if (!job->has_attempt() || job->epoch().value() != commit.epoch() || foreign) {
    const std::string why = absl::StrCat(
        what, " is refused: ",
        foreign              ? "it is of another history of the coordinator's state"
        : job->has_attempt() ? absl::StrCat("epoch ", job->epoch().value(), " is current")
                             : std::string("the attempt has ended"));
    if (job->checkpoints.Refuse(step, commit.epoch())) {
      v1::Event row = About(*job, v1::EVENT_KIND_CHECKPOINT_REFUSED);
      row.set_epoch(commit.epoch());
      row.set_step(step);
      row.set_message(why);
      turn.Log(std::move(row));
    }
    return absl::AbortedError(why);
  }
  // 0, of a rank of an earlier version, stands for 1.
  const uint32_t membership = std::max<uint32_t>(1, commit.checkpoint().membership());
  if (membership != job->membership()) {
    const std::string why = absl::StrCat(what, " is refused: it is of membership ", membership,
                                         ", membership ", job->membership(), " is current");
    if (job->checkpoints.Refuse(step, commit.epoch())) {
      v1::Event row = About(*job, v1::EVENT_KIND_CHECKPOINT_REFUSED);
      row.set_step(step);
      row.set_message(why);
      turn.Log(std::move(row));
    }
    return absl::AbortedError(why);
  }
  if (job->gang.On(worker.row.name()).empty()) {
    return absl::PermissionDeniedError(
        absl::StrCat(what, ": the attempt has no rank on worker ", worker.row.name()));
  }
  if (step <= 0) return absl::InvalidArgumentError(absl::StrCat(what, ": steps start at 1"));
  v1::CheckpointRecord record = commit.checkpoint();
  record.set_epoch(commit.epoch());
  record.set_damaged(false);
  record.set_removed(false);
  *record.mutable_committed() = ToProto(turn.now());
  const double seconds = record.seconds();
  const std::string path = record.path();
  Put(*job, record, turn);
  for (const v1::CheckpointRecord& gone : job->checkpoints.Add(std::move(record))) {
    turn.batch().Delete(Table::kCheckpoints, schema::CheckpointKey(job->id(), gone));
  }
  UpdateCommitted(*job);
  v1::Event row = About(*job, v1::EVENT_KIND_CHECKPOINT_COMMITTED);
  row.set_step(step);
  row.set_message(absl::StrCat("checkpoint of step ", step, " in ", path));
  turn.Log(std::move(row));
  turn.Persist(job->id());
  turn.Act(Measured{Measured::What::kCheckpointSave, seconds});
  return absl::OkStatus();
}

JobEntry* Commits::Commit(const WorkerEntry& worker, const v1::CheckpointCommit& commit,
                          Turn& turn) {
  const JobEntry* before = jobs_.Find(JobId(commit.job_id()));
  const int64_t committed = before == nullptr ? 0 : before->state.last_committed_step();
  const absl::Status status = Accept(worker, commit, turn);
  SendAction send;
  send.session = *worker.session;
  v1::CheckpointVerdict& verdict = *send.message.mutable_verdict();
  verdict.set_job_id(commit.job_id());
  verdict.set_epoch(commit.epoch());
  verdict.set_step(commit.checkpoint().step());
  verdict.set_status_code(static_cast<int32_t>(status.code()));
  verdict.set_status_message(std::string(status.message()));
  turn.Act(std::move(send));
  JobEntry* job = jobs_.Find(JobId(commit.job_id()));
  return job == nullptr || job->state.last_committed_step() <= committed ? nullptr : job;
}

void Commits::Notice(const WorkerEntry& worker, const v1::RankNotice& notice, Turn& turn) {
  JobEntry* job = jobs_.Find(JobId(notice.job_id()));
  if (job == nullptr) return;
  if (notice.has_removed()) {
    // True whichever attempt's rank reports it, but only ranks of this job can know.
    const auto here = [&worker](const v1::AttemptRow& attempt) {
      return HasRank(attempt, worker.row.name());
    };
    if (!here(job->attempt) &&
        std::none_of(job->past_attempts.begin(), job->past_attempts.end(), here)) {
      return;
    }
    const int64_t step = notice.removed().step();
    const uint64_t epoch = notice.removed().epoch();
    const v1::CheckpointRecord* record = job->checkpoints.Find(step, epoch);
    // What a membership wrote that trained after all, and was refused, has a directory of its own.
    if (record == nullptr || std::max<uint32_t>(1, record->membership()) !=
                                 std::max<uint32_t>(1, notice.removed().membership())) {
      return;
    }
    record = job->checkpoints.MarkRemoved(step, epoch);
    if (record == nullptr) return;
    Put(*job, *record, turn);
    UpdateCommitted(*job);
    turn.Persist(job->id());
    return;
  }
  // Other notices count only from a rank of the current attempt.
  if (!job->has_attempt() || job->epoch().value() != notice.epoch() ||
      !job->gang.Has(notice.rank()) ||
      job->gang.rank(notice.rank()).worker() != worker.row.name()) {
    return;
  }
  if (notice.has_evaluation()) {
    Evaluated(*job, notice.evaluation().step(), notice.evaluation().loss(), turn);
  } else if (notice.has_damaged()) {
    const v1::CheckpointRecord& damaged = notice.damaged().checkpoint();
    const v1::CheckpointRecord* record =
        job->checkpoints.MarkDamaged(damaged.step(), damaged.epoch());
    if (record == nullptr) return;
    Put(*job, *record, turn);
    UpdateCommitted(*job);
    v1::Event row = About(*job, v1::EVENT_KIND_CHECKPOINT_DAMAGED);
    row.set_step(damaged.step());
    row.set_rank(notice.rank());
    row.set_worker(worker.row.name());
    row.set_message(absl::StrCat("checkpoint of step ", damaged.step(), " in ", record->path(),
                                 " cannot be used: ", Bounded(notice.damaged().reason())));
    turn.Log(std::move(row));
    turn.Persist(job->id());
  }
}

void Commits::Evaluated(JobEntry& job, int64_t step, double loss, Turn& turn) {
  // Every rank reports its last evaluation with every heartbeat.
  if (step <= job.evaluated_step) return;
  job.evaluated_step = step;
  if (!AddEvaluation(step, loss, job.progress, job.curve)) return;
  job.progress_changed = true;
  v1::Event row = About(job, v1::EVENT_KIND_EVALUATION);
  row.set_step(step);
  row.set_message(absl::StrCat("validation loss ", loss, " at step ", step));
  turn.Log(std::move(row));
  turn.Persist(job.id());
}

}  // namespace muster::coordinator
