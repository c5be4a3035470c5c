#include "parallel/data/sentence_piece_tokenizer.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "base/status_macros.h"
#include "parallel/data/byte_pair_encoder.h"
#include "parallel/data/unicode.h"
#include "parallel/data/unigram_encoder.h"

namespace muster::parallel {
namespace {

using Type = SentencePieceModel::PieceType;

// Added to the lowest score for text that no piece covers.
constexpr float kUnknownPenalty = 10;
// Longer strings are not looked for around a cut.
constexpr size_t kReplacedMax = 64;

std::string ByteToken(int byte) { return absl::StrFormat("<0x%02X>", byte); }

}  // namespace

class SentencePieceTokenizer::CachingEncoder : public Tokenizer::Encoder {
 public:
  explicit CachingEncoder(const SentencePieceTokenizer& tokenizer) : tokenizer_(tokenizer) {}
  void Encode(absl::string_view text, bool begins, std::vector<int32_t>& out) override {
    tokenizer_.Encode(text, begins, &cache_, out);
  }

 private:
  const SentencePieceTokenizer& tokenizer_;
  PreTokenCache cache_;
};

absl::StatusOr<std::unique_ptr<Tokenizer>> SentencePieceTokenizer::Make(SentencePieceModel model,
                                                                        std::string name) {
  std::unique_ptr<SentencePieceTokenizer> tokenizer(
      new SentencePieceTokenizer(std::move(model), std::move(name)));
  RETURN_IF_ERROR(tokenizer->Prepare());
  RETURN_IF_ERROR(tokenizer->RunSelfTests());
  return tokenizer;
}

absl::Status SentencePieceTokenizer::CheckPieces() {
  bool bytes[256] = {};
  absl::flat_hash_map<absl::string_view, int32_t> of_text;
  for (size_t i = 0; i < model_.pieces.size(); ++i) {
    const SentencePieceModel::Piece& piece = model_.pieces[i];
    const auto id = static_cast<int32_t>(i);
    const std::string shown =
        absl::StrCat("piece ", id, " '", absl::Utf8SafeCHexEscape(piece.text), "'");
    if (!IsValidUtf8(piece.text)) {
      return absl::InvalidArgumentError(absl::StrCat(shown, " is not UTF-8"));
    }
    const bool in_text = piece.type == Type::kNormal || piece.type == Type::kUserDefined ||
                         piece.type == Type::kUnused;
    if (!(in_text ? of_text.emplace(piece.text, id).second
                  : others_.emplace(piece.text, id).second)) {
      return absl::InvalidArgumentError(absl::StrCat(shown, " is there twice"));
    }
    if (!in_text && of_text.contains(piece.text)) {
      return absl::UnimplementedError(absl::StrCat(shown, ", which is a piece of text too,"));
    }
    // The library would find it in text where no other piece covers the character.
    if (!in_text && static_cast<size_t>(DecodeUtf8(piece.text.data()).bytes) == piece.text.size()) {
      return absl::UnimplementedError(
          absl::StrCat(shown, " of one character, and not of type NORMAL,"));
    }
    if (piece.type == Type::kUnknown) {
      if (unknown_ >= 0) {
        return absl::InvalidArgumentError(absl::StrCat(shown, " is a second piece for unknowns"));
      }
      unknown_ = id;
    }
    if (piece.type == Type::kUnused && model_.algorithm == SentencePieceModel::Algorithm::kBpe) {
      return absl::UnimplementedError(absl::StrCat(shown, " of type UNUSED in a BPE model"));
    }
    if (piece.type != Type::kByte) continue;
    int byte = 0;
    while (byte < 256 && piece.text != ByteToken(byte)) ++byte;
    if (byte == 256 || !model_.byte_fallback) {
      return absl::InvalidArgumentError(absl::StrCat(
          shown, " is of type BYTE, ", byte == 256 ? "and no byte" : "without byte_fallback"));
    }
    bytes[byte] = true;
  }
  if (unknown_ < 0) return absl::InvalidArgumentError("the model has no piece of type UNKNOWN");
  for (int byte = 0; byte < 256 && model_.byte_fallback; ++byte) {
    if (bytes[byte]) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("the model has byte_fallback, and no piece ", ByteToken(byte)));
  }
  return absl::OkStatus();
}

