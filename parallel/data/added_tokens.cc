#include "parallel/data/added_tokens.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "parallel/data/unicode.h"

namespace muster::parallel {
namespace {

uint32_t Before(absl::string_view text, size_t at) {
  size_t begin = at - 1;
  while (begin > 0 && (static_cast<uint8_t>(text[begin]) & 0xc0) == 0x80) --begin;
  return DecodeUtf8(text.data() + begin).value;
}

size_t TwoBytes(char first, char second) {
  return static_cast<size_t>(static_cast<uint8_t>(first)) << 8 | static_cast<uint8_t>(second);
}

}  // namespace

AddedTokens::AddedTokens(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)) {
  for (size_t i = 0; i < tokens_.size(); ++i) {
    const std::string& content = tokens_[i].content;
    by_content_[content] = i;
    lengths_.push_back(content.size());
    if (content.size() > 1) {
      begins_.set(TwoBytes(content[0], content[1]));
    } else {
      for (int second = 0; second < 256; ++second) {
        begins_.set(TwoBytes(content[0], static_cast<char>(second)));
      }
    }
  }
  std::sort(lengths_.begin(), lengths_.end(), std::greater<>());
  lengths_.erase(std::unique(lengths_.begin(), lengths_.end()), lengths_.end());
}

const AddedToken* AddedTokens::LongestAt(absl::string_view text) const {
  // The last byte of a text is looked up with any second one.
  if (!begins_.test(TwoBytes(text[0], text.size() > 1 ? text[1] : '\0'))) return nullptr;
  for (size_t length : lengths_) {
    if (length > text.size()) continue;
    const auto found = by_content_.find(text.substr(0, length));
    if (found != by_content_.end()) return &tokens_[found->second];
  }
  return nullptr;
}

AddedTokens::Match AddedTokens::Find(absl::string_view text, size_t from, size_t done) const {
  const CharClasses& classes = CharClasses::Get();
  const auto space = [&classes](uint32_t c) { return (classes.Of(c) & kSpace) != 0; };
  const auto word = [&classes](uint32_t c) { return (classes.Of(c) & kWord) != 0; };
  for (size_t at = from; at < text.size(); ++at) {
    const AddedToken* token = LongestAt(text.substr(at));
    if (token == nullptr) continue;
    Match match = {at, at + token->content.size(), at + token->content.size(), token};
    if (token->single_word &&
        ((at > 0 && word(Before(text, at))) ||
         (match.end < text.size() && word(DecodeUtf8(text.data() + match.end).value)))) {
      at = match.end - 1;
      continue;
    }
    while (token->strip_left && match.begin > done && space(Before(text, match.begin))) {
      do --match.begin;
      while ((static_cast<uint8_t>(text[match.begin]) & 0xc0) == 0x80);
    }
    while (token->strip_right && match.end < text.size()) {
      const CodePoint next = DecodeUtf8(text.data() + match.end);
      if (!space(next.value)) break;
      match.end += static_cast<size_t>(next.bytes);
    }
    return match;
  }
  return {};
}

}  // namespace muster::parallel
