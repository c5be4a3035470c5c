// The steps around byte-pair encoding, in the order of Hugging Face's tokenizers: added tokens are
// found in the text, the rest is normalised, split into pieces, and each piece encoded.
#ifndef MUSTER_PARALLEL_DATA_BPE_TOKENIZER_H_
#define MUSTER_PARALLEL_DATA_BPE_TOKENIZER_H_

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/string_view.h"
#include "parallel/data/byte_pair_encoder.h"
#include "parallel/data/pre_tokenizer.h"
#include "parallel/data/tokenizer.h"
#include "parallel/data/unicode.h"

namespace muster::parallel {

// A token that is found in the text before anything is merged.
struct AddedToken {
  std::string content;
  int32_t id = 0;
  bool single_word = false;  // only between characters that are no part of a word
  bool strip_left = false, strip_right = false;  // takes white space on that side with it
  bool normalized = false;                       // looked for in the normalised text
  bool special = false;  // left out of decoded text by those who skip special tokens
};

// Finds added tokens, the leftmost and of those the longest.
class AddedTokens {
 public:
  AddedTokens() = default;
  explicit AddedTokens(std::vector<AddedToken> tokens);

  struct Match {
    size_t begin = absl::string_view::npos, end = 0;  // with stripped white space
    const AddedToken* token = nullptr;                // null: there is none
  };
  Match Find(absl::string_view text, size_t from) const;
  const std::vector<AddedToken>& tokens() const { return tokens_; }

 private:
  std::vector<AddedToken> tokens_;  // longest first
  std::array<bool, 256> begins_{};  // some token does, with this byte
};

struct BpeTokenizerParts {
  struct Prepend {
    std::string text;
  };
  struct Replace {
    std::string from, to;
  };
  using Normalizer = std::variant<NormalForm, Prepend, Replace>;
  struct Digits {
    bool individual = false;
  };
  using Splitter = std::variant<SplitPattern, Digits>;

  std::string name;
  BytePairEncoder encoder;
  std::vector<AddedToken> added;
  std::vector<Normalizer> normalizers;
  bool prefix_space = false;  // in front of text that does not begin with a space
  std::vector<Splitter> splitters;
  // Decoding replaces this by a space, and drops one space in front; empty: tokens are bytes.
  std::string space;
  bool strip_first_space = false;
};

class BpeTokenizer : public Tokenizer {
 public:
  explicit BpeTokenizer(BpeTokenizerParts parts);

  absl::string_view name() const override { return parts_.name; }
  int64_t vocab() const override { return static_cast<int64_t>(tokens_.size()); }
  // The whole text of a document, or the part up to a boundary of CanSplitBefore. Ill-formed UTF-8
  // becomes U+FFFD first.
  void Encode(absl::string_view text, std::vector<int32_t>& out) const override;
  absl::StatusOr<std::string> Decode(absl::Span<const int32_t> tokens) const override;

  // As Encode, with the pieces that the cache knows.
  void Encode(absl::string_view text, PieceCache& cache, std::vector<int32_t>& out) const;

 private:
  void EncodeRest(absl::string_view text, PieceCache& cache, std::vector<int32_t>& out) const;
  void EncodeNormalized(absl::string_view text, PieceCache& cache, std::vector<int32_t>& out) const;
  void Split(absl::string_view text, size_t splitter, PieceCache& cache,
             std::vector<int32_t>& out) const;

  BpeTokenizerParts parts_;
  AddedTokens raw_, normalized_;
  std::vector<std::string> tokens_;  // by id; bytes, empty where there is none
  std::vector<bool> added_;          // by id: decoded as it is
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_DATA_BPE_TOKENIZER_H_
