#include "parallel/comm/nccl_peers.h"

#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace muster::parallel {

std::string NcclPeer::ToText() const {
  return absl::StrJoin({version, device, uuid, error}, std::string(1, '\0'));
}

NcclPeer NcclPeer::FromText(const std::string& text) {
  const std::vector<std::string> fields = absl::StrSplit(text, '\0');
  if (fields.size() != 4) return {.error = "its greeting is not of this version of Muster"};
  return {fields[0], fields[1], fields[2], fields[3]};
}

absl::Status CheckNcclPeers(const std::vector<NcclPeer>& by_rank) {
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    if (!by_rank[rank].error.empty()) {
      return absl::FailedPreconditionError(
          absl::StrCat("rank ", rank, " cannot take part: ", by_rank[rank].error));
    }
  }
  std::map<std::string, size_t> rank_of;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    const NcclPeer& peer = by_rank[rank];
    if (peer.version != by_rank[0].version) {
      return absl::FailedPreconditionError(absl::StrCat(
          "NCCL differs between the ranks: rank 0 has ", by_rank[0].version, ", rank ", rank,
          " has ", peer.version, " (", peer.device, "); install the same version everywhere"));
    }
    const auto [other, inserted] = rank_of.emplace(peer.uuid, rank);
    if (!inserted) {
      return absl::FailedPreconditionError(absl::StrCat("ranks ", other->second, " and ", rank,
                                                        " were both given ", peer.device,
                                                        "; NCCL needs one GPU per rank"));
    }
  }
  return absl::OkStatus();
}

}  // namespace muster::parallel
