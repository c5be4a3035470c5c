#include "coordinator/published_state.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "coordinator/limits.h"
#include "proto/job_state.h"
#include "proto/spec/names.h"

namespace muster::coordinator {

v1::JobState PublishedState::PublishJob(const JobChanged& change) {
  JobView before, after;
  {
    MutexLock lock(&mutex_);
    const auto [row, inserted] =
        by_id_.try_emplace(change.job.value(), Stored{change.submit_sequence, {}});
    before = row->second.view;
    row->second.view.Update(change.changed);
    after = row->second.view;
    if (inserted) {
      const std::string& name = after[JobPart::kState]->name();
      id_by_sequence_[change.submit_sequence] = change.job.value();
      sequences_by_name_[name].insert(change.submit_sequence);
      names_by_length_[name.size()].insert(name);
    }
    MarkChanged(change.job.value());
  }
  const v1::Job* state_before = before[JobPart::kState].get();
  metrics_.JobPublished(state_before, after[JobPart::kState].get());
  metrics_.JobPartsPublished(before, after);
  return state_before == nullptr ? v1::JOB_STATE_UNSPECIFIED : state_before->state();
}

void PublishedState::RemoveJob(const std::string& id) {
  std::shared_ptr<const v1::Job> before;
  {
    MutexLock lock(&mutex_);
    const auto row = by_id_.find(id);
    if (row == by_id_.end()) return;
    before = row->second.view[JobPart::kState];
    id_by_sequence_.erase(row->second.submit_sequence);
    const auto named = sequences_by_name_.find(before->name());
    named->second.erase(row->second.submit_sequence);
    if (named->second.empty()) {
      sequences_by_name_.erase(named);
      names_by_length_[before->name().size()].erase(before->name());
    }
    by_id_.erase(row);
    MarkChanged(id);
  }
  metrics_.JobPublished(before.get(), nullptr);
}

void PublishedState::PublishEvent(const v1::Event& event) {
  metrics_.EventPublished(event);
  SetLastEvent(event.sequence());
}

void PublishedState::SetLastEvent(uint64_t sequence) {
  MutexLock lock(&mutex_);
  if (sequence <= last_event_) return;
  last_event_ = sequence;
  MarkChanged("");
}

const PublishedState::Stored* PublishedState::FindLocked(const std::string& name_or_id) const {
  auto row = by_id_.find(name_or_id);
  if (row == by_id_.end()) {
    const auto named = sequences_by_name_.find(name_or_id);
    if (named == sequences_by_name_.end()) return nullptr;
    row = by_id_.find(id_by_sequence_.find(*named->second.rbegin())->second);
  }
  return &row->second;
}

bool PublishedState::Has(const std::string& name_or_id) const {
  MutexLock lock(&mutex_);
  return FindLocked(name_or_id) != nullptr;
}

std::shared_ptr<const v1::Job> PublishedState::Find(const std::string& name_or_id) const {
  JobView view;
  {
    MutexLock lock(&mutex_);
    const Stored* found = FindLocked(name_or_id);
    if (found == nullptr) return nullptr;
    view = found->view;
  }
  return std::make_shared<const v1::Job>(view.Merge());
}

absl::Status PublishedState::NotFound(const std::string& name_or_id) const {
  const std::string first_task = absl::StrCat(name_or_id, "-0");
  if (const std::shared_ptr<const v1::Job> task = Find(first_task);
      task != nullptr && task->spec().array_task().array() == name_or_id) {
    return absl::NotFoundError(absl::StrCat(spec::Quoted(name_or_id),
                                            " is an array of jobs; name one of its tasks, such as ",
                                            spec::Quoted(first_task)));
  }
  const std::string nearest = spec::NearestName(name_or_id, SimilarNames(name_or_id));
  return absl::NotFoundError(absl::StrCat("no job has the name or id ", spec::Quoted(name_or_id),
                                          nearest.empty()
                                              ? std::string("; `muster get jobs` lists them")
                                              : absl::StrCat("; did you mean '", nearest, "'?")));
}

std::vector<std::string> PublishedState::SimilarNames(const std::string& name) const {
  constexpr size_t kLengths = 2 * kNearestLengthDifference + 1;
  constexpr size_t kEach = kNearestNamesMax / kLengths / 2;  // on each side
  const size_t shortest = name.size() - std::min(name.size(), kNearestLengthDifference);
  std::vector<std::string> similar;
  MutexLock lock(&mutex_);
  for (auto names = names_by_length_.lower_bound(shortest);
       names != names_by_length_.end() && names->first <= name.size() + kNearestLengthDifference;
       ++names) {
    // A misspelling behind the first letters leaves its neighbours near it, on either side.
    const auto middle = names->second.lower_bound(name);
    auto next = middle;
    for (size_t i = 0; i < kEach && next != names->second.end(); ++i) similar.push_back(*next++);
    next = middle;
    for (size_t i = 0; i < kEach && next != names->second.begin(); ++i) similar.push_back(*--next);
  }
  return similar;
}

namespace {

// Of a spec, what lists show.
v1::Job SummaryOf(const JobView& view) {
  v1::Job job = *view[JobPart::kState];
  if (view[JobPart::kSpec] == nullptr) return job;
  *job.mutable_submitted() = view[JobPart::kSpec]->submitted();
  const v1::JobSpec& all = view[JobPart::kSpec]->spec();
  v1::JobSpec& spec = *job.mutable_spec();
  spec.set_name(all.name());
  spec.set_queue(all.queue());
  spec.set_priority(all.priority());
  *spec.mutable_labels() = all.labels();
  *spec.mutable_resources() = all.resources();
  if (all.has_array_task()) *spec.mutable_array_task() = all.array_task();
  return job;
}

}  // namespace

std::vector<PublishedState::Row> PublishedState::List(
    uint64_t before, size_t limit, absl::FunctionRef<bool(const v1::JobSpec&)> wanted, bool summary,
    bool live) const {
  std::vector<Stored> found;
  {
    MutexLock lock(&mutex_);
    auto next = before == 0 ? id_by_sequence_.end() : id_by_sequence_.lower_bound(before);
    while (next != id_by_sequence_.begin() && found.size() < limit) {
      --next;
      const Stored& stored = by_id_.find(next->second)->second;
      const auto& spec = stored.view[JobPart::kSpec];
      if (!wanted(spec == nullptr ? v1::JobSpec::default_instance() : spec->spec())) continue;
      if (!live || !IsFinal(stored.view[JobPart::kState]->state())) found.push_back(stored);
    }
  }
  std::vector<Row> rows;
  rows.reserve(found.size());
  for (const Stored& job : found) {
    rows.push_back({job.submit_sequence, std::make_shared<const v1::Job>(
                                             summary ? SummaryOf(job.view) : job.view.Merge())});
  }
  return rows;
}

std::vector<JobView> PublishedState::UnfinishedJobs() const {
  std::vector<JobView> jobs;
  MutexLock lock(&mutex_);
  for (const auto& [unused, stored] : by_id_) {
    if (!IsFinal(stored.view[JobPart::kState]->state())) jobs.push_back(stored.view);
  }
  return jobs;
}

void PublishedState::SetWorkers(std::vector<v1::Worker> workers) {
  auto now = std::make_shared<const std::vector<v1::Worker>>(std::move(workers));
  MutexLock lock(&mutex_);
  workers_.swap(now);
}

std::shared_ptr<const std::vector<v1::Worker>> PublishedState::workers() const {
  MutexLock lock(&mutex_);
  return workers_;
}

void PublishedState::SetFleetUsage(v1::Usage usage) {
  MutexLock lock(&mutex_);
  fleet_usage_ = std::move(usage);
}

v1::Usage PublishedState::fleet_usage() const {
  MutexLock lock(&mutex_);
  return fleet_usage_;
}

uint64_t PublishedState::last_event() const {
  MutexLock lock(&mutex_);
  return last_event_;
}

bool PublishedState::Watch(const std::string& job, std::weak_ptr<Watcher> watcher) {
  MutexLock lock(&mutex_);
  if (watcher_count_ >= kWatchersMax) return false;
  watchers_[job].push_back(std::move(watcher));
  metrics_.Watchers(++watcher_count_);
  return true;
}

void PublishedState::DropExpiredWatchers(const std::string& job) {
  MutexLock lock(&mutex_);
  const auto watchers = watchers_.find(job);
  if (watchers == watchers_.end()) return;
  watcher_count_ -= std::erase_if(watchers->second, [](const auto& w) { return w.expired(); });
  if (watchers->second.empty()) watchers_.erase(watchers);
  metrics_.Watchers(watcher_count_);
}

void PublishedState::WakeAll() {
  MutexLock lock(&mutex_);
  for (const auto& [key, unused] : watchers_) MarkChanged(key);
}

void PublishedState::MarkChanged(const std::string& key) {
  if (!watchers_.contains(key)) return;
  if (changed_.empty()) watch_loop_.Post([this] { WakeChanged(); });
  changed_.insert(key);
}

void PublishedState::WakeChanged() {
  std::vector<std::shared_ptr<Watcher>> awake;
  {
    MutexLock lock(&mutex_);
    for (const std::string& key : std::exchange(changed_, {})) {
      const auto watchers = watchers_.find(key);
      if (watchers == watchers_.end()) continue;
      for (const auto& watcher : watchers->second) {
        if (auto held = watcher.lock()) awake.push_back(std::move(held));
      }
    }
  }
  for (const auto& watcher : awake) watcher->Wake();
}

}  // namespace muster::coordinator
