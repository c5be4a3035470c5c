// What a step sends along every axis is exactly what the formula of the method says. More would be
// data that nobody needs, less would be something that is not summed.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "parallel/comm/collective_plan.h"
#include "parallel/optim/flat_layout.h"
#include "tests/parity/harness.h"
#include "tests/support/status_matchers.h"

namespace muster::parallel::parity {
namespace {

constexpr int64_t kFloat = 4;  // bytes

Case Split(const ModelDescription& model, const PerAxis& degrees) {
  Case run;
  run.model = model;
  run.layout.degrees = degrees;
  run.layout.global_batch = 16;
  run.layout.micro_batch = 2;
  return run;
}

// Bytes that a rank sends in an all-reduce: a reduce-scatter and an all-gather, or where it is
// small, all data to all ranks.
int64_t AllReduced(int64_t count, int size) {
  return kFloat * count <= kOneRoundBytesMax ? kFloat * count * (size - 1)
                                             : 2 * kFloat * count * (size - 1) / size;
}

class Volume : public ::testing::Test {
 protected:
  // Compares one step on every rank: what a run of three steps sends beyond a run of two.
  void ExpectFormula(Case run) {
    SCOPED_TRACE(run.ToString());
    run.steps = 2;
    const std::vector<RankResult> shorter = harness_.Train(run);
    run.steps = 3;
    const std::vector<RankResult> longer = harness_.Train(run);
    for (int rank = 0; rank < run.ranks(); ++rank) {
      SCOPED_TRACE(rank);
      const StepVolume& expected = longer[rank].predicted;
      const auto step = [&](int64_t RankResult::*bytes) {
        return longer[rank].*bytes - shorter[rank].*bytes;
      };
      EXPECT_EQ(step(&RankResult::pipeline_bytes), expected.pipeline);
      EXPECT_EQ(step(&RankResult::context_bytes), expected.context);
      EXPECT_EQ(step(&RankResult::tensor_bytes), expected.tensor);
      EXPECT_EQ(step(&RankResult::key_bytes), expected.keys);
      EXPECT_EQ(longer[0].predicted.keys > 0, SharesKeys(run));
      EXPECT_EQ(step(&RankResult::reduced_bytes), expected.gradients);
      EXPECT_EQ(step(&RankResult::replica_bytes), expected.replicas);
      EXPECT_EQ(step(&RankResult::gathered_bytes), expected.parameters);
      // Losses, counts, the stop vote and square sums: nothing that grows with the model.
      const int64_t values =
          2 * run.layout.global_batch / run.layout.micro_batch + 1 + 2 * run.ranks();
      EXPECT_EQ(step(&RankResult::world_bytes), AllReduced(values, run.ranks()));
    }
  }
  static bool SharesKeys(const Case& run) {
    const auto found = run.model.sizes.find("kv_heads");
    return found != run.model.sizes.end() && found->second < run.layout.degrees[Axis::kTensor];
  }
  Harness harness_;
};

TEST_F(Volume, OfTensorParallelism_IsThatOfTheFormula) {
  for (const ModelDescription& model : {SmallGpt2(), SmallLlama()}) {
    for (const bool rows : {false, true}) {
      for (const Recompute recompute :
           {Recompute::kNone, Recompute::kSelective, Recompute::kFull}) {
        Case run = Split(model, PerAxis(1, 1, 1, 2));
        run.layout.sequence_parallel = rows;
        run.recompute = recompute;
        for (const TensorOverlap overlap : {TensorOverlap::kNone, TensorOverlap::kBackward,
                                            TensorOverlap::kChunked, TensorOverlap::kHalves}) {
          if (overlap == TensorOverlap::kChunked && !rows) continue;
          run.tensor_overlap = overlap;
          ExpectFormula(run);
          if (recompute != Recompute::kFull) continue;
          run.recompute_blocks = 2;
          ExpectFormula(run);
          run.recompute_blocks = 0;
        }
      }
    }
  }
  Case wide = Split(SmallGpt2(), PerAxis(1, 2, 1, 4));
  wide.layout.sequence_parallel = true;
  wide.layout.zero = 1;
  ExpectFormula(wide);
}

// Twelve query heads over two key/value heads: of three ranks, the last one shares no head.
TEST_F(Volume, OfSharedKeyHeads_IsThatOfTheFormula) {
  for (const int ranks : {3, 4}) {
    for (const bool rows : {false, true}) {
      Case run = Split(SmallLlama(), PerAxis(1, 1, 1, ranks));
      run.model.sizes["kv_heads"] = 2;
      run.layout.sequence_parallel = rows && ranks == 4;
      ExpectFormula(run);
    }
  }
}

// Where ranks share groups of state-space heads, sums of the norm are added up over the ranks.
TEST_F(Volume, OfStateSpaceHeads_IsThatOfTheFormula) {
  for (const int groups : {1, 2, 6}) {
    for (const Recompute recompute : {Recompute::kNone, Recompute::kSelective, Recompute::kFull}) {
      Case run = Split(SmallMamba2(), PerAxis(1, 1, 1, 2));
      run.model.sizes["groups"] = groups;
      run.recompute = recompute;
      ExpectFormula(run);
      run.layout.sequence_parallel = true;
      ExpectFormula(run);
      run.tensor_overlap = TensorOverlap::kHalves;
      ExpectFormula(run);
      // The first has heads of the other's group, where there are two.
      run.tensor_weights = {5, 1};
      ExpectFormula(run);
      run.tensor_weights.clear();
      run.layout.degrees = PerAxis(1, 2, 1, 4);
      run.layout.zero = 3;
      ExpectFormula(run);
    }
  }
}

// Blocks that exchange different amounts, and recompute some of them.
TEST_F(Volume, OfHybridStacks_IsThatOfTheFormula) {
  for (const Recompute recompute : {Recompute::kNone, Recompute::kSelective, Recompute::kFull}) {
    for (const int blocks : {0, 1, 3}) {
      Case run = Split(SmallHybrid(5), PerAxis(1, 1, 1, 4));
      run.recompute = recompute;
      if (recompute != Recompute::kNone) run.recompute_blocks = blocks;
      ExpectFormula(run);
      run.layout.sequence_parallel = true;
      ExpectFormula(run);
      run.layout.degrees = PerAxis(2, 1, 1, 2);
      ExpectFormula(run);
    }
  }
}

TEST_F(Volume, OfContextParallelism_IsThatOfTheFormula) {
  for (const ContextMethod method :
       {ContextMethod::kRing, ContextMethod::kAllGather, ContextMethod::kAllToAll}) {
    for (const int ranks : {2, 4}) {
      for (const Recompute recompute : {Recompute::kNone, Recompute::kFull}) {
        Case run = Split(SmallGpt2(), PerAxis(1, 1, ranks, 1));
        run.context_method = method;
        run.recompute = recompute;
        ExpectFormula(run);
        run.recompute_blocks = recompute == Recompute::kFull ? 1 : 0;
        run.model = SmallLlama();
        ExpectFormula(run);
      }
    }
  }
}

// States and the ends of segments: nothing that grows with the sequence.
TEST_F(Volume, OfStatesPassedBetweenContextRanks_IsThatOfTheFormula) {
  for (const int ranks : {2, 4}) {
    for (const Recompute recompute : {Recompute::kNone, Recompute::kSelective, Recompute::kFull}) {
      Case run = Split(SmallMamba2(), PerAxis(1, 1, ranks, 1));
      run.recompute = recompute;
      ExpectFormula(run);
      run.context_method = ContextMethod::kAllToAll;
      run.recompute_blocks = recompute == Recompute::kFull ? 1 : 0;
      ExpectFormula(run);
      // Shares of heads, and ranks that share groups of them.
      run.layout.degrees = PerAxis(1, 1, 2, ranks);
      run.layout.sequence_parallel = ranks == 4;
      ExpectFormula(run);
      run.tensor_weights = {3, 1, 1, 1};
      run.tensor_weights.resize(static_cast<size_t>(ranks));
      ExpectFormula(run);
    }
    Case deep = Split(SmallMamba2(4), PerAxis(2, 1, ranks, 1));
    deep.schedule = PipelineSchedule::kZeroBubble;
    ExpectFormula(deep);
  }
  // Attention exchanges in some blocks, Mamba-2 in others.
  for (const Recompute recompute : {Recompute::kNone, Recompute::kFull}) {
    Case hybrid = Split(SmallHybrid(5), PerAxis(1, 1, 2, 2));
    hybrid.recompute = recompute;
    ExpectFormula(hybrid);
  }
  // Computed by hand: of 3 blocks and 8 micro-batches of 2 sequences, with 2 segments each, what
  // leaves them (6 heads of 10 x 12, and their decays) both ways, and 3 tokens of 108 channels.
  Case run = Split(SmallMamba2(), PerAxis(1, 1, 2, 1));
  run.steps = 1;
  EXPECT_EQ(harness_.Train(run)[0].predicted.context,
            3 * 8 * 2 * 2 * 2 * kFloat * (6 * (10 * 12 + 1) + 3 * 108));
}

// Three tensor ranks share two groups, and so do four context ranks.
TEST_F(Volume, OfScansByHeads_IsThatOfTheFormula) {
  for (const Recompute recompute : {Recompute::kNone, Recompute::kSelective, Recompute::kFull}) {
    for (const PerAxis& degrees :
         {PerAxis(1, 1, 2, 1), PerAxis(1, 1, 4, 1), PerAxis(1, 1, 2, 2), PerAxis(1, 1, 2, 4)}) {
      Case run = Split(SmallMamba2(), degrees);
      run.model.sizes["heads"] = 16;
      run.scan_method = ScanMethod::kAllToAll;
      run.recompute = recompute;
      ExpectFormula(run);
      run.recompute_blocks = recompute == Recompute::kFull ? 1 : 0;
      run.layout.sequence_parallel = degrees[Axis::kTensor] > 1;
      ExpectFormula(run);
    }
    Case hybrid = Split(SmallHybrid(5), PerAxis(1, 1, 2, 1));
    hybrid.scan_method = ScanMethod::kAllToAll;
    hybrid.recompute = recompute;
    ExpectFormula(hybrid);
  }
  // Computed by hand: of 3 blocks and 8 micro-batches of 2 sequences of 16 tokens, half of which go
  // to the other rank, which has 3 heads of 10 and one group of 12: x and y, B and C, dt; both
  // ways.
  Case run = Split(SmallMamba2(), PerAxis(1, 1, 2, 1));
  run.scan_method = ScanMethod::kAllToAll;
  run.steps = 1;
  EXPECT_EQ(harness_.Train(run)[0].predicted.context,
            3 * 8 * 2 * kFloat * 2 * Harness::kSequence / 2 * (2 * 3 * 10 + 2 * 12 + 3));
}

TEST_F(Volume, OfPipelines_IsThatOfTheFormula) {
  for (const ModelDescription& model :
       {SmallGpt2(4), SmallLlama(4), SmallMamba2(4), SmallHybrid(4)}) {
    for (const PipelineSchedule schedule :
         {PipelineSchedule::kGPipe, PipelineSchedule::kOneForwardOneBackward,
          PipelineSchedule::kInterleaved, PipelineSchedule::kZeroBubble}) {
      for (const int zero : {0, 1, 3}) {
        Case run = Split(model, PerAxis(2, 2, 1, 1));
        run.schedule = schedule;
        run.layout.pipeline_chunks = schedule == PipelineSchedule::kInterleaved ? 2 : 1;
        run.layout.zero = zero;
        ExpectFormula(run);
        if (zero < 3) continue;
        run.reshard_after_forward = false;
        ExpectFormula(run);
      }
    }
    Case deep = Split(model, PerAxis(4, 1, 1, 1));
    deep.schedule = PipelineSchedule::kZeroBubble;
    ExpectFormula(deep);
  }
}

// Each axis sends what it would send alone, of the part that the other axes leave to a rank.
TEST_F(Volume, OfSeveralAxes_IsThatOfTheFormulas) {
  for (const ModelDescription& model : {SmallGpt2(4), SmallLlama(4), SmallMamba2(4)}) {
    for (const bool rows : {false, true}) {
      for (const PipelineSchedule schedule :
           {PipelineSchedule::kOneForwardOneBackward, PipelineSchedule::kZeroBubble}) {
        Case run = Split(model, PerAxis(2, 1, 2, 2));
        run.schedule = schedule;
        run.layout.sequence_parallel = rows;
        run.layout.zero = rows ? 2 : 0;
        ExpectFormula(run);
        run.context_method = ContextMethod::kAllToAll;
        ExpectFormula(run);
      }
    }
  }
}

// 16-bit gradients are half as many bytes, exchanged in equal parts and summed by their owner.
TEST_F(Volume, OfGradientsInSixteenBits_IsThatOfTheMethod) {
  for (Case run : {Data(2), Data(4), Data(4, 1), Data(4, 3), Data(8, 1, 4)}) {
    const auto reduced = [&] {
      run.steps = 1;
      const StepVolume sent = harness_.Train(run)[0].predicted;
      return sent.gradients + sent.replicas;
    };
    run.bucket_bytes = 1 << 20;  // large enough for a ring
    const int64_t whole = reduced();
    run.adjust = [](TrainerOptions& options) { options.gradient_wire = kernels::DType::kBF16; };
    EXPECT_EQ(2 * reduced(), whole) << run.ToString();
    ExpectFormula(run);
  }
}

// Shares by weight. Hidden states have all columns on every rank, so uneven shares send the same
// for them; other exchanges depend on a rank's own share.
TEST_F(Volume, OfUnevenShares_IsThatOfTheFormula) {
  for (const ModelDescription& model : {SmallGpt2(), SmallLlama(), SmallMamba2()}) {
    for (const bool rows : {false, true}) {
      Case run = Split(model, PerAxis(1, 2, 1, 2));
      run.tensor_weights = {3, 1};
      run.layout.sequence_parallel = rows;
      run.layout.zero = rows ? 3 : 0;
      ExpectFormula(run);
      run.layout.degrees = PerAxis(1, 1, 2, 2);
      ExpectFormula(run);
    }
  }
}

// Top-K sends the selected elements as pairs to all ranks, signs go as bits. Parameters that are
// excluded, and those that would be larger as pairs, are sent as without compression.
TEST_F(Volume, OfCompressedGradients_IsWhatIsSelected) {
  CompressionOptions top_k;
  top_k.method = CompressionMethod::kTopK;
  top_k.density = 0.03;
  top_k.warmup_steps = 1;
  top_k.exclude = {"*attention*"};
  CompressionOptions sign = top_k;
  sign.method = CompressionMethod::kSign;
  sign.min_elements = 4000;
  CompressionOptions too_much = top_k;
  too_much.density = 0.3;  // on four ranks, pairs would be larger than the whole gradient
  for (const CompressionOptions& compression : {top_k, sign, too_much}) {
    const auto adjust = [compression](TrainerOptions& options) {
      options.compression = compression;
    };
    for (Case run : {Data(2), Data(4), Data(4, 1), Data(8, 1, 4)}) {
      run.adjust = adjust;
      ExpectFormula(run);
    }
    Case together = Split(SmallLlama(4), PerAxis(2, 2, 1, 2));
    together.adjust = adjust;
    ExpectFormula(together);
  }
  // Computed by hand: for every matrix, 8 bytes for 5 of 100 elements to each of 3 other ranks.
  // Vectors are sent whole: at least as much as in a ring, at most all data to all ranks, in whole
  // cache lines.
  Case run = Data(4);
  run.steps = 1;
  run.adjust = [](TrainerOptions& options) {
    options.compression.method = CompressionMethod::kTopK;
    options.compression.density = 0.05;
    options.compression.min_elements = 0;
  };
  int64_t pairs = 0, whole = 0;
  const auto model = *MakeModel(run.model);
  for (ParameterId id = 0; id < model->parameters().size(); ++id) {
    const Parameter& parameter = model->parameters().at(id);
    const int64_t elements = parameter.elements();
    (parameter.global_shape.size() > 1 ? pairs : whole) +=
        parameter.global_shape.size() > 1 ? (5 * elements + 99) / 100 : elements;
  }
  const int64_t sent = harness_.Train(run)[0].predicted.replicas;
  EXPECT_GE(sent, pairs * 8 * 3 + whole * 2 * kFloat * 3 / 4);
  EXPECT_LE(sent, pairs * 8 * 3 + whole * kFloat * 3 * 2);
}

TEST_F(Volume, OfDataParallelismAndZero_IsThatOfTheMethod) {
  for (Case run : {Data(4), Data(4, 1), Data(4, 2), Data(4, 3), Data(8, 1, 4), Data(8, 3, 4)}) {
    for (const bool reshard : {true, false}) {
      run.reshard_after_forward = reshard;
      SCOPED_TRACE(run.ToString());
      ExpectFormula(run);
      run.steps = 3;
      const Elements elements = Count(run);
      const int ranks = run.layout.degrees[Axis::kData];
      const int shards = run.layout.EffectiveShards(), replicas = ranks / shards;
      const int64_t n = run.layout.global_batch / run.layout.micro_batch / ranks;
      // What a rank sends of so many fp32 elements in a ring, or in an exchange of equal parts.
      const auto moved = [](int64_t count, int size) { return 4 * count * (size - 1) / size; };
      // Reduce-scatters, once a step or once a micro-batch.
      const int64_t reductions = run.layout.zero >= 2 ? 3 * n : 3;
      // All-gathers at the start and after every update: of buckets that stay whole, and of the
      // blocks that forward begins with. The other blocks are gathered when they are needed.
      const int64_t kept = reshard ? std::min<int64_t>(2, elements.units) : elements.units;
      const int64_t block = run.layout.zero == 3 ? elements.blocks : 0;
      ASSERT_TRUE(block == 0 || block == elements.units * elements.largest);
      const int64_t blocks = elements.units + (2 * n - 1) * (elements.units - kept);
      for (const RankResult& result : harness_.Train(run)) {
        EXPECT_EQ(result.reduced_bytes, reductions * moved(elements.all, shards));
        EXPECT_EQ(result.gathered_bytes,
                  4 * moved(elements.all - block, shards) +
                      (block > 0 ? (3 * blocks + kept) * moved(elements.largest, shards) : 0));
        EXPECT_EQ(result.replica_bytes, 3 * result.predicted.replicas);
        EXPECT_EQ(result.replica_bytes > 0, replicas > 1);
      }
    }
  }
}

// The tables of embedding and head are sharded like blocks: gathered when they are needed, in
// ZeRO-3, and reduced with every micro-batch. Tables of 131 rows are smaller than a block, those of
// 1031 rows larger than two, so that they have a buffer of their own.
TEST_F(Volume, OfUntiedTablesInZero_IsThatOfBlocks) {
  for (const int64_t vocab : {131, 1031}) {
    for (Case run : {Data(4, 2), Data(4, 3), Data(8, 3, 4)}) {
      run.model = SmallLlama(4);
      run.model.sizes["vocab"] = vocab;
      ExpectFormula(run);
      if (run.layout.zero < 3) continue;
      const auto model = *MakeModel(run.model);
      const FlatLayout layout(model->parameters(), {.bucket_bytes = run.bucket_bytes,
                                                    .shards = 4,
                                                    .replicas = run.ranks() / 4,
                                                    .by_block = true,
                                                    .resident_elements = run.resident_elements});
      std::vector<int64_t> sizes;  // by block
      int64_t resident = 0;
      for (const FlatLayout::Bucket& bucket : layout.buckets()) {
        (bucket.block < 0 ? resident : sizes.emplace_back()) += bucket.range.size();
      }
      ASSERT_EQ(sizes.size(), 6u);
      const int64_t table = sizes[0], block = sizes[1];
      EXPECT_EQ(table > 2 * block, vocab == 1031);
      // Forward needs all of them, and later passes those that the last one has not left: of
      // embedding e, blocks 1 to 4 and head h, backward finds 3, 4 and h with a buffer for e and h,
      // else 4 and h, and forward the mirror image.
      const int64_t passes = 2 * run.layout.global_batch / run.layout.micro_batch / run.ranks() - 1;
      const int64_t later = table + (vocab == 1031 ? 2 : 3) * block;
      const int64_t elements = resident + 2 * table + 4 * block + passes * later;
      run.steps = 1;
      run.adjust = nullptr;
      EXPECT_EQ(harness_.Train(run)[0].predicted.parameters, kFloat * elements * 3 / 4);
    }
  }
}

}  // namespace
}  // namespace muster::parallel::parity
