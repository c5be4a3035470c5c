// The steps around byte-pair encoding and unigram models, in the order of Hugging Face's
// tokenizers: added tokens are found in the text, the rest is normalised, split into pre-tokens,
// and each pre-token encoded.
#ifndef MUSTER_PARALLEL_DATA_SUBWORD_TOKENIZER_H_
#define MUSTER_PARALLEL_DATA_SUBWORD_TOKENIZER_H_

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
#include "parallel/data/character_map.h"
#include "parallel/data/pre_token_cache.h"
#include "parallel/data/pre_tokenizer.h"
#include "parallel/data/subword_encoder.h"
#include "parallel/data/tokenizer.h"
#include "parallel/data/unicode.h"

namespace muster::parallel {

struct SubwordTokenizerParts {
  struct Prepend {
    std::string text;
  };
  struct Replace {
    std::string from, to;
  };
  struct JoinSpaces {  // of two spaces or more
    std::string to;
  };
  struct Strip {  // of white space at the ends of a text
    bool left = false, right = false;
  };
  using Normalizer = std::variant<NormalForm, Prepend, Replace, JoinSpaces, Strip, CharacterMap>;
  struct Digits {
    bool individual = false;
  };
  struct WhiteSpace {};  // is left out
  // Spaces become marks, and a mark is set in front of what has none.
  struct SpaceMarks {
    enum class Prepend { kNever, kFirst, kAlways };
    std::string mark{kSpaceMark};
    Prepend prepend = Prepend::kAlways;  // kFirst: at the beginning of a document
    bool split = true;                   // in front of each mark
  };
  using Splitter = std::variant<SplitPattern, Digits, WhiteSpace, SpaceMarks>;

  std::string name;
  std::unique_ptr<SubwordEncoder> encoder;
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

class SubwordTokenizer : public Tokenizer {
 public:
  explicit SubwordTokenizer(SubwordTokenizerParts parts);

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
  // Where a part of a document stands.
  struct Place {
    bool begins = true;  // not the continuation of text: behind an added token it begins anew
    bool first = true;   // at the beginning of the document
  };
  void Encode(absl::string_view text, bool begins, const Run& run) const;
  void EncodeRest(absl::string_view text, Place place, const Run& run) const;
  void EncodeNormalized(absl::string_view text, Place place, const Run& run) const;
  void Split(absl::string_view text, bool first, size_t splitter, const Run& run) const;
  void MarkSpaces(absl::string_view text, bool first, size_t splitter, const Run& run) const;
  void EncodePreToken(absl::string_view pre_token, const Run& run) const;
  void FindCuts();

  SubwordTokenizerParts parts_;
  AddedTokens raw_, normalized_;
  std::vector<std::string> tokens_;  // by id; bytes, empty where there is none
  std::vector<bool> added_;          // by id: decoded as it is
  bool words_ = false;               // what is not split is encoded word by word
  bool prepends_ = false;
  bool cuts_at_spaces_ = false, cuts_at_lines_ = false;
  bool cuts_at_ascii_ = false;  // only behind printable characters of ASCII
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_DATA_SUBWORD_TOKENIZER_H_
