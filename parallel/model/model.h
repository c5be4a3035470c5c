// A model is a list of blocks with explicit Forward and Backward over memory that is planned once.
//
// Memory of one micro-batch (a Workspace), taken from an Arena by category:
//   "inputs"       tokens and targets, i32
//   "activations"  what each block keeps from Forward for Backward
//   "logits"       of one chunk of tokens (head.h); the loss overwrites them by their gradient.
//                  They share memory with "scratch"
//   "scratch"      shared by all blocks: the pending branch, the gradient of the hidden state, and
//                  the largest need of one block's Backward
// Nothing is allocated in a step. A pipeline stage is a contiguous range of the blocks; several
// micro-batches in flight are several workspaces.
//
// The hidden state travels as (residual, branch): the stream and the last branch not yet added to
// it, because the addition is fused into the norm that follows. Both have the same gradient, so one
// tensor carries it back.
#ifndef MUSTER_PARALLEL_MODEL_MODEL_H_
#define MUSTER_PARALLEL_MODEL_MODEL_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/arena.h"
#include "kernels/attention/rotary.h"
#include "kernels/device/device.h"
#include "kernels/device/trace.h"
#include "kernels/tensor.h"
#include "parallel/comm/communicator.h"
#include "parallel/context/context_attention.h"
#include "parallel/model/activation_offload.h"
#include "parallel/model/parameters.h"
#include "parallel/model/product_squares.h"
#include "parallel/model/tensor_stream.h"

