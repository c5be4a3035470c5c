// `muster-rank sample` and `muster-rank verify`: tools over a checkpoint, outside of a job.
#ifndef MUSTER_WORKER_RANK_CHECKPOINT_TOOLS_H_
#define MUSTER_WORKER_RANK_CHECKPOINT_TOOLS_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "parallel/generate/generator.h"

namespace muster::worker {

struct SampleArguments {
  std::string checkpoint;  // directory
  std::string prompt;
  parallel::SamplingOptions sampling;
  int threads = 1;
  bool json = false;  // one JSON object instead of the text
  bool verbose = false;
};
// Prints the prompt and its continuation to stdout, each token as it is sampled; at the end, with
// `verbose` or where stderr is a terminal, how long it took to stderr. kInvalidArgument:
// the model was not trained on bytes, the prompt is empty, or an option is out of range. kDataLoss,
// kNotFound: the checkpoint is damaged or missing.
absl::Status RunSample(const SampleArguments& arguments);

// Reads every byte of the checkpoint and prints what it holds. Status codes: CheckpointReader's.
absl::Status RunVerify(const std::string& checkpoint, bool json);

}  // namespace muster::worker

#endif  // MUSTER_WORKER_RANK_CHECKPOINT_TOOLS_H_
