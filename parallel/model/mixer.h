// A mixer: what one residual branch computes between its norm and the residual stream. Attention,
// the state-space scan of Mamba-2 and the MLP are mixers. ResidualBlock (residual_block.h) runs
// them under every schedule: it owns the norm in front, the row-parallel GEMM behind, dropout, and
// all collectives of the tensor group.
//
//   y = norm(residual)             [R,C], gathered to all rows x [T,C] by the block
//   Project: x -> own inputs       column-parallel GEMM; any rows
//   Mix: own inputs -> output      [T,W] of this rank; whole samples
//   residual += dropout(sum over the tensor group of output W_out)       by the block
//
// A mixer writes only to its own memory and to what a call hands to it.
#ifndef MUSTER_PARALLEL_MODEL_MIXER_H_
#define MUSTER_PARALLEL_MODEL_MIXER_H_

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/arena.h"
#include "kernels/tensor.h"
#include "parallel/model/decode.h"
#include "parallel/model/linear.h"
#include "parallel/model/model.h"
#include "parallel/model/tensor_parallel.h"

namespace muster::parallel {

// What a block does not keep but recomputes in backward.
struct Recomputed {
  bool norms = false;       // the outputs of its norms
  bool activation = false;  // what mixers compute cheaply from other activations
  bool mixing = false;      // what mixers compute from these without a GEMM; with `activation`
  bool gemms = false;       // all the rest; with all of the others
};

// What a mixer keeps of one micro-batch, and its views of the scratch memory of backward.
struct MixerSaved {
  virtual ~MixerSaved() = default;
};

// Why a forward runs: the first time, or again because backward needs what it did not keep.
enum class Purpose : uint8_t {
  kOutput,    // the mixer's output is read
  kBackward,  // only the mixer's own backward follows: what that computes itself may be left out
};

// Work of the block that overlaps with exchanges of a mixer's backward, where there are any.
struct BesideMix {
  std::function<void()> first = nullptr, last = nullptr;
};

// Single-threaded. Constructors register the parameters. T: tokens, C: hidden width, W: the width
// of the mixer's output on this rank. Tensors have the activation dtype unless stated otherwise.
class Mixer {
 public:
  using Saved = MixerSaved;

  virtual ~Mixer() = default;

  // Takes memory of `category`: in MakeSaved's object first what only GEMMs can recompute, then
  // what else costs time to recompute (Recomputed::mixing), then what is cheap to recompute from
  // that. All are called, with a category each.
  virtual std::unique_ptr<Saved> MakeSaved() const = 0;
  virtual void TakeOutputs(kernels::Arena& arena, const char* category, const BatchShape& shape,
                           Saved& saved) const = 0;
  virtual void TakeMixed(kernels::Arena& /*arena*/, const char* /*category*/,
                         const BatchShape& /*shape*/, Saved& /*saved*/) const {}
  virtual void TakeActivation(kernels::Arena& arena, const char* category, const BatchShape& shape,
                              Saved& saved) const = 0;
  // Takes memory that is used within one call of the block's backward. `d_input` [T,C] is where
  // InputBackward will be asked to write; until then the mixer may use it too, unless by_rows().
  virtual void TakeScratch(kernels::Arena& arena, const BatchShape& shape, kernels::Tensor d_input,
                           Saved& saved) const = 0;

  // `x`: rows [first, first + x.dim(0)) of the norm's output.
  virtual void Project(const Pass& pass, const ModelBatch& batch, Saved& saved, kernels::Tensor x,
                       int64_t first, Purpose purpose) const = 0;
  // All rows of `samples` have been projected.
  virtual void Mix(const Pass& /*pass*/, const ModelBatch& /*batch*/, Saved& /*saved*/,
                   Span /*samples*/) const {}
  // Whether Mix takes all samples in one call, because it exchanges them with other ranks.
  virtual bool exchanges() const { return false; }
  virtual kernels::Tensor Output(const Saved& saved) const = 0;  // [T,W]
  // Completes the branch once the outputs of the row-parallel GEMM have been summed over the tensor
  // group, on the stream of that sum: applies what all ranks' columns of Output decide. `tokens`:
  // of the slice of samples that was summed; `rows`: this rank's of them, the first of which is
  // token `first`. Mix of these samples has run; backward may be asked for what this leaves.
  virtual void FinishBranch(const Pass& /*on*/, Saved& /*saved*/, Span /*tokens*/,
                            kernels::Tensor /*rows*/, int64_t /*first*/) const {}

