// Byte-pair encoding (Sennrich et al., arXiv 1508.07909) of pre-tokens of text: symbols are merged,
// the pair of the lowest rank first and of those the leftmost, until no pair has a rank.
#ifndef MUSTER_PARALLEL_DATA_BYTE_PAIR_ENCODER_H_
#define MUSTER_PARALLEL_DATA_BYTE_PAIR_ENCODER_H_

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "parallel/data/subword_encoder.h"

namespace muster::parallel {

// Const after construction; thread-safe.
class BytePairEncoder : public SubwordEncoder {
 public:
  struct Options {
    // The symbols that a pre-token starts from: its bytes, or its code points.
    bool bytes = true;
    // Code points outside the vocabulary become the tokens of their bytes ("<0xE2>"), if all exist.
    bool byte_fallback = false;
    // Else they become this token; -1: kInvalidArgument from Make where a byte has no token.
    int32_t unknown = -1;
    bool fuse_unknown = false;  // neighbouring unknowns are one token
    // A pre-token that is a token as a whole is that token, whatever the merges would give.
    bool whole_pre_tokens_first = false;
  };
  // `vocabulary`: bytes and id of every token, each id once. `merges`: pairs in order
  // of their rank. kInvalidArgument names the token, byte or merge that is wrong.
  static absl::StatusOr<BytePairEncoder> Make(
      std::vector<std::pair<std::string, int32_t>> vocabulary,
      const std::vector<std::pair<std::string, std::string>>& merges, const Options& options);
  // tiktoken's form: the rank of a pair is the id of the token that both make together.
  static absl::StatusOr<BytePairEncoder> MakeRanked(
      std::vector<std::pair<std::string, int32_t>> vocabulary);

  // SentencePiece's form: of the pairs whose text is a token, the one with the highest score of
  // that token is merged. Text without a token is found only behind the last merge. Tokens without
  // a score are never made of others, but found where `options` name them.
  struct ScoredToken {
    std::string text;
    int32_t id = 0;
    std::optional<float> score;
  };
  static absl::StatusOr<BytePairEncoder> MakeScored(std::vector<ScoredToken> vocabulary,
                                                    const Options& options);

  void Encode(absl::string_view pre_token, std::vector<int32_t>& out) const override;
  int32_t IdOf(absl::string_view token) const override {
    const auto found = ids_.find(token);
    return found == ids_.end() ? -1 : found->second;
  }
  const absl::flat_hash_map<std::string, int32_t>& ids() const override { return ids_; }
  bool EncodesWordByWord() const override { return by_word_; }

 private:
  struct Merge {
    uint32_t rank;
    int32_t id;
  };
  struct Symbol {
    int32_t id;
    uint32_t begin, end;  // bytes of the pre-token
  };
  static constexpr uint32_t kNoRank = 0xffffffff;
  // Up to so many symbols a scan for the lowest rank beats a heap.
  static constexpr size_t kShortMax = 48;
  using Symbols = absl::InlinedVector<Symbol, kShortMax>;

  Merge MergeOf(absl::string_view pre_token, const Symbol& left, const Symbol& right) const;
  void Start(absl::string_view pre_token, Symbols& symbols) const;
  void MergeShort(absl::string_view pre_token, Symbols& symbols) const;
  void MergeLong(absl::string_view pre_token, Symbols& symbols) const;

  void FindWords();
  void AppendUnknown(absl::string_view text, bool first, std::vector<int32_t>& out) const;

  Options options_;
  // By id, where the rank of a pair is that of the token that both make; else empty.
  std::vector<uint32_t> ranks_;
  bool unknown_last_ = false;  // unknown text is found behind the last merge
  bool by_word_ = false;
  absl::flat_hash_map<std::string, int32_t> ids_;
  absl::flat_hash_map<uint64_t, Merge> merges_;  // by the ids of both
  int32_t byte_ids_[256];                        // -1: none
  int32_t fallback_ids_[256];                    // of "<0xNN>"; -1: none
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_DATA_BYTE_PAIR_ENCODER_H_
