#include "parallel/train/volume.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/check.h"
#include "parallel/comm/collective_plan.h"
#include "parallel/context/context_attention.h"
#include "parallel/context/scan_by_heads.h"
#include "parallel/context/state_passing.h"
#include "parallel/model/families/family.h"
#include "parallel/model/language_model_sizes.h"
#include "parallel/model/tensor_parallel.h"
#include "parallel/optim/gradient_compressor.h"
#include "parallel/pipeline/schedule.h"

namespace muster::parallel {
namespace {

using kernels::DeviceKind;

constexpr int64_t kFloat = 4;  // bytes

// Bytes that a rank sends of `bytes` in a ring, or in an exchange of `size` equal parts.
int64_t Moved(int64_t bytes, int64_t size) { return bytes * (size - 1) / size; }

// Walks a step as ParameterGatherer does, and adds up the elements of the buckets that it gathers.
// A rotating buffer holds a block until another one needs the buffer, and the next block in the
// direction of the pass is gathered ahead.
class GatheredElements {
 public:
  GatheredElements(const TrainerPlace& place, const FlatLayout& layout)
      : layout_(layout),
        slots_(AssignSlots(layout, /*one_each=*/!place.options.reshard_after_forward)),
        parts_(place.model.parts()),
        plan_(MakePipelinePlan(PipelineShapeOf(place))),
        held_(slots_.size(), -1) {  // after an update no block is whole
    for (size_t i = 0; i < layout.buckets().size(); ++i) {
      const int block = layout.buckets()[i].block;
      if (block < 0) continue;
      bucket_of_block_.resize(std::max<size_t>(bucket_of_block_.size(), block + 1), -1);
      bucket_of_block_[block] = static_cast<int>(i);
    }
  }

  int64_t Of(int rank) {
    const std::vector<PipelineAction>& actions = plan_.ranks[rank];
    std::vector<PipelineAction> work;
    std::copy_if(actions.begin(), actions.end(), std::back_inserter(work),
                 [](const PipelineAction& action) { return IsWork(action.op); });
    for (size_t i = 0; i < work.size(); ++i) {
      const PipelineAction& action = work[i];
      const BlockRange& part = parts_[action.chunk];
      const bool last = plan_.Part(rank, action.chunk) + 1 == plan_.parts();
      // The head of the last part runs with the forward where backward follows directly, else with
      // the backward.
      const auto followed = [&](size_t a, size_t b) {
        return b < work.size() && work[a].op == PipelineOp::kForward &&
               work[b].op != PipelineOp::kForward && work[a].chunk == work[b].chunk &&
               work[a].micro_batch == work[b].micro_batch;
      };
      if (action.op == PipelineOp::kForward) {
        Forward({part.begin, part.end - (last && !followed(i, i + 1) ? 1 : 0)});
      } else if (action.op != PipelineOp::kBackwardWeight) {
        if (last && (i == 0 || !followed(i - 1, i))) Forward({part.end - 1, part.end});
        for (int block = part.end; block-- > part.begin;) Acquire(part, block, block - 1);
      }
    }
    return elements_;
  }

 private:
  static bool IsWork(PipelineOp op) {
    return !IsExchange(op) && op != PipelineOp::kReduceGradients;
  }
  void Forward(const BlockRange& range) {
    for (int block = range.begin; block < range.end; ++block) {
      for (const BlockRange& part : parts_) {
        if (block >= part.begin && block < part.end) Acquire(part, block, block + 1);
      }
    }
  }
  void Acquire(const BlockRange& part, int block, int next) {
    Ensure(block);
    if (next >= part.begin && next < part.end) Ensure(next);
  }
  void Ensure(int block) {
    const bool known = block < static_cast<int>(bucket_of_block_.size());
    const int bucket = known ? bucket_of_block_[block] : -1;
    if (bucket < 0) return;
    int& held = held_[slots_.slot[bucket]];
    if (held != bucket) elements_ += layout_.buckets()[bucket].range.size();
    held = bucket;
  }

