#include "parallel/model/residual_block.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "kernels/arena.h"
#include "kernels/device/device.h"
#include "kernels/memory/memory.h"
#include "kernels/tensor.h"
#include "parallel/model/linear.h"

namespace muster::parallel {
namespace {

using kernels::Arena;
using kernels::Tensor;

constexpr char kKept[] = "activations";
constexpr char kScratch[] = "scratch";

struct LayerSaved {
  NormSaved norm;
  std::unique_ptr<MixerSaved> mixer;
  NormGradients d_norm;  // between two calls of backward
};

struct ResidualSaved : BlockSaved {
  std::vector<LayerSaved> layers;
  Tensor x0;  // input of the first norm: its x, or in a stage's first block the residual stream
  Tensor d_small;  // [T,C] scratch: the gradient of a norm's output, of all rows
};

struct ResidualState : BlockState {
  std::vector<std::unique_ptr<MixerState>> layers;
};

// Whether two all-gathers can be under way at once.
bool HasSecondGatherBuffer(const ModelBatch& batch) { return !batch.gathered.empty(); }
const Tensor& GradientStorage(const ModelBatch& batch) {
  return HasSecondGatherBuffer(batch) ? batch.gathered : batch.branch_storage;
}
// Whether the backward of norms computes the gradients of the biases in front of them.
bool SumsHiddenGradient(const BackwardState& state) { return !state.d_hidden_sums.empty(); }

class ResidualBlock : public Block {
 public:
  ResidualBlock(const ResidualBlockSpec& spec, std::vector<ResidualLayer> layers)
      : spec_(spec),
        shard_(spec.shard),
        recomputed_(spec.recomputed),
        gathers_ahead_(!spec.recomputed.gemms && !spec.behind.gemms),
        layers_(std::move(layers)) {
    CHECK(!layers_.empty() && count() <= spec.inner_sums + 1) << spec.name;
  }

  const std::string& name() const override { return spec_.name; }
  bool offloads() const override { return spec_.offload; }

  std::unique_ptr<Saved> TakeSaved(Arena& arena, const BatchShape& shape) const override;
  void TakeScratch(Arena& arena, const BatchShape& shape, Saved& base) const override;
  Tensor SumStorage(const Saved& base) const override { return Of(base).layers[0].norm.x; }

  void Forward(const Pass& pass, const ModelBatch& batch, ForwardState& state,
               Saved& base) const override;
  std::vector<ParameterId> BeginsWith() const override;
  void BeginForward(const Pass& pass, const ModelBatch& batch, ForwardState& state, Saved& base,
                    int half) const override;

  absl::StatusOr<std::unique_ptr<BlockState>> TakeState(Arena& arena,
                                                        const DecodeShape& shape) const override;
  void Decode(const Pass& pass, const ModelBatch& batch, ForwardState& state, Saved& base,
              BlockState& text) const override;
  bool limits_text() const override {
    return std::any_of(layers_.begin(), layers_.end(),
                       [](const ResidualLayer& layer) { return layer.mixer->keeps_tokens(); });
  }

  // Every collective starts as soon as its input is complete and is awaited where its result is
  // used. Weight gradients, which nothing waits for, compute in between: that of a layer's output
  // overlaps with the reduce-scatter of the gradient of its norm's output, that of its input with
  // the all-gather behind the norm. The inputs of layers are gathered again rather than kept,
  // overlapping with what comes before. With context parallelism and no overlap in the tensor
  // group, the weight gradients of the output of a mixer that exchanges and, where memory allows,
  // of the input of the layer behind it overlap with the exchanges. With half-batches each slice is
  // sent as soon as it is complete; weight gradients wait for both.
  void Backward(const Pass& pass, const ModelBatch& batch, BackwardState& state,
                Saved& base) const override;

  // Leaves the gradients of the branches for BackwardWeights in the place of the norms' inputs;
  // mixers keep those of their inputs. Outputs of norms and mixers stay.
  void BackwardInput(const Pass& pass, const ModelBatch& batch, BackwardState& state,
                     Saved& base) const override;
  void BackwardWeights(const Pass& pass, const ModelBatch& batch, BackwardState& state,
                       Saved& base) const override;

 private:
  static ResidualSaved& Of(Saved& saved) { return static_cast<ResidualSaved&>(saved); }
  static const ResidualSaved& Of(const Saved& saved) {
    return static_cast<const ResidualSaved&>(saved);
  }
  int count() const { return static_cast<int>(layers_.size()); }
  bool is_last(int layer) const { return layer + 1 == count(); }
  // The input of a layer's norm.
  static Tensor Input(const ResidualSaved& saved, int layer) {
    return layer == 0 ? saved.x0 : saved.layers[layer].norm.x;
  }
  static Span AllSamples(const ModelBatch& batch) { return {0, batch.shape.batch}; }

  void TakeGemmOutputs(Arena& arena, const char* category, const BatchShape& shape,
                       ResidualSaved& saved) const;
  void TakeMixed(Arena& arena, const char* category, const BatchShape& shape,
                 ResidualSaved& saved) const;
  void TakeNorms(Arena& arena, const char* category, const BatchShape& shape,
                 ResidualSaved& saved) const;
  void TakeNormOutput(Arena& arena, const char* category, const BatchShape& shape,
                      LayerSaved& layer) const;
  void TakeActivation(Arena& arena, const char* category, const BatchShape& shape,
                      ResidualSaved& saved) const;

