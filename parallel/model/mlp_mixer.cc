#include "parallel/model/mlp_mixer.h"

#include <memory>
#include <vector>

#include "base/check.h"
#include "kernels/arena.h"
#include "kernels/gemm/linear.h"
#include "kernels/memory/memory.h"
#include "kernels/tensor.h"
#include "parallel/model/language_model.h"
#include "parallel/model/layer_kind.h"
#include "parallel/model/linear.h"

namespace muster::parallel {
namespace {

using kernels::Arena;
using kernels::Tensor;

kernels::Epilogue EpilogueOf(MlpKind kind) {
  switch (kind) {
    case MlpKind::kGelu:
      return kernels::Epilogue::kGelu;
    case MlpKind::kRelu2:
      return kernels::Epilogue::kRelu2;
    case MlpKind::kSwiglu:
      return kernels::Epilogue::kSwiglu;
  }
  return kernels::Epilogue::kNone;
}

class MlpMixer : public Mixer {
 public:
  MlpMixer(ParameterRegistry& registry, const MlpSpec& spec, const TensorShard& shard,
           const Recomputed& recomputed)
      : ffn_(shard.ffn().size()),
        activation_(EpilogueOf(spec.kind)),
        swiglu_(spec.kind == MlpKind::kSwiglu),
        recomputes_gemms_(recomputed.gemms),
        recomputes_activation_(recomputed.activation) {
    CHECK(spec.kind != MlpKind::kRelu2 || !spec.bias) << spec.name;
    std::vector<Span> rows = {shard.ffn()};
    if (swiglu_) rows.push_back({spec.ffn + shard.ffn().begin, spec.ffn + shard.ffn().end});
    up_ = AddColumnParallel(
        registry,
        {spec.name + ".up", swiglu_ ? 2 * spec.ffn : spec.ffn, spec.hidden, spec.stddev, spec.bias},
        rows, shard);
    down_ = AddRowParallel(
        registry, {spec.name + ".down", spec.hidden, spec.ffn, spec.output_stddev, spec.bias},
        shard.ffn(), shard);
  }

  std::unique_ptr<Saved> MakeSaved() const override { return std::make_unique<MlpSaved>(); }
  void TakeOutputs(Arena& arena, const char* category, const BatchShape& shape,
                   Saved& base) const override {
    Of(base).pre =
        arena.Take(category, shape.activation, {shape.tokens(), swiglu_ ? 2 * ffn_ : ffn_});
  }
  void TakeActivation(Arena& arena, const char* category, const BatchShape& shape,
                      Saved& base) const override {
    if (RecomputesSwiglu()) return;
    Of(base).up = arena.Take(category, shape.activation, {shape.tokens(), ffn_});
  }
  void TakeScratch(Arena& arena, const BatchShape& shape, Tensor /*d_input*/,
                   Saved& base) const override {
    MlpSaved& saved = Of(base);
    saved.d_up = arena.Take("scratch", shape.activation, {shape.tokens(), ffn_});
    if (RecomputesSwiglu()) saved.up = saved.d_up;
  }

  void Project(const Pass& pass, const ModelBatch& /*batch*/, Saved& base, Tensor x, int64_t first,
               Purpose purpose) const override {
    const MlpSaved& saved = Of(base);
    const Tensor pre = saved.pre.Rows(first, x.dim(0));
    if (swiglu_ && purpose == Purpose::kBackward) {
      LinearForward(pass, up_, x, pre);
      return;
    }
    LinearForwardThrough(pass, up_, activation_, x, pre, saved.up.Rows(first, x.dim(0)));
  }
  Tensor Output(const Saved& base) const override { return Of(base).up; }
  const Linear& output() const override { return down_; }
  // It treats every token alone.
  absl::StatusOr<std::unique_ptr<MixerState>> TakeState(
      Arena& /*arena*/, const DecodeShape& /*shape*/) const override {
    return std::make_unique<MixerState>();
  }

