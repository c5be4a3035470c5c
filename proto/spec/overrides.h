// Applies `--set key=value` to the tree of a spec before it is read as messages, so that a wrong
// override is reported like a wrong line of the file.
#ifndef MUSTER_PROTO_SPEC_OVERRIDES_H_
#define MUSTER_PROTO_SPEC_OVERRIDES_H_

#include <string>

#include "absl/status/statusor.h"
#include "google/protobuf/descriptor.h"
#include "proto/spec/document.h"

namespace muster::spec {

// Returns a copy of `root`, which is read as `type`, with an override such as "a.b[0].c=VALUE"
// applied. An index one past the last appends; the value `null` removes; setting a member of a
// oneof removes the other members. kInvalidArgument: not of that form, or a path through something
// that is no mapping or list.
absl::StatusOr<NodePtr> ApplyOverride(const NodePtr& root, const google::protobuf::Descriptor& type,
                                      const std::string& override_text);

}  // namespace muster::spec

#endif  // MUSTER_PROTO_SPEC_OVERRIDES_H_
