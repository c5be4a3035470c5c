#include "parallel/model/head.h"

#include <string>

#include "kernels/ops.h"
#include "parallel/model/norm.h"

namespace muster::parallel {
namespace {

using kernels::Arena;
using kernels::DType;
using kernels::Tensor;

class HeadBlock : public Block {
 public:
  HeadBlock(ParameterRegistry& registry, int64_t hidden, int64_t vocab, ParameterId table)
      : hidden_(hidden), vocab_(vocab), norm_(AddNorm(registry, "norm", hidden)), table_(table) {}

  const std::string& name() const override { return name_; }

  std::unique_ptr<Saved> TakeSaved(Arena& arena, const BatchShape& shape) const override {
    auto saved = std::make_unique<HeadSaved>();
    saved->norm = NormSaved::Take(arena, shape, hidden_);
    saved->logits = arena.Take("logits", shape.activation, {shape.tokens(), VocabStorage(vocab_)});
    saved->losses = arena.Take("activations", DType::kF32, {shape.tokens()});
    return saved;
  }
  void TakeScratch(Arena& arena, const BatchShape& shape, Saved& base) const override {
    static_cast<HeadSaved&>(base).d_small =
        arena.Take("scratch", shape.activation, {shape.tokens(), hidden_});
  }

  void Forward(const Pass& pass, Flow& flow, Saved& base) const override {
    auto& saved = static_cast<HeadSaved&>(base);
    NormForward(pass, norm_, flow, saved.norm);
    kernels::LinearForwardArgs args;
    args.x = saved.norm.y;
    args.w = pass.weights[table_];
    args.y = saved.logits;
    kernels::LinearForward(pass.stream, args);
    flow.logits = saved.logits;
    flow.losses = saved.losses;
    if (pass.head == HeadMode::kLogits) return;
    kernels::CrossEntropyArgs loss;
    loss.logits = saved.logits;
    loss.targets = flow.targets;
    loss.losses = saved.losses;
    loss.vocab = vocab_;
    loss.scale = pass.loss_scale;
    loss.write_gradient = pass.head == HeadMode::kLossAndGradient;
    kernels::CrossEntropy(pass.stream, loss);
  }

  void Backward(const Pass& pass, Flow& flow, Saved& base) const override {
    auto& saved = static_cast<HeadSaved&>(base);
    kernels::LinearBackwardArgs args;
    args.dy = saved.logits;
    args.x = saved.norm.y;
    args.w = pass.weights[table_];
    args.dx = saved.d_small;
    args.dw = (*pass.gradients)[table_];
    kernels::LinearBackward(pass.stream, args);
    kernels::Zero(pass.stream, flow.d_hidden);
    NormBackward(pass, norm_, saved.d_small, saved.norm.x, saved.norm, flow.d_hidden);
  }

 private:
  struct HeadSaved : Saved {
    NormSaved norm;
    Tensor logits, losses;
    Tensor d_small;  // scratch
  };
  const std::string name_ = "head";
  int64_t hidden_;
  int64_t vocab_;
  Norm norm_;
  ParameterId table_;
};

}  // namespace

int64_t VocabStorage(int64_t vocab) {
  const int64_t multiple = vocab >= 4096 ? 128 : 16;
  return (vocab + multiple - 1) / multiple * multiple;
}

std::unique_ptr<Block> MakeHead(ParameterRegistry& registry, int64_t hidden, int64_t vocab,
                                ParameterId table) {
  return std::make_unique<HeadBlock>(registry, hidden, vocab, table);
}

}  // namespace muster::parallel
