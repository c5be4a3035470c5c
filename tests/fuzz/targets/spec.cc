#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/check.h"
#include "muster/v1/spec.pb.h"
#include "proto/spec/array.h"
#include "proto/spec/document.h"
#include "proto/spec/spec.h"
#include "tests/fuzz/targets/targets.h"

namespace muster::fuzz {

namespace {

// The tasks of an array, of which some are enough.
void ArrayYaml(const std::string& bytes) {
  constexpr size_t kTasksMax = 64;
  const absl::StatusOr<spec::NodePtr> root = spec::ParseDocument(bytes, "job.yaml");
  if (!root.ok()) return;
  const absl::StatusOr<std::optional<spec::ArrayTree>> array = spec::ReadArray(*root);
  if (!array.ok()) {
    CHECK(array.status().code() == absl::StatusCode::kInvalidArgument) << array.status();
    return;
  }
  if (!array->has_value() || (*array)->tasks.size() > kTasksMax) return;
  const auto tasks = spec::LoadTasks(bytes, "job.yaml", {}, "/work");
  if (!tasks.ok()) {
    CHECK(tasks.status().code() == absl::StatusCode::kInvalidArgument) << tasks.status();
    return;
  }
  const google::protobuf::RepeatedPtrField<v1::JobSpec> all(tasks->begin(), tasks->end());
  CHECK_OK(spec::ValidateArray(all));
}

}  // namespace

void SpecYaml(const std::string& bytes) {
  ArrayYaml(bytes);
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
