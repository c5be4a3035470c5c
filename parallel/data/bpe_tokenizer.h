// The steps around byte-pair encoding, in the order of Hugging Face's tokenizers: added tokens are
// found in the text, the rest is normalised, split into pre-tokens, and each pre-token encoded.
#ifndef MUSTER_PARALLEL_DATA_BPE_TOKENIZER_H_
#define MUSTER_PARALLEL_DATA_BPE_TOKENIZER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"
#include "parallel/data/added_tokens.h"
#include "parallel/data/byte_pair_encoder.h"
#include "parallel/data/pre_tokenizer.h"
#include "parallel/data/tokenizer.h"
#include "parallel/data/unicode.h"

namespace muster::parallel {

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
  // Tokens that no text is encoded to, with their ids.
  std::vector<std::pair<std::string, int32_t>> unreachable;
  std::vector<AddedToken> added;
  std::vector<Normalizer> normalizers;
  bool prefix_space = false;  // in front of text that does not begin with a space
  std::vector<Splitter> splitters;
  // Decoding replaces this by a space, and drops one space in front; empty: tokens are bytes.
  std::string space;
  bool strip_first_space = false;
  BoundaryTokens boundaries;
};

class BpeTokenizer : public Tokenizer {
 public:
  explicit BpeTokenizer(BpeTokenizerParts parts);

  absl::string_view name() const override { return parts_.name; }
  int64_t vocab() const override { return static_cast<int64_t>(tokens_.size()); }
  // Ill-formed UTF-8 becomes U+FFFD first.
  void Encode(absl::string_view text, std::vector<int32_t>& out) const override;
  std::unique_ptr<Encoder> NewEncoder() const override;
  size_t LastCut(absl::string_view text) const override;
  absl::StatusOr<std::string> Decode(absl::Span<const int32_t> tokens) const override;
  std::optional<int32_t> IdOf(absl::string_view token) const override;
  const BoundaryTokens& boundaries() const override { return parts_.boundaries; }

 private:
  class CachingEncoder;
  // What one call of Encode passes down. Without a cache every pre-token is encoded anew.
  struct Run {
    PreTokenCache* cache;
    std::vector<int32_t>& out;
  };
  void Encode(absl::string_view text, bool begins, const Run& run) const;
  // `begins`: the text is not the continuation of another, so that it gets its prefix.
  void EncodeRest(absl::string_view text, bool begins, const Run& run) const;
  void EncodeNormalized(absl::string_view text, bool begins, const Run& run) const;
  void Split(absl::string_view text, size_t splitter, const Run& run) const;
  void EncodePreToken(absl::string_view pre_token, const Run& run) const;
  void FindCuts();

  BpeTokenizerParts parts_;
  AddedTokens raw_, normalized_;
  std::vector<std::string> tokens_;  // by id; bytes, empty where there is none
  std::vector<bool> added_;          // by id: decoded as it is
  // Where text is not split, no token reaches over the beginning of a word: U+2581 (the space mark)
  // stands in tokens only in front of everything else. Then words are encoded one by one.
  bool words_ = false;
  bool prepends_ = false;
  bool cuts_at_spaces_ = false, cuts_at_lines_ = false;
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_DATA_BPE_TOKENIZER_H_