namespace muster::parallel {

// A model as plain names and numbers: what a checkpoint keeps so that it can be rebuilt from it.
struct ModelDescription {
  std::string family;                     // "gpt2", "llama"
  std::map<std::string, int64_t> sizes;   // "layers", "hidden", ...; > 0
  std::map<std::string, double> numbers;  // "norm_epsilon", "rope_theta", ...; finite
  std::map<std::string, bool> flags;      // "tied"
};

// Blocks [begin, end), numbered embedding, transformer blocks, head; end < 0: to the last one.
struct BlockRange {
  int begin = 0;
  int end = -1;
};

// What a transformer block does not keep from forward but computes again in backward. The numbers
// are the same: fp32 gives the same bits.
enum class Recompute : uint8_t {
  kNone,
  // The outputs of norms and of the MLP's activation: cheap, no matrix product.
  kSelective,
  // Everything but the block's input: one more forward pass, less its last product.
  kFull,
};

// Which collectives of the tensor group run beside the computing stream.
enum class TensorOverlap : uint8_t {
  kNone,
  // Those of backward, under the products of backward that do not need them: gradients of weights,
  // and all that runs before a layer's input is needed. The numbers are the same. With sequence
  // parallelism for one more tensor [T,C].
  kBackward,
  // Also those of forward, where nothing else is left to do: a product that follows a gather, or
  // comes before a sum, runs in one piece per rank. Each rank's rows are multiplied while the next
  // ones arrive; each piece of an output leaves for the rank that sums it while the next one is
  // made. Sums in fp32 are made in the order of a collective, in 16 bits with one rounding. Same
  // bytes, same memory. With sequence parallelism.
  kChunked,
  // kBackward, and in forward the samples of a micro-batch go through the blocks in two halves, one
  // after the other: each half's collectives, and the norms between them, run under the products of
  // the other half (Domino: Wang et al., arXiv 2409.15241). Same bytes, same memory as kBackward.
  // A batch of an odd number of samples goes through whole.
  kHalves,
};
// The names of the job spec: "none", "backward", "chunked", "halves".
const char* Name(TensorOverlap overlap);

// Which part of a model one rank holds. Names, boxes and initial values of parameters stay those of
// the whole model.
struct ModelParallel {
  // The ranges of a pipeline stage in forward order, one per chunk; empty: all blocks in one.
  std::vector<BlockRange> parts;
  // Its place in the tensor-parallel group (tensor_parallel.h).
  int tensor_rank = 0;
  int tensor_size = 1;
  bool sequence_parallel = false;
  TensorOverlap tensor_overlap = TensorOverlap::kBackward;
  // How much work each rank of the group gets, in any unit; empty: all the same.
  std::vector<double> tensor_weights;
  // Of the first recompute_blocks transformer blocks of the rank, or of all with 0; kSelective
  // gives up as much memory as those, but activations first, of more blocks: they cost least.
  Recompute recompute = Recompute::kNone;
  int recompute_blocks = 0;
  // Backward runs in two calls, Model::BackwardInput and BackwardWeights (zero-bubble pipelines).
  // Not with recompute: the second call needs the activations that recompute gives up.
  bool split_backward = false;
  // Ranks that share each sequence (context_attention.h); a rank's tokens are those of
  // ContextPositions, and BatchShape::sequence counts them alone.
  int context_size = 1;
  ContextMethod context_method = ContextMethod::kRing;
  int context_head_groups = 0;  // ContextShape::head_groups
  // Attention stays within documents (Flow::documents).
  bool documents = false;
  // What transformer blocks keep is in the host's memory until their backward
  // (activation_offload.h). Not with split_backward, which leaves values there.
  bool offload_activations = false;
  // Backward gives the same bits every time; see kernels::AttentionBackwardArgs.
  bool deterministic = true;
  // Probability, 0 to less than 1, that an element of what the embedding, attention and the MLP add
  // to the residual stream is dropped in training (Pass::dropout_seed): GPT-2's embd_pdrop and
  // resid_pdrop. Masks do not depend on the layout (kernels::Dropout).
  double dropout = 0;
};

// Samples x tokens of one forward pass, and the dtype that it computes in: of activations, logits
// and their gradients, and of the weights that a Pass hands in. Statistics, losses and the
// gradients of parameters are fp32 whatever it is.
struct BatchShape {
  int64_t batch = 0;
  int64_t sequence = 0;
  kernels::DType activation = kernels::DType::kF32;
  int64_t head_tokens = 0;  // whose logits stand at once (head.h); 0: chosen by their size
  int64_t tokens() const { return batch * sequence; }
};

class Block;

// What one micro-batch leaves behind in a block for Backward.
struct BlockSaved {
  virtual ~BlockSaved() = default;
};

// What flows through the blocks in one pass. Shapes: T = tokens, C = hidden width, V = stored rows
// of this rank's part of the vocabulary, R = T, or T / tensor_size with sequence parallelism: this
// rank's rows of the hidden states.
struct Flow {
  BatchShape shape;
  kernels::Tensor tokens;   // [T] i32
  kernels::Tensor targets;  // [T] i32, < 0 = masked
  // Rotary models: cosines and sines of every position, written by Forward (kernels::RotaryTable);
  // [S,D] fp32. Row s stands for position s, or for positions[s] where they are given ([S] i32).
  kernels::Tensor rotary;
  kernels::Tensor positions;
  // Where documents are kept apart: the position at which the document of each token begins, of
  // whole sequences; [B, S x context_size] i32.
  kernels::Tensor documents;
  // Of a model with dropout: the number of the first sample in the order of training, the others
  // follow (kernels::DropoutArgs); [2] i32.
  kernels::Tensor sample;
  kernels::Tensor residual;  // [R,C]
  kernels::Tensor branch;    // [R,C], empty in front of the first block
  // Of samples that travel in halves (TensorOverlap::kHalves): the branch of the second half, where
  // `branch` is that of the first, [R/2,C] each; empty otherwise.
  kernels::Tensor second_branch;
  // Forward of halves: the block behind, which begins with a half as soon as that has left this
  // one; null where it has to wait. What it has begun.
  const Block* next = nullptr;
  BlockSaved* next_saved = nullptr;
  InPieces begun;
  // Forward: where the block behind keeps the sum of the two, [R,C]: a block may write it there,
  // which is the residual then, and leave no branch. Empty where there is none on this rank.
  kernels::Tensor next_sum;
  // [T,C] scratch that blocks write their branch to; from the head's Forward to its Backward, the
  // gradient of its norm's output.
  kernels::Tensor branch_storage;
  // [T,C] scratch for all rows of gradients of hidden states while those of a layer's input stand
  // in branch_storage. Of models that gather them at the same time; else empty.
  kernels::Tensor gathered;
  kernels::Tensor d_hidden;  // [R,C] gradient of residual and of branch
  // [C] fp32: the sums of its columns while d_hidden_summed, which are the gradient of the bias of
  // what was added to the residual stream last. Empty in a model that does without.
  kernels::Tensor d_hidden_sums;
  bool d_hidden_summed = false;
  // Backward: another block follows on this rank, and all rows of d_hidden, where the block before
  // has begun to gather them for it.
  bool more_behind = false;
  InPieces d_whole;
  // kLogits: the first token whose logits are wanted; the logits of it and of those behind it, as
  // many as a chunk of the head holds, [chunk,V]. They last until the next pass.
  int64_t logits_begin = 0;
  kernels::Tensor logits;
  kernels::Tensor losses;  // [T] fp32, 0 where masked
};

enum class HeadMode {
  kLogits,           // logits only, of this rank's vocabulary; targets are not read
  kLoss,             // losses
  kLossAndGradient,  // losses, and the head's part of the gradients, which Backward needs
};

// Told by Backward when the last addition to a parameter's gradient has been enqueued.
class GradientListener {
 public:
  virtual ~GradientListener() = default;
  virtual void GradientReady(ParameterId parameter) = 0;
};

// What a block does, and needs of its parameters.
enum class BlockWork : uint8_t {
  kForward,
  kBackward,         // their values, and memory for their gradients
  kBackwardInput,    // values only
  kBackwardWeights,  // memory for gradients only
};

// Told by Model when the parameters of a block are about to be used and when they have been: who
// shards them gathers and frees them there. Whatever the gate enqueues on the pass's stream (a wait
// for a gather, say) comes before the block's own work.
class BlockGate {
 public:
  virtual ~BlockGate() = default;
  // `block` counts from 0 within the model. This work of it is enqueued next.
  virtual void Acquire(int block, BlockWork work) = 0;
  // Part of a block's forward pass, which needs these parameters only, is enqueued before Acquire.
  // False, and nothing, where one of them is not there before.
  virtual bool AcquireEarly(absl::Span<const ParameterId> parameters) = 0;
  // All of it has been enqueued.
  virtual void Release(int block, BlockWork work) = 0;
};

// The stream and the parameters of one pass. Views must outlive the call.
struct Pass {
  kernels::Stream& stream;
  const ParameterViews& weights;
  HeadMode head = HeadMode::kLossAndGradient;
  float loss_scale = 1;  // multiplied into the gradient of every token's loss
  // kLossAndGradient: gradients are added to these, by Forward (the head's table) and by Backward.
  // The listener of Backward may be null.
  const ParameterViews* gradients = nullptr;
  // The gradients hold nothing yet: the first addition to each overwrites it, whatever is there.
  bool overwrite_gradients = false;
  // Where products leave the sums of squares of gradients; null: nobody wants them.
  ProductSquares* squares = nullptr;
  GradientListener* listener = nullptr;
  BlockGate* gate = nullptr;
  // Device memory, or null: one fp32 factor beside loss_scale.
  const float* dynamic_loss_scale = nullptr;
  // Training: what the masks of a model with dropout are drawn from. The same in forward and
  // backward; without, nothing is dropped (evaluation, generation).
  std::optional<uint64_t> dropout_seed;
  // The tensor-parallel group that the model was cut for; its collectives run on `stream`, those
  // that overlap beside it where there is a stream for them. Not used when that is one rank.
  Communicator* tensor = nullptr;
  TensorStream* tensor_stream = nullptr;
  // The ranks that share each sequence, where the model was cut for several. Exchanges of attention
  // run on `stream`, or, where there is an overlap and something to run meanwhile, beside it.
  Communicator* context = nullptr;
  ContextOverlap* context_overlap = nullptr;
  kernels::Trace* trace = nullptr;  // null: nobody profiles

