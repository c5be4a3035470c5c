#include "worker/daemon/core/attempts.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/spec/share.h"

namespace muster::worker {
namespace {

// By the rank's own account it is past its bootstrap.
bool Trains(const v1::RankProgress& progress) {
  constexpr const char* kBefore[] = {"", "starting", "balancing", "bootstrapping", "allocating"};
  return progress.step() > 0 || progress.command_pid() > 0 ||
         std::find(std::begin(kBefore), std::end(kBefore), progress.phase()) == std::end(kBefore);
}

}  // namespace

int32_t ShareOf(const v1::StoredRank& rank) {
  return rank.share() > 0 ? rank.share() : spec::kWholeDevice;
}

bool Started(const RankState& rank) {
  return rank.stored.state() == v1::STORED_RANK_STATE_STARTING ||
         rank.stored.state() == v1::STORED_RANK_STATE_RUNNING;
}

bool Exited(const RankState& rank) {
  return rank.stored.state() == v1::STORED_RANK_STATE_EXITED ||
         rank.stored.state() == v1::STORED_RANK_STATE_RELEASED;
}

v1::RankState RunningState(const RankState& rank) {
  return Trains(rank.progress) ? v1::RANK_STATE_TRAINING : v1::RANK_STATE_RUNNING;
}

v1::RankState ReportedState(const RankState& rank) {
  switch (rank.stored.state()) {
    case v1::STORED_RANK_STATE_PREPARED:
    case v1::STORED_RANK_STATE_STARTING:
      return v1::RANK_STATE_PREPARED;
    case v1::STORED_RANK_STATE_RUNNING:
      return RunningState(rank);
    case v1::STORED_RANK_STATE_EXITED:
      return v1::RANK_STATE_EXITED;
    case v1::STORED_RANK_STATE_RELEASED:
      return v1::RANK_STATE_RELEASED;
    default:
      return v1::RANK_STATE_ASSIGNED;
  }
}

bool AttemptTable::Load(const std::string& record) {
  AttemptState attempt;
  if (!attempt.stored.ParseFromString(record)) return false;
  for (const v1::StoredRank& stored : attempt.stored.ranks()) {
    RankState& rank = attempt.ranks[stored.rank()];
    rank.stored = stored;
    rank.progress = stored.progress();
  }
  attempt.stored.clear_ranks();
  const AttemptKey key = KeyOf(attempt.stored);
  attempts_.emplace(key, std::move(attempt));
  return true;
}

AttemptState* AttemptTable::Find(const AttemptKey& key) {
  const auto attempt = attempts_.find(key);
  return attempt == attempts_.end() ? nullptr : &attempt->second;
}

const RankState* AttemptTable::Find(const RankKey& key) const {
  const auto attempt = attempts_.find(key.attempt);
  if (attempt == attempts_.end()) return nullptr;
  const auto rank = attempt->second.ranks.find(key.rank);
  return rank == attempt->second.ranks.end() ? nullptr : &rank->second;
}

RankState* AttemptTable::Find(const RankKey& key) {
  return const_cast<RankState*>(std::as_const(*this).Find(key));
}

bool AttemptTable::WriteChanged(Outbox& outbox) {
  const bool any = !changed_.empty();
  for (const AttemptKey& key : changed_) {
    const std::string name = absl::StrCat(kRecordPrefix, DirectoryName(key));
    const auto found = attempts_.find(key);
    if (found == attempts_.end()) {
      outbox.Write(name, std::nullopt);
      continue;
    }
    v1::StoredAttempt stored = found->second.stored;
    for (const auto& [number, rank] : found->second.ranks) *stored.add_ranks() = rank.stored;
    outbox.Write(name, stored.SerializeAsString());
  }
  changed_.clear();
  return any;
}

bool AttemptTable::DeviceBusy(const v1::StoredRank& wanted) const {
  int64_t taken = ShareOf(wanted);
  for (const auto& [key, attempt] : attempts_) {
    for (const auto& [number, rank] : attempt.ranks) {
      if (rank.stored.device() == wanted.device() &&
          (Started(rank) || rank.stored.state() == v1::STORED_RANK_STATE_EXITED)) {
        taken += ShareOf(rank.stored);
      }
    }
  }
  return taken > spec::kWholeDevice;
}

std::vector<std::string> AttemptTable::CheckInvariants() const {
  std::vector<std::string> broken;
  struct Holder {
    RankKey last;
    int64_t taken = 0;
  };
  std::map<std::string, Holder> holders;
  for (const auto& [key, attempt] : attempts_) {
    for (const auto& [number, rank] : attempt.ranks) {
      const RankKey rank_key{key, number};
      // A rank that never ran passes through EXITED too, without ever holding its device.
      const bool holds = Started(rank) || (rank.stored.state() == v1::STORED_RANK_STATE_EXITED &&
                                           rank.stored.pid() != 0);
      if (!holds) continue;
      Holder& holder = holders[rank.stored.device()];
      holder.taken += ShareOf(rank.stored);
      if (holder.taken > spec::kWholeDevice) {
        broken.push_back(absl::StrCat("device ", rank.stored.device(), " is held by ",
                                      ToString(holder.last), " and ", ToString(rank_key)));
      }
      holder.last = rank_key;
    }
  }
  return broken;
}

}  // namespace muster::worker
