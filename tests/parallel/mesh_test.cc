#include "parallel/mesh/mesh.h"
#include "parallel/plan/validate.h"

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

constexpr ModelSize kModel = {.layers = 12, .heads = 12, .sequence = 1024};

Layout Split(const PerAxis& degrees) {
  Layout layout;
  layout.degrees = degrees;
  layout.global_batch = 64;
  layout.micro_batch = 2;
  return layout;
}

TEST(ValidateLayout, WhatWorks_HasNoProblem) {
  EXPECT_OK(Validate(Split(PerAxis(1, 8, 1, 1)), kModel, {.ranks = 8}));
  EXPECT_OK(Validate(Split(PerAxis(2, 2, 2, 4)), kModel, {.ranks = 32}));
  Layout layout = Split(PerAxis(1, 8, 1, 1));
  layout.zero = 3;
  EXPECT_EQ(layout.EffectiveShards(), 8);
  EXPECT_OK(Validate(layout, kModel, {.ranks = 8}));
  layout.zero_shards = 4;
  EXPECT_EQ(layout.EffectiveShards(), 4);
  EXPECT_OK(Validate(layout, kModel, {.ranks = 8}));
}

TEST(ValidateLayout, WhatDoesNot_IsNamedWithNumbersAndTheNearestThatDoes) {
  const auto problem = [](const Layout& layout, int ranks) {
    return std::string(Validate(layout, kModel, {.ranks = ranks}).message());
  };
  EXPECT_THAT(
      problem(Split(PerAxis(1, 4, 1, 1)), 8),
      HasSubstr("resources.ranks: 8 ranks, but the degrees of engine.parallel multiply to 4 "
                "(data 4); the nearest layout of 8 ranks that works is data 8"));
  EXPECT_THAT(
      problem(Split(PerAxis(1, 1, 1, 16)), 16),
      HasSubstr("engine.parallel.tensor: 16 ranks cannot share the 12 attention heads of the "
                "model: each needs one; the nearest layout of 16 ranks that works is "
                "data 2 x tensor 8"));
  // Data parallelism over all ranks is what a spec gets that does not say: it gives way.
  EXPECT_THAT(problem(Split(PerAxis(1, 8, 1, 3)), 8),
              HasSubstr("multiply to 24 (data 8 x tensor 3); without data they go with 6 or 9 "
                        "ranks; the nearest layout of 8 ranks that works is data 2 x tensor 4"));
  EXPECT_THAT(problem(Split(PerAxis(16, 1, 1, 1)), 16),
              HasSubstr("engine.parallel.pipeline: 16 stages (16 ranks x 1 chunks) for 12 blocks"));
  EXPECT_THAT(problem(Split(PerAxis(1, 3, 1, 1)), 3),
              HasSubstr("64 is not a multiple of micro_batch x data (2 x 3); 60 or 66 would be"));
  Layout layout = Split(PerAxis(1, 1, 3, 1));
  EXPECT_THAT(problem(layout, 3), HasSubstr("engine.parallel.context: a sequence of 1024 tokens "
                                            "does not divide into 6 chunks, two for each of the 3 "
                                            "ranks; one of 1020 or 1026 tokens would"));
  layout = Split(PerAxis(2, 2, 1, 1));
  EXPECT_OK(Validate(layout, kModel, {.ranks = 4}));
  layout.zero = 2;
  layout.pipeline_chunks = 2;
  layout.interleaved = true;
  EXPECT_OK(Validate(layout, kModel, {.ranks = 4}));
  layout = Split(PerAxis(1, 8, 1, 1));
  layout.zero = 1;
  layout.zero_shards = 3;
  EXPECT_THAT(problem(layout, 8), HasSubstr("3 does not divide the 8 data-parallel ranks; the "
                                            "nearest that does is 2"));
  EXPECT_THAT(problem(Split(PerAxis(1, 0, 1, -2)), 8),
              AllOf(HasSubstr("engine.parallel.data: 0 is out of range"),
                    HasSubstr("engine.parallel.tensor: -2 is out of range")));
  layout = Split(PerAxis(1, 2, 1, 1));
  layout.sequence_parallel = true;
  EXPECT_THAT(problem(layout, 2), HasSubstr("needs tensor parallelism"));
  layout = Split(PerAxis(1, 1, 1, 6));
  layout.sequence_parallel = true;
  EXPECT_THAT(problem(layout, 6),
              HasSubstr("the 2048 tokens of a micro-batch do not divide over 6 tensor-parallel "
                        "ranks; with a micro_batch of 3 they would"));
  layout = Split(PerAxis(1, 1, 1, 2));
  layout.tensor_chunks = true;
  EXPECT_THAT(problem(layout, 2),
              HasSubstr("engine.parallel.tensor_overlap: chunked cuts GEMMs by the rows that "
                        "ranks have with sequence parallelism, which is off; set sequence true"));
  layout.sequence_parallel = true;
  EXPECT_OK(Validate(layout, kModel, {.ranks = 2}));
  layout = Split(PerAxis(1, 2, 1, 1));
  layout.tensor_chunks = true;
  EXPECT_THAT(problem(layout, 2), HasSubstr("use backward, as tensor is 1"));
}

