// `--set key=value` applied to the tree of a spec, before it is read as messages: a wrong override
// is reported like a wrong line of the file.
#ifndef MUSTER_PROTO_SPEC_OVERRIDES_H_
#define MUSTER_PROTO_SPEC_OVERRIDES_H_

#include <string>

#include "absl/status/statusor.h"
#include "google/protobuf/descriptor.h"
#include "proto/spec/document.h"

namespace muster::spec {

// `root` (of message type `type`) with `override` applied: "a.b[0].c=VALUE". An index may be one
// past the last, which appends; `null` removes; naming a member of a oneof removes the other
// members. kInvalidArgument: not of that form, or a path through something that is not a mapping or
// list. `root` itself is not changed.
absl::StatusOr<NodePtr> ApplyOverride(const NodePtr& root, const google::protobuf::Descriptor& type,
                                      const std::string& override_text);

}  // namespace muster::spec

#endif  // MUSTER_PROTO_SPEC_OVERRIDES_H_
