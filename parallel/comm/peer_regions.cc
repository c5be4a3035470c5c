#include "parallel/comm/peer_regions.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "base/check.h"
#include "base/proc.h"
#include "base/status_macros.h"
#include "kernels/device/cuda_status.h"
#include "parallel/comm/gather_texts.h"
#include "parallel/comm/peer_driver.h"
#include "parallel/comm/peer_pulls.h"

namespace muster::parallel {
namespace {

using kernels::Tensor;
using kernels::cuda::CudaStatus;

// As much of a peer's memory is read to time the reads.
constexpr int64_t kTimedBytes = 16 << 20;

// Tells this process from all others of the machine: pids repeat between containers.
const std::string& ProcessIdentity() {
  static const std::string identity = RandomId();
  return identity;
}

// What a rank tells the others in Share: a line "host process ordinal", then a line "handle offset
// bytes address layout" per region.
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

std::string HostIdentity() {
  const char* const host_id = std::getenv("NCCL_HOSTID");
  return absl::StrReplaceAll(absl::StrCat(BootId(), "/", host_id == nullptr ? "" : host_id),
                             {{" ", "_"}});
}

absl::Status PeerRegions::Share(Communicator& host, const std::vector<Tensor>& regions,
                                const ShareOptions& options) {
  CHECK(regions_.empty()) << "memory is shared already";
  options_ = options;
  RETURN_IF_ERROR(CudaStatus(device_.Select(), "selecting the device"));
  rank_ = host.rank();
  const absl::StatusOr<std::string> mine = Describe(device_, regions, options.layouts);
  ASSIGN_OR_RETURN(const std::vector<std::string> texts, GatherTexts(host, mine.value_or("")));
  regions_.resize(regions.size());
  for (Region& region : regions_) {
    region.base.resize(texts.size());
    region.bytes.resize(texts.size());
    region.layout.resize(texts.size());
  }
  ranks_ = host.size();
  absl::Status status = mine.status();
  for (int of = 0; of < host.size() && status.ok(); ++of) status = Map(host.rank(), of, texts[of]);
  status = AgreeOnStatus(host, status);
  if (!status.ok()) {
    Close();
    return status;
  }
  int64_t bytes = kTimedBytes;
  const std::vector<const char*> peers = Nearest(bytes);
  ASSIGN_OR_RETURN(pulls_at_once_, FastestPulls(host, peers, bytes));
  return absl::OkStatus();
}

std::vector<const char*> PeerRegions::Nearest(int64_t& bytes) const {
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

absl::Status PeerRegions::Map(int rank, int of, const std::string& text) {
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

absl::StatusOr<char*> PeerRegions::Open(const std::string& hex) {
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

void PeerRegions::Close() {
  device_.Select();
  for (const auto& [handle, memory] : opened_) {
    if (memory != nullptr) cudaIpcCloseMemHandle(memory);
  }
  cudaGetLastError();
  opened_.clear();
  regions_.clear();
}

bool PeerRegions::SharedBy(const Region& region, const std::vector<int>& world_ranks) const {
  return std::all_of(world_ranks.begin(), world_ranks.end(), [&](int of) {
    return region.base[of] != nullptr && region.bytes[of] == region.bytes[rank_] &&
           region.layout[of] == region.layout[rank_];
  });
}

int PeerRegions::Find(const Tensor& data, const std::vector<int>& world_ranks) const {
  const char* const begin = static_cast<const char*>(data.data());
  for (size_t i = 0; i < regions_.size(); ++i) {
    const Region& region = regions_[i];
    const char* const base = region.base[rank_];
    if (base == nullptr || begin < base || begin + data.bytes() > base + region.bytes[rank_])
      continue;
    return SharedBy(region, world_ranks) ? static_cast<int>(i) : -1;
  }
  return -1;
}

Tensor PeerRegions::Largest(const std::vector<int>& world_ranks) const {
  const Region* largest = nullptr;
  for (const Region& region : regions_) {
    if (region.base[rank_] == nullptr || !SharedBy(region, world_ranks)) continue;
    if (largest == nullptr || region.bytes[rank_] > largest->bytes[rank_]) largest = &region;
  }
  if (largest == nullptr) return Tensor();
  return Tensor(largest->base[rank_], kernels::DType::kU8, {largest->bytes[rank_]});
}

char* PeerRegions::At(int region, int of, const void* mine) const {
  return regions_[region].base[of] +
         (static_cast<const char*>(mine) - regions_[region].base[rank_]);
}

}  // namespace muster::parallel
