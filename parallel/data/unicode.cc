#include "parallel/data/unicode.h"

#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace muster::parallel {
namespace {

// White_Space of Unicode's PropList: neither a general category nor a bidirectional class says it.
bool IsWhiteSpace(uint32_t c) {
  return (c >= 0x09 && c <= 0x0d) || c == 0x20 || c == 0x85 || c == 0xa0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f ||
         c == 0x3000;
}

constexpr uint8_t kUpper = kLetter | kUpperWord | kWord;
constexpr uint8_t kLower = kLetter | kLowerWord | kWord;
constexpr uint8_t kOther = kLetter | kUpperWord | kLowerWord | kWord;  // letters without case
constexpr uint8_t kMark = kUpperWord | kLowerWord | kWord;
constexpr uint8_t kDigit = kNumber | kWord;

// Letters, marks and digits of Unicode 15.1 and 16.
constexpr struct {
  uint32_t first, last;
  uint8_t classes;
} kLater[] = {
    {0x897, 0x897, kMark},      {0x1c89, 0x1c89, kUpper},   {0x1c8a, 0x1c8a, kLower},
    {0xa7cb, 0xa7cc, kUpper},   {0xa7cd, 0xa7cd, kLower},   {0xa7da, 0xa7da, kUpper},
    {0xa7db, 0xa7db, kLower},   {0xa7dc, 0xa7dc, kUpper},   {0x105c0, 0x105f3, kOther},
    {0x10d40, 0x10d49, kDigit}, {0x10d4a, 0x10d4f, kOther}, {0x10d50, 0x10d65, kUpper},
    {0x10d69, 0x10d6d, kMark},  {0x10d6f, 0x10d6f, kOther}, {0x10d70, 0x10d85, kLower},
    {0x10ec2, 0x10ec4, kOther}, {0x10efc, 0x10efc, kMark},  {0x11380, 0x11389, kOther},
    {0x1138b, 0x1138b, kOther}, {0x1138e, 0x1138e, kOther}, {0x11390, 0x113b5, kOther},
    {0x113b7, 0x113b7, kOther}, {0x113b8, 0x113c0, kMark},  {0x113c2, 0x113c2, kMark},
    {0x113c5, 0x113c5, kMark},  {0x113c7, 0x113ca, kMark},  {0x113cc, 0x113d0, kMark},
    {0x113d1, 0x113d1, kOther}, {0x113d2, 0x113d2, kMark},  {0x113d3, 0x113d3, kOther},
    {0x113e1, 0x113e2, kMark},  {0x116d0, 0x116e3, kDigit}, {0x11bc0, 0x11be0, kOther},
    {0x11bf0, 0x11bf9, kDigit}, {0x11f5a, 0x11f5a, kMark},  {0x13460, 0x143fa, kOther},
    {0x16100, 0x1611d, kOther}, {0x1611e, 0x1612f, kMark},  {0x16130, 0x16139, kDigit},
    {0x16d40, 0x16d6c, kOther}, {0x16d70, 0x16d79, kDigit}, {0x18cff, 0x18cff, kOther},
    {0x1ccf0, 0x1ccf9, kDigit}, {0x1e5d0, 0x1e5ed, kOther}, {0x1e5ee, 0x1e5ef, kMark},
    {0x1e5f0, 0x1e5f0, kOther}, {0x1e5f1, 0x1e5fa, kDigit}, {0x2ebf0, 0x2ee5d, kOther},
};

// Alphabetic characters that are symbols by their category: letters in circles and squares.
bool IsEnclosedLetter(uint32_t c) {
  return (c >= 0x24b6 && c <= 0x24e9) || (c >= 0x1f130 && c <= 0x1f149) ||
         (c >= 0x1f150 && c <= 0x1f169) || (c >= 0x1f170 && c <= 0x1f189);
}

uint8_t Classify(uint32_t c) {
  uint8_t classes = 0;
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(c))) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LT:
      classes = kUpper;
      break;
    case UTF8PROC_CATEGORY_LL:
      classes = kLower;
      break;
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
      classes = kOther;
      break;
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
      classes = kMark;
      break;
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
      classes = kDigit;
      break;
    case UTF8PROC_CATEGORY_NO:
      classes = kNumber;
      break;
    case UTF8PROC_CATEGORY_PC:
      classes = kWord;
      break;
    default:
      break;
  }
  if (IsWhiteSpace(c)) classes |= kSpace;
  if (c == '\r' || c == '\n') classes |= kLineEnd;
  if (c == 0x200c || c == 0x200d || IsEnclosedLetter(c)) classes |= kWord;
  return classes;
}

