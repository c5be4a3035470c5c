// All jobs, by id, name, order of submission and request id.
#ifndef MUSTER_COORDINATOR_CORE_JOBS_H_
#define MUSTER_COORDINATOR_CORE_JOBS_H_

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "coordinator/core/arrays.h"
#include "coordinator/core/job_entry.h"
#include "coordinator/core/turn.h"

namespace muster::coordinator {

// Bounds: kLiveJobsMax, kEndedJobsMax.
class JobTable {
 public:
  JobEntry* Find(const JobId& id);
  const JobEntry* Find(const JobId& id) const;
  // By id, else the newest of that name; kNotFound.
  absl::StatusOr<const JobEntry*> Resolve(const std::string& name_or_id) const;
  JobEntry* FindRequest(const std::string& request_id);
  // The live job of that name.
  const JobEntry* FindLive(const std::string& name) const;
  // Requires: no job has its submit sequence.
  JobEntry& Add(JobEntry job);
  uint64_t NextSequence() const {
    return by_sequence_.empty() ? 1 : by_sequence_.rbegin()->first + 1;
  }
  // Files a job that has ended among those.
  void Ended(const JobEntry& job);
  // Forgets the jobs beyond kEndedJobsMax that ended first. To be called at the end of a turn, when
  // nothing refers to an entry.
  void ForgetOldest(Turn& turn);
  size_t live_count() const { return entries_.size() - ended_.size(); }

  // The arrays whose tasks these jobs are.
  // Null: there is no array of this name or id, or a job of the name is newer.
  const Array* FindArray(const std::string& name_or_id) const;
  ArrayTable& arrays() { return arrays_; }
  const ArrayTable& arrays() const { return arrays_; }
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
  ArrayTable arrays_;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_JOBS_H_
