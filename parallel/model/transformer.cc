#include "parallel/model/transformer.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "kernels/attention/attention.h"
#include "kernels/device/device.h"
#include "kernels/gemm/linear.h"
#include "kernels/memory/memory.h"
#include "kernels/tensor.h"
#include "parallel/model/dropout.h"
#include "parallel/model/embedding.h"
#include "parallel/model/head.h"
#include "parallel/model/linear.h"
#include "parallel/model/norm.h"
#include "parallel/model/qkv.h"
#include "parallel/model/tensor_parallel.h"

namespace muster::parallel {
namespace {

using kernels::Arena;
using kernels::DType;
using kernels::Tensor;

// What a block does not keep but recomputes in backward.
struct Recomputed {
  bool norms = false;       // the outputs of both norms
  bool activation = false;  // the MLP's activation
  bool gemms = false;       // all the rest; with both of the others
};

class TransformerBlock : public Block {
 public:
  // `behind`: what the block recomputes whose backward comes next.
  TransformerBlock(ParameterRegistry& registry, const TransformerConfig& config,
                   const ModelParallel& parallel, const TensorShard& shard, int64_t index,
                   const Recomputed& recomputed, const Recomputed& behind)
      : name_(absl::StrCat("blocks.", index)),
        hidden_(config.hidden),
        shard_(shard),
        ffn_(shard.ffn.size()),
        swiglu_(config.mlp == MlpKind::kSwiglu),
        rotary_(config.position == PositionKind::kRotary),
        recomputed_(recomputed),
        gathers_ahead_(!recomputed.gemms && !behind.gemms),
        split_(parallel.split_backward),
        offload_(parallel.offload_activations),
        context_size_(parallel.context_size),
        context_method_(parallel.context_method),
        context_head_groups_(parallel.context_head_groups),
        deterministic_(parallel.deterministic),
        attention_dropout_{parallel.dropout, Dropout::AttentionSite(index)},
        mlp_dropout_{parallel.dropout, Dropout::MlpSite(index)},
        norm1_(AddNorm(registry, name_ + ".norm1", config.hidden, config.norm, shard.by_rows())),
        qkv_(registry,
             {name_ + ".attention.qkv", config.hidden, config.heads, config.kv_heads,
              kInitialStddev, config.bias},
             shard) {
    const float residual = kInitialStddev / std::sqrt(2.0f * static_cast<float>(config.layers));
    const int64_t c = config.hidden;
    const auto spec = [&](const char* name, int64_t outputs, int64_t inputs, float stddev) {
      return LinearSpec{name_ + name, outputs, inputs, stddev, config.bias};
    };
    const Span q = {shard.heads.begin * qkv_.depth(), shard.heads.end * qkv_.depth()};
    std::vector<Span> up = {shard.ffn};
    if (swiglu_) up.push_back({config.ffn + shard.ffn.begin, config.ffn + shard.ffn.end});

    output_ = AddRowParallel(registry, spec(".attention.output", c, c, residual), q, shard);
    norm2_ = AddNorm(registry, name_ + ".norm2", c, config.norm, shard.by_rows());
    up_ = AddColumnParallel(
        registry, spec(".mlp.up", swiglu_ ? 2 * config.ffn : config.ffn, c, kInitialStddev), up,
        shard);
    down_ = AddRowParallel(registry, spec(".mlp.down", c, config.ffn, residual), shard.ffn, shard);
  }

  const std::string& name() const override { return name_; }
  bool offloads() const override { return offload_; }

  std::unique_ptr<Saved> TakeSaved(Arena& arena, const BatchShape& shape) const override {
    auto saved = std::make_unique<TransformerSaved>();
    saved->norm1.TakeInput(arena, kKept, shape.activation, shard_.rows(shape), hidden_);
    if (!recomputed_.gemms) TakeGemmOutputs(arena, kKept, shape, *saved);
    if (!recomputed_.norms) TakeNorms(arena, kKept, shape, *saved);
    if (!recomputed_.activation) TakeActivation(arena, kKept, shape, *saved);
    if (split_) {
      saved->d_norm1 = NormGradients::Take(arena, kKept, norm1_, hidden_);
      saved->d_norm2 = NormGradients::Take(arena, kKept, norm2_, hidden_);
    }
    return saved;
  }

  void TakeScratch(Arena& arena, const BatchShape& shape, Saved& base) const override {
    auto& saved = static_cast<TransformerSaved&>(base);
    const int64_t t = shape.tokens();
    if (recomputed_.gemms) TakeGemmOutputs(arena, kScratch, shape, saved);
    if (recomputed_.norms) TakeNorms(arena, kScratch, shape, saved);
    if (recomputed_.activation) TakeActivation(arena, kScratch, shape, saved);
    saved.d_small = arena.Take("scratch", shape.activation, {t, hidden_});
    // The backward of the MLP and of attention use the same memory, one after the other.
    const int64_t mark = arena.Mark();
    saved.d_up = arena.Take("scratch", shape.activation, {t, ffn_});
    if (RecomputesSwiglu()) saved.up = saved.d_up;
    arena.ReleaseTo(mark);
    saved.d_qkv = qkv_.Take(arena, "scratch", shape.activation, t);
    saved.d_shared = qkv_.TakeScratch(arena, shape.activation, t);
    if (context_size_ == 1) {
      saved.delta = arena.Take("scratch", DType::kF32, {shape.batch, qkv_.heads(), shape.sequence});
    } else {
      saved.context->TakeScratch(arena, *saved.context_saved);
    }
  }

