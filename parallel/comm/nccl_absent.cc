// A build without CUDA or without NCCL's header.
#include "parallel/comm/communicator.h"

namespace muster::parallel {

absl::StatusOr<std::unique_ptr<Communicator>> MakeNcclCommunicator(KeyValueStore&, int, int,
                                                                   kernels::Device&,
                                                                   const NcclOptions&) {
  return absl::UnimplementedError(
      "this build has no NCCL (configure with MUSTER_CUDA=ON where nccl.h is)");
}

void SetNcclEnvironment(const NcclEnvironment&) {}

}  // namespace muster::parallel
