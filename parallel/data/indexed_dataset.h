// Tokenised text on disk in the layout of Megatron-LM's indexed datasets: PREFIX.bin holds nothing
// but token ids, PREFIX.idx says where each document begins. All numbers are little-endian:
//
//   .idx   bytes  content
//            9    "MMIDIDX\0\0"
//            8    u64 version, 1
//            1    type of a token: 1 u8, 2 i8, 3 i16, 4 i32, 5 i64, 8 u16 (6 f64 and 7 f32 are
//                 refused)
//            8    u64 sequences (n)
//            8    u64 document bounds (d): documents + 1
//           4n    i32 tokens of each sequence
//           8n    i64 byte offset of each sequence in .bin
//           8d    i64 document bounds as sequence indices: 0, ..., n
//            n    optional: i8 mode of each sequence; ignored
//
// A document is one or more sequences; sequences follow each other in .bin without gaps, so the
// whole dataset is also one stream of tokens, which is how samples are cut from it.
#ifndef MUSTER_PARALLEL_DATA_INDEXED_DATASET_H_
#define MUSTER_PARALLEL_DATA_INDEXED_DATASET_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/file_system.h"

namespace muster::parallel {

// Values are the codes of the format.
enum class TokenType : uint8_t { kU8 = 1, kI8 = 2, kI16 = 3, kI32 = 4, kI64 = 5, kU16 = 8 };

int SizeOf(TokenType type);
absl::string_view Name(TokenType type);  // "u8", ...
// The smallest that holds ids 0..vocab-1: u8 up to 256, u16 up to 65,536, else i32.
// Requires: 1 <= vocab <= 2^31.
TokenType TokenTypeFor(int64_t vocab);

// Writes one dataset from start to end in bounded memory. The files appear under their names only
// in Finish(), PREFIX.idx last: a dataset whose index exists is complete. Single-threaded. Without
// Finish() the temporary files are removed by the destructor, after Keep() they stay.
class IndexedDatasetWriter {
 public:
  // How far a dataset has come.
  struct Progress {
    int64_t tokens = 0;
    int64_t documents = 0;
    int64_t sequences = 0;
    int64_t open_tokens = 0;  // in the sequence that has not ended
  };
  // Creates the parent directory. Status codes: those of FileSystem.
  static absl::StatusOr<std::unique_ptr<IndexedDatasetWriter>> Create(FileSystem& files,
                                                                      const std::string& prefix,
                                                                      TokenType type);
  // Goes on behind what Save() made durable, in the temporary files that a process left which ended
  // before Finish(). kNotFound, kDataLoss: they are not there, or shorter than `progress` says.
  static absl::StatusOr<std::unique_ptr<IndexedDatasetWriter>> Resume(FileSystem& files,
                                                                      const std::string& prefix,
                                                                      TokenType type,
                                                                      const Progress& progress);
  virtual ~IndexedDatasetWriter() = default;
  // Makes all that was appended durable and says how far it has come.
  virtual absl::StatusOr<Progress> Save() = 0;
  // Leaves the temporary files for Resume() when the writer goes.
  virtual void Keep() = 0;
  // Appends to the open document. kInvalidArgument for an id that the type cannot hold.
  virtual absl::Status Append(absl::Span<const int32_t> tokens) = 0;
  // Ends the open document. An empty document is not written.
  virtual absl::Status EndDocument() = 0;
  // Ends the open document, makes the files durable and gives them their names. Called once.
  virtual absl::Status Finish() = 0;

  virtual int64_t tokens() const = 0;
  virtual int64_t documents() const = 0;
};

// A dataset mapped into memory, read-only. Thread-safe. The files must not be changed while it is
// open: the mapping of a file that shrinks ends the process with SIGBUS.
class IndexedDataset {
 public:
  // Checks the whole index against both files. kNotFound names the missing file; kDataLoss names
  // the file, the field and the numbers that do not fit; kInvalidArgument for an empty prefix.
  static absl::StatusOr<std::unique_ptr<IndexedDataset>> Open(const std::string& prefix);
  virtual ~IndexedDataset() = default;

  virtual const std::string& prefix() const = 0;
  virtual TokenType type() const = 0;
  virtual int64_t tokens() const = 0;
  virtual int64_t sequences() const = 0;
  virtual int64_t documents() const = 0;
  // First token of document `i` in the stream; DocumentBegin(documents()) == tokens().
  // Requires: 0 <= i <= documents().
  virtual int64_t DocumentBegin(int64_t i) const = 0;
  // Tokens [begin, begin + out.size()) of the stream. Requires: inside the stream. kDataLoss names
  // file, position and id of the first one outside [0, vocab).
  virtual absl::Status Read(int64_t begin, int64_t vocab, absl::Span<int32_t> out) const = 0;
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_DATA_INDEXED_DATASET_H_
