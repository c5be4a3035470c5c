// `muster usage`, and what other commands say about device time.
#ifndef MUSTER_CLI_USAGE_H_
#define MUSTER_CLI_USAGE_H_

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cli/coordinator_client.h"
#include "cli/output.h"

namespace muster::cli {

struct UsageOptions {
  std::string job;     // name or id; "" = all
  std::string queue;   // "" = all
  std::string tenant;  // "" = all
  std::string since;   // as ParseSince() takes it; "" = as far back as is known
  std::string until;
  std::vector<std::string> by = {"queue"};  // job, queue, tenant, cause
};
absl::Status Usage(CoordinatorClient& client, const UsageOptions& options, Format format,
                   Terminal& terminal);

// "90s", "10m", "36h", "7d" before `now`, or a date and time: "2026-11-24", "2026-11-24 13:05",
// "2026-11-24T13:05:00Z", in local time where no zone is given. kInvalidArgument names `flag`.
absl::StatusOr<absl::Time> ParseSince(const std::string& text, absl::Time now,
                                      const std::string& flag);

// Device-seconds of `usage` with what has gone by until `now`, one number for each class and cause.
std::vector<std::pair<v1::ClassTime, double>> DeviceSecondsAt(const v1::Usage& usage,
                                                              absl::Time now);
// Of the same numbers: Usage.goodput. 0 where nothing was used.
double GoodputAt(const v1::Usage& usage, absl::Time now);
// "93.1 % of 2.4 device-hours; 3.2 % replayed (crash), 2.1 % initializing"; "" where there is none.
std::string GoodputText(const v1::Usage& usage, absl::Time now);

}  // namespace muster::cli

#endif  // MUSTER_CLI_USAGE_H_
