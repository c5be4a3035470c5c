// The committed checkpoints of one job, as its ranks have reported them.
#ifndef MUSTER_COORDINATOR_CORE_CHECKPOINTS_H_
#define MUSTER_COORDINATOR_CORE_CHECKPOINTS_H_

#include <cstdint>
#include <set>
#include <utility>
#include <vector>

#include "muster/v1/job.pb.h"

namespace muster::coordinator {

// Records are ordered by epoch, then step, and unique by both. Of more than kCheckpointRecordsMax
// the damaged and removed ones go first, then the oldest. Only sound ones, which are neither, count
// as progress and are restored. Value type.
class Checkpoints {
 public:
  const std::vector<v1::CheckpointRecord>& records() const { return records_; }
  // Null when there is none.
  const v1::CheckpointRecord* Find(int64_t step, uint64_t epoch) const;
  // The largest step of a sound one; 0 when there is none.
  int64_t newest() const;
  // Those that an attempt may restore, newest first; at most kRestoreCandidatesMax.
  std::vector<v1::CheckpointRecord> Restorable() const;

  // Takes over a stored record. To be called in order.
  void Recover(v1::CheckpointRecord record) { records_.push_back(std::move(record)); }
  // Returns those that had to go, the new one perhaps. Requires: none has its step and epoch.
  std::vector<v1::CheckpointRecord> Add(v1::CheckpointRecord record);
  // The record as it is now; null when it is unknown, or was marked before.
  const v1::CheckpointRecord* MarkDamaged(int64_t step, uint64_t epoch);
  const v1::CheckpointRecord* MarkRemoved(int64_t step, uint64_t epoch);

  // A commit was refused. True: for the first time, as far as is known.
  bool Refuse(int64_t step, uint64_t epoch);

 private:
  v1::CheckpointRecord* FindMutable(int64_t step, uint64_t epoch);

  std::vector<v1::CheckpointRecord> records_;
  std::set<std::pair<uint64_t, int64_t>> refused_;  // (epoch, step); at most as many as records
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_CHECKPOINTS_H_
