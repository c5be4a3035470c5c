#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/check.h"
#include "muster/v1/spec.pb.h"
#include "proto/spec/spec.h"
#include "tests/fuzz/targets/targets.h"

namespace muster::fuzz {

void SpecYaml(const std::string& bytes) {
  const absl::StatusOr<v1::JobSpec> loaded = spec::Load(bytes, "job.yaml", {}, "/work");
  if (!loaded.ok()) {
    CHECK(loaded.status().code() == absl::StatusCode::kInvalidArgument) << loaded.status();
    return;
  }
  const absl::StatusOr<v1::JobSpec> again = spec::Parse(spec::ToYaml(*loaded), "again.yaml", {});
  CHECK(again.ok()) << again.status();
  CHECK(again->SerializeAsString() == loaded->SerializeAsString()) << spec::ToYaml(*loaded);
}

void SpecProto(const std::string& bytes) {
  v1::JobSpec spec;
  if (!spec.ParseFromString(bytes)) return;
  spec::ApplyDefaults(spec);
  if (!spec::Validate(spec).ok()) return;
  // What is valid has all defaults already, and its layout can be computed.
  const std::string before = spec.SerializeAsString();
  spec::ApplyDefaults(spec);
  CHECK(spec.SerializeAsString() == before) << spec.ShortDebugString();
  const absl::StatusOr<v1::JobSpec> again = spec::Parse(spec::ToYaml(spec), "again.yaml", {});
  CHECK(again.ok()) << again.status();
}

}  // namespace muster::fuzz
