#include "parallel/model/embedding.h"

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "kernels/embedding/embedding.h"
#include "kernels/memory/memory.h"
#include "kernels/tensor.h"
#include "parallel/model/dropout.h"
#include "parallel/model/head.h"
#include "parallel/model/norm.h"

namespace muster::parallel {
namespace {

using kernels::Arena;
using kernels::DType;
using kernels::Tensor;

// This rank's shard of a table of the vocabulary.
ParameterId AddTable(ParameterRegistry& registry, const std::string& name,
                     const LanguageModelConfig& config, const TensorShard& shard,
                     TableUse use = TableUse::kOneStage) {
  Parameter table;
  table.name = name;
  table.global_shape = {config.vocab, config.hidden};
  table.box = {{shard.vocab().begin, 0}, {shard.vocab().size(), config.hidden}};
  table.storage_rows = shard.vocab_storage;
  table.weight_decay = true;
  table.initializer = Initializer::kNormal;
  table.stddev = kInitialStddev;
  table.sharing = shard.sharded();
  table.on_two_stages = use != TableUse::kOneStage;
  table.duplicate = use == TableUse::kHeadOfTwo;
  return registry.Add(std::move(table));
}

ParameterId AddPositions(ParameterRegistry& registry, const LanguageModelConfig& config) {
  Parameter table;
  table.name = "embedding.position.weight";
  table.global_shape = {config.sequence_length, config.hidden};
  table.weight_decay = true;
  table.initializer = Initializer::kNormal;
  table.stddev = kInitialStddev;
  return registry.Add(std::move(table));
}

class EmbeddingBlock : public Block {
 public:
  EmbeddingBlock(ParameterRegistry& registry, const LanguageModelConfig& config,
                 const TensorShard& shard, int context_size, ParameterId table, bool shared,
                 double dropout)
      : hidden_(config.hidden),
        shared_(shared),
        shard_(shard),
        context_size_(context_size),
        dropout_{dropout, Dropout::kEmbedding},
        token_(table) {
    if (config.position == PositionKind::kLearned) position_ = AddPositions(registry, config);
  }

  const std::string& name() const override { return name_; }

  std::unique_ptr<Saved> TakeSaved(Arena& arena, const BatchShape& shape) const override {
    auto saved = std::make_unique<EmbeddingSaved>();
    saved->out = arena.Take("activations", shape.activation, {shard_.rows(shape), hidden_});
    saved->groups = arena.Take("inputs", DType::kI32, {2, shape.tokens()});
    if (shard_.size > 1) saved->tokens = arena.Take("inputs", DType::kI32, {shape.tokens()});
    return saved;
  }
  void TakeScratch(Arena& arena, const BatchShape& shape, Saved& base) const override {
    auto& saved = static_cast<EmbeddingSaved&>(base);
    if (context_size_ == 1 || !position_.has_value()) return;
    saved.positions = arena.Take("scratch", shape.activation, {shape.sequence, hidden_});
    saved.d_positions = arena.Take("scratch", DType::kF32, {shape.sequence, hidden_});
  }

  void Forward(const Pass& pass, const ModelBatch& batch, ForwardState& state,
               Saved& base) const override {
    auto& saved = static_cast<EmbeddingSaved&>(base);
    Tensor tokens = batch.tokens, out = saved.out, positions = Positions(pass.weights, batch);
    if (!saved.positions.empty()) {
      for (const int chunk : {0, 1}) {
        kernels::Copy(pass.stream, Chunk(pass, positions, batch, chunk),
                      Half(saved.positions, chunk));
      }
      positions = saved.positions;
    }
    if (shard_.size > 1) {
      tokens = saved.tokens;
      kernels::ShardTokens(pass.stream, batch.tokens, shard_.vocab().begin, shard_.vocab().size(),
                           tokens);
      // Vectors are summed over the ranks, so only one rank adds the positions.
      if (shard_.rank != 0) positions = Tensor();
    }
    if (shard_.sequence) out = batch.branch_storage;
    kernels::EmbeddingForward(pass.stream, tokens, pass.weights[token_], positions,
                              batch.shape.sequence, out);
    // Grouping happens in forward, because the end of backward waits for this block's gradients.
    if (pass.head == HeadMode::kLossAndGradient) {
      kernels::GroupTokens(pass.stream, tokens, pass.weights[token_].dim(0), saved.groups);
    }
    const int slices = shard_.slices(batch.shape);
    for (int slice = 0; slice < slices; ++slice) {
      const Tensor rows = shard_.ReduceRows(pass, SliceOf(out, slices, slice));
      const Tensor own = SliceOf(saved.out, slices, slice);
      if (shard_.sequence) kernels::Copy(pass.stream, rows, own);
      dropout_.Apply(pass, batch, own, own, shard_.FirstToken(batch.shape, slice));
    }
    state.residual = saved.out;
  }

