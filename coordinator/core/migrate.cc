#include "coordinator/core/migrate.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "coordinator/core/job_entry.h"
#include "coordinator/core/schema.h"
#include "coordinator/core/state_log.h"

namespace muster::coordinator {
namespace {

constexpr size_t kJobsPerWrite = 256;
constexpr size_t kRowsPerEntry = 1000;

v1::AttemptRow ToStored(const v1::Attempt& old) {
  v1::AttemptRow attempt;
  attempt.set_epoch(old.epoch());
  *attempt.mutable_started() = old.started();
  *attempt.mutable_placements() = old.placements();
  *attempt.mutable_restore() = old.restore();
  return attempt;
}

void AddAttempts(const v1::JobRecord& record, JobEntry& job) {
  for (const v1::Attempt& past : record.past_attempts()) {
    job.past_attempts.push_back(ToStored(past));
  }
  const v1::Attempt* newest = record.has_attempt() ? &record.attempt() : nullptr;
  if (newest != nullptr) {
    job.attempt = ToStored(*newest);
  } else if (!job.past_attempts.empty()) {
    newest = &*record.past_attempts().rbegin();
    job.attempt = std::move(job.past_attempts.back());
    job.past_attempts.pop_back();
  }
  // Rows of ranks belong to the newest attempt.
  for (v1::Placement& placement : *job.attempt.mutable_placements()) {
    if (placement.rank() < record.job().ranks_size()) {
      placement.set_host(record.job().ranks(placement.rank()).host());
    }
  }
  if (newest == nullptr) return;
  job.state.set_stop_cause(newest->stop_cause());
  job.state.set_stop_message(newest->stop_message());
  job.state.set_stop_rank(newest->stop_rank());
  *job.state.mutable_between() = newest->between();
  *job.attempt.mutable_ranks() = record.job().ranks();
  job.gang = Gang(job.attempt, absl::UnixEpoch());
  if (record.has_attempt()) job.attempt.clear_ranks();
}

JobEntry ToEntry(const v1::JobRecord& record) {
  const v1::Job& old = record.job();
  JobEntry job;
  job.fixed.set_id(old.id());
  job.fixed.set_name(old.name());
  *job.fixed.mutable_spec() = old.spec();
  job.fixed.set_request_id(record.request_id());
  job.fixed.set_submit_sequence(record.submit_sequence());
  *job.fixed.mutable_submitted() = old.submitted();

  v1::StateRow& state = job.state;
  state.set_state(old.state());
  state.set_epoch(old.epoch());
  state.set_attempts(old.attempts());
  state.set_failures(old.failures());
  state.set_message(old.message());
  if (old.has_started()) *state.mutable_started() = old.started();
  if (old.has_ended()) *state.mutable_ended() = old.ended();
  state.set_last_committed_step(old.last_committed_step());
  if (record.has_not_before()) *state.mutable_not_before() = record.not_before();
  state.set_committed_step_at_attempt_start(record.committed_step_at_attempt_start());
  state.set_restarts_in_a_row(record.restarts_in_a_row());
  state.set_after_release(record.after_release());
  state.set_epoch_floor(record.epoch_floor());
  state.set_attempt_state(old.attempt_state());
  state.set_attempt_live(record.has_attempt());
  AddAttempts(record, job);

  v1::ProgressRow& progress = job.progress;
  progress.set_step(old.step());
  progress.set_train_loss(old.train_loss());
  progress.set_validation_loss(old.validation_loss());
  progress.set_tokens_per_second(old.tokens_per_second());
  progress.set_step_seconds(old.step_seconds());
  progress.set_consumed_tokens(old.consumed_tokens());
  progress.set_model_flops_utilization(old.model_flops_utilization());
  progress.set_hardware_flops_utilization(old.hardware_flops_utilization());
  return job;
}

void PutAll(const v1::JobRecord& record, Batch& batch) {
  JobEntry job = ToEntry(record);
  const JobId id = job.id();
  job.PutSpec(batch);
  job.PutState(batch);
  job.progress_changed = true;
  job.PutProgress(batch, absl::UnixEpoch());
  if (job.attempt.epoch() > 0) job.PutAttempt(batch);
  for (const v1::AttemptRow& past : job.past_attempts) {
    batch.Put(Table::kAttempts, schema::Encode(schema::JobKey{id, {past.epoch()}}),
              schema::Serialize(past));
  }
  for (const v1::AttemptEnd& end : record.job().causes()) {
    batch.Put(Table::kEnds, schema::Encode(schema::JobKey{id, {end.epoch()}}),
              schema::Serialize(end));
  }
  for (const v1::CheckpointRecord& checkpoint : record.job().checkpoints()) {
    batch.Put(Table::kCheckpoints, schema::CheckpointKey(id, checkpoint),
              schema::Serialize(checkpoint));
  }
  for (const v1::LossPoint& point : record.job().losses()) {
    batch.Put(Table::kCurves,
              schema::Encode(schema::JobKey{id, {static_cast<uint64_t>(point.step())}}),
              schema::Serialize(point));
  }
  batch.Delete(Table::kJobs, id.value());
}

// The log of a store that had none begins with its rows.
absl::Status BeginLog(Store& store) {
  Batch none;
  RETURN_IF_ERROR(store.Scan(Table::kLog, "", "", [&](const std::string& key, const std::string&) {
    none.Delete(Table::kLog, key);
    return true;
  }));
  none.Put(Table::kMeta, schema::kLastLogEntry, schema::EncodeU64(0));
  RETURN_IF_ERROR(store.Write({none}));
  ASSIGN_OR_RETURN(const auto logged, ReadLogged(store));
  StateLog log;
  Batch rows;
  const auto write = [&]() -> absl::Status {
    log.Append(absl::UnixEpoch(), "coordinator", 0, rows);
    return store.Write({std::exchange(rows, Batch())});
  };
  for (const auto& [row, value] : logged.first) {
    rows.Put(row.first, row.second, value);
    if (rows.changes.size() == kRowsPerEntry) RETURN_IF_ERROR(write());
  }
  return rows.empty() ? absl::OkStatus() : write();
}

}  // namespace

absl::Status Migrate(Store& store) {
  ASSIGN_OR_RETURN(const std::optional<std::string> version,
                   store.Get(Table::kMeta, kMetaSchemaVersion));
  uint32_t found = 0;
  if (!version.has_value() || !absl::SimpleAtoi(*version, &found)) {
    return absl::DataLossError("the store has no schema version; restore it from a backup");
  }
  if (found == kSchemaVersion) return absl::OkStatus();
  Batch version_row;
  version_row.Put(Table::kMeta, kMetaSchemaVersion, absl::StrCat(kSchemaVersion));
  if (found >= kFirstSchemaWithLog) return store.Write({version_row});
  std::vector<Batch> batches;
  bool more = true;
  while (more) {
    more = false;
    batches.clear();
    absl::Status status;
    RETURN_IF_ERROR(
        store.Scan(Table::kJobs, "", "", [&](const std::string& key, const std::string& value) {
          if (batches.size() == kJobsPerWrite) {
            more = true;
            return false;
          }
          v1::JobRecord record;
          status = schema::Parse(Table::kJobs, key, value, record);
          if (status.ok()) PutAll(record, batches.emplace_back());
          return status.ok();
        }));
    RETURN_IF_ERROR(status);
    if (!batches.empty()) RETURN_IF_ERROR(store.Write(batches));
  }
  RETURN_IF_ERROR(BeginLog(store));
  return store.Write({version_row});
}

}  // namespace muster::coordinator
