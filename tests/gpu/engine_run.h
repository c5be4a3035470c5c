// One run of the engine on the ranks of RankProcesses, set up as a rank of a job is: from a spec.
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
  std::string cache_directory;  // of measured algorithms
  int thread_blocks_max = 0;    // of a collective; 0: NCCL's choice
  int threads = 1;              // of the host, for a rank
  bool keep_groups = false;     // connect once for all runs of a layout
  // Each rank writes what its device runs in the last but one step to
  // `trace`-RANK.json (kernels/device/trace.h).
  std::string trace;
  std::function<void(parallel::TrainerOptions&)> adjust;  // what the spec has no field for
};

// A spec for `kind` that trains on the data set `data`; each of `overrides` is written like an
// override below engine: "parallel.tensor=2", "model.preset=gpt2-124m". The ranks follow from the
// degrees. kInvalidArgument as spec::Load.
absl::StatusOr<v1::JobSpec> EngineSpec(kernels::DeviceKind kind, const std::string& data,
                                       const std::vector<std::string>& overrides);

// Of one rank. Device memory in bytes: all that is taken on the device, by whomever.
struct EngineResult {
  std::vector<double> losses, norms, seconds;  // by step
  // By step and kind of exposure (parallel/comm/exposure.h), in seconds.
  std::vector<std::vector<double>> exposed;
  // Bytes sent by the groups of kSenders, and what of them went through copy engines.
  static constexpr const char* kSenders[] = {"gradients", "parameters", "tensor", "context"};
  std::vector<int64_t> sent, by_copy_engines;
  int64_t used_before = 0;     // with a context, and a communicator of the world
  int64_t used_by_groups = 0;  // more, with the communicators of the mesh
  int64_t used = 0;            // in the end
  int64_t allocated = 0;       // of that, asked for by us
  int64_t predicted = 0;       // parallel/train/memory.h, of what we ask for
  int64_t predicted_libraries = 0;
  double flops_per_token = 0;   // of the whole model
  double startup_seconds = 0;   // from communicators to the first step
  std::string last_checkpoint;  // its directory

  std::string ToText() const;
  static absl::StatusOr<EngineResult> FromText(const std::string& text);
};

// A collective of the first spec.resources.ranks ranks.
absl::StatusOr<EngineResult> RunEngine(RankProcess& self, const EngineRun& run);

// Writes `count` tokens below `vocab` to the data set `prefix`: by chance, or, `learnable`, a chain
// over the vocabulary that is followed four times out of five. In documents of `document` tokens;
// 0: in one.
absl::Status WriteTokens(const std::string& prefix, int64_t count, int64_t vocab, bool learnable,
                         int64_t document = 0);

}  // namespace muster::testing

#endif  // MUSTER_TESTS_GPU_ENGINE_RUN_H_
