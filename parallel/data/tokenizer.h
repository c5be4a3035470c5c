// Converts text to token ids and back, and text files to datasets, for `muster data`.
#ifndef MUSTER_PARALLEL_DATA_TOKENIZER_H_
#define MUSTER_PARALLEL_DATA_TOKENIZER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
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

// What a tokenizer puts around a text: the ids of "beginning of sequence" and "end of sequence".
struct BoundaryTokens {
  std::vector<int32_t> bos, eos;
};

// Thread-safe.
class Tokenizer {
 public:
  // Encodes much text on one thread, and remembers what comes again.
  class Encoder {
   public:
    virtual ~Encoder() = default;
    // Appends the ids of `text`: a document, with `begins` false the continuation of one behind a
    // LastCut.
    virtual void Encode(absl::string_view text, bool begins, std::vector<int32_t>& out) = 0;
  };

  virtual ~Tokenizer() = default;
  virtual absl::string_view name() const = 0;
  // Ids are 0..vocab()-1.
  virtual int64_t vocab() const = 0;
  // Appends the ids of a whole document, without boundaries().
  virtual void Encode(absl::string_view text, std::vector<int32_t>& out) const = 0;
  // The tokenizer outlives it.
  virtual std::unique_ptr<Encoder> NewEncoder() const = 0;
  // The last position in (0, text.size()) at which a document that goes on behind `text` can be cut
  // so that the ids of both parts are those of the whole. 0: none is known.
  virtual size_t LastCut(absl::string_view text) const = 0;
  // kInvalidArgument names the position and id outside the vocabulary.
  virtual absl::StatusOr<std::string> Decode(absl::Span<const int32_t> tokens) const = 0;
  // The id of a token by what it is written as; nullopt: there is none.
  virtual std::optional<int32_t> IdOf(absl::string_view token) const = 0;
  // What the tokenizer's file asks for around a single text; empty where it asks for nothing.
  virtual const BoundaryTokens& boundaries() const = 0;
};

// "bytes": id = byte, vocabulary 256.
std::unique_ptr<Tokenizer> MakeByteTokenizer();
// The same by name. kInvalidArgument lists the known names.
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
