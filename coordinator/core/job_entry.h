// One job in the core's memory: its durable rows, and what daemons report.
#ifndef MUSTER_COORDINATOR_CORE_JOB_ENTRY_H_
#define MUSTER_COORDINATOR_CORE_JOB_ENTRY_H_

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/ids.h"
#include "coordinator/core/attempt_machine.h"
#include "coordinator/core/checkpoints.h"
#include "coordinator/core/device_account.h"
#include "coordinator/core/gang.h"
#include "coordinator/core/job_view.h"
#include "coordinator/core/loss_curve.h"
#include "coordinator/store/store.h"
#include "muster/v1/stored.pb.h"
#include "proto/job_state.h"

namespace muster::coordinator {

struct JobEntry {
  // ---- durable
  v1::SpecRow fixed;
  v1::StateRow state;
  v1::ProgressRow progress;
  LossCurve curve;
  std::deque<v1::AttemptEnd> ends;  // oldest first; at most kAttemptEndsMax
  Checkpoints checkpoints;
  v1::AttemptRow attempt;                    // the newest; epoch 0 before the first
  std::deque<v1::AttemptRow> past_attempts;  // before it, oldest first; kPastAttemptsMax
  DeviceAccount account;                     // of the devices that its attempts have taken

  // ---- not durable: daemons report it again after a restart of the coordinator
  Gang gang;                             // of the newest attempt
  std::string phase;                     // of rank 0
  v1::WaitReason waiting;                // Job.waiting
  std::optional<absl::Time> symptom_at;  // of the first exit whose cause is a symptom (IsSymptom)
  absl::Time attempt_since;              // when the attempt was allocated, or recovered
  absl::Time progress_at;                // when the progress timeout last began anew
  absl::Time queued_at;                  // when the job last entered QUEUED
  std::optional<absl::Time> failed_at;   // when the last attempt failed, until the next one trains
  int64_t evaluated_step = 0;            // newest step that the current attempt evaluated

  // ---- what changed since it was last written or published
  absl::Time progress_stored_at;
  absl::Time ranks_published_at;
  bool progress_changed = false;
  bool spec_published = false;
  bool history_changed = true;
  bool account_changed = false;
  v1::Usage usage;  // Job.usage, as of the last change of `account`

  // The numbers of ranks that the spec allows, ascending (spec::SizesOf); found when they are first
  // asked for, as a spec never changes.
  const std::vector<int32_t>& sizes() const;
  // The numbers that it may have now: the one that its user asked for, else all of them.
  std::vector<int32_t> allowed_sizes() const;
  bool elastic() const { return spec().resources().has_rank_range(); }

  JobId id() const { return JobId(fixed.id()); }
  const std::string& name() const { return fixed.name(); }
  const v1::JobSpec& spec() const { return fixed.spec(); }
  Epoch epoch() const { return Epoch(state.epoch()); }
  bool live() const { return !IsFinal(state.state()); }
  bool has_attempt() const { return state.attempt_live(); }
  // Its attempt is live and was not stopped.
  bool up() const { return has_attempt() && PropertiesOf(state.attempt_state()).up; }
  bool runs_command() const { return spec().command_size() > 0; }
  // Optimizer steps to do; of a command, as it has reported them, else 0.
  int64_t steps() const {
    return runs_command() ? progress.steps() : spec().engine().training().steps();
  }
  ProgressView progress_view() {
    return {progress, curve, phase, steps(), spec().engine().model().sequence_length()};
  }

  // Of the newest attempt: Job.membership, at least 1.
  uint32_t membership() const { return std::max<uint32_t>(1, attempt.membership()); }
  // Ranks of the live attempt that were on this worker were replaced, and its daemon has not proven
  // yet that their devices are free. Such a worker has no other rank of the attempt.
  bool Leaves(const std::string& worker) const;
  // Of the newest attempt; 0 before the first.
  int32_t size() const { return attempt.placements_size(); }

  // The job as users see it.
  v1::Job View() const;
  // The parts that changed since the last call. Ranks that are left out stay changed.
  JobView TakeChangedParts(bool with_ranks);
  // Adds the row of state, with the ranks that are gone.
  void PutState(Batch& batch);
  // Adds the rows of progress that changed.
  void PutProgress(Batch& batch, absl::Time now);
  void PutSpec(Batch& batch) const;
  // Adds the row of the newest attempt.
  void PutAttempt(Batch& batch) const;
  // Adds the end of the newest attempt, and its row; at most kAttemptEndsMax are kept.
  void AddEnd(const v1::AttemptEnd& end, Batch& batch);
  // Files the newest attempt, if there is one, with those before it. Requires: it has ended, and
  // `attempt` is set anew.
  void KeepPast(Batch& batch);
  // Removes all rows.
  void Delete(Batch& batch) const;

  mutable std::vector<int32_t> sizes_known;  // what sizes() found; empty before
};

// True when the attempt has a rank on this worker.
bool HasRank(const v1::AttemptRow& attempt, const std::string& worker);

// An event about a job and none of its ranks, not yet numbered or dated.
v1::Event About(const JobEntry& job, v1::EventKind kind);

// Reads the rows of all jobs, by submit sequence. kDataLoss names the row that cannot be read, or
// that belongs to no job.
absl::StatusOr<std::map<uint64_t, JobEntry>> LoadJobs(Store& store, absl::Time now);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_JOB_ENTRY_H_