// The length of the well-formed code point at the beginning of `text`, or 0; then *bad is the
// length of the maximal ill-formed subpart. Table 3-7 of the Unicode standard.
size_t WellFormed(absl::string_view text, size_t* bad) {
  const auto byte = [text](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t first = byte(0);
  if (first < 0x80) return 1;
  *bad = 1;
  size_t length = 0;
  uint8_t low = 0x80, high = 0xbf;  // of the second byte
  if (first >= 0xc2 && first <= 0xdf) {
    length = 2;
  } else if (first >= 0xe0 && first <= 0xef) {
    length = 3;
    if (first == 0xe0) low = 0xa0;
    if (first == 0xed) high = 0x9f;
  } else if (first >= 0xf0 && first <= 0xf4) {
    length = 4;
    if (first == 0xf0) low = 0x90;
    if (first == 0xf4) high = 0x8f;
  } else {
    return 0;
  }
  for (size_t i = 1; i < length; ++i) {
    if (i >= text.size() || byte(i) < low || byte(i) > high) return 0;
    *bad = i + 1;
    low = 0x80;
    high = 0xbf;
  }
  return length;
}

// Code points that decompose or combine only in versions of Unicode behind 9.
constexpr struct {
  uint32_t first, last;
} kInert[] = {{0x7fd, 0x7fd},     {0x898, 0x89f},     {0x8ca, 0x8d3},     {0x9fe, 0x9fe},
              {0xc3c, 0xc3c},     {0xd3b, 0xd3c},     {0xeba, 0xeba},     {0x1715, 0x1715},
              {0x1abf, 0x1ace},   {0x1df6, 0x1dfa},   {0x32ff, 0x32ff},   {0xa7f2, 0xa7f4},
              {0xa82c, 0xa82c},   {0xab69, 0xab69},   {0x10781, 0x10785}, {0x10787, 0x107b0},
              {0x107b2, 0x107ba}, {0x10d24, 0x10d27}, {0x10eab, 0x10eac}, {0x10efd, 0x10eff},
              {0x10f46, 0x10f50}, {0x10f82, 0x10f85}, {0x11070, 0x11070}, {0x1133b, 0x1133b},
              {0x1145e, 0x1145e}, {0x11839, 0x1183a}, {0x11930, 0x11930}, {0x11938, 0x11938},
              {0x1193d, 0x1193e}, {0x11943, 0x11943}, {0x119e0, 0x119e0}, {0x11a34, 0x11a34},
              {0x11a47, 0x11a47}, {0x11a99, 0x11a99}, {0x11d42, 0x11d42}, {0x11d44, 0x11d45},
              {0x11d97, 0x11d97}, {0x11f41, 0x11f42}, {0x16ff0, 0x16ff1}, {0x1e030, 0x1e06d},
              {0x1e08f, 0x1e08f}, {0x1e130, 0x1e136}, {0x1e2ae, 0x1e2ae}, {0x1e2ec, 0x1e2ef},
              {0x1e4ec, 0x1e4ef}, {0x1f16c, 0x1f16c}, {0x1fbf0, 0x1fbf9}};

bool IsInert(uint32_t c) {
  if (c < kInert[0].first) return false;
  const auto* const range =
      std::lower_bound(std::begin(kInert), std::end(kInert), c,
                       [](const auto& each, uint32_t value) { return each.last < value; });
  return range != std::end(kInert) && c >= range->first;
}

// Whether text of such code points alone is in Normalization Form C.
bool IsComposed(uint32_t c) {
  return c < 0x300 || (c >= 0x3400 && c <= 0x4dbf) || (c >= 0x4e00 && c <= 0x9fff) ||
         (c >= 0xac00 && c <= 0xd7a3) || (c >= 0x3001 && c <= 0x3029) ||
         (c >= 0xff01 && c <= 0xffef);
}

bool IsAscii(char c) { return static_cast<uint8_t>(c) < 0x80; }

absl::Status NormalizePart(absl::string_view text, int options, std::string& out) {
  if (text.empty()) return absl::OkStatus();
  utf8proc_uint8_t* result = nullptr;
  const utf8proc_ssize_t length = utf8proc_map(
      reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
      static_cast<utf8proc_ssize_t>(text.size()), &result, static_cast<utf8proc_option_t>(options));
  if (length < 0) {
    return absl::InternalError(absl::StrCat("normalization: ", utf8proc_errmsg(length)));
  }
  const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> owner(result, &std::free);
  out.append(reinterpret_cast<const char*>(result), static_cast<size_t>(length));
  return absl::OkStatus();
}

// Inert code points stay as they are, and nothing combines across them.
absl::Status NormalizeRun(absl::string_view text, int options, std::string& out) {
  size_t begin = 0;
  for (size_t at = 0; at < text.size();) {
    const CodePoint c = DecodeUtf8(text.data() + at);
    const size_t next = at + static_cast<size_t>(c.bytes);
    if (IsInert(c.value)) {
      RETURN_IF_ERROR(NormalizePart(text.substr(begin, at - begin), options, out));
      out.append(text.data() + at, next - at);
      begin = next;
    }
    at = next;
  }
  return NormalizePart(text.substr(begin), options, out);
}

}  // namespace