  void Forward(const Pass& pass, Flow& flow, Saved& base) const override {
    auto& saved = static_cast<TransformerSaved&>(base);
    if (shard_.slices(flow.shape) > 1) {
      ForwardInHalfBatches(pass, flow, saved);
      return;
    }
    NormForward(pass, norm1_, flow, saved.norm1);
    saved.x1 = flow.residual;
    AttentionForward(pass, flow, saved);
    NormForward(pass, norm2_, flow, saved.norm2);
    UpForward(pass, flow, saved, /*activate=*/true, [] {});
    RowForward(pass, down_, saved.up, flow, mlp_dropout_, flow.next_sum);
  }
  Tensor SumStorage(const Saved& base) const override {
    return static_cast<const TransformerSaved&>(base).norm1.x;
  }
  std::vector<ParameterId> BeginsWith() const override {
    if (shard_.overlap != TensorOverlap::kHalves) return {};
    std::vector<ParameterId> parameters = {norm1_.weight};
    if (norm1_.bias >= 0) parameters.push_back(norm1_.bias);
    return parameters;
  }
  // Norm and all-gather, while the compute stream goes on with the other half-batch.
  void BeginForward(const Pass& pass, Flow& flow, Saved& base, int half) const override {
    const auto& saved = static_cast<const TransformerSaved&>(base);
    const Tensor residual = SliceOf(flow.residual, 2, half);
    const Tensor branch = half == 0 ? flow.branch : flow.second_branch;
    const NormSaved norm = saved.norm1.Slice(2, half);
    Started& begun = GatheringOf(flow, saved.norm1, half);
    begun.done = shard_.Start(pass, Collective::kAllGather, [&](const Pass& on) {
      NormForward(on, norm1_, residual, branch, norm);
      begun.input_ready = TensorShard::InputReady(on);
      shard_.GatherRows(on, norm.y, SliceOf(flow.branch_storage, 2, half));
    });
  }

  // Every collective starts as soon as its input is complete and is awaited where its result is
  // used. Weight gradients, which nothing waits for, compute in between: that of `down` overlaps
  // with the reduce-scatter of the gradient of norm2's output, that of `up` with the all-gather
  // behind norm2, that of `output` with the second reduce-scatter, and that of qkv with the
  // all-gather behind norm1. The inputs of `up` and qkv are gathered again rather than kept,
  // overlapping with what comes before. With context parallelism and no overlap in the tensor
  // group, the weight gradients of `output` and, where memory allows, of `up` overlap with the
  // exchanges of attention's backward. With half-batches each slice is sent as soon as it is
  // complete; weight gradients wait for both.
  void Backward(const Pass& pass, Flow& flow, Saved& base) const override {
    auto& saved = static_cast<TransformerSaved&>(base);
    InSlices d_out = std::exchange(flow.d_whole, {}), y2;
    if (recomputed_.norms) RecomputeForward(pass, flow, saved, d_out, y2);
    if (d_out.empty()) d_out = StartGradient(pass, flow);
    const bool beside = HasSecondGatherBuffer(flow);
    if (beside && y2.empty()) y2 = StartInput(pass, flow, saved.norm2);
    std::array<Started, 2> d_norm2;
    const Tensor d_mlp = MlpBackwardInput(pass, flow, saved, d_out, d_norm2);
    const bool summed = std::exchange(flow.d_hidden_summed, false);
    if (summed) LinearBackwardBias(pass, down_, flow.d_hidden_sums);
    LinearBackwardWeights(pass, down_, d_mlp, saved.up, /*bias_is_complete=*/summed);
    if (!beside && !LeavesUpForExchange()) {
      UpBackwardWeights(pass, saved, StartInput(pass, flow, saved.norm2));
    }
    if (d_out.count == 1) {
      const bool sums = SumsHiddenGradient(flow);
      NormBackward(pass, norm2_, shard_.Await(pass, d_norm2[0]), saved.norm2.x, saved.norm2, flow,
                   sums ? (*pass.gradients)[*output_.bias] : Tensor());
      if (sums) Ready(pass, *output_.bias);
      d_out = StartGradient(pass, flow);
    } else {
      d_out = NormBackwardGathering(pass, norm2_, d_norm2, saved.norm2.x, saved.norm2, flow);
    }
    if (beside) UpBackwardWeights(pass, saved, y2);
    AttentionBackward(pass, flow, saved, d_out);
  }

  // Leaves the gradients of the outputs of the four linear layers for BackwardWeights, in the place
  // of norm2.x (down), pre (up), norm1.x (output) and qkv (qkv). The layers' inputs, norm2.y, up,
  // norm1.y and attention, stay.
  void BackwardInput(const Pass& pass, Flow& flow, Saved& base) const override {
    auto& saved = static_cast<TransformerSaved&>(base);
    kernels::Stream& stream = pass.stream;
    GatherRowsKeeping(pass, flow, mlp_dropout_, [&](Tensor dy, int64_t first) {
      const int64_t rows = dy.dim(0);
      const Tensor d_up = saved.d_up.Rows(first, rows), pre = saved.pre.Rows(first, rows);
      if (swiglu_) {
        LinearBackwardInputThroughSwiglu(pass, down_, dy, /*x=*/Tensor(), d_up, pre);
      } else {
        LinearBackwardInput(pass, down_, dy, d_up, pre);
      }
    });
    if (!swiglu_) kernels::Copy(stream, saved.d_up, saved.pre);
    const Tensor d_norm2 =
        shard_.ReduceRowsThrough(pass, saved.d_small, flow.gathered, [&](int64_t first, Tensor dx) {
          LinearBackwardInput(pass, up_, saved.pre.Rows(first, dx.dim(0)), dx);
        });
    NormBackwardInput(pass, norm2_, d_norm2, saved.norm2.x, saved.norm2, flow.d_hidden,
                      saved.d_norm2);
    kernels::Copy(stream, KeptGradient(flow), saved.norm2.x);
    GatherRowsKeeping(pass, flow, attention_dropout_, [&](Tensor dy, int64_t first) {
      LinearBackwardInput(pass, output_, dy, AttentionGradient(saved).Rows(first, dy.dim(0)));
    });
    ScoresBackward(pass, flow, saved, {});
    const Tensor d_norm1 = shard_.ReduceRowsThrough(
        pass, saved.d_small, flow.gathered,
        [&](int64_t first, Tensor dx) { QkvBackwardInput(pass, saved, first, dx); });
    Copy(stream, saved.d_qkv, saved.qkv);
    NormBackwardInput(pass, norm1_, d_norm1, saved.x1, saved.norm1, flow.d_hidden, saved.d_norm1);
    kernels::Copy(stream, KeptGradient(flow), saved.norm1.x);
  }
  void BackwardWeights(const Pass& pass, Flow& flow, Saved& base) const override {
    auto& saved = static_cast<TransformerSaved&>(base);
    // Each all-gather overlaps with the GEMM before it.
    const Tensor rows[] = {saved.norm2.x, saved.norm2.y, saved.norm1.x, saved.norm1.y};
    const bool beside = HasSecondGatherBuffer(flow);
    int next = 0;
    const auto start = [&] {
      const Tensor storage = beside && next % 2 == 0 ? flow.gathered : flow.branch_storage;
      return shard_.StartGatherRows(pass, rows[next++], storage);
    };
    Started begun = beside ? start() : Started();
    const auto whole = [&] {
      const Started now = beside ? begun : start();
      if (beside && next < 4) begun = start();
      return shard_.Await(pass, now);
    };
    LinearBackwardWeights(pass, down_, whole(), saved.up);
    LinearBackwardWeights(pass, up_, saved.pre, whole());
    NormBackwardWeights(pass, norm2_, saved.d_norm2);
    LinearBackwardWeights(pass, output_, whole(), saved.attention);
    qkv_.BackwardWeights(pass, saved.qkv, whole());
    NormBackwardWeights(pass, norm1_, saved.d_norm1);
  }

