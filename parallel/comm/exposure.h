// How long a rank's computing stream waits for others, for what, and in which collective:
// communication that overlap has not hidden.
#ifndef MUSTER_PARALLEL_COMM_EXPOSURE_H_
#define MUSTER_PARALLEL_COMM_EXPOSURE_H_

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/device/device.h"
#include "parallel/comm/communicator.h"

namespace muster::parallel {

enum class Exposure : uint8_t {
  kGradients,   // reductions of gradients
  kParameters,  // gathers of parameters
  kTensor,      // collectives of the tensor group
  kContext,     // exchanges of the context group
  kPipeline,    // sends and receives between stages
  kSlowest,     // the barrier at the end of a step, which lasts until the slowest rank comes
};
inline constexpr int kExposures = 6;
absl::string_view Name(Exposure kind);  // "gradients", "parameters", ...

enum class Collective : uint8_t {
  kAllReduce,
  kReduceScatter,
  kAllGather,
  kAllToAll,
  kBroadcast,
  kSendReceive,  // with one neighbour, or several at once
};
inline constexpr int kCollectives = 6;
absl::string_view Name(Collective collective);  // "all_reduce", "reduce_scatter", ...

// Seconds by Exposure and Collective. Where one wait covers several collectives, its time counts as
// the first one's.
class ExposedSeconds {
 public:
  double& at(Exposure kind, Collective collective) {
    return seconds_[static_cast<size_t>(kind)][static_cast<size_t>(collective)];
  }
  double at(Exposure kind, Collective collective) const {
    return seconds_[static_cast<size_t>(kind)][static_cast<size_t>(collective)];
  }
  double of(Exposure kind) const;
  double of(Collective collective) const;
  double total() const;
  friend bool operator==(const ExposedSeconds&, const ExposedSeconds&) = default;

 private:
  std::array<std::array<double, kCollectives>, kExposures> seconds_{};
};

// Records timing events around every wait, on the computing stream itself, so that nothing waits
// for the measurement. Single-threaded; the device must outlive it. Costs two recorded events per
// wait.
class ExposureMeter {
 public:
  // Counts up to `steps` steps at once.
  ExposureMeter(kernels::Device& device, kernels::Stream& compute, int steps)
      : device_(device), compute_(compute), steps_(steps) {}

  // From here until EndStep, waits are counted for slot `step`, whose earlier counts are forgotten.
  void BeginStep(int step);
  void EndStep() { current_ = -1; }
  // Called around work of `stream` that waits; it counts when that is the computing stream. Not
  // nested. If an event cannot be made, the wait does not count.
  void Begin(Exposure kind, Collective collective, const kernels::Stream& stream);
  void End(const kernels::Stream& stream);
  const kernels::Stream& compute() const { return compute_; }
  // Requires: the step's work has finished on the device.
  ExposedSeconds Seconds(int step) const;

  // Hands all calls to `inner`, and counts those on the computing stream as `kind`. `inner` and the
  // meter must outlive the result; calls of groups split from it are not counted.
  std::unique_ptr<Communicator> Around(Communicator& inner, Exposure kind);

 private:
  struct Wait {
    Exposure kind = Exposure::kGradients;
    Collective collective = Collective::kAllReduce;
    std::unique_ptr<kernels::Event> begin, end;
  };
  struct Step {
    std::vector<Wait>
        waits;  // of which the first `used` count; the others keep their events for later
    size_t used = 0;
  };

  kernels::Device& device_;
  kernels::Stream& compute_;
  std::vector<Step> steps_;
  int current_ = -1;
  bool open_ = false;
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_COMM_EXPOSURE_H_