TEST(ValidateLayout, HalvesOfSamples_NeedTensorRanksAndEvenNumbers) {
  const auto halves = [](const PerAxis& degrees, int64_t micro_batch, bool sequence = true) {
    Layout layout = Split(degrees);
    layout.tensor_halves = true;
    layout.sequence_parallel = sequence && degrees[Axis::kTensor] > 1;
    layout.micro_batch = micro_batch;
    layout.global_batch = 4 * micro_batch;
    return layout;
  };
  const auto problem = [](const Layout& layout, int ranks, const ModelSize& model = kModel) {
    return std::string(Validate(layout, model, {.ranks = ranks}).message());
  };
  EXPECT_EQ(problem(halves(PerAxis(1, 1, 1, 2), 2), 2), "");
  EXPECT_EQ(problem(halves(PerAxis(1, 1, 1, 2), 2, /*sequence=*/false), 2), "");
  EXPECT_THAT(problem(halves(PerAxis(1, 2, 1, 1), 2), 2),
              HasSubstr("engine.parallel.tensor_overlap: halves run the collectives of one half of "
                        "the samples under the other, but tensor is 1; use backward"));
  EXPECT_THAT(problem(halves(PerAxis(1, 1, 1, 2), 3), 2),
              HasSubstr("halves need an even number of samples, but micro_batch is 3; 2 or 4 would "
                        "do, or use backward"));
  Layout zero_bubble = halves(PerAxis(2, 1, 1, 2), 2);
  zero_bubble.zero_bubble = true;
  EXPECT_THAT(problem(zero_bubble, 4), HasSubstr("halves and the zero_bubble schedule"));
  // 2 x 6 tokens are 3 for each of four ranks, their halves are not.
  ModelSize six = kModel;
  six.sequence = 6;
  EXPECT_THAT(problem(halves(PerAxis(1, 1, 1, 4), 2), 4, six),
              HasSubstr("halves of the 12 tokens of a micro-batch do not divide over 4 "
                        "tensor-parallel ranks; with a micro_batch of 4 they would"));
  EXPECT_EQ(problem(halves(PerAxis(1, 1, 1, 4), 2, /*sequence=*/false), 4, six), "");
}

// What ranks share of the model, besides its heads.
TEST(ValidateLayout, RanksThatAModelLeavesWithoutWork_AreRefused) {
  const auto problem = [](const Layout& layout, const ModelSize& model, int ranks) {
    return std::string(Validate(layout, model, {.ranks = ranks}).message());
  };
  const Layout eight = Split(PerAxis(1, 1, 1, 8));
  ModelSize model = kModel;
  model.ffn = 6;
  EXPECT_THAT(problem(eight, model, 8),
              HasSubstr("engine.parallel.tensor: 8 ranks cannot share the 6 columns of the MLP: "
                        "each needs one; the nearest layout of 8 ranks that works is "
                        "data 2 x tensor 4"));
  model.ffn = 8;
  EXPECT_OK(Validate(eight, model, {.ranks = 8}));
  model.vocab = 7;
  EXPECT_THAT(problem(eight, model, 8), HasSubstr("the 7 rows of the vocabulary"));

  // Twelve heads over four key/value heads; of three tensor ranks one has two of these.
  model = kModel;
  model.kv_heads = 4;
  Layout layout = Split(PerAxis(1, 1, 2, 3));
  layout.all_to_all = true;
  EXPECT_THAT(problem(layout, model, 6),
              HasSubstr("engine.parallel.context_method: all_to_all spreads 3 heads and 1 "
                        "key/value heads of a tensor rank over 2 context ranks"));
  layout.degrees = PerAxis(1, 1, 2, 2);
  EXPECT_OK(Validate(layout, model, {.ranks = 4}));
  model.kv_heads = 2;
  model.heads = 12;
  layout.degrees = PerAxis(1, 1, 4, 1);
  EXPECT_OK(Validate(layout, model, {.ranks = 4}));
  model.kv_heads = 3;
  EXPECT_THAT(problem(layout, model, 4), HasSubstr("12 heads and 3 key/value heads"));
}