  // Decoding (decode.h). Takes memory for what lasts from token to token. kUnimplemented says why
  // this mixer cannot go on with a text.
  virtual absl::StatusOr<std::unique_ptr<MixerState>> TakeState(kernels::Arena& arena,
                                                                const DecodeShape& shape) const;
  // Instead of Mix, of all samples, whose tokens follow batch.first_position others. May use memory
  // of TakeScratch. Requires: TakeState succeeds.
  virtual void MixOnward(const Pass& /*pass*/, const ModelBatch& /*batch*/, Saved& /*saved*/,
                         MixerState& /*state*/) const {}
  // Whether the state grows with the text.
  virtual bool keeps_tokens() const { return false; }

  virtual const Linear& output() const = 0;  // row-parallel, [C,W]

  // Backward, in this order. `dy`: rows [first, ...) of the gradient of the branch [T,C]; they may
  // come in slices of whole samples.
  virtual void OutputBackward(const Pass& pass, const ModelBatch& batch, Saved& saved,
                              kernels::Tensor dy, int64_t first) const = 0;
  // After all rows; `dy` are all of them.
  virtual void MixBackward(const Pass& /*pass*/, const ModelBatch& /*batch*/, Saved& /*saved*/,
                           kernels::Tensor /*dy*/, const BesideMix& /*beside*/) const {}
  // Writes rows [first, first + dx.dim(0)) of the gradient of Project's input.
  virtual void InputBackward(const Pass& pass, Saved& saved, int64_t first,
                             kernels::Tensor dx) const = 0;
  // Adds the gradients of Project's parameters; `x` [T,C] is its input.
  virtual void InputWeights(const Pass& pass, Saved& saved, kernels::Tensor x) const = 0;
  // Whether backward sums numbers over the tensor group behind OutputBackward, and waits for them.
  virtual bool sums_in_backward() const { return false; }
  // Whether InputBackward may follow OutputBackward of the same rows at once: there is no
  // MixBackward.
  virtual bool by_rows() const { return false; }
  // Whether InputWeights may run after the backward of the layer in front of this one, whose
  // scratch memory is the same.
  virtual bool input_weights_may_wait() const { return false; }

  // Backward in two calls (Block::BackwardInput): OutputBackward, MixBackward and InputBackward
  // without adding to gradients of parameters, then KeepGradients, which leaves what InputWeights
  // of the second call needs in memory of TakeOutputs and TakeActivation. The mixer's output stays.
  virtual void SplitOutputBackward(const Pass& pass, const ModelBatch& batch, Saved& saved,
                                   kernels::Tensor dy, int64_t first) const {
    OutputBackward(pass, batch, saved, dy, first);
  }
  virtual void SplitMixBackward(const Pass& pass, const ModelBatch& batch, Saved& saved,
                                kernels::Tensor dy) const {
    MixBackward(pass, batch, saved, dy, {});
  }
  virtual void KeepGradients(const Pass& pass, Saved& saved) const = 0;
  virtual void SplitInputWeights(const Pass& pass, Saved& saved, kernels::Tensor x) const = 0;
};

inline absl::StatusOr<std::unique_ptr<MixerState>> Mixer::TakeState(kernels::Arena&,
                                                                    const DecodeShape&) const {
  return absl::UnimplementedError("it keeps nothing of the tokens so far");
}

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_MODEL_MIXER_H_
