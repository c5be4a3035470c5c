// Encodes chunks of text, on many threads with the results in order.
#ifndef MUSTER_PARALLEL_DATA_CHUNK_ENCODER_H_
#define MUSTER_PARALLEL_DATA_CHUNK_ENCODER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "parallel/data/document_reader.h"
#include "parallel/data/tokenizer.h"

namespace muster::parallel {

struct EncodedChunk {
  // Ids of all documents, one behind the other, and how many of them each document has. The first
  // may be the continuation of the document that the chunk before left open.
  std::vector<int32_t> tokens;
  std::vector<int64_t> documents;
  bool ends = true;  // the last document ends here
  bool ends_split = false;
  int64_t text_bytes = 0;  // of the documents
  int64_t bytes_read = 0;
  TextPosition next;
};

struct EncodingOptions {
  DocumentBoundary boundary = DocumentBoundary::kFile;
  std::string field;              // of JSON lines
  std::vector<int32_t> bos, eos;  // around every document that is not empty
  int threads = 1;
};

// Reads, encodes and hands out. The reader and each of the encoders have a thread; at most
// 2 * threads + 2 chunks are under way, which bounds the memory. Next() is called from one thread.
// The destructor ends all threads.
class EncodingPipeline {
 public:
  // All references outlive it. `inputs` name files in errors.
  static std::unique_ptr<EncodingPipeline> Start(const Tokenizer& tokenizer,
                                                 const std::vector<TextInput>& inputs,
                                                 DocumentReader& reader,
                                                 const EncodingOptions& options);
  virtual ~EncodingPipeline() = default;
  // The next chunk in the order of the input; nullopt behind the last. Errors are those of the
  // reader and kInvalidArgument for bad JSON, which names file and line; they come in the order of
  // the input too.
  virtual absl::StatusOr<std::optional<EncodedChunk>> Next() = 0;
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_DATA_CHUNK_ENCODER_H_
