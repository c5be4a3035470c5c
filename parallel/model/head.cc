#include "parallel/model/head.h"

#include <algorithm>
#include <array>
#include <string>

#include "base/check.h"
#include "kernels/gemm/linear.h"
#include "kernels/loss/cross_entropy.h"
#include "kernels/memory/memory.h"
#include "kernels/tensor.h"
#include "parallel/model/norm.h"

namespace muster::parallel {
namespace {

using kernels::Arena;
using kernels::DType;
using kernels::Tensor;

constexpr int64_t kLogitsBytes = int64_t{1} << 30;
// The gradient of the table is read and written once per slice, which takes as long as computing it
// from some 700 tokens on an H200. More tokens than this per slice bring little.
constexpr int64_t kLogitsTokens = 8192;

class HeadBlock : public Block {
 public:
  HeadBlock(ParameterRegistry& registry, const NormSpec& norm, int64_t hidden,
            const TensorShard& shard, ParameterId table, bool shared)
      : hidden_(hidden),
        shard_(shard),
        shared_(shared),
        norm_(AddNorm(registry, "norm", hidden, norm, shard.by_rows())),
        table_(table) {}

  const std::string& name() const override { return name_; }

  std::unique_ptr<Saved> TakeSaved(Arena& arena, const BatchShape& shape) const override {
    auto saved = std::make_unique<HeadSaved>();
    saved->norm = NormSaved::Take(arena, shape.activation, norm_, shard_.rows(shape), hidden_);
    saved->losses = arena.Take("activations", DType::kF32, {shape.tokens()});
    return saved;
  }
  void TakeScratch(Arena& arena, const BatchShape& shape, Saved& base) const override {
    auto& saved = static_cast<HeadSaved&>(base);
    const int64_t columns = shard_.vocab_storage;
    const int64_t chunk = HeadChunk(shape, columns);
    saved.logits = arena.Take("logits", shape.activation, {chunk, columns});
    if (shard_.size > 1) saved.stats = arena.Take("scratch", DType::kF32, {shard_.size * chunk, 3});
    if (shard_.sequence && shard_.overlap == TensorOverlap::kNone) {
      saved.gathered = arena.Take("scratch", shape.activation, {shape.tokens(), hidden_});
    }
  }

  bool AddsGradientsInForward() const override { return true; }
  Tensor SumStorage(const Saved& base) const override {
    return static_cast<const HeadSaved&>(base).norm.x;
  }
  void Forward(const Pass& pass, const ModelBatch& batch, ForwardState& state,
               Saved& base) const override {
    auto& saved = static_cast<HeadSaved&>(base);
    NormForward(pass, norm_, state, saved.norm);
    saved.x = state.residual;
    saved.y = shard_.GatherRows(pass, saved.norm.y,
                                batch.gathered.empty() ? saved.gathered : batch.gathered,
                                shard_.slices(batch.shape));
    const int64_t tokens = batch.shape.tokens(), chunk = saved.logits.dim(0);
    if (pass.head == HeadMode::kLogits) {
      CHECK(batch.logits_begin >= 0 && batch.logits_begin < tokens);
      if (batch.logits_step == 1) {
        state.logits =
            Logits(pass, saved, batch.logits_begin, std::min(chunk, tokens - batch.logits_begin));
        return;
      }
      int64_t count = 0;
      for (int64_t at = batch.logits_begin; at < tokens && count < chunk; at += batch.logits_step) {
        Logits(pass, saved, at, 1, count++);
      }
      state.logits = saved.logits.Rows(0, count);
      return;
    }
    state.losses = saved.losses;
    CHECK(pass.head == HeadMode::kLoss || pass.gradients != nullptr)
        << "the head adds to the table's gradient in Forward";
    for (int64_t begin = 0; begin < tokens; begin += chunk) {
      Loss(pass, batch, saved, begin, std::min(chunk, tokens - begin));
    }
  }

  absl::StatusOr<std::unique_ptr<BlockState>> TakeState(
      Arena& /*arena*/, const DecodeShape& /*shape*/) const override {
    return std::make_unique<BlockState>();
  }

  void Backward(const Pass& pass, const ModelBatch& batch, BackwardState& state,
                Saved& base) const override {
    auto& saved = static_cast<HeadSaved&>(base);
    if (!shared_) Ready(pass, table_);
    kernels::Zero(pass.stream, state.d_hidden);
    const int slices = shard_.slices(batch.shape);
    if (slices == 1) {
      const Tensor dy = shard_.ReduceRows(pass, batch.branch_storage);
      NormBackward(pass, norm_, dy, saved.x, saved.norm, state);
      return;
    }
    std::array<Started, 2> dy;
    for (int slice = 0; slice < slices; ++slice) {
      dy[slice] = shard_.StartReduceRows(pass, SliceOf(batch.branch_storage, slices, slice));
    }
    NormBackwardInSlices(pass, norm_, dy, saved.x, saved.norm, state.d_hidden, [](int) {});
  }

