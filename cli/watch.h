// `muster watch`: follows one job to its end, with a live progress line.
#ifndef MUSTER_CLI_WATCH_H_
#define MUSTER_CLI_WATCH_H_

#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "cli/coordinator_client.h"
#include "cli/output.h"

namespace muster::cli {

// "gpt-kjv running 120/600 [####....] 20% loss 2.3451 val 2.4000 12.3k tok/s 42s ETA 2m48s", cut to
// `columns`.
std::string ProgressLine(const v1::Job& job, absl::Time now, int columns);

// Why a job that is not SUCCEEDED ended, in one or two lines.
std::string FailureText(const v1::Job& job);

// Prints progress until the job has ended, across restarts of the coordinator. OK: the job
// succeeded. kAborted, with FailureText: it ended otherwise. kUnavailable: the coordinator stayed
// away for longer than `patience`. Other codes: there is no such job, or no coordinator from the
// start.
absl::Status Watch(CoordinatorClient& client, const std::string& name, Format format,
                   Terminal& terminal, absl::Duration patience);

}  // namespace muster::cli

#endif  // MUSTER_CLI_WATCH_H_
