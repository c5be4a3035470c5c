#include "parallel/data/unicode.h"

#include <utf8proc.h>

#include <cstdlib>
#include <memory>

#include "absl/strings/str_cat.h"

namespace muster::parallel {
namespace {

// White_Space of Unicode's PropList: neither a general category nor a bidirectional class says it.
bool IsWhiteSpace(uint32_t c) {
  return (c >= 0x09 && c <= 0x0d) || c == 0x20 || c == 0x85 || c == 0xa0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f ||
         c == 0x3000;
}

uint8_t Classify(uint32_t c) {
  uint8_t classes = 0;
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(c))) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LT:
      classes = kLetter | kUpperWord;
      break;
    case UTF8PROC_CATEGORY_LL:
      classes = kLetter | kLowerWord;
      break;
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
      classes = kLetter | kUpperWord | kLowerWord;
      break;
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
      classes = kUpperWord | kLowerWord;
      break;
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_NO:
      classes = kNumber;
      break;
    default:
      break;
  }
  if (IsWhiteSpace(c)) classes |= kSpace;
  if (c == '\r' || c == '\n') classes |= kLineEnd;
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

}  // namespace

CharClasses::CharClasses() {
  for (uint32_t c = 0; c < kCodePoints; ++c) table_[c] = Classify(c);
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

absl::StatusOr<std::string> Normalize(absl::string_view text, NormalForm form) {
  int options = UTF8PROC_STABLE;
  options |=
      form == NormalForm::kNfc || form == NormalForm::kNfkc ? UTF8PROC_COMPOSE : UTF8PROC_DECOMPOSE;
  if (form == NormalForm::kNfkc || form == NormalForm::kNfkd) options |= UTF8PROC_COMPAT;
  utf8proc_uint8_t* result = nullptr;
  const utf8proc_ssize_t length = utf8proc_map(
      reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
      static_cast<utf8proc_ssize_t>(text.size()), &result, static_cast<utf8proc_option_t>(options));
  if (length < 0) {
    return absl::InternalError(absl::StrCat("normalization: ", utf8proc_errmsg(length)));
  }
  const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> owner(result, &std::free);
  return std::string(reinterpret_cast<const char*>(result), static_cast<size_t>(length));
}

}  // namespace muster::parallel
