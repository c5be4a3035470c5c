// Runs one rank's action list (schedule.h) over its virtual stages of a model, with several
// micro-batches in flight, and exchanges activations and their gradients with the neighbouring
// stages.
//
// Without a pipeline the list is forward, backward, forward, backward ..., and the executor is the
// loop over the micro-batches of a step.
//
// A virtual stage sends one tensor [T,C] forward: the residual stream with the last branch added,
// which has the same bits in fp32 as the addition that the next norm fuses. Its gradient comes
// back. Exchanges run on a stream of their own, so that a receive is posted while the stage
// computes; the compute stream waits for a buffer only when it uses it.
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
#include "parallel/pipeline/buffers.h"
#include "parallel/pipeline/schedule.h"

namespace muster::parallel {

// Provides the micro-batches of a step and receives losses and gradients. Called by the thread that
// runs the executor.
class MicroBatchClient {
 public:
  virtual ~MicroBatchClient() = default;
  // Fills batch.tokens (first virtual stage) and batch.targets (last one) with micro-batch
  // `micro_batch` on the pass's stream. Each virtual stage asks in order, so a rank with both ends
  // may ask twice. With separate documents or dropout, the first virtual stage of every rank asks
  // once, and batch.documents and batch.sample are to be filled too.
  virtual absl::Status Load(int micro_batch, const ModelBatch& batch) = 0;
  // On the last virtual stage: the losses of all tokens (ForwardState::losses).
  virtual void OnLosses(int micro_batch, const kernels::Tensor& losses) = 0;
  // Called before and after the work that adds gradients of one micro-batch for one group
  // (GradientGroups), in the order of the micro-batches within each group. Begin returns the
  // gradients to add to.
  virtual const ParameterViews& BeginGradients(int group, int micro_batch) = 0;
  virtual void EndGradients(int group, int micro_batch) = 0;
};

// The blocks of this rank's model whose gradients are complete at the same time: one group per
// virtual stage. Where backward is split, the last stage has two, its blocks and the head, because
// the head's gradients come with the gradient of its input, micro-batches before those of the
// blocks. The first of these is empty if the stage has the head alone.
std::vector<BlockRange> GradientGroups(const PipelineShape& shape, const Model& model, int rank);

// Owns streams, events and the views of its buffers; refers to the rest. Single-threaded.
class PipelineExecutor {
 public:
  struct Options {
    // Exchanges run on a stream of their own; else on the compute stream.
    bool overlap = true;
    ExposureMeter* meter = nullptr;  // counts waits for neighbouring stages; may be null
    // RunStep records the work of each micro-batch and replays it (kernels/device/replay.h). The
    // listener gets all gradients at the end of a backward. Requires: one virtual stage, and no
    // work enqueued by the pass's gate or on another stream.
    bool replay = false;
  };

  // `group`: the plan.shape.stages ranks along the pipeline axis, in the order of the stages.
  // `model` holds one block range per virtual stage of this rank, and can split its backward where
  // the plan does. kInvalidArgument when these do not match; else the device's status.
  static absl::StatusOr<std::unique_ptr<PipelineExecutor>> Make(const PipelinePlan& plan,
                                                                const Model& model,
                                                                Communicator& group,
                                                                kernels::Stream& compute,
                                                                const Options& options);
  ~PipelineExecutor();

  // Makes the same sequence of Take() on each call: once while the arena plans, once after
  // Commit(). Scratch comes last, because what is taken afterwards would share its memory.
  // `overlay`: see Model::TakeWorkspace; it requires one virtual stage and one micro-batch. Returns
  // the overlay's memory.
  kernels::Tensor TakeMemory(kernels::Arena& arena, const BatchShape& shape,
                             const GradientOverlay* overlay = nullptr);
  // To be called after TakeMemory from a committed arena: allocates host memory for activations
  // that the model offloads. kResourceExhausted.
  absl::Status AllocateOffload();
  // What TakeMemory() takes on stage `rank`, for planning without a device; returns the bytes of
  // AllocateOffload(). Requires: as Make().
  static int64_t PlanMemory(const PipelinePlan& plan, const Model& model, int rank,
                            kernels::Arena& arena, const BatchShape& shape,
                            const GradientOverlay* overlay = nullptr);

  // Sets the positions of the tokens of every sequence where these are not 0, 1, 2 ...
  // (ModelBatch::positions). To be called after TakeMemory.
  void SetPositions(const kernels::Tensor& positions);

