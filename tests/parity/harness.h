// Trains a small model in any layout on real text, with threads as ranks, and returns everything by
// which layouts are compared.
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
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
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

// One training run.
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
  ScanMethod scan_method = ScanMethod::kStatePassing;
  int context_head_groups = 2;  // of kAllToAll, where the heads divide into so many
  Recompute recompute = Recompute::kNone;
  int recompute_blocks = 0;  // recomputes so many first blocks of a rank; 0: all
  Recompute recompute_rest = Recompute::kNone;
  bool offload_activations = false;
  double offload_optimizer = 0;  // share of the state
  bool documents = false;        // attention stays within documents
  double dropout = 0;
  bool any_order = false;  // micro-batches of a rank are added one after the other
  bool tcp = false;        // ranks communicate by sockets, not through memory
  bool overlap = true;
  bool reshard_after_forward = true;
  int64_t bucket_bytes = 8192;
  int64_t resident_elements = 100;  // small, so that ZeRO-3 has something to shard
  int64_t steps = 50;
  // At its peak. Larger rates amplify rounding within 50 steps, on one rank as on several: see
  // matrix_test.cc.
  double learning_rate = 1e-3;
  uint64_t seed = 77;
  int64_t evaluate_every = 0;  // > 0: evaluates on other text, also after the last step
  int64_t stop_after = 0;      // > 0: ends after this step, with a checkpoint
  int64_t save_every = 0;      // > 0: saves checkpoints
  std::vector<RestoreCandidate> restore;
  // By rank, the host that it is on; every host has its own directory of checkpoints. Empty: all
  // ranks share one directory.
  std::vector<int> hosts;
  std::function<void(TrainerOptions&)> adjust;  // for options that have no field here
  // Wraps each rank's communicator of the world.
  std::function<std::unique_ptr<Communicator>(std::unique_ptr<Communicator>)> wrap;
  // Wraps each rank's file system.
  std::function<std::unique_ptr<FileSystem>(int rank, FileSystem& files)> wrap_files;
  std::function<void(int rank, absl::string_view phase)> on_progress;
  absl::Duration collective_timeout = absl::Seconds(120);
  bool may_fail = false;  // the caller checks the statuses

  int ranks() const;
  std::string ToString() const;
};

// The result of one rank. Bytes are what it has sent in the whole run.
struct RankResult : Recorded {
  int64_t state_bytes = 0, host_state_bytes = 0;
  // In the shard group: reduce-scatters of gradients. With compressed gradients also in the
  // gradient group, where that is another one than the shard and the replicate group.
  int64_t reduced_bytes = 0;
  int64_t gathered_bytes = 0;  // in the gather group: all-gathers of parameters
  int64_t replica_bytes = 0;   // in the replicate group: all-reduces of gradients
  int64_t pipeline_bytes = 0, context_bytes = 0, tensor_bytes = 0;  // along these axes
  int64_t key_bytes = 0;  // among ranks that share key/value heads
  int64_t world_bytes = 0;
  StepVolume predicted;  // of one step
};

using Tensors = std::map<std::string, std::vector<float>>;  // whole tensors, by name

class Harness {
 public:
  // Trains on the bytes of `files`, one behind the other; empty: on the license text.
  explicit Harness(const std::vector<std::string>& files = {});
  ~Harness();  // removes its files

  // Returns every rank's result. Expects success, and the same losses and norms on all ranks.
  std::vector<RankResult> Train(const Case& run);
  // Trains several models at once. Each has its own ranks of one pool and its own mesh.
  std::vector<std::vector<RankResult>> TrainOnOnePool(const std::vector<Case>& runs);
  // Removes the directory of a host of Case::hosts.
  void LoseDisk(int host);
  // Reads the tensors whose names begin with `prefix` from the newest checkpoint of a run. The
  // result has their names without the prefix.
  Tensors Read(const std::vector<RankResult>& results, const std::string& prefix);
  // Trains, and returns the weights after the last step.
  Tensors Weights(Case run);
  // Returns every parameter's gradient in the first step: with beta1 0 that is AdamW's first
  // moment.
  Tensors FirstGradients(Case run);

  static constexpr int64_t kSequence = 16;
  static constexpr int64_t kVocab = 131;

 private:
  TrainerOptions OptionsOf(const Case& run, const AdamWConfig& optimizer) const;
  // Gives the rank the checkpoints on its host (Case::hosts).
  void UseHostOf(int rank, const std::vector<int>& hosts, TrainerOptions& options,
                 std::vector<RestoreCandidate>& restore) const;
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
ModelDescription SmallMamba2(int layers = 3);
// Blocks of one and of two layers, heads that are wider together than the hidden state. `llama`:
// SwiGLU and rotary positions; else squared ReLU and none.
ModelDescription SmallHybrid(int layers = 3, bool llama = false);

// Data parallelism over `ranks`, 20 steps of 16 samples in micro-batches of two.
Case Data(int ranks, int zero = 0, int shards = 0);

// Elements of flat storage, padding included: in all, and of the blocks that ZeRO shards.
struct Elements {
  int64_t all = 0, blocks = 0, largest = 0;
  int64_t units = 0;
};
// Requires: a run with data parallelism only.
Elements Count(const Case& run);

// The part of the model that a rank holds. kInvalidArgument where the model cannot be cut so.
absl::StatusOr<ModelParallel> PartOf(const Case& run, const PerAxis& coordinate);

// Compares every tensor: the norm of the difference relative to the tensor's norm.
void ExpectClose(const Tensors& expected, const Tensors& actual, double tolerance = 1e-5);

}  // namespace muster::parallel::parity

#endif  // MUSTER_TESTS_PARITY_HARNESS_H_
