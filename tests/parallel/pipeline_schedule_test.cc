// Schedules, their simulation and partitions of layers: every small pipeline beside the formulas.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "base/rng.h"
#include "parallel/pipeline/partition.h"
#include "parallel/pipeline/schedule.h"
#include "tests/support/sanitized.h"
#include "tests/support/seed.h"
#include "tests/support/status_matchers.h"

namespace muster::parallel {
namespace {

using ::muster::testing::StatusIs;
using ::testing::HasSubstr;

constexpr PipelineSchedule kGPipe = PipelineSchedule::kGPipe;
constexpr PipelineSchedule k1F1B = PipelineSchedule::kOneForwardOneBackward;
constexpr PipelineSchedule kInterleaved = PipelineSchedule::kInterleaved;
constexpr PipelineSchedule kZeroBubble = PipelineSchedule::kZeroBubble;

// Every valid shape with stages <= 8, micro-batches <= 16, chunks <= 4 and every size of group.
void ForAllShapes(const std::function<void(const PipelineShape&)>& body) {
  for (const PipelineSchedule schedule : {kGPipe, k1F1B, kInterleaved, kZeroBubble}) {
    for (int stages = 1; stages <= 8; ++stages) {
      for (int micro_batches = 1; micro_batches <= 16; ++micro_batches) {
        for (int chunks = 1; chunks <= 4; ++chunks) {
          for (int group = 0; group <= micro_batches; ++group) {
            const PipelineShape shape = {schedule, stages, micro_batches, chunks, group};
            if (Validate(shape).ok()) body(shape);
          }
        }
      }
    }
  }
}

// All of them, or under a sanitizer, where all take more than a minute, every seventh.
constexpr int kOneOf = muster::testing::kSanitized ? 7 : 1;
void ForShapes(const std::function<void(const PipelineShape&)>& body) {
  int next = 0;
  ForAllShapes([&](const PipelineShape& shape) {
    if (next++ % kOneOf == 0) body(shape);
  });
}

// Of chunks, schedules other than interleaved have one.
TEST(PipelineSchedule, EveryValidShape_IsAmongThoseTested) {
  std::map<PipelineSchedule, std::set<std::tuple<int, int, int>>> shapes;
  ForAllShapes([&](const PipelineShape& shape) {
    shapes[shape.schedule].insert({shape.stages, shape.micro_batches, shape.chunks});
  });
  EXPECT_EQ(shapes[kGPipe].size(), 8u * 16);
  EXPECT_EQ(shapes[k1F1B].size(), 8u * 16);
  EXPECT_EQ(shapes[kZeroBubble].size(), 8u * 16);
  EXPECT_EQ(shapes[kInterleaved].size(), 8u * 16 * 4);
}

std::string Describe(const PipelineShape& shape) {
  return absl::StrCat(Name(shape.schedule), " stages ", shape.stages, " micro-batches ",
                      shape.micro_batches, " chunks ", shape.chunks, " group ", shape.group);
}

TEST(PipelineSchedule, EveryShape_EndsWithoutDeadlockAndDeliversEveryMessage) {
  ForShapes([](const PipelineShape& shape) {
    SCOPED_TRACE(Describe(shape));
    const PipelinePlan plan = MakePipelinePlan(shape);
    for (const ExchangeMode mode : {ExchangeMode::kInline, ExchangeMode::kOverlapped}) {
      const auto simulation = Simulate(plan, {1, 1.25, 0.75, 0.125, {}}, mode);
      ASSERT_OK(simulation);
      EXPECT_EQ(simulation->messages, 2 * (plan.parts() - 1) * shape.micro_batches);
    }
  });
}

int ActivationsKept(const PipelineShape& shape, int rank) {
  const int distance = shape.stages - rank - 1;
  int group = shape.group > 0 ? shape.group : std::min(shape.stages, shape.micro_batches);
  const int groups = shape.micro_batches / group;
  group = (shape.micro_batches + groups - 1) / groups;  // the largest
  switch (shape.schedule) {
    case kGPipe:
      return shape.micro_batches;
    case kZeroBubble:
      return std::min(shape.stages, shape.micro_batches);
    case k1F1B:
      break;
    case kInterleaved:
      if (shape.chunks == 1) break;
      return std::min(2 * distance + (shape.chunks - 1) * group + 1,
                      shape.micro_batches * shape.chunks);
  }
  return std::min(distance + 1, shape.micro_batches);
}

TEST(PipelineSchedule, ActivationsKept_AreThoseOfTheFormula) {
  ForShapes([](const PipelineShape& shape) {
    SCOPED_TRACE(Describe(shape));
    ASSERT_OK_AND_ASSIGN(const PipelineSimulation simulation, Simulate(MakePipelinePlan(shape)));
    for (int rank = 0; rank < shape.stages; ++rank) {
      EXPECT_EQ(simulation.ranks[rank].activations, ActivationsKept(shape, rank))
          << "rank " << rank;
      EXPECT_GE(simulation.ranks[rank].inputs, simulation.ranks[rank].activations);
    }
  });
}

// Interleaved pipelines of fewer micro-batches than stages take longer than the formula.
TEST(PipelineSchedule, Time_IsThatOfTheFormula) {
  int exact = 0;
  ForShapes([&](const PipelineShape& shape) {
    SCOPED_TRACE(Describe(shape));
    for (const PipelineCosts& costs : {PipelineCosts{1, 1, 1}, PipelineCosts{10, 12, 8}}) {
      const double f = costs.forward, i = costs.backward_input, w = costs.backward_weight;
      const double m = shape.micro_batches, p = shape.stages, v = shape.chunks;
      // A chunk has 1 / V of the work.
      PipelineCosts chunk = {f / v, i / v, w / v};
      ASSERT_OK_AND_ASSIGN(const PipelineSimulation simulation,
                           Simulate(MakePipelinePlan(shape), chunk, ExchangeMode::kOverlapped));
      const double ideal = m * (f + i + w);
      double formula = ideal + (p - 1) * (f + i + w) / v;
      bool holds = true;
      if (shape.schedule == kZeroBubble) {
        formula = ideal + (p - 1) * (f + i - w) + std::max(0.0, p - m) * w;
      }
      if (shape.schedule == kInterleaved && shape.chunks > 1) {
        holds = shape.micro_batches >= shape.stages;
      }
      if (holds) {
        EXPECT_NEAR(simulation.seconds, formula, 1e-9 * formula);
        EXPECT_NEAR(simulation.bubble(), (formula - ideal) / ideal, 1e-9);
        ++exact;
      } else {
        EXPECT_GE(simulation.seconds, formula - 1e-9 * formula);
      }
    }
  });
  EXPECT_GT(exact, 1000 / kOneOf);
}

TEST(PipelineSchedule, Backwards_RunInTheOrderOfTheMicroBatches) {
  ForShapes([](const PipelineShape& shape) {
    SCOPED_TRACE(Describe(shape));
    const PipelinePlan plan = MakePipelinePlan(shape);
    for (const auto& actions : plan.ranks) {
      std::vector<int> next(shape.chunks, 0), reduced(shape.chunks, 0);
      for (const PipelineAction& action : actions) {
        if (action.op == PipelineOp::kBackward || action.op == PipelineOp::kBackwardWeight) {
          ASSERT_EQ(action.micro_batch, next[action.chunk]++);
        }
        if (action.op == PipelineOp::kReduceGradients) {
          ASSERT_EQ(next[action.chunk], shape.micro_batches);
          ++reduced[action.chunk];
        }
      }
      EXPECT_EQ(reduced, std::vector<int>(shape.chunks, 1));
    }
  });
}

TEST(PipelineSchedule, OneForwardOneBackward_SendsAndReceivesInOneGroup) {
  // The middle of the steady state: what goes forward and what comes back cross each other.
  const PipelinePlan plan = MakePipelinePlan({k1F1B, 4, 8});
  const std::vector<PipelineAction>& actions = plan.ranks[1];
  int fused = 0;
  for (size_t i = 1; i < actions.size(); ++i) {
    fused += IsExchange(actions[i].op) && actions[i].group == actions[i - 1].group;
  }
  EXPECT_GE(fused, 8);
}

TEST(PipelineSchedule, ImpossibleShapes_AreRefusedWithTheNumbers) {
  EXPECT_THAT(Validate({k1F1B, 0, 4}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("0 stages")));
  EXPECT_THAT(Validate({k1F1B, 2, 4, 2}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("one chunk per rank, not 2")));
  EXPECT_THAT(Validate({kGPipe, 2, 4, 1, 2}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("no groups")));
  EXPECT_THAT(Validate({kInterleaved, 4, 8, 2, 3}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("a group has 4 to 8")));
}

TEST(PipelineSimulator, ReceiveBehindWhatNeedsIt_IsADeadlock) {
  PipelinePlan plan = MakePipelinePlan({k1F1B, 2, 2});
  // Rank 1 runs the forward of micro-batch 0 before it receives its input.
  auto& actions = plan.ranks[1];
  const auto receive = std::find_if(actions.begin(), actions.end(), [](const PipelineAction& a) {
    return a.op == PipelineOp::kReceiveActivation;
  });
  std::rotate(receive, receive + 1, actions.end());
  EXPECT_THAT(Simulate(plan), StatusIs(absl::StatusCode::kFailedPrecondition,
                                       HasSubstr("rank 1, forward of micro-batch 0")));
}

TEST(PipelineSimulator, ReceiveOfAnotherMicroBatch_IsFound) {
  PipelinePlan plan = MakePipelinePlan({kGPipe, 2, 2});
  for (PipelineAction& action : plan.ranks[1]) {
    if (action.op == PipelineOp::kReceiveActivation) action.micro_batch = 1 - action.micro_batch;
  }
  EXPECT_THAT(Simulate(plan),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("is matched with")));
}

TEST(PipelineSimulator, MissingOrRepeatedAction_IsFound) {
  PipelinePlan plan = MakePipelinePlan({k1F1B, 1, 2});
  PipelinePlan repeated = plan;
  repeated.ranks[0].insert(repeated.ranks[0].begin(), repeated.ranks[0].front());
  EXPECT_THAT(Simulate(repeated),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("comes twice")));
  plan.ranks[0].resize(2);
  EXPECT_THAT(Simulate(plan),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("no backward")));
}

