#include "parallel/train/rank_memory.h"

#include <string>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"
#include "parallel/checkpoint/crc32c.h"
#include "parallel/comm/gather_texts.h"
#include "parallel/comm/peer_memory.h"
#include "parallel/optim/gradient_compressor.h"

namespace muster::parallel {

using kernels::DType;
using kernels::Tensor;

RankMemory::RankMemory(const TrainerInputs& inputs)
    : inputs_(inputs), layout_(inputs.model.parameters(), LayoutOptionsOf(inputs.place())) {}

RankMemory::~RankMemory() = default;

absl::StatusOr<std::unique_ptr<RankMemory>> RankMemory::Make(const TrainerInputs& inputs) {
  std::unique_ptr<RankMemory> memory(new RankMemory(inputs));
  RETURN_IF_ERROR(memory->Allocate());
  return memory;
}

absl::Status RankMemory::Allocate() {
  const kernels::StreamOptions beside = {.threaded = true, .high_priority = true};
  kernels::Device& device = inputs_.device;
  ASSIGN_OR_RETURN(compute_, device.MakeStream());
  ASSIGN_OR_RETURN(communication_, device.MakeStream(beside));
  ASSIGN_OR_RETURN(gathering_, device.MakeStream(beside));
  FlatBuffersOptions storage = StorageOptionsOf(inputs_.place());
  storage.shard = inputs_.groups.shard().rank();
  storage.draw = false;
  storage.host_threads = inputs_.options.host_threads;
  ASSIGN_OR_RETURN(
      flat_, FlatBuffers::Make(device, *compute_, inputs_.model.parameters(), layout_, storage));
  const int64_t bytes = ValueSlots(inputs_.place()) * SizeOf(DType::kF32);
  ASSIGN_OR_RETURN(values_, device.Allocate(bytes));
  ASSIGN_OR_RETURN(host_values_, device.AllocateHost(bytes));
  return absl::OkStatus();
}

absl::Status RankMemory::TakeWorkspace(PipelineExecutor& executor) {
  const BatchShape shape = BatchShapeOf(inputs_.place());
  const bool shares = flat_->options().share_gradients;
  GradientOverlay overlay;
  if (shares)
    overlay = FlatBuffers::OverlayOf(layout_, inputs_.model.parameters(), flat_->options());
  executor.TakeMemory(arena_, shape, shares ? &overlay : nullptr);
  if (AlignsWorkspaces(inputs_.place(), inputs_.device.kind())) {
    ASSIGN_OR_RETURN(workspace_, AlignedWorkspace());
    if (!workspace_.empty()) {
      arena_.PadTo(workspace_);
      executor.TakeMemory(arena_, shape, shares ? &overlay : nullptr);
    }
  }
  RETURN_IF_ERROR(Annotate(
      arena_.Commit(inputs_.device),
      absl::StrFormat("activations of micro_batch %d x %d tokens take %.1f MB", shape.batch,
                      shape.sequence, static_cast<double>(arena_.peak_bytes()) * 1e-6)));
  const Tensor gradients = executor.TakeMemory(arena_, shape, shares ? &overlay : nullptr);
  if (shares) flat_->SetGradientOverlay(gradients);
  return absl::OkStatus();
}

// All ranks decide alike, since all of them get everything. It goes through the world, whose
// communicator is connected in any case.
absl::StatusOr<std::vector<int64_t>> RankMemory::AlignedWorkspace() {
  Communicator& world = inputs_.world();
  const Mesh& mesh = inputs_.groups.mesh();
  const std::string mine = absl::StrJoin(arena_.allocations(), " ");
  ASSIGN_OR_RETURN(const std::vector<std::string> sums,
                   GatherTexts(world, *compute_, absl::StrCat(Crc32c(mine), " ", mine.size())));
  const auto first_of_group = [&](int rank) {
    PerAxis coordinate = mesh.CoordinateOf(rank);
    coordinate[Axis::kTensor] = 0;
    return mesh.RankOf(coordinate);
  };
  bool alike = true;
  for (int rank = 0; rank < world.size(); ++rank) {
    alike = alike && sums[rank] == sums[first_of_group(rank)];
  }
  if (alike) return std::vector<int64_t>();
  ASSIGN_OR_RETURN(const std::vector<std::string> texts, GatherTexts(world, *compute_, mine));
  std::vector<std::vector<int64_t>> group;
  for (int rank = 0; rank < world.size(); ++rank) {
    if (first_of_group(rank) != first_of_group(world.rank())) continue;
    std::vector<int64_t>& sizes = group.emplace_back();
    for (const absl::string_view number : absl::StrSplit(texts[rank], ' ')) {
      if (!absl::SimpleAtoi(number, &sizes.emplace_back())) {
        return absl::InternalError(absl::StrCat("rank ", rank, " sent \"", number, "\" as bytes"));
      }
    }
  }
  std::vector<int64_t> most = MostOfEach(group);
  if (most.empty()) {
    inputs_.hooks.OnWarning(absl::UnavailableError(
        "the shares of this tensor group are too uneven for memory at the same offsets: its "
        "collectives go through NCCL (parallel.copy_engines is without effect on them)"));
  }
  return most;
}

absl::Status RankMemory::ShareWithPeers() {
  PeerMemory* const peers = inputs_.world().peer_memory();
  if (!inputs_.options.copy_engines || peers == nullptr) return absl::OkStatus();
  std::vector<Tensor> memory = flat_->Exchanged();
  uint64_t buckets = 0;
  for (const FlatLayout::Bucket& bucket : layout_.buckets()) {
    buckets = buckets * 31 + static_cast<uint64_t>(bucket.range.size());
  }
  ShareOptions options;
  options.least_bytes = inputs_.options.copy_engines_least_bytes;
  options.layouts.assign(memory.size(), buckets);
  memory.push_back(arena_.memory());
  options.layouts.push_back(arena_.layout());
  auto shared = peers->Share(memory, options);
  if (shared.ok()) {
    shared_ = *std::move(shared);
    return TakeMemoryForSums();
  }
  // kUnavailable comes on every rank, so all of them go on without.
  if (!absl::IsUnavailable(shared.status())) return shared.status();
  inputs_.hooks.OnWarning(
      Annotate(shared.status(),
               "collectives go through NCCL alone (parallel.copy_engines is without effect)"));
  return absl::OkStatus();
}

// The shard and the replicate group reduce gradients on one stream, so they can use the same
// memory. The tensor group works at the same time and has its own.
absl::Status RankMemory::TakeMemoryForSums() {
  const SumBytes bytes = SumBytesOf(inputs_.place(), layout_, inputs_.device.kind());
  const auto take = [&](int64_t size, std::unique_ptr<kernels::Buffer>& buffer) -> absl::Status {
    if (size == 0) return absl::OkStatus();
    ASSIGN_OR_RETURN(buffer, inputs_.device.Allocate(size));
    return absl::OkStatus();
  };
  const auto use = [](Communicator& group, const std::unique_ptr<kernels::Buffer>& buffer) {
    if (PeerMemory* const peers = group.peer_memory(); peers != nullptr) {
      peers->UseForSums(buffer == nullptr ? Tensor()
                                          : Tensor(buffer->data(), DType::kU8, {buffer->bytes()}));
    }
  };
  RETURN_IF_ERROR(take(bytes.gradients, gradient_sums_));
  RETURN_IF_ERROR(take(bytes.tensor, tensor_sums_));
  MeshGroups& groups = inputs_.groups;
  use(groups.shard(), gradient_sums_);
  use(groups.replicate(), gradient_sums_);
  use(groups.Along({Axis::kTensor}), tensor_sums_);
  const bool chunked = inputs_.model.shape().tensor_overlap == TensorOverlap::kChunked;
  const bool in_warp = inputs_.options.waits_in_warp;
  const auto wait = [](Communicator& group, bool in_warp) {
    if (PeerMemory* const peers = group.peer_memory(); peers != nullptr) peers->WaitInWarp(in_warp);
  };
  wait(groups.Along({Axis::kTensor}), in_warp || chunked);
  wait(groups.Along({Axis::kContext}), in_warp);
  return absl::OkStatus();
}

void RankMemory::StopSharing(bool all_ranks) {
  if (shared_ != nullptr && !all_ranks) shared_->Abandon();
  shared_.reset();
}

int64_t RankMemory::state_bytes() const {
  const FlatBuffersOptions& storage = flat_->options();
  const int64_t in_workspace =
      storage.share_gradients
          ? FlatBuffers::OverlayOf(layout_, inputs_.model.parameters(), storage).bytes
          : 0;
  return FlatBuffers::Bytes(layout_, storage) + in_workspace +
         GradientCompressor::StateBytes(inputs_.options.compression, layout_);
}

MemoryUse RankMemory::Predicted() const {
  TrainerPlace place = inputs_.place();
  if (!workspace_.empty()) place.workspace = &workspace_;
  return PredictMemory(place, inputs_.device.kind());
}

}  // namespace muster::parallel
