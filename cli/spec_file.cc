#include "cli/spec_file.h"

#include <algorithm>
#include <fstream>
#include <iostream>
#include <optional>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "base/status_macros.h"
#include "parallel/data/dataset_description.h"
#include "proto/spec/document.h"
#include "proto/spec/spec.h"

namespace muster::cli {
namespace {

constexpr size_t kFileBytesMax = 64 << 20;
constexpr size_t kSubmissionsMax = 10'000;

// Nothing but comments, directives and empty lines.
bool IsBlank(absl::string_view document) {
  for (absl::string_view line : absl::StrSplit(document, '\n')) {
    line = absl::StripAsciiWhitespace(line);
    if (!line.empty() && line[0] != '#' && line[0] != '%') return false;
  }
  return true;
}

// The documents of a text; the whole text where it is one.
std::vector<std::string> Documents(const std::string& text) {
  std::vector<std::string> documents(1);
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    const bool separates =
        absl::StartsWith(line, "---") &&
        (absl::StripAsciiWhitespace(line.substr(3)).empty() || absl::StartsWith(line, "--- #"));
    if (separates) {
      documents.emplace_back();
    } else {
      absl::StrAppend(&documents.back(), line, "\n");
    }
  }
  documents.erase(std::remove_if(documents.begin(), documents.end(), IsBlank), documents.end());
  return documents.size() < 2 ? std::vector<std::string>{text} : documents;
}

absl::Status Refused(const absl::Status& why) {
  return absl::InvalidArgumentError(absl::StrCat("the spec is refused\n", why.message()));
}

std::string NameOf(const std::string& file) { return file == "-" ? "stdin" : file; }

}  // namespace

absl::StatusOr<std::string> ReadText(const std::string& path, size_t bytes_max) {
  std::ifstream file;
  if (path != "-") {
    file.open(path, std::ios::binary);
    if (!file) return absl::NotFoundError(absl::StrCat(path, ": cannot be opened"));
  }
  std::istream& in = path == "-" ? std::cin : file;
  std::string text;
  constexpr size_t kChunk = 1 << 16;
  for (bool more = true; more && text.size() <= bytes_max;) {
    const size_t before = text.size();
    text.resize(std::min(before + kChunk, bytes_max + 1));
    in.read(text.data() + before, static_cast<std::streamsize>(text.size() - before));
    more = in.gcount() == static_cast<std::streamsize>(text.size() - before);
    text.resize(before + static_cast<size_t>(in.gcount()));
  }
  if (in.bad() || (path != "-" && text.empty() && !file.eof())) {
    return absl::NotFoundError(absl::StrCat(path, ": cannot be read"));
  }
  return text;
}

absl::StatusOr<std::vector<v1::JobSpec>> LoadSpecs(const std::string& file,
                                                   const std::vector<std::string>& overrides,
                                                   const std::string& working_directory) {
  ASSIGN_OR_RETURN(const std::string text, ReadText(file, spec::kTextBytesMax));
  absl::StatusOr<std::vector<v1::JobSpec>> loaded =
      spec::LoadTasks(text, NameOf(file), overrides, working_directory);
  if (!loaded.ok()) return Refused(loaded.status());
  return loaded;
}

absl::StatusOr<std::vector<Submission>> LoadSubmissions(const std::vector<std::string>& files,
                                                        const std::vector<std::string>& overrides,
                                                        const std::string& working_directory) {
  std::vector<Submission> submissions;
  std::string problems;
  for (const std::string& file : files) {
    ASSIGN_OR_RETURN(const std::string text, ReadText(file, kFileBytesMax));
    if (text.size() > kFileBytesMax) {
      return absl::InvalidArgumentError(
          absl::StrCat(NameOf(file), ": more than ", kFileBytesMax, " bytes; use several files"));
    }
    const std::vector<std::string> documents = Documents(text);
    for (size_t i = 0; i < documents.size(); ++i) {
      Submission& one = submissions.emplace_back();
      one.source =
          documents.size() == 1 ? NameOf(file) : absl::StrCat(NameOf(file), ", document ", i + 1);
      absl::StatusOr<std::vector<v1::JobSpec>> loaded =
          spec::LoadTasks(documents[i], one.source, overrides, working_directory);
      if (loaded.ok()) {
        one.specs = *std::move(loaded);
      } else {
        absl::StrAppend(&problems, problems.empty() ? "" : "\n", loaded.status().message());
      }
    }
    if (submissions.size() > kSubmissionsMax) {
      return absl::InvalidArgumentError(
          absl::StrCat("more than ", kSubmissionsMax, " specs; submit them in several calls"));
    }
  }
  if (!problems.empty()) return Refused(absl::InvalidArgumentError(problems));
  return submissions;
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
