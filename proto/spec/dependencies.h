// What an entry of JobSpec.after says.
#ifndef MUSTER_PROTO_SPEC_DEPENDENCIES_H_
#define MUSTER_PROTO_SPEC_DEPENDENCIES_H_

#include <optional>
#include <string>

#include "muster/v1/schedule.pb.h"
#include "muster/v1/spec.pb.h"

namespace muster::spec {

struct ParsedDependency {
  std::string job;  // name or id
  v1::EndCondition condition = v1::END_CONDITION_UNSPECIFIED;
};
// "NAME:succeeded", "NAME:failed" or "NAME:ended"; no value for other text.
std::optional<ParsedDependency> ParseDependency(const std::string& text);

}  // namespace muster::spec

#endif  // MUSTER_PROTO_SPEC_DEPENDENCIES_H_
