#include "coordinator/core/hang.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

namespace muster::coordinator {
namespace {

using ::testing::HasSubstr;

// A gang of ranks that have all stopped at one step and answer.
class HangTest : public ::testing::Test {
 protected:
  explicit HangTest(int ranks = 4) : progress_(ranks), answered_(ranks, now_) {
    for (int rank = 0; rank < ranks; ++rank) {
      progress_[rank].set_answers(600);
      v1::RankStatus& status = ranks_.emplace_back();
      status.set_rank(rank);
      status.set_state(v1::RANK_STATE_TRAINING);
      status.set_step(7);
    }
  }
  // The rank has made `calls` in the group; with `waits`, the last one has not finished.
  void At(int rank, const std::string& path, int64_t calls, bool waits,
          const std::string& operation = "all-reduce") {
    v1::GroupPosition& group = *progress_[rank].add_groups();
    group.set_group(path);
    group.set_path(path);
    group.set_calls(calls);
    if (!waits) return;
    group.mutable_unfinished()->set_number(calls - 1);
    group.mutable_unfinished()->set_operation(operation);
    group.mutable_unfinished()->set_bytes(1024);
    group.set_waited_seconds(600);
  }
  HangVerdict Verdict() const { return NameCulprit(progress_, answered_, ranks_, now_); }

  absl::Time now_ = absl::FromUnixSeconds(5000);
  std::vector<v1::RankProgress> progress_;
  std::vector<absl::Time> answered_;
  std::vector<v1::RankStatus> ranks_;
};

TEST_F(HangTest, NothingIsKnown_NoRankIsBlamed) {
  EXPECT_EQ(Verdict().rank, -1);
  EXPECT_EQ(Verdict().text, "");
}

TEST_F(HangTest, ProcessThatDoesNotAnswer_IsNamedBeforeThoseThatWaitForIt) {
  for (const int rank : {0, 1, 3}) At(rank, "world", 10, /*waits=*/true);
  At(2, "world", 9, /*waits=*/false);
  answered_[2] = now_ - absl::Minutes(10);
  EXPECT_EQ(Verdict().rank, 2);
  EXPECT_THAT(Verdict().text, HasSubstr("does not answer"));
}

// A cut between the coordinator and all daemons says nothing about ranks.
TEST_F(HangTest, NobodyAnswers_NoRankIsBlamedForThat) {
  for (absl::Time& at : answered_) at = now_ - absl::Minutes(10);
  EXPECT_EQ(Verdict().rank, -1);
}

TEST_F(HangTest, RankThatHasNotMadeTheCall_IsNamedWithTheCall) {
  for (const int rank : {0, 1, 2}) At(rank, "dp", 42, /*waits=*/true);
  At(3, "dp", 41, /*waits=*/false);
  EXPECT_EQ(Verdict().rank, 3);
  EXPECT_THAT(Verdict().text,
              HasSubstr("waits for it in call 41 of group dp, all-reduce of 1024 bytes, for 10m"));
}

// Rank 1 is behind in group dp, since it waits for rank 3 in group tp.
TEST_F(HangTest, ChainOfWaits_EndsAtTheRankThatWaitsForNobody) {
  At(0, "dp:0,1", 5, /*waits=*/true);
  At(1, "dp:0,1", 4, /*waits=*/false);
  At(1, "tp:1,3", 9, /*waits=*/true);
  At(3, "tp:1,3", 8, /*waits=*/false);
  EXPECT_EQ(Verdict().rank, 3);
  std::reverse(progress_[1].mutable_groups()->begin(), progress_[1].mutable_groups()->end());
  EXPECT_EQ(Verdict().rank, 3);
}

TEST_F(HangTest, AllInTheSameCall_PointsAtTheNetworkAndNoRank) {
  for (int rank = 0; rank < 4; ++rank) At(rank, "dp", 42, /*waits=*/true);
  EXPECT_EQ(Verdict().rank, -1);
  EXPECT_THAT(Verdict().text, HasSubstr("every rank has made it to the same calls"));
  EXPECT_THAT(Verdict().text, HasSubstr("call 41 of group dp"));
}

// Ranks of a pipeline send and receive different numbers of messages.
TEST_F(HangTest, SendsAndReceives_AreNotCompared) {
  At(0, "pp", 20, /*waits=*/true, "receive");
  At(1, "pp", 10, /*waits=*/false);
  EXPECT_EQ(Verdict().rank, -1);
}

TEST_F(HangTest, OneRankAtAnEarlierStep_IsNamedAndEqualOnesAreNot) {
  ranks_[2].set_step(6);
  EXPECT_EQ(Verdict().rank, 2);
  EXPECT_THAT(Verdict().text, HasSubstr("at step 6"));
  ranks_[1].set_step(6);
  EXPECT_EQ(Verdict().rank, -1);
}

// What a rank sends is not trusted.
TEST_F(HangTest, AbsurdPositions_AreRead) {
  At(0, "", -5, /*waits=*/true);
  progress_[0].mutable_groups(0)->mutable_unfinished()->set_number(-7);
  progress_[0].mutable_groups(0)->set_waited_seconds(-1e300);
  At(1, "", 1, /*waits=*/true);
  At(1, "", 1, /*waits=*/true);
  EXPECT_EQ(NameCulprit({}, {}, {}, now_).rank, -1);
  Verdict();
}

}  // namespace
}  // namespace muster::coordinator
