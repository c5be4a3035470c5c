#include "parallel/model/transformer.h"

#include <cmath>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "kernels/ops.h"
#include "parallel/model/head.h"
#include "parallel/model/norm.h"

namespace muster::parallel {
namespace {

using kernels::Arena;
using kernels::DType;
using kernels::Tensor;

constexpr float kStddev = 0.02f;

ParameterId AddMatrix(ParameterRegistry& registry, const std::string& name, int64_t rows,
                      int64_t columns, float stddev, int64_t storage_rows = 0,
                      bool duplicate = false) {
  Parameter parameter;
  parameter.name = name;
  parameter.global_shape = {rows, columns};
  parameter.storage_rows = storage_rows;
  parameter.weight_decay = true;
  parameter.initializer = Initializer::kNormal;
  parameter.stddev = stddev;
  parameter.duplicate = duplicate;
  return registry.Add(std::move(parameter));
}

struct Linear {
  ParameterId weight;
  std::optional<ParameterId> bias;
};
Linear AddLinear(ParameterRegistry& registry, const std::string& name, int64_t outputs,
                 int64_t inputs, float stddev, bool bias) {
  Linear linear = {AddMatrix(registry, name + ".weight", outputs, inputs, stddev), std::nullopt};
  if (bias) linear.bias = AddVector(registry, name + ".bias", outputs, Initializer::kZeros);
  return linear;
}

void LinearForward(const Pass& pass, const Linear& linear, Tensor x, Tensor y,
                   Tensor pre = Tensor()) {
  kernels::LinearForwardArgs args;
  args.x = x;
  args.w = pass.weights[linear.weight];
  if (linear.bias.has_value()) args.bias = pass.weights[*linear.bias];
  args.y = y;
  args.epilogue = pre.empty() ? kernels::Epilogue::kNone : kernels::Epilogue::kGelu;
  args.pre = pre;
  kernels::LinearForward(pass.stream, args);
}

void LinearBackward(const Pass& pass, const Linear& linear, Tensor dy, Tensor x, Tensor dx,
                    Tensor pre = Tensor()) {
  kernels::LinearBackwardArgs args;
  args.dy = dy;
  args.x = x;
  args.w = pass.weights[linear.weight];
  args.dx = dx;
  args.pre = pre;
  args.dw = (*pass.gradients)[linear.weight];
  if (linear.bias.has_value()) args.dbias = (*pass.gradients)[*linear.bias];
  kernels::LinearBackward(pass.stream, args);
  if (linear.bias.has_value()) Ready(pass, *linear.bias);
  Ready(pass, linear.weight);
}

// ---- embedding ---------------------------------------------------------------------------------

ParameterId AddTokenTable(ParameterRegistry& registry, const TransformerConfig& config,
                          bool duplicate = false) {
  return AddMatrix(registry, "embedding.token.weight", config.vocab, config.hidden, kStddev,
                   VocabStorage(config.vocab), duplicate);
}

// The matrix of a head that does not find the token table on its own rank, or is not tied to it.
ParameterId AddHeadTable(ParameterRegistry& registry, const TransformerConfig& config) {
  if (config.tied) return AddTokenTable(registry, config, /*duplicate=*/true);
  return AddMatrix(registry, "head.weight", config.vocab, config.hidden, kStddev,
                   VocabStorage(config.vocab));
}

class EmbeddingBlock : public Block {
 public:
  EmbeddingBlock(ParameterRegistry& registry, const TransformerConfig& config)
      : hidden_(config.hidden), token_(AddTokenTable(registry, config)) {
    if (config.position == PositionKind::kLearned) {
      position_ = AddMatrix(registry, "embedding.position.weight", config.sequence_length,
                            config.hidden, kStddev);
    }
  }

  ParameterId token() const { return token_; }
  const std::string& name() const override { return name_; }

