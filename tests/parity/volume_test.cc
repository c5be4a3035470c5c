// What a step sends, along every axis, is what the formula of the method says: no more, or
// something is sent that nobody needs; no less, or something is not summed.
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

// Bytes that a rank sends in a step along the axes that share layers, sequences and matrices.
struct Sent {
  int64_t pipeline = 0, context = 0, tensor = 0;
};

// What a ring, or an exchange of equal parts, sends of so many fp32.
int64_t Moved(int64_t count, int size) { return kFloat * count * (size - 1) / size; }

// An all-reduce: a reduce-scatter and an all-gather, or everything to everyone where it is small.
int64_t AllReduced(int64_t count, int size) {
  return kFloat * count <= kOneRoundBytesMax ? kFloat * count * (size - 1) : 2 * Moved(count, size);
}

class Formula {
 public:
  Formula(const Case& run, const PerAxis& coordinate)
      : run_(run),
        part_(*PartOf(run, coordinate)),
        model_(*MakeModel(run.model, part_)),
        stages_(run.layout.degrees[Axis::kPipeline]),
        stage_(coordinate[Axis::kPipeline]),
        context_(run.layout.degrees[Axis::kContext]),
        tensor_(run.layout.degrees[Axis::kTensor]),
        tokens_(run.layout.micro_batch * Harness::kSequence / context_),
        hidden_(run.model.sizes.at("hidden")),
        micro_batches_(run.layout.global_batch / run.layout.micro_batch /
                       run.layout.degrees[Axis::kData]) {
    const int head = static_cast<int>(run.model.sizes.at("layers")) + 1;
    for (const BlockRange& part : part_.parts) {
      blocks_ += part.end - part.begin;
      if (part.begin == 0) has_embedding_ = true;
      if (part.end == head + 1) has_head_ = true;
    }
    blocks_ -= has_embedding_ + has_head_;
  }

  Sent Step() const {
    return {Pipeline(), micro_batches_ * blocks_ * Attention(),
            micro_batches_ * Matrices() + PartialGradients()};
  }

 private:
  // Every part sends its output on and the gradient of its input back.
  int64_t Pipeline() const {
    if (stages_ == 1) return 0;
    const int64_t rows = tokens_ / (run_.layout.sequence_parallel ? tensor_ : 1);
    const auto chunks = static_cast<int64_t>(part_.parts.size());
    const int64_t messages = 2 * chunks - has_embedding_ - has_head_;
    int64_t bytes = micro_batches_ * messages * kFloat * rows * hidden_;
    // A tied table's gradient, or the part of it that the rank owns, goes once to the other stage.
    for (ParameterId id = 0; id < model_->parameters().size(); ++id) {
      if (!model_->parameters().at(id).on_two_stages) continue;
      const FlatLayout layout = Layout();
      bytes += kFloat * layout.Part(layout.bucket_of(id), 0).size();
    }
    return bytes;
  }

  // Attention of one block, forward and backward (context_attention.h).
  int64_t Attention() const {
    if (context_ == 1) return 0;
    const int64_t heads = run_.model.sizes.at("heads"), width = hidden_ / heads;
    const auto found = run_.model.sizes.find("kv_heads");
    const int64_t kv_heads = found == run_.model.sizes.end() ? heads : found->second;
    const int64_t keys = kFloat * tokens_ * (kv_heads / tensor_) * width;
    const int64_t queries = kFloat * tokens_ * (heads / tensor_) * width;
    const int64_t forwards = run_.recompute == Recompute::kFull ? 2 : 1;
    if (run_.context_method == ContextMethod::kAllToAll) {
      const int64_t copies = std::max<int64_t>(kv_heads, context_) / kv_heads;
      return (forwards + 1) * (context_ - 1) * (2 * queries + 2 * copies * keys) / context_;
    }
    return (context_ - 1) * (forwards * 2 * keys + 4 * keys);
  }

