// From text to a JobSpec that can be run: strict parsing, defaults, checks. Every field is found by
// walking the messages of spec.proto, so a new field needs no parser change.
#ifndef MUSTER_PROTO_SPEC_SPEC_H_
#define MUSTER_PROTO_SPEC_SPEC_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "muster/v1/spec.pb.h"

namespace muster::spec {

// YAML or JSON text (JSON is read as YAML). kInvalidArgument: every problem found, one per line, as
// "FILE:LINE:COLUMN: engine.model.heads: expected a whole number, got 'six'", unknown fields with
// the nearest valid name. `file` is used in messages only. `overrides` are
// "engine.training.steps=100"; the value is YAML; an override wins over the file. At most 1 MiB of
// text, nesting 64.
absl::StatusOr<v1::JobSpec> Parse(const std::string& text, const std::string& file,
                                  const std::vector<std::string>& overrides);

// Fills in every default that spec.proto documents. Idempotent.
void ApplyDefaults(v1::JobSpec& spec);

// After ApplyDefaults. kInvalidArgument names each wrong field, its value and the rule, e.g.
// "engine.model.heads: 5 does not divide hidden (192)". Pure; needs no cluster.
absl::Status Validate(const v1::JobSpec& spec);

// The spec as YAML in file order of the fields; Parse(ToYaml(s)) == s.
std::string ToYaml(const v1::JobSpec& spec);

}  // namespace muster::spec

#endif  // MUSTER_PROTO_SPEC_SPEC_H_
