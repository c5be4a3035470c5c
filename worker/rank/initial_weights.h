// The weights that a job starts from (engine.model.initialize_from).
#ifndef MUSTER_WORKER_RANK_INITIAL_WEIGHTS_H_
#define MUSTER_WORKER_RANK_INITIAL_WEIGHTS_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/file_system.h"
#include "parallel/checkpoint/box.h"
#include "parallel/model/model.h"

namespace muster::worker {

// A Hugging Face model folder or a checkpoint, opened for reading. Single-threaded.
class InitialWeights {
 public:
  // Reads config.json or the manifest, and the headers, but no weights. `files` must outlive it.
  // Failures are marked with a FailureDomain: configuration when the directory is neither, or holds
  // another model than `model`, with the fields that differ; data when files are garbled; storage
  // otherwise. sequence_length may differ: with learned positions the folder's may be longer, with
  // rotary ones any will do.
  static absl::StatusOr<std::unique_ptr<InitialWeights>> Open(
      FileSystem& files, const std::string& directory, const parallel::ModelDescription& model);
  virtual ~InitialWeights() = default;

  // Fills `out` (row-major) with a box of a parameter.
  virtual absl::Status Read(const std::string& name, const parallel::Box& box, float* out) = 0;
  // For messages: "Hugging Face folder PATH".
  virtual const std::string& source() const = 0;
};

}  // namespace muster::worker

#endif  // MUSTER_WORKER_RANK_INITIAL_WEIGHTS_H_
