#include "parallel/model/attention_mixer.h"

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "kernels/arena.h"
#include "kernels/attention/attention.h"
#include "kernels/attention/attention_decode.h"
#include "kernels/memory/memory.h"
#include "kernels/tensor.h"
#include "parallel/context/context_attention.h"
#include "parallel/model/language_model.h"
#include "parallel/model/layer_kind.h"
#include "parallel/model/linear.h"
#include "parallel/model/qkv.h"

namespace muster::parallel {
namespace {

using kernels::Arena;
using kernels::DType;
using kernels::Tensor;

class AttentionMixer : public Mixer {
 public:
  AttentionMixer(ParameterRegistry& registry, const AttentionSpec& spec, const TensorShard& shard,
                 const ModelParallel& parallel)
      : rotary_(spec.rotary),
        context_size_(parallel.context_size),
        context_method_(parallel.context_method),
        context_head_groups_(parallel.context_head_groups),
        deterministic_(parallel.deterministic),
        qkv_(registry,
             {spec.name + ".qkv", spec.hidden, spec.heads, spec.kv_heads, spec.head_width,
              spec.stddev, spec.bias},
             shard) {
    output_ = AddRowParallel(registry,
                             {spec.name + ".output", spec.hidden, spec.heads * spec.head_width,
                              spec.output_stddev, spec.bias},
                             {shard.heads().begin * qkv_.depth(), shard.heads().end * qkv_.depth()},
                             shard);
  }

  std::unique_ptr<Saved> MakeSaved() const override { return std::make_unique<AttentionSaved>(); }
  void TakeOutputs(Arena& arena, const char* category, const BatchShape& shape,
                   Saved& base) const override {
    AttentionSaved& saved = Of(base);
    saved.qkv = qkv_.Take(arena, category, shape.activation, shape.tokens());
    saved.attention = arena.Take(category, shape.activation, {shape.tokens(), Width()});
    if (context_size_ == 1) {
      saved.lse = arena.Take(category, DType::kF32, {shape.batch, qkv_.heads(), shape.sequence});
      return;
    }
    auto context = MakeContextAttention(
        {context_method_, context_size_, shape.batch, shape.sequence * context_size_, qkv_.heads(),
         qkv_.kv_heads(), qkv_.depth(), shape.activation, deterministic_, context_head_groups_});
    CHECK_OK(context);
    saved.context = *std::move(context);
    saved.context_saved = saved.context->TakeSaved(arena);
  }
  void TakeActivation(Arena& /*arena*/, const char* /*category*/, const BatchShape& /*shape*/,
                      Saved& /*saved*/) const override {}
  void TakeScratch(Arena& arena, const BatchShape& shape, Tensor d_input,
                   Saved& base) const override {
    AttentionSaved& saved = Of(base);
    saved.d_attention = Width() <= d_input.dim(1)
                            ? Tensor(d_input.data(), d_input.dtype(), {shape.tokens(), Width()})
                            : arena.Take("scratch", shape.activation, {shape.tokens(), Width()});
    saved.d_qkv = qkv_.Take(arena, "scratch", shape.activation, shape.tokens());
    saved.d_shared = qkv_.TakeScratch(arena, shape.activation, shape.tokens());
    if (context_size_ == 1) {
      saved.delta = arena.Take("scratch", DType::kF32, {shape.batch, qkv_.heads(), shape.sequence});
    } else {
      saved.context->TakeScratch(arena, *saved.context_saved);
    }
  }

