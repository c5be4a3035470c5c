#include "parallel/data/pre_tokenizer.h"

#include <cstdint>
#include <string>

#include "parallel/data/unicode.h"

namespace muster::parallel {
namespace {

// A position in valid UTF-8 with the class of the code point there; a class of kEnd at the end.
constexpr uint8_t kEnd = 128;
class Cursor {
 public:
  Cursor(absl::string_view text, size_t at)
      : classes_(CharClasses::Get()), begin_(text.data()), size_(text.size()) {
    MoveTo(at);
  }
  uint8_t of() const { return class_; }
  bool is(uint8_t classes) const { return (class_ & classes) != 0; }
  bool ended() const { return class_ == kEnd; }
  // [^\s\p{L}\p{N}]
  bool is_other() const { return (class_ & (kSpace | kLetter | kNumber | kEnd)) == 0; }
  char byte() const { return begin_[at_]; }
  size_t at() const { return at_; }
  void Next() { MoveTo(at_ + bytes_); }
  void MoveTo(size_t at) {
    at_ = at;
    if (at >= size_) {
      class_ = kEnd;
      bytes_ = 0;
      return;
    }
    const CodePoint c = DecodeUtf8(begin_ + at);
    class_ = classes_.Of(c.value);
    bytes_ = static_cast<size_t>(c.bytes);
  }
  void Skip(uint8_t classes) {
    while (is(classes)) Next();
  }

