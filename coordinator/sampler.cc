#include "coordinator/sampler.h"

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <map>
#include <system_error>
#include <utility>

#include "coordinator/limits.h"
#include "proto/class_time.h"
#include "proto/spec/share.h"
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

void DeviceTimeCounter::Add(const std::string& job_id, const std::string& queue,
                            const v1::Usage& usage, absl::Time now, bool begins, Growth& growth) {
  const auto [entry, added] = jobs_.try_emplace(job_id);
  Counted& counted = entry->second;
  counted.seen = true;
  const double since = std::max(0.0, absl::ToDoubleSeconds(now - FromProto(usage.as_of())));
  std::map<v1::UsageClass, double> seconds;
  for (const v1::ClassTime& time : usage.times()) {
    seconds[time.usage_class()] += time.device_seconds() + DevicesIn(time) * since;
  }
  for (const auto& [usage_class, spent] : seconds) {
    double& before = counted.seconds[usage_class];
    if (added && begins) before = spent;
    if (spent <= before) continue;
    growth[{queue, usage_class}] += spent - before;
    before = spent;
  }
}

void DeviceTimeCounter::Forget(const std::function<void(const std::string&)>& last) {
  std::vector<std::string> gone;
  for (auto& [id, counted] : jobs_) {
    if (!std::exchange(counted.seen, false)) gone.push_back(id);
  }
  for (const std::string& id : gone) {
    last(id);
    jobs_.erase(id);
  }
}

Sampler::Sampler(const Parts& parts, std::string data_dir, security::TlsFiles tls,
                 std::string revocations, std::map<std::string, std::string> more)
    : parts_(parts),
      data_dir_(std::move(data_dir)),
      tls_(std::move(tls)),
      revocations_(std::move(revocations)),
      more_files_(std::move(more)),
      wall_ahead_(parts.clock.Now() - (absl::UnixEpoch() + parts.clock.Monotonic())),
      loop_(parts.clock) {
  loop_.Post([this] { SampleJobs(); });
  if (!data_dir_.empty()) loop_.Post([this] { SampleDisk(); });
  if (tls_.any() || !more_files_.empty()) loop_.Post([this] { SampleCertificates(); });
}

void Sampler::SampleJobs() {
  const absl::Time wall = parts_.clock.Now();
  QueueSample sample;
  const std::vector<JobView> jobs = parts_.published.UnfinishedJobs();
  for (const JobView& job : jobs) {
    const v1::Job* spec = job[JobPart::kSpec].get();
    if (spec == nullptr) continue;
    const v1::ResourceSpec& resources = spec->spec().resources();
    const v1::Job& state = *job[JobPart::kState];
    const v1::Job* gang = job[JobPart::kRanks].get();
    // An elastic job that waits does so for its smallest size.
    const int64_t least = spec->sizes().empty() ? resources.ranks() : spec->sizes(0);
    const double share = spec::ShareOf(resources) / double{spec::kWholeDevice};
    const int64_t held = HoldsDevices(state) && gang != nullptr ? gang->ranks_size() : 0;
    if (state.state() != v1::JOB_STATE_STOPPING) {
      sample.wanted[resources.device()] += share * static_cast<double>(std::max(least, held));
    }
    if (state.state() == v1::JOB_STATE_QUEUED) {
      sample.oldest_wait = std::max(sample.oldest_wait, wall - WaitsSince(job));
      int64_t& smallest = sample.smallest_waiting[resources.device()];
      if (smallest == 0 || least < smallest) smallest = least;
    }
    sample.allocated[resources.device()] += share * static_cast<double>(held);
  }
  parts_.metrics.Queue(sample);
  CountDeviceTime(jobs, absl::UnixEpoch() + parts_.clock.Monotonic() + wall_ahead_);
  loop_.PostAfter(kWorkerSampleInterval, [this] { SampleJobs(); });
}

void Sampler::CountDeviceTime(const std::vector<JobView>& jobs, absl::Time now) {
  DeviceTimeCounter::Growth growth;
  device_time_.Add("", "", parts_.published.fleet_usage(), now, first_sample_, growth);
  for (const JobView& job : jobs) {
    const v1::Job& state = *job[JobPart::kState];
    if (!state.has_usage()) continue;
    device_time_.Add(state.id(), job[JobPart::kSpec]->spec().queue(), state.usage(), now,
                     first_sample_, growth);
  }
  device_time_.Forget([&](const std::string& id) {
    // It has ended since.
    const std::shared_ptr<const v1::Job> job = parts_.published.Find(id);
    if (job == nullptr) return;
    device_time_.Add(id, job->spec().queue(), job->usage(), now, first_sample_, growth);
  });
  for (const auto& [key, seconds] : growth) {
    parts_.metrics.DeviceSeconds(key.second, key.first, seconds);
  }
  first_sample_ = false;
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

void Sampler::SampleCertificates() {
  for (const auto& [flag, validity] : security::ReadValidities(tls_, revocations_, more_files_)) {
    parts_.metrics.CertificateFile(flag, validity.not_before, validity.not_after);
  }
  loop_.PostAfter(kDiskSampleInterval, [this] { SampleCertificates(); });
}

}  // namespace muster::coordinator
