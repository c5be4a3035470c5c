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
  std::vector<std::string> names;
  for (const auto& [name, sequences] : by_name_) names.push_back(name);
  const std::string nearest = spec::NearestName(name_or_id, names);
  return absl::NotFoundError(absl::StrCat("no job has the name or id ", spec::Quoted(name_or_id),
                                          nearest.empty()
                                              ? std::string("; `muster get jobs` lists them")
                                              : absl::StrCat("; did you mean '", nearest, "'?")));
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

JobEntry& JobTable::Add(v1::JobRecord record) {
  const JobId id(record.job().id());
  const uint64_t sequence = record.submit_sequence();
  CHECK(by_sequence_.emplace(sequence, id).second) << "submit sequence " << sequence << " twice";
  by_name_[record.job().name()].insert(sequence);
  if (!record.request_id().empty()) by_request_[record.request_id()] = id;
  if (IsFinal(record.job().state())) {
    ended_.emplace(FromProto(record.job().ended()), sequence);
  } else {
    live_.emplace(sequence, id);
  }
  JobEntry& entry = entries_[id];
  entry.record = std::move(record);
  return entry;
}

void JobTable::Ended(const JobEntry& job) {
  const uint64_t sequence = job.record.submit_sequence();
  live_.erase(sequence);
  ended_.emplace(FromProto(job.job().ended()), sequence);
}

void JobTable::ForgetOldest(Turn& turn) {
  while (ended_.size() > kEndedJobsMax) {
    const uint64_t sequence = ended_.begin()->second;
    const JobId id = by_sequence_.find(sequence)->second;
    const JobEntry& old = *Find(id);
    turn.batch().Delete(Table::kJobs, id.value());
    if (!old.record.request_id().empty()) {
      turn.batch().Delete(Table::kRequests, old.record.request_id());
      by_request_.erase(old.record.request_id());
    }
    const auto named = by_name_.find(old.job().name());
    named->second.erase(sequence);
    if (named->second.empty()) by_name_.erase(named);
    by_sequence_.erase(sequence);
    ended_.erase(ended_.begin());
    entries_.erase(id);
  }
}

}  // namespace muster::coordinator
