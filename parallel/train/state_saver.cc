#include "parallel/train/state_saver.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>

#include "base/status_macros.h"
#include "kernels/device/device.h"
#include "kernels/memory/memory.h"
#include "kernels/optimizer/optimizer.h"
#include "kernels/tensor.h"
#include "parallel/train/checkpoint_names.h"
#include "parallel/train/failure.h"
#include "parallel/train/memory.h"

namespace muster::parallel {

using kernels::DType;
using kernels::Tensor;

// Copies each chunk from the device when it is about to be written.
class StateSaver::ChunkReader {
 public:
  // Enqueues a copy to host memory of elements [first, first + to.elements()).
  using Copy = std::function<void(int64_t first, const Tensor& to)>;

  static absl::StatusOr<std::unique_ptr<ChunkReader>> Make(kernels::Device& device,
                                                           kernels::Stream& stream,
                                                           const SaveElements& elements) {
    ASSIGN_OR_RETURN(auto buffer, device.AllocateHost(elements.at_once * SizeOf(DType::kF32)));
    return std::unique_ptr<ChunkReader>(
        new ChunkReader(stream, std::move(buffer), elements.at_once));
  }

  // A chunk that is elements [first, ...) of what `copy` reads. Must not outlive the reader.
  SaveChunk Chunk(std::string tensor, const std::vector<int64_t>& shape, Box box, Copy copy,
                  int64_t first) {
    SaveChunk chunk{std::move(tensor), DType::kF32, shape, std::move(box)};
    const int64_t count = chunk.box.elements();
    unread_ += count * SizeOf(DType::kF32);
    chunk.produce = [this, copy = std::move(copy), first, count](void* out) {
      status_ = Read(copy, first, count, static_cast<float*>(out));
      return status_;
    };
    return chunk;
  }
  // Counts in `work` what is read from now on; null: in nothing.
  void CountIn(ControlChannel::Work* work) {
    work_ = work;
    if (work != nullptr) work->Expect(unread_);
  }
  // The device's error, where one has ended a chunk.
  const absl::Status& status() const { return status_; }

 private:
  ChunkReader(kernels::Stream& stream, std::unique_ptr<kernels::Buffer> buffer, int64_t elements)
      : stream_(stream), buffer_(std::move(buffer)), elements_(elements) {}

  absl::Status Read(const Copy& copy, int64_t first, int64_t count, float* out) {
    auto* const staging = static_cast<float*>(buffer_->data());
    // A peer is lost: the save has failed, however long writing the rest would take.
    if (work_ != nullptr && work_->pointless()) return absl::CancelledError("a peer is lost");
    for (int64_t at = 0; at < count; at += elements_) {
      const int64_t now = std::min(elements_, count - at);
      copy(first + at, Tensor(staging, DType::kF32, {now}));
      RETURN_IF_ERROR(stream_.Synchronize());
      std::memcpy(out + at, staging, now * SizeOf(DType::kF32));
    }
    unread_ -= count * SizeOf(DType::kF32);
    if (work_ != nullptr) work_->Advance(count * SizeOf(DType::kF32));
    return absl::OkStatus();
  }