 private:
  static constexpr char kKept[] = "activations";
  static constexpr char kScratch[] = "scratch";

  struct TransformerSaved : Saved {
    NormSaved norm1, norm2;
    Tensor x1;  // input of norm1: norm1.x, or in a stage's first block the residual stream
    QkvProjection::Output qkv;
    Tensor attention, lse, pre, up;
    Tensor d_small, d_up, delta, d_shared;  // scratch
    QkvProjection::Output d_qkv;            // scratch
    // With context parallelism, instead of lse and delta.
    std::unique_ptr<ContextAttention> context;
    std::unique_ptr<ContextAttention::Saved> context_saved;
    NormGradients d_norm1, d_norm2;  // between two calls of backward
  };

  // Outputs of GEMMs and of attention, and what recompute gets only by running these again.
  void TakeGemmOutputs(Arena& arena, const char* category, const BatchShape& shape,
                       TransformerSaved& saved) const {
    const int64_t t = shape.tokens(), rows = shard_.rows(shape);
    const DType activation = shape.activation;
    // The residual sum comes first: no other block writes to this place before it has read the sum.
    saved.norm2.TakeInput(arena, category, activation, rows, hidden_);
    saved.norm1.TakeStatistics(arena, category, norm1_, rows);
    saved.norm2.TakeStatistics(arena, category, norm2_, rows);
    saved.qkv = qkv_.Take(arena, category, activation, t);
    saved.attention = arena.Take(category, activation, {t, AttentionWidth()});
    if (context_size_ == 1) {
      saved.lse = arena.Take(category, DType::kF32, {shape.batch, qkv_.heads(), shape.sequence});
    } else {
      auto context = MakeContextAttention({context_method_, context_size_, shape.batch,
                                           shape.sequence * context_size_, qkv_.heads(),
                                           qkv_.kv_heads(), qkv_.depth(), shape.activation,
                                           deterministic_, context_head_groups_});
      CHECK_OK(context);
      saved.context = *std::move(context);
      saved.context_saved = saved.context->TakeSaved(arena);
    }
    saved.pre = arena.Take(category, activation, {t, UpWidth()});
  }
  // Outputs of norms.
  void TakeNorms(Arena& arena, const char* category, const BatchShape& shape,
                 TransformerSaved& saved) const {
    const int64_t rows = shard_.rows(shape);
    saved.norm1.TakeOutput(arena, category, shape.activation, rows, hidden_);
    saved.norm2.TakeOutput(arena, category, shape.activation, rows, hidden_);
  }
  // Output of the MLP's activation.
  void TakeActivation(Arena& arena, const char* category, const BatchShape& shape,
                      TransformerSaved& saved) const {
    if (RecomputesSwiglu()) return;
    saved.up = arena.Take(category, shape.activation, {shape.tokens(), ffn_});
  }

