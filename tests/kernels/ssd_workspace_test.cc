// The memory that a plan reckons with for the backward of the scan, term by term.
#include "kernels/ssm/ssd_workspace.h"

#include <gtest/gtest.h>

namespace muster::kernels {
namespace {

// mamba2-780m: 48 heads of 64, 128 columns of the state.
SsdShape Shape(int64_t samples, bool bf16) {
  SsdShape shape;
  shape.samples = samples;
  shape.positions = 2048;
  shape.heads = 48;
  shape.width = 64;
  shape.columns = 128;
  shape.bf16 = bf16;
  return shape;
}

constexpr int64_t kChunks = 16;  // of a sample
constexpr int64_t kStates = kChunks * 48 * 64 * 128;
constexpr int64_t kPartials = kChunks * 3 * 48 * 4;

TEST(SsdWorkspaceTest, FusedBackward_KeepsFactorsTermsAndStatesOfEveryHead) {
  // 128 chunks are one block each of 132 multiprocessors: no head is shared out.
  EXPECT_EQ(SsdShares(132, 8 * kChunks, 48, kSsdBackwardFixedHeads), 1);
  const int64_t factors_and_terms = 8 * kChunks * 48 * (5 * 128 + 3 * 128 + 16) * 4;
  const int64_t scores = 8 * kChunks * 128 * 128 * 2;
  const int64_t sums = int64_t{2} * 8 * 2048 * 128 * 4;  // dB, dC
  EXPECT_EQ(SsdWorkspaceBytes(Shape(8, true)),
            factors_and_terms + 8 * kStates * 2 + scores + sums + 8 * kPartials);
  EXPECT_EQ(SsdWorkspaceBytes(Shape(8, true)), 147'267'584);
}

TEST(SsdWorkspaceTest, FewChunks_AreSharedByBlocksThatEachHaveSums) {
  // 16 chunks of 8 blocks with 6 heads each are faster than 16 blocks with 48.
  EXPECT_EQ(SsdShares(132, kChunks, 48, kSsdBackwardFixedHeads), 8);
  const int64_t one = SsdWorkspaceBytes(Shape(1, true));
  SsdShape alone = Shape(1, true);
  alone.multiprocessors = 16;
  EXPECT_EQ(SsdShares(16, kChunks, 48, kSsdBackwardFixedHeads), 1);
  const int64_t per_share = kChunks * 128 * 128 * 2 + int64_t{2} * 2048 * 128 * 4;
  EXPECT_EQ(one - SsdWorkspaceBytes(alone), 7 * per_share);
}

TEST(SsdWorkspaceTest, StatesThatTheCallerHas_AreNotCountedTwice) {
  for (const bool bf16 : {true, false}) {
    SsdShape given = Shape(8, bf16);
    given.states_given = true;
    EXPECT_EQ(SsdWorkspaceBytes(Shape(8, bf16)) - SsdWorkspaceBytes(given),
              8 * kStates * (bf16 ? 2 : 4));
  }
}

TEST(SsdWorkspaceTest, WithoutAFusedKernel_StatesAndTwoRowsOfFp32AHead) {
  const int64_t expected = int64_t{2} * 8 * 2048 * 48 * 4 + 8 * kStates * 4 + 8 * kPartials;
  EXPECT_EQ(SsdWorkspaceBytes(Shape(8, false)), expected);
  SsdShape wide = Shape(8, true);  // no fused kernel takes heads of 80
  wide.width = 80;
  EXPECT_FALSE(SsdIsFused(80, 128));
  EXPECT_EQ(SsdWorkspaceBytes(wide), expected + 8 * kChunks * 48 * 16 * 128 * 4);
}

TEST(SsdWorkspaceTest, PositionsOfAChunkThatIsNotFull_CountAsAWholeOne) {
  SsdShape shape = Shape(1, false);
  const int64_t before = SsdWorkspaceBytes(shape);
  shape.positions += 1;
  EXPECT_EQ(SsdWorkspaceBytes(shape) - before, 2 * 48 * 4 + (kStates * 4 + kPartials) / kChunks);
}

}  // namespace
}  // namespace muster::kernels
