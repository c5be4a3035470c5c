#include "parallel/comm/peer_group.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/status_macros.h"
#include "kernels/device/cuda_status.h"
#include "kernels/device/device_cuda.h"
#include "kernels/peers/sum_parts.h"
#include "parallel/comm/peer_pulls.h"

namespace muster::parallel {
namespace {

using kernels::DType;
using kernels::Stream;
using kernels::Tensor;
using kernels::cuda::CudaStatus;

// Parts begin at whole lines of memory, and their rows have 16 bytes whatever the type.
constexpr int64_t kAlignElements = 128;

int64_t RoundUp(int64_t n) { return (n + kAlignElements - 1) / kAlignElements * kAlignElements; }

char* At(const Tensor& data, int64_t element) {
  return static_cast<char*>(data.data()) + element * SizeOf(data.dtype());
}

cudaStream_t Handle(Stream& stream) { return kernels::cuda::CudaStream::Of(stream).handle(); }

}  // namespace

PeerGroup::PeerGroup(std::shared_ptr<PeerRegions> regions, std::unique_ptr<PeerCounters> counters,
                     std::vector<int> world_ranks, int rank)
    : regions_(std::move(regions)),
      counters_(std::move(counters)),
      world_ranks_(std::move(world_ranks)),
      rank_(rank) {}

PeerGroup::~PeerGroup() {
  for (const Lane& lane : lanes_) {
    if (lane.ended != nullptr) cudaEventDestroy(lane.ended);
    if (lane.stream != nullptr) cudaStreamDestroy(lane.stream);
  }
  if (begun_ != nullptr) cudaEventDestroy(begun_);
  if (ended_ != nullptr) cudaEventDestroy(ended_);
}

bool PeerGroup::Covers(const Tensor& data) const {
  return data.bytes() >= regions_->options().least_bytes && regions_->Find(data, world_ranks_) >= 0;
}

bool PeerGroup::Covers(const std::vector<AllToAllItem>& items) const {
  int64_t bytes = 0;
  for (const AllToAllItem& item : items) {
    if (regions_->Find(item.in, world_ranks_) < 0) return false;
    bytes += item.in.bytes();
  }
  return bytes >= regions_->options().least_bytes;
}

bool PeerGroup::CoversPart(const Tensor& part) const {
  return part.bytes() * size() >= regions_->options().least_bytes &&
         regions_->Find(part, world_ranks_) >= 0;
}

bool PeerGroup::CoversSum(const Tensor& data, ReduceOp op) const {
  const DType type = data.dtype();
  const bool summed = type == DType::kF32 || type == DType::kBF16 || type == DType::kF16;
  return op == ReduceOp::kSum && summed && Covers(data) && !sums_.empty() &&
         sums_.bytes() >= size() * kAlignElements * SizeOf(type);
}

absl::Status PeerGroup::Begin(Stream& stream) {
  const cudaStream_t handle = Handle(stream);
  if (ended_ == nullptr) {
    RETURN_IF_ERROR(
        CudaStatus(cudaEventCreateWithFlags(&ended_, cudaEventDisableTiming), "making an event"));
  } else if (last_ != handle) {
    RETURN_IF_ERROR(CudaStatus(cudaStreamWaitEvent(handle, ended_), "waiting for the last call"));
  }
  last_ = handle;
  open_ = false;
  return Barrier(stream);
}

absl::Status PeerGroup::End(Stream& stream, bool open) {
  if (!open) RETURN_IF_ERROR(Barrier(stream));
  open_ = open;
  return CudaStatus(cudaEventRecord(ended_, Handle(stream)), "recording an event");
}

absl::Status PeerGroup::Close(Stream& stream) {
  if (!open_) return absl::OkStatus();
  RETURN_IF_ERROR(Begin(stream));
  return CudaStatus(cudaEventRecord(ended_, Handle(stream)), "recording an event");
}

absl::Status PeerGroup::Barrier(Stream& stream) {
  return counters_->Barrier(Handle(stream), in_warp_);
}

absl::Status PeerGroup::MakeLanes() {
  int least = 0, greatest = 0;
  RETURN_IF_ERROR(CudaStatus(cudaDeviceGetStreamPriorityRange(&least, &greatest), "priorities"));
  RETURN_IF_ERROR(
      CudaStatus(cudaEventCreateWithFlags(&begun_, cudaEventDisableTiming), "an event"));
  lanes_.resize(std::min(size(), kPullsMax));
  for (Lane& lane : lanes_) {
    RETURN_IF_ERROR(CudaStatus(
        cudaStreamCreateWithPriority(&lane.stream, cudaStreamNonBlocking, greatest), "a stream"));
    RETURN_IF_ERROR(
        CudaStatus(cudaEventCreateWithFlags(&lane.ended, cudaEventDisableTiming), "an event"));
  }
  return absl::OkStatus();
}

absl::Status PeerGroup::Pull(Stream& stream, const std::vector<Copy>& copies) {
  const cudaStream_t handle = Handle(stream);
  const bool in_turns = regions_->pulls_at_once() == 1;
  if (lanes_.empty()) RETURN_IF_ERROR(MakeLanes());
  RETURN_IF_ERROR(CudaStatus(cudaEventRecord(begun_, handle), "recording an event"));
  std::vector<bool> used(lanes_.size(), false);
  for (size_t i = 0; i < copies.size(); ++i) {
    const Copy& copy = copies[i];
    if (copy.bytes == 0) continue;
    const Tensor part(const_cast<void*>(copy.mine), DType::kU8, {copy.bytes});
    const int region = regions_->Find(part, world_ranks_);
    CHECK_GE(region, 0);
    cudaStream_t on = handle;
    // A copy within the device takes no bandwidth of the links.
    if (!in_turns || copy.of == rank_) {
      const size_t lane = i % lanes_.size();
      on = lanes_[lane].stream;
      if (!used[lane]) {
        RETURN_IF_ERROR(CudaStatus(cudaStreamWaitEvent(on, begun_), "waiting for a call"));
      }
      used[lane] = true;
    }
    RETURN_IF_ERROR(
        CudaStatus(cudaMemcpyAsync(copy.to, regions_->At(region, world_ranks_[copy.of], copy.mine),
                                   static_cast<size_t>(copy.bytes), cudaMemcpyDefault, on),
                   "copying from a peer"));
  }
  for (size_t lane = 0; lane < lanes_.size(); ++lane) {
    if (!used[lane]) continue;
    const cudaEvent_t ended = lanes_[lane].ended;
    RETURN_IF_ERROR(CudaStatus(cudaEventRecord(ended, lanes_[lane].stream), "recording an event"));
    RETURN_IF_ERROR(CudaStatus(cudaStreamWaitEvent(handle, ended), "waiting for a copy"));
  }
  return absl::OkStatus();
}

absl::Status PeerGroup::SumPart(Stream& stream, const Tensor& data, int64_t begin,
                                const Tensor& sum) {
  const int64_t count = sum.elements();
  const int64_t size_of = SizeOf(data.dtype());
  const int64_t fits = sums_.bytes() / size() / size_of / kAlignElements * kAlignElements;
  char* const staging = static_cast<char*>(sums_.data());
  for (int64_t done = 0; done < count; done += fits) {
    const int64_t n = std::min(fits, count - done);
    const char* const from = At(data, begin + done);
    std::vector<Copy> copies;
    for (int step = 1; step < size(); ++step) {
      const int of = (rank_ + step) % size();
      copies.push_back({of, from, staging + of * n * size_of, n * size_of});
    }
    RETURN_IF_ERROR(Pull(stream, copies));
    kernels::cuda::SumPartsWithOwn(stream, Tensor(staging, data.dtype(), {size() * n}),
                                   Tensor(const_cast<char*>(from), data.dtype(), {n}), rank_,
                                   Tensor(At(sum, done), data.dtype(), {n}));
  }
  return absl::OkStatus();
}

absl::Status PeerGroup::ReduceScatter(Stream& stream, const Tensor& data, const Tensor& sum,
                                      bool open) {
  RETURN_IF_ERROR(Begin(stream));
  RETURN_IF_ERROR(SumPart(stream, data, data.elements() / size() * rank_, sum));
  return End(stream, open);
}

absl::Status PeerGroup::AllReduce(Stream& stream, const Tensor& data) {
  const int64_t part = RoundUp((data.elements() + size() - 1) / size());
  const auto begin = [&](int of) { return std::min(data.elements(), part * of); };
  const auto count = [&](int of) { return begin(of + 1) - begin(of); };
  RETURN_IF_ERROR(Begin(stream));
  RETURN_IF_ERROR(SumPart(stream, data, begin(rank_),
                          Tensor(At(data, begin(rank_)), data.dtype(), {count(rank_)})));
  // All ranks have read this rank's other parts, and their sums are complete.
  RETURN_IF_ERROR(Barrier(stream));
  std::vector<Copy> copies;
  for (int step = 1; step < size(); ++step) {
    const int of = (rank_ + step) % size();
    void* const place = At(data, begin(of));
    copies.push_back({of, place, place, count(of) * SizeOf(data.dtype())});
  }
  RETURN_IF_ERROR(Pull(stream, copies));
  return End(stream);
}

absl::Status PeerGroup::AllGather(Stream& stream, const Tensor& data) {
  const int64_t part = data.elements() / size();
  RETURN_IF_ERROR(Begin(stream));
  std::vector<Copy> copies;
  for (int step = 1; step < size(); ++step) {
    const int of = (rank_ + step) % size();
    void* const place = At(data, part * of);
    copies.push_back({of, place, place, part * SizeOf(data.dtype())});
  }
  RETURN_IF_ERROR(Pull(stream, copies));
  return End(stream);
}

absl::Status PeerGroup::AllGatherFrom(Stream& stream, const Tensor& in, const Tensor& out) {
  RETURN_IF_ERROR(Begin(stream));
  std::vector<Copy> copies;
  for (int step = 1; step <= size(); ++step) {
    const int of = (rank_ + step) % size();
    copies.push_back({of, in.data(), At(out, in.elements() * of), in.bytes()});
  }
  RETURN_IF_ERROR(Pull(stream, copies));
  return End(stream);
}

absl::Status PeerGroup::AllToAll(Stream& stream, const Tensor& in, const Tensor& out) {
  const int64_t part = in.elements() / size();
  const void* const mine = At(in, part * rank_);
  RETURN_IF_ERROR(Begin(stream));
  std::vector<Copy> copies;
  for (int step = 1; step <= size(); ++step) {
    const int of = (rank_ + step) % size();
    copies.push_back({of, mine, At(out, part * of), part * SizeOf(in.dtype())});
  }
  RETURN_IF_ERROR(Pull(stream, copies));
  return End(stream);
}

absl::Status PeerGroup::AllToAllBatch(Stream& stream, const std::vector<AllToAllItem>& items) {
  RETURN_IF_ERROR(Begin(stream));
  std::vector<Copy> copies;
  for (const AllToAllItem& item : items) {
    const Tensor mine = item.PartFor(rank_, size());
    for (int step = 1; step <= size(); ++step) {
      const int of = (rank_ + step) % size();
      copies.push_back({of, mine.data(), item.PartFrom(of, size()).data(), mine.bytes()});
    }
  }
  RETURN_IF_ERROR(Pull(stream, copies));
  return End(stream);
}

absl::Status PeerGroup::AllGatherInSteps(Stream& stream, const Tensor& in, const Tensor& out,
                                         absl::FunctionRef<void(int from)> arrived) {
  RETURN_IF_ERROR(Begin(stream));
  for (int step = 1; step < size(); ++step) {
    const int from = (rank_ + size() - step) % size();
    RETURN_IF_ERROR(Pull(stream, {{from, in.data(), At(out, in.elements() * from), in.bytes()}}));
    arrived(from);
  }
  return End(stream);
}

absl::Status PeerGroup::AllToAllInSteps(Stream& stream, const Tensor& in, const Tensor& out,
                                        absl::FunctionRef<void(int to)> before) {
  const int64_t part = in.elements() / size();
  for (int step = 1; step < size(); ++step) {
    const int from = (rank_ + size() - step) % size();
    before((rank_ + step) % size());
    // All ranks have enqueued what this step sends.
    RETURN_IF_ERROR(step == 1 ? Begin(stream) : Barrier(stream));
    RETURN_IF_ERROR(Pull(
        stream, {{from, At(in, part * rank_), At(out, part * from), part * SizeOf(in.dtype())}}));
  }
  return End(stream);
}

absl::Status PeerGroup::Rotate(Stream& stream, const Tensor& in, const Tensor& out, int by) {
  RETURN_IF_ERROR(Begin(stream));
  const int from = ((rank_ - by) % size() + size()) % size();
  RETURN_IF_ERROR(Pull(stream, {{from, in.data(), out.data(), in.bytes()}}));
  return End(stream);
}

}  // namespace muster::parallel
