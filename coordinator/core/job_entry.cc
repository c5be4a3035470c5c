#include "coordinator/core/job_entry.h"

#include <algorithm>
#include <map>
#include <memory>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "coordinator/core/limits.h"
#include "coordinator/core/schema.h"
#include "proto/spec/elastic.h"

namespace muster::coordinator {
namespace {

// The fields of one value.
void AddState(const JobEntry& entry, v1::Job& job) {
  const v1::StateRow& state = entry.state;
  const v1::ProgressRow& progress = entry.progress;
  job.set_id(entry.fixed.id());
  job.set_name(entry.fixed.name());
  job.set_state(state.state());
  job.set_epoch(state.epoch());
  job.set_attempts(state.attempts());
  if (entry.attempt.epoch() > 0) job.set_membership(entry.membership());
  job.set_failures(state.failures());
  job.set_step(progress.step());
  job.set_steps(entry.steps());
  job.set_train_loss(progress.train_loss());
  job.set_validation_loss(progress.validation_loss());
  job.set_best_train_loss(progress.best_train_loss());
  job.set_best_validation_loss(progress.best_validation_loss());
  job.set_tokens_per_second(progress.tokens_per_second());
  job.set_last_committed_step(state.last_committed_step());
  if (entry.waiting.code() != v1::WAIT_CODE_UNSPECIFIED) *job.mutable_waiting() = entry.waiting;
  job.set_message(state.message());
  job.set_ranks_wanted(state.ranks_wanted());
  job.set_attempt_state(state.attempt_state());
  if (state.has_started()) *job.mutable_started() = state.started();
  if (state.has_ended()) *job.mutable_ended() = state.ended();
  job.set_step_seconds(progress.step_seconds());
  job.set_consumed_tokens(progress.consumed_tokens());
  job.set_phase(entry.phase);
  job.set_model_flops_utilization(progress.model_flops_utilization());
  job.set_hardware_flops_utilization(progress.hardware_flops_utilization());
  if (!entry.usage.times().empty()) *job.mutable_usage() = entry.usage;
  if (state.has_ran()) *job.mutable_ran() = state.ran();
  if (state.has_running_since()) *job.mutable_running_since() = state.running_since();
}

void AddSpec(const JobEntry& entry, v1::Job& job) {
  *job.mutable_spec() = entry.fixed.spec();
  *job.mutable_submitted() = entry.fixed.submitted();
  job.set_owner(entry.fixed.owner());
  if (entry.elastic()) job.mutable_sizes()->Add(entry.sizes().begin(), entry.sizes().end());
}

void AddRanks(const JobEntry& entry, v1::Job& job) {
  for (const v1::RankStatus& rank : entry.gang.ranks()) *job.add_ranks() = rank;
  if (entry.attempt.has_cost()) *job.mutable_placement_cost() = entry.attempt.cost();
  *job.mutable_replacements() = entry.attempt.replacements();
}

void AddCurve(const JobEntry& entry, v1::Job& job) {
  for (const auto& [step, point] : entry.curve.points()) *job.add_losses() = point;
}

void AddHistory(const JobEntry& entry, v1::Job& job) {
  for (const v1::AttemptEnd& end : entry.ends) *job.add_causes() = end;
  for (const v1::CheckpointRecord& record : entry.checkpoints.records())
    *job.add_checkpoints() = record;
}

// Calls `row(job, numbers, message)` for every row of a table; `numbers` are those behind the job's
// id in the key.
template <typename Message, typename Row>
absl::Status ForEachRow(Store& store, Table table, size_t numbers, std::map<JobId, JobEntry>& jobs,
                        Row row) {
  absl::Status status;
  RETURN_IF_ERROR(store.Scan(table, "", "", [&](const std::string& key, const std::string& value) {
    const absl::StatusOr<schema::JobKey> decoded = schema::DecodeJobKey(table, key, numbers);
    Message message;
    status = decoded.ok() ? schema::Parse(table, key, value, message) : decoded.status();
    if (!status.ok()) return false;
    const auto job = jobs.find(decoded->job);
    if (job == jobs.end()) {
      status = absl::DataLossError(absl::StrCat("row '", absl::CHexEscape(key), "' of table ",
                                                Name(table), " belongs to no job"));
      return false;
    }
    row(job->second, decoded->numbers, std::move(message));
    return true;
  }));
  return status;
}

}  // namespace

bool HasRank(const v1::AttemptRow& attempt, const std::string& worker) {
  return std::any_of(
      attempt.placements().begin(), attempt.placements().end(),
      [&worker](const v1::Placement& placement) { return placement.worker() == worker; });
}

v1::Event About(const JobEntry& job, v1::EventKind kind) {
  v1::Event event;
  event.set_kind(kind);
  event.set_job_id(job.fixed.id());
  event.set_job_name(job.name());
  event.set_epoch(job.state.epoch());
  event.set_rank(-1);
  event.set_step(job.progress.step());
  return event;
}

const std::vector<int32_t>& JobEntry::sizes() const {
  if (sizes_known.empty()) sizes_known = spec::SizesOf(spec());
  if (sizes_known.empty()) sizes_known.push_back(spec().resources().ranks());
  return sizes_known;
}

std::vector<int32_t> JobEntry::allowed_sizes() const {
  if (state.ranks_wanted() != 0) return {state.ranks_wanted()};
  return sizes();
}

bool JobEntry::Leaves(const std::string& worker) const {
  return std::any_of(
      attempt.leaving().begin(), attempt.leaving().end(),
      [&worker](const v1::Placement& placement) { return placement.worker() == worker; });
}

v1::Job JobEntry::View() const {
  v1::Job job;
  AddState(*this, job);
  AddSpec(*this, job);
  AddRanks(*this, job);
  AddCurve(*this, job);
  AddHistory(*this, job);
  return job;
}

JobView JobEntry::TakeChangedParts(bool with_ranks) {
  JobView view;
  const auto add = [this, &view](JobPart part, bool changed, auto fill) {
    if (!changed) return;
    auto job = std::make_shared<v1::Job>();
    fill(*this, *job);
    view[part] = std::move(job);
  };
  add(JobPart::kState, true, AddState);
  add(JobPart::kSpec, !std::exchange(spec_published, true), AddSpec);
  add(JobPart::kRanks, with_ranks && gang.TakeChanged(), AddRanks);
  add(JobPart::kCurve, curve.TakeViewChanged(), AddCurve);
  add(JobPart::kHistory, std::exchange(history_changed, false), AddHistory);
  return view;
}

void JobEntry::PutState(Batch& batch) {
  state.clear_gone();
  if (has_attempt()) {
    for (v1::RankRun& run : gang.Gone()) *state.add_gone() = std::move(run);
  }
  account_changed = false;
  if (account.clock_ms() > 0 || !account.devices().empty()) {
    *state.mutable_account() = account.Stored();
  } else {
    state
        .clear_account();  // at the first instant of the ledger a row may have devices, but no time
  }
  batch.Put(Table::kStates, fixed.id(), schema::Serialize(state));
}

void JobEntry::PutProgress(Batch& batch, absl::Time now) {
  if (!std::exchange(progress_changed, false)) return;
  progress_stored_at = now;
  batch.Put(Table::kProgress, fixed.id(), schema::Serialize(progress));
  for (const int64_t step : curve.TakeChanged()) {
    std::string key = schema::Encode(schema::JobKey{id(), {static_cast<uint64_t>(step)}});
    if (const v1::LossPoint* point = curve.Find(step); point != nullptr) {
      batch.Put(Table::kCurves, std::move(key), schema::Serialize(*point));
    } else {
      batch.Delete(Table::kCurves, std::move(key));
    }
  }
}

void JobEntry::PutSpec(Batch& batch) const {
  batch.Put(Table::kSpecs, fixed.id(), schema::Serialize(fixed));
}

void JobEntry::PutAttempt(Batch& batch) const {
  batch.Put(Table::kAttempts, schema::Encode(schema::JobKey{id(), {attempt.epoch()}}),
            schema::Serialize(attempt));
}

void JobEntry::AddEnd(const v1::AttemptEnd& end, Batch& batch) {
  const auto key = [this](uint64_t epoch) { return schema::Encode(schema::JobKey{id(), {epoch}}); };
  batch.Put(Table::kEnds, key(end.epoch()), schema::Serialize(end));
  ends.push_back(end);
  while (ends.size() > kAttemptEndsMax) {
    batch.Delete(Table::kEnds, key(ends.front().epoch()));
    ends.pop_front();
  }
  history_changed = true;
}

// Only the newest attempt keeps its ranks; the others keep where they ran.
void JobEntry::KeepPast(Batch& batch) {
  if (attempt.epoch() == 0) return;
  attempt.clear_ranks();
  PutAttempt(batch);
  past_attempts.push_back(std::move(attempt));
  while (past_attempts.size() > kPastAttemptsMax) {
    batch.Delete(Table::kAttempts,
                 schema::Encode(schema::JobKey{id(), {past_attempts.front().epoch()}}));
    past_attempts.pop_front();
  }
}

void JobEntry::Delete(Batch& batch) const {
  for (const Table table : {Table::kSpecs, Table::kStates, Table::kProgress}) {
    batch.Delete(table, fixed.id());
  }
  for (const v1::AttemptRow& past : past_attempts) {
    batch.Delete(Table::kAttempts, schema::Encode(schema::JobKey{id(), {past.epoch()}}));
  }
  if (attempt.epoch() > 0) {
    batch.Delete(Table::kAttempts, schema::Encode(schema::JobKey{id(), {attempt.epoch()}}));
  }
  for (const v1::AttemptEnd& end : ends) {
    batch.Delete(Table::kEnds, schema::Encode(schema::JobKey{id(), {end.epoch()}}));
  }
  for (const v1::CheckpointRecord& record : checkpoints.records()) {
    batch.Delete(Table::kCheckpoints, schema::CheckpointKey(id(), record));
  }
  for (const auto& [step, point] : curve.points()) {
    batch.Delete(Table::kCurves,
                 schema::Encode(schema::JobKey{id(), {static_cast<uint64_t>(step)}}));
  }
}

absl::StatusOr<std::map<uint64_t, JobEntry>> LoadJobs(Store& store, absl::Time now) {
  std::map<JobId, JobEntry> jobs;
  absl::Status status;
  RETURN_IF_ERROR(
      store.Scan(Table::kSpecs, "", "", [&](const std::string& key, const std::string& value) {
        v1::SpecRow spec;
        status = schema::Parse(Table::kSpecs, key, value, spec);
        if (status.ok()) jobs[JobId(key)].fixed = std::move(spec);
        return status.ok();
      }));
  RETURN_IF_ERROR(status);
  using Numbers = std::vector<uint64_t>;
  RETURN_IF_ERROR(ForEachRow<v1::StateRow>(
      store, Table::kStates, 0, jobs,
      [](JobEntry& job, const Numbers&, v1::StateRow state) { job.state = std::move(state); }));
  RETURN_IF_ERROR(ForEachRow<v1::ProgressRow>(
      store, Table::kProgress, 0, jobs,
      [](JobEntry& job, const Numbers&, v1::ProgressRow row) { job.progress = std::move(row); }));
  RETURN_IF_ERROR(ForEachRow<v1::AttemptRow>(
      store, Table::kAttempts, 1, jobs, [](JobEntry& job, const Numbers&, v1::AttemptRow row) {
        if (job.attempt.epoch() > 0) job.past_attempts.push_back(std::move(job.attempt));
        job.attempt = std::move(row);
      }));
  RETURN_IF_ERROR(ForEachRow<v1::AttemptEnd>(store, Table::kEnds, 1, jobs,
                                             [](JobEntry& job, const Numbers&, v1::AttemptEnd row) {
                                               job.ends.push_back(std::move(row));
                                             }));
  RETURN_IF_ERROR(
      ForEachRow<v1::CheckpointRecord>(store, Table::kCheckpoints, 2, jobs,
                                       [](JobEntry& job, const Numbers&, v1::CheckpointRecord row) {
                                         job.checkpoints.Recover(std::move(row));
                                       }));
  RETURN_IF_ERROR(ForEachRow<v1::LossPoint>(
      store, Table::kCurves, 1, jobs,
      [](JobEntry& job, const Numbers&, v1::LossPoint row) { job.curve.Recover(std::move(row)); }));
  std::map<uint64_t, JobEntry> by_sequence;
  for (auto& [id, job] : jobs) {
    job.queued_at = job.attempt_since = job.progress_at = job.progress_stored_at = now;
    job.gang = Gang(job.attempt, now);
    for (const v1::RankRun& run : job.state.gone()) job.gang.RecoverGone(run);
    job.account = DeviceAccount(job.state.account());
    const uint64_t sequence = job.fixed.submit_sequence();
    if (job.state.state() == v1::JOB_STATE_UNSPECIFIED || by_sequence.contains(sequence)) {
      return absl::DataLossError(absl::StrCat("job ", id.value(),
                                              " has no row of state, or its "
                                              "submit sequence is another job's"));
    }
    by_sequence.emplace(sequence, std::move(job));
  }
  return by_sequence;
}

}  // namespace muster::coordinator
