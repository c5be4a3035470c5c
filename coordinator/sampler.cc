#include "coordinator/sampler.h"

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <map>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "coordinator/limits.h"
#include "proto/time.h"

namespace muster::coordinator {
namespace {

// Since when a job in QUEUED has waited.
absl::Time WaitsSince(const JobView& job) {
  const v1::Job* history = job[JobPart::kHistory].get();
  if (history != nullptr && !history->causes().empty()) {
    return FromProto(history->causes(history->causes_size() - 1).ended());
  }
  return FromProto(job[JobPart::kState]->submitted());
}

bool HoldsDevices(const v1::Job& state) {
  return state.attempt_state() != v1::ATTEMPT_STATE_UNSPECIFIED &&
         state.attempt_state() != v1::ATTEMPT_STATE_RELEASED;
}

}  // namespace

std::string ActivityOf(const JobView& job) {
  const v1::Job& state = *job[JobPart::kState];
  if (!HoldsDevices(state)) return "";
  switch (state.state()) {
    case v1::JOB_STATE_RECOVERING:
      return "recovering";
    case v1::JOB_STATE_STOPPING:
      return "stopping";
    case v1::JOB_STATE_RUNNING:
      if (absl::StartsWith(state.phase(), "sav")) return "saving";
      if (absl::StartsWith(state.phase(), "evaluat")) return "evaluating";
      if (state.phase().empty() || absl::StartsWith(state.phase(), "train")) return "training";
      return "starting";
    default:
      return "starting";
  }
}

Sampler::Sampler(const Parts& parts, std::string data_dir)
    : parts_(parts), data_dir_(std::move(data_dir)), loop_(parts.clock) {
  loop_.Post([this] { SampleJobs(parts_.clock.Monotonic()); });
  if (!data_dir_.empty()) loop_.Post([this] { SampleDisk(); });
}

void Sampler::SampleJobs(absl::Duration before) {
  const absl::Duration now = parts_.clock.Monotonic();
  const absl::Time wall = parts_.clock.Now();
  QueueSample sample;
  std::map<std::string, double> seconds;
  for (const JobView& job : parts_.published.UnfinishedJobs()) {
    const v1::Job* spec = job[JobPart::kSpec].get();
    if (spec == nullptr) continue;
    const v1::ResourceSpec& resources = spec->spec().resources();
    const v1::Job& state = *job[JobPart::kState];
    if (state.state() != v1::JOB_STATE_STOPPING) {
      sample.wanted[resources.device()] += resources.ranks();
    }
    if (state.state() == v1::JOB_STATE_QUEUED) {
      sample.oldest_wait = std::max(sample.oldest_wait, wall - WaitsSince(job));
      int64_t& smallest = sample.smallest_waiting[resources.device()];
      if (smallest == 0 || resources.ranks() < smallest) smallest = resources.ranks();
    }
    const std::string activity = ActivityOf(job);
    if (activity.empty()) continue;
    sample.allocated[resources.device()] += resources.ranks();
    seconds[activity] += resources.ranks() * absl::ToDoubleSeconds(now - before);
  }
  parts_.metrics.Queue(sample);
  for (const auto& [activity, spent] : seconds) parts_.metrics.SlotSeconds(activity, spent);
  loop_.PostAfter(kWorkerSampleInterval, [this, now] { SampleJobs(now); });
}

void Sampler::SampleDisk() {
  namespace fs = std::filesystem;
  std::error_code error;
  const fs::space_info disk = fs::space(data_dir_, error);
  int64_t bytes = 0;
  std::error_code ended;
  for (fs::recursive_directory_iterator file(data_dir_, ended), end; !ended && file != end;
       file.increment(ended)) {
    std::error_code of_file;  // files come and go
    const auto size = file->is_regular_file(of_file) ? file->file_size(of_file) : 0;
    if (!of_file) bytes += static_cast<int64_t>(size);
  }
  if (!error) {
    parts_.metrics.StateDisk(bytes, static_cast<int64_t>(disk.available),
                             static_cast<int64_t>(disk.capacity));
  }
  loop_.PostAfter(kDiskSampleInterval, [this] { SampleDisk(); });
}

}  // namespace muster::coordinator