  // The collectives on hidden states [T,C] of one micro-batch: all-reduces, or, with sequence
  // parallelism, gathers and scatters, each half of one.
  int64_t Matrices() const {
    if (tensor_ == 1) return 0;
    const bool rows = run_.layout.sequence_parallel;
    // Forward ends two pairs of matrices, backward begins two. With rows each pair is also begun
    // (and ended), and backward gathers the input of each once more. A split backward gathers the
    // gradients once more too.
    int64_t per_block = rows ? 4 + 6 : 2 + 2;
    if (rows && part_.split_backward) per_block += 2;
    // Forward once more, but for its last product. Where gathers overlap, the input of the second
    // pair stays gathered until backward needs it.
    if (run_.recompute == Recompute::kFull) {
      const bool stays = run_.tensor_overlap != TensorOverlap::kNone;
      per_block += rows ? (stays ? 2 : 3) : 1;
    }
    // The embedding's sum, and the gather of its gradient; the head's input, and the sum of its
    // gradient.
    const int64_t collectives =
        blocks_ * per_block + has_embedding_ * (rows ? 2 : 1) + has_head_ * (rows ? 2 : 1);
    // Three numbers per token from every rank for the loss.
    const int64_t statistics = has_head_ * Moved(tensor_ * tokens_ * 3, tensor_);
    const int64_t states = tokens_ * hidden_;
    return collectives * (rows ? Moved(states, tensor_) : AllReduced(states, tensor_)) + statistics;
  }

  // Norms see this rank's rows only: their gradients are summed once a step.
  int64_t PartialGradients() const {
    int64_t bytes = 0;
    const FlatLayout layout = Layout();
    for (int i = 0; i < static_cast<int>(layout.buckets().size()); ++i) {
      if (layout.buckets()[i].partial) bytes += AllReduced(layout.Part(i, 0).size(), tensor_);
    }
    return bytes;
  }

  FlatLayout Layout() const {
    const int shards = run_.layout.EffectiveShards();
    const int ranks = run_.layout.degrees[Axis::kData] * context_;
    std::vector<int> begins;
    for (const BlockRange& group : GradientGroups(
             {.schedule = run_.schedule, .stages = stages_, .chunks = run_.layout.pipeline_chunks},
             *model_, stage_)) {
      begins.push_back(group.begin);
    }
    return FlatLayout(model_->parameters(), {.bucket_bytes = run_.bucket_bytes,
                                             .shards = shards,
                                             .replicas = ranks / shards,
                                             .by_block = run_.layout.zero >= 2,
                                             .resident_elements = run_.resident_elements,
                                             .part_begins = begins});
  }

  const Case& run_;
  const ModelParallel part_;
  const std::unique_ptr<Model> model_;
  const int stages_, stage_, context_, tensor_;
  const int64_t tokens_, hidden_, micro_batches_;
  int64_t blocks_ = 0;
  bool has_embedding_ = false, has_head_ = false;
};

class Volume : public ::testing::Test {
 protected:
  // Of one step, on every rank: what a run of three sends beyond one of two.
  void ExpectFormula(Case run) {
    SCOPED_TRACE(run.ToString());
    run.steps = 2;
    const std::vector<RankResult> shorter = harness_.Train(run);
    run.steps = 3;
    const std::vector<RankResult> longer = harness_.Train(run);
    const Mesh mesh = *Mesh::Make({.degrees = run.layout.degrees}, run.ranks());
    for (int rank = 0; rank < run.ranks(); ++rank) {
      SCOPED_TRACE(rank);
      const Sent expected = Formula(run, mesh.CoordinateOf(rank)).Step();
      const auto step = [&](int64_t RankResult::*bytes) {
        return longer[rank].*bytes - shorter[rank].*bytes;
      };
      EXPECT_EQ(step(&RankResult::pipeline_bytes), expected.pipeline);
      EXPECT_EQ(step(&RankResult::context_bytes), expected.context);
      EXPECT_EQ(step(&RankResult::tensor_bytes), expected.tensor);
      // Losses, counts, the stop vote and square sums: nothing that grows with the model.
      const int64_t values =
          2 * run.layout.global_batch / run.layout.micro_batch + 1 + 2 * run.ranks();
      EXPECT_EQ(step(&RankResult::world_bytes), AllReduced(values, run.ranks()));
    }
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
        for (const TensorOverlap overlap :
             {TensorOverlap::kNone, TensorOverlap::kBackward, TensorOverlap::kChunked}) {
          if (overlap == TensorOverlap::kChunked && !rows) continue;
          run.tensor_overlap = overlap;
          ExpectFormula(run);
        }
      }
    }
  }
  Case wide = Split(SmallGpt2(), PerAxis(1, 2, 1, 4));
  wide.layout.sequence_parallel = true;
  wide.layout.zero = 1;
  ExpectFormula(wide);
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
        run.model = SmallLlama();
        ExpectFormula(run);
      }
    }
  }
}

