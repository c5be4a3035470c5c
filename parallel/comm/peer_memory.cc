#include "parallel/comm/peer_memory.h"

#include <cuda.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "kernels/device/cuda_status.h"
#include "kernels/peers/peer_barrier.h"
#include "parallel/comm/gather_texts.h"
#include "parallel/comm/peer_pulls.h"

namespace muster::parallel {
namespace {

using kernels::Tensor;
using kernels::cuda::CudaStatus;

// A line of the host's caches: no two ranks write to one.
constexpr int64_t kCounterBytes = kernels::cuda::kPeerBarrierStride * sizeof(uint32_t);
// Far ahead of every wait, and near enough to compare as later.
constexpr uint32_t kReleased = uint32_t{1} << 30;

// What is read of a peer to time it.
constexpr int64_t kTimedBytes = 16 << 20;

// The machine, not the container: CUDA's handles do not care for namespaces. As for NCCL, two host
// ids are two machines.
std::string HostIdentity() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  const char* const host_id = std::getenv("NCCL_HOSTID");
  return absl::StrReplaceAll(absl::StrCat(id, "/", host_id == nullptr ? "" : host_id),
                             {{" ", "_"}});
}

// Tells this process from all others of the machine: pids repeat between containers.
const std::string& ProcessIdentity() {
  static const std::string identity = [] {
    std::ifstream file("/proc/sys/kernel/random/uuid");
    std::string id;
    std::getline(file, id);
    return id;
  }();
  return identity;
}

absl::StatusOr<std::vector<std::string>> Exchange(Communicator& host, const std::string& text) {
  const std::unique_ptr<kernels::Device> cpu = kernels::MakeCpuDevice(1);
  ASSIGN_OR_RETURN(const std::unique_ptr<kernels::Stream> stream, cpu->MakeStream());
  return GatherTexts(host, *stream, text);
}

// The same on every rank: OK, or kUnavailable with the reason of the first rank that has one.
absl::Status Agree(Communicator& host, const absl::Status& mine) {
  ASSIGN_OR_RETURN(const std::vector<std::string> texts,
                   Exchange(host, mine.ok() ? "" : std::string(mine.message())));
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    if (texts[rank].empty()) continue;
    return absl::UnavailableError(
        absl::StrCat("rank ", rank, " of ", host.name(), ": ", texts[rank]));
  }
  return absl::OkStatus();
}

template <typename F>
F DriverFunction(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  if (cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result) !=
          cudaSuccess ||
      result != cudaDriverEntryPointSuccess) {
    cudaGetLastError();
    return nullptr;
  }
  return reinterpret_cast<F>(found);
}

using BatchMemOp = decltype(&cuStreamBatchMemOp);
BatchMemOp FindBatchMemOp() {
  static const auto found = DriverFunction<BatchMemOp>("cuStreamBatchMemOp");
  return found;
}

// One rank's part of what Share exchanges: "host process ordinal", then per region
// "handle offset bytes address layout".
absl::StatusOr<std::string> Describe(const kernels::cuda::CudaDevice& device,
                                     const std::vector<Tensor>& regions,
                                     const std::vector<uint64_t>& layouts) {
  static const auto range = DriverFunction<decltype(&cuMemGetAddressRange)>("cuMemGetAddressRange");
  if (range == nullptr) return absl::UnavailableError("the driver does not say where memory is");
  std::vector<std::string> lines = {
      absl::StrCat(HostIdentity(), " ", ProcessIdentity(), " ", device.ordinal())};
  for (size_t i = 0; i < regions.size(); ++i) {
    const Tensor& region = regions[i];
    if (region.empty()) {
      lines.emplace_back("- 0 0 0 0");
      continue;
    }
    CUdeviceptr base = 0;
    size_t bytes = 0;
    if (range(&base, &bytes, reinterpret_cast<CUdeviceptr>(region.data())) != CUDA_SUCCESS) {
      return absl::InternalError("a region is not memory of the device");
    }
    cudaIpcMemHandle_t handle;
    RETURN_IF_ERROR(CudaStatus(cudaIpcGetMemHandle(&handle, region.data()), "sharing memory"));
    lines.push_back(absl::StrCat(
        absl::BytesToHexString(absl::string_view(handle.reserved, sizeof(handle.reserved))), " ",
        reinterpret_cast<CUdeviceptr>(region.data()) - base, " ", region.bytes(), " ",
        reinterpret_cast<uintptr_t>(region.data()), " ", i < layouts.size() ? layouts[i] : 0));
  }
  return absl::StrJoin(lines, "\n");
}

}  // namespace

