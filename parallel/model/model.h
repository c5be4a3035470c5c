// A model is a list of blocks with explicit Forward and Backward over memory that is planned once.
//
// Memory of one micro-batch (a Workspace), taken from an Arena by category:
//   "inputs"       tokens and targets, i32
//   "activations"  what each block keeps from Forward for Backward
//   "logits"       logits of a slice of the tokens (head.h); the loss overwrites them by their
//                  gradient. They share memory with "scratch"
//   "scratch"      shared by all blocks: the pending branch, the gradient of the hidden state, and
//                  the scratch memory of the block whose Backward needs most
// Nothing is allocated in a step. A pipeline stage is a contiguous range of the blocks; several
// micro-batches in flight are several workspaces.
//
// The hidden state is passed on as (residual, branch): the residual stream and the output of the
// last branch, which is not yet added to it because the norm that follows fuses the addition. Both
// have the same gradient, so one tensor carries it back.
//
// Words of this folder. Shard: a tensor rank's range of a parameter or of the vocabulary. Slice: a
// contiguous range of the tokens. Half-batch: half of the samples of a micro-batch, a slice that
// overlaps with the other one. Rows: the tokens of a hidden state; with sequence parallelism a rank
// has "its rows", and gathers "all rows".
#ifndef MUSTER_PARALLEL_MODEL_MODEL_H_
#define MUSTER_PARALLEL_MODEL_MODEL_H_

#include <cstdint>
#include <functional>
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
#include "parallel/model/decode.h"
#include "parallel/model/gradient_squares.h"
#include "parallel/model/parameters.h"
#include "parallel/model/tensor_stream.h"
#include "parallel/plan/model_description.h"

