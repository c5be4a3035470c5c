// The training loop of one rank.
#ifndef MUSTER_PARALLEL_TRAIN_TRAINER_H_
#define MUSTER_PARALLEL_TRAIN_TRAINER_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/file_system.h"
#include "base/ids.h"
#include "kernels/arena.h"
#include "kernels/device/device.h"
#include "kernels/device/replay.h"
#include "kernels/device/trace.h"
#include "kernels/optimizer/optimizer.h"
#include "parallel/checkpoint/checkpoint.h"
#include "parallel/comm/communicator.h"
#include "parallel/comm/exposure.h"
#include "parallel/comm/mesh_groups.h"
#include "parallel/comm/peer_memory.h"
#include "parallel/data/sampler.h"
#include "parallel/model/model.h"
#include "parallel/optim/flat_buffers.h"
#include "parallel/optim/flat_layout.h"
#include "parallel/optim/gradient_compressor.h"
#include "parallel/optim/gradient_reducer.h"
#include "parallel/optim/optimizer.h"
#include "parallel/optim/optimizer_offload.h"
#include "parallel/optim/parameter_gatherer.h"
#include "parallel/optim/schedule.h"
#include "parallel/pipeline/executor.h"
#include "parallel/pipeline/schedule.h"
#include "parallel/train/batch_loader.h"