  // Forward of two half-batches. While the GEMMs of one compute, the tensor stream runs the
  // reduce-scatter of the other's branch, the norm behind it and the all-gather of its output. The
  // next block begins with a half-batch right behind this block's end. The reduce-scatter and the
  // norm run between the two GEMMs of the other half-batch, the all-gather during the second.
  void ForwardInHalfBatches(const Pass& pass, Flow& flow, TransformerSaved& saved) const {
    const InSlices begun = Begin(pass, flow, saved);
    saved.x1 = flow.branch.empty() ? flow.residual : saved.norm1.x;
    flow.branch = flow.second_branch = Tensor();
    const InSlices y2 = AttentionInHalfBatches(pass, flow, saved, begun);
    flow.residual = saved.norm2.x;
    std::array<kernels::Event*, 2> left;
    const bool ahead = flow.next != nullptr;
    for (const int half : {0, 1}) {
      const Tensor x = shard_.Await(pass, y2.slices[half]);
      Up(pass, saved, x, half * x.dim(0), /*activate=*/true);
      if (half == 0) {
        TensorShard::AwaitInput(pass, y2.slices[1]);
      } else if (ahead) {
        TensorShard::AwaitInput(pass, flow.begun.slices[0]);
      }
      const Tensor y = SliceOf(flow.branch_storage, 2, half);
      LinearForward(pass, down_, SliceOf(saved.up, 2, half), y);
      Tensor& branch = half == 0 ? flow.branch : flow.second_branch;
      left[half] = shard_.Start(pass, ClosingCollective(), [&](const Pass& on) {
        branch = ReduceRowsWithDropout(on, flow, y, mlp_dropout_, half, /*gather_follows=*/ahead);
      });
      if (ahead) flow.next->BeginForward(pass, flow, *flow.next_saved, half);
    }
    // Without a next block, the caller reads both half-batches on the compute stream.
    for (const int half : {0, 1}) {
      if (!ahead) shard_.Await(pass, {Tensor(), left[half]});
    }
  }
  // Where BeginForward leaves the state of a half-batch for Forward.
  Started& GatheringOf(Flow& flow, const NormSaved& norm, int half) const {
    InSlices& begun = flow.begun;
    begun.all = shard_.sequence ? flow.branch_storage : norm.y;
    begun.count = half + 1;
    begun.slices[half].tensor = SliceOf(begun.all, 2, half);
    return begun.slices[half];
  }
  InSlices Begin(const Pass& pass, Flow& flow, TransformerSaved& saved) const {
    for (const int half : {0, 1}) {
      if (flow.begun.count == half) BeginForward(pass, flow, saved, half);
    }
    return std::exchange(flow.begun, {});
  }
  // From all rows of norm1's output (`y1`) to all rows of norm2's.
  InSlices AttentionInHalfBatches(const Pass& pass, const Flow& flow, const TransformerSaved& saved,
                                  const InSlices& y1) const {
    InSlices y2 = {.all = shard_.sequence ? flow.branch_storage : saved.norm2.y, .count = 2};
    const int64_t samples = flow.shape.batch / 2, rows = flow.shape.tokens() / 2;
    const auto project = [&](int half) {
      const Tensor x = shard_.Await(pass, y1.slices[half]);
      qkv_.Forward(pass, x, saved.qkv.Rows(half * rows, rows), rotary_ ? flow.rotary : Tensor());
    };
    // Context parallelism exchanges all samples at once.
    if (context_size_ > 1) {
      for (const int half : {0, 1}) project(half);
      saved.context->Forward({pass.stream, *pass.context, pass.context_overlap},
                             ContextInputs(flow, saved), *saved.context_saved);
    }
    for (const int half : {0, 1}) {
      if (context_size_ == 1) {
        project(half);
        kernels::AttentionForward(pass.stream,
                                  Attention(flow, saved, {half * samples, (half + 1) * samples}));
      }
      // So that the all-gather of the other half-batch overlaps with this GEMM.
      TensorShard::AwaitInput(pass, half == 0 ? y1.slices[1] : y2.slices[0]);
      const Tensor y = SliceOf(flow.branch_storage, 2, half);
      LinearForward(pass, output_, SliceOf(saved.attention, 2, half), y);
      const NormSaved norm = saved.norm2.Slice(2, half);
      Started& entering = y2.slices[half];
      entering.tensor = SliceOf(y2.all, 2, half);
      entering.done = shard_.Start(pass, Collective::kAllGather, [&](const Pass& on) {
        const Tensor branch =
            ReduceRowsWithDropout(on, flow, y, attention_dropout_, half, /*gather_follows=*/true);
        NormForward(on, norm2_, SliceOf(saved.x1, 2, half), branch, norm);
        entering.input_ready = TensorShard::InputReady(on);
        shard_.GatherRows(on, norm.y, y);
      });
    }
    return y2;
  }
  // The collective behind a row-parallel GEMM.
  Collective ClosingCollective() const {
    return shard_.sequence ? Collective::kReduceScatter : Collective::kAllReduce;
  }
  // This rank's rows of the sum of a slice, with dropout applied.
  Tensor ReduceRowsWithDropout(const Pass& pass, const Flow& flow, const Tensor& partial,
                               const Dropout& dropout, int slice,
                               bool gather_follows = false) const {
    const Tensor rows = shard_.ReduceRows(pass, partial, gather_follows);
    dropout.Apply(pass, flow, rows, rows, shard_.FirstToken(flow.shape, slice));
    return rows;
  }