CharClasses::CharClasses() {
  for (uint32_t c = 0; c < kCodePoints; ++c) table_[c] = Classify(c);
  for (const auto& range : kLater) {
    for (uint32_t c = range.first; c <= range.last; ++c) table_[c] = range.classes;
  }
}

const CharClasses& CharClasses::Get() {
  static const auto* const classes = new CharClasses();
  return *classes;
}

void AppendUtf8(uint32_t c, std::string& out) {
  if (c < 0x80) {
    out.push_back(static_cast<char>(c));
  } else if (c < 0x800) {
    out.push_back(static_cast<char>(0xc0 | c >> 6));
    out.push_back(static_cast<char>(0x80 | (c & 0x3f)));
  } else if (c < 0x10000) {
    out.push_back(static_cast<char>(0xe0 | c >> 12));
    out.push_back(static_cast<char>(0x80 | (c >> 6 & 0x3f)));
    out.push_back(static_cast<char>(0x80 | (c & 0x3f)));
  } else {
    out.push_back(static_cast<char>(0xf0 | c >> 18));
    out.push_back(static_cast<char>(0x80 | (c >> 12 & 0x3f)));
    out.push_back(static_cast<char>(0x80 | (c >> 6 & 0x3f)));
    out.push_back(static_cast<char>(0x80 | (c & 0x3f)));
  }
}

bool IsValidUtf8(absl::string_view text) {
  size_t bad = 0;
  while (!text.empty()) {
    // Eight bytes of ASCII at a time.
    uint64_t word = 0;
    while (text.size() >= sizeof(word)) {
      std::memcpy(&word, text.data(), sizeof(word));
      if ((word & 0x8080808080808080u) != 0) break;
      text.remove_prefix(sizeof(word));
    }
    if (text.empty()) return true;
    const size_t length = WellFormed(text, &bad);
    if (length == 0) return false;
    text.remove_prefix(length);
  }
  return true;
}

std::string ToValidUtf8(absl::string_view text) {
  std::string valid;
  valid.reserve(text.size());
  while (!text.empty()) {
    size_t bad = 0;
    const size_t length = WellFormed(text, &bad);
    if (length == 0) {
      valid += "\xef\xbf\xbd";
    } else {
      valid.append(text.data(), length);
    }
    text.remove_prefix(length == 0 ? bad : length);
  }
  return valid;
}

