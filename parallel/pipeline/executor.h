// Runs one rank's action list (schedule.h) over its parts of a model: several micro-batches in
// flight, activations and their gradients exchanged with the neighbouring stages.
//
// Without a pipeline the list is forward, backward, forward, backward ..., and this is the loop
// over micro-batches of a step.
//
// Between two parts travels one tensor [T,C]: the residual stream with the last branch added, which
// gives the bits that the addition fused into the next norm would give (fp32). Back travels its
// gradient. Exchanges run on a stream of their own, so that a receive is posted while the stage
// computes, and every buffer is waited for only when it is touched.
#ifndef MUSTER_PARALLEL_PIPELINE_EXECUTOR_H_
#define MUSTER_PARALLEL_PIPELINE_EXECUTOR_H_

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/arena.h"
#include "kernels/device/device.h"
#include "kernels/device/replay.h"
#include "parallel/comm/communicator.h"
#include "parallel/comm/exposure.h"
#include "parallel/model/model.h"
#include "parallel/pipeline/schedule.h"

namespace muster::parallel {

// Where the micro-batches of a step come from, and where losses and gradients go. Called by the
// thread that runs the executor.
class MicroBatchClient {
 public:
  virtual ~MicroBatchClient() = default;
  // Fills flow.tokens (first part) and flow.targets (last part) with micro-batch `i`, on the pass's
  // stream. Each part asks in order; a rank that holds both ends may be asked twice. Where the
  // model keeps documents apart or has dropout, the first chunk of every rank asks, once, and fills
  // flow.documents and flow.sample too.
  virtual absl::Status Load(int micro_batch, Flow& flow) = 0;
  // Last part: flow.losses has been computed.
  virtual void OnLosses(int micro_batch, const Flow& flow) = 0;
  // Around all that adds gradients for one micro-batch of one group (GradientGroups): the gradients
  // to add to, and the end of it. In order of the micro-batches for each group.
  virtual const ParameterViews& BeginGradients(int group, int micro_batch) = 0;
  virtual void EndGradients(int group, int micro_batch) = 0;
};

// Blocks of this rank's model whose gradients are added together, in order: those of each chunk.
// Where backward is split the last stage has two, its blocks and the head: the head's gradients
// come with the gradient of its input, micro-batches before those of the blocks (which are none
// where the head is all that the stage has).
std::vector<BlockRange> GradientGroups(const PipelineShape& shape, const Model& model, int rank);

// Owns streams, events and the views of its buffers; refers to the rest. Single-threaded.
class PipelineExecutor {
 public:
  struct Options {
    // Exchanges on a stream of their own; else on the computing stream.
    bool overlap = true;
    ExposureMeter* meter = nullptr;  // counts the waits for neighbours; may be null
    // RunStep records the work of each micro-batch and runs the recordings
    // (kernels/device/replay.h). The listener hears of all gradients at the end of a backward.
    // Requires: one stage and one chunk, and nothing enqueued by the pass's gate or to another
    // stream.
    bool replay = false;
  };

  // `group`: the ranks along the pipeline axis, plan.shape.stages of them, in the order of the
  // stages. `model` holds one part per chunk of the plan, and can split its backward where the plan
  // does. kInvalidArgument when these do not fit; else the device's status.
  static absl::StatusOr<std::unique_ptr<PipelineExecutor>> Make(const PipelinePlan& plan,
                                                                const Model& model,
                                                                Communicator& group,
                                                                kernels::Stream& compute,
                                                                const Options& options);
  ~PipelineExecutor();

  // The same Take() sequence on each call: once while the arena plans, once after Commit(). Scratch
  // comes last: whatever is taken afterwards would share its memory. `room`: see
  // Model::TakeWorkspace; requires one stage, chunk and micro-batch. Returns the room's memory.
  kernels::Tensor TakeMemory(kernels::Arena& arena, const BatchShape& shape,
                             const GradientOverlay* room = nullptr);
  // After TakeMemory from a committed arena: memory of the host for activations that the model
  // offloads. kResourceExhausted.
  absl::Status AllocateOffload();
  // What TakeMemory() takes on stage `rank`, for planning without a device; returns the bytes of
  // AllocateOffload(). Requires: as Make().
  static int64_t PlanMemory(const PipelinePlan& plan, const Model& model, int rank,
                            kernels::Arena& arena, const BatchShape& shape,
                            const GradientOverlay* room = nullptr);

  // Of the tokens of every sequence, where they are not 0, 1, 2 ... (Flow::positions); after
  // TakeMemory.
  void SetPositions(const kernels::Tensor& positions);

  // One step. `pass` says stream (the computing one), weights, loss scale and so on; head,
  // gradients are set here. Enqueues and returns, like the model does. Load's status, or that of
  // the exchange stream so far.
  absl::Status RunStep(const Pass& pass, MicroBatchClient& client);