namespace muster::parallel {

// What the model computes in. Master weights, optimizer state, gradients of parameters and the loss
// are fp32 in all of them.
enum class Precision {
  kFp32,
  kTf32,  // fp32 with products of matrices rounded to 10 bits: CUDA only, set on the device
  kBf16,  // CUDA only
  kFp16,  // CUDA only; with dynamic loss scaling
};

struct TrainerOptions {
  int64_t steps = 0;
  int64_t global_batch = 0;  // samples per step; a multiple of micro_batch x data-parallel ranks
  int64_t micro_batch = 0;
  uint64_t seed = 0;  // initial weights and masks of dropout
  AdamWConfig optimizer;
  Schedule schedule;
  int64_t bucket_bytes = 4 << 20;
  bool overlap = true;  // communicate while the model computes
  // On one rank, micro-batches and updates are recorded and run as a whole
  // (kernels/device/replay.h) where the device can and memory stands still: not with ZeRO 2 and 3,
  // nor with an offloaded optimizer.
  bool record = true;
  Precision precision = Precision::kFp32;
  kernels::LossScaling loss_scaling;  // of fp16, where it is dynamic
  // What gradients travel in: kF32, or kBF16 with sums in fp32.
  kernels::DType gradient_wire = kernels::DType::kF32;
  // Micro-batches of a rank are added one after the other, in one buffer, rather than in an order
  // that is the same for every layout (GradientReducerOptions::chained).
  bool chain_micro_batches = false;
  // Gradients that travel in part: ZeRO 0 or 1, fp32 wire, not fp16, on CPU devices.
  CompressionOptions compression;
  // Stage of ZeRO, 0 to 3, over the shard group of the MeshGroups.
  int zero = 0;
  // Where the mesh has a pipeline axis; the model holds the parts of this rank's stage.
  PipelineSchedule pipeline_schedule = PipelineSchedule::kOneForwardOneBackward;
  bool reshard_after_forward = true;    // ZeRO-3: free blocks after forward, gather them again
  int64_t resident_elements = 100'000;  // ZeRO-3: smaller parameters stay whole
  // Communicator::Share of what collectives work on.
  bool copy_engines = true;
  int64_t copy_engines_least_bytes = ShareOptions().least_bytes;
  // How exchanges beside the computing stream that it soon waits for, of the tensor and context
  // groups, wait for their peers (PeerMemory::WaitInWarp). Of products in chunks always in a
  // warp.
  bool waits_in_warp = false;
  // NcclOptions::thread_blocks_max of the communicators, for the prediction of memory alone.
  int nccl_thread_blocks = 0;
  // Share of the optimizer's state and master weights, 0 to 1, that is in host memory and updated
  // by so many threads of the host.
  double offload_optimizer = 0;
  int offload_threads = 1;
  // Compares what several ranks hold every so many steps, and after the last; 0 = never.
  int64_t verify_every = 0;
  int64_t evaluate_every = 0;      // 0 = only after the last step
  int64_t evaluate_samples = 0;    // 0 = the whole validation set
  std::string checkpoint_root;     // empty = no checkpoints
  int64_t checkpoint_every = 0;    // > 0 with a root
  int checkpoint_keep = 2;         // committed ones
  bool checkpoint_on_stop = true;  // when asked to stop
  // By rank, the lowest rank that writes into the same directory (checkpoint.h); empty: all share
  // one.
  std::vector<int> checkpoint_groups;
  JobId job;  // of the checkpoints' names
  Epoch epoch;
};

struct StepReport {
  int64_t step = 0;          // finished
  double loss = 0;           // nats per unmasked token, of the whole global batch
  double gradient_norm = 0;  // before clipping
  double learning_rate = 0;
  double seconds = 0;
  double exposed_communication_seconds = 0;  // of `seconds`, waiting for other ranks
  ExposedSeconds exposed;                    // the same by what was waited for, and in what
  int64_t tokens = 0;                        // unmasked, all ranks
  int64_t consumed_samples = 0;              // so far
  bool skipped = false;                      // fp16: an overflow, no update
  double loss_scale = 1;
  int64_t gradient_bytes = 0;   // sent by this rank to reduce gradients
  double gradient_density = 1;  // of compressed gradients: share of the elements that was sent
  double residual_norm = 0;     // of what this rank has not sent yet
};

struct EvaluationReport {
  int64_t step = 0;
  double loss = 0;  // nats per unmasked token
  int64_t tokens = 0;
  double seconds = 0;
};

struct SavedCheckpoint {
  CheckpointId id;
  SaveResult result;
  int64_t consumed_samples = 0;
  double seconds = 0;
};

// What the trainer tells and asks its surroundings. Called on the trainer's thread, between
// collectives; must not block for long.
class TrainerHooks {
 public:
  virtual ~TrainerHooks() = default;
  // "restoring", "training", "evaluating", "saving", "finished".
  virtual void OnPhase(absl::string_view phase) {}
  // The step is enqueued next. Returns where its spans are recorded, or null for nowhere; what is
  // returned must stay until OnStep of that step has run, or the trainer has gone.
  virtual kernels::Trace* BeginStep(int64_t step) { return nullptr; }
  // In order, without a gap; on CUDA some steps late.
  virtual void OnStep(const StepReport& report) {}
  virtual void OnEvaluation(const EvaluationReport& report) {}
  // Every rank; the result is complete on rank 0, which asks for it to be committed.
  virtual void OnSaved(const SavedCheckpoint& saved) {}
  virtual void OnDamaged(const CheckpointId& id, const absl::Status& why) {}  // rank 0
  virtual void OnRemoved(const CheckpointId& id) {}                           // rank 0
  // Training goes on: an old checkpoint could not be removed.
  virtual void OnWarning(const absl::Status& status) {}
  // Newest step of this attempt whose checkpoint counts; older ones may be pruned. Rank 0.
  virtual int64_t CommittedStep() { return 0; }
  // True on any rank ends all of them after the step that is under way.
  virtual bool StopRequested() { return false; }
};

// A committed checkpoint of an earlier attempt.
struct RestoreCandidate {
  CheckpointId id;
  std::string directory;
  std::string manifest_checksum;  // may be empty
};

struct MemoryUse;
struct TrainerPlace;

// Owns parameters, optimizer state, workspace and loader of one rank, and drives the steps.
// Single-threaded, apart from the communication streams and the loader's thread.
//
// A step: for every micro-batch forward and backward, gradients being reduced under backward; then
// one small all-reduce over all ranks of (loss and token count of every micro-batch of the global
// batch, stop vote, square sum of every rank's own gradients); then norm, clip, loss scale,
// learning rate and AdamW. Losses are exchanged one by one and summed in the same order everywhere,
// so all ranks report the same bits, in every layout. A square sum travels as a pair of fp32 that
// keeps 48 bits, so the norm does not depend on how gradients are sharded; but see
// SumsWithProducts (memory.h) for one rank whose additions may be made in any order.
//
// Nothing in a step waits for the host: scalars are computed on the device, and the host reads what
// became of a step when it has enqueued kStepsAhead more (on CUDA; on CPU at once). A step whose
// loss or norm is not finite changes nothing on the device; the run ends when the host learns of
// it, but for fp16, where it lowers the loss scale and training goes on.
//
// Two runs with the same options, seed and layout give the same losses bit for bit; with
// power-of-two degrees and micro-batches also other data-parallel layouts (see GradientReducer).
//
// Every status that it returns is marked with a FailureDomain.
class Trainer {
 public:
  enum class Outcome { kFinished, kStopped };