TEST(ValidateLayout, ScansByHeadsThatDoNotDivide_AreRefusedWithTheContextThatDoes) {
  ModelSize model = kModel;
  model.ssm_heads = 12;
  model.ssm_groups = 1;
  Layout layout;
  layout.scan_all_to_all = true;
  const auto problem = [&](const PerAxis& degrees) {
    layout.degrees = degrees;
    model.sequence = 2 * 8 * 3 * 5;
    const int ranks = degrees[Axis::kContext] * degrees[Axis::kTensor];
    layout.global_batch = layout.micro_batch = 1;
    std::string messages;
    for (const LayoutProblem& problem : FindProblems(layout, model, {.ranks = ranks})) {
      absl::StrAppend(&messages, problem.field, ": ", problem.message, "\n");
    }
    return messages;
  };
  EXPECT_THAT(
      problem(PerAxis(1, 1, 8, 1)),
      HasSubstr("engine.parallel.scan_method: all_to_all spreads 12 state-space heads in 1 "
                "group over 8 context ranks: the heads must be a multiple of the ranks, and "
                "of groups and ranks one a multiple of the other; context 6 or 12 fits, or "
                "use state_passing"));
  EXPECT_EQ(problem(PerAxis(1, 1, 6, 1)), "");
  // Of two tensor ranks with one group, six heads each.
  EXPECT_THAT(problem(PerAxis(1, 1, 4, 2)), HasSubstr("6 state-space heads in 1 group of a tensor "
                                                      "rank over 4 context ranks"));
  EXPECT_EQ(problem(PerAxis(1, 1, 3, 2)), "");
  // Of two tensor ranks one has two of three groups, and one the other.
  model.ssm_groups = 3;
  EXPECT_EQ(problem(PerAxis(1, 1, 2, 2)), "");
  EXPECT_THAT(problem(PerAxis(1, 1, 2, 1)), HasSubstr("12 state-space heads in 3 groups over 2"));
  layout.scan_all_to_all = false;
  EXPECT_EQ(problem(PerAxis(1, 1, 2, 1)), "");
}

TEST(ValidateLayout, CompressionPastItsBreakEven_IsRefusedWithTheNumbers) {
  const auto problem = [](int data, int zero, double density) {
    Layout layout = Split(PerAxis(1, data, 1, 1));
    layout.zero = zero;
    layout.top_k_density = density;
    layout.sign_compression = density == 0;
    return std::string(Validate(layout, kModel, {.ranks = data}).message());
  };
  EXPECT_EQ(problem(4, 0, 0.16), "");
  EXPECT_THAT(
      problem(4, 0, 0.17),
      HasSubstr("engine.training.gradient_compression.top_k.density: sending 0.17 of the "
                "elements as pairs to 3 other ranks takes longer than reducing all of them; "
                "with 4 ranks and zero 0 use at most 0.166667"));
  EXPECT_EQ(problem(4, 0, 0.17).find("nearest"), std::string::npos);
  EXPECT_EQ(problem(4, 1, 0.08), "");
  EXPECT_THAT(problem(4, 1, 0.16), HasSubstr("use at most 0.0833333"));
  EXPECT_THAT(problem(4, 2, 0.01), HasSubstr("use zero 0 or 1"));
  EXPECT_EQ(problem(1, 0, 1), "");
  EXPECT_EQ(problem(32, 0, 0), "");
  EXPECT_THAT(problem(32, 1, 0), HasSubstr("use it for at most 21 ranks"));
  EXPECT_EQ(SignRanksMax(0), 42);
}

// Whatever the degrees are: no crash, and a suggestion is itself without a problem.
TEST(ValidateLayout, EveryDegree_IsJudged) {
  for (int ranks = 1; ranks <= 24; ++ranks) {
    for (int data = 1; data <= 8; ++data) {
      for (int tensor = 1; tensor <= 16; ++tensor) {
        const Layout layout = Split(PerAxis(1, data, 1, tensor));
        const bool fits = data * tensor == ranks && tensor <= 12 && 32 % data == 0;
        EXPECT_EQ(Validate(layout, kModel, {.ranks = ranks}).ok(), fits)
            << ranks << " ranks, data " << data << ", tensor " << tensor;
      }
    }
  }
}

}  // namespace
}  // namespace muster::parallel