 private:
  struct HeadSaved : Saved {
    NormSaved norm;
    Tensor x;  // input of the norm: norm.x, or what the pipeline stage in front has sent
    Tensor losses;
    // Scratch: the normed input of all tokens, with sequence parallelism (memory of its own where
    // the batch has none); the logits of one slice of the tokens; and what the tensor ranks
    // exchange about theirs.
    Tensor y, gathered;
    Tensor logits, stats;
  };

  // Of `count` tokens, into rows of saved.logits from `to` on.
  Tensor Logits(const Pass& pass, const HeadSaved& saved, int64_t begin, int64_t count,
                int64_t to = 0) const {
    kernels::LinearForwardArgs args;
    args.x = saved.y.Rows(begin, count);
    args.w = pass.weights[table_];
    args.y = saved.logits.Rows(to, count);
    kernels::LinearForward(pass.stream, args);
    return args.y;
  }

  // The loss of a slice of the tokens and, with gradients, all that is derived from their logits.
  void Loss(const Pass& pass, const ModelBatch& batch, const HeadSaved& saved, int64_t begin,
            int64_t count) const {
    const Tensor logits = Logits(pass, saved, begin, count);
    if (shard_.size > 1) {
      SharedLoss(pass, batch, saved, logits, begin);
    } else {
      kernels::CrossEntropyArgs loss;
      loss.logits = logits;
      loss.vocab = shard_.vocab().size();
      FillLoss(pass, batch, saved, begin, loss);
      kernels::CrossEntropy(pass.stream, loss);
    }
    if (pass.head != HeadMode::kLossAndGradient) return;
    kernels::LinearBackwardArgs args;
    args.dy = logits;
    args.x = saved.y.Rows(begin, count);
    args.w = pass.weights[table_];
    // The norm has read the last branch, so its storage keeps the gradient for Backward.
    args.dx = batch.branch_storage.Rows(begin, count);
    args.dw = (*pass.gradients)[table_];
    args.accumulate = !pass.overwrite_gradients || begin > 0;
    kernels::LinearBackward(pass.stream, args);
  }

  template <typename Args>
  void FillLoss(const Pass& pass, const ModelBatch& batch, const HeadSaved& saved, int64_t begin,
                Args& loss) const {
    const int64_t count = loss.logits.dim(0);
    loss.targets = batch.targets.Rows(begin, count);
    loss.losses = saved.losses.Rows(begin, count);
    loss.scale = pass.loss_scale;
    loss.loss_scale = pass.dynamic_loss_scale;
    loss.write_gradient = pass.head == HeadMode::kLossAndGradient;
  }

  // The loss over a vocabulary of which this rank has the logits of its shard.
  void SharedLoss(const Pass& pass, const ModelBatch& batch, const HeadSaved& saved, Tensor logits,
                  int64_t begin) const {
    const int64_t count = logits.dim(0);
    const Tensor all = saved.stats.Rows(0, shard_.size * count);
    kernels::CrossEntropyStatsArgs own;
    own.logits = logits;
    own.targets = batch.targets.Rows(begin, count);
    own.first = shard_.vocab().begin;
    own.vocab = shard_.vocab().size();
    own.stats = all.Rows(shard_.rank * count, count);
    kernels::CrossEntropyStats(pass.stream, own);
    pass.tensor->AllGather(pass.stream, all);
    kernels::CrossEntropyMergeArgs loss;
    loss.logits = logits;
    loss.first = own.first;
    loss.vocab = own.vocab;
    loss.stats = all.Reshape({shard_.size, count, 3});
    FillLoss(pass, batch, saved, begin, loss);
    kernels::CrossEntropyMerge(pass.stream, loss);
  }

  const std::string name_ = "head";
  int64_t hidden_;
  TensorShard shard_;
  bool shared_;
  Norm norm_;
  ParameterId table_;
};

}  // namespace

int64_t HeadChunk(const BatchShape& shape, int64_t vocab_storage) {
  int64_t chunk = shape.head_tokens;
  if (chunk <= 0) {
    const int64_t row = vocab_storage * kernels::SizeOf(shape.activation);
    chunk = 1;
    while (2 * chunk * row <= (2 * chunk <= kLogitsTokens ? 2 * kLogitsBytes : kLogitsBytes)) {
      chunk *= 2;
    }
  }
  return std::min(chunk, shape.tokens());
}

std::unique_ptr<Block> MakeHead(ParameterRegistry& registry, const NormSpec& norm, int64_t hidden,
                                const TensorShard& shard, ParameterId table, bool shared) {
  return std::make_unique<HeadBlock>(registry, norm, hidden, shard, table, shared);
}

}  // namespace muster::parallel