  // Plans and allocates all memory, and brings the parameters together where they are sharded: a
  // collective. The model, device, groups, samplers, file system and
  // hooks must outlive it; `validation` may be null. kMemory: kResourceExhausted with the sizes.
  // kConfiguration: batch sizes that do not divide.
  static absl::StatusOr<std::unique_ptr<Trainer>> Make(const TrainerOptions& options,
                                                       const Model& model, kernels::Device& device,
                                                       MeshGroups& groups, const Sampler& training,
                                                       const Sampler* validation, FileSystem& files,
                                                       TrainerHooks& hooks);
  ~Trainer();

  // Restores the first candidate that is sound, newest first; ranks agree on it. Rank 0 reads and
  // checks every byte; each rank verifies what it loads. Damaged ones are reported and skipped;
  // without any, training starts from the beginning. kStorage or kCommunication.
  absl::Status Restore(const std::vector<RestoreCandidate>& candidates);

  // Gives a box of one of the model's parameters as floats, row-major.
  using WeightReader =
      absl::FunctionRef<absl::Status(const std::string& name, const Box& box, float* out)>;
  // Begins with the weights of `read` instead of those of the seed. A collective, before the first
  // step; every rank reads what it holds. When one of them cannot, all fail: kStorage.
  absl::Status Initialize(WeightReader read);

  // Trains until the last step or a stop. Saves every checkpoint_every steps and after the last.
  absl::StatusOr<Outcome> Run();

  // Removes checkpoints that `keep` no longer covers, as far as newer ones are committed. Run()
  // does so at step boundaries; the caller once more after the last commit. Rank 0; others: no-op.
  void Prune();
  // Whether this is the first rank of a directory of checkpoints: it prunes.
  bool LeadsDirectory() const;

  int64_t step() const { return step_; }
  int64_t consumed_samples() const { return consumed_samples_; }
  // Memory of the workspace by category, and of parameters, optimizer state and gradients (also
  // those that stand in the workspace).
  const kernels::Arena& arena() const { return arena_; }
  int64_t state_bytes() const;
  // What this trainer was planned to take (memory.h).
  MemoryUse PredictedMemory() const;
  // Sent by this rank among those that share its key/value heads.
  int64_t key_bytes_sent() const { return sharers_ == nullptr ? 0 : sharers_->bytes_sent(); }
  int64_t host_state_bytes() const { return FlatBuffers::HostBytes(layout_, flat_->options()); }

 private:
  Trainer(const TrainerOptions& options, const Model& model, kernels::Device& device,
          MeshGroups& groups, const Sampler& training, const Sampler* validation, FileSystem& files,
          TrainerHooks& hooks);

  absl::Status Allocate();
  // On every rank the same: whether some rank lacks its part of the candidate and none is damaged.
  // `status`: why this rank could not load it, or OK.
  absl::StatusOr<bool> SaysWhatIsElsewhere(const RestoreCandidate& candidate,
                                           const absl::Status& status);
  absl::Status Load(CheckpointReader& reader);
  absl::Status LoadTensors(CheckpointReader& reader);
  // The own parts of parameters (0) or of one of their moments (1, 2), all of it.
  absl::Status LoadOwn(int state, WeightReader read);
  // Brings master weights that were just written to where the model reads them, on all ranks.
  void Publish();
  // When the gradients of a bucket are those of the step; null: once the reducers have finished.
  kernels::Event* Reduced(int bucket) const;
  // Times one bucket either way and warns when the dense one is faster. A collective.
  absl::Status CompareWithDense();
  int64_t GradientBytesSent();  // by this rank so far
  absl::Status LoadResiduals(CheckpointReader& reader);
  // Of parameters that are not compressed here, but were where the checkpoint was saved: what all
  // ranks had not sent joins the sum of the next step's gradients, which is all that will travel.
  absl::Status LoadUnsent(CheckpointReader& reader);
  void AddUnsent();
  class StateReader;
  std::vector<SavePiece> SavePieces(StateReader& reader);
  // What compression keeps back.
  void AddResiduals(StateReader& reader, std::vector<SavePiece>& pieces);
  kernels::Tensor Moment(int state, int bucket);  // own part: 1: m, 2: v
  // kMin over ranks of `ok`: true when it holds everywhere.
  absl::StatusOr<bool> Agree(bool ok);

