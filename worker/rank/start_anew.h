// How a rank begins again without becoming another process.
#ifndef MUSTER_WORKER_RANK_START_ANEW_H_
#define MUSTER_WORKER_RANK_START_ANEW_H_

#include "absl/status/status.h"

namespace muster::worker {

// Replaces this process's program by itself, with the arguments and the environment that it was
// started with: the pid, the place under its supervisor, the output and pending signals stay, and
// the kernel takes back everything else, whatever its threads are doing: sockets, memory, GPUs.
// Communicators that wait for a peer that is gone can be ended in no other way that is as sure, and
// a half-built one holds nothing that is worth keeping. The names of shared memory are what the
// kernel does not take back, so that they go first. Thread: any. Returns only when it fails,
// kInternal; the process is then unchanged but for those names.
absl::Status StartAnew();

// Removes the names of the shared memory that communicators have mapped in this process. They stand
// in /dev/shm until all ranks have opened it, and would stay there, with its pages, for good.
void UnlinkSharedMemory();

}  // namespace muster::worker

#endif  // MUSTER_WORKER_RANK_START_ANEW_H_
