// Makes datasets from text, for `muster data tokenize`.
#ifndef MUSTER_PARALLEL_DATA_TOKENIZE_H_
#define MUSTER_PARALLEL_DATA_TOKENIZE_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/file_system.h"
#include "parallel/data/document_reader.h"
#include "parallel/data/tokenizer.h"

namespace muster::parallel {

// "file", "line", "blank-line"; else kInvalidArgument.
absl::StatusOr<DocumentBoundary> ParseDocumentBoundary(absl::string_view text);

// One output of a split by position in the input.
struct Split {
  std::string name;     // the dataset is OUTPUT.name; "" (alone): OUTPUT
  double fraction = 1;  // > 0, relative to the other splits
};
// "train=0.9,validation=0.1"; kInvalidArgument says what is wrong with which part.
absl::StatusOr<std::vector<Split>> ParseSplits(absl::string_view text);

// The tokens around a document. `bos` and `eos` are each "auto", "none" or a token as it is
// written. "auto" is what the tokenizer's file asks for; where it asks for no end, the token that
// it has for the end of a text (<|endoftext|>, <|end_of_text|> or </s>), if any. kInvalidArgument:
// there is no such token.
absl::StatusOr<BoundaryTokens> ChooseBoundaries(const Tokenizer& tokenizer, absl::string_view bos,
                                                absl::string_view eos);

struct TokenizeOptions {
  std::vector<std::string> inputs;  // as for ListTextInputs, in this order
  std::string output;               // prefix of the datasets
  std::vector<Split> splits = {{"", 1.0}};
  DocumentBoundary boundary = DocumentBoundary::kFile;
  // All inputs are JSON lines, whose string of this name is a document. Empty: inputs that are
  // named so (TextInput) are, with the field "text".
  std::string field;
  std::vector<int32_t> bos, eos;  // around every document
  std::string tokenizer_file;     // ReadTokenizerFile, to lie beside the datasets; of "bytes" empty
  int threads = 1;
  int64_t chunk_bytes = 1 << 20;  // text that a thread works on at a time
  // How often the work so far is made durable.
  absl::Duration save_every = absl::Seconds(10);
  // Called with (bytes read, bytes in all or -1) from time to time; may be empty.
  std::function<void(int64_t, int64_t)> progress;
  // Called before the first progress where an earlier run is continued, with bytes read; may be
  // empty.
  std::function<void(int64_t)> resumed;
};

struct TokenizedSplit {
  std::string prefix;
  int64_t documents = 0;
  int64_t tokens = 0;
  int64_t text_bytes = 0;  // of documents; of JSON lines, those of the field
  int64_t largest_id = 0;
};

// Reads the inputs and writes one dataset per split, with its description. One behind the other,
// the datasets hold all documents of the input in order; the same bytes for any number of threads.
// A split ends at the end of the document that its position falls into, with kFile at the end of
// the line.
//
// Memory is O(threads): documents are cut where the ids stay those of the whole. What is done is
// made durable in OUTPUT.resume and temporary files beside it. A call with the same options, inputs
// of the same size and time, and the same tokenizer goes on from there after its process was killed
// or a file could not be read or written; any other call begins anew.
//
// kInvalidArgument (no input, no text, bad splits, a split that would be empty, invalid JSON with
// file and line), kDataLoss (damaged gzip or zstd), kNotFound and other codes of FileSystem. After
// an error, splits before the failed one may exist under their names.
absl::StatusOr<std::vector<TokenizedSplit>> Tokenize(FileSystem& files, const Tokenizer& tokenizer,
                                                     const TokenizeOptions& options);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_DATA_TOKENIZE_H_
