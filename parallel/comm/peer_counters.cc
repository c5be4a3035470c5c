#include "parallel/comm/peer_counters.h"

#include <cuda.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "kernels/device/cuda_status.h"
#include "kernels/peers/peer_barrier.h"
#include "parallel/comm/gather_texts.h"
#include "parallel/comm/peer_driver.h"
#include "parallel/comm/peer_regions.h"

namespace muster::parallel {
namespace {

using kernels::cuda::CudaStatus;

// A line of the host's caches: no two ranks write to one.
constexpr int64_t kCounterBytes = kernels::cuda::kPeerBarrierStride * sizeof(uint32_t);
// Far ahead of every wait, and near enough to compare as later.
constexpr uint32_t kReleased = uint32_t{1} << 30;

using BatchMemOp = decltype(&cuStreamBatchMemOp);
BatchMemOp FindBatchMemOp() {
  static const auto found = DriverFunction<BatchMemOp>("cuStreamBatchMemOp");
  return found;
}

}  // namespace

absl::StatusOr<std::unique_ptr<PeerCounters>> PeerCounters::Make(
    Communicator& host, kernels::cuda::CudaDevice& device) {
  ASSIGN_OR_RETURN(const std::vector<std::string> hosts, GatherTexts(host, HostIdentity()));
  if (std::count(hosts.begin(), hosts.end(), hosts[0]) != host.size()) {
    return absl::UnavailableError(absl::StrCat("ranks of ", host.name(), " are on several hosts"));
  }
  std::unique_ptr<PeerCounters> counters(new PeerCounters(host.rank(), host.size()));
  absl::Status status = CudaStatus(device.Select(), "selecting the device");
  if (status.ok() && FindBatchMemOp() == nullptr) {
    status = absl::UnavailableError("the driver has no stream memory operations");
  }
  const std::string name = absl::StrCat("/muster-", getpid(), "-", absl::GetCurrentTimeNanos());
  if (status.ok() && host.rank() == 0) status = counters->Map(name, /*make=*/true);
  ASSIGN_OR_RETURN(const std::vector<std::string> names, GatherTexts(host, name));
  if (status.ok() && host.rank() != 0) status = counters->Map(names[0], /*make=*/false);
  // Loading the kernel may wait for the device, so it is loaded here, before that waits for a peer.
  if (status.ok()) {
    status = kernels::cuda::PeerBarrier(nullptr, reinterpret_cast<uint32_t*>(counters->on_device_),
                                        0, 1, 0);
  }
  status = AgreeOnStatus(host, status);
  if (host.rank() == 0) shm_unlink(name.c_str());  // every rank has opened it
  RETURN_IF_ERROR(status);
  return counters;
}

absl::Status PeerCounters::Map(const std::string& name, bool make) {
  const size_t bytes = static_cast<size_t>(size_) * size_ * kCounterBytes;
  const int file = shm_open(name.c_str(), make ? O_RDWR | O_CREAT | O_EXCL : O_RDWR, 0600);
  if (file < 0) {
    return absl::UnavailableError(absl::StrCat("shared memory ", name, ": ", strerror(errno)));
  }
  void* memory = MAP_FAILED;
  if (!make || ftruncate(file, static_cast<off_t>(bytes)) == 0) {
    memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  }
  const int error = errno;
  close(file);
  if (memory == MAP_FAILED) {
    return absl::UnavailableError(absl::StrCat("shared memory ", name, ": ", strerror(error)));
  }
  memory_ = static_cast<char*>(memory);
  RETURN_IF_ERROR(CudaStatus(cudaHostRegister(memory_, bytes, cudaHostRegisterMapped),
                             "registering shared memory"));
  registered_ = true;
  void* on_device = nullptr;
  RETURN_IF_ERROR(
      CudaStatus(cudaHostGetDevicePointer(&on_device, memory_, 0), "mapping shared memory"));
  on_device_ = static_cast<char*>(on_device);
  return absl::OkStatus();
}

PeerCounters::~PeerCounters() {
  if (registered_) cudaHostUnregister(memory_);
  cudaGetLastError();
  if (memory_ != nullptr) {
    munmap(memory_, static_cast<size_t>(size_) * size_ * kCounterBytes);
  }
}

volatile uint32_t* PeerCounters::Counter(int from, int to) const {
  return reinterpret_cast<volatile uint32_t*>(memory_ + (from * size_ + to) * kCounterBytes);
}

absl::Status PeerCounters::Barrier(cudaStream_t stream, bool in_warp) {
  const uint32_t value = barriers_.fetch_add(1, std::memory_order_relaxed) + 1;
  int priority = 0;
  RETURN_IF_ERROR(CudaStatus(cudaStreamGetPriority(stream, &priority), "asking a stream"));
  if (priority < 0 && !in_warp) return BarrierInFrontEnd(stream, value);
  return kernels::cuda::PeerBarrier(stream, reinterpret_cast<uint32_t*>(on_device_), rank_, size_,
                                    value);
}

absl::Status PeerCounters::BarrierInFrontEnd(cudaStream_t stream, uint32_t value) {
  std::vector<CUstreamBatchMemOpParams> operations;
  const auto address = [&](int from, int to) {
    return reinterpret_cast<CUdeviceptr>(on_device_ + (from * size_ + to) * kCounterBytes);
  };
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    CUstreamBatchMemOpParams write = {};
    write.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
    write.writeValue.address = address(rank_, peer);
    write.writeValue.value = value;
    operations.push_back(write);
  }
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    CUstreamBatchMemOpParams wait = {};
    wait.waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
    wait.waitValue.address = address(peer, rank_);
    wait.waitValue.value = value;
    wait.waitValue.flags = CU_STREAM_WAIT_VALUE_GEQ;  // cyclic
    operations.push_back(wait);
  }
  const CUresult result =
      FindBatchMemOp()(reinterpret_cast<CUstream>(stream), static_cast<unsigned>(operations.size()),
                       operations.data(), 0);
  if (result == CUDA_SUCCESS) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("a barrier of the peers: error ",
                                          static_cast<int>(result), " of the CUDA driver"));
}

void PeerCounters::Release() {
  const uint32_t value = barriers_.load(std::memory_order_relaxed) + kReleased;
  for (int from = 0; from < size_; ++from) {
    if (from != rank_) *Counter(from, rank_) = value;
  }
}

}  // namespace muster::parallel
