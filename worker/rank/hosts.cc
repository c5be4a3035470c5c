#include "worker/rank/hosts.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <set>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/proc.h"
#include "base/status_macros.h"
#include "parallel/comm/gather_texts.h"

namespace muster::worker {
namespace {

constexpr char kSeparator = '\n';

}  // namespace

RankHost HostOf(const v1::RankAssignment& assignment) {
  RankHost place;
  place.worker = assignment.worker();
  char name[256] = {};
  place.host = gethostname(name, sizeof(name) - 1) == 0 ? name : "unknown";
  place.address = assignment.address().empty() ? "127.0.0.1" : assignment.address();
  const char* const nccl = std::getenv("NCCL_HOSTID");
  place.identity = nccl != nullptr ? nccl : assignment.host_id();
  if (place.identity.empty()) place.identity = BootId();
  return place;
}

absl::StatusOr<std::vector<RankHost>> GatherHosts(parallel::Communicator& world,
                                                  kernels::Device& device, const RankHost& own) {
  ASSIGN_OR_RETURN(const auto stream, device.MakeStream());
  const std::string mine =
      absl::StrJoin({own.worker, own.host, own.address, own.identity}, std::string(1, kSeparator));
  ASSIGN_OR_RETURN(const std::vector<std::string> texts,
                   parallel::GatherTexts(world, *stream, mine));
  std::vector<RankHost> ranks;
  for (const std::string& text : texts) {
    const std::vector<std::string> fields = absl::StrSplit(text, kSeparator);
    if (fields.size() != 4) {
      return absl::InternalError(absl::StrCat("the host of rank ", ranks.size(), " is garbled"));
    }
    ranks.push_back({fields[0], fields[1], fields[2], fields[3]});
  }
  return ranks;
}

int HostCount(const std::vector<RankHost>& ranks) {
  std::set<std::string> identities;
  for (const RankHost& rank : ranks) identities.insert(rank.identity);
  return static_cast<int>(identities.size());
}

std::vector<std::string> HostTable(const std::vector<RankHost>& ranks) {
  std::vector<std::string> lines, seen;
  for (const RankHost& first : ranks) {
    if (std::count(seen.begin(), seen.end(), first.identity) > 0) continue;
    seen.push_back(first.identity);
    std::vector<int> here;
    std::vector<std::string> places;  // one for each daemon on the host
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      if (ranks[rank].identity != first.identity) continue;
      here.push_back(static_cast<int>(rank));
      const std::string place = absl::StrCat(ranks[rank].worker, ", ", ranks[rank].address);
      if (std::count(places.begin(), places.end(), place) == 0) places.push_back(place);
    }
    lines.push_back(absl::StrCat("host ", first.host, " (", absl::StrJoin(places, "; "), "): rank",
                                 here.size() == 1 ? " " : "s ", parallel::RanksText(here)));
  }
  return lines;
}

std::vector<parallel::Axis> AxesAcrossHosts(const parallel::Mesh& mesh,
                                            const std::vector<RankHost>& ranks) {
  std::vector<parallel::Axis> across;
  for (const parallel::Axis axis : parallel::kAxes) {
    const auto groups = mesh.Groups({axis});
    const bool crosses =
        std::any_of(groups.begin(), groups.end(), [&ranks](const std::vector<int>& group) {
          return std::any_of(group.begin(), group.end(), [&](int rank) {
            return ranks[static_cast<size_t>(rank)].identity !=
                   ranks[static_cast<size_t>(group[0])].identity;
          });
        });
    if (crosses) across.push_back(axis);
  }
  return across;
}

}  // namespace muster::worker
