#include "parallel/data/character_map.h"

#include <cstring>

#include "absl/strings/str_cat.h"

namespace muster::parallel {
namespace {

// A unit of the double array: the byte that leads to it, whether a string ends there, and where its
// children are. The unit of a value has its highest bit set, and so never the label of a byte.
uint32_t LabelOf(uint32_t unit) { return unit & (1u << 31 | 0xff); }
bool Ends(uint32_t unit) { return (unit >> 8 & 1) != 0; }
uint32_t OffsetOf(uint32_t unit) { return unit >> 10 << ((unit & 1u << 9) >> 6); }
uint32_t ValueOf(uint32_t unit) { return unit & ~(1u << 31); }

uint32_t Load(const char* bytes) {
  uint32_t value = 0;
  for (int i = 3; i >= 0; --i) value = value << 8 | static_cast<uint8_t>(bytes[i]);
  return value;
}

}  // namespace

absl::StatusOr<CharacterMap> CharacterMap::Parse(absl::string_view blob) {
  CharacterMap map;
  if (blob.empty()) return map;
  const size_t bytes = blob.size() < 4 ? 0 : Load(blob.data());
  if (bytes == 0 || bytes % 4 != 0 || bytes > blob.size() - 4) {
    return absl::InvalidArgumentError(
        absl::StrCat("the precompiled_charsmap of ", blob.size(), " bytes is damaged"));
  }
  for (size_t at = 4; at < 4 + bytes; at += 4) map.units_.push_back(Load(blob.data() + at));
  map.replacements_ = std::string(blob.substr(4 + bytes));
  map.replacements_.push_back('\0');
  return map;
}

template <typename Found>
bool CharacterMap::Walk(absl::string_view text, Found found) const {
  if (units_.empty()) return false;
  uint32_t at = OffsetOf(units_[0]);
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<uint8_t>(text[i]);
    at ^= byte;
    // A zero byte is the label of values.
    if (byte == 0 || at >= units_.size() || LabelOf(units_[at]) != byte) return false;
    const bool ends = Ends(units_[at]);
    at ^= OffsetOf(units_[at]);
    if (!ends) continue;
    if (at >= units_.size()) return false;
    if (!found(i + 1, ValueOf(units_[at]))) return true;
  }
  return true;
}

absl::string_view CharacterMap::ReplacementAt(uint32_t offset) const {
  return offset < replacements_.size() ? absl::string_view(replacements_.c_str() + offset)
                                       : absl::string_view();
}

CharacterMap::Match CharacterMap::Longest(absl::string_view text) const {
  Match match;
  uint32_t longest = 0;
  Walk(text, [&](size_t bytes, uint32_t value) {
    // Within a code point nothing ends, whatever a damaged table says.
    if (bytes == text.size() || (static_cast<uint8_t>(text[bytes]) & 0xc0) != 0x80) {
      match.bytes = bytes;
      longest = value;
    }
    return true;
  });
  if (match.bytes > 0) match.replacement = ReplacementAt(longest);
  return match;
}

CharacterMap::Match CharacterMap::Shortest(absl::string_view text) const {
  Match match;
  Walk(text, [&](size_t bytes, uint32_t value) {
    match = {bytes, ReplacementAt(value)};
    return false;
  });
  return match;
}

bool CharacterMap::HasPrefix(absl::string_view text) const {
  return Walk(text, [](size_t, uint32_t) { return true; });
}

}  // namespace muster::parallel