  // The norm has read the branch, so its storage takes the gathered rows.
  void AttentionForward(const Pass& pass, Flow& flow, const TransformerSaved& saved) const {
    bool turn = rotary_;
    const auto gemm = [&](Tensor x, int64_t first) {
      const int64_t rows = x.dim(0);
      // Rotary positions are applied to whole sequences in the GEMM's epilogue, to parts of
      // sequences once all rows have arrived.
      const bool whole = rotary_ && rows % flow.shape.sequence == 0;
      if (whole) turn = false;
      qkv_.Forward(pass, x, saved.qkv.Rows(first, rows), whole ? flow.rotary : Tensor());
    };
    shard_.GatherRowsThrough(pass, saved.norm1.y, flow.branch_storage, gemm, /*keeps_all=*/false);
    if (turn) qkv_.Rotate(pass, flow, saved.qkv, /*inverse=*/false);
    if (context_size_ == 1) {
      kernels::AttentionForward(pass.stream, Attention(flow, saved));
    } else {
      saved.context->Forward({pass.stream, *pass.context, pass.context_overlap},
                             ContextInputs(flow, saved), *saved.context_saved);
    }
    RowForward(pass, output_, saved.attention, flow, attention_dropout_, saved.norm2.x);
  }
  // From norm2's output, all rows of which are left in the branch's storage, to the pre-activation
  // and, with GELU or `activate`, the activation. `begun` is called before the first GEMM.
  void UpForward(const Pass& pass, const Flow& flow, const TransformerSaved& saved, bool activate,
                 absl::FunctionRef<void()> begun) const {
    bool waiting = true;
    const auto gemm = [&](Tensor x, int64_t first) {
      if (std::exchange(waiting, false)) begun();
      Up(pass, saved, x, first, activate);
    };
    // Recompute needs all rows of the input afterwards.
    shard_.GatherRowsThrough(pass, saved.norm2.y, flow.branch_storage, gemm,
                             /*keeps_all=*/!activate);
  }
  // The same for rows [first, first + x.dim(0)) of norm2's output.
  void Up(const Pass& pass, const TransformerSaved& saved, const Tensor& x, int64_t first,
          bool activate) const {
    const Tensor pre = saved.pre.Rows(first, x.dim(0));
    if (swiglu_ && !activate) {
      LinearForward(pass, up_, x, pre);
      return;
    }
    const Tensor y = saved.up.Rows(first, x.dim(0));
    if (swiglu_) {
      LinearForwardThroughSwiglu(pass, up_, x, pre, y);
    } else {
      LinearForward(pass, up_, x, y, pre);
    }
  }
  // The row-parallel GEMM of a pair: this rank's rows of the sum, with dropout, become the branch.
  // With one tensor rank, no dropout and a next norm that keeps its input in `next_sum`, the GEMM
  // adds the residual stream itself.
  void RowForward(const Pass& pass, const Linear& linear, const Tensor& x, Flow& flow,
                  const Dropout& dropout, const Tensor& next_sum) const {
    if (shard_.size == 1 && !next_sum.empty() && !dropout.Drops(pass)) {
      LinearForwardAdding(pass, linear, x, flow.residual, next_sum);
      flow.residual = next_sum;
      return;
    }
    const Tensor rows = shard_.ReduceRowsThrough(
        pass, flow.branch_storage, flow.gathered,
        [&](int64_t first, Tensor y) { LinearForward(pass, linear, x.Rows(first, y.dim(0)), y); });
    dropout.Apply(pass, flow, rows, rows, shard_.FirstToken(flow.shape, 0));
    flow.branch = rows;
  }
  // The gradient of a branch from all rows of d_hidden, with dropout, slice by slice as they
  // arrive; `use` gets each slice and its first row. Gathered rows are changed in place. d_hidden
  // itself is also the gradient of the residual stream, so the branch's storage takes the result
  // then. Returns all rows.
  Tensor Dropped(const Pass& pass, const Flow& flow, const InSlices& d_out, const Dropout& dropout,
                 absl::FunctionRef<void(Tensor dy, int64_t first)> use) const {
    const Tensor& all = dropout.Drops(pass) && !shard_.sequence ? flow.branch_storage : d_out.all;
    for (int slice = 0; slice < d_out.count; ++slice) {
      const Tensor arrived = shard_.Await(pass, d_out.slices[slice]);
      const Tensor dy = SliceOf(all, d_out.count, slice);
      const int64_t first = slice * dy.dim(0);
      dropout.Apply(pass, flow, arrived, dy, first);
      use(dy, first);
    }
    return all;
  }
  // Recomputes what was not kept, except the activation of a block that keeps its GEMM outputs,
  // which is recomputed together with its gradient. Where everything is recomputed and all-gathers
  // overlap, it also starts the all-gather of d_hidden, and leaves all rows of norm2's output in
  // `y2`.
  void RecomputeForward(const Pass& pass, const Flow& flow, TransformerSaved& saved,
                        InSlices& d_out, InSlices& y2) const {
    Flow recomputing = flow;
    recomputing.residual = saved.x1;
    recomputing.branch = recomputing.second_branch = Tensor();
    NormForward(pass, norm1_, recomputing, saved.norm1);
    if (recomputed_.gemms && shard_.slices(flow.shape) > 1) {
      const InSlices y1 = shard_.StartGatherRows(pass, saved.norm1.y, flow.branch_storage, 2);
      y2 = AttentionInHalfBatches(pass, flow, saved, y1);
      if (HasSecondGatherBuffer(flow)) d_out = StartGradient(pass, flow);
      for (const int half : {0, 1}) {
        const Tensor x = shard_.Await(pass, y2.slices[half]);
        Up(pass, saved, x, half * x.dim(0), /*activate=*/false);
        y2.slices[half].done = nullptr;
      }
      if (!HasSecondGatherBuffer(flow)) y2 = {};
      return;
    }
    if (recomputed_.gemms) {
      AttentionForward(pass, recomputing, saved);
      NormForward(pass, norm2_, recomputing, saved.norm2);
      UpForward(pass, flow, saved, /*activate=*/false, [&] {
        if (!HasSecondGatherBuffer(flow)) return;
        d_out = StartGradient(pass, flow);
        y2 = {flow.branch_storage, {Started{flow.branch_storage}}, 1};
      });
      return;
    }
    recomputing.residual = saved.norm2.x;
    NormForward(pass, norm2_, recomputing, saved.norm2);
  }
  // Whether SwiGLU's output is recomputed in the pass that computes its gradient, in the memory of
  // d_up, which that pass reads.
  bool RecomputesSwiglu() const { return swiglu_ && recomputed_.activation; }

  // Whether two all-gathers can be under way at once.
  static bool HasSecondGatherBuffer(const Flow& flow) { return !flow.gathered.empty(); }
  // Starts the all-gather of flow.d_hidden.
  InSlices StartGradient(const Pass& pass, const Flow& flow) const {
    return shard_.StartGatherRows(pass, flow.d_hidden, GradientStorage(flow),
                                  shard_.slices(flow.shape));
  }
  static const Tensor& GradientStorage(const Flow& flow) {
    return HasSecondGatherBuffer(flow) ? flow.gathered : flow.branch_storage;
  }
  // Starts the all-gather of a norm's output.
  InSlices StartInput(const Pass& pass, const Flow& flow, const NormSaved& norm) const {
    return shard_.StartGatherRows(pass, norm.y, flow.branch_storage, shard_.slices(flow.shape));
  }
  // NormBackwardInSlices, which starts the all-gather of d_hidden of each slice as it completes.
  InSlices NormBackwardGathering(const Pass& pass, const Norm& norm,
                                 const std::array<Started, 2>& dy, const Tensor& x,
                                 const NormSaved& saved, const Flow& flow) const {
    const Tensor& storage = GradientStorage(flow);
    InSlices d_hidden = {.all = shard_.sequence ? storage : flow.d_hidden, .count = 2};
    NormBackwardInSlices(pass, norm, dy, x, saved, flow.d_hidden, [&](int slice) {
      d_hidden.slices[slice] = shard_.StartGatherRows(pass, SliceOf(flow.d_hidden, 2, slice),
                                                      SliceOf(storage, 2, slice));
    });
    return d_hidden;
  }

