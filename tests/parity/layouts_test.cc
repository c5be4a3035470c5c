// Every way to shard the state over data-parallel ranks has the gradients and weights of one rank,
// takes the memory of the formulas, and resumes what any other layout has saved.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/parity/harness.h"
#include "tests/support/forwarding_communicator.h"
#include "tests/support/status_matchers.h"

namespace muster::parallel::parity {
namespace {

class Layouts : public ::testing::Test {
 protected:
  // Expects that each of `runs` trains like `alone` and has its gradients in the first step.
  void ExpectLike(const Case& alone, const std::vector<Case>& runs) {
    const RankResult whole = harness_.Train(alone)[0];
    const Tensors gradients = harness_.FirstGradients(alone);
    for (const Case& run : runs) {
      SCOPED_TRACE(run.ToString());
      ExpectClose(whole, harness_.Train(run)[0]);
      ExpectClose(gradients, harness_.FirstGradients(run));
    }
  }

  // What `first` has saved after four steps, resumed by `second`, goes on like `alone`.
  void ExpectResumes(const Case& alone, Case first, Case second) {
    const RankResult whole = harness_.Train(alone)[0];
    first.save_every = 100;
    first.stop_after = 4;
    second.restore = harness_.Train(first)[0].saved;
    ASSERT_EQ(second.restore.size(), 1u);
    const RankResult rest = harness_.Train(second)[0];
    ASSERT_EQ(rest.losses.size() + 4, whole.losses.size());
    for (size_t i = 0; i < rest.losses.size(); ++i) {
      EXPECT_NEAR(rest.losses[i], whole.losses[i + 4], 1e-5 * whole.losses[i + 4]);
    }
  }

  Harness harness_;
};

// A run on one rank. Three tensor ranks of this llama would share two key/value heads.
Case Alone(const ModelDescription& model, int64_t micro_batch) {
  Case alone;
  alone.model = model;
  alone.layout.micro_batch = micro_batch;
  alone.layout.global_batch = 4 * micro_batch;
  alone.steps = 10;
  if (model.family == "llama") alone.model.sizes["kv_heads"] = 2;
  return alone;
}

// Logs the collectives of one rank's tensor group: R(educe-scatter), (all-)G(ather).
class TensorLog : public muster::testing::ForwardingCommunicator {
 public:
  TensorLog(std::unique_ptr<Communicator> inner, std::string* log)
      : ForwardingCommunicator(std::move(inner)), log_(log) {}
  void ReduceScatter(kernels::Stream& stream, kernels::Tensor data, ReduceOp op) override {
    if (name() == "tp") *log_ += 'R';
    inner_->ReduceScatter(stream, data, op);
  }
  void AllGather(kernels::Stream& stream, kernels::Tensor data) override {
    if (name() == "tp") *log_ += 'G';
    inner_->AllGather(stream, data);
  }
  absl::StatusOr<std::unique_ptr<Communicator>> Split(int color, int key,
                                                      const std::string& name) override {
    auto made = inner_->Split(color, key, name);
    if (!made.ok()) return made.status();
    return std::make_unique<TensorLog>(*std::move(made), log_);
  }

