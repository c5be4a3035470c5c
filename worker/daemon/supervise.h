// Pid 1 of a worker's container: `muster-worker supervise FLAGS` runs `muster-worker FLAGS` as a
// child, reaps every process that has lost its parent, passes SIGTERM and SIGINT on, and starts a
// daemon that ended by itself again. A container ends with its pid 1, and its ranks with it, so
// this program does nothing that could fail: a daemon that crashes costs no step.
#ifndef MUSTER_WORKER_DAEMON_SUPERVISE_H_
#define MUSTER_WORKER_DAEMON_SUPERVISE_H_

#include <string>
#include <vector>

namespace muster::worker {

// Runs `program` with `arguments` until it ends after a signal was passed on, or ends with status
// 2, which is wrong usage and stays so. Between two starts it waits one second, after each that
// failed within ten seconds twice as long, up to 30. Returns the exit status for main: the child's,
// 128 + signal when a signal ended it. To be called before any thread starts.
int Supervise(const std::string& program, const std::vector<std::string>& arguments);

}  // namespace muster::worker

#endif  // MUSTER_WORKER_DAEMON_SUPERVISE_H_