  // Enqueues one step. `pass` has the compute stream, weights, loss scale and so on; its head mode
  // and gradients are set here. Returns Load's status, or that of the exchange stream so far.
  absl::Status RunStep(const Pass& pass, MicroBatchClient& client);

  // Enqueues `micro_batches` forward passes without gradients. Losses are computed on the last
  // stage; Load is called on all stages in the same order.
  absl::Status RunForward(const Pass& pass, int micro_batches, MicroBatchClient& client);

  // The status of the exchanges so far.
  absl::Status status() const {
    return exchange_ != nullptr ? exchange_->status() : absl::OkStatus();
  }

  // What a step has in flight at most: workspaces, and [T,C] buffers of inputs, outputs and
  // gradients.
  const BufferCounts& buffers() const { return counts_; }

 private:
  // A [T,C] tensor that is exchanged.
  struct Buffer {
    kernels::Tensor tensor;
    std::unique_ptr<kernels::Event> exchanged;
    bool waiting = false;  // an exchange is enqueued that the compute stream has not waited for
  };
  PipelineExecutor(const PipelinePlan& plan, const Model& model, Communicator& group,
                   kernels::Stream& compute);
  struct Memory {
    std::vector<std::vector<Workspace>> workspaces;  // by chunk
    std::vector<kernels::Tensor> inputs, outputs, gradients;
  };
  static Memory Take(const Model& model, const BufferCounts& counts, kernels::Arena& arena,
                     const BatchShape& shape, const GradientOverlay* overlay);
  absl::Status MakeEvents(const Options& options);
  absl::Status Load(const BufferedAction& step, MicroBatchClient& client);
  absl::Status Forward(const BufferedAction& step, const Pass& pass, MicroBatchClient& client);
  absl::Status Backward(const BufferedAction& step, const Pass& pass, MicroBatchClient& client);
  void BackwardInput(const BufferedAction& step, const Pass& pass, MicroBatchClient& client);
  void BackwardWeights(const BufferedAction& step, const Pass& pass, MicroBatchClient& client);
  // On the last virtual stage: losses and the gradient of the head's input, unless Forward ran the
  // head.
  void Head(const BufferedAction& step, const Pass& with_gradients, MicroBatchClient& client);
  // Not with a trace, which shows what the host enqueues, nor with offloaded activations, which are
  // copied on other streams.
  bool Replays(const Pass& pass) const {
    return replay_ != nullptr && offload_ == nullptr && pass.trace == nullptr;
  }
  // The passes of a virtual stage, or recordings of them.
  void ModelForward(const Pass& pass, int chunk, int workspace);
  void ModelBackward(const Pass& pass, int chunk, int workspace);
  bool Replayed(const Pass& pass, bool backward, Workspace& workspace,
                absl::FunctionRef<void(const Pass& pass)> work);
  size_t Exchange(size_t begin);
  void Await(Buffer& buffer);
  void Add(const ForwardState& state, Buffer& to);
  BlockRange Trunk(int chunk) const;
  // The gradient group of the head.
  int HeadGroup(int chunk) const { return split_ ? chunk + 1 : chunk; }
  bool IsFirstPart(int chunk) const { return plan_.Part(rank_, chunk) == 0; }
  bool IsLastPart(int chunk) const { return plan_.Part(rank_, chunk) + 1 == plan_.parts(); }

  const PipelinePlan plan_;
  const Model& model_;
  Communicator& group_;
  kernels::Stream& compute_;
  const int rank_;
  const bool split_;  // backward is two actions
  std::vector<BufferedAction> steps_;
  BufferCounts counts_;
  std::unique_ptr<ActivationStreams> offload_;      // null: nothing is offloaded
  std::vector<std::vector<Workspace>> workspaces_;  // by chunk
  std::vector<Buffer> inputs_, outputs_, gradients_;
  std::unique_ptr<kernels::Stream> exchange_;  // null: exchanges run on the computing stream
  std::unique_ptr<kernels::Event> computed_;
  ExposureMeter* meter_ = nullptr;
  const ParameterViews* head_gradients_ = nullptr;  // from the head's forward to its backward
  std::unique_ptr<kernels::Replay> replay_;         // null: no recordings
  // What a workspace holds after each recording.
  struct States {
    ForwardState forward;
    BackwardState backward;
  };
  std::map<kernels::Replay::Key, States> replayed_;
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_PIPELINE_EXECUTOR_H_
