// The part of Trainer that talks to parallel/checkpoint.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "kernels/ops.h"
#include "parallel/comm/gather_texts.h"
#include "parallel/train/checkpoint_names.h"
#include "parallel/train/failure.h"

#include "parallel/train/trainer.h"

namespace muster::parallel {
namespace {

using kernels::DType;
using kernels::Tensor;

constexpr int kStates = 3;  // parameter, m, v

std::string StateName(int state, const std::string& parameter) {
  switch (state) {
    case 0:
      return parameter;
    case 1:
      return kFirstMomentPrefix + parameter;
    default:
      return kSecondMomentPrefix + parameter;
  }
}

// Storage errors keep their code; a peer's or the communicator's are told apart by it.
absl::Status MarkSaveError(absl::Status status) {
  const bool collective = absl::IsAborted(status) || absl::IsDeadlineExceeded(status);
  return Mark(std::move(status),
              collective ? FailureDomain::kCommunication : FailureDomain::kStorage);
}

}  // namespace

absl::Status Trainer::Save() {
  if (saved_step_ == step_) return absl::OkStatus();
  hooks_.OnPhase("saving");
  const auto start = std::chrono::steady_clock::now();
  const int rank = communicator_.rank();

  // This rank's part of every bucket, of each of the three states, staged in host memory.
  int64_t elements = 0;
  const int buckets = static_cast<int>(layout_.buckets().size());
  for (int i = 0; i < buckets; ++i) elements += layout_.Part(i, rank).size();
  auto allocated = device_.AllocateHost(kStates * elements * static_cast<int64_t>(sizeof(float)));
  if (!allocated.ok()) return Mark(allocated.status(), FailureDomain::kMemory);
  auto* const staging = static_cast<float*>((*allocated)->data());
  std::vector<SavePiece> pieces;
  float* next = staging;
  for (int i = 0; i < buckets; ++i) {
    const FlatRange part = layout_.Part(i, rank);
    for (int state = 0; state < kStates; ++state) {
      const Tensor from = state == 0   ? flat_->parameter(part)
                          : state == 1 ? flat_->m(part)
                                       : flat_->v(part);
      kernels::Copy(*compute_, from, Tensor(next, DType::kF32, {part.size()}));
      for (const FlatPiece& piece : layout_.Pieces(part)) {
        const Parameter& parameter = model_.parameters().at(piece.parameter);
        const float* data = next + (piece.flat - part.begin);
        for (Box& box : FlatRangeToBoxes(parameter.box, piece.first, piece.first + piece.count)) {
          const int64_t size = box.elements();
          pieces.push_back({StateName(state, parameter.name), DType::kF32, parameter.global_shape,
                            std::move(box), data});
          data += size;
        }
      }
      next += part.size();
    }
  }
  RETURN_IF_ERROR(compute_->Synchronize());

  CheckpointState state;
  state.id = {options_.job, step_, options_.epoch};
  state.consumed_samples = consumed_samples_;
  state.mesh["data"] = communicator_.size();
  state.integers[kSeedKey] = static_cast<int64_t>(options_.seed);
  state.integers[kDataFingerprintKey] = static_cast<int64_t>(training_.fingerprint());
  WriteDescription(model_.description(), state);
  absl::Status gather_status;
  absl::StatusOr<SaveResult> result = SaveCheckpoint(
      files_, options_.checkpoint_root, state, rank, pieces, [&](const std::string& text) {
        auto texts = GatherTexts(communicator_, *compute_, text);
        gather_status = texts.status();
        return texts;
      });
  if (!gather_status.ok()) return Mark(gather_status, FailureDomain::kCommunication);
  if (!result.ok()) return MarkSaveError(result.status());

  SavedCheckpoint saved;
  saved.id = state.id;
  saved.result = *std::move(result);
  saved.consumed_samples = consumed_samples_;
  saved.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  saved_step_ = step_;
  checkpoints_.push_back(saved.id);
  hooks_.OnSaved(saved);
  return absl::OkStatus();
}

absl::Status Trainer::Load(CheckpointReader& reader) {
  const CheckpointState& state = reader.state();
  for (ParameterId id = 0; id < model_.parameters().size(); ++id) {
    const Parameter& parameter = model_.parameters().at(id);
    const int64_t begin = layout_.offset(id);
    const FlatRange range = {begin, begin + parameter.elements()};
    std::vector<float> values(parameter.elements());
    for (int which = 0; which < kStates; ++which) {
      const std::string name = StateName(which, parameter.name);
      const auto found = reader.tensors().find(name);
      if (found == reader.tensors().end() || found->second.shape != parameter.global_shape) {
        return absl::FailedPreconditionError(
            absl::StrFormat("%s: tensor %s is missing or has another shape than the model",
                            reader.directory(), name));
      }
      RETURN_IF_ERROR(reader.Read(name, DType::kF32, parameter.box, values.data()));
      kernels::Copy(*compute_, Tensor(values.data(), DType::kF32, {range.size()}),
                    which == 0   ? flat_->parameter(range)
                    : which == 1 ? flat_->m(range)
                                 : flat_->v(range));
      RETURN_IF_ERROR(compute_->Synchronize());
    }
  }
  step_ = state.id.step;
  consumed_samples_ = state.consumed_samples;
  saved_step_ = step_;
  return absl::OkStatus();
}

absl::Status Trainer::Restore(const std::vector<RestoreCandidate>& candidates) {
  if (candidates.empty()) return absl::OkStatus();
  hooks_.OnPhase("restoring");
  const bool lead = communicator_.rank() == 0;
  for (const RestoreCandidate& candidate : candidates) {
    // Rank 0 checks every byte before anybody changes its state.
    auto reader =
        CheckpointReader::Open(files_, candidate.directory, lead ? Verify::kFull : Verify::kSizes,
                               candidate.manifest_checksum);
    absl::Status status = reader.status();
    ASSIGN_OR_RETURN(bool sound, Agree(status.ok()));
    if (sound) {
      const auto fingerprint = (*reader)->state().integers.find(kDataFingerprintKey);
      if (fingerprint != (*reader)->state().integers.end() &&
          fingerprint->second != static_cast<int64_t>(training_.fingerprint())) {
        return Mark(absl::FailedPreconditionError(absl::StrCat(
                        candidate.directory,
                        " was trained on other data than the data sets now hold: resuming would "
                        "repeat or skip samples")),
                    FailureDomain::kData);
      }
      status = Load(**reader);
      ASSIGN_OR_RETURN(sound, Agree(status.ok()));
    }
    if (sound) {
      for (const RestoreCandidate& older : candidates) {
        if (older.id.step <= step_) checkpoints_.insert(checkpoints_.begin(), older.id);
      }
      return absl::OkStatus();
    }
    if (lead) {
      hooks_.OnDamaged(candidate.id, status.ok()
                                         ? absl::DataLossError("another rank could not read it")
                                         : status);
    }
  }
  // A load that failed half-way has left its traces.
  step_ = 0;
  consumed_samples_ = 0;
  saved_step_ = -1;
  return flat_->Initialize(*compute_, options_.seed);
}

void Trainer::Prune() {
  if (communicator_.rank() != 0 || options_.checkpoint_root.empty()) return;
  const int64_t committed = hooks_.CommittedStep();
  if (committed <= pruned_at_) return;
  pruned_at_ = committed;
  std::vector<CheckpointId> keep;
  for (auto id = checkpoints_.rbegin(); id != checkpoints_.rend(); ++id) {
    if (id->epoch == options_.epoch && id->step > committed) continue;
    if (static_cast<int>(keep.size()) < options_.checkpoint_keep) keep.push_back(*id);
  }
  auto removed =
      PruneCheckpoints(files_, options_.checkpoint_root, options_.job, options_.epoch, keep);
  if (!removed.ok()) {
    hooks_.OnWarning(removed.status());
    return;
  }
  for (const CheckpointId& id : *removed) {
    hooks_.OnRemoved(id);
    checkpoints_.erase(std::remove(checkpoints_.begin(), checkpoints_.end(), id),
                       checkpoints_.end());
  }
}

}  // namespace muster::parallel
