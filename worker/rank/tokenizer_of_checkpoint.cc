#include "worker/rank/tokenizer_of_checkpoint.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace muster::worker {

absl::StatusOr<std::string> TokenizerFileOf(FileSystem& files, const std::string& checkpoint) {
  const std::string directory(absl::StripSuffix(checkpoint, "/"));
  for (const std::string& folder : {directory, ParentDirectory(directory)}) {
    const std::string path = absl::StrCat(folder, "/", kTokenizerFile);
    if (files.Exists(path)) return files.Read(path);
  }
  return std::string();
}

}  // namespace muster::worker