namespace muster::parallel {

// Attention of a model, the same in all its blocks that have it. heads is 0 in a model without.
struct AttentionSizes {
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t depth = 0;  // width of a head
};

// State-space mixers of a model, the same in all its blocks that have them. heads is 0 in a model
// without.
struct ScanSizes {
  int64_t heads = 0;
  int64_t head_width = 0;
  int64_t groups = 0;
  int64_t state = 0;
  int64_t taps = 0;  // of the convolution
};

// State-space heads that a rank scans in one call, and the groups that they are in.
struct ScanPart {
  int64_t heads = 0;
  int64_t groups = 0;
  friend bool operator==(const ScanPart&, const ScanPart&) = default;
};

// What one block exchanges with other ranks, beside gradients and parameters.
struct BlockExchanges {
  // Its layers, each with a column-parallel and a row-parallel GEMM (tensor_parallel.h).
  int layers = 0;
  int attentions = 0;  // layers that exchange keys and values with context ranks
  int scans = 0;       // layers that pass states between context ranks
  // Numbers per token that the block sums over its tensor group, once forward and once backward,
  // beside hidden states.
  int64_t sums_per_token = 0;
};

// Blocks [begin, end), numbered embedding, residual blocks, head; end < 0: to the last one.
struct BlockRange {
  int begin = 0;
  int end = -1;
};

// What a block does not keep from forward but recomputes in backward. The results are
// the same: in fp32 bit for bit.
enum class Recompute : uint8_t {
  kNone,
  // What needs no GEMM: the outputs of norms, of the MLP's activation, and of scans where these
  // exchange nothing.
  kSelective,
  // Everything but the block's input: one more forward pass without its last GEMM.
  kFull,
};

// Which collectives of the tensor group run beside the compute stream.
enum class TensorOverlap : uint8_t {
  kNone,
  // The collectives of backward run while backward computes something that does not need their
  // result: gradients of weights, and all that comes before a layer's input is needed. The results
  // are the same. With sequence parallelism this takes one more tensor [T,C].
  kBackward,
  // The collectives of forward overlap as well: a GEMM behind an all-gather, or in front of a
  // reduce-scatter, is cut into one GEMM per rank's rows. One runs while the rows of the next
  // arrive, or while its output is sent to the rank that sums it. fp32 sums keep the order of a
  // collective; 16-bit ones are rounded once. The bytes and the memory stay the same. Requires
  // sequence parallelism.
  kChunked,
  // As kBackward, and in forward a micro-batch is two half-batches: the collectives of one, and the
  // norms between them, run while the GEMMs of the other compute (Domino: Wang et al., arXiv
  // 2409.15241). The bytes and the memory are those of kBackward. A micro-batch with an odd number
  // of samples is not split.
  kHalves,
};
// The names of the job spec: "none", "backward", "chunked", "halves".
const char* Name(TensorOverlap overlap);

// Which blocks and shards of a model one rank holds. Names, boxes and initial values of parameters
// are those of the whole model.
struct ModelParallel {
  // The block ranges of a pipeline stage in forward order, one per virtual stage; empty: all
  // blocks.
  std::vector<BlockRange> parts;
  // Its place in the tensor-parallel group (tensor_parallel.h).
  int tensor_rank = 0;
  int tensor_size = 1;
  bool sequence_parallel = false;
  TensorOverlap tensor_overlap = TensorOverlap::kBackward;
  // How much work each rank of the group gets, in any unit; empty: equal shares.
  std::vector<double> tensor_weights;
  // Applies to the first recompute_blocks blocks of the rank, or to all with 0.
  // kSelective saves as much memory as these would, but drops activations first, in more blocks,
  // because they cost least to recompute, then norms, then scans.
  Recompute recompute = Recompute::kNone;
  int recompute_blocks = 0;
  // Of the blocks behind these, where they recompute kFull: kNone or kSelective.
  Recompute recompute_rest = Recompute::kNone;
  // Backward runs in two calls, Model::BackwardInput and BackwardWeights (zero-bubble pipelines).
  // Excludes recompute: the second call needs the activations that recompute drops.
  bool split_backward = false;
  // Ranks that share each sequence (context_attention.h). ContextPositions says which tokens a rank
  // has, and BatchShape::sequence counts only these.
  int context_size = 1;
  ContextMethod context_method = ContextMethod::kRing;
  int context_head_groups = 0;                         // ContextShape::head_groups
  ScanMethod scan_method = ScanMethod::kStatePassing;  // of state-space mixers
  // Attention stays within documents (ModelBatch::documents).
  bool documents = false;
  // What blocks keep is in host memory until their backward (activation_offload.h).
  // Excludes split_backward, which leaves gradients in the same memory.
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
  int64_t head_tokens = 0;  // tokens whose logits exist at once (head.h); 0: chosen by their size
  int64_t tokens() const { return batch * sequence; }
};

class Block;

// What Forward of a block keeps of one micro-batch for Backward.
struct BlockSaved {
  virtual ~BlockSaved() = default;
};

// What a pass is about: the tokens of a micro-batch, and memory that its blocks share. Shapes: T =
// tokens, C = hidden width, V = stored rows of this rank's shard of the vocabulary, R = this rank's
// rows of the hidden states: T, or T / tensor_size with sequence parallelism.
struct ModelBatch {
  BatchShape shape;
  kernels::Tensor tokens;   // [T] i32
  kernels::Tensor targets;  // [T] i32, < 0 = masked
  // Rotary models: cosines and sines of every position, written by Forward (kernels::RotaryTable);
  // [S,D] fp32. Row s belongs to position s, or to positions[s] where they are given ([S] i32).
  kernels::Tensor rotary;
  kernels::Tensor positions;
  // Decoding: the tokens of every text in front of this pass's. Positions are counted from there.
  int64_t first_position = 0;
  // With separate documents: the position at which the document of each token begins, of whole
  // sequences; [B, S x context_size] i32.
  kernels::Tensor documents;
  // With dropout: the number of the micro-batch's first sample in the order of training; the other
  // samples follow (kernels::DropoutArgs); [2] i32.
  kernels::Tensor sample;
  // kLogits: Forward leaves the logits of the tokens from logits_begin on, as many as the head
  // computes at once: every logits_step-th one.
  int64_t logits_begin = 0;
  int64_t logits_step = 1;

