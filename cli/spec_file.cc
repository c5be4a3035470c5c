#include "cli/spec_file.h"

#include <fstream>
#include <iostream>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "proto/spec/document.h"
#include "proto/spec/spec.h"

namespace muster::cli {
namespace {

absl::StatusOr<std::string> ReadText(const std::string& path) {
  std::ifstream file;
  if (path != "-") {
    file.open(path, std::ios::binary);
    if (!file) return absl::NotFoundError(absl::StrCat(path, ": cannot be opened"));
  }
  std::istream& in = path == "-" ? std::cin : file;
  // At most one byte more than the parser accepts, so that it refuses a longer text.
  std::string text(spec::kTextBytesMax + 1, '\0');
  in.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(in.gcount()));
  if (in.bad() || (path != "-" && text.empty() && !file.eof())) {
    return absl::NotFoundError(absl::StrCat(path, ": cannot be read"));
  }
  return text;
}

}  // namespace

absl::StatusOr<v1::JobSpec> LoadSpec(const std::string& file,
                                     const std::vector<std::string>& overrides,
                                     const std::string& working_directory) {
  ASSIGN_OR_RETURN(const std::string text, ReadText(file));
  absl::StatusOr<v1::JobSpec> loaded =
      spec::Load(text, file == "-" ? "stdin" : file, overrides, working_directory);
  if (!loaded.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("the spec is refused\n", loaded.status().message()));
  }
  return loaded;
}

}  // namespace muster::cli
