// Measures once a second what no single event tells: what the queue wants and for how long it has
// waited, what the devices that attempts hold are used for, and how full the disk is.
#ifndef MUSTER_COORDINATOR_SAMPLER_H_
#define MUSTER_COORDINATOR_SAMPLER_H_

#include <string>

#include "absl/time/time.h"
#include "base/clock.h"
#include "base/loop.h"
#include "coordinator/core/job_view.h"
#include "coordinator/metrics.h"
#include "coordinator/published_state.h"

namespace muster::coordinator {

// What an attempt that holds devices uses them for, one of the activities of
// muster_coordinator_slot_seconds_total; empty when the job holds none. `job` has a state part.
std::string ActivityOf(const JobView& job);

// Samples on a thread of its own from the constructor to the destructor.
class Sampler {
 public:
  struct Parts {  // all outlive the sampler
    const Clock& clock;
    const PublishedState& published;
    Metrics& metrics;
  };
  // `data_dir`: where the durable state is; empty = the disk is not measured.
  Sampler(const Parts& parts, std::string data_dir);
  ~Sampler() { loop_.Stop(); }

 private:
  void SampleJobs(absl::Duration before);
  void SampleDisk();

  const Parts parts_;
  const std::string data_dir_;
  ThreadLoop loop_;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_SAMPLER_H_