  void OutputBackward(const Pass& pass, const ModelBatch& /*batch*/, Saved& base, Tensor dy,
                      int64_t first) const override {
    if (!swiglu_) return;  // the gradient of up's bias is the sum over all rows at once
    const MlpSaved& saved = Of(base);
    const int64_t rows = dy.dim(0);
    LinearBackwardInputThroughSwiglu(pass, down_, dy,
                                     RecomputesSwiglu() ? saved.up.Rows(first, rows) : Tensor(),
                                     saved.d_up.Rows(first, rows), saved.pre.Rows(first, rows));
  }
  void MixBackward(const Pass& pass, const ModelBatch& /*batch*/, Saved& base, Tensor dy,
                   const BesideMix& /*beside*/) const override {
    if (swiglu_) return;
    const MlpSaved& saved = Of(base);
    LinearBackwardInputThrough(pass, down_, activation_, dy, saved.up, saved.d_up, saved.pre, up_,
                               recomputes_activation_ && !recomputes_gemms_);
  }
  void InputBackward(const Pass& pass, Saved& base, int64_t first, Tensor dx) const override {
    LinearBackwardInput(pass, up_, InputGradient(Of(base)).Rows(first, dx.dim(0)), dx);
  }
  void InputWeights(const Pass& pass, Saved& base, Tensor x) const override {
    LinearBackwardWeights(pass, up_, InputGradient(Of(base)), x, /*bias_is_complete=*/!swiglu_);
  }
  bool by_rows() const override { return swiglu_; }
  // Without a gate the gradient of up's output lies in scratch memory.
  bool input_weights_may_wait() const override { return swiglu_; }

  void SplitOutputBackward(const Pass& pass, const ModelBatch& /*batch*/, Saved& base, Tensor dy,
                           int64_t first) const override {
    const MlpSaved& saved = Of(base);
    const int64_t rows = dy.dim(0);
    const Tensor d_up = saved.d_up.Rows(first, rows), pre = saved.pre.Rows(first, rows);
    if (swiglu_) {
      LinearBackwardInputThroughSwiglu(pass, down_, dy, /*x=*/Tensor(), d_up, pre);
    } else {
      LinearBackwardInputThrough(pass, down_, activation_, dy, d_up, pre);
    }
  }
  void SplitMixBackward(const Pass& /*pass*/, const ModelBatch& /*batch*/, Saved& /*saved*/,
                        Tensor /*dy*/) const override {}
  void KeepGradients(const Pass& pass, Saved& base) const override {
    if (!swiglu_) kernels::Copy(pass.stream, Of(base).d_up, Of(base).pre);
  }
  void SplitInputWeights(const Pass& pass, Saved& base, Tensor x) const override {
    LinearBackwardWeights(pass, up_, Of(base).pre, x);
  }

 private:
  struct MlpSaved : Saved {
    Tensor pre;   // the output of up: [T,F] or [T,2F]; SwiGLU's backward overwrites it
    Tensor up;    // the activation, [T,F]
    Tensor d_up;  // [T,F], scratch
  };
  static MlpSaved& Of(Saved& saved) { return static_cast<MlpSaved&>(saved); }
  static const MlpSaved& Of(const Saved& saved) { return static_cast<const MlpSaved&>(saved); }

  // Whether SwiGLU's output is recomputed in the pass that computes its gradient, in the memory of
  // d_up, which that pass reads.
  bool RecomputesSwiglu() const { return swiglu_ && recomputes_activation_; }
  // The gradient of up's output.
  const Tensor& InputGradient(const MlpSaved& saved) const {
    return swiglu_ ? saved.pre : saved.d_up;
  }

  int64_t ffn_;  // of this rank
  kernels::Epilogue activation_;
  bool swiglu_, recomputes_gemms_, recomputes_activation_;
  Linear up_, down_;
};

}  // namespace

std::unique_ptr<Mixer> MakeMlpMixer(ParameterRegistry& registry, const MlpSpec& spec,
                                    const TensorShard& shard, const Recomputed& recomputed) {
  return std::make_unique<MlpMixer>(registry, spec, shard, recomputed);
}

namespace {

LayerSize SizeOfLayer(const LanguageModelConfig& config) {
  const int64_t c = config.hidden;
  const int64_t up = config.mlp == MlpKind::kSwiglu ? 2 * config.ffn : config.ffn;
  return {up * c + config.ffn * c, config.bias ? up + c : 0, config.ffn * c, 0, config.ffn};
}

SplitUnit SplitOfLayer(const LanguageModelConfig& config) {
  return {SplitKind::kMlpColumns, config.ffn};
}

std::unique_ptr<Mixer> MakeLayer(const LayerPlace& place) {
  return MakeMlpMixer(place.registry,
                      {.name = place.block + ".mlp",
                       .kind = place.config.mlp,
                       .hidden = place.config.hidden,
                       .ffn = place.config.ffn,
                       .bias = place.config.bias,
                       .stddev = kInitialStddev,
                       .output_stddev = place.residual_stddev},
                      place.shard, place.recomputed);
}

}  // namespace

const LayerKind kMlpLayer = {
    .name = "mlp", .size = SizeOfLayer, .split = SplitOfLayer, .make = MakeLayer};

}  // namespace muster::parallel