  // From the gradient of the MLP's output, which is returned, to that of norm2's output, whose
  // reduce-scatter starts slice by slice from saved.d_small.
  Tensor MlpBackwardInput(const Pass& pass, const Flow& flow, const TransformerSaved& saved,
                          const InSlices& d_out, std::array<Started, 2>& d_norm2) const {
    const auto leave = [&](const Tensor& d_up, int64_t first) {
      const int64_t rows = d_up.dim(0);
      const Tensor dx = saved.d_small.Rows(first, rows);
      LinearBackwardInput(pass, up_, d_up, dx);
      // Attention's backward writes to saved.d_small only behind the all-gather of norm2's
      // gradient.
      d_norm2[first / rows] = shard_.StartReduceRows(pass, dx, /*gather_follows=*/true);
    };
    if (swiglu_) {
      return Dropped(pass, flow, d_out, mlp_dropout_, [&](Tensor dy, int64_t first) {
        const int64_t rows = dy.dim(0);
        const Tensor pre = saved.pre.Rows(first, rows);
        LinearBackwardInputThroughSwiglu(pass, down_, dy,
                                         RecomputesSwiglu() ? saved.up.Rows(first, rows) : Tensor(),
                                         saved.d_up.Rows(first, rows), pre);
        leave(pre, first);
      });
    }
    // The gradient of up's bias is the sum over all rows at once.
    const Tensor dy = Dropped(pass, flow, d_out, mlp_dropout_, [](Tensor, int64_t) {});
    LinearBackwardInputThroughGelu(pass, down_, dy, saved.up, saved.d_up, saved.pre, up_,
                                   recomputed_.activation && !recomputed_.gemms);
    for (int slice = 0; slice < d_out.count; ++slice) {
      const Tensor d_up = SliceOf(saved.d_up, d_out.count, slice);
      leave(d_up, slice * d_up.dim(0));
    }
    return dy;
  }
  void UpBackwardWeights(const Pass& pass, const TransformerSaved& saved,
                         const InSlices& y2) const {
    LinearBackwardWeights(pass, up_, swiglu_ ? saved.pre : saved.d_up, shard_.Await(pass, y2),
                          /*bias_is_complete=*/!swiglu_);
  }
  // Whether the backward of norms computes the gradients of the biases in front of them.
  static bool SumsHiddenGradient(const Flow& flow) { return !flow.d_hidden_sums.empty(); }
  // Whether weight gradients overlap with the exchanges of the context group. Where collectives of
  // the tensor group overlap, the weight gradients belong to those, which move more bytes.
  bool LeavesForExchanges() const {
    return context_size_ > 1 && shard_.overlap == TensorOverlap::kNone;
  }
  // Whether that of `up` does so too. It needs its operands that long: with GELU the gradient of
  // its output lies in attention's scratch memory, and an input that has to be gathered would
  // overwrite the rows of d_hidden.
  bool LeavesUpForExchange() const { return LeavesForExchanges() && swiglu_ && !shard_.sequence; }
  // `d_out`: all rows of the gradient of the block's attention branch. Updates flow.d_hidden.
  void AttentionBackward(const Pass& pass, Flow& flow, const TransformerSaved& saved,
                         const InSlices& d_out) const {
    const bool beside = HasSecondGatherBuffer(flow);
    InSlices y1;
    if (beside) y1 = StartInput(pass, flow, saved.norm1);
    const Tensor dy = Dropped(pass, flow, d_out, attention_dropout_, [&](Tensor of, int64_t first) {
      LinearBackwardInput(pass, output_, of, AttentionGradient(saved).Rows(first, of.dim(0)));
    });
    const auto output_weights = [&] {
      LinearBackwardWeights(pass, output_, dy, saved.attention,
                            /*bias_is_complete=*/SumsHiddenGradient(flow));
    };
    const auto up_weights = [&] {
      UpBackwardWeights(pass, saved, StartInput(pass, flow, saved.norm2));
    };
    BesideScores work;
    if (LeavesForExchanges()) work.first = output_weights;
    // The last exchange is the larger one, and `up` the larger GEMM.
    if (LeavesUpForExchange()) work.last = up_weights;
    ScoresBackward(pass, flow, saved, work);
    std::array<Started, 2> d_norm1;
    for (int slice = 0; slice < d_out.count; ++slice) {
      const Tensor dx = SliceOf(saved.d_small, d_out.count, slice);
      QkvBackwardInput(pass, saved, slice * dx.dim(0), dx);
      // Another collective may follow: the next block may recompute its norms in this memory first.
      d_norm1[slice] = shard_.StartReduceRows(pass, dx);
    }
    if (!LeavesForExchanges()) output_weights();
    // The next block awaits the all-gather, unless it needs the memory before.
    const bool ahead = beside && flow.more_behind && gathers_ahead_;
    const auto weights = [&] {
      if (!beside) y1 = StartInput(pass, flow, saved.norm1);
      qkv_.BackwardWeights(pass, saved.d_qkv, shard_.Await(pass, y1));
    };
    if (!ahead) weights();
    if (d_out.count == 1) {
      NormBackward(pass, norm1_, shard_.Await(pass, d_norm1[0]), saved.x1, saved.norm1, flow);
      if (ahead) flow.d_whole = StartGradient(pass, flow);
    } else if (ahead) {
      flow.d_whole = NormBackwardGathering(pass, norm1_, d_norm1, saved.x1, saved.norm1, flow);
    } else {
      NormBackwardInSlices(pass, norm1_, d_norm1, saved.x1, saved.norm1, flow.d_hidden, [](int) {});
    }
    if (ahead) weights();
  }
  // Computes rows [first, first + dx.dim(0)).
  void QkvBackwardInput(const Pass& pass, const TransformerSaved& saved, int64_t first,
                        const Tensor& dx) const {
    const int64_t rows = dx.dim(0);
    qkv_.BackwardInput(pass, saved.d_qkv.Rows(first, rows), dx,
                       saved.d_shared.empty() ? Tensor() : saved.d_shared.Rows(first, rows));
  }
  Tensor AttentionGradient(const TransformerSaved& saved) const {
    return Tensor(saved.d_small.data(), saved.d_small.dtype(),
                  {saved.attention.dim(0), AttentionWidth()});
  }
  // Work that overlaps with the exchanges of the context group (ContextAttention::Call).
  struct BesideScores {
    std::function<void()> first = nullptr, last = nullptr;
  };
  // From the gradient of the attention's output to saved.d_qkv. Requires: `beside` is empty without
  // a context group.
  void ScoresBackward(const Pass& pass, const Flow& flow, const TransformerSaved& saved,
                      const BesideScores& beside) const {
    kernels::AttentionBackwardArgs args;
    args.forward = Attention(flow, saved);
    args.dout = AttentionHeads(AttentionGradient(saved), flow.shape);
    args.dq = qkv_.Queries(saved.d_qkv, flow.shape);
    args.dk = qkv_.Keys(saved.d_qkv, flow.shape);
    args.dv = qkv_.Values(saved.d_qkv, flow.shape);
    args.delta = saved.delta;
    args.deterministic = deterministic_;
    if (context_size_ == 1) {
      kernels::AttentionBackward(pass.stream, args);
    } else {
      saved.context->Backward(
          {pass.stream, *pass.context, pass.context_overlap, beside.first, beside.last},
          ContextInputs(flow, saved), {args.dout, args.dq, args.dk, args.dv}, *saved.context_saved);
    }
    if (rotary_) qkv_.Rotate(pass, flow, saved.d_qkv, /*inverse=*/true);
  }

