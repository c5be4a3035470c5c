// Memory that the GPUs of one host read in each other, and how their streams wait for each other
// without a kernel: what collectives by copy engines need (peer_group.h).
#ifndef MUSTER_PARALLEL_COMM_PEER_MEMORY_H_
#define MUSTER_PARALLEL_COMM_PEER_MEMORY_H_

#include <cuda_runtime_api.h>

#include <atomic>
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

namespace muster::parallel {

// The shared memory of one rank, by CUDA's handles between processes
// (https://docs.nvidia.com/cuda/cuda-c-programming-guide, "Interprocess Communication"), and that
// of the other ranks of its host. Used by the thread that enqueues.
class PeerMemory {
 public:
  explicit PeerMemory(kernels::cuda::CudaDevice& device) : device_(device) {}
  ~PeerMemory() { Close(); }

  // A collective of all ranks of `host`, blocks. Every rank shares as many regions. kUnavailable,
  // on every rank, when one of them cannot read another's memory: nothing is shared then. Requires:
  // nothing is.
  absl::Status Share(Communicator& host, const std::vector<kernels::Tensor>& regions,
                     const ShareOptions& options);
  // Forgets what is shared. The streams of all ranks that use it have finished.
  void Close();

  // A region that holds `data`, and which all of `world_ranks` share in the same size and layout;
  // or -1.
  int Find(const kernels::Tensor& data, const std::vector<int>& world_ranks) const;
  // Where world rank `of` has what this rank has at `mine`, which is in that region.
  char* At(int region, int of, const void* mine) const;
  // How many reads of peers at the same time are fastest, as Share has timed them: 1 or kPullsMax,
  // the same on every rank. 1 where it could not.
  int pulls_at_once() const { return pulls_at_once_; }
  // What Share was given.
  const ShareOptions& options() const { return options_; }
  kernels::cuda::CudaDevice& device() const { return device_; }

 private:
  // By world rank; null where the rank is on another host.
  struct Region {
    std::vector<char*> base;
    std::vector<int64_t> bytes;
    std::vector<uint64_t> layout;  // ShareOptions::layouts
  };

  // Memory of the ranks behind this one on its host, kPullsMax at most, each of at least `bytes`,
  // which it lowers to that.
  std::vector<const char*> Nearest(int64_t& bytes) const;
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

// Counters in memory of the host, one from every rank of a group to every other: a rank's stream
// writes how far it has come and waits for the others'. A stream of high priority, which runs
// beside others, can wait in the front end of the GPU, which takes no multiprocessor
// (https://docs.nvidia.com/cuda/cuda-driver-api, "Stream Memory Operations") but notices late; any
// other waits in a warp.
class PeerCounters {
 public:
  // A collective of `host`, blocks. kUnavailable, on every rank, where its ranks are not on one
  // host, or a device cannot do it.
  static absl::StatusOr<std::unique_ptr<PeerCounters>> Make(Communicator& host,
                                                            kernels::cuda::CudaDevice& device);
  ~PeerCounters();
  PeerCounters(const PeerCounters&) = delete;
  PeerCounters& operator=(const PeerCounters&) = delete;

  // Enqueues: when what was enqueued before has been done, tells the other ranks so, and waits
  // until all of them have called it as often; `in_warp`: in a warp whatever the stream.
  absl::Status Meet(cudaStream_t stream, bool in_warp);
  // Ends the waits that there are. To be called again and again until none is under way: a peer may
  // overwrite it. Thread-safe.
  void Release();

 private:
  PeerCounters(int rank, int size) : rank_(rank), size_(size) {}
  // Maps the counters of the file, which rank 0 makes.
  absl::Status Map(const std::string& name, bool make);
  volatile uint32_t* Counter(int from, int to) const;
  absl::Status MeetInFrontEnd(cudaStream_t stream, uint32_t value);

  const int rank_;
  const int size_;
  char* memory_ = nullptr;
  char* on_device_ = nullptr;  // the same
  bool registered_ = false;
  std::atomic<uint32_t> meetings_{0};
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_COMM_PEER_MEMORY_H_