TEST(PipelineSimulator, SlowPart_SetsThePace) {
  const PipelinePlan plan = MakePipelinePlan({k1F1B, 4, 16});
  PipelineCosts costs;
  costs.parts = {1, 1, 1, 2};
  ASSERT_OK_AND_ASSIGN(const PipelineSimulation simulation,
                       Simulate(plan, costs, ExchangeMode::kOverlapped));
  EXPECT_NEAR(simulation.seconds, 16 * 6 + 3 * 3, 1e-9);
}

TEST(PipelineDrawing, OfAStep_ShowsEveryActionAndTheBubble) {
  const PipelinePlan plan = MakePipelinePlan({k1F1B, 2, 2});
  ASSERT_OK_AND_ASSIGN(const PipelineSimulation simulation,
                       Simulate(plan, {1, 0.5, 0.5}, ExchangeMode::kOverlapped));
  EXPECT_EQ(Draw(plan, simulation),
            "rank 0 | F0 F1 .. B0 .. B1\n"
            "rank 1 | .. F0 B0 F1 B1 ..\n"
            "bubble 50.0 %, activations kept: 2 1\n");
  const PipelinePlan chunks = MakePipelinePlan({kInterleaved, 2, 2, 2});
  ASSERT_OK_AND_ASSIGN(const PipelineSimulation timed, Simulate(chunks));
  EXPECT_THAT(Draw(chunks, timed), HasSubstr("rank 1 | ... F0a F1a F0b B0b---- F1b B1b----"));
}

