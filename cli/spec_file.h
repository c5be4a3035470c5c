// Job specs from files, for `muster submit` and `muster plan`.
#ifndef MUSTER_CLI_SPEC_FILE_H_
#define MUSTER_CLI_SPEC_FILE_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/file_system.h"
#include "muster/v1/spec.pb.h"

namespace muster::cli {

// The text of a file ("-" = stdin); at most one byte more than `bytes_max`, so that a longer one is
// found out. kNotFound names the file.
absl::StatusOr<std::string> ReadText(const std::string& path, size_t bytes_max);

// The spec in `file` ("-" = stdin), or the specs of the tasks of its array, with `--set` applied
// and checked (spec::LoadTasks). kNotFound names the file; kInvalidArgument has every problem on a
// line of its own.
absl::StatusOr<std::vector<v1::JobSpec>> LoadSpecs(const std::string& file,
                                                   const std::vector<std::string>& overrides,
                                                   const std::string& working_directory);

// What is submitted at once: a job, or the tasks of an array.
struct Submission {
  std::string source;  // "jobs.yaml", or "jobs.yaml, document 3" where it has several
  std::vector<v1::JobSpec> specs;
};

// Those of all files in their order, each as by LoadSpecs. A file may hold several YAML documents,
// separated by lines of "---"; lines in errors count from the begin of the document then.
// kInvalidArgument has the problems of all documents.
absl::StatusOr<std::vector<Submission>> LoadSubmissions(const std::vector<std::string>& files,
                                                        const std::vector<std::string>& overrides,
                                                        const std::string& working_directory);

// Whether the model fits the data sets of the spec, and these were made with one tokenizer, as far
// as their descriptions can be read from this machine: ranks check it again where they run.
// kInvalidArgument names the data set.
absl::Status CheckDataSets(FileSystem& files, const v1::JobSpec& spec);

}  // namespace muster::cli

#endif  // MUSTER_CLI_SPEC_FILE_H_