  // Calls `gemm` with all rows of flow.d_hidden with dropout, and keeps this rank's rows of them in
  // the branch's storage, because d_hidden changes.
  void GatherRowsKeeping(const Pass& pass, const Flow& flow, const Dropout& dropout,
                         TensorShard::WithRows gemm) const {
    if (!dropout.Drops(pass)) {
      if (!shard_.sequence) kernels::Copy(pass.stream, flow.d_hidden, flow.branch_storage);
      shard_.GatherRowsThrough(pass, flow.d_hidden, flow.branch_storage, gemm);
      return;
    }
    shard_.GatherRowsThrough(pass, flow.d_hidden, flow.branch_storage,
                             [&](Tensor dy, int64_t first) {
                               const Tensor rows = flow.branch_storage.Rows(first, dy.dim(0));
                               dropout.Apply(pass, flow, dy, rows, first);
                               gemm(rows, first);
                             });
  }
  Tensor KeptGradient(const Flow& flow) const {
    const int64_t rows = shard_.rows(flow.shape);
    return flow.branch_storage.Rows(shard_.sequence ? shard_.rank * rows : 0, rows);
  }

  int64_t AttentionWidth() const { return qkv_.heads() * qkv_.depth(); }
  int64_t UpWidth() const { return swiglu_ ? 2 * ffn_ : ffn_; }

  // Attention's output [T,HD], or its gradient, as [B,S,H,D].
  Tensor AttentionHeads(Tensor output, const BatchShape& shape) const {
    return output.Reshape({shape.batch, shape.sequence, qkv_.heads(), qkv_.depth()});
  }
  ContextAttention::Inputs ContextInputs(const Flow& flow, const TransformerSaved& saved) const {
    const BatchShape& shape = flow.shape;
    return {qkv_.Queries(saved.qkv, shape), qkv_.Keys(saved.qkv, shape),
            qkv_.Values(saved.qkv, shape), AttentionHeads(saved.attention, shape), flow.documents};
  }
  kernels::AttentionArgs Attention(const Flow& flow, const TransformerSaved& saved) const {
    return Attention(flow, saved, {0, flow.shape.batch});
  }
  kernels::AttentionArgs Attention(const Flow& flow, const TransformerSaved& saved,
                                   Span samples) const {
    BatchShape shape = flow.shape;
    shape.batch = samples.size();
    const int64_t first = samples.begin * shape.sequence;
    const QkvProjection::Output qkv = saved.qkv.Rows(first, shape.tokens());
    kernels::AttentionArgs args;
    args.q = qkv_.Queries(qkv, shape);
    args.k = qkv_.Keys(qkv, shape);
    args.v = qkv_.Values(qkv, shape);
    args.out = AttentionHeads(saved.attention.Rows(first, shape.tokens()), shape);
    if (!saved.lse.empty()) args.lse = saved.lse.Rows(samples.begin, shape.batch);
    if (!flow.documents.empty()) {
      args.documents = flow.documents.Rows(samples.begin, shape.batch);
    }
    return args;
  }