absl::Status SentencePieceTokenizer::Prepare() {
  if (model_.pieces.size() > static_cast<size_t>(kIdMax)) {
    return absl::InvalidArgumentError(
        absl::StrCat("the model has ", model_.pieces.size(), " pieces, must be at most ", kIdMax));
  }
  RETURN_IF_ERROR(CheckPieces());
  ASSIGN_OR_RETURN(character_map_, CharacterMap::Parse(model_.character_map));
  std::vector<std::pair<absl::string_view, int32_t>> user_defined;
  bool spaces = false;  // a user-defined piece could reach over a cut
  float lowest = std::numeric_limits<float>::max();
  // The library starts from this number, which no score of a log-probability exceeds.
  float highest = std::numeric_limits<float>::min();
  for (size_t i = 0; i < model_.pieces.size(); ++i) {
    const SentencePieceModel::Piece& piece = model_.pieces[i];
    if (piece.type == Type::kUserDefined) {
      user_defined.emplace_back(piece.text, static_cast<int32_t>(i));
      spaces = spaces || absl::StrContains(piece.text, ' ') ||
               NextWord(piece.text) != absl::string_view::npos;
    } else if (piece.type == Type::kNormal) {
      lowest = std::min(lowest, piece.score);
      highest = std::max(highest, piece.score);
    }
  }
  user_defined_ = ByteTrie(std::move(user_defined));
  if (model_.algorithm == SentencePieceModel::Algorithm::kBpe) {
    std::vector<BytePairEncoder::ScoredToken> tokens;
    for (size_t i = 0; i < model_.pieces.size(); ++i) {
      const SentencePieceModel::Piece& piece = model_.pieces[i];
      if (piece.type != Type::kNormal && piece.type != Type::kByte) continue;
      tokens.push_back({piece.text, static_cast<int32_t>(i), std::nullopt});
      if (piece.type == Type::kNormal) tokens.back().score = piece.score;
    }
    BytePairEncoder::Options options;
    options.bytes = false;
    options.byte_fallback = model_.byte_fallback;
    options.unknown = unknown_;
    options.fuse_unknown = true;
    ASSIGN_OR_RETURN(BytePairEncoder encoder,
                     BytePairEncoder::MakeScored(std::move(tokens), options));
    cuts_ = encoder.EncodesWordByWord() && model_.escape_whitespaces && !spaces;
    encoder_ = std::make_unique<BytePairEncoder>(std::move(encoder));
    return absl::OkStatus();
  }
  if (model_.algorithm != SentencePieceModel::Algorithm::kUnigram) {
    return absl::UnimplementedError(
        absl::StrCat("a model of the type ",
                     model_.algorithm == SentencePieceModel::Algorithm::kWord ? "WORD" : "CHAR"));
  }
  std::vector<UnigramEncoder::Token> tokens;
  for (const SentencePieceModel::Piece& piece : model_.pieces) {
    UnigramEncoder::Token token{piece.text, piece.score};
    token.in_text = piece.type == Type::kNormal || piece.type == Type::kUserDefined;
    if (piece.type == Type::kUserDefined) {
      token.score = static_cast<double>(static_cast<float>(piece.text.size()) * highest) - 0.1;
    }
    tokens.push_back(std::move(token));
  }
  UnigramEncoder::Options options;
  options.unknown = unknown_;
  options.unknown_score = lowest - kUnknownPenalty;
  options.byte_fallback = model_.byte_fallback;
  options.sentence_piece = true;
  ASSIGN_OR_RETURN(encoder_, UnigramEncoder::Make(std::move(tokens), options));
  return absl::OkStatus();
}

