// Arrays of jobs: one file, many tasks. Errors as of jobs.h.
#ifndef MUSTER_CLI_ARRAYS_H_
#define MUSTER_CLI_ARRAYS_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cli/coordinator_client.h"
#include "cli/output.h"

namespace muster::cli {

// Submits all tasks of an array, or none, and prints what came of it as a table; for the other
// formats it returns that. Requires: they are what spec::LoadTasks read.
absl::StatusOr<Json> SubmitTasks(CoordinatorClient& client, std::vector<v1::JobSpec> tasks,
                                 const std::string& request_id, bool dry_run,
                                 absl::Duration patience, Format format, Terminal& terminal);

// The tasks of the newest array of this name that the coordinator still knows, by index; empty:
// there is none.
absl::StatusOr<std::vector<v1::Job>> TasksOf(CoordinatorClient& client, const std::string& name);
bool AnyLive(const std::vector<v1::Job>& tasks);

// Cancels, holds, ... all tasks.
absl::Status ChangeTasks(CoordinatorClient& client, const std::string& array,
                         v1::ArrayChange change, const std::string& reason, Format format,
                         Terminal& terminal);

// Prints a table of the tasks with their values, states and losses.
absl::Status DescribeArray(const std::vector<v1::Job>& tasks, Format format, Terminal& terminal);

// "3 running, 5 queued", the states in which most tasks are first.
std::string StatesText(const std::vector<v1::Job>& tasks);
// The tasks of one array as one row of `muster get jobs`. Requires: there are some.
std::vector<std::string> ArrayRow(const std::vector<v1::Job>& tasks, absl::Time now);

}  // namespace muster::cli

#endif  // MUSTER_CLI_ARRAYS_H_