TEST(PartitionLayers, OfAnyCosts_IsAsGoodAsTheBestOfAllCuts) {
  Rng rng(muster::testing::TestSeed());
  for (int round = 0; round < 200; ++round) {
    const int layers = 1 + static_cast<int>(rng.Below(9));
    const int parts = 1 + static_cast<int>(rng.Below(layers));
    std::vector<double> costs;
    for (int i = 0; i < layers; ++i) costs.push_back(static_cast<double>(rng.Below(20)));
    const auto worst = [&](const std::vector<int>& cuts) {
      double largest = 0;
      for (size_t i = 0; i + 1 < cuts.size(); ++i) {
        largest = std::max(
            largest, std::accumulate(costs.begin() + cuts[i], costs.begin() + cuts[i + 1], 0.0));
      }
      return largest;
    };
    const auto best = [&](const std::function<bool(int, int, int)>& fits) {
      double least = std::numeric_limits<double>::infinity();
      for (int bits = 0; bits < 1 << (layers - 1); ++bits) {
        std::vector<int> cuts = {0};
        for (int i = 1; i < layers; ++i) {
          if ((bits >> (i - 1)) & 1) cuts.push_back(i);
        }
        cuts.push_back(layers);
        bool all = static_cast<int>(cuts.size()) == parts + 1;
        for (int i = 0; all && i < parts; ++i) all = fits(i, cuts[i], cuts[i + 1]);
        if (all) least = std::min(least, worst(cuts));
      }
      return least;
    };
    ASSERT_OK_AND_ASSIGN(const std::vector<int> cuts, PartitionLayers(costs, parts));
    ASSERT_EQ(cuts.size(), static_cast<size_t>(parts) + 1);
    EXPECT_EQ(cuts.front(), 0);
    EXPECT_EQ(cuts.back(), layers);
    for (int i = 0; i < parts; ++i) EXPECT_LT(cuts[i], cuts[i + 1]);
    EXPECT_EQ(worst(cuts), best([](int, int, int) { return true; }));

    // The same of the cuts in which no part exceeds what it has room for.
    std::vector<int64_t> room, bytes;
    for (int i = 0; i < parts; ++i) room.push_back(1 + static_cast<int64_t>(rng.Below(4 * layers)));
    for (int i = 0; i < layers; ++i) bytes.push_back(1 + static_cast<int64_t>(rng.Below(6)));
    const auto fits = [&](int part, int begin, int end) {
      return std::accumulate(bytes.begin() + begin, bytes.begin() + end, int64_t{0}) <= room[part];
    };
    const double least = best(fits);
    const absl::StatusOr<std::vector<int>> within = PartitionLayersWithin(costs, parts, fits);
    ASSERT_EQ(within.ok(), std::isfinite(least)) << within.status();
    if (!within.ok()) continue;
    for (int i = 0; i < parts; ++i) EXPECT_TRUE(fits(i, (*within)[i], (*within)[i + 1]));
    EXPECT_EQ(worst(*within), least);
  }
}

