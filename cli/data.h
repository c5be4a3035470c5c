// `muster data`: makes datasets from text, and shows what is in them.
#ifndef MUSTER_CLI_DATA_H_
#define MUSTER_CLI_DATA_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "cli/output.h"

namespace muster::cli {

struct TokenizeArguments {
  std::vector<std::string> inputs;  // files, directories, globs; "-" = stdin
  std::string output;
  std::string tokenizer = "bytes";
  std::string splits;
  std::string boundary = "file";
  std::string field;  // of JSON lines
  std::string bos = "auto", eos = "auto";
  int threads = 0;  // 0 = all cores
};
absl::Status DataTokenize(const TokenizeArguments& arguments, Format format, Terminal& terminal);

// Text is shown with `tokenizer`: a file, "bytes", "none" or empty for no text, "auto" for that of
// the data set.
absl::Status DataInspect(const std::string& prefix, const std::string& tokenizer, Format format,
                         Terminal& terminal);

}  // namespace muster::cli

#endif  // MUSTER_CLI_DATA_H_
