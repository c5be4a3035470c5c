// `muster data`: makes datasets from text, and shows what is in them.
#ifndef MUSTER_CLI_DATA_H_
#define MUSTER_CLI_DATA_H_

#include <cstdint>
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
struct TrainTokenizerArguments {
  std::vector<std::string> inputs;
  std::string output;
  std::string field;
  std::string pattern = "gpt2";
  int64_t vocabulary = 32768;  // with the special tokens
  int64_t frequency_min = 2;
  std::vector<std::string> specials = {"<|endoftext|>"};
  int threads = 0;  // 0 = all cores
};
absl::Status DataTrainTokenizer(const TrainTokenizerArguments& arguments, Format format,
                                Terminal& terminal);

absl::Status DataTokenize(const TokenizeArguments& arguments, Format format, Terminal& terminal);

// Text is shown with `tokenizer`: a file, "bytes", "none" or empty for no text, "auto" for that of
// the data set.
absl::Status DataInspect(const std::string& prefix, const std::string& tokenizer, Format format,
                         Terminal& terminal);

// Lengths of documents, bytes per token and duplicates.
absl::Status DataStats(const std::string& prefix, Format format, Terminal& terminal);

struct SampleDocumentsArguments {
  std::string prefix;
  std::string tokenizer = "auto";  // as for DataInspect
  int64_t count = 5;
  int64_t tokens_max = 200;  // of each
  uint64_t seed = 0;         // the same seed, the same documents
};
absl::Status DataSample(const SampleDocumentsArguments& arguments, Format format,
                        Terminal& terminal);

absl::Status DataValidate(const std::string& prefix, Format format, Terminal& terminal);
absl::Status DataMerge(const std::vector<std::string>& prefixes, const std::string& output,
                       Format format, Terminal& terminal);

}  // namespace muster::cli

#endif  // MUSTER_CLI_DATA_H_