TEST(PartitionLayers, HeadOfGpt2_CostsAsMuchAsFiveBlocks) {
  // GPT-2 124M: embedding 0, 12 blocks of 1, a head of V / (12 C) = 5.5.
  std::vector<double> costs(14, 1);
  costs.front() = 0;
  costs.back() = 50257.0 / (12 * 768);
  ASSERT_OK_AND_ASSIGN(const std::vector<int> cuts, PartitionLayers(costs, 2));
  EXPECT_EQ(cuts, (std::vector<int>{0, 10, 14}));
}

TEST(PartitionLayers, Within_IsTheBestOfTheCutsThatFit) {
  // Part 0 can hold two layers, the others any number.
  const auto fits = [](int part, int begin, int end) { return part > 0 || end - begin <= 2; };
  const std::vector<double> costs(9, 1.0);
  ASSERT_OK_AND_ASSIGN(const std::vector<int> cuts, PartitionLayersWithin(costs, 3, fits));
  EXPECT_EQ(cuts, (std::vector<int>{0, 2, 5, 9}));
  const auto two = [](int, int begin, int end) { return end - begin <= 2; };
  EXPECT_EQ(PartitionLayersWithin(costs, 3, two).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST(PartitionLayers, BadInput_IsRefusedWithTheNumbers) {
  EXPECT_THAT(PartitionLayers({1, 2}, 3),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("2 layers")));
  EXPECT_THAT(PartitionLayers({1, -2}, 1),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("layer 1 has cost -2")));
}

}  // namespace
}  // namespace muster::parallel