  // One step enqueued but not yet collected.
  struct Flight {
    kernels::StepOutcome* outcome = nullptr;  // pinned host memory
    float* stop = nullptr;                    // pinned host memory
    float* residual_square = nullptr;         // pinned host memory
    double density = 1;
    std::unique_ptr<kernels::Event> done;
    // Around the end of the reductions, which compute waits for.
    std::unique_ptr<kernels::Event> reducing, reduced;
  };

  std::vector<kernels::Stream*> streams() const;  // those there are, the computing one last
  absl::Status AllocateFlights();
  void MakeMeter();
  absl::Status EnqueueStep();
  class StepClient;
  class EvaluationClient;
  absl::Status MakeReducers();
  // What MostOfEach gives for the ranks of this one's tensor group; empty where theirs are alike.
  absl::StatusOr<std::vector<int64_t>> AlignWorkspaces();
  absl::Status AllocatePipeline();
  absl::Status AllocateShared();
  absl::Status AllocatePositions();
  absl::Status ShareMemory();
  absl::Status TakeMemoryForSums();
  int context_size() const { return groups_.mesh().degree(Axis::kContext); }
  // Copies this rank's tokens of whole sequences [B x S], on the computing stream.
  void CopyTokens(const kernels::Tensor& whole, const kernels::Tensor& local);
  // What every pass has in common.
  Pass MakePass();
  absl::Status RunMicroBatches(Flight& flight);
  // A tied table on the first and the last stage: the gradient of its own part becomes the sum of
  // both.
  void SumShared();
  // Waits for the oldest step under way and reports it; false: a rank has asked to stop.
  absl::StatusOr<bool> CollectStep();
  // The steps up to the next point where the host must know them all, or the stop.
  absl::StatusOr<bool> RunToBoundary();
  bool Boundary(int64_t step) const;  // evaluates, saves or ends
  absl::Status StartLoader();
  // kDataLoss, on every rank, when tensors that several ranks hold differ: the same part of a
  // parameter, or of its optimizer state, whatever axis it is replicated along.
  absl::Status Verify();
  bool Verifies(int64_t step) const {
    return options_.verify_every > 0 &&
           (step % options_.verify_every == 0 || step == options_.steps);
  }
  absl::Status Evaluate();
  absl::StatusOr<double> EvaluationLoss(int64_t samples, int64_t* tokens);
  absl::Status EvaluateBatch(const std::vector<int64_t>& samples, int64_t slot, int64_t batches);
  absl::Status Save();
  // Where gradients are averaged; used by compression alone.
  Communicator& gradient_group() { return groups_.Along({Axis::kData, Axis::kContext}); }
  // Of a parameter that several ranks of its tensor group, or two stages, hold: whether this rank
  // counts it in the norm and saves it.
  bool SpeaksFor(const Parameter& parameter) const;
  // Whether this rank saves the parameter: one rank of every directory of checkpoints does.
  bool Saves(const Parameter& parameter) const;
  // Who saves what, where hosts have directories of their own. A collective.
  absl::Status ShareSaving();
  FlatRange Saved(int bucket) const;  // the part of the own part of a bucket that this rank saves
  int data_rank() const { return groups_.coordinate()[Axis::kData]; }
  int data_size() const { return groups_.mesh().degree(Axis::kData); }
  // Whether this rank's losses count: every token's loss is reported by one rank.
  bool reports_loss() const;
  TrainerPlace place() const;
  int64_t micro_batches() const;         // per rank and step
  int64_t global_micro_batches() const;  // per step
  int together() const;                  // see GradientReducer::MicroBatchOf
  int64_t step_values() const;           // floats that a step exchanges
  // Rather than adding to zeros; a backward in two calls adds. With shards, what was there before
  // is left over in the padding, which matters unless it is anything anyway.
  bool overwrites_gradients() const {
    const bool anything = options_.zero == 0 || flat_->options().share_gradients;
    const bool adds = options_.chain_micro_batches && options_.zero < 2 && micro_batches() > 1;
    return anything && !adds && !model_.shape().split_backward;
  }

