// Cuts the text of many files into chunks of whole documents, or of parts of a long one, that
// encoders can work on independently of each other.
#ifndef MUSTER_PARALLEL_DATA_DOCUMENT_READER_H_
#define MUSTER_PARALLEL_DATA_DOCUMENT_READER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "parallel/data/text_input.h"
#include "parallel/data/tokenizer.h"

namespace muster::parallel {

enum class DocumentBoundary {
  kFile,       // every file is one document
  kLine,       // every line, with its line end
  kBlankLine,  // paragraphs: a document ends after one or more empty lines, which belong to it
};

// A place in the input from which reading can go on.
struct TextPosition {
  int64_t file = 0;    // index of the input
  int64_t offset = 0;  // bytes of its text
  int64_t line = 1;    // of the file
  bool begins = true;  // a document begins here
  int64_t split = 0;
  int64_t text_before = 0;  // bytes of text in the files before
  int64_t read_before = 0;  // bytes of those files
};

struct TextChunk {
  std::string text;         // not empty
  bool json_lines = false;  // lines of JSON, each a document; else documents by the boundary
  bool begins = true;       // the first document begins in this chunk
  bool ends = true;         // the last one ends in it
  bool ends_split = false;
  TextPosition from, next;
  int64_t bytes_read = 0;  // of all inputs, with this chunk
};

struct DocumentReaderOptions {
  DocumentBoundary boundary = DocumentBoundary::kFile;
  bool json_lines = false;  // all inputs; else those that TextInput says
  // By split, the position in the text of all inputs at or behind which it ends: at the end of the
  // document there, with kFile at the end of the line. The last split ends with the input.
  std::vector<int64_t> split_ends = {0};
  int64_t chunk_bytes = 1 << 20;
  // Text is read in sections: behind the chunk with which one has so much text, Next() gives
  // nullopt once.
  int64_t text_bytes_max = INT64_MAX;
};

// Single-threaded. Where chunks are cut may depend on where reading began; their documents and the
// ids of these do not.
class DocumentReader {
 public:
  // `tokenizer` says where documents can be cut; both references outlive the reader.
  DocumentReader(const Tokenizer& tokenizer, const std::vector<TextInput>& inputs,
                 DocumentReaderOptions options, const TextPosition& from);
  // nullopt: the input or a section has ended. Those of TextStream; kInvalidArgument for a line of
  // JSON, or text without a place to cut it, that is longer than 64 MiB.
  absl::StatusOr<std::optional<TextChunk>> Next();

 private:
  struct Cut {
    size_t at = 0;  // 0: there is none in the text so far
    bool ends_document = true;
    bool ends_split = false;
  };
  absl::Status OpenFile();
  bool JsonLines() const;
  // `text` is the beginning of pending_; with `file_ends` it is all that is left of the file.
  Cut FindCut(absl::string_view text, bool file_ends) const;
  size_t CutInDocument(absl::string_view text) const;
  void MaybeEndSplit(absl::string_view text, Cut& cut) const;
  TextChunk Take(const Cut& cut);

  const Tokenizer& tokenizer_;
  const std::vector<TextInput>& inputs_;
  const DocumentReaderOptions options_;
  TextPosition position_;
  int64_t text_bytes_ = 0;  // of the section so far
  std::unique_ptr<TextStream> stream_;
  std::string pending_;  // text of the open file from position_ on
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_DATA_DOCUMENT_READER_H_