absl::Status PeerMemory::Share(Communicator& host, const std::vector<Tensor>& regions,
                               const ShareOptions& options) {
  CHECK(regions_.empty()) << "memory is shared already";
  options_ = options;
  RETURN_IF_ERROR(CudaStatus(device_.Select(), "selecting the device"));
  rank_ = host.rank();
  const absl::StatusOr<std::string> mine = Describe(device_, regions, options.layouts);
  ASSIGN_OR_RETURN(const std::vector<std::string> texts, Exchange(host, mine.value_or("")));
  regions_.resize(regions.size());
  for (Region& region : regions_) {
    region.base.resize(texts.size());
    region.bytes.resize(texts.size());
    region.layout.resize(texts.size());
  }
  ranks_ = host.size();
  absl::Status status = mine.status();
  for (int of = 0; of < host.size() && status.ok(); ++of) status = Map(host.rank(), of, texts[of]);
  status = Agree(host, status);
  if (!status.ok()) {
    Close();
    return status;
  }
  int64_t bytes = kTimedBytes;
  const std::vector<const char*> peers = Nearest(bytes);
  ASSIGN_OR_RETURN(pulls_at_once_, FastestPulls(host, peers, bytes));
  return absl::OkStatus();
}

std::vector<const char*> PeerMemory::Nearest(int64_t& bytes) const {
  std::vector<const char*> found;
  const int size = ranks_;
  for (int step = 1; step < size && static_cast<int>(found.size()) < kPullsMax; ++step) {
    const int of = (rank_ + step) % size;
    const auto less = [of](const Region& a, const Region& b) { return a.bytes[of] < b.bytes[of]; };
    const auto region = std::max_element(regions_.begin(), regions_.end(), less);
    if (region == regions_.end() || region->base[of] == nullptr) continue;
    found.push_back(region->base[of]);
    bytes = std::min(bytes, region->bytes[of]);
  }
  return found;
}

absl::Status PeerMemory::Map(int rank, int of, const std::string& text) {
  const std::vector<std::string> lines = absl::StrSplit(text, '\n');
  const std::vector<std::string> place = absl::StrSplit(lines[0], ' ');
  int ordinal = 0;
  if (place.size() != 3 || !absl::SimpleAtoi(place[2], &ordinal) ||
      lines.size() != regions_.size() + 1) {
    return absl::UnavailableError(absl::StrCat("rank ", of, " shares nothing"));
  }
  if (place[0] != HostIdentity()) return absl::OkStatus();
  const bool same_process = place[1] == ProcessIdentity();
  if (same_process && of != rank) {
    const cudaError_t enabled = cudaDeviceEnablePeerAccess(ordinal, 0);
    if (enabled == cudaErrorPeerAccessAlreadyEnabled) {
      cudaGetLastError();
    } else {
      RETURN_IF_ERROR(CudaStatus(enabled, absl::StrCat("reading the memory of rank ", of)));
    }
  }
  for (size_t i = 0; i < regions_.size(); ++i) {
    const std::vector<std::string> fields = absl::StrSplit(lines[i + 1], ' ');
    int64_t offset = 0, bytes = 0;
    uint64_t address = 0;
    if (fields.size() != 5 || !absl::SimpleAtoi(fields[1], &offset) ||
        !absl::SimpleAtoi(fields[2], &bytes) || !absl::SimpleAtoi(fields[3], &address) ||
        !absl::SimpleAtoi(fields[4], &regions_[i].layout[of])) {
      return absl::UnavailableError(absl::StrCat("rank ", of, " is of another version"));
    }
    if (bytes == 0) continue;
    char* base = reinterpret_cast<char*>(address);
    if (!same_process) {
      ASSIGN_OR_RETURN(char* const begin, Open(fields[0]));
      base = begin + offset;
    }
    regions_[i].base[of] = base;
    regions_[i].bytes[of] = bytes;
  }
  return absl::OkStatus();
}

