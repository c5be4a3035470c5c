#include "proto/spec/names.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace muster::spec {
namespace {

// "DeviceKind" -> "DEVICE_KIND_".
std::string ValuePrefix(const std::string& enum_name) {
  std::string prefix;
  for (size_t i = 0; i < enum_name.size(); ++i) {
    if (i > 0 && absl::ascii_isupper(enum_name[i])) prefix.push_back('_');
    prefix.push_back(absl::ascii_toupper(enum_name[i]));
  }
  return prefix + "_";
}

std::string Folded(absl::string_view name) {
  std::string folded;
  for (char c : name) {
    if (c != '_' && c != '-') folded.push_back(absl::ascii_tolower(c));
  }
  return folded;
}

// Optimal string alignment distance (insertions, deletions, substitutions, swaps of neighbours).
// Keeps three rows of the dynamic programming table.
size_t EditDistance(const std::string& a, const std::string& b) {
  std::vector<size_t> before_last(b.size() + 1), last(b.size() + 1), row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) last[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        row[j] = std::min(row[j], before_last[j - 2] + 1);
      }
    }
    std::swap(before_last, last);
    std::swap(last, row);
  }
  return last[b.size()];
}

}  // namespace

std::string ShortEnumName(const google::protobuf::EnumValueDescriptor& value) {
  const std::string prefix = ValuePrefix(value.type()->name());
  std::string name = value.name();
  if (name.size() > prefix.size() && name.compare(0, prefix.size(), prefix) == 0) {
    name = name.substr(prefix.size());
  }
  return absl::AsciiStrToLower(name);
}

std::vector<std::string> EnumNames(const google::protobuf::EnumDescriptor& descriptor) {
  std::vector<std::string> names;
  for (int i = 0; i < descriptor.value_count(); ++i) {
    if (descriptor.value(i)->number() != 0) names.push_back(ShortEnumName(*descriptor.value(i)));
  }
  return names;
}

const google::protobuf::EnumValueDescriptor* FindEnumValue(
    const google::protobuf::EnumDescriptor& descriptor, const std::string& short_name) {
  for (int i = 0; i < descriptor.value_count(); ++i) {
    const auto* value = descriptor.value(i);
    if (value->number() != 0 && ShortEnumName(*value) == short_name) return value;
  }
  return nullptr;
}

std::string NearestName(absl::string_view name, const std::vector<std::string>& candidates) {
  constexpr size_t kLengthMax = 128;  // bounds the quadratic table; no name is longer
  if (name.empty() || name.size() > kLengthMax) return "";
  const std::string wanted = Folded(name);
  std::string nearest;
  size_t smallest = std::max<size_t>(1, wanted.size() / 3) + 1;
  for (const std::string& candidate : candidates) {
    if (candidate.size() > kLengthMax) continue;
    const size_t distance = EditDistance(wanted, Folded(candidate));
    // Not as many changes as the candidate has letters: "x" is no misspelling of "lr".
    if (distance < smallest && distance < candidate.size()) {
      smallest = distance;
      nearest = candidate;
    }
  }
  return nearest;
}

std::string Quoted(absl::string_view text, size_t length_max) {
  size_t length = text.size();
  if (length > length_max) {
    length = length_max;
    while (length > 0 && (static_cast<unsigned char>(text[length]) & 0xC0) == 0x80) --length;
  }
  std::string out = "'";
  for (char c : text.substr(0, length)) {
    if (c == '\n') {
      out += "\\n";
    } else if (c == '\t') {
      out += "\\t";
    } else if (absl::ascii_iscntrl(static_cast<unsigned char>(c))) {
      absl::StrAppendFormat(&out, "\\x%02x", static_cast<unsigned char>(c));
    } else {
      out.push_back(c);
    }
  }
  if (length == text.size()) return out + "'";
  return absl::StrCat(out, "...' (", text.size(), " bytes)");
}

}  // namespace muster::spec