  const FlatLayout& layout_;
  const RotatingSlots slots_;
  const std::vector<BlockRange>& parts_;
  const PipelinePlan plan_;
  std::vector<int> bucket_of_block_;  // -1: the block has no bucket of its own
  std::vector<int> held_;             // by slot, the bucket in it
  int64_t elements_ = 0;
};

class Formulas {
 public:
  Formulas(const TrainerPlace& place, const ModelParallel& part, DeviceKind device)
      : place_(place),
        part_(part),
        device_(device),
        held_(TensorShard::Of(place.model.description(), part)),
        layout_(place.model.parameters(), LayoutOptionsOf(place)),
        width_(SizeOf(BatchShapeOf(place).activation)),
        tensor_(place.mesh.degree(Axis::kTensor)),
        context_(place.mesh.degree(Axis::kContext)),
        tokens_(BatchShapeOf(place).tokens()),
        hidden_(place.model.shape().hidden),
        micro_batches_(MicroBatches(place)) {
    const LanguageModelConfig config = ConfigOf(place.model.description());
    const auto head = static_cast<int>(config.blocks.size()) + 1;
    std::vector<BlockRange> ranges = part.parts;
    if (ranges.empty()) ranges.push_back({0, head + 1});
    for (const BlockRange& range : ranges) {
      const int end = range.end < 0 ? head + 1 : range.end;
      for (int i = std::max(range.begin, 1); i < std::min(end, head); ++i) {
        blocks_.push_back({ExchangesOf(config, config.blocks[i - 1], held_)});
      }
      has_embedding_ = has_embedding_ || range.begin == 0;
      has_head_ = has_head_ || end == head + 1;
    }
    parts_ = static_cast<int64_t>(ranges.size());
    const auto blocks = static_cast<int>(blocks_.size());
    const int recomputed = part.recompute_blocks > 0 ? part.recompute_blocks : blocks;
    for (int i = 0; part.recompute == Recompute::kFull && i < std::min(recomputed, blocks); ++i) {
      blocks_[i].recomputed = true;
    }
  }

  StepVolume Step() const {
    StepVolume volume;
    volume.pipeline = Pipeline();
    for (const OwnBlock& block : blocks_) {
      const int64_t forwards = block.recomputed ? 2 : 1;
      const int64_t attentions = block.exchanges.attentions, scans = block.exchanges.scans;
      if (attentions > 0) volume.context += micro_batches_ * attentions * Attention(forwards);
      if (scans > 0) volume.context += micro_batches_ * scans * Scan(forwards);
    }
    volume.tensor = micro_batches_ * HiddenStates();
    for (int i = 0; i < static_cast<int>(layout_.buckets().size()); ++i) {
      const FlatLayout::Bucket& bucket = layout_.buckets()[i];
      const int64_t bytes = kFloat * layout_.Part(i, 0).size();
      // With sequence parallelism a norm sees this rank's rows only, so that its gradient is summed
      // over the tensor group once a step.
      if (bucket.partial) volume.tensor += AllReduced(bytes, tensor_, part_.tensor_rank);
      if (bucket.shared) {
        const Span sharers = held_.share(SplitKind::kHeads).sharers;
        volume.keys += AllReduced(bytes, sharers.size(), part_.tensor_rank - sharers.begin);
      }
    }
    volume.gradients = Gradients();
    volume.replicas = Replicas();
    volume.parameters = Parameters();
    return volume;
  }

 private:
  // What rank `rank` of a group of `size` sends for an all-reduce of fp32.
  int64_t AllReduced(int64_t bytes, int64_t size, int64_t rank) const {
    if (device_ != DeviceKind::kCpu) return 2 * Moved(bytes, size);
    return AllReduceBytes(bytes / kFloat, kFloat, static_cast<int>(size), static_cast<int>(rank));
  }

  // Every part of the model sends its output on and the gradient of its input back.
  int64_t Pipeline() const {
    if (place_.mesh.degree(Axis::kPipeline) == 1) return 0;
    const int64_t rows = tokens_ / (part_.sequence_parallel ? tensor_ : 1);
    const int64_t messages = 2 * parts_ - has_embedding_ - has_head_;
    // The own part of a tied table's gradient goes to the other stage once a step.
    return micro_batches_ * messages * width_ * rows * hidden_ + SharedTableBytes(place_, layout_);
  }

