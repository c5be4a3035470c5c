// NCCL's functions, found when the first communicator is made, so that a binary also starts where
// NCCL is not installed.
#ifndef MUSTER_PARALLEL_COMM_NCCL_LIBRARY_H_
#define MUSTER_PARALLEL_COMM_NCCL_LIBRARY_H_

#include <nccl.h>

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace muster::parallel {

struct NcclLibrary {
  // kFailedPrecondition says what to install.
  static absl::StatusOr<NcclLibrary> Load();

  std::string VersionText() const;  // "2.28.9"
  // OK for ncclSuccess and ncclInProgress. kUnavailable: a peer or the network; kInternal: our bug
  // or NCCL's. `comm` may be null.
  absl::Status Check(ncclResult_t result, ncclComm_t comm, absl::string_view what) const;

  // Calls ncclCommAbort for all of them at once, each on a thread of its own; returns when all have
  // ended. One after the other they would never end: freeing the first one's memory waits for all
  // kernels on the device, also for those of the next communicators, which wait for a dead peer
  // (https://github.com/NVIDIA/nccl/pull/564).
  void AbortAll(const std::vector<ncclComm_t>& comms) const;

  int version = 0;
  decltype(&ncclGetVersion) GetVersion = nullptr;
  decltype(&ncclGetUniqueId) GetUniqueId = nullptr;
  decltype(&ncclCommInitRankConfig) CommInitRankConfig = nullptr;
  decltype(&ncclCommSplit) CommSplit = nullptr;
  decltype(&ncclCommAbort) CommAbort = nullptr;
  decltype(&ncclCommGetAsyncError) CommGetAsyncError = nullptr;
  decltype(&ncclGetErrorString) GetErrorString = nullptr;
  decltype(&ncclGetLastError) GetLastError = nullptr;
  decltype(&ncclAllReduce) AllReduce = nullptr;
  decltype(&ncclReduceScatter) ReduceScatter = nullptr;
  decltype(&ncclAllGather) AllGather = nullptr;
  decltype(&ncclBroadcast) Broadcast = nullptr;
  decltype(&ncclSend) Send = nullptr;
  decltype(&ncclRecv) Recv = nullptr;
  decltype(&ncclGroupStart) GroupStart = nullptr;
  decltype(&ncclGroupEnd) GroupEnd = nullptr;
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_COMM_NCCL_LIBRARY_H_