  // Rotary positions are applied to whole sequences in the GEMM's epilogue, to parts of sequences
  // once all rows have arrived.
  void Project(const Pass& pass, const ModelBatch& batch, Saved& base, Tensor x, int64_t first,
               Purpose /*purpose*/) const override {
    AttentionSaved& saved = Of(base);
    const int64_t rows = x.dim(0);
    const bool whole = rotary_ && rows % batch.shape.sequence == 0;
    saved.turned = whole;
    qkv_.Forward(pass, x, saved.qkv.Rows(first, rows), whole ? batch.rotary : Tensor());
  }
  void Mix(const Pass& pass, const ModelBatch& batch, Saved& base, Span samples) const override {
    AttentionSaved& saved = Of(base);
    if (rotary_ && !saved.turned) {
      CHECK_EQ(samples.size(), batch.shape.batch);
      qkv_.Rotate(pass, batch, saved.qkv, /*inverse=*/false);
    }
    if (context_size_ == 1) {
      kernels::AttentionForward(pass.stream, Attention(batch, saved, samples));
    } else {
      saved.context->Forward({pass.stream, *pass.context, pass.context_overlap},
                             ContextInputs(batch, saved), *saved.context_saved);
    }
  }
  bool exchanges() const override { return context_size_ > 1; }
  Tensor Output(const Saved& base) const override { return Of(base).attention; }
  const Linear& output() const override { return output_; }

  absl::StatusOr<std::unique_ptr<MixerState>> TakeState(Arena& arena,
                                                        const DecodeShape& shape) const override {
    if (context_size_ > 1) {
      return absl::UnimplementedError(absl::StrCat("attention keeps no tokens of a sequence that ",
                                                   context_size_,
                                                   " ranks share (context parallelism)"));
    }
    auto state = std::make_unique<AttentionState>();
    for (Tensor* cache : {&state->k, &state->v}) {
      *cache = arena.Take("state", shape.activation,
                          {shape.batch, shape.context, qkv_.kv_heads(), qkv_.depth()});
    }
    state->partial = arena.Take(
        "state", DType::kF32,
        {kernels::AttentionDecodePartials(shape.batch, qkv_.heads(), shape.context, qkv_.depth())});
    return state;
  }
  // Several tokens attend to each other like a whole sequence, and to the tokens before them in a
  // second call, whose result is merged with the first.
  void MixOnward(const Pass& pass, const ModelBatch& batch, Saved& base,
                 MixerState& base_state) const override {
    const AttentionSaved& saved = Of(base);
    const auto& state = static_cast<const AttentionState&>(base_state);
    const BatchShape& shape = batch.shape;
    const int64_t before = batch.first_position, count = shape.sequence;
    CHECK_LE(before + count, state.k.dim(1)) << "tokens of a text";
    if (rotary_) CHECK(saved.turned);
    const Tensor k = qkv_.Keys(saved.qkv, shape), v = qkv_.Values(saved.qkv, shape);
    kernels::CopyStrided(pass.stream, k, Tokens(state.k, before, count));
    kernels::CopyStrided(pass.stream, v, Tokens(state.v, before, count));
    const kernels::AttentionArgs own = Attention(batch, saved, {0, shape.batch});
    if (count == 1) {
      kernels::AttentionDecode(pass.stream, {.q = own.q,
                                             .k = Tokens(state.k, 0, before + 1),
                                             .v = Tokens(state.v, 0, before + 1),
                                             .out = own.out,
                                             .partial = state.partial});
      return;
    }
    kernels::AttentionForward(pass.stream, own);
    if (before == 0) return;
    kernels::AttentionArgs rest = own;
    rest.k = Tokens(state.k, 0, before);
    rest.v = Tokens(state.v, 0, before);
    rest.out = Heads(saved.d_attention, shape);
    rest.lse = saved.delta;
    rest.causal = false;
    kernels::AttentionForward(pass.stream, rest);
    kernels::AttentionMerge(pass.stream, {own.out, own.lse, rest.out, rest.lse});
  }
  bool keeps_tokens() const override { return true; }