  // Attention of one layer, `forwards` times forward and once backward (context_attention.h).
  int64_t Attention(int64_t forwards) const {
    if (context_ == 1) return 0;
    const int64_t depth = place_.model.shape().attention.depth;
    const int64_t heads = held_.heads().size(), key_heads = held_.kv_heads().size();
    const int64_t keys = tokens_ * key_heads * depth, queries = tokens_ * heads * depth;
    if (part_.context_method == ContextMethod::kAllToAll) {
      const int64_t copies = std::max<int64_t>(key_heads, context_) / key_heads;
      return width_ * (forwards + 1) * (context_ - 1) * (2 * queries + 2 * copies * keys) /
             context_;
    }
    return (context_ - 1) * keys * (forwards * 2 * width_ + 2 * width_ + 2 * kFloat);
  }

  // The state-space scan of one layer, likewise (state_passing.h, scan_by_heads.h).
  int64_t Scan(int64_t forwards) const {
    if (context_ == 1) return 0;
    const ScanSizes& sizes = place_.model.shape().scan;
    if (part_.scan_method == ScanMethod::kAllToAll) {
      HeadsShape shape;
      shape.ranks = static_cast<int>(context_);
      shape.batch = place_.options.micro_batch;
      shape.sequence = place_.sequence_length;
      shape.heads = held_.ssm_heads().size();
      shape.groups = held_.ssm_groups().size();
      shape.width = sizes.head_width;
      shape.state = sizes.state;
      shape.activation = BatchShapeOf(place_).activation;
      return (forwards + 1) * PassBytes(shape);
    }
    // Where tensor ranks share groups, each holds B and C of all.
    const int64_t groups =
        held_.share(SplitKind::kScanHeads).shares ? sizes.groups : held_.ssm_groups().size();
    ScanShape shape;
    shape.ranks = static_cast<int>(context_);
    shape.batch = place_.options.micro_batch;
    shape.heads = held_.ssm_heads().size();
    shape.width = sizes.head_width;
    shape.state = sizes.state;
    shape.taps = sizes.taps;
    shape.channels = shape.heads * shape.width + 2 * groups * sizes.state;
    shape.activation = BatchShapeOf(place_).activation;
    return forwards * ForwardBytes(shape) + BackwardBytes(shape);
  }

  // The collectives of the tensor group for one micro-batch: all-reduces of hidden states [T,C],
  // or, with sequence parallelism, all-gathers and reduce-scatters of them, which send half as
  // much.
  int64_t HiddenStates() const {
    if (tensor_ == 1) return 0;
    const bool rows = part_.sequence_parallel;
    // Of each pair of column- and row-parallel GEMMs, forward all-reduces the output and backward
    // the gradient of the input. With sequence parallelism, inputs are gathered and outputs
    // scattered in both directions, and backward gathers the input of each pair once more. A
    // backward in two calls also gathers the gradients once more.
    //
    // Recomputation repeats forward without its last collective. Where gathers overlap, the input
    // of the last pair stays gathered until backward needs it.
    const bool stays = part_.tensor_overlap != TensorOverlap::kNone;
    // The embedding's output and, with sequence parallelism, its gradient; the gradient of the
    // head's input and, with sequence parallelism, that input.
    int64_t collectives = has_embedding_ * (rows ? 2 : 1) + has_head_ * (rows ? 2 : 1);
    int64_t sums = 0;  // bytes
    for (const OwnBlock& block : blocks_) {
      const int64_t pairs = block.exchanges.layers;
      collectives += pairs * (rows ? 2 + 3 : 1 + 1);
      if (rows && part_.split_backward) collectives += pairs;
      if (block.recomputed) collectives += rows ? 2 * pairs - 1 - (stays ? 1 : 0) : pairs - 1;
      sums +=
          (block.recomputed ? 3 : 2) *
          AllReduced(kFloat * tokens_ * block.exchanges.sums_per_token, tensor_, part_.tensor_rank);
    }
    // For the loss of a vocabulary that is cut over ranks: three numbers per token and rank.
    const int64_t statistics = has_head_ * Moved(kFloat * tensor_ * tokens_ * 3, tensor_);
    const int64_t states = width_ * tokens_ * hidden_;
    return sums +
           collectives *
               (rows ? Moved(states, tensor_) : AllReduced(states, tensor_, part_.tensor_rank)) +
           statistics;
  }

