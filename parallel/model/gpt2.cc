#include "parallel/model/gpt2.h"

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
  ParameterId bias;
};
Linear AddLinear(ParameterRegistry& registry, const std::string& name, int64_t outputs,
                 int64_t inputs, float stddev) {
  const ParameterId weight = AddMatrix(registry, name + ".weight", outputs, inputs, stddev);
  return {weight, AddVector(registry, name + ".bias", outputs, Initializer::kZeros)};
}

void LinearForward(const Pass& pass, const Linear& linear, Tensor x, Tensor y,
                   Tensor pre = Tensor()) {
  kernels::LinearForwardArgs args;
  args.x = x;
  args.w = pass.weights[linear.weight];
  args.bias = pass.weights[linear.bias];
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
  args.dbias = (*pass.gradients)[linear.bias];
  kernels::LinearBackward(pass.stream, args);
  Ready(pass, linear.bias);
  Ready(pass, linear.weight);
}

// ---- embedding ---------------------------------------------------------------------------------

ParameterId AddTokenTable(ParameterRegistry& registry, const Gpt2Config& config,
                          bool duplicate = false) {
  return AddMatrix(registry, "embedding.token.weight", config.vocab, config.hidden, kStddev,
                   VocabStorage(config.vocab), duplicate);
}

class EmbeddingBlock : public Block {
 public:
  EmbeddingBlock(ParameterRegistry& registry, const Gpt2Config& config)
      : hidden_(config.hidden),
        token_(AddTokenTable(registry, config)),
        position_(AddMatrix(registry, "embedding.position.weight", config.sequence_length,
                            config.hidden, kStddev)) {}

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
                              pass.weights[position_].Rows(0, flow.shape.sequence),
                              flow.shape.sequence, saved.out);
    flow.residual = saved.out;
  }

  void Backward(const Pass& pass, Flow& flow, Saved&) const override {
    kernels::EmbeddingBackward(pass.stream, flow.tokens, flow.d_hidden, flow.shape.sequence,
                               (*pass.gradients)[token_],
                               (*pass.gradients)[position_].Rows(0, flow.shape.sequence));
    Ready(pass, position_);
    // The head has added its part long before: the table is complete only now.
    Ready(pass, token_);
  }

 private:
  struct EmbeddingSaved : Saved {
    Tensor out;
  };
  const std::string name_ = "embedding";
  int64_t hidden_;
  ParameterId token_;
  ParameterId position_;
};

// ---- transformer block -------------------------------------------------------------------------

class TransformerBlock : public Block {
 public:
  TransformerBlock(ParameterRegistry& registry, const Gpt2Config& config, int64_t index)
      : name_(absl::StrCat("blocks.", index)), hidden_(config.hidden), heads_(config.heads) {
    const float residual = kStddev / std::sqrt(2.0f * static_cast<float>(config.layers));
    const int64_t c = config.hidden;
    norm1_ = AddNorm(registry, name_ + ".norm1", c);
    qkv_ = AddLinear(registry, name_ + ".attention.qkv", 3 * c, c, kStddev);
    output_ = AddLinear(registry, name_ + ".attention.output", c, c, residual);
    norm2_ = AddNorm(registry, name_ + ".norm2", c);
    up_ = AddLinear(registry, name_ + ".mlp.up", 4 * c, c, kStddev);
    down_ = AddLinear(registry, name_ + ".mlp.down", c, 4 * c, residual);
  }

  const std::string& name() const override { return name_; }

  std::unique_ptr<Saved> TakeSaved(Arena& arena, const BatchShape& shape) const override {
    const int64_t t = shape.tokens(), c = hidden_;
    auto saved = std::make_unique<TransformerSaved>();
    saved->norm1 = NormSaved::Take(arena, shape, c);
    saved->qkv = arena.Take("activations", shape.activation, {t, 3 * c});
    saved->attention = arena.Take("activations", shape.activation, {t, c});
    saved->lse = arena.Take("activations", DType::kF32, {shape.batch, heads_, shape.sequence});
    saved->norm2 = NormSaved::Take(arena, shape, c);
    saved->pre = arena.Take("activations", shape.activation, {t, 4 * c});
    saved->up = arena.Take("activations", shape.activation, {t, 4 * c});
    return saved;
  }

  void TakeScratch(Arena& arena, const BatchShape& shape, Saved& base) const override {
    auto& saved = static_cast<TransformerSaved&>(base);
    const int64_t t = shape.tokens(), c = hidden_;
    saved.d_small = arena.Take("scratch", shape.activation, {t, c});
    // The MLP's and the attention's backward follow each other: 4C serves both.
    const int64_t mark = arena.Mark();
    saved.d_up = arena.Take("scratch", shape.activation, {t, 4 * c});
    arena.ReleaseTo(mark);
    saved.d_qkv = arena.Take("scratch", shape.activation, {t, 3 * c});
    saved.delta = arena.Take("scratch", DType::kF32, {shape.batch, heads_, shape.sequence});
  }