absl::Status SentencePieceTokenizer::RunSelfTests() const {
  for (const auto& [text, pieces] : model_.self_tests) {
    std::vector<int32_t> ids;
    Encode(text, ids);
    std::vector<absl::string_view> found;
    bool known = true;  // unknown text is written as it is, not as the piece
    for (const int32_t id : ids) {
      known = known && id != unknown_;
      found.push_back(model_.pieces[static_cast<size_t>(id)].text);
    }
    if (!known || absl::StrJoin(found, " ") == pieces) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("a test in the model fails: '", absl::Utf8SafeCHexEscape(text),
                     "' should have the pieces '", absl::Utf8SafeCHexEscape(pieces), "', and has '",
                     absl::Utf8SafeCHexEscape(absl::StrJoin(found, " ")), "'"));
  }
  return absl::OkStatus();
}

std::string SentencePieceTokenizer::Normalize(absl::string_view text, bool begins) const {
  // The replacement of the longest known string at the beginning of `text`, and its bytes.
  const auto next = [this](absl::string_view rest) -> CharacterMap::Match {
    if (const size_t bytes = user_defined_.LongestPrefix(rest); bytes > 0) {
      return {bytes, rest.substr(0, bytes)};
    }
    if (const CharacterMap::Match match = character_map_.Longest(rest); match.bytes > 0) {
      return match;
    }
    const size_t bytes = static_cast<size_t>(DecodeUtf8(rest.data()).bytes);
    return {bytes, rest.substr(0, bytes)};
  };
  const bool trims = model_.remove_extra_whitespaces;
  const absl::string_view space = model_.escape_whitespaces ? kSpaceMark : " ";
  if (begins && trims) {
    while (!text.empty()) {
      const CharacterMap::Match match = next(text);
      if (match.replacement != " ") break;
      text.remove_prefix(match.bytes);
    }
  }
  std::string normal;
  if (text.empty()) return normal;
  normal.reserve(text.size() + text.size() / 2);
  const bool prefix = model_.add_dummy_prefix && !model_.space_behind_words;
  if (begins && prefix) absl::StrAppend(&normal, space);
  bool behind_space = begins && trims;
  while (!text.empty()) {
    CharacterMap::Match match = next(text);
    while (behind_space && absl::ConsumePrefix(&match.replacement, " ")) {
    }
    for (const char byte : match.replacement) {
      if (byte == ' ') {
        normal.append(space.data(), space.size());
      } else {
        normal.push_back(byte);
      }
    }
    if (trims && !match.replacement.empty()) {
      behind_space = absl::EndsWith(match.replacement, " ");
    }
    text.remove_prefix(match.bytes);
  }
  while (trims && absl::EndsWith(normal, space)) normal.resize(normal.size() - space.size());
  if (model_.add_dummy_prefix && model_.space_behind_words) absl::StrAppend(&normal, space);
  return IsValidUtf8(normal) ? normal : ToValidUtf8(normal);  // a damaged map gives any bytes
}

void SentencePieceTokenizer::Encode(absl::string_view text, std::vector<int32_t>& out) const {
  Encode(text, /*begins=*/true, nullptr, out);
}

void SentencePieceTokenizer::Encode(absl::string_view text, bool begins, PreTokenCache* cache,
                                    std::vector<int32_t>& out) const {
  std::string valid;
  if (!IsValidUtf8(text)) {
    valid = ReplaceIllFormedBytes(text);
    text = valid;
  }
  const std::string normal = Normalize(text, begins);
  if (user_defined_.empty() || model_.algorithm == SentencePieceModel::Algorithm::kUnigram) {
    return EncodeNormalized(normal, cache, out);
  }
  size_t done = 0;
  for (size_t at = 0; at < normal.size();) {
    const absl::string_view rest = absl::string_view(normal).substr(at);
    size_t bytes = 0;
    int32_t id = -1;
    user_defined_.ForEachPrefix(rest, [&](size_t length, int32_t found) {
      bytes = length;
      id = found;
    });
    if (bytes == 0) {
      at += static_cast<size_t>(DecodeUtf8(rest.data()).bytes);
      continue;
    }
    EncodeNormalized(absl::string_view(normal).substr(done, at - done), cache, out);
    out.push_back(id);
    done = at += bytes;
  }
  EncodeNormalized(absl::string_view(normal).substr(done), cache, out);
}

