// Private to proto/spec: the checks of values that several rules of the job spec share.
#ifndef MUSTER_PROTO_SPEC_CHECKER_H_
#define MUSTER_PROTO_SPEC_CHECKER_H_

#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "muster/v1/spec.pb.h"
#include "proto/spec/spec.h"

namespace muster::spec {

// Collects the broken rules of one spec. Each check returns true when its rule holds, and else adds
// a problem for the field at `path`.
class Checker {
 public:
  template <typename... Parts>
  void Add(absl::string_view path, const Parts&... parts) {
    problems_.push_back({std::string(path), absl::StrCat(parts...)});
  }

  // A whole number in [low, high]; 0 below `low` is reported as a missing field.
  bool InRange(absl::string_view path, int64_t value, int64_t low,
               int64_t high = std::numeric_limits<int64_t>::max());
  bool NotNegative(absl::string_view path, int64_t value);
  bool NotNegative(absl::string_view path, double value);
  bool Positive(absl::string_view path, double value);
  bool Finite(absl::string_view path, double value);
  // Text that can be a path: not too long, no control characters.
  bool PathText(absl::string_view path, const std::string& value);
  // A required path; a relative one needs the spec's working_directory.
  bool Path(absl::string_view path, const std::string& value, const v1::JobSpec& spec);

  std::vector<Problem>& problems() { return problems_; }

 private:
  std::vector<Problem> problems_;
};

// The rules of engine, which the spec must have.
void CheckEngine(const v1::JobSpec& spec, Checker& checker);
// The rules of array_task, which the spec must have.
void CheckArrayTask(const v1::JobSpec& spec, Checker& checker);
// The rules of command and env. Requires: spec.command_size() > 0.
void CheckCommand(const v1::JobSpec& spec, Checker& checker);

}  // namespace muster::spec

#endif  // MUSTER_PROTO_SPEC_CHECKER_H_