  void Forward(const Pass& pass, Flow& flow, Saved& base) const override {
    auto& saved = static_cast<TransformerSaved&>(base);
    NormForward(pass, norm1_, flow, saved.norm1);
    saved.x1 = flow.residual;
    LinearForward(pass, qkv_, saved.norm1.y, saved.qkv);
    kernels::AttentionForward(pass.stream, Attention(flow.shape, saved));
    LinearForward(pass, output_, saved.attention, flow.branch_storage);
    flow.branch = flow.branch_storage;
    NormForward(pass, norm2_, flow, saved.norm2);
    LinearForward(pass, up_, saved.norm2.y, saved.up, saved.pre);
    LinearForward(pass, down_, saved.up, flow.branch_storage);
    flow.branch = flow.branch_storage;
  }

  void Backward(const Pass& pass, Flow& flow, Saved& base) const override {
    auto& saved = static_cast<TransformerSaved&>(base);
    LinearBackward(pass, down_, flow.d_hidden, saved.up, saved.d_up, saved.pre);
    LinearBackward(pass, up_, saved.d_up, saved.norm2.y, saved.d_small);
    NormBackward(pass, norm2_, saved.d_small, saved.norm2.x, saved.norm2, flow.d_hidden);

    LinearBackward(pass, output_, flow.d_hidden, saved.attention, saved.d_small);
    kernels::AttentionBackwardArgs args;
    args.forward = Attention(flow.shape, saved);
    args.dout = Heads(saved.d_small, flow.shape, 0, hidden_);
    args.dq = Heads(saved.d_qkv, flow.shape, 0, 3 * hidden_);
    args.dk = Heads(saved.d_qkv, flow.shape, 1, 3 * hidden_);
    args.dv = Heads(saved.d_qkv, flow.shape, 2, 3 * hidden_);
    args.delta = saved.delta;
    kernels::AttentionBackward(pass.stream, args);
    LinearBackward(pass, qkv_, saved.d_qkv, saved.norm1.y, saved.d_small);
    NormBackward(pass, norm1_, saved.d_small, saved.x1, saved.norm1, flow.d_hidden);
  }

 private:
  struct TransformerSaved : Saved {
    NormSaved norm1, norm2;
    Tensor x1;  // input of norm1: norm1.x, or the embedding's output in the first block
    Tensor qkv, attention, lse, pre, up;
    Tensor d_small, d_up, d_qkv, delta;  // scratch
  };

  // Part `part` of a packed [T, width] tensor as [B,S,H,D].
  Tensor Heads(Tensor packed, const BatchShape& shape, int64_t part, int64_t width) const {
    const int64_t depth = hidden_ / heads_;
    auto* data = static_cast<char*>(packed.data()) + part * hidden_ * SizeOf(packed.dtype());
    return Tensor(data, packed.dtype(), {shape.batch, shape.sequence, heads_, depth},
                  {shape.sequence * width, width, depth, 1});
  }
  kernels::AttentionArgs Attention(const BatchShape& shape, const TransformerSaved& saved) const {
    kernels::AttentionArgs args;
    args.q = Heads(saved.qkv, shape, 0, 3 * hidden_);
    args.k = Heads(saved.qkv, shape, 1, 3 * hidden_);
    args.v = Heads(saved.qkv, shape, 2, 3 * hidden_);
    args.out = Heads(saved.attention, shape, 0, hidden_);
    args.lse = saved.lse;
    return args;
  }

  std::string name_;
  int64_t hidden_;
  int64_t heads_;
  Norm norm1_, norm2_;
  Linear qkv_, output_, up_, down_;
};

}  // namespace

int64_t ParameterCount(const Gpt2Config& config) {
  const int64_t c = config.hidden, l = config.layers;
  return 12 * l * c * c + 13 * l * c + (config.vocab + config.sequence_length + 2) * c;
}

int64_t TrainingFlopsPerToken(const Gpt2Config& config) {
  const int64_t c = config.hidden, l = config.layers;
  return 6 * (12 * l * c * c + config.vocab * c) + 6 * l * config.sequence_length * c;
}

std::unique_ptr<Model> MakeGpt2(const Gpt2Config& config, const ModelParallel& parallel) {
  CHECK(config.layers > 0 && config.hidden > 0 && config.heads > 0 && config.vocab > 0 &&
        config.sequence_length > 0);
  CHECK_EQ(config.hidden % config.heads, 0);
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
        token = embedding->token();
        blocks.push_back(std::move(embedding));
      } else if (i < head) {
        blocks.push_back(std::make_unique<TransformerBlock>(*registry, config, i - 1));
      } else {
        const bool tied = token.has_value();
        if (!tied) token = AddTokenTable(*registry, config, /*duplicate=*/true);
        blocks.push_back(MakeHead(*registry, config.hidden, config.vocab, *token, tied));
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
  ModelDescription description = {"gpt2",
                                  {{"layers", config.layers},
                                   {"hidden", config.hidden},
                                   {"heads", config.heads},
                                   {"vocab", config.vocab},
                                   {"sequence_length", config.sequence_length}}};
  return std::make_unique<Model>(std::move(description), shape, std::move(registry),
                                 std::move(blocks), TrainingFlopsPerToken(config),
                                 std::move(parts));
}

}  // namespace muster::parallel
