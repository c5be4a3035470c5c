// Where the time of a rank's recorded steps went, from its trace.
#ifndef MUSTER_CLI_STEP_BREAKDOWN_H_
#define MUSTER_CLI_STEP_BREAKDOWN_H_

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"

namespace muster::cli {

// Seconds, means over the steps.
struct StepBreakdown {
  int steps = 0;     // 0: the trace has no whole step
  double step = 0;   // of the whole step
  bool gpu = false;  // from the device's records, else from the host's spans
  // In order of display; they add up to `step`. On a GPU, at each moment the first of these that
  // runs: products, attention, bandwidth (every other kernel and copy), communication (NCCL alone:
  // what computing does not hide), idle. On a host: forward, backward, update, data, other.
  std::vector<std::pair<std::string, double>> parts;
};

// `trace`: a JSON array of Chrome trace events, one a line, as a rank writes them. Lines that are
// none count for nothing.
StepBreakdown BreakDown(absl::string_view trace);

}  // namespace muster::cli

#endif  // MUSTER_CLI_STEP_BREAKDOWN_H_
