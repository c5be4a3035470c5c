#include "coordinator/core/domain_silence.h"

#include <iterator>

#include "absl/strings/str_cat.h"

namespace muster::coordinator {
namespace {

constexpr std::array<const char*, 3> kLevelWords = {"zone", "block", "rack"};

}  // namespace

bool DomainSilence::IsMost(const Domain& domain, const Group& group) {
  return group.silent >= kTogetherMin && 2 * group.silent > domain.workers;
}

// A worker whose domain has no name is in one of its own.
std::optional<DomainSilence::Key> DomainSilence::KeyOf(const DomainPath& path, size_t level) {
  if (path.names[level].empty()) return std::nullopt;
  return Key{level, path.Above(level + 1)};
}

void DomainSilence::Remember(Domain& domain, absl::Time now) {
  for (auto& [first, group] : domain.groups) {
    if (IsMost(domain, group)) group.most_until = now;
  }
}

void DomainSilence::Note(const WorkerEntry& worker, const TopologyRules& topology, absl::Time now) {
  const v1::WorkerState state = worker.row.state();
  const bool silent = state == v1::WORKER_STATE_UNREACHABLE;
  const auto known = workers_.find(worker.id());
  if (state == v1::WORKER_STATE_LOST) {
    if (known == workers_.end()) return;
    Drop(known->second, now);
    workers_.erase(known);
    return;
  }
  DomainPath path = topology.PathOf(worker.row);
  if (known != workers_.end()) {
    if (known->second.silent == silent && known->second.path == path) return;
    Drop(known->second, now);
  }
  Known& fresh = workers_[worker.id()];
  fresh.path = std::move(path);
  fresh.silent = silent;
  Add(fresh, worker.last_heard, now);
}

void DomainSilence::Add(Known& known, absl::Time last_heard, absl::Time now) {
  for (size_t level = 0; level < kLevels; ++level) {
    const std::optional<Key> key = KeyOf(known.path, level);
    if (!key.has_value()) continue;
    Domain& domain = domains_[*key];
    Remember(domain, now);
    ++domain.workers;
    if (!known.silent) continue;
    // The newest group that began before it.
    auto group = domain.groups.upper_bound(last_heard);
    if (group == domain.groups.begin() || last_heard - std::prev(group)->first > together_) {
      group = domain.groups.try_emplace(last_heard).first;
    } else {
      --group;
    }
    ++group->second.silent;
    known.group[level] = group->first;
  }
}

void DomainSilence::Drop(const Known& known, absl::Time now) {
  for (size_t level = 0; level < kLevels; ++level) {
    const std::optional<Key> key = KeyOf(known.path, level);
    if (!key.has_value()) continue;
    const auto domain = domains_.find(*key);
    Remember(domain->second, now);
    if (known.silent) {
      const auto group = domain->second.groups.find(known.group[level]);
      if (--group->second.silent == 0) domain->second.groups.erase(group);
    }
    if (--domain->second.workers == 0) domains_.erase(domain);
  }
}

std::string DomainSilence::WhyKept(const WorkerId& id, absl::Time now, absl::Duration grace) const {
  const auto found = workers_.find(id);
  if (found == workers_.end() || !found->second.silent) return "";
  const Known& known = found->second;
  for (size_t level = kLevels; level-- > 0;) {
    const std::optional<Key> key = KeyOf(known.path, level);
    if (!key.has_value()) continue;
    const Domain& domain = domains_.at(*key);
    const Group& group = domain.groups.at(known.group[level]);
    const std::string name = absl::StrCat(kLevelWords[level], " ", known.path.names[level]);
    if (IsMost(domain, group)) {
      return absl::StrCat(group.silent, " of ", domain.workers, " workers of ", name,
                          " fell silent together, as when its network fails");
    }
    if (now - group.most_until < grace) {
      return absl::StrCat("it fell silent together with most workers of ", name,
                          ", which return now");
    }
  }
  return "";
}

void DomainSilence::Check(const WorkerTable& workers, std::vector<std::string>& broken) const {
  size_t expected = 0;
  std::map<Key, std::pair<int, int>> counts;  // workers, silent ones
  for (const auto& [id, worker] : workers.entries()) {
    if (worker.row.state() == v1::WORKER_STATE_LOST) continue;
    ++expected;
    const bool silent = worker.row.state() == v1::WORKER_STATE_UNREACHABLE;
    const DomainPath path = workers.topology().PathOf(worker.row);
    const auto known = workers_.find(id);
    if (known == workers_.end() || known->second.silent != silent || known->second.path != path) {
      broken.push_back(absl::StrCat("worker ", id.value(), " is another one in the domains"));
    }
    for (size_t level = 0; level < kLevels; ++level) {
      const std::optional<Key> key = KeyOf(path, level);
      if (!key.has_value()) continue;
      ++counts[*key].first;
      counts[*key].second += silent ? 1 : 0;
    }
  }
  std::map<Key, std::pair<int, int>> mine;
  for (const auto& [key, domain] : domains_) {
    mine[key].first = domain.workers;
    for (const auto& [first, group] : domain.groups) mine[key].second += group.silent;
  }
  if (expected != workers_.size() || mine != counts) {
    broken.push_back("the domains' counts of silent workers differ from the workers");
  }
}

}  // namespace muster::coordinator