 private:
  std::string* const log_;
};

TEST_F(Layouts, EveryStageOfZero_HasTheGradientsAndWeightsOfOneRankToTheLastBit) {
  for (const ModelDescription& model : {SmallGpt2(), SmallLlama(), SmallMamba2(), SmallHybrid(4)}) {
    Case alone = Data(1);
    alone.model = model;
    const Tensors gradients = harness_.FirstGradients(alone);
    const Tensors weights = harness_.Weights(alone);
    EXPECT_GT(gradients.size(), 20u);
    for (Case run : {Data(4), Data(4, 1), Data(4, 2), Data(4, 3), Data(8, 3, 2)}) {
      SCOPED_TRACE(run.ToString());
      run.model = model;
      EXPECT_EQ(harness_.FirstGradients(run), gradients);
      EXPECT_EQ(harness_.Weights(run), weights);
    }
  }
}

// Tables that are larger than two blocks rotate through a buffer of their own. With one micro-batch
// per rank, own gradients are in the memory of activations.
TEST_F(Layouts, ZeroOfLargeUntiedTables_HasTheBitsOfOneRank) {
  Case alone = Data(1);
  alone.model = SmallLlama();
  alone.model.sizes["vocab"] = 1031;
  alone.evaluate_every = 7;
  const RankResult whole = harness_.Train(alone)[0];
  for (const int micro_batch : {2, 4}) {
    for (const int zero : {2, 3}) {
      for (const bool reshard : {true, false}) {
        Case run = Data(4, zero);
        run.model = alone.model;
        run.evaluate_every = alone.evaluate_every;
        run.layout.micro_batch = micro_batch;
        run.reshard_after_forward = reshard;
        SCOPED_TRACE(run.ToString());
        if (micro_batch == alone.layout.micro_batch) {
          ExpectSameBits(whole, harness_.Train(run)[0]);
          run.resident_elements = 0;
          run.overlap = false;
          ExpectSameBits(whole, harness_.Train(run)[0]);
        } else {
          Case same = alone;
          same.layout.micro_batch = micro_batch;
          ExpectSameBits(harness_.Train(same)[0], harness_.Train(run)[0]);
        }
      }
    }
  }
}

// What a rank has of the tables falls with the number of ranks.
TEST_F(Layouts, ZeroOfUntiedTables_LeavesARankItsShare) {
  const auto state = [&](int ranks, int zero) {
    Case run = Data(ranks, zero);
    run.model = SmallLlama();
    run.model.sizes["vocab"] = 4000;
    run.steps = 1;
    return harness_.Train(run)[0].state_bytes;
  };
  const int64_t table = int64_t{4032} * 48 * 4;  // bytes
  // The gradients of one table at a time are whole in ZeRO-2, and the parameters too in ZeRO-3.
  EXPECT_LT(state(8, 2), state(8, 1) - table / 2);
  EXPECT_LT(state(8, 3), state(8, 2) - table / 2);
  EXPECT_LT(state(8, 3), state(2, 3) - 3 * table);
}

// Shard groups of five out of ten ranks hold two and a half data-parallel ranks. Every sample of a
// step is still trained on exactly once.
TEST_F(Layouts, ShardGroupsThatCutThroughASequence_TrainLikeOneRank) {
  for (const int zero : {2, 3}) {
    Case run = Data(1, zero, /*shards=*/5);
    run.layout.degrees = PerAxis(1, 5, 2, 1);
    run.layout.global_batch = 20;
    run.steps = 4;
    SCOPED_TRACE(run.ToString());
    Case alone = Data(1);
    alone.layout.global_batch = run.layout.global_batch;
    alone.steps = run.steps;
    ExpectClose(harness_.Train(alone)[0], harness_.Train(run)[0]);
  }
}

TEST_F(Layouts, ModelsWithMeshesOfTheirOwn_TrainOnOnePoolAsAlone) {
  Case gpt2 = Data(1);
  gpt2.layout.degrees = PerAxis(2, 1, 1, 2);
  gpt2.layout.sequence_parallel = true;
  Case llama = Data(3, 3);
  llama.model = SmallLlama();
  llama.layout.global_batch = 12;
  Case ring = Data(1);
  ring.layout.degrees = PerAxis(1, 1, 2, 1);
  const std::vector<Case> runs = {gpt2, llama, ring};
  const auto together = harness_.TrainOnOnePool(runs);
  for (size_t i = 0; i < runs.size(); ++i) {
    SCOPED_TRACE(runs[i].ToString());
    ExpectSameBits(harness_.Train(runs[i])[0], together[i][0]);
  }
}

// Some blocks recompute, others keep all activations.
TEST_F(Layouts, RecomputationOfSomeBlocks_ChangesNoBits) {
  for (const bool rows : {false, true}) {
    Case run = Data(1);
    run.model = SmallLlama(4);
    run.layout.degrees = PerAxis(1, 1, 2, 2);
    run.layout.sequence_parallel = rows;
    run.context_method = ContextMethod::kAllToAll;
    run.steps = 6;
    const RankResult whole = harness_.Train(run)[0];
    for (const Recompute recompute : {Recompute::kSelective, Recompute::kFull}) {
      for (const int blocks : {0, 1, 3, 9}) {
        run.recompute = recompute;
        run.recompute_blocks = blocks;
        SCOPED_TRACE(run.ToString());
        ExpectSameBits(whole, harness_.Train(run)[0]);
      }
    }
  }
  Case offloads = Data(1);
  offloads.offload_activations = true;
  offloads.recompute = Recompute::kFull;
  offloads.recompute_blocks = 1;
  offloads.may_fail = true;
  EXPECT_THAT(harness_.Train(offloads)[0].status,
              muster::testing::StatusIs(absl::StatusCode::kInvalidArgument,
                                        ::testing::HasSubstr("use recompute_blocks 0")));
}

TEST_F(Layouts, CheckpointOfOneLayout_IsResumedByAnyOther) {
  const RankResult whole = harness_.Train(Data(1))[0];
  for (const auto& [saving, resuming] :
       std::vector<std::pair<Case, Case>>{{Data(4, 3), Data(1)},
                                          {Data(1), Data(4, 3)},
                                          {Data(4, 1), Data(2, 2)},
                                          {Data(4, 3, 2), Data(4, 3, 2)},
                                          {Data(2, 2), Data(8, 1, 4)}}) {
    SCOPED_TRACE(saving.ToString() + " -> " + resuming.ToString());
    Case first = saving, second = resuming;
    first.save_every = 100;
    first.stop_after = 8;
    second.restore = harness_.Train(first)[0].saved;
    ASSERT_EQ(second.restore.size(), 1u);
    const RankResult rest = harness_.Train(second)[0];
    // The bits are the same, because all of these layouts sum in the same order.
    EXPECT_EQ(rest.losses, std::vector<double>(whole.losses.begin() + 8, whole.losses.end()));
    EXPECT_EQ(rest.norms, std::vector<double>(whole.norms.begin() + 8, whole.norms.end()));
  }
}

Case Split(const PerAxis& degrees, int zero = 0, int shards = 0) {
  Case run = Data(degrees[Axis::kData], zero, shards);
  run.layout.degrees = degrees;
  run.layout.global_batch = 8;
  run.layout.micro_batch = 2;
  return run;
}

// Every host saves what its own ranks hold, also the tied table of a last stage.
TEST_F(Layouts, CheckpointsOnTheDisksOfHosts_AreResumedWhereTheyWereSaved) {
  const std::vector<std::pair<Case, std::vector<int>>> cases = {
      {Split({1, 2, 1, 1}), {0, 1}},          {Split({1, 4, 1, 1}, 3, 2), {0, 0, 1, 1}},
      {Split({1, 4, 1, 1}, 2), {0, 1, 1, 0}}, {Split({2, 1, 1, 1}), {0, 1}},
      {Split({2, 2, 1, 1}, 1), {0, 0, 1, 1}}, {Split({2, 1, 1, 2}), {0, 0, 1, 1}},
      {Split({2, 2, 1, 1}), {0, 1, 1, 0}}};
  for (const auto& [layout, hosts] : cases) {
    SCOPED_TRACE(layout.ToString());
    const RankResult whole = harness_.Train(layout)[0];
    Case first = layout, second = layout;
    first.hosts = second.hosts = hosts;
    first.save_every = 100;
    first.stop_after = 8;
    second.restore = harness_.Train(first)[0].saved;
    ASSERT_EQ(second.restore.size(), 1u);
    const RankResult rest = harness_.Train(second)[0];
    EXPECT_EQ(rest.losses, std::vector<double>(whole.losses.begin() + 8, whole.losses.end()));
    EXPECT_EQ(rest.warnings.size(), 0u);
  }
}

TEST_F(Layouts, DiskOfALostHost_IsReplacedByOneThatHeldTheSame) {
  for (const Case& layout : {Split({1, 2, 1, 1}), Split({1, 4, 1, 1}, 3, 2)}) {
    SCOPED_TRACE(layout.ToString());
    const RankResult whole = harness_.Train(layout)[0];
    Case first = layout, second = layout;
    const bool two = layout.ranks() == 2;
    first.hosts = two ? std::vector<int>{0, 1} : std::vector<int>{0, 0, 1, 1};
    second.hosts = std::vector<int>(static_cast<size_t>(layout.ranks()), 0);
    first.save_every = 100;
    first.stop_after = 8;
    second.restore = harness_.Train(first)[0].saved;
    harness_.LoseDisk(1);
    if (two) second.restore[0].manifest_checksum = "";  // a checksum is not needed
    const RankResult rest = harness_.Train(second)[0];
    EXPECT_EQ(rest.losses, std::vector<double>(whole.losses.begin() + 8, whole.losses.end()));
  }
}

TEST_F(Layouts, DiskOfALostHostWithoutReplacement_StartsOverAndNamesWhatIsMissing) {
  Case first = Split({2, 1, 1, 1});
  const RankResult whole = harness_.Train(first)[0];
  first.hosts = {0, 1};
  Case second = first;
  first.save_every = 100;
  first.stop_after = 8;
  second.restore = harness_.Train(first)[0].saved;
  harness_.LoseDisk(1);
  const RankResult again = harness_.Train(second)[0];
  EXPECT_EQ(again.losses, whole.losses);
  EXPECT_TRUE(again.damaged.empty()) << "nothing is wrong with what is there";
  ASSERT_EQ(again.warnings.size(), 2u);
  EXPECT_THAT(
      std::string(again.warnings[0].message()),
      ::testing::HasSubstr("step 8 cannot be restored here: rank 1 does not find its part"));
  EXPECT_THAT(std::string(again.warnings[1].message()), ::testing::HasSubstr("starts over"));
}

TEST_F(Layouts, TensorGroupOverTwoDisks_IsRefused) {
  Case run = Split({1, 1, 1, 2});
  run.hosts = {0, 1};
  run.save_every = 100;
  run.may_fail = true;
  for (const RankResult& rank : harness_.Train(run)) {
    EXPECT_THAT(rank.status,
                muster::testing::StatusIs(absl::StatusCode::kFailedPrecondition,
                                          ::testing::HasSubstr("every tensor group on one host")));
  }
}

// Twelve query heads over two key/value heads: of three ranks, two share the first key/value head,
// or with the tensor weights below the second.
TEST_F(Layouts, SharedKeyHeads_TrainLikeOneRankAndResumeWithAnyRanks) {
  const auto on = [](const PerAxis& degrees) {
    Case run;
    run.model = SmallLlama();
    run.model.sizes["kv_heads"] = 2;
    run.layout.degrees = degrees;
    run.layout.global_batch = 16;
    run.layout.micro_batch = 2;
    run.steps = 12;
    return run;
  };
  const Case alone = on(PerAxis(1, 1, 1, 1));
  const RankResult whole = harness_.Train(alone)[0];
  const Tensors gradients = harness_.FirstGradients(alone);
  std::vector<Case> layouts;
  layouts.push_back(on(PerAxis(1, 1, 1, 4)));
  layouts.push_back(on(PerAxis(1, 2, 1, 3)));
  layouts.back().layout.zero = 3;
  layouts.push_back(on(PerAxis(1, 1, 1, 3)));
  layouts.back().tensor_weights = {3, 1, 1};
  layouts.push_back(on(PerAxis(1, 1, 1, 8)));
  layouts.back().layout.sequence_parallel = true;
  layouts.push_back(on(PerAxis(2, 1, 1, 4)));
  layouts.back().schedule = PipelineSchedule::kZeroBubble;
  layouts.back().layout.sequence_parallel = true;
  layouts.push_back(on(PerAxis(1, 1, 2, 3)));
  layouts.back().tcp = true;
  for (const Case& layout : layouts) {
    SCOPED_TRACE(layout.ToString());
    ExpectClose(gradients, harness_.FirstGradients(layout));
    Case first = layout, second = alone;
    first.save_every = 8;
    first.stop_after = 8;
    const std::vector<RankResult> saved = harness_.Train(first);
    second.restore = saved[0].saved;
    ExpectClose(whole, harness_.Train(second)[0]);
    // The layout resumes the checkpoint of one rank.
    first = alone;
    first.save_every = 8;
    first.stop_after = 8;
    second = layout;
    second.restore = harness_.Train(first)[0].saved;
    second.adjust = [](TrainerOptions& options) { options.verify_every = 1; };
    ExpectClose(whole, harness_.Train(second)[0]);
  }
}

// Six state-space heads: whole groups per rank, ranks that share groups, and shares by weight down
// to single heads.
TEST_F(Layouts, StateSpaceHeads_TrainLikeOneRankAndResumeWithAnyRanks) {
  for (const int64_t groups : {1, 2, 6}) {
    ModelDescription model = SmallMamba2();
    model.sizes["groups"] = groups;
    const Case alone = Alone(model, 2);
    std::vector<Case> runs;
    for (const int ranks : {2, 3, 4}) {
      Case run = alone;
      run.layout.degrees = PerAxis(1, 1, 1, ranks);
      runs.push_back(run);
      run.tensor_weights = {5, 1, 2, 4};
      run.tensor_weights.resize(static_cast<size_t>(ranks));
      run.layout.sequence_parallel = ranks != 3;
      run.recompute = Recompute::kFull;
      runs.push_back(run);
      run.recompute = Recompute::kSelective;
      run.tensor_overlap = TensorOverlap::kHalves;
      runs.push_back(run);
      if (ranks != 2) continue;
      run.recompute = Recompute::kNone;
      run.tensor_overlap = TensorOverlap::kChunked;
      runs.push_back(run);
      run.layout.degrees = PerAxis(2, 1, 1, ranks);
      run.schedule = PipelineSchedule::kZeroBubble;
      run.tensor_overlap = TensorOverlap::kBackward;
      runs.push_back(run);
    }
    ExpectLike(alone, runs);
    ExpectResumes(alone, runs[0], runs.back());
  }
}

// Blocks of one and of two layers, so that no two of a rank need the same memory or exchange as
// much.
TEST_F(Layouts, HybridStacks_TrainLikeOneRankAndResumeWithAnyRanks) {
  for (const bool llama : {false, true}) {
    const Case alone = Alone(SmallHybrid(5, llama), 2);
    std::vector<Case> runs;
    for (const int ranks : llama ? std::vector<int>{3} : std::vector<int>{2, 4}) {
      Case run = alone;
      run.layout.degrees = PerAxis(1, 1, 1, ranks);
      run.layout.sequence_parallel = ranks != 3;
      run.offload_activations = true;
      runs.push_back(run);
      run.tensor_weights = {5, 1, 2, 4};
      run.tensor_weights.resize(static_cast<size_t>(ranks));
      run.tensor_overlap = TensorOverlap::kHalves;
      for (const Recompute recompute :
           {Recompute::kNone, Recompute::kSelective, Recompute::kFull}) {
        run.recompute = recompute;
        run.offload_activations = false;
        runs.push_back(run);
        if (recompute == Recompute::kSelective) {
          run.offload_activations = true;
          runs.push_back(run);
        }
        if (recompute != Recompute::kFull) continue;
        run.offload_activations = false;
        run.recompute_blocks = 2;
        runs.push_back(run);
      }
    }
    Case pipeline = alone;
    pipeline.layout.degrees = PerAxis(2, 1, 1, 2);
    for (const PipelineSchedule schedule :
         {PipelineSchedule::kInterleaved, PipelineSchedule::kZeroBubble}) {
      pipeline.schedule = schedule;
      pipeline.layout.pipeline_chunks = schedule == PipelineSchedule::kInterleaved ? 2 : 1;
      runs.push_back(pipeline);
    }
    // Attention exchanges keys and values of the chunks whose states Mamba-2 passes on.
    Case context = alone;
    context.layout.degrees = PerAxis(1, 1, llama ? 4 : 2, llama ? 1 : 2);
    context.layout.sequence_parallel = !llama;
    for (const Recompute recompute : {Recompute::kNone, Recompute::kFull}) {
      context.recompute = recompute;
      runs.push_back(context);
    }
    ExpectLike(alone, runs);
    ExpectResumes(alone, runs[1], pipeline);
  }
}

// Segments of sequences on several ranks, of two tokens with four of them, which is less than the
// convolution reaches back. Documents begin within segments and at their borders.
TEST_F(Layouts, StatesPassedBetweenContextRanks_TrainLikeOneRankAndResumeOnOne) {
  for (const bool documents : {false, true}) {
    ModelDescription model = SmallMamba2();
    Case alone = Alone(model, 2);
    alone.documents = documents;
    std::vector<Case> runs;
    for (const int ranks : {2, 4}) {
      Case run = alone;
      run.layout.degrees = PerAxis(1, 1, ranks, 1);
      for (const Recompute recompute :
           {Recompute::kNone, Recompute::kSelective, Recompute::kFull}) {
        run.recompute = recompute;
        runs.push_back(run);
      }
      run.layout.degrees = PerAxis(1, 2, ranks, 1);
      run.layout.zero = ranks == 2 ? 3 : 1;
      run.overlap = ranks == 2;
      run.offload_activations = true;
      run.tcp = documents;
      runs.push_back(run);
      // Tensor ranks that share groups of heads, and shares by weight.
      run = alone;
      run.layout.degrees = PerAxis(1, 1, ranks, ranks == 2 ? 4 : 2);
      run.tensor_weights = {3, 1, 1, 1};
      run.tensor_weights.resize(ranks == 2 ? 4 : 2);
      run.layout.sequence_parallel = true;
      run.tensor_overlap = TensorOverlap::kHalves;
      runs.push_back(run);
      run.tensor_overlap = TensorOverlap::kNone;
      run.layout.sequence_parallel = false;
      run.recompute = Recompute::kSelective;
      runs.push_back(run);
      run = alone;
      run.layout.degrees = PerAxis(2, 1, ranks, 1);
      run.schedule = PipelineSchedule::kZeroBubble;
      runs.push_back(run);
    }
    ExpectLike(alone, runs);
    ExpectResumes(alone, runs.back(), alone);
  }
}

// Whatever runs beside the exchanges, and whichever method attention would use.
TEST_F(Layouts, StatesPassedBesideOtherWork_HaveTheSameBits) {
  for (const PerAxis& degrees : {PerAxis(1, 1, 2, 1), PerAxis(1, 1, 4, 2)}) {
    Case run = Alone(SmallMamba2(), 2);
    run.layout.degrees = degrees;
    run.documents = true;
    run.overlap = false;
    const RankResult plain = harness_.Train(run)[0];
    run.overlap = true;
    for (const ContextMethod method :
         {ContextMethod::kRing, ContextMethod::kAllGather, ContextMethod::kAllToAll}) {
      run.context_method = method;
      SCOPED_TRACE(run.ToString());
      ExpectSameBits(plain, harness_.Train(run)[0]);
    }
    for (const Recompute recompute : {Recompute::kSelective, Recompute::kFull}) {
      run.recompute = recompute;
      SCOPED_TRACE(run.ToString());
      ExpectSameBits(plain, harness_.Train(run)[0]);
    }
  }
}

// Whole sequences of some heads: groups of their own, and groups that context ranks share, in
// tensor ranks that share groups too.
TEST_F(Layouts, ScansByHeads_TrainLikeOneRankAndResumeOnOne) {
  for (const int64_t groups : {1, 2, 4}) {
    ModelDescription model = SmallMamba2();
    model.sizes["heads"] = 16;
    model.sizes["head_width"] = 4;
    model.sizes["groups"] = groups;
    Case alone = Alone(model, 2);
    alone.documents = groups == 2;
    std::vector<Case> runs;
    for (const int ranks : {2, 4}) {
      Case run = alone;
      run.scan_method = ScanMethod::kAllToAll;
      run.layout.degrees = PerAxis(1, 1, ranks, 1);
      for (const Recompute recompute :
           {Recompute::kNone, Recompute::kSelective, Recompute::kFull}) {
        run.recompute = recompute;
        runs.push_back(run);
      }
      run.layout.degrees = PerAxis(1, 2, ranks, 1);
      run.layout.zero = ranks == 2 ? 3 : 1;
      run.overlap = ranks == 2;
      run.offload_activations = true;
      run.tcp = groups == 2;
      runs.push_back(run);
      run = runs.front();
      run.layout.degrees = PerAxis(1, 1, ranks, 8 / ranks);
      run.layout.sequence_parallel = true;
      run.tensor_overlap = TensorOverlap::kHalves;
      runs.push_back(run);
      run.layout.sequence_parallel = false;
      run.tensor_overlap = TensorOverlap::kNone;
      run.recompute = Recompute::kSelective;
      runs.push_back(run);
      run = runs.front();
      run.layout.degrees = PerAxis(2, 1, ranks, 1);
      run.schedule = PipelineSchedule::kZeroBubble;
      runs.push_back(run);
    }
    ExpectLike(alone, runs);
    ExpectResumes(alone, runs.back(), alone);
  }
}

// Uneven shares of three groups, of 12 and 6 heads, and attention between scans.
TEST_F(Layouts, ScansByHeadsBesideAttention_TrainLikeOneRank) {
  Case hybrid = Alone(SmallHybrid(5, /*llama=*/true), 2);
  hybrid.model.sizes["heads"] = 8;
  hybrid.model.sizes["mamba_heads"] = 18;
  hybrid.model.sizes["mamba_head_width"] = 4;
  hybrid.model.sizes["mamba_groups"] = 3;
  Case split = hybrid;
  split.scan_method = ScanMethod::kAllToAll;
  split.layout.degrees = PerAxis(1, 1, 2, 2);
  std::vector<Case> runs;
  for (const ContextMethod method :
       {ContextMethod::kRing, ContextMethod::kAllGather, ContextMethod::kAllToAll}) {
    split.context_method = method;
    runs.push_back(split);
  }
  ExpectLike(hybrid, runs);
}

TEST_F(Layouts, ScansByHeadsBesideOtherWork_HaveTheSameBits) {
  for (const PerAxis& degrees : {PerAxis(1, 1, 2, 1), PerAxis(1, 1, 2, 4)}) {
    Case run = Alone(SmallMamba2(), 2);
    run.model.sizes["heads"] = 16;
    run.scan_method = ScanMethod::kAllToAll;
    run.layout.degrees = degrees;
    run.documents = true;
    run.overlap = false;
    const RankResult plain = harness_.Train(run)[0];
    run.overlap = true;
    for (const Recompute recompute : {Recompute::kNone, Recompute::kSelective, Recompute::kFull}) {
      run.recompute = recompute;
      SCOPED_TRACE(run.ToString());
      ExpectSameBits(plain, harness_.Train(run)[0]);
    }
  }
}

// Overlap moves collectives to another stream or another place of backward, and computes the same.
TEST_F(Layouts, OverlapOfTensorCollectives_ChangesNoBits) {
  std::vector<Case> runs;
  for (const ModelDescription& model : {SmallGpt2(), SmallLlama()}) {
    for (const bool rows : {false, true}) {
      for (const Recompute recompute :
           {Recompute::kNone, Recompute::kSelective, Recompute::kFull}) {
        Case run;
        run.model = model;
        run.layout.degrees = PerAxis(1, 1, 1, 2);
        run.layout.sequence_parallel = rows;
        run.recompute = recompute;
        runs.push_back(run);
      }
      Case run = runs.back();
      run.recompute = Recompute::kNone;
      run.layout.degrees = PerAxis(2, 1, 1, 2);
      run.schedule = PipelineSchedule::kZeroBubble;
      runs.push_back(run);
      run.schedule = PipelineSchedule::kOneForwardOneBackward;
      run.layout.degrees = PerAxis(1, 2, 2, 2);
      run.layout.zero = 3;
      runs.push_back(run);
      run.layout = {};
      run.layout.degrees = PerAxis(1, 1, 1, 3);
      run.model.sizes["hidden"] = 48;
      run.layout.sequence_parallel = false;
      run.tensor_weights = {3, 1, 2};
      run.offload_activations = true;
      run.tcp = model.family == "llama" && rows;
      runs.push_back(run);
    }
  }
  for (Case& run : runs) {
    SCOPED_TRACE(run.ToString());
    run.steps = 6;
    run.layout.global_batch = 16;
    run.layout.micro_batch = 2;
    run.tensor_overlap = TensorOverlap::kNone;
    const RankResult plain = harness_.Train(run)[0];
    run.tensor_overlap = TensorOverlap::kBackward;
    ExpectSameBits(plain, harness_.Train(run)[0]);
    // Without overlap, kBackward keeps its order but runs on the computing stream.
    run.overlap = false;
    ExpectSameBits(plain, harness_.Train(run)[0]);
    if (run.schedule != PipelineSchedule::kZeroBubble) {
      // The gradients of norms are summed over half-batches, in the same order in every run.
      run.tensor_overlap = TensorOverlap::kHalves;
      const RankResult halves = harness_.Train(run)[0];
      ExpectClose(plain, halves);
      run.overlap = true;
      ExpectSameBits(halves, harness_.Train(run)[0]);
      run.overlap = false;
    }
    if (!run.layout.sequence_parallel) continue;
    // GEMMs that are cut into chunks round differently, but alike in every run.
    run.tensor_overlap = TensorOverlap::kChunked;
    const RankResult chunked = harness_.Train(run)[0];
    ExpectClose(plain, chunked);
    run.overlap = true;
    ExpectSameBits(chunked, harness_.Train(run)[0]);
  }
}

// Each half-batch is gathered for the next layer right behind its own reduce-scatter, between
// blocks too. Behind the reduce-scatter of the other half-batch, the computing stream would wait
// for it.
TEST_F(Layouts, HalfBatches_AreGatheredRightBehindTheirReduceScatters) {
  for (const auto& [data, zero] : {std::pair(1, 0), std::pair(2, 1), std::pair(2, 3)}) {
    Case run = Alone(SmallLlama(4), 2);
    run.layout.degrees = PerAxis(1, data, 1, 2);
    run.layout.zero = zero;
    run.layout.sequence_parallel = true;
    run.tensor_overlap = TensorOverlap::kHalves;
    run.steps = 1;
    SCOPED_TRACE(run.ToString());
    std::vector<std::string> logs(run.ranks());
    run.wrap = [&](std::unique_ptr<Communicator> world) {
      std::string* const log = &logs[world->rank()];
      return std::make_unique<TensorLog>(std::move(world), log);
    };
    harness_.Train(run);
    // The embedding, what is within and between four blocks, and the head.
    std::string expected = "RRGG";
    for (int pair = 0; pair < 7; ++pair) expected += "RGRG";
    expected += "RRGG";
    for (const std::string& log : logs) EXPECT_THAT(log, ::testing::HasSubstr(expected));
  }
}

// Combined with the other options that change the order of forward and backward.
TEST_F(Layouts, HalfBatches_TrainLikeOneRank) {
  ModelDescription one_group = SmallMamba2(4);
  one_group.sizes["groups"] = 1;
  for (const ModelDescription& model : {SmallGpt2(4), SmallLlama(4), one_group}) {
    const Case alone = Alone(model, 6);
    std::vector<Case> runs;
    const auto add = [&](const PerAxis& degrees, bool sequence = true) -> Case& {
      Case run = alone;
      run.tensor_overlap = TensorOverlap::kHalves;
      run.layout.degrees = degrees;
      run.layout.sequence_parallel = sequence;
      runs.push_back(run);
      return runs.back();
    };
    add(PerAxis(1, 1, 1, 2), /*sequence=*/false);
    add(PerAxis(1, 1, 1, 2));
    Case& uneven = add(PerAxis(1, 1, 1, 3));
    uneven.tensor_weights = {3, 1, 2};
    uneven.tcp = model.family == "llama";
    for (const Recompute recompute : {Recompute::kSelective, Recompute::kFull}) {
      add(PerAxis(1, 1, 1, 2)).recompute = recompute;
      add(PerAxis(1, 1, 1, 2), /*sequence=*/false).recompute = recompute;
    }
    add(PerAxis(1, 2, 1, 2)).layout.zero = 1;
    Case& sharded = add(PerAxis(1, 2, 1, 4));
    sharded.layout.zero = 3;
    sharded.recompute = Recompute::kFull;
    // Without sequence parallelism and resident parameters, norms are in the rotating buffers of
    // their blocks, so that the next block cannot begin early.
    Case& rotating = add(PerAxis(1, 2, 1, 2), /*sequence=*/false);
    rotating.layout.zero = 3;
    rotating.resident_elements = 0;
    for (const ContextMethod method :
         {ContextMethod::kRing, ContextMethod::kAllGather, ContextMethod::kAllToAll}) {
      add(PerAxis(1, 1, 2, 2)).context_method = method;
    }
    add(PerAxis(2, 1, 1, 2));
    add(PerAxis(2, 1, 2, 2)).schedule = PipelineSchedule::kInterleaved;
    runs.back().layout.pipeline_chunks = 2;
    add(PerAxis(1, 1, 1, 2)).offload_activations = true;
    add(PerAxis(2, 1, 1, 2)).recompute = Recompute::kFull;
    add(PerAxis(2, 1, 1, 2)).recompute = Recompute::kSelective;
    ExpectLike(alone, runs);
  }
}

// Including three ranks of which two share a key/value head, uneven shares, and sockets.
TEST_F(Layouts, GemmsInChunks_TrainLikeOneRank) {
  for (const ModelDescription& model : {SmallGpt2(4), SmallLlama(4)}) {
    const Case alone = Alone(model, 3);
    Case split = alone;
    split.layout.sequence_parallel = true;
    split.tensor_overlap = TensorOverlap::kChunked;
    std::vector<Case> runs;
    for (const PerAxis& degrees : {PerAxis(1, 1, 1, 2), PerAxis(1, 1, 1, 3), PerAxis(1, 2, 1, 4),
                                   PerAxis(2, 1, 2, 2), PerAxis(2, 1, 1, 3)}) {
      runs.push_back(split);
      runs.back().layout.degrees = degrees;
      if (degrees[Axis::kPipeline] > 1) runs.back().schedule = PipelineSchedule::kZeroBubble;
      if (degrees[Axis::kData] > 1) runs.back().recompute = Recompute::kFull;
    }
    runs[1].tensor_weights = {3, 1, 2};
    runs[1].tcp = model.family == "llama";
    ExpectLike(alone, runs);
  }
}

TEST_F(Layouts, StateOfARank_HasTheBytesOfTheFormulas) {
  const auto state = [this](Case run) {
    run.steps = 1;
    return harness_.Train(run)[0].state_bytes;
  };
  for (const int ranks : {2, 4, 8}) {
    Case run = Data(ranks);
    run.layout.micro_batch = 16 / ranks;  // no accumulation
    const auto stage = [&](int zero) {
      run.layout.zero = zero;
      return Count(run);
    };
    // fp32 parameters and gradients whole, moments of the own part.
    Elements e = stage(0);
    EXPECT_EQ(state(run), 16 * e.all);
    e = stage(1);
    EXPECT_EQ(state(run), 8 * e.all + 8 * e.all / ranks);
    // Gradients of the own part; whole gradients of blocks only in two rotating buffers.
    e = stage(2);
    EXPECT_EQ(state(run), 4 * e.all + 12 * e.all / ranks + 4 * (e.all - e.blocks) + 8 * e.largest);
    // The same for parameters.
    e = stage(3);
    EXPECT_EQ(state(run),
              12 * e.all / ranks + 4 * e.blocks / ranks + 8 * (e.all - e.blocks) + 16 * e.largest);
  }
}

}  // namespace
}  // namespace muster::parallel::parity