  // The same on another stream. A field that is missing here does not compile.
  Pass On(kernels::Stream& other) const {
    const auto& [own, w, h, scale, g, overwrite, sq, l, gt, dynamic, seed, t, ts, c, co, tr] =
        *this;
    return {other, w, h, scale, g, overwrite, sq, l, gt, dynamic, seed, t, ts, c, co, tr};
  }
};

// Single-threaded. Parameters are registered by the constructors.
class Block {
 public:
  using Saved = BlockSaved;

  virtual ~Block() = default;
  virtual const std::string& name() const = 0;
  // Takes what must live from Forward to Backward.
  virtual std::unique_ptr<Saved> TakeSaved(kernels::Arena& arena,
                                           const BatchShape& shape) const = 0;
  // Whether what TakeSaved takes can be elsewhere between Forward and Backward: the next block
  // reads it, but none behind that. All such blocks of a model take as much.
  virtual bool offloads() const { return false; }
  // Takes what only lives inside one call of Backward; views are kept in `saved`.
  virtual void TakeScratch(kernels::Arena& arena, const BatchShape& shape, Saved& saved) const = 0;
  virtual void Forward(const Pass& pass, Flow& flow, Saved& saved) const = 0;
  // Begins Forward with one half of the samples (0 or 1, in this order), whose part of
  // flow.residual and flow.branch, or flow.second_branch, will be there where the stream of
  // pass.tensor_stream is now.
  virtual void BeginForward(const Pass&, Flow&, Saved&, int /*half*/) const {}
  // The parameters that this reads; none of a block that does not work in halves.
  virtual std::vector<ParameterId> BeginsWith() const { return {}; }
  // Where it keeps residual + branch (Flow::next_sum); empty where it does not.
  virtual kernels::Tensor SumStorage(const Saved&) const { return {}; }
  // Reads and updates flow.d_hidden (the head writes it first).
  virtual void Backward(const Pass& pass, Flow& flow, Saved& saved) const = 0;
  // Backward in two calls, which together add the same bits to the same gradients. The first
  // touches no gradient of a parameter (pass.gradients may be null) and keeps in `saved`, in place
  // of activations that it has used up, what the second needs; scratch memory may be used between
  // the two. Of blocks with Model::Shape::split_backward, but not of the head, whose gradients come
  // with its Forward.
  virtual void BackwardInput(const Pass& pass, Flow& flow, Saved& saved) const;
  virtual void BackwardWeights(const Pass& pass, Flow& flow, Saved& saved) const;
};

// Memory for gradients that a workspace lends to activations: those of a block are in use until its
// backward, and only then does anybody write the gradients of it and of the blocks in front of it.
// Requires Pass::overwrite_gradients; and nobody reads flow.losses after Backward has begun, or
// gradients after the next Forward has.
struct GradientRoom {
  int64_t bytes = 0;
  // Per block of the workspace: where, from the beginning of the room, the gradients end that its
  // backward writes. Each a multiple of 256 or not; gradients of later blocks stand in front.
  std::vector<int64_t> ends;
};

// The memory of one micro-batch. Views of an arena; move-only.
struct Workspace {
  Flow flow;
  kernels::Tensor gradients;                         // the room, u8 [bytes]; empty without one
  std::vector<std::unique_ptr<Block::Saved>> saved;  // per block
  int first_block = 0;                               // whose saved comes first
  ActivationSlots slots;                             // of the blocks that offload
  // Made by whoever runs steps where slots.copied() > 0; without it there is no backward.
  std::unique_ptr<ActivationOffload> offload;
};

// Owns the blocks and the registry. Const after construction; any number of workspaces.
class Model {
 public:
  struct Shape {
    int64_t hidden = 0;
    int64_t vocab = 0;          // real tokens
    int64_t vocab_storage = 0;  // rows of the table and columns of the logits on this rank
    int64_t sequence_max = 0;   // longest context
    int context_size = 1;       // ranks that share a sequence
    int64_t rotary_width = 0;   // width of a head with rotary positions, else 0
    double rope_theta = 0;
    kernels::RotaryScaling rope_scaling;
    int tensor_size = 1;
    bool sequence_parallel = false;
    TensorOverlap tensor_overlap = TensorOverlap::kNone;  // kNone with tensor_size 1
    bool split_backward = false;  // BackwardInput and BackwardWeights can be called
    // Where ranks of the tensor group share key/value heads: which one, so those of one number hold
    // the same TensorSharing::kShared parameters. -1: none is shared.
    int kv_group = -1;
    bool documents = false;                               // Flow::documents is read
    ContextMethod context_method = ContextMethod::kRing;  // with context_size > 1
    bool deterministic = true;                            // of attention's backward
    bool dropout = false;                                 // Flow::sample is read in training
    bool sums_hidden_gradient = false;                    // Flow::d_hidden_sums is there
  };