  std::unique_ptr<Saved> TakeSaved(Arena& arena, const BatchShape& shape) const override {
    auto saved = std::make_unique<EmbeddingSaved>();
    saved->out = arena.Take("activations", shape.activation, {shape.tokens(), hidden_});
    return saved;
  }
  void TakeScratch(Arena&, const BatchShape&, Saved&) const override {}

  void Forward(const Pass& pass, Flow& flow, Saved& base) const override {
    auto& saved = static_cast<EmbeddingSaved&>(base);
    kernels::EmbeddingForward(pass.stream, flow.tokens, pass.weights[token_],
                              Positions(pass.weights, flow), flow.shape.sequence, saved.out);
    flow.residual = saved.out;
  }

  void Backward(const Pass& pass, Flow& flow, Saved&) const override {
    kernels::EmbeddingBackward(pass.stream, flow.tokens, flow.d_hidden, flow.shape.sequence,
                               (*pass.gradients)[token_], Positions(*pass.gradients, flow));
    if (position_.has_value()) Ready(pass, *position_);
    // The head has added its part long before: the table is complete only now.
    Ready(pass, token_);
  }

 private:
  struct EmbeddingSaved : Saved {
    Tensor out;
  };
  Tensor Positions(const ParameterViews& views, const Flow& flow) const {
    return position_.has_value() ? views[*position_].Rows(0, flow.shape.sequence) : Tensor();
  }
  const std::string name_ = "embedding";
  int64_t hidden_;
  ParameterId token_;
  std::optional<ParameterId> position_;  // learned ones
};

// ---- transformer block -------------------------------------------------------------------------

class TransformerBlock : public Block {
 public:
  TransformerBlock(ParameterRegistry& registry, const TransformerConfig& config, int64_t index)
      : name_(absl::StrCat("blocks.", index)),
        hidden_(config.hidden),
        heads_(config.heads),
        kv_heads_(config.kv_heads),
        depth_(config.hidden / config.heads),
        ffn_(config.ffn),
        swiglu_(config.mlp == MlpKind::kSwiglu),
        rotary_(config.position == PositionKind::kRotary) {
    const float residual = kStddev / std::sqrt(2.0f * static_cast<float>(config.layers));
    const int64_t c = config.hidden;
    const auto linear = [&](const char* name, int64_t outputs, int64_t inputs, float stddev) {
      return AddLinear(registry, name_ + name, outputs, inputs, stddev, config.bias);
    };
    norm1_ = AddNorm(registry, name_ + ".norm1", c, config.norm);
    qkv_ = linear(".attention.qkv", QkvWidth(), c, kStddev);
    output_ = linear(".attention.output", c, c, residual);
    norm2_ = AddNorm(registry, name_ + ".norm2", c, config.norm);
    up_ = linear(".mlp.up", UpWidth(), c, kStddev);
    down_ = linear(".mlp.down", c, ffn_, residual);
  }

  const std::string& name() const override { return name_; }

  std::unique_ptr<Saved> TakeSaved(Arena& arena, const BatchShape& shape) const override {
    const int64_t t = shape.tokens(), c = hidden_;
    auto saved = std::make_unique<TransformerSaved>();
    saved->norm1 = NormSaved::Take(arena, shape, norm1_, c);
    saved->qkv = arena.Take("activations", shape.activation, {t, QkvWidth()});
    saved->attention = arena.Take("activations", shape.activation, {t, c});
    saved->lse = arena.Take("activations", DType::kF32, {shape.batch, heads_, shape.sequence});
    saved->norm2 = NormSaved::Take(arena, shape, norm2_, c);
    saved->pre = arena.Take("activations", shape.activation, {t, UpWidth()});
    saved->up = arena.Take("activations", shape.activation, {t, ffn_});
    return saved;
  }

