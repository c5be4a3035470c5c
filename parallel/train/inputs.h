// What a Trainer is made from, and what follows from it alone.
#ifndef MUSTER_PARALLEL_TRAIN_INPUTS_H_
#define MUSTER_PARALLEL_TRAIN_INPUTS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "base/file_system.h"
#include "kernels/device/device.h"
#include "kernels/tensor.h"
#include "parallel/comm/communicator.h"
#include "parallel/comm/mesh_groups.h"
#include "parallel/data/sampler.h"
#include "parallel/model/model.h"
#include "parallel/train/hooks.h"
#include "parallel/train/memory.h"
#include "parallel/train/options.h"

namespace muster::parallel {

// The parts of a Trainer share one. A view: all that it refers to outlives the Trainer.
struct TrainerInputs {
  const TrainerOptions& options;
  const Model& model;
  kernels::Device& device;
  MeshGroups& groups;
  const Sampler& training;
  const Sampler* validation = nullptr;  // null: no evaluation
  FileSystem& files;
  TrainerHooks& hooks;

  // kInvalidArgument when the options do not fit each other, the model, the mesh or the device.
  absl::Status Check() const;

  Communicator& world() const { return groups.world(); }
  // The ranks over which gradients are averaged.
  Communicator& gradient_group() const { return groups.Along({Axis::kData, Axis::kContext}); }
  int data_rank() const { return groups.coordinate()[Axis::kData]; }
  int data_size() const { return groups.mesh().degree(Axis::kData); }
  int context_rank() const { return groups.coordinate()[Axis::kContext]; }
  int context_size() const { return groups.mesh().degree(Axis::kContext); }

  // For predictions of memory; without TrainerPlace::workspace.
  TrainerPlace place() const;
  int64_t micro_batches() const { return MicroBatches(place()); }               // rank and step
  int64_t global_micro_batches() const { return GlobalMicroBatches(place()); }  // step
  // GradientReducer::MicroBatchOf's last argument.
  int ranks_summed_first() const;
  // Whether this rank's losses count. One rank reports the loss of each token.
  bool reports_loss() const;
  // Several ranks of a tensor group, or two pipeline stages, may hold the same parameter. One of
  // them counts it in the gradient norm and saves it: whether that is this rank.
  bool Owns(const Parameter& parameter) const;
};

// fp32 elements [first, first + count) of a buffer.
kernels::Tensor Floats(kernels::Buffer& buffer, int64_t first, int64_t count);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_TRAIN_INPUTS_H_
