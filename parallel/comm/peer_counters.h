// A barrier between the streams of GPUs of one host, for collectives by copy engines
// (peer_group.h).
#ifndef MUSTER_PARALLEL_COMM_PEER_COUNTERS_H_
#define MUSTER_PARALLEL_COMM_PEER_COUNTERS_H_

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device/device_cuda.h"
#include "parallel/comm/communicator.h"

namespace muster::parallel {

// Counters in memory of the host, one from every rank of a group to every other: a rank's stream
// writes how many barriers it has reached and waits for the others' counters. A stream of high
// priority, which runs beside others, can wait in the front end of the GPU, which takes no
// multiprocessor (https://docs.nvidia.com/cuda/cuda-driver-api, "Stream Memory Operations") but
// notices late; any other stream waits in a warp.
class PeerCounters {
 public:
  // A collective of `host`, blocks. kUnavailable, on every rank, where its ranks are not on one
  // host, or a device cannot do it.
  static absl::StatusOr<std::unique_ptr<PeerCounters>> Make(Communicator& host,
                                                            kernels::cuda::CudaDevice& device);
  ~PeerCounters();
  PeerCounters(const PeerCounters&) = delete;
  PeerCounters& operator=(const PeerCounters&) = delete;

  // Enqueues: when the earlier work of the stream has been done, tells the other ranks so, and
  // waits until all of them have called it as often. `in_warp`: waits in a warp whatever the
  // stream.
  absl::Status Barrier(cudaStream_t stream, bool in_warp);
  // Ends the waits under way. Called again and again until none is left: a peer may overwrite what
  // it writes. Thread-safe.
  void Release();

 private:
  PeerCounters(int rank, int size) : rank_(rank), size_(size) {}
  // Maps the counters of the file, which rank 0 makes.
  absl::Status Map(const std::string& name, bool make);
  volatile uint32_t* Counter(int from, int to) const;
  absl::Status BarrierInFrontEnd(cudaStream_t stream, uint32_t value);

  const int rank_;
  const int size_;
  char* memory_ = nullptr;
  char* on_device_ = nullptr;  // the same memory
  bool registered_ = false;
  std::atomic<uint32_t> barriers_{0};  // enqueued
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_COMM_PEER_COUNTERS_H_