  void TakeScratch(Arena& arena, const BatchShape& shape, Saved& base) const override {
    auto& saved = static_cast<TransformerSaved&>(base);
    const int64_t t = shape.tokens();
    saved.d_small = arena.Take("scratch", shape.activation, {t, hidden_});
    // The MLP's and the attention's backward follow each other: the larger need serves both.
    const int64_t mark = arena.Mark();
    saved.d_up = arena.Take("scratch", shape.activation, {t, ffn_});
    arena.ReleaseTo(mark);
    saved.d_qkv = arena.Take("scratch", shape.activation, {t, QkvWidth()});
    saved.delta = arena.Take("scratch", DType::kF32, {shape.batch, heads_, shape.sequence});
  }

  void Forward(const Pass& pass, Flow& flow, Saved& base) const override {
    auto& saved = static_cast<TransformerSaved&>(base);
    NormForward(pass, norm1_, flow, saved.norm1);
    saved.x1 = flow.residual;
    LinearForward(pass, qkv_, saved.norm1.y, saved.qkv);
    if (rotary_) Rotate(pass, flow, saved.qkv, /*inverse=*/false);
    kernels::AttentionForward(pass.stream, Attention(flow.shape, saved));
    LinearForward(pass, output_, saved.attention, flow.branch_storage);
    flow.branch = flow.branch_storage;
    NormForward(pass, norm2_, flow, saved.norm2);
    if (swiglu_) {
      LinearForward(pass, up_, saved.norm2.y, saved.pre);
      kernels::SwigluForward(pass.stream, saved.pre, saved.up);
    } else {
      LinearForward(pass, up_, saved.norm2.y, saved.up, saved.pre);
    }
    LinearForward(pass, down_, saved.up, flow.branch_storage);
    flow.branch = flow.branch_storage;
  }

  void Backward(const Pass& pass, Flow& flow, Saved& base) const override {
    auto& saved = static_cast<TransformerSaved&>(base);
    if (swiglu_) {
      LinearBackward(pass, down_, flow.d_hidden, saved.up, saved.d_up);
      // The gate and `up` are not needed again: their gradients take their place.
      kernels::SwigluBackward(pass.stream, saved.pre, saved.d_up, saved.pre);
      LinearBackward(pass, up_, saved.pre, saved.norm2.y, saved.d_small);
    } else {
      LinearBackward(pass, down_, flow.d_hidden, saved.up, saved.d_up, saved.pre);
      LinearBackward(pass, up_, saved.d_up, saved.norm2.y, saved.d_small);
    }
    NormBackward(pass, norm2_, saved.d_small, saved.norm2.x, saved.norm2, flow.d_hidden);

    LinearBackward(pass, output_, flow.d_hidden, saved.attention, saved.d_small);
    kernels::AttentionBackwardArgs args;
    args.forward = Attention(flow.shape, saved);
    args.dout = Heads(saved.d_small, flow.shape, 0, heads_);
    args.dq = Heads(saved.d_qkv, flow.shape, 0, heads_);
    args.dk = Heads(saved.d_qkv, flow.shape, heads_, kv_heads_);
    args.dv = Heads(saved.d_qkv, flow.shape, heads_ + kv_heads_, kv_heads_);
    args.delta = saved.delta;
    kernels::AttentionBackward(pass.stream, args);
    if (rotary_) Rotate(pass, flow, saved.d_qkv, /*inverse=*/true);
    LinearBackward(pass, qkv_, saved.d_qkv, saved.norm1.y, saved.d_small);
    NormBackward(pass, norm1_, saved.d_small, saved.x1, saved.norm1, flow.d_hidden);
  }

 private:
  struct TransformerSaved : Saved {
    NormSaved norm1, norm2;
    Tensor x1;  // input of norm1: norm1.x, or what came from outside into the first block
    Tensor qkv, attention, lse, pre, up;
    Tensor d_small, d_up, d_qkv, delta;  // scratch
  };

  int64_t QkvWidth() const { return (heads_ + 2 * kv_heads_) * depth_; }
  int64_t UpWidth() const { return swiglu_ ? 2 * ffn_ : ffn_; }