std::string ReplaceIllFormedBytes(absl::string_view text) {
  std::string valid;
  valid.reserve(text.size());
  while (!text.empty()) {
    size_t bad = 0;
    const size_t length = WellFormed(text, &bad);
    if (length == 0) {
      valid += "\xef\xbf\xbd";
    } else {
      valid.append(text.data(), length);
    }
    text.remove_prefix(std::max<size_t>(length, 1));
  }
  return valid;
}

namespace {

// What Unicode 15.1, 16 and 17 have added to those that extend a grapheme (Grapheme_Cluster_Break
// Extend and SpacingMark): the data of Debian 12's utf8proc is of version 15, that of tokenizers
// 0.23 of 17. Both ends of a range are in it.
constexpr std::array<std::pair<uint32_t, uint32_t>, 20> kAddedExtenders = {{
    {0x897, 0x897},     {0x1acf, 0x1add},   {0x1ae0, 0x1aeb},   {0x10d69, 0x10d6d},
    {0x10efa, 0x10efc}, {0x113b8, 0x113c0}, {0x113c2, 0x113c2}, {0x113c5, 0x113c5},
    {0x113c7, 0x113ca}, {0x113cc, 0x113d0}, {0x113d2, 0x113d2}, {0x113e1, 0x113e2},
    {0x11b60, 0x11b67}, {0x11f5a, 0x11f5a}, {0x1611e, 0x1612f}, {0x1e5ee, 0x1e5ef},
    {0x1e6e3, 0x1e6e3}, {0x1e6e6, 0x1e6e6}, {0x1e6ee, 0x1e6ef}, {0x1e6f5, 0x1e6f5},
}};

// The code point, or an old one of the same kind.
utf8proc_int32_t KnownToLibrary(uint32_t point) {
  constexpr utf8proc_int32_t kExtender = 0x300;
  const auto* const range = std::find_if(kAddedExtenders.begin(), kAddedExtenders.end(),
                                         [point](const auto& one) { return point <= one.second; });
  const bool added = range != kAddedExtenders.end() && point >= range->first;
  return added ? kExtender : static_cast<utf8proc_int32_t>(point);
}

}  // namespace

size_t FirstGrapheme(absl::string_view text) {
  CodePoint last = DecodeUtf8(text.data());
  auto bytes = static_cast<size_t>(last.bytes);
  for (utf8proc_int32_t state = 0; bytes < text.size();) {
    const CodePoint next = DecodeUtf8(text.data() + bytes);
    if (utf8proc_grapheme_break_stateful(KnownToLibrary(last.value), KnownToLibrary(next.value),
                                         &state)) {
      break;
    }
    bytes += static_cast<size_t>(next.bytes);
    last = next;
  }
  return bytes;
}

absl::StatusOr<std::string> Normalize(absl::string_view text, NormalForm form) {
  int options = UTF8PROC_STABLE;
  options |=
      form == NormalForm::kNfc || form == NormalForm::kNfkc ? UTF8PROC_COMPOSE : UTF8PROC_DECOMPOSE;
  if (form == NormalForm::kNfkc || form == NormalForm::kNfkd) options |= UTF8PROC_COMPAT;
  std::string normal;
  normal.reserve(text.size());
  for (size_t at = 0; at < text.size();) {
    size_t begin = at;
    while (begin < text.size() && IsAscii(text[begin])) ++begin;
    size_t end = begin;
    bool composed = form == NormalForm::kNfc;
    while (end < text.size() && !IsAscii(text[end])) {
      const CodePoint c = DecodeUtf8(text.data() + end);
      composed = composed && IsComposed(c.value);
      end += static_cast<size_t>(c.bytes);
    }
    // What follows an ASCII character may combine with it.
    if (begin > at && begin < end) --begin;
    normal.append(text.data() + at, begin - at);
    if (composed) {
      normal.append(text.data() + begin, end - begin);
    } else {
      RETURN_IF_ERROR(NormalizeRun(text.substr(begin, end - begin), options, normal));
    }
    at = end;
  }
  return normal;
}

}  // namespace muster::parallel
