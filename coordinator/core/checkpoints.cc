#include "coordinator/core/checkpoints.h"

#include <algorithm>
#include <iterator>

#include "coordinator/core/limits.h"

namespace muster::coordinator {
namespace {

bool Sound(const v1::CheckpointRecord& record) { return !record.damaged() && !record.removed(); }

}  // namespace

v1::CheckpointRecord* Checkpoints::FindMutable(int64_t step, uint64_t epoch) {
  for (v1::CheckpointRecord& record : records_) {
    if (record.step() == step && record.epoch() == epoch) return &record;
  }
  return nullptr;
}

const v1::CheckpointRecord* Checkpoints::Find(int64_t step, uint64_t epoch) const {
  for (const v1::CheckpointRecord& record : records_) {
    if (record.step() == step && record.epoch() == epoch) return &record;
  }
  return nullptr;
}

int64_t Checkpoints::newest() const {
  int64_t newest = 0;
  for (const v1::CheckpointRecord& record : records_) {
    if (Sound(record)) newest = std::max(newest, record.step());
  }
  return newest;
}

std::vector<v1::CheckpointRecord> Checkpoints::Restorable() const {
  std::vector<v1::CheckpointRecord> out;
  std::copy_if(records_.begin(), records_.end(), std::back_inserter(out), Sound);
  std::stable_sort(out.begin(), out.end(), [](const auto& a, const auto& b) {
    return std::make_pair(a.step(), a.epoch()) > std::make_pair(b.step(), b.epoch());
  });
  if (out.size() > kRestoreCandidatesMax) out.resize(kRestoreCandidatesMax);
  return out;
}

std::vector<v1::CheckpointRecord> Checkpoints::Add(v1::CheckpointRecord record) {
  // Commits may overtake each other.
  const auto order = [](const v1::CheckpointRecord& a, const v1::CheckpointRecord& b) {
    return std::make_pair(a.epoch(), a.step()) < std::make_pair(b.epoch(), b.step());
  };
  const auto after = std::upper_bound(records_.begin(), records_.end(), record, order);
  records_.insert(after, std::move(record));
  std::vector<v1::CheckpointRecord> dropped;
  while (records_.size() > kCheckpointRecordsMax) {
    auto victim = std::find_if_not(records_.begin(), records_.end(), Sound);
    if (victim == records_.end()) victim = records_.begin();
    dropped.push_back(std::move(*victim));
    records_.erase(victim);
  }
  return dropped;
}

const v1::CheckpointRecord* Checkpoints::MarkDamaged(int64_t step, uint64_t epoch) {
  v1::CheckpointRecord* record = FindMutable(step, epoch);
  if (record == nullptr || record->damaged()) return nullptr;
  record->set_damaged(true);
  return record;
}

const v1::CheckpointRecord* Checkpoints::MarkRemoved(int64_t step, uint64_t epoch) {
  v1::CheckpointRecord* record = FindMutable(step, epoch);
  if (record == nullptr || record->removed()) return nullptr;
  record->set_removed(true);
  return record;
}

bool Checkpoints::Refuse(int64_t step, uint64_t epoch) {
  return refused_.size() < kCheckpointRecordsMax && refused_.emplace(epoch, step).second;
}

}  // namespace muster::coordinator
