// Measures once a second what no single event tells: what the queue wants and for how long it has
// waited, how the time of devices grows, how full the disk is, and when certificates end.
#ifndef MUSTER_COORDINATOR_SAMPLER_H_
#define MUSTER_COORDINATOR_SAMPLER_H_

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "base/clock.h"
#include "base/loop.h"
#include "coordinator/core/job_view.h"
#include "coordinator/metrics.h"
#include "coordinator/published_state.h"
#include "security/tls_files.h"

namespace muster::coordinator {

// How much the device time of each class has grown since it was last asked about. Thread: one.
class DeviceTimeCounter {
 public:
  // By queue and class, in seconds. `usage` is Job.usage; time that has gone by since is added, up
  // to `now`. Never negative: what turns out to be of another class is taken from later growth.
  // `begins`: what was spent before does not count.
  using Growth = std::map<std::pair<std::string, v1::UsageClass>, double>;
  void Add(const std::string& job_id, const std::string& queue, const v1::Usage& usage,
           absl::Time now, bool begins, Growth& growth);
  // Forgets the jobs for which Add() was not called since the last call, after `last` was called
  // with each of their ids.
  void Forget(const std::function<void(const std::string&)>& last);

 private:
  struct Counted {
    std::map<v1::UsageClass, double> seconds;
    bool seen = true;
  };
  std::map<std::string, Counted> jobs_;  // by id; "" is the fleet
};

// Samples on a thread of its own from the constructor to the destructor.
class Sampler {
 public:
  struct Parts {  // all outlive the sampler
    const Clock& clock;
    const PublishedState& published;
    Metrics& metrics;
  };
  // `data_dir`: where the durable state is; empty = the disk is not measured. `tls`, `revocations`
  // and `more`, by flag: files whose ends are told; empty ones have none.
  Sampler(const Parts& parts, std::string data_dir, security::TlsFiles tls = {},
          std::string revocations = "", std::map<std::string, std::string> more = {});
  ~Sampler() { loop_.Stop(); }

 private:
  void SampleJobs();
  void CountDeviceTime(const std::vector<JobView>& jobs, absl::Time now);
  void SampleDisk();
  void SampleCertificates();

  const Parts parts_;
  const std::string data_dir_;
  const security::TlsFiles tls_;
  const std::string revocations_;
  const std::map<std::string, std::string> more_files_;
  DeviceTimeCounter device_time_;
  bool first_sample_ = true;
  // The time of usage follows the wall clock at the start and then never jumps, as the shell's.
  const absl::Duration wall_ahead_;  // of the monotonic clock
  ThreadLoop loop_;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_SAMPLER_H_