  // [T,C] scratch that blocks write their branch to. From the head's Forward to its Backward it
  // holds the gradient of the final norm's output.
  kernels::Tensor branch_storage;
  // [T,C] scratch for all rows of a hidden state's gradient while branch_storage holds all rows of
  // a layer's input. Empty in models that do not gather both at the same time.
  kernels::Tensor gathered;
};

// What each block hands to the next one in Forward.
struct ForwardState {
  kernels::Tensor residual;  // [R,C]
  kernels::Tensor branch;    // [R,C], empty in front of the first block
  // With half-batches (TensorOverlap::kHalves): the branch of the second one, where `branch` is
  // that of the first, [R/2,C] each. Otherwise empty.
  kernels::Tensor second_branch;
  // Where the next block keeps residual + branch, [R,C]. A block may write the sum there; it then
  // becomes the residual, and there is no branch. Empty where no block follows on this rank.
  kernels::Tensor next_sum;
  // Where set, a block calls it before it writes to next_sum, whose memory may be in use until
  // then.
  std::function<void()> await_next_sum;
  // Half-batches: the next block, which begins with a half-batch as soon as this block is done with
  // it; null where it has to wait. `begun` is what the next block has begun.
  const Block* next = nullptr;
  BlockSaved* next_saved = nullptr;
  InSlices begun;
  // What the head leaves.
  kernels::Tensor logits;  // kLogits: [tokens,V], until the next pass
  kernels::Tensor losses;  // [T] fp32, 0 where masked
};

// What each block hands to the one in front of it in Backward.
struct BackwardState {
  kernels::Tensor d_hidden;  // [R,C] gradient of residual and of branch
  // [C] fp32: the column sums of d_hidden, valid while d_hidden_summed. They are the gradient of
  // the bias of the layer that was last added to the residual stream. Empty in models without them.
  kernels::Tensor d_hidden_sums;
  bool d_hidden_summed = false;
  // Whether another block follows on this rank, and all rows of d_hidden where the block before has
  // begun to gather them.
  bool more_behind = false;
  InSlices d_whole;
};

enum class HeadMode {
  kLogits,           // logits only, of this rank's vocabulary; targets are not read
  kLoss,             // losses
  kLossAndGradient,  // losses, and the head's part of the gradients, which Backward needs
};

// Backward reports to it when the last addition to a parameter's gradient has been enqueued.
class GradientListener {
 public:
  virtual ~GradientListener() = default;
  virtual void GradientReady(ParameterId parameter) = 0;
};

// What a block does, which decides what it needs of its parameters.
enum class BlockWork : uint8_t {
  kForward,              // their values
  kForwardAndGradients,  // values, and memory for their gradients until the end of backward
  kBackward,             // values, and memory for gradients
  kBackwardInput,        // values
  kBackwardWeights,      // memory for gradients
};

// Model reports to it when the parameters of a block are about to be used and when they have been,
// so that sharded parameters (ZeRO-3) can be gathered and freed. What the gate enqueues on the
// pass's stream (a wait for a gather, say) comes before the block's own work.
class BlockGate {
 public:
  virtual ~BlockGate() = default;
  // `block` counts from 0 within the model. This work of it is enqueued next.
  virtual void Acquire(int block, BlockWork work) = 0;
  // Asks to enqueue the beginning of a block's forward pass, which needs only these parameters,
  // before Acquire. Returns false when one of them is not gathered yet.
  virtual bool AcquireEarly(absl::Span<const ParameterId> parameters) = 0;
  // All of this work has been enqueued.
  virtual void Release(int block, BlockWork work) = 0;
};

// The stream and the parameters of one pass. Views must outlive the call.
struct Pass {
  kernels::Stream& stream;
  const ParameterViews& weights;
  HeadMode head = HeadMode::kLossAndGradient;
  float loss_scale = 1;  // multiplied into the gradient of every token's loss
  // kLossAndGradient: Forward (for the head's table) and Backward add gradients to these.
  // `listener` may be null.
  const ParameterViews* gradients = nullptr;
  // The gradients hold nothing yet: the first addition to each overwrites it, whatever is there.
  bool overwrite_gradients = false;
  // Where GEMMs leave the sums of squares of gradients; may be null.
  GradientSquares* squares = nullptr;
  GradientListener* listener = nullptr;
  BlockGate* gate = nullptr;
  // Device memory, or null: one fp32 factor beside loss_scale.
  const float* dynamic_loss_scale = nullptr;
  // The seed of dropout masks, the same in forward and backward of a training pass. Without it
  // nothing is dropped (evaluation, generation).
  std::optional<uint64_t> dropout_seed;
  // The tensor-parallel group that the model was cut for, unused when that is one rank. Its
  // collectives run on `stream`, and those that overlap on `tensor_stream` where there is one.
  Communicator* tensor = nullptr;
  TensorStream* tensor_stream = nullptr;
  // The ranks that share each sequence, where the model was cut for several. Exchanges of attention
  // run on `stream`, or beside it where there is a context_overlap and work to overlap with.
  Communicator* context = nullptr;
  ContextOverlap* context_overlap = nullptr;
  kernels::Trace* trace = nullptr;  // of a profile, or null

  // The same pass on another stream. A field that is missing here does not compile.
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
  // Takes memory for what must live from Forward to Backward.
  virtual std::unique_ptr<Saved> TakeSaved(kernels::Arena& arena,
                                           const BatchShape& shape) const = 0;
  // Whether what TakeSaved takes may be offloaded between Forward and Backward: the next block
  // reads it, but none behind that.
  virtual bool offloads() const { return false; }
  // Takes memory that is used inside one call of Backward only; `saved` keeps views of it.
  virtual void TakeScratch(kernels::Arena& arena, const BatchShape& shape, Saved& saved) const = 0;
  virtual void Forward(const Pass& pass, const ModelBatch& batch, ForwardState& state,
                       Saved& saved) const = 0;