  // Of the whole model, forward and backward, for sequences of sequence_max tokens. Multiply-adds
  // count two.
  struct FlopsPerToken {
    // 6 per weight of a matrix product (forward, both gradients), plus attention with its causal
    // half only: 6 x layers x sequence x hidden.
    int64_t model = 0;
    // And what recomputation repeats of these. Not what attention's kernels repeat by themselves.
    int64_t hardware = 0;
  };

  Model(ModelDescription description, Shape shape, std::unique_ptr<ParameterRegistry> parameters,
        std::vector<std::unique_ptr<Block>> blocks, FlopsPerToken flops_per_token,
        std::vector<BlockRange> parts = {});

  const ModelDescription& description() const { return description_; }
  const Shape& shape() const { return shape_; }
  const ParameterRegistry& parameters() const { return *parameters_; }
  int64_t training_flops_per_token() const { return flops_per_token_.model; }
  int64_t hardware_flops_per_token() const { return flops_per_token_.hardware; }

  // The parts of the model on this rank, as ranges of its own blocks, which count from 0 here; one
  // range of all blocks without a pipeline.
  const std::vector<BlockRange>& parts() const { return parts_; }

  // This rank's rows of the hidden states.
  int64_t HiddenRows(const BatchShape& shape) const {
    return shape.tokens() / (shape_.sequence_parallel ? shape_.tensor_size : 1);
  }