  std::string name_;
  int64_t hidden_;
  TensorShard shard_;
  int64_t ffn_;  // of this rank
  bool swiglu_, rotary_;
  Recomputed recomputed_;
  bool gathers_ahead_;  // starts the all-gather of d_hidden for the next block
  bool split_;
  bool offload_;
  int context_size_;
  ContextMethod context_method_;
  int context_head_groups_;
  bool deterministic_;
  Dropout attention_dropout_, mlp_dropout_;
  Norm norm1_;
  QkvProjection qkv_;
  Linear output_;
  Norm norm2_;
  Linear up_, down_;
};

// Weights of one block's GEMMs.
int64_t BlockWeights(const TransformerConfig& config) {
  const int64_t c = config.hidden, depth = c / config.heads;
  const int64_t qkv = (config.heads + 2 * config.kv_heads) * depth;
  return qkv * c + c * c + (config.mlp == MlpKind::kSwiglu ? 3 : 2) * config.ffn * c;
}

// What each of the rank's `blocks` transformer blocks recomputes. With recompute_blocks, kSelective
// saves as many bytes as these blocks would, in as many blocks as that takes, and drops activations
// first: they are recomputed with their gradient at almost no cost, while norms cost a pass each.
std::vector<Recomputed> RecomputedBy(const ModelParallel& parallel, const TransformerConfig& config,
                                     const TensorShard& shard, int64_t blocks) {
  std::vector<Recomputed> recomputed(blocks);
  const int64_t wanted =
      parallel.recompute_blocks > 0 ? std::min<int64_t>(parallel.recompute_blocks, blocks) : blocks;
  if (parallel.recompute == Recompute::kFull) {
    std::fill_n(recomputed.begin(), wanted, Recomputed{true, true, true});
  } else if (parallel.recompute == Recompute::kSelective) {
    // Elements per token and block, on all ranks together.
    const int64_t activation = config.ffn;
    const int64_t norms = 2 * config.hidden * (shard.sequence ? 1 : shard.size);
    const int64_t values = wanted * (activation + norms);
    const int64_t activations = std::min(blocks, (values + activation - 1) / activation);
    const int64_t rest = std::max<int64_t>(0, values - activations * activation);
    const int64_t with_norms = std::min(blocks, (rest + norms - 1) / norms);
    for (int64_t i = 0; i < activations; ++i) recomputed[i].activation = true;
    for (int64_t i = 0; i < with_norms; ++i) recomputed[i].norms = true;
  }
  return recomputed;
}

}  // namespace

int64_t ParameterCount(const TransformerConfig& config) {
  const int64_t c = config.hidden, depth = c / config.heads;
  const int64_t norm = config.norm.kind == NormKind::kLayer ? 2 * c : c;
  const int64_t up = config.mlp == MlpKind::kSwiglu ? 2 * config.ffn : config.ffn;
  const int64_t biases =
      config.bias ? (config.heads + 2 * config.kv_heads) * depth + c + up + c : 0;
  const int64_t positions = config.position == PositionKind::kLearned ? config.sequence_length : 0;
  return config.layers * (BlockWeights(config) + 2 * norm + biases) + norm +
         ((config.tied ? 1 : 2) * config.vocab + positions) * c;
}

Model::FlopsPerToken CountFlops(const TransformerConfig& config, int64_t recomputed) {
  const int64_t c = config.hidden;
  // Per block, forward.
  const int64_t weights = BlockWeights(config), attention = 2 * config.sequence_length * c;
  Model::FlopsPerToken flops;
  flops.model = 6 * (config.layers * weights + config.vocab * c) + 3 * config.layers * attention;
  // A block's last GEMM is not recomputed.
  flops.hardware = flops.model + recomputed * (2 * (weights - config.ffn * c) + attention);
  return flops;
}

std::unique_ptr<Model> MakeTransformer(const TransformerConfig& config,
                                       const ModelDescription& description,
                                       const ModelParallel& parallel) {
  CHECK(config.layers > 0 && config.hidden > 0 && config.heads > 0 && config.kv_heads > 0 &&
        config.ffn > 0 && config.vocab > 0 && config.sequence_length > 0);
  CHECK_EQ(config.hidden % config.heads, 0);
  CHECK_EQ(config.heads % config.kv_heads, 0);
  const int64_t depth = config.hidden / config.heads;
  CHECK(config.position != PositionKind::kRotary || depth % 2 == 0);
  CHECK_OK(CheckTensorParallel(parallel, config.heads, config.ffn, config.vocab));
  CHECK(parallel.dropout >= 0 && parallel.dropout < 1) << parallel.dropout;
  const TensorShard tensor =
      TensorShard::Make(parallel, config.heads, config.kv_heads, config.ffn, config.vocab);
  auto registry = std::make_unique<ParameterRegistry>();
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<BlockRange> parts = parallel.parts;
  if (parts.empty()) parts.push_back({});
  const int head = static_cast<int>(config.layers) + 1;
  std::optional<ParameterId> token;
  int64_t transformers = 0;  // transformer blocks on this rank
  for (const BlockRange& part : parts) {
    const int end = part.end < 0 ? head + 1 : part.end;
    transformers += std::max(0, std::min(end, head) - std::max(part.begin, 1));
  }
  const std::vector<Recomputed> recomputed = RecomputedBy(parallel, config, tensor, transformers);
  int64_t next = 0;              // of these
  int64_t recomputed_whole = 0;  // blocks that recompute everything
  const bool has_head = std::any_of(parts.begin(), parts.end(), [&](const BlockRange& part) {
    return part.end < 0 || part.end == head + 1;
  });
  for (BlockRange& part : parts) {
    const int end = part.end < 0 ? head + 1 : part.end;
    CHECK(part.begin >= 0 && part.begin < end && end <= head + 1);
    const int first = static_cast<int>(blocks.size());
    for (int i = part.begin; i < end; ++i) {
      // A tied table is in use from the first block to the last, and its gradient from the head's
      // forward to the embedding's backward.
      const bool resident = config.tied && (i == 0 || i == head);
      registry->BeginBlock(static_cast<int>(blocks.size()), resident);
      if (i == 0) {
        const ParameterId table = AddTokenTable(
            *registry, config, tensor,
            config.tied && !has_head ? TableUse::kEmbeddingOfTwo : TableUse::kOneStage);
        if (config.tied) token = table;
        blocks.push_back(MakeEmbedding(*registry, config, tensor, parallel.context_size, table,
                                       /*shared=*/config.tied && has_head, parallel.dropout));
      } else if (i < head) {
        // The first block of a stage has none behind it.
        const Recomputed behind =
            i > part.begin + 1 && next > 0 ? recomputed[next - 1] : Recomputed{};
        const Recomputed& own = recomputed[next++];
        if (own.gemms) ++recomputed_whole;
        blocks.push_back(std::make_unique<TransformerBlock>(*registry, config, parallel, tensor,
                                                            i - 1, own, behind));
      } else {
        const bool shared = token.has_value();
        if (!shared) token = AddHeadTable(*registry, config, tensor);
        blocks.push_back(MakeHead(*registry, config.norm, config.hidden, tensor, *token, shared));
      }
    }
    part = {first, static_cast<int>(blocks.size())};
  }
  if (static_cast<int>(blocks.size()) == head + 1 && tensor.size == 1) {
    CHECK_EQ(registry->elements(), ParameterCount(config));
  }
  Model::Shape shape;
  shape.hidden = config.hidden;
  shape.vocab = config.vocab;
  shape.vocab_storage = tensor.vocab_storage;
  shape.sequence_max = config.sequence_length;
  shape.context_size = parallel.context_size;
  if (config.position == PositionKind::kRotary) {
    shape.rotary_width = depth;
    shape.rope_theta = config.rope_theta;
    shape.rope_scaling = config.rope_scaling;
  }
  shape.tensor_size = tensor.size;
  if (tensor.shares_kv) shape.kv_group = static_cast<int>(tensor.kv_heads.begin);
  shape.sequence_parallel = tensor.sequence;
  shape.tensor_overlap = tensor.overlap;
  shape.split_backward = parallel.split_backward;
  shape.documents = parallel.documents;
  shape.context_method = parallel.context_method;
  shape.deterministic = parallel.deterministic;
  shape.dropout = parallel.dropout > 0;
  // A bias in front of the residual stream has the column sums of d_hidden as its gradient if this
  // rank has all rows and nothing is dropped.
  shape.sums_hidden_gradient = config.bias && config.norm.kind == NormKind::kLayer &&
                               tensor.size == 1 && !shape.dropout && !shape.split_backward;
  // Assumes that the other pipeline ranks recompute as much as this one.
  const int64_t recomputed_everywhere =
      recomputed_whole * config.layers / std::max<int64_t>(1, transformers);
  return std::make_unique<Model>(description, shape, std::move(registry), std::move(blocks),
                                 CountFlops(config, recomputed_everywhere), std::move(parts));
}

}  // namespace muster::parallel
