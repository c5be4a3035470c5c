// All jobs, by id, name, order of submission and request id.
#ifndef MUSTER_COORDINATOR_CORE_JOBS_H_
#define MUSTER_COORDINATOR_CORE_JOBS_H_

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "coordinator/core/core.h"
#include "coordinator/core/turn.h"
#include "proto/job_state.h"

namespace muster::coordinator {

struct JobEntry {
  v1::JobRecord record;

  // ---- not durable: daemons report it again after a restart of the coordinator
  std::vector<v1::RankProgress> progress;  // by rank, of the current attempt
  std::vector<absl::Time> answered;        // by rank: when its report last changed
  std::map<int32_t, v1::RankExit> exits;   // by rank, of the current attempt
  std::optional<absl::Time> symptom_at;    // of the first exit whose cause is a symptom (IsSymptom)
  absl::Time attempt_since;                // when the attempt was allocated, or recovered
  absl::Time progress_at;                  // when the progress timeout last began anew
  absl::Time advanced_at;                  // when a rank of the attempt last reported progress
  absl::Time queued_at;                    // when the job last entered QUEUED
  std::optional<absl::Time> failed_at;  // when the last attempt failed, until the next one trains
  absl::Time persisted_at;              // when the row was last written
  int64_t evaluated_step = 0;           // newest step that the current attempt evaluated
  // (epoch, step) of commits that were refused, so that a repeated one is logged once.
  std::set<std::pair<uint64_t, int64_t>> refused;

  v1::Job& job() { return *record.mutable_job(); }
  const v1::Job& job() const { return record.job(); }
  JobId id() const { return JobId(record.job().id()); }
  Epoch epoch() const { return Epoch(record.job().epoch()); }
  bool live() const { return !IsFinal(record.job().state()); }
};

// Bounds: kLiveJobsMax, kEndedJobsMax.
class JobTable {
 public:
  JobEntry* Find(const JobId& id);
  const JobEntry* Find(const JobId& id) const;
  // By id, else the newest of that name; kNotFound names the nearest job name.
  absl::StatusOr<const JobEntry*> Resolve(const std::string& name_or_id) const;
  JobEntry* FindRequest(const std::string& request_id);
  // The live job of that name.
  const JobEntry* FindLive(const std::string& name) const;
  // Requires: no job has its submit sequence.
  JobEntry& Add(v1::JobRecord record);
  uint64_t NextSequence() const {
    return by_sequence_.empty() ? 1 : by_sequence_.rbegin()->first + 1;
  }
  // Files a job that has ended among those.
  void Ended(const JobEntry& job);
  // Forgets the jobs beyond kEndedJobsMax that ended first. To be called at the end of a turn, when
  // nothing refers to an entry.
  void ForgetOldest(Turn& turn);
  size_t live_count() const { return entries_.size() - ended_.size(); }

  std::map<JobId, JobEntry>& entries() { return entries_; }
  const std::map<JobId, JobEntry>& entries() const { return entries_; }
  const std::map<uint64_t, JobId>& by_sequence() const { return by_sequence_; }
  // The jobs that have not ended, by submit sequence.
  const std::map<uint64_t, JobId>& live() const { return live_; }

 private:
  // Requires: `sequences` is not empty and has only those of known jobs.
  const JobEntry* Newest(const std::set<uint64_t>& sequences) const;

  std::map<JobId, JobEntry> entries_;
  std::map<uint64_t, JobId> by_sequence_;
  std::map<uint64_t, JobId> live_;
  std::set<std::pair<absl::Time, uint64_t>> ended_;  // time of the end, submit sequence
  std::map<std::string, std::set<uint64_t>> by_name_;
  std::map<std::string, JobId> by_request_;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_JOBS_H_
