// One run of the engine on the ranks of RankProcesses, set up from a spec like a rank of a job.
#ifndef MUSTER_TESTS_GPU_ENGINE_RUN_H_
#define MUSTER_TESTS_GPU_ENGINE_RUN_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "muster/v1/spec.pb.h"
#include "parallel/train/trainer.h"
#include "tests/gpu/rank_processes.h"

namespace muster::testing {

struct EngineRun {
  v1::JobSpec spec;
  std::string cache_directory;  // where measured GEMM algorithms are kept
  int thread_blocks_max = 0;    // for each collective; 0: NCCL decides
  int threads = 1;              // of the host, for each rank
  bool keep_groups = false;     // keep the communicators for later runs of the same layout
  // Not empty: each rank writes a trace of the last step but one to `trace`-RANK.json
  // (kernels/device/trace.h).
  std::string trace;
  std::function<void(parallel::TrainerOptions&)> adjust;  // sets what the spec has no field for
};

// A spec for `kind` that trains on the data set `data`; each of `overrides` is written like an
// override below engine: "parallel.tensor=2", "model.preset=gpt2-124m". The ranks follow from the
// degrees. kInvalidArgument as spec::Load.
absl::StatusOr<v1::JobSpec> EngineSpec(kernels::DeviceKind kind, const std::string& data,
                                       const std::vector<std::string>& overrides);

// What one rank measured. Memory is in bytes.
struct EngineResult {
  std::vector<double> losses, norms, seconds;  // by step
  // By step and kind of exposure (parallel/comm/exposure.h), in seconds.
  std::vector<std::vector<double>> exposed;
  // Bytes sent by the groups of kSenders, and how many of them by copy engines.
  static constexpr const char* kSenders[] = {"gradients", "parameters", "tensor", "context"};
  std::vector<int64_t> sent, by_copy_engines;
  // Memory in use on the device, by all processes:
  int64_t used_before = 0;          // with a context and the communicator of all ranks
  int64_t used_by_groups = 0;       // what the communicators of the mesh add
  int64_t used = 0;                 // at the end
  int64_t allocated = 0;            // part of it that the rank has allocated
  int64_t predicted = 0;            // prediction of `allocated` (parallel/train/memory.h)
  int64_t predicted_libraries = 0;  // prediction for what libraries allocate
  double flops_per_token = 0;       // of the whole model
  double startup_seconds = 0;       // from communicators to the first step
  std::string last_checkpoint;      // its directory

  std::string ToText() const;
  static absl::StatusOr<EngineResult> FromText(const std::string& text);
};

// A collective of the first spec.resources.ranks ranks.
absl::StatusOr<EngineResult> RunEngine(RankProcess& self, const EngineRun& run);

// Writes `count` tokens below `vocab` to the data set `prefix`, in documents of `document` tokens;
// 0: in one. The tokens are random; with `learnable` four of five follow a fixed chain over the
// vocabulary.
absl::Status WriteTokens(const std::string& prefix, int64_t count, int64_t vocab, bool learnable,
                         int64_t document = 0);

}  // namespace muster::testing

#endif  // MUSTER_TESTS_GPU_ENGINE_RUN_H_