  // Decoding (decode.h). Takes memory for what lasts from token to token. kUnimplemented names the
  // block and says why it cannot go on with a text.
  virtual absl::StatusOr<std::unique_ptr<BlockState>> TakeState(kernels::Arena& arena,
                                                                const DecodeShape& shape) const;
  // Forward of the tokens behind batch.first_position others, which updates the state.
  virtual void Decode(const Pass& pass, const ModelBatch& batch, ForwardState& state, Saved& saved,
                      BlockState& text) const;
  // Whether texts can be no longer than DecodeShape::context.
  virtual bool limits_text() const { return false; }

  // Begins Forward with half-batch 0 or 1, in this order, whose rows of the residual and of
  // the branch or second_branch are complete at the current end of pass.tensor_stream.
  virtual void BeginForward(const Pass&, const ModelBatch&, ForwardState&, Saved&,
                            int /*half*/) const {}
  // The parameters that BeginForward reads; none for a block without half-batches.
  virtual std::vector<ParameterId> BeginsWith() const { return {}; }
  // Where the block keeps residual + branch (ForwardState::next_sum); empty where it does not.
  virtual kernels::Tensor SumStorage(const Saved&) const { return {}; }
  // Whether Forward adds gradients already (HeadMode::kLossAndGradient); Backward follows at once.
  virtual bool AddsGradientsInForward() const { return false; }
  // Reads and updates state.d_hidden (the head writes it first).
  virtual void Backward(const Pass& pass, const ModelBatch& batch, BackwardState& state,
                        Saved& saved) const = 0;
  // Backward in two calls, which together add the same bits to the same gradients. BackwardInput
  // touches no gradient of a parameter (pass.gradients may be null) and leaves what BackwardWeights
  // needs in `saved`, in the place of activations that are not needed any more; others may use the
  // scratch memory between the two. Requires Model::Shape::split_backward, and a block other than
  // the head, whose gradients come with its Forward.
  virtual void BackwardInput(const Pass& pass, const ModelBatch& batch, BackwardState& state,
                             Saved& saved) const;
  virtual void BackwardWeights(const Pass& pass, const ModelBatch& batch, BackwardState& state,
                               Saved& saved) const;
};

// Memory that activations and gradients share: a block's activations are in use until its backward,
// and its gradients and those of the blocks in front of it are written only then. Requires
// Pass::overwrite_gradients, that the losses are not read after Backward has begun, and that
// gradients are not read after the next Forward has begun.
struct GradientOverlay {
  int64_t bytes = 0;
  // Per block of the workspace: the offset at which the gradients that its backward writes end.
  // Gradients of later blocks come first. Offsets need no alignment.
  std::vector<int64_t> ends;
};

// The memory of one micro-batch. Views of an arena; move-only.
struct Workspace {
  ModelBatch batch;
  ForwardState forward;
  BackwardState backward;
  kernels::Tensor gradients;                         // the shared memory, u8 [bytes]; or empty
  std::vector<std::unique_ptr<Block::Saved>> saved;  // per block
  int first_block = 0;                               // the block of saved[0]
  ActivationSlots slots;                             // of the blocks that offload
  // The trainer makes it where slots.copied() > 0; Backward requires it then.
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
    AttentionSizes attention;
    ScanSizes scan;
    // Of these, what this rank of the tensor group holds: heads and the groups that they are in.
    int64_t own_heads = 0, own_kv_heads = 0;
    std::vector<ScanPart> own_scans;
    // Of this rank's blocks between embedding and head.
    std::vector<BlockExchanges> exchanges;
    int64_t rotary_width = 0;  // width of a head with rotary positions, else 0
    double rope_theta = 0;
    kernels::RotaryScaling rope_scaling;
    int tensor_size = 1;
    bool sequence_parallel = false;
    TensorOverlap tensor_overlap = TensorOverlap::kNone;  // kNone with tensor_size 1
    bool split_backward = false;  // BackwardInput and BackwardWeights can be called
    // The key/value head that this rank shares with others of the tensor group: ranks with the same
    // number hold the same TensorSharing::kShared parameters. -1: none is shared.
    int kv_group = -1;
    bool documents = false;                               // ModelBatch::documents is read
    ContextMethod context_method = ContextMethod::kRing;  // with context_size > 1
    ScanMethod scan_method = ScanMethod::kStatePassing;   // likewise
    bool deterministic = true;                            // of attention's backward
    bool dropout = false;                                 // ModelBatch::sample is read in training
    bool sums_hidden_gradient = false;                    // BackwardState::d_hidden_sums exists
  };

