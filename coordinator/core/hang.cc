#include "coordinator/core/hang.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"

namespace muster::coordinator {
namespace {

// A rank that is stuck but runs answers once a second.
constexpr absl::Duration kSilentAfter = absl::Seconds(20);

bool Pairwise(const v1::GroupPosition& group) {
  return group.unfinished().operation() == "send" || group.unfinished().operation() == "receive";
}

std::string CallText(const v1::GroupPosition& group) {
  const v1::Collective& call = group.unfinished();
  return absl::StrCat("call ", call.number(), " of group ", group.group(), ", ", call.operation(),
                      " of ", call.bytes(), " bytes, for ",
                      absl::FormatDuration(absl::Seconds(
                          static_cast<int64_t>(std::max(0.0, group.waited_seconds())))));
}

HangVerdict Silent(const std::vector<v1::RankProgress>& progress,
                   const std::vector<absl::Time>& answered, absl::Time now) {
  HangVerdict verdict;
  bool any_answers = false;
  for (size_t rank = 0; rank < progress.size(); ++rank) {
    const bool silent = now - answered[rank] > kSilentAfter;
    any_answers |= !silent && progress[rank].answers() > 0;
    if (silent && verdict.rank < 0) verdict.rank = static_cast<int32_t>(rank);
  }
  if (!any_answers || verdict.rank < 0) return {};
  verdict.text = "it does not answer, while others do: its process is stopped or starved";
  return verdict;
}

// The ranks of one group that have not made the call in which another one waits.
struct Behind {
  std::set<int32_t> ranks;
  int32_t waiting = -1;
  const v1::GroupPosition* at = nullptr;
};

std::vector<Behind> GroupsWithRanksBehind(const std::vector<v1::RankProgress>& progress) {
  std::map<std::string, std::map<int32_t, const v1::GroupPosition*>> groups;  // by path, by rank
  for (size_t rank = 0; rank < progress.size(); ++rank) {
    for (const v1::GroupPosition& group : progress[rank].groups()) {
      groups[group.path()][static_cast<int32_t>(rank)] = &group;
    }
  }
  std::vector<Behind> found;
  for (const auto& [path, ranks] : groups) {
    Behind behind;
    for (const auto& [rank, group] : ranks) {
      if (!group->has_unfinished() || Pairwise(*group)) continue;
      if (behind.at == nullptr || group->unfinished().number() < behind.at->unfinished().number()) {
        behind.at = group;
        behind.waiting = rank;
      }
    }
    if (behind.at == nullptr) continue;
    for (const auto& [rank, group] : ranks) {
      if (group->calls() <= behind.at->unfinished().number()) behind.ranks.insert(rank);
    }
    if (!behind.ranks.empty()) found.push_back(std::move(behind));
  }
  return found;
}

HangVerdict InCollectives(const std::vector<v1::RankProgress>& progress) {
  const std::vector<Behind> groups = GroupsWithRanksBehind(progress);
  const auto waits = [&](int32_t rank) {
    const auto& of_rank = progress[static_cast<size_t>(rank)].groups();
    return std::any_of(of_rank.begin(), of_rank.end(),
                       [](const v1::GroupPosition& group) { return group.has_unfinished(); });
  };
  HangVerdict verdict;
  bool waits_itself = true;
  for (const Behind& behind : groups) {
    for (const int32_t rank : behind.ranks) {
      const bool blocked = waits(rank);
      if (verdict.rank >= 0 && (blocked || !waits_itself)) continue;
      verdict.rank = rank;
      waits_itself = blocked;
      verdict.text =
          absl::StrCat("rank ", behind.waiting, " waits for it in ", CallText(*behind.at));
    }
  }
  if (verdict.rank >= 0) return verdict;
  for (size_t rank = 0; rank < progress.size(); ++rank) {
    for (const v1::GroupPosition& group : progress[rank].groups()) {
      if (!group.has_unfinished()) continue;
      verdict.text =
          absl::StrCat("every rank has made it to the same calls; rank ", rank, " waits in ",
                       CallText(group), ": look at the network and the devices between its ranks");
      return verdict;
    }
  }
  return verdict;
}

HangVerdict ByStep(const std::vector<v1::RankStatus>& ranks) {
  const auto place = [](const v1::RankStatus& rank) {
    return std::make_pair(rank.state(), rank.step());
  };
  if (ranks.empty()) return {};
  const auto slowest =
      std::min_element(ranks.begin(), ranks.end(),
                       [&](const auto& a, const auto& b) { return place(a) < place(b); });
  const auto level = std::count_if(
      ranks.begin(), ranks.end(), [&](const auto& rank) { return place(rank) == place(*slowest); });
  if (level > 1) return {};
  return {slowest->rank(), absl::StrCat("it is furthest behind, at step ", slowest->step())};
}

}  // namespace

HangVerdict NameCulprit(const std::vector<v1::RankProgress>& progress,
                        const std::vector<absl::Time>& answered,
                        const std::vector<v1::RankStatus>& ranks, absl::Time now) {
  if (HangVerdict silent = Silent(progress, answered, now); silent.rank >= 0) return silent;
  HangVerdict collectives = InCollectives(progress);
  if (collectives.rank >= 0) return collectives;
  HangVerdict by_step = ByStep(ranks);
  return by_step.rank >= 0 ? by_step : collectives;
}

}  // namespace muster::coordinator