  const TrainerOptions options_;
  const Model& model_;
  kernels::Device& device_;
  MeshGroups& groups_;
  // Of the ranks that hold the same and write into the same directory: which this is, of how many.
  int64_t saver_ = 0, savers_ = 1;
  bool several_directories_ = false;
  bool saves_duplicates_ = false;  // no rank of this directory has the say over them
  Communicator& world_;
  const Sampler& training_;
  const Sampler* const validation_;
  FileSystem& files_;
  TrainerHooks& hooks_;
  const std::vector<BlockRange> gradient_groups_;
  FlatLayout layout_;

  // In order of construction: streams end before the memory they use.
  kernels::Arena arena_;
  std::vector<int64_t> workspace_;  // TrainerPlace::workspace; empty: null
  std::unique_ptr<FlatBuffers> flat_;
  std::unique_ptr<GradientCompressor> compressor_;  // null: gradients travel whole
  // LoadUnsent(): where in the own part of which bucket, and the elements in host memory.
  struct Unsent {
    int bucket = 0;
    int64_t begin = 0;
    kernels::Tensor elements;
  };
  std::vector<Unsent> unsent_;  // until the step that takes them has been enqueued
  std::unique_ptr<kernels::Buffer> unsent_memory_;  // and until it has run
  std::unique_ptr<kernels::Buffer> values_, host_values_, flight_memory_, residual_square_;
  std::vector<Flight> flights_;  // a ring, by step
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<kernels::Replay> replay_;  // of updates; null where steps are not recorded
  std::unique_ptr<kernels::Stream> compute_, communication_, gathering_;
  std::unique_ptr<ContextOverlap> exchange_;     // of ranks that share sequences; null: on compute_
  std::unique_ptr<TensorStream> tensor_stream_;  // null: tensor collectives run on compute_
  std::unique_ptr<ExposureMeter> meter_;
  // Groups whose calls on the computing stream are waits.
  std::unique_ptr<Communicator> metered_world_, metered_gather_, metered_tensor_, metered_context_,
      metered_pipeline_;
  std::unique_ptr<Communicator> sharers_;  // of key/value heads; null: no tensor ranks share any
  std::vector<std::unique_ptr<GradientReducer>> reducers_;  // per gradient group
  std::unique_ptr<ParameterGatherer> gatherer_;
  std::unique_ptr<OptimizerOffload> offload_;  // null: all state is on the device
  std::unique_ptr<PipelineExecutor> executor_;
  std::unique_ptr<kernels::Buffer>
      positions_;                            // of this rank's tokens, where ranks share sequences
  int shared_bucket_ = -1;                   // of the table that another stage holds too
  std::unique_ptr<kernels::Buffer> shared_;  // what that stage has found
  std::unique_ptr<BatchLoader> loader_;
  std::unique_ptr<kernels::Buffer> gradient_sums_, tensor_sums_;  // parts of sums over peers
  std::unique_ptr<SharedMemory> shared_memory_;  // of the arena and the flat buffers

  bool ended_well_ = false;          // Run() has come to its end, so it has on all ranks
  int64_t step_ = 0;                 // collected
  int64_t enqueued_ = 0;             // >= step_
  kernels::Trace* trace_ = nullptr;  // of the step that is being enqueued
  std::chrono::steady_clock::time_point collected_at_;
  int64_t consumed_samples_ = 0;
  int64_t gradient_bytes_ = 0;  // sent up to the last step collected
  int64_t evaluated_step_ = -1;
  int64_t saved_step_ = -1;
  int64_t pruned_at_ = 0;                  // CommittedStep() when last pruned
  std::vector<CheckpointId> checkpoints_;  // committed earlier or saved by this attempt, by step
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_TRAIN_TRAINER_H_
