#include "coordinator/rpc/slots.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace muster::coordinator {
namespace {

constexpr std::array<const char*, kSlotKinds> kNames = {
    "calls", "streams of daemons without a Hello", "streams of daemons", "readers of ranks",
    "streams of jobs and events"};

// "ipv4:10.0.0.1" of "ipv4:10.0.0.1:7600", "ipv6:[::1]" of "ipv6:[::1]:7600".
std::string HostOf(const std::string& peer) { return peer.substr(0, peer.rfind(':')); }

}  // namespace

absl::StatusOr<Slots::Slot> Slots::Take(SlotKind kind, const std::string& peer) {
  const size_t index = static_cast<size_t>(kind);
  Slot slot;
  slot.host_ = HostOf(peer);
  slot.kind_ = kind;
  MutexLock lock(&counts_->mutex);
  size_t& all = counts_->all[index];
  if (all >= bounds_[index].all) {
    return absl::ResourceExhaustedError(absl::StrCat(
        all, " ", kNames[index], " are open, as many as the coordinator serves; retry"));
  }
  const auto [mine, first] = counts_->by_host[index].try_emplace(slot.host_, 0);
  if (mine->second >= bounds_[index].peer) {
    return absl::ResourceExhaustedError(
        absl::StrCat(mine->second, " ", kNames[index], " of ", slot.host_,
                     " are open, as many as one address may have; close some or retry"));
  }
  ++all;
  ++mine->second;
  slot.counts_ = counts_;
  return slot;
}

void Slots::Counts::GiveBack(SlotKind kind, const std::string& host) {
  const size_t index = static_cast<size_t>(kind);
  MutexLock lock(&mutex);
  --all[index];
  const auto mine = by_host[index].find(host);
  if (--mine->second == 0) by_host[index].erase(mine);
}

}  // namespace muster::coordinator