  // Heads [first, first + count) of a packed [T, width] tensor as [B,S,count,D].
  Tensor Heads(Tensor packed, const BatchShape& shape, int64_t first, int64_t count) const {
    const int64_t width = packed.dim(1);
    auto* data = static_cast<char*>(packed.data()) + first * depth_ * SizeOf(packed.dtype());
    return Tensor(data, packed.dtype(), {shape.batch, shape.sequence, count, depth_},
                  {shape.sequence * width, width, depth_, 1});
  }
  // Queries and keys stand side by side: one call turns both.
  void Rotate(const Pass& pass, const Flow& flow, Tensor qkv, bool inverse) const {
    kernels::Rotary(pass.stream, Heads(qkv, flow.shape, 0, heads_ + kv_heads_), flow.rotary,
                    inverse);
  }
  kernels::AttentionArgs Attention(const BatchShape& shape, const TransformerSaved& saved) const {
    kernels::AttentionArgs args;
    args.q = Heads(saved.qkv, shape, 0, heads_);
    args.k = Heads(saved.qkv, shape, heads_, kv_heads_);
    args.v = Heads(saved.qkv, shape, heads_ + kv_heads_, kv_heads_);
    args.out = Heads(saved.attention, shape, 0, heads_);
    args.lse = saved.lse;
    return args;
  }

  std::string name_;
  int64_t hidden_, heads_, kv_heads_, depth_, ffn_;
  bool swiglu_, rotary_;
  Norm norm1_, norm2_;
  Linear qkv_, output_, up_, down_;
};

// Weights of one block's matrix products.
int64_t BlockWeights(const TransformerConfig& config) {
  const int64_t c = config.hidden, depth = c / config.heads;
  const int64_t qkv = (config.heads + 2 * config.kv_heads) * depth;
  return qkv * c + c * c + (config.mlp == MlpKind::kSwiglu ? 3 : 2) * config.ffn * c;
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

int64_t TrainingFlopsPerToken(const TransformerConfig& config) {
  const int64_t c = config.hidden;
  return 6 * (config.layers * BlockWeights(config) + config.vocab * c) +
         6 * config.layers * config.sequence_length * c;
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
  auto registry = std::make_unique<ParameterRegistry>();
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<BlockRange> parts = parallel.parts;
  if (parts.empty()) parts.push_back({});
  const int head = static_cast<int>(config.layers) + 1;
  std::optional<ParameterId> token;
  for (BlockRange& part : parts) {
    const int end = part.end < 0 ? head + 1 : part.end;
    CHECK(part.begin >= 0 && part.begin < end && end <= head + 1);
    const int first = static_cast<int>(blocks.size());
    for (int i = part.begin; i < end; ++i) {
      registry->BeginBlock(static_cast<int>(blocks.size()), /*resident=*/i == 0 || i == head);
      if (i == 0) {
        auto embedding = std::make_unique<EmbeddingBlock>(*registry, config);
        if (config.tied) token = embedding->token();
        blocks.push_back(std::move(embedding));
      } else if (i < head) {
        blocks.push_back(std::make_unique<TransformerBlock>(*registry, config, i - 1));
      } else {
        const bool shared = token.has_value();
        if (!shared) token = AddHeadTable(*registry, config);
        blocks.push_back(
            MakeHead(*registry, config.norm, config.hidden, config.vocab, *token, shared));
      }
    }
    part = {first, static_cast<int>(blocks.size())};
  }
  if (static_cast<int>(blocks.size()) == head + 1) {
    CHECK_EQ(registry->elements(), ParameterCount(config));
  }
  Model::Shape shape;
  shape.hidden = config.hidden;
  shape.vocab = config.vocab;
  shape.vocab_storage = VocabStorage(config.vocab);
  shape.sequence_max = config.sequence_length;
  if (config.position == PositionKind::kRotary) {
    shape.rotary_width = depth;
    shape.rope_theta = config.rope_theta;
    shape.rope_scaling = config.rope_scaling;
  }
  return std::make_unique<Model>(description, shape, std::move(registry), std::move(blocks),
                                 TrainingFlopsPerToken(config), std::move(parts));
}

}  // namespace muster::parallel
