#include "cli/spec_file.h"

#include <fstream>
#include <iostream>
#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "parallel/data/dataset_description.h"
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

absl::StatusOr<std::vector<v1::JobSpec>> LoadSpecs(const std::string& file,
                                                   const std::vector<std::string>& overrides,
                                                   const std::string& working_directory) {
  ASSIGN_OR_RETURN(const std::string text, ReadText(file));
  absl::StatusOr<std::vector<v1::JobSpec>> loaded =
      spec::LoadTasks(text, file == "-" ? "stdin" : file, overrides, working_directory);
  if (!loaded.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("the spec is refused\n", loaded.status().message()));
  }
  return loaded;
}

absl::Status CheckDataSets(FileSystem& files, const v1::JobSpec& spec) {
  v1::JobSpec whole = spec;
  spec::ApplyDefaults(whole);  // of the model's preset
  const v1::EngineSpec& engine = whole.engine();
  std::optional<parallel::DatasetDescription> first;
  std::string first_field;
  for (const auto& [name, list] : {std::make_pair("train", &engine.data().train()),
                                   std::make_pair("validation", &engine.data().validation())}) {
    for (int i = 0; i < list->size(); ++i) {
      const std::string field = absl::StrCat("engine.data.", name, "[", i, "].path");
      const std::string& path = (*list)[i].path();
      const std::string prefix =
          absl::StartsWith(path, "/") ? path : absl::StrCat(whole.working_directory(), "/", path);
      const auto found = parallel::ReadDescription(files, prefix);
      if (!found.ok() || !found->has_value()) continue;
      RETURN_IF_ERROR(parallel::CheckUse(**found, field, prefix, engine.model().vocab(),
                                         engine.data().tokenizer()));
      if (!first.has_value()) {
        first = **found;
        first_field = field;
      } else if (first->tokenizer_sha256 != (*found)->tokenizer_sha256) {
        return absl::InvalidArgumentError(
            absl::StrCat(field, " (", prefix, ") was made with the tokenizer ", (*found)->tokenizer,
                         ", but ", first_field, " with ", first->tokenizer));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace muster::cli
