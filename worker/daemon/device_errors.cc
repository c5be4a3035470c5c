#include "worker/daemon/device_errors.h"

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace muster::worker {
namespace {

constexpr size_t kErrorsMax = 4;  // kept of each device

}  // namespace

std::optional<std::string> DeviceErrors::Add(const GpuError& error) {
  const auto name = names_.find(error.uuid);
  if (name == names_.end()) return std::nullopt;
  std::vector<std::string>& errors = errors_[name->second];
  if (std::count(errors.begin(), errors.end(), error.message) == 0 && errors.size() < kErrorsMax) {
    errors.push_back(error.message);
  }
  return name->second;
}

void DeviceErrors::Explain(const std::string& device, v1::RankExit& exit) {
  std::vector<std::string> parts;
  if (!exit.message().empty()) parts.push_back(exit.message());
  if (const auto found = errors_.find(device); found != errors_.end()) {
    parts.insert(parts.end(), found->second.begin(), found->second.end());
    errors_.erase(found);
  }
  if (exit.code() == 0 && exit.signal() == 0) return;
  // The rank may have failed before it could ask its device for the UUID.
  const auto gpu = std::find_if(names_.begin(), names_.end(),
                                [&](const auto& entry) { return entry.second == device; });
  if (gpu != names_.end() && !absl::StrContains(absl::StrJoin(parts, ""), gpu->first)) {
    parts.push_back(absl::StrCat(device, " of worker ", worker_, " is ", gpu->first));
  }
  exit.set_message(absl::StrJoin(parts, "; "));
}

}  // namespace muster::worker