  // Forward.
  void LayerForward(const Pass& pass, const ModelBatch& batch, ForwardState& state,
                    ResidualSaved& saved, int layer) const;
  void MixerForward(const Pass& pass, const ModelBatch& batch, ResidualSaved& saved, int layer,
                    Purpose purpose, absl::FunctionRef<void()> begun) const;
  void RowForward(const Pass& pass, const ModelBatch& batch, ForwardState& state,
                  ResidualSaved& saved, int index) const;
  // Forward in half-batches.
  void ForwardInHalfBatches(const Pass& pass, const ModelBatch& batch, ForwardState& state,
                            ResidualSaved& saved) const;
  Started& GatheringOf(const ModelBatch& batch, ForwardState& state, const NormSaved& norm,
                       int half) const;
  InSlices Begin(const Pass& pass, const ModelBatch& batch, ForwardState& state,
                 ResidualSaved& saved) const;
  void MixHalf(const Pass& pass, const ModelBatch& batch, ResidualSaved& saved, int layer,
               const InSlices& y, int half, Purpose purpose) const;
  InSlices InnerLayersInHalfBatches(const Pass& pass, const ModelBatch& batch, ResidualSaved& saved,
                                    InSlices y) const;
  Collective ClosingCollective() const {
    return shard_.sequence ? Collective::kReduceScatter : Collective::kAllReduce;
  }
  Tensor ReduceBranch(const Pass& pass, const ModelBatch& batch, const ResidualSaved& saved,
                      int layer, const Tensor& partial, int half, bool gather_follows) const;
  static void FinishBranch(const Pass& pass, const ModelBatch& batch, const ResidualLayer& layer,
                           MixerSaved& saved, Span tokens, const Tensor& rows, int64_t first);

  // Backward.
  void RecomputeForward(const Pass& pass, const ModelBatch& batch, const BackwardState& state,
                        ResidualSaved& saved, InSlices& d_out, InSlices& y) const;
  void LayerBackward(const Pass& pass, const ModelBatch& batch, BackwardState& state,
                     ResidualSaved& saved, int layer, InSlices& d_out, InSlices y,
                     std::function<void()>& waiting) const;
  Tensor MixerBackward(const Pass& pass, const ModelBatch& batch, ResidualSaved& saved, int layer,
                       const InSlices& d_out, const std::function<void(Tensor dy)>& output_weights,
                       const std::function<void()>& waiting,
                       absl::FunctionRef<void()> before_mixing, std::array<Started, 2>& d_y) const;
  Tensor Dropped(const Pass& pass, const ModelBatch& batch, const InSlices& d_out,
                 const Dropout& dropout,
                 absl::FunctionRef<void(Tensor dy, int64_t first)> use) const;
  void NormBackwardOf(const Pass& pass, const ModelBatch& batch, BackwardState& state,
                      const ResidualSaved& saved, int layer, const std::array<Started, 2>& d_y,
                      bool gathers, InSlices& d_out) const;
  InSlices NormBackwardGathering(const Pass& pass, const Norm& norm,
                                 const std::array<Started, 2>& dy, const Tensor& x,
                                 const NormSaved& saved, const ModelBatch& batch,
                                 const BackwardState& state) const;
  InSlices StartGradient(const Pass& pass, const ModelBatch& batch,
                         const BackwardState& state) const;
  InSlices StartInput(const Pass& pass, const ModelBatch& batch, const NormSaved& norm) const;
  bool LeavesForExchanges(int layer) const;
  void GatherRowsKeeping(const Pass& pass, const ModelBatch& batch, const BackwardState& state,
                         const Dropout& dropout, TensorShard::WithRows gemm) const;
  Tensor KeptGradient(const ModelBatch& batch) const;

