// The memory that a plan reckons with for the backward of the scan, term by term.
#include "kernels/ssm/ssd_workspace.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>

namespace muster::kernels {
namespace {

// mamba2-780m: 48 heads of 64, 128 columns of the state.
SsdShape Shape(int64_t samples, bool in_16_bits) {
  SsdShape shape;
  shape.samples = samples;
  shape.positions = 2048;
  shape.heads = 48;
  shape.width = 64;
  shape.columns = 128;
  shape.in_16_bits = in_16_bits;
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
  for (const bool in_16_bits : {true, false}) {
    SsdShape given = Shape(8, in_16_bits);
    given.states_given = true;
    EXPECT_EQ(SsdWorkspaceBytes(Shape(8, in_16_bits)) - SsdWorkspaceBytes(given),
              8 * kStates * (in_16_bits ? 2 : 4));
  }
}

TEST(SsdWorkspaceTest, WithoutAFusedKernel_StatesAndTwoRowsOfFp32AHead) {
  const int64_t expected = int64_t{2} * 8 * 2048 * 48 * 4 + 8 * kStates * 4 + 8 * kPartials;
  EXPECT_EQ(SsdWorkspaceBytes(Shape(8, false)), expected);
  SsdShape wide = Shape(8, true);  // rows of 84 elements are no multiple of 16 bytes
  wide.width = 84;
  EXPECT_FALSE(SsdIsFused(84, 128));
  EXPECT_EQ(SsdWorkspaceBytes(wide), expected + 8 * kChunks * 48 * 20 * 128 * 4);
}

TEST(SsdWorkspaceTest, WideHeadsAndStates_AreCutIntoTiles) {
  const auto tiles = [](int64_t width, int64_t columns) {
    const SsdTiles cut = SsdTilesOf(width, columns);
    return std::array{cut.width, cut.columns, cut.slices, cut.passes};
  };
  EXPECT_EQ(tiles(64, 128), (std::array<int64_t, 4>{64, 128, 1, 1}));
  EXPECT_EQ(tiles(128, 64), (std::array<int64_t, 4>{128, 64, 1, 1}));
  EXPECT_EQ(tiles(128, 128), (std::array<int64_t, 4>{64, 128, 2, 1}));
  EXPECT_EQ(tiles(80, 256), (std::array<int64_t, 4>{64, 128, 2, 2}));
  EXPECT_EQ(tiles(32, 16), (std::array<int64_t, 4>{64, 64, 1, 1}));
  // Another slice and another pass have terms of their own, and states; factors are the head's.
  SsdShape large = Shape(8, true);
  large.width = 128;
  large.columns = 256;
  const int64_t terms = 8 * kChunks * 48 * (3 * 128 + 16) * 4;
  EXPECT_EQ(SsdWorkspaceBytes(large) - SsdWorkspaceBytes(Shape(8, true)),
            3 * terms + 3 * 8 * kStates * 2);
}

TEST(SsdWorkspaceTest, PositionsOfAChunkThatIsNotFull_CountAsAWholeOne) {
  SsdShape shape = Shape(1, false);
  const int64_t before = SsdWorkspaceBytes(shape);
  shape.positions += 1;
  EXPECT_EQ(SsdWorkspaceBytes(shape) - before, 2 * 48 * 4 + (kStates * 4 + kPartials) / kChunks);
}

}  // namespace
}  // namespace muster::kernels