  kernels::Stream& stream_;
  const std::unique_ptr<kernels::Buffer> buffer_;  // pinned, so that kernels can write it
  const int64_t elements_;
  int64_t unread_ = 0;  // bytes
  ControlChannel::Work* work_ = nullptr;
  absl::Status status_;
};

void StateSaver::AddState(ChunkReader& reader, std::vector<SaveChunk>& chunks) {
  const FlatLayout& layout = memory_.layout();
  FlatBuffers& flat = memory_.flat();
  for (int i = 0; i < static_cast<int>(layout.buckets().size()); ++i) {
    const FlatRange saved = shares_.Saved(layout, i);
    const int64_t begin = layout.Part(i, inputs_.groups.shard().rank()).begin;
    for (int state = 0; state < kOptimizerStates; ++state) {
      const auto copy = [this, &flat, i, state](int64_t first, const Tensor& to) {
        if (state == 0) {
          flat.ReadMaster(memory_.compute(), i, first, to);
        } else {
          const Tensor moment = state == 1 ? flat.m(i) : flat.v(i);
          kernels::Copy(memory_.compute(), moment.Rows(first, to.elements()), to);
        }
      };
      for (const FlatSlice& slice : layout.Slices(saved)) {
        const Parameter& parameter = inputs_.model.parameters().at(slice.parameter);
        if (!shares_.Saves(parameter)) continue;
        int64_t at = slice.flat - begin;
        for (Box& box : parameter.Boxes(slice.first, slice.first + slice.count)) {
          const int64_t size = box.elements();
          chunks.push_back(reader.Chunk(StateName(state, parameter.name), parameter.global_shape,
                                        std::move(box), copy, at));
          at += size;
        }
      }
    }
  }
}

void StateSaver::AddResiduals(ChunkReader& reader, std::vector<SaveChunk>& chunks) {
  GradientCompressor* const compressor = gradients_.compressor();
  if (compressor == nullptr) return;
  const Communicator& group = inputs_.gradient_group();
  for (int i = 0; i < static_cast<int>(memory_.layout().buckets().size()); ++i) {
    const FlatLayout::Bucket& bucket = memory_.layout().buckets()[i];
    if (!bucket.compressed) continue;
    for (int state = 0; state < compressor->states(); ++state) {
      const auto copy = [this, compressor, i, state](int64_t first, const Tensor& to) {
        kernels::Copy(memory_.compute(), compressor->state(state, i).Rows(first, to.elements()),
                      to);
      };
      for (const ParameterId id : bucket.parameters) {
        const Parameter& parameter = inputs_.model.parameters().at(id);
        // The ranks of a tensor group compress the same gradient the same way.
        if (!inputs_.Owns(parameter)) continue;
        int64_t at = memory_.layout().offset(id) - bucket.range.begin;
        for (const Box& box : parameter.Boxes(0, parameter.elements())) {
          chunks.push_back(reader.Chunk(ResidualName(state, parameter.name),
                                        PerRank(parameter.global_shape, group.size()),
                                        OfRank(box, group.rank()), copy, at));
          at += box.elements();
        }
      }
    }
  }
}

CheckpointState StateSaver::Describe(const TrainingPosition& position,
                                     const kernels::StepState& optimizer) const {
  CheckpointState state;
  state.id = {inputs_.options.job, position.step, inputs_.options.epoch,
              inputs_.options.membership};
  state.consumed_samples = position.consumed_samples;
  const Mesh& mesh = inputs_.groups.mesh();
  for (const Axis axis : kAxes) {
    if (mesh.degree(axis) > 1 || axis == Axis::kData) {
      state.mesh[std::string(Name(axis))] = mesh.degree(axis);
    }
  }
  state.integers[kSeedKey] = static_cast<int64_t>(inputs_.options.seed);
  state.integers[kDataFingerprintKey] = static_cast<int64_t>(inputs_.training.fingerprint());
  state.integers[kUpdatesKey] = optimizer.updates;
  if (optimizer_.loss_scale() != nullptr) {
    state.numbers[kLossScaleKey] = optimizer.loss_scale;
    state.integers[kCleanStepsKey] = optimizer.clean_steps;
    state.integers[kHysteresisKey] = optimizer.hysteresis;
  }
  WriteDescription(inputs_.model.description(), state);
  state.files = inputs_.options.checkpoint_files;
  return state;
}

absl::StatusOr<std::vector<std::string>> StateSaver::Gather(absl::FunctionRef<std::string()> text,
                                                            ChunkReader& reader) {
  std::string own;
  const auto make = [&](ControlChannel::Work& work) {
    reader.CountIn(&work);
    own = text();
    reader.CountIn(nullptr);
    return absl::OkStatus();
  };
  const auto report = [this](double fraction) { inputs_.hooks.OnProgress("saving", fraction); };
  RETURN_IF_ERROR(channel_.Run(make, report).status());
  return channel_.Gather(own);
}

absl::Status StateSaver::Save(const TrainingPosition& position) {
  if (saved_step_ == position.step) return absl::OkStatus();
  inputs_.hooks.OnPhase("saving");
  const auto start = std::chrono::steady_clock::now();
  // Nothing is enqueued meanwhile, so that chunks can be read when they are written.
  const SaveElements elements = SaveElementsOf(memory_.layout(), inputs_.groups.replicate().size(),
                                               /*compressed=*/gradients_.compressor() != nullptr);
  auto reader = ChunkReader::Make(inputs_.device, memory_.compute(), elements);
  if (!reader.ok()) return Mark(reader.status(), FailureDomain::kMemory);
  std::vector<SaveChunk> chunks;
  AddState(**reader, chunks);
  AddResiduals(**reader, chunks);
  ASSIGN_OR_RETURN(const kernels::StepState optimizer, optimizer_.GetState(memory_.compute()));

  const CheckpointState state = Describe(position, optimizer);
  absl::Status gathered;
  absl::StatusOr<SaveResult> result = SaveCheckpoint(
      inputs_.files, inputs_.options.checkpoint_root, state, inputs_.world().rank(), chunks,
      [&](absl::FunctionRef<std::string()> text) {
        auto texts = Gather(text, **reader);
        gathered = texts.status();
        return texts;
      },
      shares_.several_directories() ? inputs_.options.checkpoint_groups : std::vector<int>());
  if (!gathered.ok()) return gathered;
  if (!(*reader)->status().ok()) return (*reader)->status();
  if (!result.ok()) {
    // The first error of any rank: these two codes come from its communicator, not from its files.
    const bool peer = absl::IsAborted(result.status()) || absl::IsDeadlineExceeded(result.status());
    return Mark(result.status(), peer ? FailureDomain::kCommunication : FailureDomain::kStorage);
  }

  SavedCheckpoint saved;
  saved.id = state.id;
  saved.result = *std::move(result);
  saved.consumed_samples = position.consumed_samples;
  saved.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  saved_step_ = position.step;
  checkpoints_.push_back(saved.id);
  inputs_.hooks.OnSaved(saved);
  return absl::OkStatus();
}

void StateSaver::Restored(int64_t step, const std::vector<CheckpointId>& committed) {
  saved_step_ = step;
  for (auto id = committed.rbegin(); id != committed.rend(); ++id) {
    if (id->step <= step) checkpoints_.push_back(*id);
  }
}

void StateSaver::Prune() {
  const TrainerOptions& options = inputs_.options;
  if (!shares_.leads_directory() || options.checkpoint_root.empty()) return;
  const int64_t committed = inputs_.hooks.CommittedStep();
  if (committed <= pruned_at_) return;
  pruned_at_ = committed;
  std::vector<CheckpointId> keep;
  for (auto id = checkpoints_.rbegin(); id != checkpoints_.rend(); ++id) {
    if (id->epoch == options.epoch && id->step > committed) continue;
    if (static_cast<int>(keep.size()) < options.checkpoint_keep) keep.push_back(*id);
  }
  auto removed =
      PruneCheckpoints(inputs_.files, options.checkpoint_root, options.job, options.epoch, keep);
  if (!removed.ok()) {
    inputs_.hooks.OnWarning(removed.status());
    return;
  }
  for (const CheckpointId& id : *removed) {
    if (inputs_.world().rank() == 0) inputs_.hooks.OnRemoved(id);
    checkpoints_.erase(std::remove(checkpoints_.begin(), checkpoints_.end(), id),
                       checkpoints_.end());
  }
}

}  // namespace muster::parallel