 private:
  const CharClasses& classes_;
  const char* const begin_;
  const size_t size_;
  size_t at_ = 0, bytes_ = 0;
  uint8_t class_ = kEnd;
};

// Bytes of 's, 't, 're, 've, 'm, 'll or 'd at the beginning of `text`, or 0. With `any_case` also
// in upper case, and with the long s (U+017F), which folds to s.
size_t Contraction(absl::string_view text, bool any_case) {
  if (text.size() < 2 || text[0] != '\'') return 0;
  const auto lower = [any_case](char c) {
    return any_case && c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c;
  };
  switch (lower(text[1])) {
    case 's':
    case 't':
    case 'm':
    case 'd':
      return 2;
    case 'r':
    case 'v':
      return text.size() > 2 && lower(text[2]) == 'e' ? 3 : 0;
    case 'l':
      return text.size() > 2 && lower(text[2]) == 'l' ? 3 : 0;
    default:
      break;
  }
  if (any_case && text.size() > 2 && text[1] == '\xc5' && text[2] == '\xbf') return 3;
  return 0;
}

// \s+(?!\S)|\s+ : a run of white space, without its last one where a word follows that takes it.
size_t Spaces(Cursor at) {
  size_t last = at.at();
  while (at.is(kSpace)) {
    last = at.at();
    at.Next();
  }
  return at.ended() || last == 0 ? at.at() : last;
}

size_t NextGpt2(absl::string_view text) {
  if (const size_t bytes = Contraction(text, /*any_case=*/false); bytes > 0) return bytes;
  Cursor at(text, 0);
  if (text[0] == ' ') at.Next();
  if (at.is(kLetter)) {
    at.Skip(kLetter);
    return at.at();
  }
  if (at.is(kNumber)) {
    at.Skip(kNumber);
    return at.at();
  }
  if (at.is_other()) {
    while (at.is_other()) at.Next();
    return at.at();
  }
  return Spaces(Cursor(text, 0));
}

//  ?[^\s\p{L}\p{N}]+ and line ends (with `slashes` also '/') behind; 0: no match.
size_t Punctuation(absl::string_view text, bool slashes) {
  Cursor at(text, 0);
  if (text[0] == ' ') at.Next();
  if (!at.is_other()) return 0;
  while (at.is_other()) at.Next();
  while (at.is(kLineEnd) || (slashes && !at.ended() && at.byte() == '/')) at.Next();
  return at.at();
}

// \s*[\r\n]+|\s+(?!\S)|\s+
size_t LinesOrSpaces(absl::string_view text) {
  Cursor at(text, 0);
  size_t behind_line_end = 0;
  while (at.is(kSpace)) {
    const bool line_end = at.is(kLineEnd);
    at.Next();
    if (line_end) behind_line_end = at.at();
  }
  return behind_line_end > 0 ? behind_line_end : Spaces(Cursor(text, 0));
}

size_t Digits(Cursor at, int most) {
  for (int i = 0; i < most && at.is(kNumber); ++i) at.Next();
  return at.at();
}

// \s++$ : white space up to the end of the text; 0: no match.
size_t SpacesAtEnd(absl::string_view text) {
  Cursor at(text, 0);
  at.Skip(kSpace);
  return at.ended() ? at.at() : 0;
}

size_t NextCl100k(absl::string_view text, int digits, bool end_is_one_pre_token) {
  if (const size_t bytes = Contraction(text, /*any_case=*/true); bytes > 0) return bytes;
  Cursor at(text, 0);
  // [^\r\n\p{L}\p{N}]?\p{L}+
  if (!at.is(kLineEnd | kLetter | kNumber)) at.Next();
  if (at.is(kLetter)) {
    at.Skip(kLetter);
    return at.at();
  }
  at.MoveTo(0);
  if (at.is(kNumber)) return Digits(at, digits);
  if (const size_t bytes = Punctuation(text, /*slashes=*/false); bytes > 0) return bytes;
  if (end_is_one_pre_token) {
    if (const size_t bytes = SpacesAtEnd(text); bytes > 0) return bytes;
  }
  return LinesOrSpaces(text);
}

// [^\r\n\p{L}\p{N}]?U*L+C?|[^\r\n\p{L}\p{N}]?U+L*C? with U = kUpperWord, L = kLowerWord and C a
// contraction in any case; 0: no match. Letters without case and marks are in both classes, and U*
// gives the last of them back where L+ needs one.
size_t CasedWord(absl::string_view text) {
  const auto word = [text](size_t begin) -> size_t {
    Cursor at(text, begin);
    size_t last_of_both = std::string::npos;  // the last one of U* that L+ could begin with
    while (at.is(kUpperWord)) {
      if (at.is(kLowerWord)) last_of_both = at.at();
      at.Next();
    }
    if (at.is(kLowerWord)) {
      at.Skip(kLowerWord);
    } else if (last_of_both != std::string::npos) {
      at.MoveTo(last_of_both);
      at.Skip(kLowerWord);
    } else {
      return 0;
    }
    return at.at();
  };
  const auto upper = [text](size_t begin) -> size_t {
    Cursor at(text, begin);
    if (!at.is(kUpperWord)) return 0;
    at.Skip(kUpperWord);
    at.Skip(kLowerWord);
    return at.at();
  };
  Cursor at(text, 0);
  size_t behind = 0;
  if (!at.is(kLineEnd | kLetter | kNumber)) {
    at.Next();
    behind = at.at();
  }
  // The optional character is taken first; a mark may be that character or part of the word.
  const auto match = [&](const auto& form) -> size_t {
    if (const size_t end = form(behind); end > 0) return end;
    return behind > 0 ? form(0) : 0;
  };
  size_t end = match(word);
  if (end == 0) end = match(upper);
  return end == 0 ? 0 : end + Contraction(text.substr(end), /*any_case=*/true);
}

size_t NextO200k(absl::string_view text) {
  if (const size_t bytes = CasedWord(text); bytes > 0) return bytes;
  const Cursor at(text, 0);
  if (at.is(kNumber)) return Digits(at, 3);
  if (const size_t bytes = Punctuation(text, /*slashes=*/true); bytes > 0) return bytes;
  return LinesOrSpaces(text);
}

// The classes of the character that ends at `at`; kSpace where it is not well-formed or the space
// mark U+2581, at which no text is cut.
uint8_t ClassesBefore(absl::string_view text, size_t at) {
  size_t begin = at - 1;
  while (begin > 0 && at - begin < 4 && (static_cast<uint8_t>(text[begin]) & 0xc0) == 0x80) --begin;
  if (!IsValidUtf8(text.substr(begin, at - begin))) return kSpace;
  const CodePoint c = DecodeUtf8(text.data() + begin);
  if (begin + static_cast<size_t>(c.bytes) != at || c.value == 0x2581) return kSpace;
  return CharClasses::Get().Of(c.value);
}

bool BeginsWithLetterOrNumber(absl::string_view text) {
  const absl::string_view first = text.substr(0, 4);
  for (size_t bytes = 1; bytes <= first.size(); ++bytes) {
    if (!IsValidUtf8(first.substr(0, bytes))) continue;
    return (CharClasses::Get().Of(DecodeUtf8(first.data()).value) & (kLetter | kNumber)) != 0;
  }
  return false;
}

}  // namespace

std::string RegexOf(SplitPattern pattern) {
  constexpr char kSpaces[] = R"(\s*[\r\n]+|\s+(?!\S)|\s+)";
  const std::string word = R"([^\r\n\p{L}\p{N}]?)";
  const std::string contraction = R"((?i:'s|'t|'re|'ve|'m|'ll|'d))";
  const std::string upper = R"([\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}])";
  const std::string lower = R"([\p{Ll}\p{Lm}\p{Lo}\p{M}])";
  switch (pattern) {
    case SplitPattern::kGpt2:
      return R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
    case SplitPattern::kCl100k:
    case SplitPattern::kQwen2:
      return contraction + "|" + word + R"(\p{L}+|\p{N})" +
             (pattern == SplitPattern::kCl100k ? "{1,3}" : "") + R"(| ?[^\s\p{L}\p{N}]+[\r\n]*|)" +
             kSpaces;
    case SplitPattern::kO200k:
      return word + upper + "*" + lower + "+" + contraction + "?|" + word + upper + "+" + lower +
             "*" + contraction + R"(?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|)" + kSpaces;
    case SplitPattern::kWhole:
    case SplitPattern::kCl100kRanks:
      break;
  }
  return "";
}

std::optional<SplitPattern> PatternOfRegex(absl::string_view regex) {
  for (SplitPattern pattern :
       {SplitPattern::kGpt2, SplitPattern::kCl100k, SplitPattern::kQwen2, SplitPattern::kO200k}) {
    if (regex == RegexOf(pattern)) return pattern;
  }
  return std::nullopt;
}

size_t LastCut(absl::string_view text, bool at_lines) {
  for (size_t at = text.size(); at-- > 1;) {
    // No pre-token has a space behind another character than white space.
    if (text[at] == ' ' && (ClassesBefore(text, at) & kSpace) == 0) return at;
    // Nor does one go on behind a line end with a letter or digit. More line ends in front would be
    // split differently at the end of a text.
    if (at_lines && at > 1 && text[at - 1] == '\n' && (ClassesBefore(text, at - 1) & kSpace) == 0 &&
        BeginsWithLetterOrNumber(text.substr(at))) {
      return at;
    }
  }
  return 0;
}

size_t NextPreToken(SplitPattern pattern, absl::string_view text) {
  switch (pattern) {
    case SplitPattern::kWhole:
      return text.size();
    case SplitPattern::kGpt2:
      return NextGpt2(text);
    case SplitPattern::kCl100k:
      return NextCl100k(text, 3, /*end_is_one_pre_token=*/false);
    case SplitPattern::kCl100kRanks:
      return NextCl100k(text, 3, /*end_is_one_pre_token=*/true);
    case SplitPattern::kQwen2:
      return NextCl100k(text, 1, /*end_is_one_pre_token=*/false);
    case SplitPattern::kO200k:
      return NextO200k(text);
  }
  return text.size();
}

}  // namespace muster::parallel