  absl::StatusOr<std::unique_ptr<BlockState>> TakeState(
      Arena& /*arena*/, const DecodeShape& /*shape*/) const override {
    return std::make_unique<BlockState>();
  }
  bool limits_text() const override { return position_.has_value(); }

  void Backward(const Pass& pass, const ModelBatch& batch, BackwardState& state,
                Saved& base) const override {
    const InSlices begun = std::exchange(state.d_whole, {});
    Gradients(pass, batch, static_cast<EmbeddingSaved&>(base),
              begun.empty() ? shard_.GatherRows(pass, state.d_hidden, batch.branch_storage,
                                                shard_.slices(batch.shape))
                            : TensorShard::Await(pass, begun));
  }
  // There is no block in front that would need a gradient.
  void BackwardInput(const Pass& pass, const ModelBatch& batch, BackwardState& state,
                     Saved& base) const override {
    kernels::Copy(pass.stream, state.d_hidden, static_cast<EmbeddingSaved&>(base).out);
  }
  void BackwardWeights(const Pass& pass, const ModelBatch& batch, BackwardState& state,
                       Saved& base) const override {
    auto& saved = static_cast<EmbeddingSaved&>(base);
    Gradients(pass, batch, saved, shard_.GatherRows(pass, saved.out, batch.branch_storage));
  }

 private:
  struct EmbeddingSaved : Saved {
    Tensor out;                     // between BackwardInput and BackwardWeights: its gradient
    Tensor tokens;                  // tokens of this rank's shard of the table, -1 for the others
    Tensor groups;                  // GroupTokens of these, or of all tokens
    Tensor positions, d_positions;  // scratch: the position vectors of this rank's tokens
  };

  // `d_out`: all rows of the gradient, to which dropout is applied in place.
  void Gradients(const Pass& pass, const ModelBatch& batch, const EmbeddingSaved& saved,
                 const Tensor& d_out) const {
    const Tensor positions = Positions(*pass.gradients, batch);
    const bool spread = !saved.d_positions.empty();
    // What follows does not write rows of tokens and positions that do not occur.
    if (pass.overwrite_gradients) {
      if (!shared_) kernels::Zero(pass.stream, (*pass.gradients)[token_]);
      if (position_.has_value()) kernels::Zero(pass.stream, (*pass.gradients)[*position_]);
    }
    if (spread) kernels::Zero(pass.stream, saved.d_positions);
    dropout_.Apply(pass, batch, d_out, d_out, 0);
    kernels::EmbeddingBackward(pass.stream, saved.groups, d_out, batch.shape.sequence,
                               (*pass.gradients)[token_], spread ? saved.d_positions : positions);
    for (int chunk = 0; spread && chunk < 2; ++chunk) {
      kernels::Axpy(pass.stream, 1.0f, Half(saved.d_positions, chunk),
                    Chunk(pass, positions, batch, chunk));
    }
    if (position_.has_value()) Ready(pass, *position_);
    // The head has added its gradient of the table before, so it is complete now.
    Ready(pass, token_);
  }
  Tensor Positions(const ParameterViews& views, const ModelBatch& batch) const {
    return position_.has_value()
               ? views[*position_].Rows(batch.first_position, batch.shape.sequence * context_size_)
               : Tensor();
  }
  // The position rows of this rank's first (0) or second (1) chunk of a sequence, and their place.
  Tensor Chunk(const Pass& pass, const Tensor& positions, const ModelBatch& batch,
               int chunk) const {
    const int64_t rows = batch.shape.sequence / 2, rank = pass.context->rank();
    return positions.Rows((chunk == 0 ? rank : 2 * context_size_ - 1 - rank) * rows, rows);
  }
  static Tensor Half(const Tensor& x, int chunk) {
    return x.Rows(chunk * (x.dim(0) / 2), x.dim(0) / 2);
  }
  const std::string name_ = "embedding";
  int64_t hidden_;
  bool shared_;
  TensorShard shard_;
  int context_size_;
  Dropout dropout_;
  ParameterId token_;
  std::optional<ParameterId> position_;  // of learned positions
};

}  // namespace

ParameterId AddTokenTable(ParameterRegistry& registry, const LanguageModelConfig& config,
                          const TensorShard& shard, TableUse use) {
  return AddTable(registry, "embedding.token.weight", config, shard, use);
}

ParameterId AddHeadTable(ParameterRegistry& registry, const LanguageModelConfig& config,
                         const TensorShard& shard) {
  if (config.tied) return AddTokenTable(registry, config, shard, TableUse::kHeadOfTwo);
  return AddTable(registry, "head.weight", config, shard);
}

std::unique_ptr<Block> MakeEmbedding(ParameterRegistry& registry, const LanguageModelConfig& config,
                                     const TensorShard& shard, int context_size, ParameterId table,
                                     bool shared, double dropout) {
  return std::make_unique<EmbeddingBlock>(registry, config, shard, context_size, table, shared,
                                          dropout);
}

}  // namespace muster::parallel
