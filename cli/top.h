// `muster top`: workers, devices, queues and jobs, live on a whole terminal.
#ifndef MUSTER_CLI_TOP_H_
#define MUSTER_CLI_TOP_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "cli/coordinator_client.h"
#include "cli/output.h"

namespace muster::cli {

struct TopOptions {
  bool once = false;  // print one frame, of any length, and end
  std::string sort = "state";
  absl::Duration interval = absl::Seconds(1);
};
// Keys: s the next order of the jobs, r reversed, w the workers instead of the jobs, q or Ctrl-C
// ends. The terminal is restored however it ends. Without a terminal, as with `once`.
absl::Status Top(CoordinatorClient& client, TopOptions options, Format format, Terminal& terminal);

// ---- for tests

struct TopData {
  std::vector<v1::Job> jobs;  // that have not ended; ListJobsRequest.summary
  std::vector<v1::Worker> workers;
  std::string problem;  // why they are old; "" = they are not
};
struct TopView {
  int columns = 80;
  int lines = 0;  // 0 = as many as it takes
  std::string sort = "state";
  bool reversed = false;
  bool workers = false;  // a line for each worker instead of each job
  bool keys = false;     // a last line says which keys there are
  bool colour = false;
};
// The orders in which jobs can be shown.
std::vector<std::string> TopOrders();
// Lines without line ends, none wider than the columns, no more than the lines.
std::vector<std::string> TopFrame(const TopData& data, const TopView& view, absl::Time now);

}  // namespace muster::cli

#endif  // MUSTER_CLI_TOP_H_