absl::StatusOr<char*> PeerMemory::Open(const std::string& hex) {
  char*& opened = opened_[hex];
  if (opened != nullptr) return opened;
  const std::string bytes = absl::HexStringToBytes(hex);
  cudaIpcMemHandle_t handle;
  if (bytes.size() != sizeof(handle.reserved)) return absl::UnavailableError("a broken handle");
  std::memcpy(handle.reserved, bytes.data(), bytes.size());
  void* memory = nullptr;
  RETURN_IF_ERROR(CudaStatus(cudaIpcOpenMemHandle(&memory, handle, cudaIpcMemLazyEnablePeerAccess),
                             absl::StrCat("opening a peer's memory on ", device_.name())));
  opened = static_cast<char*>(memory);
  return opened;
}

void PeerMemory::Close() {
  device_.Select();
  for (const auto& [handle, memory] : opened_) {
    if (memory != nullptr) cudaIpcCloseMemHandle(memory);
  }
  cudaGetLastError();
  opened_.clear();
  regions_.clear();
}

int PeerMemory::Find(const Tensor& data, const std::vector<int>& world_ranks) const {
  const char* const begin = static_cast<const char*>(data.data());
  for (size_t i = 0; i < regions_.size(); ++i) {
    const Region& region = regions_[i];
    const char* const base = region.base[rank_];
    if (base == nullptr || begin < base || begin + data.bytes() > base + region.bytes[rank_])
      continue;
    const bool all = std::all_of(world_ranks.begin(), world_ranks.end(), [&](int of) {
      return region.base[of] != nullptr && region.bytes[of] == region.bytes[rank_] &&
             region.layout[of] == region.layout[rank_];
    });
    return all ? static_cast<int>(i) : -1;
  }
  return -1;
}

char* PeerMemory::At(int region, int of, const void* mine) const {
  return regions_[region].base[of] +
         (static_cast<const char*>(mine) - regions_[region].base[rank_]);
}

absl::StatusOr<std::unique_ptr<PeerCounters>> PeerCounters::Make(
    Communicator& host, kernels::cuda::CudaDevice& device) {
  ASSIGN_OR_RETURN(const std::vector<std::string> hosts, Exchange(host, HostIdentity()));
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
  ASSIGN_OR_RETURN(const std::vector<std::string> names, Exchange(host, name));
  if (status.ok() && host.rank() != 0) status = counters->Map(names[0], /*make=*/false);
  // Loads the kernel, which may wait for the device: not when that waits for a peer.
  if (status.ok()) {
    status = kernels::cuda::PeerBarrier(nullptr, reinterpret_cast<uint32_t*>(counters->on_device_),
                                        0, 1, 0);
  }
  status = Agree(host, status);
  if (host.rank() == 0) shm_unlink(name.c_str());  // all that could have opened it
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

absl::Status PeerCounters::Meet(cudaStream_t stream, bool in_warp) {
  const uint32_t value = meetings_.fetch_add(1, std::memory_order_relaxed) + 1;
  int priority = 0;
  RETURN_IF_ERROR(CudaStatus(cudaStreamGetPriority(stream, &priority), "asking a stream"));
  if (priority < 0 && !in_warp) return MeetInFrontEnd(stream, value);
  return kernels::cuda::PeerBarrier(stream, reinterpret_cast<uint32_t*>(on_device_), rank_, size_,
                                    value);
}

absl::Status PeerCounters::MeetInFrontEnd(cudaStream_t stream, uint32_t value) {
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
  return absl::InternalError(
      absl::StrCat("meeting the peers: error ", static_cast<int>(result), " of the CUDA driver"));
}

void PeerCounters::Release() {
  const uint32_t value = meetings_.load(std::memory_order_relaxed) + kReleased;
  for (int from = 0; from < size_; ++from) {
    if (from != rank_) *Counter(from, rank_) = value;
  }
}

}  // namespace muster::parallel