  int64_t GradientRanks() const { return int64_t{place_.mesh.degree(Axis::kData)} * context_; }
  // What a rank sends of a compressed bucket after the warm-up; nullopt where the bucket is reduced
  // like a dense one.
  std::optional<int64_t> Exchanged(int bucket) const {
    const CompressionOptions& compression = place_.options.compression;
    if (!layout_.buckets()[bucket].compressed) return std::nullopt;
    const auto bytes = GradientCompressor::ContributionBytes(
        compression, place_.model.parameters(), layout_, bucket, static_cast<int>(GradientRanks()),
        compression.warmup_steps + 1);
    if (!bytes.has_value()) return std::nullopt;
    return *bytes * (GradientRanks() - 1);
  }

  // Reduce-scatters, once a step; with ZeRO 2 and 3 once a micro-batch.
  int64_t Gradients() const {
    const int64_t times = place_.options.zero >= 2 ? micro_batches_ : 1;
    const int64_t width = SizeOf(place_.options.gradient_wire);
    int64_t bytes = 0;
    for (int i = 0; i < static_cast<int>(layout_.buckets().size()); ++i) {
      const std::optional<int64_t> exchanged = Exchanged(i);
      if (exchanged.has_value()) {
        bytes += place_.zero_shards > 1 ? *exchanged : 0;
      } else {
        bytes += times * Moved(layout_.buckets()[i].range.size() * width, place_.zero_shards);
      }
    }
    return bytes;
  }
  int64_t Replicas() const {
    const int64_t replicas = GradientRanks() / place_.zero_shards;
    const std::vector<int> group =
        place_.mesh.GroupOf(place_.mesh.RankOf(place_.coordinate), {Axis::kData, Axis::kContext});
    const auto self = std::find(group.begin(), group.end(), place_.mesh.RankOf(place_.coordinate));
    const int64_t rank = (self - group.begin()) / place_.zero_shards;
    const int64_t width = SizeOf(place_.options.gradient_wire);
    int64_t bytes = 0;
    for (int i = 0; i < static_cast<int>(layout_.buckets().size()); ++i) {
      if (const std::optional<int64_t> exchanged = Exchanged(i); exchanged.has_value()) {
        bytes += place_.zero_shards > 1 ? 0 : *exchanged;
        continue;
      }
      const int64_t part = width * layout_.Part(i, 0).size();
      // 16-bit gradients are exchanged in equal parts on every device.
      bytes += width == kFloat ? AllReduced(part, replicas, rank) : 2 * Moved(part, replicas);
    }
    return bytes;
  }

  // Gathers after the update of buckets that stay whole and, with ZeRO-3, of blocks whenever they
  // are needed and no buffer holds them.
  int64_t Parameters() const {
    if (place_.options.zero == 0) return 0;
    int64_t elements = layout_.elements();
    if (place_.options.zero >= 3) {
      for (const FlatLayout::Bucket& bucket : layout_.buckets()) {
        if (bucket.block >= 0) elements -= bucket.range.size();
      }
      elements += GatheredElements(place_, layout_).Of(place_.coordinate[Axis::kPipeline]);
    }
    const int64_t width = SizeOf(StorageOptionsOf(place_).compute);
    int64_t bytes = width * elements;
    for (const FlatLayout::Bucket& bucket : layout_.buckets()) {
      if (bucket.full_precision) bytes += (kFloat - width) * bucket.range.size();
    }
    // Buckets are multiples of the shards, so that the sum of what each gather sends is this.
    return Moved(bytes, place_.zero_shards);
  }

  const TrainerPlace& place_;
  const ModelParallel& part_;
  const DeviceKind device_;
  const TensorShard held_;
  const FlatLayout layout_;
  const int64_t width_;  // bytes of an activation
  const int64_t tensor_, context_, tokens_, hidden_, micro_batches_;
  struct OwnBlock {
    BlockExchanges exchanges;
    bool recomputed = false;  // repeats all of forward in backward
  };
  int64_t parts_ = 0;
  std::vector<OwnBlock> blocks_;  // of this rank, between embedding and head
  bool has_embedding_ = false, has_head_ = false;
};

}  // namespace

StepVolume PredictVolume(const TrainerPlace& place, const ModelParallel& part, DeviceKind device) {
  return Formulas(place, part, device).Step();
}

}  // namespace muster::parallel