  ResidualBlockSpec spec_;
  TensorShard shard_;
  Recomputed recomputed_;
  bool gathers_ahead_;  // starts the all-gather of d_hidden for the next block
  std::vector<ResidualLayer> layers_;
};

// ---------------------------------------------------------------------------------------- memory

std::unique_ptr<BlockSaved> ResidualBlock::TakeSaved(Arena& arena, const BatchShape& shape) const {
  auto saved = std::make_unique<ResidualSaved>();
  for (const ResidualLayer& layer : layers_) {
    saved->layers.emplace_back().mixer = layer.mixer->MakeSaved();
  }
  saved->layers[0].norm.TakeInput(arena, kKept, shape.activation, shard_.rows(shape), spec_.hidden);
  if (!recomputed_.gemms) TakeGemmOutputs(arena, kKept, shape, *saved);
  if (!recomputed_.mixing) TakeMixed(arena, kKept, shape, *saved);
  if (!recomputed_.norms) TakeNorms(arena, kKept, shape, *saved);
  if (!recomputed_.activation) TakeActivation(arena, kKept, shape, *saved);
  for (int i = 0; spec_.split_backward && i < count(); ++i) {
    saved->layers[i].d_norm = NormGradients::Take(arena, kKept, layers_[i].norm, spec_.hidden);
  }
  return saved;
}

// BeginForward writes to the first norm's memory while the block in front computes the other
// half-batch. So all blocks that recompute norms have it in the same place, in front of what
// differs between blocks with different mixers.
void ResidualBlock::TakeScratch(Arena& arena, const BatchShape& shape, Saved& base) const {
  ResidualSaved& saved = Of(base);
  if (recomputed_.gemms) {
    TakeGemmOutputs(arena, kScratch, shape, saved);
  } else if (recomputed_.norms) {
    TakeNormOutput(arena, kScratch, shape, saved.layers[0]);
  }
  if (recomputed_.mixing) TakeMixed(arena, kScratch, shape, saved);
  if (recomputed_.norms) TakeNorms(arena, kScratch, shape, saved);
  if (recomputed_.activation) TakeActivation(arena, kScratch, shape, saved);
  saved.d_small = arena.Take(kScratch, shape.activation, {shape.tokens(), spec_.hidden});
  // The backward of the layers uses the same memory, one after the other.
  const int64_t mark = arena.Mark();
  for (int i = count(); i-- > 0;) {
    arena.ReleaseTo(mark);
    layers_[i].mixer->TakeScratch(arena, shape, saved.d_small, *saved.layers[i].mixer);
  }
}

// Outputs of GEMMs, and what recompute gets only by running these again.
void ResidualBlock::TakeGemmOutputs(Arena& arena, const char* category, const BatchShape& shape,
                                    ResidualSaved& saved) const {
  const int64_t rows = shard_.rows(shape);
  for (int i = 1; i < count(); ++i) {
    saved.layers[i].norm.TakeInput(arena, category, shape.activation, rows, spec_.hidden);
  }
  for (int i = count(); recomputed_.gemms && i <= spec_.inner_sums; ++i) {
    arena.Take(category, shape.activation, {rows, spec_.hidden});
  }
  for (int i = 0; i < count(); ++i) {
    saved.layers[i].norm.TakeStatistics(arena, category, layers_[i].norm, rows);
    if (i == 0 && recomputed_.gemms) TakeNormOutput(arena, category, shape, saved.layers[0]);
  }
  for (int i = 0; i < count(); ++i) {
    layers_[i].mixer->TakeOutputs(arena, category, shape, *saved.layers[i].mixer);
  }
}
void ResidualBlock::TakeMixed(Arena& arena, const char* category, const BatchShape& shape,
                              ResidualSaved& saved) const {
  for (int i = 0; i < count(); ++i) {
    layers_[i].mixer->TakeMixed(arena, category, shape, *saved.layers[i].mixer);
  }
}
// Outputs of norms, but for the first where TakeScratch has taken it.
void ResidualBlock::TakeNorms(Arena& arena, const char* category, const BatchShape& shape,
                              ResidualSaved& saved) const {
  for (int i = recomputed_.norms ? 1 : 0; i < count(); ++i) {
    TakeNormOutput(arena, category, shape, saved.layers[i]);
  }
}
void ResidualBlock::TakeNormOutput(Arena& arena, const char* category, const BatchShape& shape,
                                   LayerSaved& layer) const {
  layer.norm.TakeOutput(arena, category, shape.activation, shard_.rows(shape), spec_.hidden);
}
void ResidualBlock::TakeActivation(Arena& arena, const char* category, const BatchShape& shape,
                                   ResidualSaved& saved) const {
  for (int i = 0; i < count(); ++i) {
    layers_[i].mixer->TakeActivation(arena, category, shape, *saved.layers[i].mixer);
  }
}

// --------------------------------------------------------------------------------------- forward

void ResidualBlock::Forward(const Pass& pass, const ModelBatch& batch, ForwardState& state,
                            Saved& base) const {
  ResidualSaved& saved = Of(base);
  if (shard_.slices(batch.shape) > 1) {
    ForwardInHalfBatches(pass, batch, state, saved);
    return;
  }
  for (int i = 0; i < count(); ++i) LayerForward(pass, batch, state, saved, i);
}

void ResidualBlock::LayerForward(const Pass& pass, const ModelBatch& batch, ForwardState& state,
                                 ResidualSaved& saved, int layer) const {
  LayerSaved& own = saved.layers[layer];
  NormForward(pass, layers_[layer].norm, state, own.norm);
  if (layer == 0) saved.x0 = state.residual;
  MixerForward(pass, batch, saved, layer, Purpose::kOutput, [] {});
  RowForward(pass, batch, state, saved, layer);
}

// From the norm's output to the mixer's. The norm has read the branch, so its storage takes the
// gathered rows, which stay there for Purpose::kBackward. `begun` is called before the first GEMM.
void ResidualBlock::MixerForward(const Pass& pass, const ModelBatch& batch, ResidualSaved& saved,
                                 int layer, Purpose purpose,
                                 absl::FunctionRef<void()> begun) const {
  const Mixer& mixer = *layers_[layer].mixer;
  LayerSaved& own = saved.layers[layer];
  bool waiting = true;
  const auto gemm = [&](Tensor x, int64_t first) {
    if (std::exchange(waiting, false)) begun();
    mixer.Project(pass, batch, *own.mixer, x, first, purpose);
  };
  shard_.GatherRowsThrough(pass, own.norm.y, batch.branch_storage, gemm,
                           /*keeps_all=*/purpose == Purpose::kBackward);
  mixer.Mix(pass, batch, *own.mixer, AllSamples(batch));
}

// The row-parallel GEMM of a layer: this rank's rows of the sum, with dropout, become the branch.
// With one tensor rank, no dropout and a next norm that keeps its input, the GEMM adds the residual
// stream itself and writes the sum there.
void ResidualBlock::RowForward(const Pass& pass, const ModelBatch& batch, ForwardState& state,
                               ResidualSaved& saved, int index) const {
  const ResidualLayer& layer = layers_[index];
  MixerSaved& own = *saved.layers[index].mixer;
  const Linear& linear = layer.mixer->output();
  const Tensor x = layer.mixer->Output(own);
  const Tensor next_sum = is_last(index) ? state.next_sum : saved.layers[index + 1].norm.x;
  if (shard_.size == 1 && !next_sum.empty() && !layer.dropout.Drops(pass)) {
    if (is_last(index) && state.await_next_sum) state.await_next_sum();
    LinearForwardAdding(pass, linear, x, state.residual, next_sum);
    state.residual = next_sum;
    return;
  }
  const Tensor rows = shard_.ReduceRowsThrough(
      pass, batch.branch_storage, batch.gathered,
      [&](int64_t first, Tensor y) { LinearForward(pass, linear, x.Rows(first, y.dim(0)), y); });
  FinishBranch(pass, batch, layer, own, {0, x.dim(0)}, rows,
               shard_.sequence ? shard_.rank * rows.dim(0) : 0);
  state.branch = rows;
}

// -------------------------------------------------------------------------------------- decoding

absl::StatusOr<std::unique_ptr<BlockState>> ResidualBlock::TakeState(
    Arena& arena, const DecodeShape& shape) const {
  auto state = std::make_unique<ResidualState>();
  for (int i = 0; i < count(); ++i) {
    absl::StatusOr<std::unique_ptr<MixerState>> layer = layers_[i].mixer->TakeState(arena, shape);
    if (!layer.ok()) {
      return Annotate(layer.status(), absl::StrCat(name(), ", layer ", i + 1));
    }
    state->layers.push_back(*std::move(layer));
  }
  return state;
}

void ResidualBlock::Decode(const Pass& pass, const ModelBatch& batch, ForwardState& state,
                           Saved& base, BlockState& text) const {
  ResidualSaved& saved = Of(base);
  for (int i = 0; i < count(); ++i) {
    const Mixer& mixer = *layers_[i].mixer;
    LayerSaved& own = saved.layers[i];
    NormForward(pass, layers_[i].norm, state, own.norm);
    mixer.Project(pass, batch, *own.mixer, own.norm.y, 0, Purpose::kOutput);
    mixer.MixOnward(pass, batch, *own.mixer, *static_cast<ResidualState&>(text).layers[i]);
    RowForward(pass, batch, state, saved, i);
  }
}

// ------------------------------------------------------------------------ forward in half-batches

std::vector<ParameterId> ResidualBlock::BeginsWith() const {
  if (shard_.overlap != TensorOverlap::kHalves) return {};
  const Norm& norm = layers_[0].norm;
  std::vector<ParameterId> parameters = {norm.weight};
  if (norm.bias >= 0) parameters.push_back(norm.bias);
  return parameters;
}

// Norm and all-gather, while the compute stream goes on with the other half-batch.
void ResidualBlock::BeginForward(const Pass& pass, const ModelBatch& batch, ForwardState& state,
                                 Saved& base, int half) const {
  const NormSaved& all = Of(base).layers[0].norm;
  const Tensor residual = SliceOf(state.residual, 2, half);
  const Tensor branch = half == 0 ? state.branch : state.second_branch;
  const NormSaved norm = all.Slice(2, half);
  Started& begun = GatheringOf(batch, state, all, half);
  begun.done = shard_.Start(pass, Collective::kAllGather, [&](const Pass& on) {
    NormForward(on, layers_[0].norm, residual, branch, norm);
    begun.input_ready = TensorShard::InputReady(on);
    shard_.GatherRows(on, norm.y, SliceOf(batch.branch_storage, 2, half));
  });
}

// While the GEMMs of one half-batch compute, the tensor stream runs the reduce-scatter of the
// other's branch, the norm behind it and the all-gather of its output. The next block begins with a
// half-batch right behind this block's end. The reduce-scatter and the norm run between the two
// GEMMs of the other half-batch, the all-gather during the second.
void ResidualBlock::ForwardInHalfBatches(const Pass& pass, const ModelBatch& batch,
                                         ForwardState& state, ResidualSaved& saved) const {
  const InSlices begun = Begin(pass, batch, state, saved);
  saved.x0 = state.branch.empty() ? state.residual : saved.layers[0].norm.x;
  state.branch = state.second_branch = Tensor();
  const InSlices y = InnerLayersInHalfBatches(pass, batch, saved, begun);
  const int last = count() - 1;
  const Mixer& mixer = *layers_[last].mixer;
  state.residual = Input(saved, last);
  std::array<kernels::Event*, 2> left;
  const bool ahead = state.next != nullptr;
  for (const int half : {0, 1}) {
    MixHalf(pass, batch, saved, last, y, half, Purpose::kOutput);
    if (half == 0) {
      TensorShard::AwaitInput(pass, y.slices[1]);
    } else if (ahead) {
      TensorShard::AwaitInput(pass, state.begun.slices[0]);
    }
    const Tensor output = SliceOf(batch.branch_storage, 2, half);
    LinearForward(pass, mixer.output(), SliceOf(mixer.Output(*saved.layers[last].mixer), 2, half),
                  output);
    Tensor& branch = half == 0 ? state.branch : state.second_branch;
    left[half] = shard_.Start(pass, ClosingCollective(), [&](const Pass& on) {
      branch = ReduceBranch(on, batch, saved, last, output, half, /*gather_follows=*/ahead);
    });
    if (ahead) state.next->BeginForward(pass, batch, state, *state.next_saved, half);
  }
  // Without a next block, the caller reads both half-batches on the compute stream.
  for (const int half : {0, 1}) {
    if (!ahead) shard_.Await(pass, {Tensor(), left[half]});
  }
}

// Where BeginForward leaves the state of a half-batch for Forward.
Started& ResidualBlock::GatheringOf(const ModelBatch& batch, ForwardState& state,
                                    const NormSaved& norm, int half) const {
  InSlices& begun = state.begun;
  begun.all = shard_.sequence ? batch.branch_storage : norm.y;
  begun.count = half + 1;
  begun.slices[half].tensor = SliceOf(begun.all, 2, half);
  return begun.slices[half];
}

InSlices ResidualBlock::Begin(const Pass& pass, const ModelBatch& batch, ForwardState& state,
                              ResidualSaved& saved) const {
  for (const int half : {0, 1}) {
    if (state.begun.count == half) BeginForward(pass, batch, state, saved, half);
  }
  return std::exchange(state.begun, {});
}

// From the norm's output `y` to the mixer's output, of one half-batch. A mixer that exchanges
// computes both when asked for the first.
void ResidualBlock::MixHalf(const Pass& pass, const ModelBatch& batch, ResidualSaved& saved,
                            int layer, const InSlices& y, int half, Purpose purpose) const {
  const Mixer& mixer = *layers_[layer].mixer;
  MixerSaved& own = *saved.layers[layer].mixer;
  const auto project = [&](int of) {
    const Tensor x = shard_.Await(pass, y.slices[of]);
    mixer.Project(pass, batch, own, x, of * x.dim(0), purpose);
  };
  if (!mixer.exchanges()) {
    const int64_t samples = batch.shape.batch / 2;
    project(half);
    mixer.Mix(pass, batch, own, {half * samples, (half + 1) * samples});
  } else if (half == 0) {
    project(0);
    project(1);
    mixer.Mix(pass, batch, own, AllSamples(batch));
  }
}

// From all rows of the first norm's output (`y`) to all rows of the last one's.
InSlices ResidualBlock::InnerLayersInHalfBatches(const Pass& pass, const ModelBatch& batch,
                                                 ResidualSaved& saved, InSlices y) const {
  for (int i = 0; !is_last(i); ++i) {
    const ResidualLayer& layer = layers_[i];
    const ResidualLayer& next = layers_[i + 1];
    const NormSaved& next_norm = saved.layers[i + 1].norm;
    InSlices next_y = {.all = shard_.sequence ? batch.branch_storage : next_norm.y, .count = 2};
    for (const int half : {0, 1}) {
      MixHalf(pass, batch, saved, i, y, half, Purpose::kOutput);
      // So that the all-gather of the other half-batch overlaps with this GEMM.
      TensorShard::AwaitInput(pass, half == 0 ? y.slices[1] : next_y.slices[0]);
      const Tensor output = SliceOf(batch.branch_storage, 2, half);
      LinearForward(pass, layer.mixer->output(),
                    SliceOf(layer.mixer->Output(*saved.layers[i].mixer), 2, half), output);
      const NormSaved norm = next_norm.Slice(2, half);
      Started& entering = next_y.slices[half];
      entering.tensor = SliceOf(next_y.all, 2, half);
      entering.done = shard_.Start(pass, Collective::kAllGather, [&](const Pass& on) {
        const Tensor branch =
            ReduceBranch(on, batch, saved, i, output, half, /*gather_follows=*/true);
        NormForward(on, next.norm, SliceOf(Input(saved, i), 2, half), branch, norm);
        entering.input_ready = TensorShard::InputReady(on);
        shard_.GatherRows(on, norm.y, output);
      });
    }
    y = next_y;
  }
  return y;
}

// This rank's rows of the branch of a half-batch.
Tensor ResidualBlock::ReduceBranch(const Pass& pass, const ModelBatch& batch,
                                   const ResidualSaved& saved, int layer, const Tensor& partial,
                                   int half, bool gather_follows) const {
  const Tensor rows = shard_.ReduceRows(pass, partial, gather_follows);
  const int64_t tokens = partial.dim(0);
  FinishBranch(pass, batch, layers_[layer], *saved.layers[layer].mixer,
               {half * tokens, (half + 1) * tokens}, rows, shard_.FirstToken(batch.shape, half));
  return rows;
}

// From this rank's rows of the sum of `tokens` over the tensor group, which begin with token
// `first`, to those of the branch.
void ResidualBlock::FinishBranch(const Pass& pass, const ModelBatch& batch,
                                 const ResidualLayer& layer, MixerSaved& saved, Span tokens,
                                 const Tensor& rows, int64_t first) {
  layer.mixer->FinishBranch(pass, saved, tokens, rows, first);
  layer.dropout.Apply(pass, batch, rows, rows, first);
}

// -------------------------------------------------------------------------------------- backward

void ResidualBlock::Backward(const Pass& pass, const ModelBatch& batch, BackwardState& state,
                             Saved& base) const {
  ResidualSaved& saved = Of(base);
  InSlices d_out = std::exchange(state.d_whole, {}), y;
  if (recomputed_.norms) RecomputeForward(pass, batch, state, saved, d_out, y);
  if (d_out.empty()) d_out = StartGradient(pass, batch, state);
  std::function<void()> waiting;
  for (int i = count(); i-- > 0;) {
    LayerBackward(pass, batch, state, saved, i, d_out, std::exchange(y, {}), waiting);
  }
}

// Recomputes what was not kept, except the activation of a mixer that keeps its GEMM outputs, which
// is recomputed together with its gradient. Where everything is recomputed and all-gathers overlap,
// it also starts the all-gather of d_hidden, and leaves all rows of the last norm's output in `y`.
void ResidualBlock::RecomputeForward(const Pass& pass, const ModelBatch& batch,
                                     const BackwardState& state, ResidualSaved& saved,
                                     InSlices& d_out, InSlices& y) const {
  ForwardState recomputing;
  recomputing.residual = saved.x0;
  const int last = count() - 1;
  if (!recomputed_.gemms) {
    for (int i = 0; i <= last; ++i) {
      recomputing.residual = Input(saved, i);
      NormForward(pass, layers_[i].norm, recomputing, saved.layers[i].norm);
    }
    return;
  }
  if (shard_.slices(batch.shape) > 1) {
    NormForward(pass, layers_[0].norm, recomputing, saved.layers[0].norm);
    y = InnerLayersInHalfBatches(
        pass, batch, saved,
        shard_.StartGatherRows(pass, saved.layers[0].norm.y, batch.branch_storage, 2));
    if (HasSecondGatherBuffer(batch)) d_out = StartGradient(pass, batch, state);
    for (const int half : {0, 1}) {
      MixHalf(pass, batch, saved, last, y, half, Purpose::kBackward);
    }
    for (const int half : {0, 1}) y.slices[half].done = nullptr;
    if (!HasSecondGatherBuffer(batch)) y = {};
    return;
  }
  for (int i = 0; i < last; ++i) LayerForward(pass, batch, recomputing, saved, i);
  NormForward(pass, layers_[last].norm, recomputing, saved.layers[last].norm);
  MixerForward(pass, batch, saved, last, Purpose::kBackward, [&] {
    if (!HasSecondGatherBuffer(batch)) return;
    d_out = StartGradient(pass, batch, state);
    y = {batch.branch_storage, {Started{batch.branch_storage}}, 1};
  });
}

// From all rows of the gradient of the layer's branch (`d_out`) to state.d_hidden, the gradient of
// its norm's input; `d_out` becomes all rows of that where the layer is not the block's first. `y`:
// all rows of the norm's output, if they are there. `waiting`: the weight gradient that the layer
// behind has left to overlap with exchanges; the layer leaves its own there.
void ResidualBlock::LayerBackward(const Pass& pass, const ModelBatch& batch, BackwardState& state,
                                  ResidualSaved& saved, int layer, InSlices& d_out, InSlices y,
                                  std::function<void()>& waiting) const {
  const Mixer& mixer = *layers_[layer].mixer;
  LayerSaved& own = saved.layers[layer];
  const bool inner = layer > 0, beside = HasSecondGatherBuffer(batch);
  // Whether the layer in front awaits the all-gather that starts here. The next block awaits it
  // too, unless it needs the memory before.
  const bool ahead = beside && (inner || (state.more_behind && gathers_ahead_));
  // An all-gather has time until the weight gradients; the mixer's sums would wait for its end.
  const auto gather_input = [&] {
    if (beside && y.empty()) y = StartInput(pass, batch, own.norm);
  };
  const bool sums_first = mixer.sums_in_backward() && !mixer.by_rows();
  if (!sums_first) gather_input();

  // The norm behind has summed the bias's gradient: in the block behind for all of d_hidden, within
  // the block directly.
  const bool summed = is_last(layer) && std::exchange(state.d_hidden_summed, false);
  const bool complete = is_last(layer) ? summed : SumsHiddenGradient(state);
  const auto output_weights = [&](const Tensor& dy) {
    if (summed) LinearBackwardBias(pass, mixer.output(), state.d_hidden_sums);
    LinearBackwardWeights(pass, mixer.output(), dy, mixer.Output(*own.mixer), complete);
  };
  std::array<Started, 2> d_y;
  const Tensor dy = MixerBackward(
      pass, batch, saved, layer, d_out, output_weights, std::exchange(waiting, nullptr),
      [&] {
        if (sums_first) gather_input();
      },
      d_y);
  if (!LeavesForExchanges(layer)) output_weights(dy);

  const auto input_weights = [this, &pass, &batch, &mixer, &own](InSlices gathered) {
    if (gathered.empty()) gathered = StartInput(pass, batch, own.norm);
    mixer.InputWeights(pass, *own.mixer, shard_.Await(pass, gathered));
  };
  // An input that has to be gathered would overwrite the rows of d_hidden.
  if (inner && LeavesForExchanges(layer - 1) && mixer.input_weights_may_wait() &&
      !shard_.sequence) {
    waiting = [input_weights] { input_weights({}); };
  } else if (!ahead) {
    input_weights(y);
  }
  NormBackwardOf(pass, batch, state, saved, layer, d_y, /*gathers=*/inner || ahead, d_out);
  if (ahead) input_weights(y);
}

// From `d_out` to the gradient of the norm's output, whose reduce-scatter starts slice by slice
// from saved.d_small. Returns all rows of the gradient of the branch, with dropout. `before_mixing`
// is called in front of the backward of a mixer that mixes.
Tensor ResidualBlock::MixerBackward(const Pass& pass, const ModelBatch& batch, ResidualSaved& saved,
                                    int layer, const InSlices& d_out,
                                    const std::function<void(Tensor dy)>& output_weights,
                                    const std::function<void()>& waiting,
                                    absl::FunctionRef<void()> before_mixing,
                                    std::array<Started, 2>& d_y) const {
  const Mixer& mixer = *layers_[layer].mixer;
  MixerSaved& own = *saved.layers[layer].mixer;
  // Within the block an all-gather follows, and nobody writes to d_small before that. The next
  // block may recompute its norms in this memory first.
  const bool gather_follows = layer > 0;
  const auto leave = [&](int64_t first, int64_t rows) {
    const Tensor dx = saved.d_small.Rows(first, rows);
    mixer.InputBackward(pass, own, first, dx);
    d_y[first / rows] = shard_.StartReduceRows(pass, dx, gather_follows);
  };
  const Tensor all =
      Dropped(pass, batch, d_out, layers_[layer].dropout, [&](Tensor dy, int64_t first) {
        mixer.OutputBackward(pass, batch, own, dy, first);
        if (mixer.by_rows()) leave(first, dy.dim(0));
      });
  if (mixer.by_rows()) return all;
  before_mixing();
  BesideMix work;
  if (LeavesForExchanges(layer)) {
    work.first = [&] { output_weights(all); };
    // The last exchange is the larger one.
    work.last = waiting;
  }
  mixer.MixBackward(pass, batch, own, all, work);
  const int64_t rows = saved.d_small.dim(0) / d_out.count;
  for (int slice = 0; slice < d_out.count; ++slice) leave(slice * rows, rows);
  return all;
}

// The gradient of a branch from all rows of d_hidden, with dropout, slice by slice as they arrive;
// `use` gets each slice and its first row. Gathered rows are changed in place. d_hidden itself is
// also the gradient of the residual stream, so the branch's storage takes the result then. Returns
// all rows.
Tensor ResidualBlock::Dropped(const Pass& pass, const ModelBatch& batch, const InSlices& d_out,
                              const Dropout& dropout,
                              absl::FunctionRef<void(Tensor dy, int64_t first)> use) const {
  const Tensor& all = dropout.Drops(pass) && !shard_.sequence ? batch.branch_storage : d_out.all;
  for (int slice = 0; slice < d_out.count; ++slice) {
    const Tensor arrived = shard_.Await(pass, d_out.slices[slice]);
    const Tensor dy = SliceOf(all, d_out.count, slice);
    const int64_t first = slice * dy.dim(0);
    dropout.Apply(pass, batch, arrived, dy, first);
    use(dy, first);
  }
  return all;
}

// d_hidden += the gradient through a layer's norm. With `gathers` its all-gather starts: into
// `d_out`, or into state.d_whole from the block's first layer.
void ResidualBlock::NormBackwardOf(const Pass& pass, const ModelBatch& batch, BackwardState& state,
                                   const ResidualSaved& saved, int layer,
                                   const std::array<Started, 2>& d_y, bool gathers,
                                   InSlices& d_out) const {
  const Norm& norm = layers_[layer].norm;
  const NormSaved& own = saved.layers[layer].norm;
  const Tensor x = Input(saved, layer);
  InSlices& gathered = layer > 0 ? d_out : state.d_whole;
  if (d_out.count > 1) {
    if (gathers) {
      gathered = NormBackwardGathering(pass, norm, d_y, x, own, batch, state);
    } else {
      NormBackwardInSlices(pass, norm, d_y, x, own, state.d_hidden, [](int) {});
    }
    return;
  }
  Tensor d_bias;
  if (layer > 0 && SumsHiddenGradient(state)) {
    const ParameterId bias = *layers_[layer - 1].mixer->output().bias;
    d_bias = (*pass.gradients)[bias];
    NormBackward(pass, norm, shard_.Await(pass, d_y[0]), x, own, state, d_bias);
    Ready(pass, bias);
  } else {
    NormBackward(pass, norm, shard_.Await(pass, d_y[0]), x, own, state);
  }
  if (gathers) gathered = StartGradient(pass, batch, state);
}

// NormBackwardInSlices, which starts the all-gather of d_hidden of each slice as it completes.
InSlices ResidualBlock::NormBackwardGathering(const Pass& pass, const Norm& norm,
                                              const std::array<Started, 2>& dy, const Tensor& x,
                                              const NormSaved& saved, const ModelBatch& batch,
                                              const BackwardState& state) const {
  const Tensor& storage = GradientStorage(batch);
  InSlices d_hidden = {.all = shard_.sequence ? storage : state.d_hidden, .count = 2};
  NormBackwardInSlices(pass, norm, dy, x, saved, state.d_hidden, [&](int slice) {
    d_hidden.slices[slice] =
        shard_.StartGatherRows(pass, SliceOf(state.d_hidden, 2, slice), SliceOf(storage, 2, slice));
  });
  return d_hidden;
}

// Starts the all-gather of state.d_hidden.
InSlices ResidualBlock::StartGradient(const Pass& pass, const ModelBatch& batch,
                                      const BackwardState& state) const {
  return shard_.StartGatherRows(pass, state.d_hidden, GradientStorage(batch),
                                shard_.slices(batch.shape));
}
// Starts the all-gather of a norm's output.
InSlices ResidualBlock::StartInput(const Pass& pass, const ModelBatch& batch,
                                   const NormSaved& norm) const {
  return shard_.StartGatherRows(pass, norm.y, batch.branch_storage, shard_.slices(batch.shape));
}

// Whether weight gradients overlap with the exchanges of a layer's mixer. Where collectives of the
// tensor group overlap, the weight gradients belong to those, which move more bytes.
bool ResidualBlock::LeavesForExchanges(int layer) const {
  return layers_[layer].mixer->exchanges() && shard_.overlap == TensorOverlap::kNone;
}

// -------------------------------------------------------------------------- backward in two calls

void ResidualBlock::BackwardInput(const Pass& pass, const ModelBatch& batch, BackwardState& state,
                                  Saved& base) const {
  ResidualSaved& saved = Of(base);
  for (int i = count(); i-- > 0;) {
    const ResidualLayer& layer = layers_[i];
    const Mixer& mixer = *layer.mixer;
    LayerSaved& own = saved.layers[i];
    GatherRowsKeeping(pass, batch, state, layer.dropout, [&](Tensor dy, int64_t first) {
      mixer.SplitOutputBackward(pass, batch, *own.mixer, dy, first);
    });
    mixer.SplitMixBackward(pass, batch, *own.mixer, batch.branch_storage);
    const Tensor d_y = shard_.ReduceRowsThrough(
        pass, saved.d_small, batch.gathered,
        [&](int64_t first, Tensor dx) { mixer.InputBackward(pass, *own.mixer, first, dx); });
    mixer.KeepGradients(pass, *own.mixer);
    NormBackwardInput(pass, layer.norm, d_y, Input(saved, i), own.norm, state.d_hidden, own.d_norm);
    kernels::Copy(pass.stream, KeptGradient(batch), own.norm.x);
  }
}

void ResidualBlock::BackwardWeights(const Pass& pass, const ModelBatch& batch, BackwardState& state,
                                    Saved& base) const {
  ResidualSaved& saved = Of(base);
  // Each all-gather overlaps with the GEMM before it.
  std::vector<Tensor> rows;
  for (int i = count(); i-- > 0;) {
    rows.push_back(saved.layers[i].norm.x);
    rows.push_back(saved.layers[i].norm.y);
  }
  const bool beside = HasSecondGatherBuffer(batch);
  size_t next = 0;
  const auto start = [&] {
    const Tensor storage = beside && next % 2 == 0 ? batch.gathered : batch.branch_storage;
    return shard_.StartGatherRows(pass, rows[next++], storage);
  };
  Started begun = beside ? start() : Started();
  const auto whole = [&] {
    const Started now = beside ? begun : start();
    if (beside && next < rows.size()) begun = start();
    return shard_.Await(pass, now);
  };
  for (int i = count(); i-- > 0;) {
    const Mixer& mixer = *layers_[i].mixer;
    LayerSaved& own = saved.layers[i];
    LinearBackwardWeights(pass, mixer.output(), whole(), mixer.Output(*own.mixer));
    mixer.SplitInputWeights(pass, *own.mixer, whole());
    NormBackwardWeights(pass, layers_[i].norm, own.d_norm);
  }
}

// Calls `gemm` with all rows of state.d_hidden with dropout, and keeps this rank's rows of them in
// the branch's storage, because d_hidden changes.
void ResidualBlock::GatherRowsKeeping(const Pass& pass, const ModelBatch& batch,
                                      const BackwardState& state, const Dropout& dropout,
                                      TensorShard::WithRows gemm) const {
  if (!dropout.Drops(pass)) {
    if (!shard_.sequence) kernels::Copy(pass.stream, state.d_hidden, batch.branch_storage);
    shard_.GatherRowsThrough(pass, state.d_hidden, batch.branch_storage, gemm);
    return;
  }
  shard_.GatherRowsThrough(pass, state.d_hidden, batch.branch_storage,
                           [&](Tensor dy, int64_t first) {
                             const Tensor rows = batch.branch_storage.Rows(first, dy.dim(0));
                             dropout.Apply(pass, batch, dy, rows, first);
                             gemm(rows, first);
                           });
}
Tensor ResidualBlock::KeptGradient(const ModelBatch& batch) const {
  const int64_t rows = shard_.rows(batch.shape);
  return batch.branch_storage.Rows(shard_.sequence ? shard_.rank * rows : 0, rows);
}

}  // namespace

std::unique_ptr<Block> MakeResidualBlock(const ResidualBlockSpec& spec,
                                         std::vector<ResidualLayer> layers) {
  return std::make_unique<ResidualBlock>(spec, std::move(layers));
}

}  // namespace muster::parallel
