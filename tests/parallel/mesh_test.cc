#include "parallel/mesh/mesh.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "tests/support/status_matchers.h"

namespace muster::parallel {
namespace {

using ::muster::testing::StatusIs;
using ::testing::HasSubstr;

// Calls visit(mesh) for every shape with up to 3 per axis, in every order of the axes.
template <typename Visit>
void ForEachSmallMesh(Visit visit) {
  MeshOptions options;
  for (int pp = 1; pp <= 3; ++pp) {
    for (int dp = 1; dp <= 3; ++dp) {
      for (int cp = 1; cp <= 2; ++cp) {
        for (int tp = 1; tp <= 3; ++tp) {
          options.degrees = PerAxis(pp, dp, cp, tp);
          options.order = kAxes;
          std::sort(options.order.begin(), options.order.end());
          do {
            ASSERT_OK_AND_ASSIGN(const Mesh mesh, Mesh::Make(options, pp * dp * cp * tp));
            visit(mesh);
          } while (std::next_permutation(options.order.begin(), options.order.end()));
        }
      }
    }
  }
}

TEST(Mesh, RankAndCoordinate_AreABijection_ForEveryShapeAndOrder) {
  ForEachSmallMesh([](const Mesh& mesh) {
    for (int rank = 0; rank < mesh.world_size(); ++rank) {
      const PerAxis coordinate = mesh.CoordinateOf(rank);
      for (Axis axis : kAxes) {
        ASSERT_GE(coordinate[axis], 0);
        ASSERT_LT(coordinate[axis], mesh.degree(axis));
      }
      ASSERT_EQ(mesh.RankOf(coordinate), rank) << mesh.degrees().ToString();
    }
  });
}

TEST(Mesh, Groups_AlongAnyAxes_PartitionTheRanksIntoEqualSetsThatDifferOnlyThere) {
  ForEachSmallMesh([](const Mesh& mesh) {
    for (unsigned subset = 0; subset < 16; ++subset) {
      std::vector<Axis> axes;
      size_t expected = 1;
      for (Axis axis : kAxes) {
        if ((subset >> static_cast<unsigned>(axis) & 1) == 0) continue;
        axes.push_back(axis);
        expected *= static_cast<size_t>(mesh.degree(axis));
      }
      const auto groups = mesh.Groups(axes);
      std::set<int> seen;
      int last_first = -1;
      for (size_t i = 0; i < groups.size(); ++i) {
        ASSERT_EQ(groups[i].size(), expected);
        ASSERT_TRUE(std::is_sorted(groups[i].begin(), groups[i].end()));
        ASSERT_GT(groups[i][0], last_first);
        last_first = groups[i][0];
        for (int rank : groups[i]) {
          ASSERT_TRUE(seen.insert(rank).second);
          ASSERT_EQ(mesh.ColorOf(rank, axes), static_cast<int>(i));
          PerAxis a = mesh.CoordinateOf(groups[i][0]), b = mesh.CoordinateOf(rank);
          for (Axis axis : axes) a[axis] = b[axis] = 0;
          ASSERT_EQ(a, b);
        }
      }
      ASSERT_EQ(seen.size(), static_cast<size_t>(mesh.world_size()));
    }
  });
}

TEST(Mesh, DefaultOrder_PutsTensorRanksNextToEachOtherAndPipelineStagesApart) {
  ASSERT_OK_AND_ASSIGN(const Mesh mesh, Mesh::Make({.degrees = PerAxis(2, 2, 1, 2)}, 8));
  EXPECT_EQ(mesh.GroupOf(0, {Axis::kTensor}), (std::vector<int>{0, 1}));
  EXPECT_EQ(mesh.GroupOf(0, {Axis::kData}), (std::vector<int>{0, 2}));
  EXPECT_EQ(mesh.GroupOf(5, {Axis::kPipeline}), (std::vector<int>{1, 5}));
  EXPECT_EQ(mesh.GroupOf(5, {Axis::kData, Axis::kTensor}), (std::vector<int>{4, 5, 6, 7}));
}

TEST(Mesh, WrongProduct_IsRefusedWithEveryNumber) {
  EXPECT_THAT(Mesh::Make({.degrees = PerAxis(2, 4, 1, 8)}, 32),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("pp=2 dp=4 cp=1 tp=8 make 64 ranks, but the job has 32")));
  EXPECT_THAT(Mesh::Make({.degrees = PerAxis(1, 0, 1, 1)}, 1),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("data-parallel degree is 0")));
  EXPECT_THAT(Mesh::Make({.degrees = PerAxis(65536, 65536, 65536, 65536)}, 4),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("2^31 or more")));
  EXPECT_THAT(Mesh::Make({}, 0), StatusIs(absl::StatusCode::kInvalidArgument));
  MeshOptions twice;
  twice.order = {Axis::kTensor, Axis::kTensor, Axis::kData, Axis::kPipeline};
  EXPECT_THAT(Mesh::Make(twice, 1),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("exactly once")));
}

}  // namespace
}  // namespace muster::parallel
