// Converts text to token ids and back, and text files to datasets, for `muster data`.
#ifndef MUSTER_PARALLEL_DATA_TOKENIZER_H_
#define MUSTER_PARALLEL_DATA_TOKENIZER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/file_system.h"
#include "parallel/data/indexed_dataset.h"

namespace muster::parallel {

// Thread-safe.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  virtual absl::string_view name() const = 0;
  // Ids are 0..vocab()-1.
  virtual int64_t vocab() const = 0;
  // Appends to `out`. Text is passed line by line (a line ends with its '\n'), so a tokenizer may
  // look at everything within a line, but not across.
  virtual void Encode(absl::string_view text, std::vector<int32_t>& out) const = 0;
  // kInvalidArgument names the position and id outside the vocabulary.
  virtual absl::StatusOr<std::string> Decode(absl::Span<const int32_t> tokens) const = 0;
};

// "bytes": id = byte, vocabulary 256. kInvalidArgument lists the known names.
absl::StatusOr<std::unique_ptr<Tokenizer>> MakeTokenizer(absl::string_view name);

enum class DocumentBoundary {
  kFile,       // every file is one document
  kLine,       // every line, with its line end
  kBlankLine,  // paragraphs: a document ends after one or more empty lines, which belong to it
};
// "file", "line", "blank-line"; else kInvalidArgument.
absl::StatusOr<DocumentBoundary> ParseDocumentBoundary(absl::string_view text);

// One output of a split by position in the input.
struct Split {
  std::string name;     // the dataset is OUTPUT.name; "" (alone): OUTPUT
  double fraction = 1;  // > 0, relative to the other splits
};
// "train=0.9,validation=0.1"; kInvalidArgument says what is wrong with which part.
absl::StatusOr<std::vector<Split>> ParseSplits(absl::string_view text);

struct TokenizeOptions {
  std::vector<std::string> inputs;  // text files, read in this order; "-" is not special
  std::string output;               // prefix of the datasets
  std::vector<Split> splits = {{"", 1.0}};
  DocumentBoundary boundary = DocumentBoundary::kFile;
  // Called with (bytes read, bytes in all) from time to time; may be empty.
  std::function<void(int64_t, int64_t)> progress;
};

struct TokenizedSplit {
  std::string prefix;
  int64_t documents = 0;
  int64_t tokens = 0;
};

// Reads the inputs in bounded memory and writes one dataset per split. One behind the other, the
// datasets hold all tokens of the input in order. A split ends at the end of the document that its
// position falls into, with kFile at the end of the line. kInvalidArgument (no input, no text, bad
// splits, a split that would be empty), kNotFound and other codes of FileSystem. After an error,
// splits before the failed one may exist under their names.
absl::StatusOr<std::vector<TokenizedSplit>> Tokenize(FileSystem& files, const Tokenizer& tokenizer,
                                                     const TokenizeOptions& options);

struct DatasetSummary {
  std::string prefix;
  TokenType type = TokenType::kU8;
  int64_t documents = 0;
  int64_t sequences = 0;
  int64_t tokens = 0;
  int64_t bytes = 0;  // both files
  int32_t id_min = 0;
  int32_t id_max = 0;
  int64_t ids_distinct = 0;
  // Most frequent ids with their counts, most frequent first, ties by id.
  std::vector<std::pair<int32_t, int64_t>> top;
  std::string snippet;  // the beginning, decoded; empty without a tokenizer
};
// Reads every token once. `tokenizer` may be null. `top_max` and `snippet_tokens` limit the
// summary. Status codes: those of IndexedDataset; kDataLoss for ids that are negative.
absl::StatusOr<DatasetSummary> Inspect(const std::string& prefix, const Tokenizer* tokenizer,
                                       int top_max = 10, int snippet_tokens = 200);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_DATA_TOKENIZER_H_
