#include "parallel/comm/nccl_library.h"

#include <cstdlib>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/shared_library.h"
#include "base/status_macros.h"
#include "parallel/comm/communicator.h"
#include "parallel/comm/tcp_socket.h"

namespace muster::parallel {

absl::StatusOr<NcclLibrary> NcclLibrary::Load() {
  const absl::StatusOr<SharedLibrary> library =
      SharedLibrary::Open("libnccl.so.2", NvidiaLibraryDirectories());
  if (!library.ok()) {
    return absl::FailedPreconditionError(
        absl::StrCat("NCCL: ", library.status().message(),
                     "; install libnccl2 or the Python package nvidia-nccl-cu13, or add its folder "
                     "to LD_LIBRARY_PATH"));
  }
  NcclLibrary nccl;
  RETURN_IF_ERROR(library->Resolve("ncclGetVersion", nccl.GetVersion));
  RETURN_IF_ERROR(library->Resolve("ncclGetUniqueId", nccl.GetUniqueId));
  RETURN_IF_ERROR(library->Resolve("ncclCommInitRankConfig", nccl.CommInitRankConfig));
  RETURN_IF_ERROR(library->Resolve("ncclCommSplit", nccl.CommSplit));
  RETURN_IF_ERROR(library->Resolve("ncclCommAbort", nccl.CommAbort));
  RETURN_IF_ERROR(library->Resolve("ncclCommGetAsyncError", nccl.CommGetAsyncError));
  RETURN_IF_ERROR(library->Resolve("ncclGetErrorString", nccl.GetErrorString));
  RETURN_IF_ERROR(library->Resolve("ncclGetLastError", nccl.GetLastError));
  RETURN_IF_ERROR(library->Resolve("ncclAllReduce", nccl.AllReduce));
  RETURN_IF_ERROR(library->Resolve("ncclReduceScatter", nccl.ReduceScatter));
  RETURN_IF_ERROR(library->Resolve("ncclAllGather", nccl.AllGather));
  RETURN_IF_ERROR(library->Resolve("ncclBroadcast", nccl.Broadcast));
  RETURN_IF_ERROR(library->Resolve("ncclSend", nccl.Send));
  RETURN_IF_ERROR(library->Resolve("ncclRecv", nccl.Recv));
  RETURN_IF_ERROR(library->Resolve("ncclGroupStart", nccl.GroupStart));
  RETURN_IF_ERROR(library->Resolve("ncclGroupEnd", nccl.GroupEnd));
  RETURN_IF_ERROR(nccl.Check(nccl.GetVersion(&nccl.version), nullptr, "reading its version"));
  return nccl;
}

std::string NcclLibrary::VersionText() const {
  return absl::StrFormat("%d.%d.%d", version / 10000, version / 100 % 100, version % 100);
}

absl::Status NcclLibrary::Check(ncclResult_t result, ncclComm_t comm,
                                absl::string_view what) const {
  if (result == ncclSuccess || result == ncclInProgress) return absl::OkStatus();
  const std::string message = absl::StrCat("NCCL ", VersionText(), ", ", what, ": ",
                                           GetErrorString(result), " (", GetLastError(comm), ")");
  switch (result) {
    case ncclRemoteError:
    case ncclSystemError:
    case ncclUnhandledCudaError:
      return absl::UnavailableError(message);
    default:
      return absl::InternalError(message);
  }
}

void NcclLibrary::AbortAll(const std::vector<ncclComm_t>& comms) const {
  std::vector<std::thread> threads;
  for (ncclComm_t comm : comms) threads.emplace_back([this, comm] { CommAbort(comm); });
  for (std::thread& thread : threads) thread.join();
}

void SetNcclEnvironment(const NcclEnvironment& environment) {
  if (!environment.host_id.empty()) {
    ::setenv("NCCL_HOSTID", environment.host_id.c_str(), /*overwrite=*/0);
  }
  if (!environment.address.empty()) {
    // Listening on an address without an interface fails later, with an error that says so.
    if (const auto interface = InterfaceOf(environment.address); interface.ok()) {
      ::setenv("NCCL_SOCKET_IFNAME", absl::StrCat("=", *interface).c_str(), /*overwrite=*/0);
    }
    const bool v6 = absl::StrContains(environment.address, ':');
    ::setenv("NCCL_SOCKET_FAMILY", v6 ? "AF_INET6" : "AF_INET", /*overwrite=*/0);
  }
  ::setenv("NCCL_RUNTIME_CONNECT", "0", /*overwrite=*/0);
  // Streams share the device's queues, 8 by default. A stream that waits for peers (peer_group.h)
  // must not hold up another one.
  ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", /*overwrite=*/0);
  if (!environment.reproducible) return;
  ::setenv("NCCL_ALGO", "Ring", /*overwrite=*/0);
  ::setenv("NCCL_PROTO", "Simple", /*overwrite=*/0);
}

}  // namespace muster::parallel