  // `micro_batches` forward passes, without gradients; micro-batch i is the i-th. Losses come on
  // the last stage. The other stages' Load is called too, in the same order.
  absl::Status RunForward(const Pass& pass, int micro_batches, MicroBatchClient& client);

  // Of the exchanges so far.
  absl::Status status() const {
    return exchange_ != nullptr ? exchange_->status() : absl::OkStatus();
  }

  bool first_stage() const { return rank_ == 0; }
  bool last_stage() const { return rank_ + 1 == plan_.shape.stages; }
  // Memory that is in flight at most, in micro-batches of one chunk: workspaces of every chunk, and
  // [T,C] buffers of inputs, outputs and gradients.
  struct Buffers {
    std::vector<int> workspaces;
    int inputs = 0, outputs = 0, gradients = 0;
  };
  const Buffers& buffers() const { return counts_; }

 private:
  // A [T,C] tensor that is exchanged.
  struct Buffer {
    kernels::Tensor tensor;
    std::unique_ptr<kernels::Event> exchanged;
    bool waiting = false;  // an exchange has been enqueued and computing has not waited for it
  };
  // One action with the memory that it uses: indices, -1 = none.
  struct Step {
    PipelineAction action;
    int workspace = -1;
    int loaded = -1;  // the first chunk's, of the same micro-batch
    int input = -1, output = -1, gradient = -1;
    bool head_in_forward = false;  // last part: its backward comes next
  };

  PipelineExecutor(const PipelinePlan& plan, const Model& model, Communicator& group,
                   kernels::Stream& compute);
  // Gives each action of `rank` its buffers, and counts them.
  static Buffers Compile(const PipelinePlan& plan, int rank, std::vector<Step>& steps);
  struct Memory {
    std::vector<std::vector<Workspace>> workspaces;  // by chunk
    std::vector<kernels::Tensor> inputs, outputs, gradients;
  };
  static Memory Take(const Model& model, const Buffers& counts, kernels::Arena& arena,
                     const BatchShape& shape, const GradientOverlay* room);
  absl::Status MakeEvents(const Options& options);
  absl::Status Load(const Step& step, MicroBatchClient& client);
  absl::Status Forward(const Step& step, const Pass& pass, MicroBatchClient& client);
  absl::Status Backward(const Step& step, const Pass& pass, MicroBatchClient& client);
  void BackwardInput(const Step& step, const Pass& pass, MicroBatchClient& client);
  void BackwardWeights(const Step& step, const Pass& pass, MicroBatchClient& client);
  // Of the last part: losses and the gradient of the head's input, where Forward has not run it.
  void Head(const Step& step, const Pass& with_gradients, MicroBatchClient& client);
  // A trace shows what the host enqueues; offloaded activations leave on streams of their own.
  bool Replays(const Pass& pass) const {
    return replay_ != nullptr && offload_ == nullptr && pass.trace == nullptr;
  }
  // The part's passes, or recordings of them.
  void ModelForward(const Pass& pass, int chunk, int workspace);
  void ModelBackward(const Pass& pass, int chunk, int workspace);
  bool Replayed(const Pass& pass, bool backward, Workspace& workspace,
                absl::FunctionRef<void(const Pass& pass)> work);
  size_t Exchange(size_t begin);
  void Await(Buffer& buffer);
  void Add(const Flow& flow, Buffer& to);
  BlockRange Trunk(int chunk) const;
  // The group of the head's gradients.
  int HeadGroup(int chunk) const { return split_ ? chunk + 1 : chunk; }
  bool IsFirstPart(int chunk) const { return plan_.Part(rank_, chunk) == 0; }
  bool IsLastPart(int chunk) const { return plan_.Part(rank_, chunk) + 1 == plan_.parts(); }

  const PipelinePlan plan_;
  const Model& model_;
  Communicator& group_;
  kernels::Stream& compute_;
  const int rank_;
  const bool split_;  // backward is two actions
  std::vector<Step> steps_;
  Buffers counts_;
  std::unique_ptr<ActivationStreams> offload_;      // null: nothing is offloaded
  std::vector<std::vector<Workspace>> workspaces_;  // by chunk
  std::vector<Buffer> inputs_, outputs_, gradients_;
  std::unique_ptr<kernels::Stream> exchange_;  // null: exchanges run on the computing stream
  std::unique_ptr<kernels::Event> computed_;
  ExposureMeter* meter_ = nullptr;
  const ParameterViews* head_gradients_ = nullptr;  // from the head's forward to its backward
  std::unique_ptr<kernels::Replay> replay_;         // null: no recordings
  std::map<kernels::Replay::Key, Flow> replayed_;   // what each recording leaves behind
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_PIPELINE_EXECUTOR_H_
