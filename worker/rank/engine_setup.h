// Everything that a rank opens before it contacts its peers: device, model, data sets, initial
// weights and options, with every check that needs no peer.
#ifndef MUSTER_WORKER_RANK_ENGINE_SETUP_H_
#define MUSTER_WORKER_RANK_ENGINE_SETUP_H_

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/file_system.h"
#include "kernels/device/device.h"
#include "muster/v1/rank.pb.h"
#include "parallel/data/indexed_dataset.h"
#include "parallel/data/sampler.h"
#include "parallel/mesh/mesh.h"
#include "parallel/model/model.h"
#include "parallel/train/memory.h"
#include "parallel/train/trainer.h"
#include "worker/rank/initial_weights.h"

namespace muster::worker {

// Opens the device that the assignment names. `on_measuring` is kernels::CudaOptions'. Failures are
// marked with a FailureDomain: configuration, memory or device.
absl::StatusOr<std::unique_ptr<kernels::Device>> MakeDevice(
    const v1::RankAssignment& assignment, std::function<void()> on_measuring = {});

// What the ids of the data sets mean.
struct DataTokenizer {
  std::string name;    // as their descriptions have it
  std::string sha256;  // empty for "bytes"
  std::string file;    // empty for "bytes"
  std::string field;   // of the spec, of the first data set that says it
};

// Members are in order of construction; the samplers refer to the data sets.
struct EngineSetup {
  std::unique_ptr<kernels::Device> device;
  std::unique_ptr<parallel::Model> model;
  std::vector<std::unique_ptr<parallel::IndexedDataset>> datasets;
  std::optional<DataTokenizer> tokenizer;  // no value: no data set says it
  std::unique_ptr<parallel::Sampler> training;
  std::unique_ptr<parallel::Sampler> validation;    // null: the job does not evaluate
  std::unique_ptr<InitialWeights> initial_weights;  // null: drawn from the seed
  std::optional<parallel::Mesh> mesh;               // has a value after SetUpEngine
  int zero_shards = 1;                              // number of ranks over which ZeRO shards
  parallel::TrainerOptions options;
  parallel::MemoryUse memory;  // predicted use of this rank
};

// Messages begin with the field of the spec and name the path. Failures are marked with a
// FailureDomain: data (missing, corrupt, too small, another tokenizer's file), storage (the
// checkpoint path is not writable), configuration (an impossible combination; a vocabulary below
// the ids of the data, or data of several tokenizers), device (kUnavailable or kUnimplemented:
// there is no such device), memory (kResourceExhausted, see memory_check.h). `memory` replaces what
// the device reports of itself; `on_measuring` is MakeDevice's.
absl::StatusOr<EngineSetup> SetUpEngine(const v1::RankAssignment& assignment, FileSystem& files,
                                        std::optional<kernels::DeviceMemory> memory = std::nullopt,
                                        std::function<void()> on_measuring = {});

}  // namespace muster::worker

#endif  // MUSTER_WORKER_RANK_ENGINE_SETUP_H_
