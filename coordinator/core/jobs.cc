#include "coordinator/core/jobs.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "coordinator/core/limits.h"

namespace muster::coordinator {
namespace {

// Levenshtein's distance.
size_t EditDistance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t above = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, diagonal + (a[i - 1] == b[j - 1] ? 0 : 1)});
      diagonal = above;
    }
  }
  return row[b.size()];
}

}  // namespace

JobEntry* JobTable::Find(const JobId& id) {
  const auto it = entries_.find(id);
  return it == entries_.end() ? nullptr : &it->second;
}

const JobEntry* JobTable::Find(const JobId& id) const {
  const auto it = entries_.find(id);
  return it == entries_.end() ? nullptr : &it->second;
}

absl::StatusOr<const JobEntry*> JobTable::Resolve(const std::string& name_or_id) const {
  if (const JobEntry* job = Find(JobId(name_or_id)); job != nullptr) return job;
  if (const auto named = by_name_.find(name_or_id); named != by_name_.end()) {
    return Find(by_sequence_.at(*named->second.rbegin()));
  }
  const std::string asked = name_or_id.substr(0, 64);
  std::string nearest;
  size_t best = std::max<size_t>(3, asked.size() / 2 + 1);  // two letters swapped are 2 apart
  for (const auto& [name, sequences] : by_name_) {
    if (const size_t distance = EditDistance(asked, name); distance < best) {
      best = distance;
      nearest = name;
    }
  }
  return absl::NotFoundError(absl::StrCat("no job has the name or id '", asked, "'",
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
  const JobEntry* newest = Find(by_sequence_.at(*named->second.rbegin()));
  return newest->live() ? newest : nullptr;
}

JobEntry& JobTable::Add(v1::JobRecord record) {
  const JobId id(record.job().id());
  const uint64_t sequence = record.submit_sequence();
  CHECK(by_sequence_.emplace(sequence, id).second) << "submit sequence " << sequence << " twice";
  by_name_[record.job().name()].insert(sequence);
  if (!record.request_id().empty()) by_request_[record.request_id()] = id;
  if (IsFinal(record.job().state())) {
    ended_.insert(sequence);
  } else {
    live_.emplace(sequence, id);
  }
  JobEntry& entry = entries_[id];
  entry.record = std::move(record);
  return entry;
}

void JobTable::Recover(v1::JobRecord record) { Add(std::move(record)); }

void JobTable::Ended(const JobEntry& job, Turn& turn) {
  live_.erase(job.record.submit_sequence());
  ended_.insert(job.record.submit_sequence());
  if (ended_.size() <= kEndedJobsMax) return;
  const uint64_t sequence = *ended_.begin();
  const JobId id = by_sequence_.at(sequence);
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
  ended_.erase(sequence);
  entries_.erase(id);
}

}  // namespace muster::coordinator
