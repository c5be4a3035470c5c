#include "proto/spec/checker.h"

#include <cmath>

#include "absl/strings/ascii.h"
#include "proto/spec/names.h"

namespace muster::spec {
namespace {

constexpr size_t kPathBytesMax = 4096;

}  // namespace

bool Checker::InRange(absl::string_view path, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return true;
  if (high == std::numeric_limits<int64_t>::max() || high == std::numeric_limits<int32_t>::max()) {
    Add(path, value == 0 ? "required; " : absl::StrCat(value, " is too small; "), "at least ", low);
  } else {
    Add(path, value == 0 ? "required" : absl::StrCat(value, " is out of range"), "; ", low, " to ",
        high);
  }
  return false;
}

bool Checker::NotNegative(absl::string_view path, int64_t value) {
  if (value >= 0) return true;
  Add(path, value, " is negative");
  return false;
}

bool Checker::Finite(absl::string_view path, double value) {
  if (std::isfinite(value)) return true;
  Add(path, value, " is not a finite number");
  return false;
}
bool Checker::NotNegative(absl::string_view path, double value) {
  if (!Finite(path, value)) return false;
  if (value >= 0) return true;
  Add(path, value, " is negative");
  return false;
}
bool Checker::Positive(absl::string_view path, double value) {
  if (!Finite(path, value)) return false;
  if (value > 0) return true;
  Add(path, value, " is not larger than 0");
  return false;
}

bool Checker::Path(absl::string_view path, const std::string& value, const v1::JobSpec& spec) {
  if (value.empty()) {
    Add(path, "required");
    return false;
  }
  if (!PathText(path, value)) return false;
  if (value[0] == '/' || !spec.working_directory().empty()) return true;
  Add(path, Quoted(value), " is relative, but working_directory is not set");
  return false;
}

bool Checker::PathText(absl::string_view path, const std::string& value) {
  if (value.size() > kPathBytesMax) {
    Add(path, Quoted(value), " is longer than ", kPathBytesMax, " bytes");
    return false;
  }
  for (char c : value) {
    if (absl::ascii_iscntrl(static_cast<unsigned char>(c))) {
      Add(path, Quoted(value), " contains a control character");
      return false;
    }
  }
  return true;
}

}  // namespace muster::spec
