// Tokenizers from SentencePiece `.model` files, of the algorithms BPE and unigram, with the ids of
// its library.
#ifndef MUSTER_PARALLEL_DATA_SENTENCE_PIECE_TOKENIZER_H_
#define MUSTER_PARALLEL_DATA_SENTENCE_PIECE_TOKENIZER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "parallel/data/byte_trie.h"
#include "parallel/data/character_map.h"
#include "parallel/data/pre_token_cache.h"
#include "parallel/data/sentence_piece_model.h"
#include "parallel/data/subword_encoder.h"
#include "parallel/data/tokenizer.h"

namespace muster::parallel {

class SentencePieceTokenizer : public Tokenizer {
 public:
  // Runs the model's own tests. kInvalidArgument: the model contradicts itself, or its tests fail;
  // kUnimplemented names what is not supported.
  static absl::StatusOr<std::unique_ptr<Tokenizer>> Make(SentencePieceModel model,
                                                         std::string name);

  absl::string_view name() const override { return name_; }
  int64_t vocab() const override { return static_cast<int64_t>(model_.pieces.size()); }
  // Each byte that is not UTF-8 is read as U+FFFD.
  void Encode(absl::string_view text, std::vector<int32_t>& out) const override;
  std::unique_ptr<Encoder> NewEncoder() const override;
  // Of unigram models always 0: sums of scores depend on all of the text in front.
  size_t LastCut(absl::string_view text) const override;
  // Control pieces are decoded as they are written.
  absl::StatusOr<std::string> Decode(absl::Span<const int32_t> tokens) const override;
  std::optional<int32_t> IdOf(absl::string_view token) const override;
  // The file asks for nothing around a text.
  const BoundaryTokens& boundaries() const override { return none_; }

 private:
  class CachingEncoder;
  SentencePieceTokenizer(SentencePieceModel model, std::string name)
      : name_(std::move(name)), model_(std::move(model)) {}
  absl::Status Prepare();
  absl::Status CheckPieces();
  absl::Status RunSelfTests() const;
  // `begins`: the text is not the continuation of another behind a LastCut.
  std::string Normalize(absl::string_view text, bool begins) const;
  void Encode(absl::string_view text, bool begins, PreTokenCache* cache,
              std::vector<int32_t>& out) const;
  void EncodeNormalized(absl::string_view text, PreTokenCache* cache,
                        std::vector<int32_t>& out) const;
  bool CutsAt(absl::string_view text, size_t at) const;

  const std::string name_;
  const SentencePieceModel model_;
  CharacterMap character_map_;
  int32_t unknown_ = -1;
  ByteTrie user_defined_;  // pieces that are found before anything else
  std::unique_ptr<SubwordEncoder> encoder_;
  absl::flat_hash_map<std::string, int32_t> others_;  // ids of control, unknown and byte pieces
  bool cuts_ = false;
  const BoundaryTokens none_ = {};
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_DATA_SENTENCE_PIECE_TOKENIZER_H_
