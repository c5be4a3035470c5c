// The committed checkpoints of one job.
#include "coordinator/core/checkpoints.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "coordinator/core/limits.h"

namespace muster::coordinator {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

v1::CheckpointRecord Record(int64_t step, uint64_t epoch) {
  v1::CheckpointRecord record;
  record.set_step(step);
  record.set_epoch(epoch);
  return record;
}

std::vector<int64_t> Steps(const std::vector<v1::CheckpointRecord>& records) {
  std::vector<int64_t> steps;
  for (const v1::CheckpointRecord& record : records) steps.push_back(record.step());
  return steps;
}

TEST(Checkpoints, CommitsThatOvertakeEachOther_AreKeptByEpochThenStep) {
  Checkpoints checkpoints;
  checkpoints.Add(Record(30, 1));
  checkpoints.Add(Record(10, 2));
  checkpoints.Add(Record(20, 1));
  EXPECT_THAT(Steps(checkpoints.records()), ElementsAre(20, 30, 10));
  EXPECT_EQ(checkpoints.newest(), 30);
  EXPECT_THAT(Steps(checkpoints.Restorable()), ElementsAre(30, 20, 10));
}

TEST(Checkpoints, DamagedAndRemovedOnes_AreNoProgressAndAreNotRestored) {
  Checkpoints checkpoints;
  for (const int64_t step : {10, 20, 30}) checkpoints.Add(Record(step, 1));
  ASSERT_NE(checkpoints.MarkDamaged(30, 1), nullptr);
  ASSERT_NE(checkpoints.MarkRemoved(10, 1), nullptr);
  EXPECT_EQ(checkpoints.MarkDamaged(30, 1), nullptr) << "it is known already";
  EXPECT_EQ(checkpoints.MarkRemoved(10, 2), nullptr) << "of another epoch";
  EXPECT_EQ(checkpoints.newest(), 20);
  EXPECT_THAT(Steps(checkpoints.Restorable()), ElementsAre(20));
  EXPECT_TRUE(checkpoints.Find(30, 1)->damaged());
}

TEST(Checkpoints, OfTooMany_DamagedOnesGoFirst_ThenTheOldest) {
  Checkpoints checkpoints;
  for (int step = 1; step <= kCheckpointRecordsMax; ++step) {
    EXPECT_THAT(checkpoints.Add(Record(step, 1)), IsEmpty());
  }
  checkpoints.MarkDamaged(7, 1);
  EXPECT_THAT(Steps(checkpoints.Add(Record(1000, 1))), ElementsAre(7));
  EXPECT_THAT(Steps(checkpoints.Add(Record(1001, 1))), ElementsAre(1));
  EXPECT_THAT(checkpoints.records(), SizeIs(kCheckpointRecordsMax));
  EXPECT_THAT(checkpoints.Restorable(), SizeIs(kRestoreCandidatesMax));
}

TEST(Checkpoints, RefusedCommit_IsNewOnce) {
  Checkpoints checkpoints;
  EXPECT_TRUE(checkpoints.Refuse(10, 1));
  EXPECT_FALSE(checkpoints.Refuse(10, 1));
  EXPECT_TRUE(checkpoints.Refuse(10, 2));
}

}  // namespace
}  // namespace muster::coordinator
