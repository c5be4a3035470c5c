// Converts text to token ids and back.
#ifndef MUSTER_PARALLEL_DATA_TOKENIZER_H_
#define MUSTER_PARALLEL_DATA_TOKENIZER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

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

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_DATA_TOKENIZER_H_