void SentencePieceTokenizer::EncodeNormalized(absl::string_view text, PreTokenCache* cache,
                                              std::vector<int32_t>& out) const {
  const bool words = encoder_->EncodesWordByWord();
  while (!text.empty()) {
    const size_t bytes = words ? std::min(NextWord(text), text.size()) : text.size();
    if (words && cache != nullptr) {
      cache->Encode(*encoder_, text.substr(0, bytes), out);
    } else {
      encoder_->Encode(text.substr(0, bytes), out);
    }
    text.remove_prefix(bytes);
  }
}

std::unique_ptr<Tokenizer::Encoder> SentencePieceTokenizer::NewEncoder() const {
  return std::make_unique<CachingEncoder>(*this);
}

// In front of a space, behind a printable character of ASCII, where no string that is replaced
// reaches over the cut or ends at it.
bool SentencePieceTokenizer::CutsAt(absl::string_view text, size_t at) const {
  if (text[at] != ' ' || !absl::ascii_isgraph(static_cast<unsigned char>(text[at - 1]))) {
    return false;
  }
  for (size_t from = at - std::min(at, kReplacedMax); from < at; ++from) {
    if (character_map_.HasPrefix(text.substr(from, at - from + 1)) ||
        character_map_.Longest(text.substr(from, at - from)).bytes == at - from) {
      return false;
    }
  }
  return true;
}

size_t SentencePieceTokenizer::LastCut(absl::string_view text) const {
  if (!cuts_ || model_.space_behind_words) return 0;
  for (size_t at = text.size(); at-- > 1;) {
    if (CutsAt(text, at)) return at;
  }
  return 0;
}

std::optional<int32_t> SentencePieceTokenizer::IdOf(absl::string_view token) const {
  if (const auto found = others_.find(token); found != others_.end()) return found->second;
  for (size_t i = 0; i < model_.pieces.size(); ++i) {
    if (model_.pieces[i].text == token) return static_cast<int32_t>(i);
  }
  return std::nullopt;
}

absl::StatusOr<std::string> SentencePieceTokenizer::Decode(absl::Span<const int32_t> tokens) const {
  std::string text;
  bool first = true;  // nothing but control pieces so far
  for (size_t i = 0; i < tokens.size(); ++i) {
    const int32_t id = tokens[i];
    if (id < 0 || static_cast<size_t>(id) >= model_.pieces.size()) {
      return absl::InvalidArgumentError(absl::StrCat("token ", id, " at position ", i,
                                                     " is not one of ", name_, ", which has ",
                                                     model_.pieces.size()));
    }
    const SentencePieceModel::Piece& piece = model_.pieces[static_cast<size_t>(id)];
    if (piece.type == Type::kControl) {
      text += piece.text;
      continue;
    }
    int byte = 0;
    if (piece.type == Type::kUnknown) {
      text += model_.unknown_surface;
    } else if (piece.type == Type::kByte && absl::SimpleHexAtoi(piece.text.substr(3, 2), &byte)) {
      text.push_back(static_cast<char>(byte));
    } else {
      absl::string_view rest = piece.text;
      if (first && (model_.add_dummy_prefix || model_.remove_extra_whitespaces)) {
        absl::ConsumePrefix(&rest, kSpaceMark);
      }
      text += absl::StrReplaceAll(rest, {{kSpaceMark, " "}});
    }
    first = false;
  }
  return text;
}

}  // namespace muster::parallel
