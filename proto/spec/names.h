// Names for people: short enum names ("running" for JOB_STATE_RUNNING), the nearest valid name to a
// misspelt one, quoted text. Needs only Protobuf.
#ifndef MUSTER_PROTO_SPEC_NAMES_H_
#define MUSTER_PROTO_SPEC_NAMES_H_

#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/generated_enum_reflection.h"

namespace muster::spec {

// The value's name in lower case, without the prefix that all values of its enum have:
// DEVICE_KIND_CPU of DeviceKind is "cpu".
std::string ShortEnumName(const google::protobuf::EnumValueDescriptor& value);

// The same for a generated enum; the number itself when the enum has no such value.
template <typename Enum>
std::string EnumName(Enum value) {
  const auto* found =
      google::protobuf::GetEnumDescriptor<Enum>()->FindValueByNumber(static_cast<int>(value));
  return found == nullptr ? std::to_string(static_cast<int>(value)) : ShortEnumName(*found);
}

// The value with that short name, or null. "unspecified" is never found.
const google::protobuf::EnumValueDescriptor* FindEnumValue(
    const google::protobuf::EnumDescriptor& descriptor, const std::string& short_name);

// The short names of all values but "unspecified", in order of declaration.
std::vector<std::string> EnumNames(const google::protobuf::EnumDescriptor& descriptor);

// The candidate with the smallest edit distance to `name` (insertions, deletions, substitutions and
// swaps of neighbours; case, '-' and '_' do not count); empty when none is near.
std::string NearestName(absl::string_view name, const std::vector<std::string>& candidates);

// `text` in single quotes with control characters escaped. A text longer than `length_max` bytes is
// cut between characters and its length added: 'aaaa...' (10485760 bytes).
std::string Quoted(absl::string_view text, size_t length_max = 80);

}  // namespace muster::spec

#endif  // MUSTER_PROTO_SPEC_NAMES_H_
