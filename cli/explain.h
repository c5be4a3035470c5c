// `muster explain`, `muster plan --cluster`, and why a job waits in words.
#ifndef MUSTER_CLI_EXPLAIN_H_
#define MUSTER_CLI_EXPLAIN_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "cli/coordinator_client.h"
#include "cli/output.h"
#include "muster/v1/schedule.pb.h"

namespace muster::cli {

// "needs 4 cpu slots, 2 are free of 8".
std::string WhyText(const v1::WaitReason& reason);
// "starts when job gpt (2 slots) ends"; empty when nothing is known that would let it start.
std::string ChangeText(const v1::WaitReason& reason);
// "starts about 2026-11-24 12:40:00 on w3 and w7 (8 cuda slots set aside)"; empty when none are.
std::string SetAsideText(const v1::SetAside& set_aside, v1::DeviceKind device);
// All of it, in one line.
std::string WaitText(const v1::WaitReason& reason);

// "all ranks in rack r7; cost 12.3G (bytes a rank sends in a step x distance)", and a table with a
// row for every axis.
std::string CostText(const v1::PlacementCost& cost);
std::vector<std::vector<std::string>> CostRows(const v1::PlacementCost& cost);

// "2026-12-01 08:00:00, in 2h; at risk: it is expected to end 30m0s after it".
std::string DeadlineText(const v1::DeadlineOutlook& outlook, absl::Time now);

// Prints what keeps a job from starting, what would let it start, and when that is expected.
absl::Status Explain(CoordinatorClient& client, const std::string& job, Format format,
                     Terminal& terminal);

// Prints whether a spec would start now, and where, or why not.
void WriteOutlook(const v1::ExplainResponse& outlook, absl::Time now, Terminal& terminal);

}  // namespace muster::cli

#endif  // MUSTER_CLI_EXPLAIN_H_
