// What a SentencePiece `.model` file says: a protocol buffer (sentencepiece_model.proto), read here
// field by field.
#ifndef MUSTER_PARALLEL_DATA_SENTENCE_PIECE_MODEL_H_
#define MUSTER_PARALLEL_DATA_SENTENCE_PIECE_MODEL_H_

#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace muster::parallel {

struct SentencePieceModel {
  // With the numbers of the file.
  enum class PieceType { kNormal = 1, kUnknown, kControl, kUserDefined, kUnused, kByte };
  enum class Algorithm { kUnigram = 1, kBpe, kWord, kCharacter };
  struct Piece {
    std::string text;
    float score = 0;
    PieceType type = PieceType::kNormal;
  };
  std::vector<Piece> pieces;  // by id
  Algorithm algorithm = Algorithm::kUnigram;
  bool byte_fallback = false;
  bool space_behind_words = false;                 // treat_whitespace_as_suffix
  std::string unknown_surface = " \xe2\x81\x87 ";  // what unknown text is decoded to
  std::string character_map;
  bool add_dummy_prefix = true;
  bool remove_extra_whitespaces = true;
  bool escape_whitespaces = true;
  // Texts with their pieces, which the trainer left to check the model by.
  std::vector<std::pair<std::string, std::string>> self_tests;
};

// Whether a file begins as such a model does: with a piece that begins with its text.
bool LooksLikeSentencePiece(absl::string_view file);
// kInvalidArgument: it is damaged, cut off, or no model.
absl::StatusOr<SentencePieceModel> ParseSentencePieceModel(absl::string_view file);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_DATA_SENTENCE_PIECE_MODEL_H_