  // Whether what some block keeps is in host memory between Forward and Backward.
  bool offloads() const;

  // The same Take() sequence on each call: once while the arena plans, once after Commit().
  // Requires: shape.sequence <= sequence_max; with sequence parallelism, the tokens are a multiple
  // of tensor_size. `room`: with memory for gradients, which activations share; null: without.
  // Requires of a room: no block offloads.
  Workspace TakeWorkspace(kernels::Arena& arena, const BatchShape& shape,
                          const GradientRoom* room = nullptr) const;

  // Tokens (and targets) are in workspace.flow.
  void Forward(const Pass& pass, Workspace& workspace) const;
  // Requires: the last Forward with this workspace was kLossAndGradient, with the
  // same pass.gradients, to which this adds.
  void Backward(const Pass& pass, Workspace& workspace) const;

  // The same for one range of this rank's blocks. flow.residual comes from outside unless the range
  // begins with the embedding, and the hidden state leaves as flow.residual + flow.branch;
  // flow.d_hidden is memory of the caller, who fills it unless the range ends with the head, and
  // holds the gradient of the range's input afterwards. Workspaces in flight may share their
  // scratch memory, as long as the head's Backward directly follows its Forward.
  Workspace TakeSaved(kernels::Arena& arena, const BatchShape& shape, BlockRange range,
                      const GradientRoom* room = nullptr) const;
  void TakeScratch(kernels::Arena& arena, Workspace& workspace) const;
  // Requires: the workspace's range contains `range`.
  void Forward(const Pass& pass, Workspace& workspace, BlockRange range) const;
  void Backward(const Pass& pass, Workspace& workspace, BlockRange range) const;
  // Backward in two calls (Zero bubble: Qi et al., arXiv 2401.10241): the gradient of the range's
  // input, and, any time later, with the workspace's memory untouched, those of its parameters.
  // Requires: shape().split_backward, a range without the head.
  void BackwardInput(const Pass& pass, Workspace& workspace, BlockRange range) const;
  void BackwardWeights(const Pass& pass, Workspace& workspace, BlockRange range) const;

 private:
  void TakeSharing(kernels::Arena& arena, const GradientRoom& room, BlockRange range,
                   Workspace& workspace) const;
  template <typename Run>
  void BackwardThrough(const Pass& pass, Workspace& workspace, BlockRange range, BlockWork work,
                       Run run) const;

  ModelDescription description_;
  Shape shape_;
  std::unique_ptr<ParameterRegistry> parameters_;
  std::vector<std::unique_ptr<Block>> blocks_;
  FlopsPerToken flops_per_token_;
  std::vector<BlockRange> parts_;
};

// kInvalidArgument names the unknown family, or the size or range that is missing, unknown or
// impossible.
absl::StatusOr<std::unique_ptr<Model>> MakeModel(const ModelDescription& description,
                                                 const ModelParallel& parallel = {});

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_MODEL_MODEL_H_
