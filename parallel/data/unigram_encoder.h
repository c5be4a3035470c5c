// Unigram language models (Kudo, arXiv 1804.10959): of all ways to cut a text into tokens, the one
// with the highest sum of their scores.
#ifndef MUSTER_PARALLEL_DATA_UNIGRAM_ENCODER_H_
#define MUSTER_PARALLEL_DATA_UNIGRAM_ENCODER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "parallel/data/byte_trie.h"
#include "parallel/data/subword_encoder.h"

namespace muster::parallel {

// Const after construction; thread-safe.
class UnigramEncoder : public SubwordEncoder {
 public:
  struct Token {
    std::string text;  // of equal texts the last token counts
    double score = 0;
    bool in_text = true;  // else text that reads like it is not this token
  };
  struct Options {
    int32_t unknown = 0;         // the id of text that no token covers; neighbours are one token
    double unknown_score = 0;    // of each of its code points
    bool byte_fallback = false;  // it becomes the tokens of its bytes ("<0xE2>"), if all exist
    // As SentencePiece adds: sums have 32 bits, and unknown text stays unknown. Else as
    // Hugging Face's tokenizers do: 64 bits, and neighbouring unknown code points that are a token
    // together are that token.
    bool sentence_piece = false;
  };
  // Ids are positions in `tokens`. kInvalidArgument: a token or id that is none.
  static absl::StatusOr<std::unique_ptr<UnigramEncoder>> Make(std::vector<Token> tokens,
                                                              const Options& options);

  void Encode(absl::string_view pre_token, std::vector<int32_t>& out) const override;
  int32_t IdOf(absl::string_view token) const override {
    const auto found = ids_.find(token);
    return found == ids_.end() ? -1 : found->second;
  }
  const absl::flat_hash_map<std::string, int32_t>& ids() const override { return ids_; }
  // The sums of scores depend on what is in front of a word.
  bool EncodesWordByWord() const override { return false; }

 private:
  UnigramEncoder() = default;
  template <typename Sum>
  void EncodeWith(absl::string_view text, std::vector<int32_t>& out) const;
  void AppendUnknown(absl::string_view text, std::vector<int32_t>& out) const;

  Options options_;
  absl::flat_hash_map<std::string, int32_t> ids_;
  std::vector<double> scores_;
  ByteTrie trie_;
  int32_t fallback_ids_[256];  // of "<0xNN>"; -1: none
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_DATA_UNIGRAM_ENCODER_H_
