// The tokenizer file that lies beside the checkpoints of a job: CHECKPOINT_PATH/<job id>/tokenizer.
#ifndef MUSTER_WORKER_RANK_TOKENIZER_OF_CHECKPOINT_H_
#define MUSTER_WORKER_RANK_TOKENIZER_OF_CHECKPOINT_H_

#include <string>

#include "absl/status/statusor.h"
#include "base/file_system.h"

namespace muster::worker {

inline constexpr char kTokenizerFile[] = "tokenizer";

// The bytes of the file for `checkpoint` (a directory with a manifest): in that directory, for
// checkpoints that were copied with it, or beside it. Empty: there is none, as of models that were
// trained on bytes.
absl::StatusOr<std::string> TokenizerFileOf(FileSystem& files, const std::string& checkpoint);

}  // namespace muster::worker

#endif  // MUSTER_WORKER_RANK_TOKENIZER_OF_CHECKPOINT_H_
