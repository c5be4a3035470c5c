#include "cli/debug.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

namespace muster::cli {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;

// Adds call `number`, enqueued at second 100 + number, to a record made at second 120.
void Add(v1::CollectiveRecord& record, const std::string& group, int color, int64_t number,
         const std::string& operation = "all-reduce", bool finished = true) {
  v1::Collective& call = *record.add_collectives();
  call.set_group(group);
  call.set_path("world/" + group + ":" + std::to_string(color));
  call.set_number(number);
  call.set_operation(operation);
  call.mutable_enqueued()->set_seconds(100 + number);
  call.set_state(finished ? v1::COLLECTIVE_STATE_FINISHED : v1::COLLECTIVE_STATE_UNFINISHED);
  record.mutable_time()->set_seconds(120);
}

TEST(Compare, RankThatHasMadeFewerCallsThanItsGroup_IsBehindThere) {
  std::map<int, v1::CollectiveRecord> records;
  // Two tensor groups. Rank 0 waits in call 8, which rank 1 has not made; ranks 2 and 3 have made
  // the same calls.
  Add(records[0], "tp", 0, 7);
  Add(records[0], "tp", 0, 8, "all-gather", /*finished=*/false);
  Add(records[1], "tp", 0, 7);
  Add(records[2], "tp", 1, 5);
  Add(records[3], "tp", 1, 5);
  const std::vector<GroupProgress> groups = Compare(records);
  ASSERT_EQ(groups.size(), 2u);
  EXPECT_THAT(groups[0].calls, ElementsAre(Pair(0, 9), Pair(1, 8)));
  EXPECT_THAT(groups[0].behind, ElementsAre(1));
  ASSERT_NE(groups[0].waits, nullptr);
  EXPECT_EQ(groups[0].waits->operation(), "all-gather");
  EXPECT_EQ(groups[0].waiting_rank, 0);
  EXPECT_EQ(groups[0].waited, absl::Seconds(12));
  EXPECT_THAT(groups[1].behind, IsEmpty());
  EXPECT_EQ(groups[1].waits, nullptr);
}

TEST(Compare, SeveralUnfinishedCalls_ReportTheOldest) {
  std::map<int, v1::CollectiveRecord> records;
  Add(records[0], "dp", 0, 4, "all-reduce", /*finished=*/false);
  Add(records[1], "dp", 0, 3, "all-reduce", /*finished=*/false);
  Add(records[1], "dp", 0, 4, "all-reduce", /*finished=*/false);
  const std::vector<GroupProgress> groups = Compare(records);
  ASSERT_EQ(groups.size(), 1u);
  ASSERT_NE(groups[0].waits, nullptr);
  EXPECT_EQ(groups[0].waits->number(), 3);
  EXPECT_EQ(groups[0].waiting_rank, 1);
  EXPECT_THAT(groups[0].behind, IsEmpty());
}

// Records are made at different times. A rank that is still in a call that all have made does not
// hold others up, and neither does a rank with fewer calls while no other waits.
TEST(Compare, RankWithFewerCallsThatNoneWaitsFor_IsNotBehind) {
  std::map<int, v1::CollectiveRecord> records;
  Add(records[0], "tp", 0, 8);
  Add(records[0], "tp", 0, 9);
  Add(records[1], "tp", 0, 7, "all-gather", /*finished=*/false);
  std::vector<GroupProgress> groups = Compare(records);
  ASSERT_EQ(groups.size(), 1u);
  EXPECT_THAT(groups[0].behind, IsEmpty());
  ASSERT_NE(groups[0].waits, nullptr);
  EXPECT_EQ(groups[0].waiting_rank, 1);
  // When a rank waits in a call that the other has not made, that call is reported, not the older
  // one.
  Add(records[0], "tp", 0, 10, "reduce-scatter", /*finished=*/false);
  groups = Compare(records);
  EXPECT_THAT(groups[0].behind, ElementsAre(1));
  EXPECT_EQ(groups[0].waiting_rank, 0);
  EXPECT_EQ(groups[0].waits->number(), 10);
}

TEST(Compare, RanksThatSendAndReceive_AreNeverBehind) {
  std::map<int, v1::CollectiveRecord> records;
  Add(records[0], "pp", 0, 9, "send");
  Add(records[1], "pp", 0, 4, "receive");
  const std::vector<GroupProgress> groups = Compare(records);
  ASSERT_EQ(groups.size(), 1u);
  EXPECT_THAT(groups[0].behind, IsEmpty());
}

}  // namespace
}  // namespace muster::cli