  // Of the whole model, forward and backward, for sequences of sequence_max tokens. Multiply-adds
  // count two.
  struct FlopsPerToken {
    // 6 per weight of a GEMM (forward, both gradients), plus the causal half of attention, 6 x
    // sequence x heads x their width in each layer that has it, and the scan of Mamba-2.
    int64_t model = 0;
    // The same with what recomputation repeats. Excludes what attention's kernels repeat
    // internally.
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

  // The virtual pipeline stages on this rank, as ranges of its own blocks, counted from 0; without
  // a pipeline one range of all blocks.
  const std::vector<BlockRange>& parts() const { return parts_; }

  // This rank's rows of the hidden states.
  int64_t HiddenRows(const BatchShape& shape) const {
    return shape.tokens() / (shape_.sequence_parallel ? shape_.tensor_size : 1);
  }

  // Whether some block's activations are in host memory between Forward and Backward.
  bool offloads() const;

  // Makes the same sequence of Take() on each call: once while the arena plans, once after
  // Commit(). Requires: shape.sequence <= sequence_max; with sequence parallelism, the tokens are a
  // multiple of tensor_size. With an `overlay` the workspace has memory for gradients that
  // activations share; it requires that no block offloads. May be null.
  Workspace TakeWorkspace(kernels::Arena& arena, const BatchShape& shape,
                          const GradientOverlay* overlay = nullptr) const;

  // Tokens (and targets) are in workspace.batch.
  void Forward(const Pass& pass, Workspace& workspace) const;
  // Requires: the last Forward with this workspace was kLossAndGradient, with the
  // same pass.gradients, to which this adds.
  void Backward(const Pass& pass, Workspace& workspace) const;

  // The same for one range of this rank's blocks. The caller sets forward.residual unless the range
  // begins with the embedding; the hidden state is residual + branch afterwards. The
  // caller provides backward.d_hidden, and fills it unless the range ends with the head; it holds
  // the gradient of the range's input afterwards. Workspaces in flight may share their scratch
  // memory, as long as the head's Backward directly follows its Forward.
  Workspace TakeSaved(kernels::Arena& arena, const BatchShape& shape, BlockRange range,
                      const GradientOverlay* overlay = nullptr) const;
  void TakeScratch(kernels::Arena& arena, Workspace& workspace) const;
  // Requires: the workspace's range contains `range`.
  void Forward(const Pass& pass, Workspace& workspace, BlockRange range) const;
  void Backward(const Pass& pass, Workspace& workspace, BlockRange range) const;
  // Backward in two calls (Zero bubble: Qi et al., arXiv 2401.10241): the gradient of the range's
  // input, and later, with the workspace's memory untouched, the gradients of its parameters.
  // Requires: shape().split_backward, a range without the head.
  void BackwardInput(const Pass& pass, Workspace& workspace, BlockRange range) const;
  void BackwardWeights(const Pass& pass, Workspace& workspace, BlockRange range) const;

  // Decoding: going on with texts from a state (decode.h). Requires: this rank has all blocks.
  // kUnimplemented names the block, or the layout of the model, that cannot do it.
  absl::Status CheckDecode() const;
  // Whether texts can be no longer than Shape::sequence_max: the model has a table of positions, or
  // keeps every token. Without, memory and time of a token do not depend on the text's length.
  bool limits_text() const;
  // Memory that lasts ("state"). Requires: CheckDecode; shape.context <= sequence_max where the
  // model limits texts.
  DecodeState TakeDecodeState(kernels::Arena& arena, const DecodeShape& shape) const;
  // Memory of passes over shape.sequence tokens of each text: less than TakeWorkspace, since there
  // is no backward. Several may share memory, because none lasts.
  Workspace TakeDecodeWorkspace(kernels::Arena& arena, const BatchShape& shape) const;
  // Goes on with every text by the tokens in workspace.batch and leaves the logits of the last
  // token of each in workspace.forward.logits, [batch,V]. Requires: HeadMode::kLogits, a workspace
  // of as many texts with head_tokens = batch, and that the texts stay within the state's context.
  void Decode(const Pass& pass, Workspace& workspace, DecodeState& state) const;

 private:
  void WriteRotaryTable(const Pass& pass, const ModelBatch& batch) const;
  void TakeSharing(kernels::Arena& arena, const GradientOverlay& overlay, BlockRange range,
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