  void OutputBackward(const Pass& pass, const ModelBatch& /*batch*/, Saved& base, Tensor dy,
                      int64_t first) const override {
    LinearBackwardInput(pass, output_, dy, Of(base).d_attention.Rows(first, dy.dim(0)));
  }
  void MixBackward(const Pass& pass, const ModelBatch& batch, Saved& base, Tensor /*dy*/,
                   const BesideMix& beside) const override {
    const AttentionSaved& saved = Of(base);
    kernels::AttentionBackwardArgs args;
    args.forward = Attention(batch, saved, {0, batch.shape.batch});
    args.dout = Heads(saved.d_attention, batch.shape);
    args.dq = qkv_.Queries(saved.d_qkv, batch.shape);
    args.dk = qkv_.Keys(saved.d_qkv, batch.shape);
    args.dv = qkv_.Values(saved.d_qkv, batch.shape);
    args.delta = saved.delta;
    args.deterministic = deterministic_;
    if (context_size_ == 1) {
      kernels::AttentionBackward(pass.stream, args);
    } else {
      saved.context->Backward(
          {pass.stream, *pass.context, pass.context_overlap, beside.first, beside.last},
          ContextInputs(batch, saved), {args.dout, args.dq, args.dk, args.dv},
          *saved.context_saved);
    }
    if (rotary_) qkv_.Rotate(pass, batch, saved.d_qkv, /*inverse=*/true);
  }
  void InputBackward(const Pass& pass, Saved& base, int64_t first, Tensor dx) const override {
    const AttentionSaved& saved = Of(base);
    const int64_t rows = dx.dim(0);
    qkv_.BackwardInput(pass, saved.d_qkv.Rows(first, rows), dx,
                       saved.d_shared.empty() ? Tensor() : saved.d_shared.Rows(first, rows));
  }
  void InputWeights(const Pass& pass, Saved& base, Tensor x) const override {
    qkv_.BackwardWeights(pass, Of(base).d_qkv, x);
  }

  void KeepGradients(const Pass& pass, Saved& base) const override {
    Copy(pass.stream, Of(base).d_qkv, Of(base).qkv);
  }
  void SplitInputWeights(const Pass& pass, Saved& base, Tensor x) const override {
    qkv_.BackwardWeights(pass, Of(base).qkv, x);
  }

 private:
  struct AttentionState : MixerState {
    Tensor k, v;     // [B,context,G,D]; keys with their rotary positions applied
    Tensor partial;  // scratch of AttentionDecode
  };
  // Positions [begin, begin + count) of a cache.
  static Tensor Tokens(const Tensor& cache, int64_t begin, int64_t count) {
    auto* data = static_cast<char*>(cache.data()) + begin * cache.stride(1) * SizeOf(cache.dtype());
    return Tensor(data, cache.dtype(), {cache.dim(0), count, cache.dim(2), cache.dim(3)},
                  {cache.stride(0), cache.stride(1), cache.stride(2), 1});
  }
  struct AttentionSaved : Saved {
    QkvProjection::Output qkv;
    bool turned = false;  // the projection has applied rotary positions
    Tensor attention;     // [T,HD], the heads' outputs
    Tensor lse;           // [B,H,S] fp32
    // With context parallelism, instead of lse and delta.
    std::unique_ptr<ContextAttention> context;
    std::unique_ptr<ContextAttention::Saved> context_saved;
    // Scratch.
    Tensor d_attention, delta, d_shared;
    QkvProjection::Output d_qkv;
  };
  static AttentionSaved& Of(Saved& saved) { return static_cast<AttentionSaved&>(saved); }
  static const AttentionSaved& Of(const Saved& saved) {
    return static_cast<const AttentionSaved&>(saved);
  }

