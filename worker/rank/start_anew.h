// How a rank begins again without becoming another process.
#ifndef MUSTER_WORKER_RANK_START_ANEW_H_
#define MUSTER_WORKER_RANK_START_ANEW_H_

#include "absl/status/status.h"

namespace muster::worker {

// Replaces this process's program by itself, with the arguments and the environment that it was
// started with: the pid, the place under its supervisor, the output and pending signals stay, and
// the kernel takes back everything else, whatever its threads are doing: sockets, memory, GPUs.
// Communicators that wait for a peer that is gone can be ended in no other way that is as sure, and
// a half-built one holds nothing that is worth keeping. Thread: any. Returns only when it fails,
// kInternal; the process is then unchanged.
absl::Status StartAnew();

}  // namespace muster::worker

#endif  // MUSTER_WORKER_RANK_START_ANEW_H_
