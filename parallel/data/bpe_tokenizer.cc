#include "parallel/data/bpe_tokenizer.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "base/check.h"

namespace muster::parallel {
namespace {

// Part of a word, as \w has it: letters, marks, numbers and the underscore.
bool IsWord(uint32_t c) {
  return c == '_' ||
         (CharClasses::Get().Of(c) & (kLetter | kNumber | kUpperWord | kLowerWord)) != 0;
}

uint32_t Before(absl::string_view text, size_t at) {
  size_t begin = at - 1;
  while (begin > 0 && (static_cast<uint8_t>(text[begin]) & 0xc0) == 0x80) --begin;
  return DecodeUtf8(text.data() + begin).value;
}

// The byte of "<0xE2>", or -1.
int FallbackByte(absl::string_view token) {
  uint32_t byte = 0;
  if (token.size() != 6 || !absl::StartsWith(token, "<0x") || token[5] != '>') return -1;
  return absl::SimpleHexAtoi(token.substr(3, 2), &byte) ? static_cast<int>(byte) : -1;
}

}  // namespace

AddedTokens::AddedTokens(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)) {
  std::stable_sort(tokens_.begin(), tokens_.end(), [](const AddedToken& a, const AddedToken& b) {
    return a.content.size() > b.content.size();
  });
  for (const AddedToken& token : tokens_) begins_[static_cast<uint8_t>(token.content[0])] = true;
}

AddedTokens::Match AddedTokens::Find(absl::string_view text, size_t from) const {
  if (tokens_.empty()) return {};
  for (size_t at = from; at < text.size(); ++at) {
    if (!begins_[static_cast<uint8_t>(text[at])]) continue;
    for (const AddedToken& token : tokens_) {
      if (!absl::StartsWith(text.substr(at), token.content)) continue;
      Match match = {at, at + token.content.size(), &token};
      if (token.single_word &&
          ((at > 0 && IsWord(Before(text, at))) ||
           (match.end < text.size() && IsWord(DecodeUtf8(text.data() + match.end).value)))) {
        continue;
      }
      const CharClasses& classes = CharClasses::Get();
      if (token.strip_left) {
        while (match.begin > from && (classes.Of(Before(text, match.begin)) & kSpace) != 0) {
          do --match.begin;
          while ((static_cast<uint8_t>(text[match.begin]) & 0xc0) == 0x80);
        }
      }
      while (token.strip_right && match.end < text.size()) {
        const CodePoint next = DecodeUtf8(text.data() + match.end);
        if ((classes.Of(next.value) & kSpace) == 0) break;
        match.end += static_cast<size_t>(next.bytes);
      }
      return match;
    }
  }
  return {};
}

BpeTokenizer::BpeTokenizer(BpeTokenizerParts parts) : parts_(std::move(parts)) {
  int32_t most = -1;
  for (const auto& [token, id] : parts_.encoder.ids()) most = std::max(most, id);
  for (const AddedToken& token : parts_.added) most = std::max(most, token.id);
  tokens_.resize(static_cast<size_t>(most) + 1);
  added_.resize(tokens_.size());
  for (const auto& [token, id] : parts_.encoder.ids()) tokens_[static_cast<size_t>(id)] = token;
  std::vector<AddedToken> raw, normalized;
  for (const AddedToken& token : parts_.added) {
    tokens_[static_cast<size_t>(token.id)] = token.content;
    added_[static_cast<size_t>(token.id)] = true;
    (token.normalized ? normalized : raw).push_back(token);
  }
  raw_ = AddedTokens(std::move(raw));
  normalized_ = AddedTokens(std::move(normalized));
}

void BpeTokenizer::Encode(absl::string_view text, std::vector<int32_t>& out) const {
  PieceCache cache;
  Encode(text, cache, out);
}