TEST_F(Volume, OfPipelines_IsThatOfTheFormula) {
  for (const ModelDescription& model : {SmallGpt2(4), SmallLlama(4)}) {
    for (const PipelineSchedule schedule :
         {PipelineSchedule::kGPipe, PipelineSchedule::kOneForwardOneBackward,
          PipelineSchedule::kInterleaved, PipelineSchedule::kZeroBubble}) {
      for (const int zero : {0, 1, 3}) {
        Case run = Split(model, PerAxis(2, 2, 1, 1));
        run.schedule = schedule;
        run.layout.pipeline_chunks = schedule == PipelineSchedule::kInterleaved ? 2 : 1;
        run.layout.zero = zero;
        ExpectFormula(run);
      }
    }
    Case deep = Split(model, PerAxis(4, 1, 1, 1));
    deep.schedule = PipelineSchedule::kZeroBubble;
    ExpectFormula(deep);
  }
}

// Each axis sends what it sends on its own, of what the other axes leave on a rank.
TEST_F(Volume, OfAxesTogether_IsThatOfTheFormulas) {
  for (const ModelDescription& model : {SmallGpt2(4), SmallLlama(4)}) {
    for (const bool rows : {false, true}) {
      for (const PipelineSchedule schedule :
           {PipelineSchedule::kOneForwardOneBackward, PipelineSchedule::kZeroBubble}) {
        Case run = Split(model, PerAxis(2, 1, 2, 2));
        run.schedule = schedule;
        run.layout.sequence_parallel = rows;
        run.layout.zero = rows ? 2 : 0;
        ExpectFormula(run);
      }
    }
  }
}

TEST_F(Volume, OfDataParallelismAndZero_IsThatOfTheMethod) {
  for (Case run : {Data(4), Data(4, 1), Data(4, 2), Data(4, 3), Data(8, 1, 4), Data(8, 3, 4)}) {
    for (const bool reshard : {true, false}) {
      run.reshard_after_forward = reshard;
      SCOPED_TRACE(run.ToString());
      run.steps = 3;
      const Elements elements = Count(run);
      const int ranks = run.layout.degrees[Axis::kData];
      const int shards = run.layout.EffectiveShards(), replicas = ranks / shards;
      const int64_t n = run.layout.global_batch / run.layout.micro_batch / ranks;
      // What a ring, or an exchange of equal parts, sends of so many fp32.
      const auto moved = [](int64_t count, int size) { return 4 * count * (size - 1) / size; };
      // Reduce-scatter: once a step, or for every micro-batch.
      const int64_t reductions = run.layout.zero >= 2 ? 3 * n : 3;
      // All-gather: what stays whole after every update and at the start; blocks on demand.
      const int64_t kept = reshard ? std::min<int64_t>(2, elements.units) : elements.units;
      const int64_t block = run.layout.zero == 3 ? elements.blocks : 0;
      ASSERT_TRUE(block == 0 || block == elements.units * elements.largest);
      const int64_t blocks = elements.units + (2 * n - 1) * (elements.units - kept);
      for (const RankResult& result : harness_.Train(run)) {
        EXPECT_EQ(result.reduced_bytes, reductions * moved(elements.all, shards));
        EXPECT_EQ(result.gathered_bytes,
                  4 * moved(elements.all - block, shards) +
                      (block > 0 ? 3 * blocks * moved(elements.largest, shards) : 0));
        // An all-reduce is a reduce-scatter and an all-gather; uneven parts differ by a few lines.
        EXPECT_NEAR(result.replica_bytes, 3 * 2 * moved(elements.all / shards, replicas),
                    0.1 * result.replica_bytes);
      }
    }
  }
}

}  // namespace
}  // namespace muster::parallel::parity
