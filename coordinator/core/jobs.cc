#include "coordinator/core/jobs.h"

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "coordinator/core/limits.h"
#include "proto/spec/names.h"
#include "proto/time.h"

namespace muster::coordinator {

JobEntry* JobTable::Find(const JobId& id) {
  const auto it = entries_.find(id);
  return it == entries_.end() ? nullptr : &it->second;
}

const JobEntry* JobTable::Find(const JobId& id) const {
  const auto it = entries_.find(id);
  return it == entries_.end() ? nullptr : &it->second;
}

const JobEntry* JobTable::Newest(const std::set<uint64_t>& sequences) const {
  return Find(by_sequence_.find(*sequences.rbegin())->second);
}

absl::StatusOr<const JobEntry*> JobTable::Resolve(const std::string& name_or_id) const {
  if (const JobEntry* job = Find(JobId(name_or_id)); job != nullptr) return job;
  if (const auto named = by_name_.find(name_or_id); named != by_name_.end()) {
    return Newest(named->second);
  }
  return absl::NotFoundError(absl::StrCat("no job has the name or id ", spec::Quoted(name_or_id),
                                          "; `muster get jobs` lists them"));
}

JobEntry* JobTable::FindRequest(const std::string& request_id) {
  const auto it = by_request_.find(request_id);
  return it == by_request_.end() ? nullptr : Find(it->second);
}

const JobEntry* JobTable::FindLive(const std::string& name) const {
  const auto named = by_name_.find(name);
  if (named == by_name_.end()) return nullptr;
  const JobEntry* newest = Newest(named->second);
  return newest->live() ? newest : nullptr;
}

JobEntry& JobTable::Add(JobEntry job) {
  const JobId id = job.id();
  const uint64_t sequence = job.fixed.submit_sequence();
  CHECK(by_sequence_.emplace(sequence, id).second) << "submit sequence " << sequence << " twice";
  by_name_[job.name()].insert(sequence);
  if (!job.fixed.request_id().empty()) by_request_[job.fixed.request_id()] = id;
  if (job.live()) {
    live_.emplace(sequence, id);
  } else {
    ended_.emplace(FromProto(job.state.ended()), sequence);
  }
  JobEntry& added = entries_.insert_or_assign(id, std::move(job)).first->second;
  arrays_.Add(added);
  return added;
}

void JobTable::Ended(const JobEntry& job) {
  const uint64_t sequence = job.fixed.submit_sequence();
  live_.erase(sequence);
  arrays_.Ended(job);
  ended_.emplace(FromProto(job.state.ended()), sequence);
}

void JobTable::ForgetOldest(Turn& turn) {
  while (ended_.size() > kEndedJobsMax) {
    const uint64_t sequence = ended_.begin()->second;
    const JobId id = by_sequence_.find(sequence)->second;
    const JobEntry& old = *Find(id);
    old.Delete(turn.batch());
    turn.Act(JobForgotten{id});
    if (!old.fixed.request_id().empty()) {
      turn.batch().Delete(Table::kRequests, old.fixed.request_id());
      by_request_.erase(old.fixed.request_id());
    }
    const auto named = by_name_.find(old.name());
    named->second.erase(sequence);
    if (named->second.empty()) by_name_.erase(named);
    arrays_.Forget(old);
    by_sequence_.erase(sequence);
    ended_.erase(ended_.begin());
    entries_.erase(id);
  }
}

const Array* JobTable::FindArray(const std::string& name_or_id) const {
  if (const Array* array = arrays_.FindId(name_or_id); array != nullptr) return array;
  const Array* array = arrays_.FindName(name_or_id);
  if (array == nullptr) return nullptr;
  // A job of the name that is newer is meant.
  const absl::StatusOr<const JobEntry*> job = Resolve(name_or_id);
  return job.ok() && (*job)->fixed.submit_sequence() > array->sequence ? nullptr : array;
}

}  // namespace muster::coordinator
