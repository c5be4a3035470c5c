#include "parallel/comm/peer_failure.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace muster::parallel {
namespace {

constexpr char kPayload[] = "muster/peer-failure";
constexpr char kUnreachable[] = "unreachable";
constexpr char kLost[] = "lost";

}  // namespace

absl::Status MarkPeer(absl::Status status, const PeerFailure& failure) {
  if (!status.ok() && !status.GetPayload(kPayload).has_value()) {
    const char* kind = failure.kind == PeerFailure::Kind::kLost ? kLost : kUnreachable;
    status.SetPayload(kPayload, absl::Cord(absl::StrCat(kind, " ", failure.rank)));
  }
  return status;
}

std::optional<PeerFailure> PeerFailureOf(const absl::Status& status) {
  const auto payload = status.GetPayload(kPayload);
  if (!payload.has_value()) return std::nullopt;
  const std::vector<std::string> words = absl::StrSplit(std::string(*payload), ' ');
  PeerFailure failure;
  if (words.size() != 2 || !absl::SimpleAtoi(words[1], &failure.rank)) return std::nullopt;
  failure.kind = words[0] == kLost ? PeerFailure::Kind::kLost : PeerFailure::Kind::kUnreachable;
  return failure;
}

}  // namespace muster::parallel
