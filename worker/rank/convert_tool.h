// `muster-rank convert`: checkpoints to Hugging Face model folders and back.
#ifndef MUSTER_WORKER_RANK_CONVERT_TOOL_H_
#define MUSTER_WORKER_RANK_CONVERT_TOOL_H_

#include <string>

#include "absl/status/status.h"
#include "kernels/tensor.h"

namespace muster::worker {

struct ConvertArguments {
  // A checkpoint (a directory with manifest.json), or a Hugging Face model folder (config.json).
  std::string source;
  // A checkpoint becomes a model folder at this path; a model folder becomes a checkpoint below it,
  // in imported/step-00000000.e0.
  std::string destination;
  kernels::DType dtype = kernels::DType::kBF16;  // of an exported folder; checkpoints are fp32
  bool json = false;
};

// Prints what was written. kNotFound when the source is neither; kAlreadyExists for a destination
// that holds something already; else the codes of CheckpointReader and HuggingFaceFolder.
absl::Status RunConvert(const ConvertArguments& arguments);

}  // namespace muster::worker

#endif  // MUSTER_WORKER_RANK_CONVERT_TOOL_H_