void BpeTokenizer::Encode(absl::string_view text, PieceCache& cache,
                          std::vector<int32_t>& out) const {
  std::string valid;
  if (!IsValidUtf8(text)) {
    valid = ToValidUtf8(text);
    text = valid;
  }
  for (size_t at = 0; at < text.size();) {
    const AddedTokens::Match match = raw_.Find(text, at);
    const size_t end = std::min(match.begin, text.size());
    if (end > at) EncodeRest(text.substr(at, end - at), cache, out);
    if (match.token == nullptr) break;
    out.push_back(match.token->id);
    at = match.end;
  }
}

void BpeTokenizer::EncodeRest(absl::string_view text, PieceCache& cache,
                              std::vector<int32_t>& out) const {
  std::string normal;
  for (const BpeTokenizerParts::Normalizer& normalizer : parts_.normalizers) {
    if (const auto* form = std::get_if<NormalForm>(&normalizer)) {
      absl::StatusOr<std::string> made = Normalize(text, *form);
      CHECK_OK(made);  // it is valid UTF-8
      normal = *std::move(made);
    } else if (const auto* prepend = std::get_if<BpeTokenizerParts::Prepend>(&normalizer)) {
      normal = absl::StrCat(prepend->text, text);
    } else {
      const auto& replace = std::get<BpeTokenizerParts::Replace>(normalizer);
      normal = absl::StrReplaceAll(text, {{replace.from, replace.to}});
    }
    text = normal;
  }
  if (normalized_.tokens().empty()) return EncodeNormalized(text, cache, out);
  for (size_t at = 0; at < text.size();) {
    const AddedTokens::Match match = normalized_.Find(text, at);
    const size_t end = std::min(match.begin, text.size());
    if (end > at) EncodeNormalized(text.substr(at, end - at), cache, out);
    if (match.token == nullptr) break;
    out.push_back(match.token->id);
    at = match.end;
  }
}

void BpeTokenizer::EncodeNormalized(absl::string_view text, PieceCache& cache,
                                    std::vector<int32_t>& out) const {
  if (parts_.prefix_space && text[0] != ' ') return Split(absl::StrCat(" ", text), 0, cache, out);
  Split(text, 0, cache, out);
}

void BpeTokenizer::Split(absl::string_view text, size_t splitter, PieceCache& cache,
                         std::vector<int32_t>& out) const {
  if (splitter == parts_.splitters.size()) return cache.Encode(parts_.encoder, text, out);
  const BpeTokenizerParts::Splitter& how = parts_.splitters[splitter];
  const auto* digits = std::get_if<BpeTokenizerParts::Digits>(&how);
  while (!text.empty()) {
    size_t bytes = 0;
    if (digits == nullptr) {
      bytes = NextPiece(std::get<SplitPattern>(how), text);
    } else {
      const auto number = [text](size_t at) {
        return (CharClasses::Get().Of(DecodeUtf8(text.data() + at).value) & kNumber) != 0;
      };
      const bool first = number(0);
      do bytes += static_cast<size_t>(DecodeUtf8(text.data() + bytes).bytes);
      while (bytes < text.size() && number(bytes) == first && !(first && digits->individual));
    }
    Split(text.substr(0, bytes), splitter + 1, cache, out);
    text.remove_prefix(bytes);
  }
}

absl::StatusOr<std::string> BpeTokenizer::Decode(absl::Span<const int32_t> tokens) const {
  std::string text;
  for (size_t i = 0; i < tokens.size(); ++i) {
    const int32_t id = tokens[i];
    if (id < 0 || static_cast<size_t>(id) >= tokens_.size()) {
      return absl::InvalidArgumentError(absl::StrCat("token ", id, " at position ", i,
                                                     " is not one of ", parts_.name, ", which has ",
                                                     tokens_.size()));
    }
    const std::string& token = tokens_[static_cast<size_t>(id)];
    if (parts_.space.empty() || added_[static_cast<size_t>(id)]) {
      text += token;
    } else if (const int byte = FallbackByte(token); byte >= 0) {
      text.push_back(static_cast<char>(byte));
    } else {
      text += absl::StrReplaceAll(token, {{parts_.space, " "}});
    }
  }
  if (parts_.strip_first_space && !text.empty() && text[0] == ' ') text.erase(0, 1);
  return text;
}

}  // namespace muster::parallel
