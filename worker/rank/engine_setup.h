// From a job spec to the engine's own options and objects, with every check that can be made before
// ranks meet. Messages begin with the field of the spec and name the path.
#ifndef MUSTER_WORKER_RANK_ENGINE_SETUP_H_
#define MUSTER_WORKER_RANK_ENGINE_SETUP_H_

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/file_system.h"
#include "kernels/device/device.h"
#include "muster/v1/rank.pb.h"
#include "parallel/comm/communicator.h"
#include "parallel/data/indexed_dataset.h"
#include "parallel/data/sampler.h"
#include "parallel/mesh/mesh.h"
#include "parallel/model/model.h"
#include "parallel/train/memory.h"
#include "parallel/train/trainer.h"
#include "worker/rank/initial_weights.h"

namespace muster::worker {

// The causes that a status means, and back to the daemon in exit.pb.
v1::Cause CauseOf(const absl::Status& status);

// The device of the assignment; `on_measuring` as in kernels::CudaOptions. Marked with a
// FailureDomain: configuration, memory or device.
absl::StatusOr<std::unique_ptr<kernels::Device>> MakeDevice(
    const v1::RankAssignment& assignment, std::function<void()> on_measuring = {});

// The model of a spec that has its defaults.
parallel::ModelDescription Describe(const v1::ModelSpec& spec);

// How the ranks of a spec are laid out. Every spec below has its defaults and has been validated.
struct SplitRun {
  parallel::Mesh mesh;
  int zero_shards = 1;  // ranks over which ZeRO shards
};
absl::StatusOr<SplitRun> SplitOf(const v1::JobSpec& spec);
// The part of the model of the rank at `coordinate`, described and made: no memory of parameters.
absl::StatusOr<parallel::ModelParallel> PartOf(const v1::JobSpec& spec,
                                               const parallel::PerAxis& coordinate);
absl::StatusOr<std::unique_ptr<parallel::Model>> BuildModel(const v1::JobSpec& spec,
                                                            const parallel::PerAxis& coordinate);
// But for job and epoch.
parallel::TrainerOptions OptionsOf(const v1::JobSpec& spec);
// Of the ranks' communicators on GPUs, but for on_failure.
parallel::NcclOptions NcclOptionsOf(const v1::JobSpec& spec);

// Bytes of `memory` that are there for what NeededBytes counts of one rank: of a GPU what is free,
// of a host the share of one of the job's ranks on it.
int64_t MemoryThere(const v1::RankAssignment& assignment, kernels::DeviceKind device,
                    const kernels::DeviceMemory& memory);

// kResourceExhausted, marked, when `use` does not fit into what is there for the rank: of its
// device, whose name is `device`, and of the host's memory beside a CUDA device (`host_there`; no
// value: not known). With the categories and the cheapest change of the spec that fits
// (job_plan.h).
absl::Status CheckFits(const v1::RankAssignment& assignment, const parallel::MemoryUse& use,
                       const parallel::PerAxis& coordinate, kernels::DeviceKind kind,
                       const std::string& device, const kernels::DeviceMemory& memory,
                       std::optional<int64_t> host_there);

// An absolute `path` as it is; a relative one below the spec's working directory.
std::string ResolvePath(const v1::JobSpec& spec, const std::string& path);

// Members are in order of construction; samplers refer to data sets.
struct EngineSetup {
  std::unique_ptr<kernels::Device> device;
  std::unique_ptr<parallel::Model> model;
  std::vector<std::unique_ptr<parallel::IndexedDataset>> datasets;
  std::unique_ptr<parallel::Sampler> training;
  std::unique_ptr<parallel::Sampler> validation;    // null: no evaluation
  std::unique_ptr<InitialWeights> initial_weights;  // null: those of the seed
  std::optional<parallel::Mesh> mesh;               // always there after SetUpEngine
  int zero_shards = 1;                              // ranks over which ZeRO shards
  parallel::TrainerOptions options;
  parallel::MemoryUse memory;  // that the rank will take
};

// Marked with a FailureDomain: data (missing, corrupt, too small), storage (checkpoint path not
// writable), configuration (an impossible combination). kUnavailable or kUnimplemented when the
// device is not there. Memory: kResourceExhausted with what the rank would take, by category, and
// the cheapest change of the spec with which it would fit (CheckFits). `memory` stands for what the
// device says of itself; `on_measuring` is MakeDevice's.
absl::StatusOr<EngineSetup> SetUpEngine(const v1::RankAssignment& assignment, FileSystem& files,
                                        std::optional<kernels::DeviceMemory> memory = std::nullopt,
                                        std::function<void()> on_measuring = {});

}  // namespace muster::worker

#endif  // MUSTER_WORKER_RANK_ENGINE_SETUP_H_
