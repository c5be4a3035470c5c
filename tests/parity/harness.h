// Trains one small model in any layout, over ranks that are threads, on real text, and returns all
// that layouts are compared by.
#ifndef MUSTER_TESTS_PARITY_HARNESS_H_
#define MUSTER_TESTS_PARITY_HARNESS_H_

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/file_system.h"
#include "parallel/comm/communicator.h"
#include "parallel/data/indexed_dataset.h"
#include "parallel/data/sampler.h"
#include "parallel/model/model.h"
#include "parallel/plan/validate.h"
#include "parallel/train/trainer.h"
#include "parallel/train/volume.h"
#include "tests/parity/recorder.h"

namespace muster::parallel::parity {

// One training run. A new axis of parallelism is a field here and a line in harness.cc.
struct Case {
  ModelDescription model;
  Layout layout;  // degrees, chunks, ZeRO; batch sizes
  PipelineSchedule schedule = PipelineSchedule::kOneForwardOneBackward;
  // Transformer blocks of each part, in forward order; empty: cut by cost.
  std::vector<int> pipeline_blocks;
  std::array<Axis, 4> order = MeshOptions().order;
  std::vector<double> tensor_weights;  // uneven tensor-parallel shards
  TensorOverlap tensor_overlap = TensorOverlap::kBackward;
  ContextMethod context_method = ContextMethod::kRing;
  int context_head_groups = 2;  // of all-to-all, where they can be
  Recompute recompute = Recompute::kNone;
  int recompute_blocks = 0;  // the first ones of a rank; 0: all
  bool offload_activations = false;
  double offload_optimizer = 0;  // share of the state
  bool documents = false;        // attention stays within them
  double dropout = 0;
  bool any_order = false;  // micro-batches of a rank are added one after the other
  bool tcp = false;        // ranks talk over sockets, not through memory
  bool overlap = true;
  bool reshard_after_forward = true;
  int64_t bucket_bytes = 8192;
  int64_t resident_elements = 100;  // small, so that ZeRO-3 has something to shard
  int64_t steps = 50;
  // Of the peak. Larger ones amplify rounding within 50 steps, on one rank as on several: see
  // matrix_test.cc.
  double learning_rate = 1e-3;
  uint64_t seed = 77;
  int64_t evaluate_every = 0;  // > 0: on text that is not trained on, also after the last step
  int64_t stop_after = 0;      // > 0: ends after this step, with a checkpoint
  int64_t save_every = 0;      // > 0: checkpoints
  std::vector<RestoreCandidate> restore;
  // By rank, the host whose directory of checkpoints it has; empty: all share one.
  std::vector<int> hosts;
  std::function<void(TrainerOptions&)> adjust;  // what has no field here
  // Around each rank's communicator of the world.
  std::function<std::unique_ptr<Communicator>(std::unique_ptr<Communicator>)> wrap;
  bool may_fail = false;  // the status is the caller's to look at

  int ranks() const;
  std::string ToString() const;
};

// Of one rank; its bytes are those that it has sent in the whole run.
struct RankResult : Recorded {
  int64_t state_bytes = 0, host_state_bytes = 0;
  // By the shard group, and where compressed gradients have a group beside it and its replicas by
  // that: reduce-scatters of gradients.
  int64_t reduced_bytes = 0;
  int64_t gathered_bytes = 0;  // by the gather group: all-gathers of parameters
  int64_t replica_bytes = 0;   // by the replicate group: all-reduces of gradients
  int64_t pipeline_bytes = 0, context_bytes = 0, tensor_bytes = 0;  // along these axes
  int64_t key_bytes = 0;  // among ranks that share key/value heads
  int64_t world_bytes = 0;
  StepVolume predicted;  // of one step
};

using Tensors = std::map<std::string, std::vector<float>>;  // whole, by name

class Harness {
 public:
  // Trains on the bytes of `files`, one behind the other; empty: a short text that never changes.
  explicit Harness(const std::vector<std::string>& files = {});
  ~Harness();  // removes its files

  // Every rank's result. Losses and norms are the same on all of them, which is checked.
  std::vector<RankResult> Train(const Case& run);
  // Several models at once, each on ranks of its own of one pool and with a mesh of its own.
  std::vector<std::vector<RankResult>> TrainOnOnePool(const std::vector<Case>& runs);
  // The disk of a host of Case::hosts is gone.
  void LoseDisk(int host);
  // Tensors of the newest checkpoint of a run, whose names begin with `prefix`, without it.
  Tensors Read(const std::vector<RankResult>& results, const std::string& prefix);
  // The weights after a run that ends now.
  Tensors Weights(Case run);
  // Every parameter's gradient in the first step: AdamW's first moment, when beta1 is 0.
  Tensors FirstGradients(Case run);

  static constexpr int64_t kSequence = 16;
  static constexpr int64_t kVocab = 131;

 private:
  RankResult TrainRank(const Case& run, const AdamWConfig& optimizer, Communicator& world);
  std::vector<RankResult> Train(const Case& run, const AdamWConfig& optimizer);
  static void ExpectAgreement(const Case& run, const std::vector<RankResult>& results);

  const std::unique_ptr<FileSystem> files_;
  std::string directory_;
  int runs_ = 0;
  std::vector<std::unique_ptr<IndexedDataset>> datasets_;
  std::unique_ptr<Sampler> training_, validation_;
};

// A GPT-2 and a Llama of odd sizes; the Llama has four groups of three query heads.
ModelDescription SmallGpt2(int layers = 3);
ModelDescription SmallLlama(int layers = 3);

// Data parallelism over `ranks`, 20 steps of 16 samples in micro-batches of two.
Case Data(int ranks, int zero = 0, int shards = 0);

// Elements of flat storage with all padding: in all, and of the blocks that ZeRO shards.
struct Elements {
  int64_t all = 0, blocks = 0, largest = 0;
  int64_t units = 0;
};
// Of data parallelism.
Elements Count(const Case& run);

// The part of the model that a rank holds; what cannot be cut is refused.
absl::StatusOr<ModelParallel> PartOf(const Case& run, const PerAxis& coordinate);

// Every tensor, relatively to its own norm.
void ExpectClose(const Tensors& expected, const Tensors& actual, double tolerance = 1e-5);

}  // namespace muster::parallel::parity

#endif  // MUSTER_TESTS_PARITY_HARNESS_H_