  int64_t Width() const { return qkv_.heads() * qkv_.depth(); }
  // The heads' outputs [T,HD], or their gradient, as [B,S,H,D].
  Tensor Heads(Tensor output, const BatchShape& shape) const {
    return output.Reshape({shape.batch, shape.sequence, qkv_.heads(), qkv_.depth()});
  }
  ContextAttention::Inputs ContextInputs(const ModelBatch& batch,
                                         const AttentionSaved& saved) const {
    const BatchShape& shape = batch.shape;
    return {qkv_.Queries(saved.qkv, shape), qkv_.Keys(saved.qkv, shape),
            qkv_.Values(saved.qkv, shape), Heads(saved.attention, shape), batch.documents};
  }
  kernels::AttentionArgs Attention(const ModelBatch& batch, const AttentionSaved& saved,
                                   Span samples) const {
    BatchShape shape = batch.shape;
    shape.batch = samples.size();
    const int64_t first = samples.begin * shape.sequence;
    const QkvProjection::Output qkv = saved.qkv.Rows(first, shape.tokens());
    kernels::AttentionArgs args;
    args.q = qkv_.Queries(qkv, shape);
    args.k = qkv_.Keys(qkv, shape);
    args.v = qkv_.Values(qkv, shape);
    args.out = Heads(saved.attention.Rows(first, shape.tokens()), shape);
    if (!saved.lse.empty()) args.lse = saved.lse.Rows(samples.begin, shape.batch);
    if (!batch.documents.empty()) {
      args.documents = batch.documents.Rows(samples.begin, shape.batch);
    }
    return args;
  }

  bool rotary_;
  int context_size_;
  ContextMethod context_method_;
  int context_head_groups_;
  bool deterministic_;
  QkvProjection qkv_;
  Linear output_;
};

}  // namespace

std::unique_ptr<Mixer> MakeAttentionMixer(ParameterRegistry& registry, const AttentionSpec& spec,
                                          const TensorShard& shard, const ModelParallel& parallel) {
  return std::make_unique<AttentionMixer>(registry, spec, shard, parallel);
}

namespace {

LayerSize SizeOfLayer(const LanguageModelConfig& config) {
  const int64_t c = config.hidden, width = config.heads * HeadWidth(config);
  const int64_t qkv = width + 2 * config.kv_heads * HeadWidth(config);
  // The causal half of q k^T and p v.
  return {qkv * c + c * width, config.bias ? qkv + c : 0, c * width,
          2 * config.sequence_length * width};
}

SplitUnit SplitOfLayer(const LanguageModelConfig& config) {
  return {.kind = SplitKind::kHeads, .size = config.heads, .groups = config.kv_heads};
}

std::unique_ptr<Mixer> MakeLayer(const LayerPlace& place) {
  const LanguageModelConfig& config = place.config;
  return MakeAttentionMixer(place.registry,
                            {.name = place.block + ".attention",
                             .hidden = config.hidden,
                             .heads = config.heads,
                             .kv_heads = config.kv_heads,
                             .head_width = HeadWidth(config),
                             .rotary = config.position == PositionKind::kRotary,
                             .bias = config.bias,
                             .stddev = kInitialStddev,
                             .output_stddev = place.residual_stddev},
                            place.shard, place.parallel);
}

void Exchange(const LanguageModelConfig& /*config*/, const TensorShard& /*shard*/,
              BlockExchanges& exchanges) {
  ++exchanges.attentions;
}

void Shape(const LanguageModelConfig& config, const TensorShard& shard, Model::Shape& shape) {
  shape.attention = {config.heads, config.kv_heads, HeadWidth(config)};
  shape.own_heads = shard.heads().size();
  shape.own_kv_heads = shard.kv_heads().size();
  if (shard.share(SplitKind::kHeads).shares) {
    shape.kv_group = static_cast<int>(shard.kv_heads().begin);
  }
  if (config.position != PositionKind::kRotary) return;
  CHECK_EQ(HeadWidth(config) % 2, 0);
  shape.rotary_width = HeadWidth(config);
  shape.rope_theta = config.rope_theta;
  shape.rope_scaling = config.rope_scaling;
}

}  // namespace

const LayerKind kAttentionLayer = {.name = "attention",
                                   .size = SizeOfLayer,
                                   .split = SplitOfLayer,
                                   .make = MakeLayer,
                                   .exchange = Exchange,
                                   .shape = Shape};

}  // namespace muster::parallel
