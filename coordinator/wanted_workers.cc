#include "coordinator/wanted_workers.h"

#include <algorithm>
#include <cstdint>
#include <optional>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "base/status_macros.h"
#include "proto/spec/names.h"
#include "proto/spec/share.h"

namespace muster::coordinator {
namespace {

constexpr int kDevicesMax = 4096;
constexpr int kWorkersMax = 100'000;
constexpr size_t kGroupBytesMax = 63;

absl::StatusOr<int> Number(const std::map<std::string, std::string>& metadata, const char* key,
                           int fallback, int largest) {
  const auto found = metadata.find(key);
  if (found == metadata.end()) return fallback;
  int value = 0;
  if (!absl::SimpleAtoi(found->second, &value) || value < 1 || value > largest) {
    return absl::InvalidArgumentError(absl::StrCat(key, ": ", spec::Quoted(found->second),
                                                   " is not a number from 1 to ", largest));
  }
  return value;
}

// No value: the worker is not of the group.
std::optional<int> OrdinalOf(const WorkerGroup& group, absl::string_view worker) {
  int ordinal = 0;
  if (!absl::ConsumePrefix(&worker, group.name) || !absl::ConsumePrefix(&worker, "-") ||
      worker.empty() || worker.size() > 6 ||
      worker.find_first_not_of("0123456789") != absl::string_view::npos ||
      !absl::SimpleAtoi(worker, &ordinal)) {
    return std::nullopt;
  }
  return ordinal;
}

// How many ranks it has or waits for: an elastic job that waits starts with its smallest size, or
// with the one that a user asked for.
int64_t WantedRanks(const v1::Job& spec, const v1::Job& state, const v1::Job* placed) {
  if (spec.sizes().empty()) return spec.spec().resources().ranks();
  const bool waits =
      state.state() == v1::JOB_STATE_PENDING || state.state() == v1::JOB_STATE_QUEUED;
  const int64_t has = waits || placed == nullptr || placed->ranks_size() == 0
                          ? spec.sizes(0)
                          : placed->ranks_size();
  return std::max<int64_t>(has, state.ranks_wanted());
}

// Whether more devices would let it start, or it has some.
bool WantsDevices(const v1::Job& state) {
  switch (state.state()) {
    case v1::JOB_STATE_HELD:
    case v1::JOB_STATE_STOPPING:
      return false;
    case v1::JOB_STATE_PENDING:
    case v1::JOB_STATE_QUEUED:
      break;
    default:
      return true;
  }
  switch (state.waiting().code()) {
    case v1::WAIT_CODE_AFTER:
    case v1::WAIT_CODE_HELD:
    case v1::WAIT_CODE_QUEUE_QUOTA:
    case v1::WAIT_CODE_QUEUE_JOBS:
    case v1::WAIT_CODE_TENANT_LIMIT:
    case v1::WAIT_CODE_NO_QUEUE:
    case v1::WAIT_CODE_QUOTA_TOO_SMALL:
      return false;
    default:
      return true;
  }
}

}  // namespace

absl::StatusOr<WorkerGroup> ParseWorkerGroup(const std::map<std::string, std::string>& metadata) {
  WorkerGroup group;
  const auto text = [&metadata](const char* key) {
    const auto found = metadata.find(key);
    return found == metadata.end() ? std::string() : found->second;
  };
  group.name = text("workers");
  if (group.name.empty() || group.name.size() > kGroupBytesMax) {
    return absl::InvalidArgumentError(
        "workers: the name of a StatefulSet of workers is expected, of at most 63 bytes");
  }
  const std::string device = text("device");
  if (device != "cpu" && device != "cuda") {
    return absl::InvalidArgumentError(
        absl::StrCat("device: ", spec::Quoted(device), " is not cpu or cuda"));
  }
  group.device = device == "cpu" ? v1::DEVICE_KIND_CPU : v1::DEVICE_KIND_CUDA;
  ASSIGN_OR_RETURN(group.devices, Number(metadata, "devicesPerWorker", group.devices, kDevicesMax));
  ASSIGN_OR_RETURN(group.workers_max,
                   Number(metadata, "maxWorkers", group.workers_max, kWorkersMax));
  return group;
}

int WantedWorkers(const WorkerGroup& group, const std::vector<JobView>& unfinished,
                  const std::vector<v1::Worker>& workers) {
  int64_t elsewhere = 0;  // devices of other workers
  int busy = 0;           // the last worker of the group with a rank, counted from 1
  for (const v1::Worker& worker : workers) {
    const std::optional<int> ordinal = OrdinalOf(group, worker.name());
    if (ordinal.has_value()) {
      if (worker.jobs_size() > 0) busy = std::max(busy, *ordinal + 1);
      continue;
    }
    if (worker.state() != v1::WORKER_STATE_READY || worker.has_cordon()) continue;
    for (const v1::Device& device : worker.devices()) {
      elsewhere += device.kind() == group.device && device.unusable().empty() ? 1 : 0;
    }
  }
  int64_t wanted = 0;  // devices, of workers of the group
  // Thousandths of those that jobs share, and the most that one such job wants.
  int64_t shared = 0, most = 0;
  for (const JobView& job : unfinished) {
    const v1::Job* const spec = job[JobPart::kSpec].get();
    const v1::Job* const state = job[JobPart::kState].get();
    if (spec == nullptr || state == nullptr) continue;
    // Workers are published less often than jobs.
    if (const v1::Job* const placed = job[JobPart::kRanks].get(); placed != nullptr) {
      for (const v1::RankStatus& rank : placed->ranks()) {
        if (rank.state() == v1::RANK_STATE_RELEASED || rank.state() == v1::RANK_STATE_LOST) {
          continue;
        }
        if (const auto ordinal = OrdinalOf(group, rank.worker()); ordinal.has_value()) {
          busy = std::max(busy, *ordinal + 1);
        }
      }
    }
    const v1::ResourceSpec& resources = spec->spec().resources();
    if (resources.device() != group.device || !WantsDevices(*state)) continue;
    // Tensor groups are whole on a worker; what is left over there is of no use to the job.
    const int64_t together = std::max<int64_t>(1, spec->spec().engine().parallel().tensor());
    const int64_t usable =
        together <= group.devices ? group.devices / together * together : group.devices;
    const int64_t ranks = WantedRanks(*spec, *state, job[JobPart::kRanks].get());
    const int64_t devices = (ranks * group.devices + usable - 1) / usable;
    if (devices > int64_t{group.workers_max} * group.devices + elsewhere) continue;
    if (const int32_t share = spec::ShareOf(resources); share < spec::kWholeDevice) {
      // Three shares of 0.4 take two devices: what is left over beside equal ones counts as taken.
      shared += devices * (spec::kWholeDevice / (spec::kWholeDevice / share));
      most = std::max(most, devices);
    } else {
      wanted += devices;
    }
  }
  wanted += std::max(most, (shared + spec::kWholeDevice - 1) / spec::kWholeDevice);
  wanted = std::max<int64_t>(0, wanted - elsewhere);
  const int64_t count = (wanted + group.devices - 1) / group.devices;
  return static_cast<int>(std::max<int64_t>(busy, std::min<int64_t>(count, group.workers_max)));
}

}  // namespace muster::coordinator
