// Where the time of a rank's recorded steps went, according to its trace.
#ifndef MUSTER_CLI_STEP_BREAKDOWN_H_
#define MUSTER_CLI_STEP_BREAKDOWN_H_

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"

namespace muster::cli {

// Seconds, as means over the steps.
struct StepBreakdown {
  int steps = 0;     // 0: the trace has no whole step
  double step = 0;   // of the whole step
  bool gpu = false;  // true: from records of the GPU; false: from spans of the host
  // In order of display; they add up to `step`. On a GPU each moment counts for the first of these
  // that runs then: gemm, attention, bandwidth (every other kernel and copy),
  // communication (so that this is what computing does not hide), idle. On a host: forward,
  // backward, update, data, other.
  std::vector<std::pair<std::string, double>> parts;
};

// `trace`: a JSON array of Chrome trace events, one per line, as a rank writes it. Other lines are
// ignored.
StepBreakdown BreakDown(absl::string_view trace);

}  // namespace muster::cli

#endif  // MUSTER_CLI_STEP_BREAKDOWN_H_
