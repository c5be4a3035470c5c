// Device memory that the GPUs of one host read in each other, for collectives by copy engines
// (peer_group.h).
#ifndef MUSTER_PARALLEL_COMM_PEER_REGIONS_H_
#define MUSTER_PARALLEL_COMM_PEER_REGIONS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device/device.h"
#include "kernels/device/device_cuda.h"
#include "kernels/tensor.h"
#include "parallel/comm/communicator.h"
#include "parallel/comm/peer_memory.h"

namespace muster::parallel {

// The machine this process runs on, whatever its container: CUDA's handles do not care for
// namespaces. Two host ids (NCCL_HOSTID) are two machines, as they are for NCCL.
std::string HostIdentity();

// The regions of device memory that one rank shares, and those that the other ranks of its host
// share with it, by CUDA's handles between processes
// (https://docs.nvidia.com/cuda/cuda-c-programming-guide, "Interprocess Communication"). Used by
// the thread that enqueues.
class PeerRegions {
 public:
  explicit PeerRegions(kernels::cuda::CudaDevice& device) : device_(device) {}
  ~PeerRegions() { Close(); }

  // A collective of all ranks of `host`, blocks. Every rank shares as many regions. kUnavailable,
  // on every rank, when one of them cannot read another's memory: nothing is shared then. Requires:
  // nothing is shared yet.
  absl::Status Share(Communicator& host, const std::vector<kernels::Tensor>& regions,
                     const ShareOptions& options);
  // Forgets what is shared. Requires: the streams of all ranks that use it have finished.
  void Close();

  // The region that holds `data`, if all of `world_ranks` share it in the same size and layout;
  // else -1.
  int Find(const kernels::Tensor& data, const std::vector<int>& world_ranks) const;
  // This rank's memory of the largest region that all of `world_ranks` share in the same size and
  // layout; empty when there is none.
  kernels::Tensor Largest(const std::vector<int>& world_ranks) const;
  // Where world rank `of` has what this rank has at `mine`, which lies in that region.
  char* At(int region, int of, const void* mine) const;
  // How many reads of peers at the same time are best, as Share has timed them: 1 or kPullsMax,
  // the same on every rank. 1 where Share could not time them.
  int pulls_at_once() const { return pulls_at_once_; }
  const ShareOptions& options() const { return options_; }
  kernels::cuda::CudaDevice& device() const { return device_; }

 private:
  // By world rank; null where the rank is on another host.
  struct Region {
    std::vector<char*> base;
    std::vector<int64_t> bytes;
    std::vector<uint64_t> layout;  // ShareOptions::layouts
  };

  bool SharedBy(const Region& region, const std::vector<int>& world_ranks) const;
  // Memory of the next ranks of this host, kPullsMax at most, each of at least `bytes`, which is
  // lowered to the least of them.
  std::vector<const char*> Nearest(int64_t& bytes) const;
  // Opens the regions of rank `of` from what it has sent (Describe).
  absl::Status Map(int rank, int of, const std::string& text);
  absl::StatusOr<char*> Open(const std::string& handle);

  kernels::cuda::CudaDevice& device_;
  int rank_ = 0;
  int ranks_ = 0;  // of the world
  int pulls_at_once_ = 1;
  std::vector<Region> regions_;
  std::map<std::string, char*> opened_;  // by CUDA's handle
  ShareOptions options_;
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_COMM_PEER_REGIONS_H_
