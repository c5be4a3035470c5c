// The part of Trainer that talks to parallel/checkpoint.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "kernels/device/device.h"
#include "kernels/memory/memory.h"
#include "kernels/optimizer/optimizer.h"
#include "kernels/optimizer/step_math.h"
#include "kernels/tensor.h"
#include "parallel/comm/gather_texts.h"
#include "parallel/train/checkpoint_names.h"
#include "parallel/train/failure.h"
#include "parallel/train/memory.h"

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

std::string ResidualName(int state, const std::string& parameter) {
  return (state == 0 ? kResidualPrefix : kResidualMomentumPrefix) + parameter;
}

// The shape of what each of `ranks` ranks has of a tensor, and the box of one of them.
std::vector<int64_t> PerRank(std::vector<int64_t> shape, int ranks) {
  shape.insert(shape.begin(), ranks);
  return shape;
}
Box OfRank(Box box, int rank) {
  box.offset.insert(box.offset.begin(), rank);
  box.extent.insert(box.extent.begin(), 1);
  return box;
}

// Storage errors keep their code; a peer's or the communicator's are told apart by it.
absl::Status MarkSaveError(absl::Status status) {
  const bool collective = absl::IsAborted(status) || absl::IsDeadlineExceeded(status);
  return Mark(std::move(status),
              collective ? FailureDomain::kCommunication : FailureDomain::kStorage);
}

}  // namespace

FlatRange Trainer::Saved(int bucket) const {
  const FlatRange part = layout_.Part(bucket, groups_.shard().rank());
  return {part.begin + part.size() * saver_ / savers_,
          part.begin + part.size() * (saver_ + 1) / savers_};
}

absl::Status Trainer::ShareSaving() {
  const std::vector<int>& directories = options_.checkpoint_groups;
  saver_ = groups_.replicate().rank();
  savers_ = groups_.replicate().size();
  several_directories_ = std::any_of(directories.begin(), directories.end(),
                                     [](int directory) { return directory != 0; });
  if (!several_directories_) return absl::OkStatus();
  for (const std::vector<int>& group : groups_.mesh().Groups({Axis::kTensor})) {
    for (const int rank : group) {
      if (directories[rank] == directories[group[0]]) continue;
      return Mark(
          absl::FailedPreconditionError(absl::StrFormat(
              "checkpoint.storage: local needs every tensor group on one host, but ranks %d "
              "and %d are on two: lower engine.parallel.tensor, or give the hosts a shared "
              "checkpoint.path",
              group[0], rank)),
          FailureDomain::kConfiguration);
    }
  }
  // What a rank holds is that of all ranks with this text.
  const auto holds = [](int stage, int shard, int tensor) {
    return absl::StrFormat("%d %d %d", stage, shard, tensor);
  };
  const int shard = groups_.shard().rank(), tensor = groups_.coordinate()[Axis::kTensor];
  const std::string own = holds(groups_.coordinate()[Axis::kPipeline], shard, tensor);
  auto texts = GatherTexts(world_, *compute_, own);
  if (!texts.ok()) return Mark(texts.status(), FailureDomain::kCommunication);
  saver_ = savers_ = 0;
  saves_duplicates_ = true;
  for (int rank = 0; rank < world_.size(); ++rank) {
    if (directories[rank] != directories[world_.rank()]) continue;
    // The first stage has the say over a table that the last one shares.
    if ((*texts)[rank] == holds(0, shard, tensor)) saves_duplicates_ = false;
    if ((*texts)[rank] != own) continue;
    if (rank < world_.rank()) ++saver_;
    ++savers_;
  }
  return absl::OkStatus();
}

bool Trainer::Saves(const Parameter& parameter) const {
  if (!parameter.duplicate || !saves_duplicates_) return SpeaksFor(parameter);
  Parameter held = parameter;
  held.duplicate = false;
  return SpeaksFor(held);
}

bool Trainer::LeadsDirectory() const {
  return several_directories_ ? options_.checkpoint_groups[world_.rank()] == world_.rank()
                              : world_.rank() == 0;
}

Tensor Trainer::Moment(int state, int bucket) {
  return state == 1 ? flat_->m(bucket) : flat_->v(bucket);
}

// What a rank saves, read piece by piece when the checkpoint gets to it.
class Trainer::StateReader {
 public:
  // Enqueues a copy to host memory of elements [first, first + to.elements()).
  using Copy = std::function<void(int64_t first, const Tensor& to)>;

  static absl::StatusOr<std::unique_ptr<StateReader>> Make(kernels::Device& device,
                                                           kernels::Stream& stream,
                                                           const SaveElements& elements) {
    ASSIGN_OR_RETURN(auto buffer, device.AllocateHost(elements.at_once * SizeOf(DType::kF32)));
    return std::unique_ptr<StateReader>(
        new StateReader(stream, std::move(buffer), elements.at_once));
  }

  // A piece that is elements [first, ...) of what `copy` reads. Must not outlive the reader.
  SavePiece Piece(std::string tensor, const std::vector<int64_t>& shape, Box box, Copy copy,
                  int64_t first) {
    SavePiece piece{std::move(tensor), DType::kF32, shape, std::move(box)};
    const int64_t count = piece.box.elements();
    piece.produce = [this, copy = std::move(copy), first, count](void* out) {
      status_ = Read(copy, first, count, static_cast<float*>(out));
      return status_;
    };
    return piece;
  }
  // The device's error, where one has ended a piece.
  const absl::Status& status() const { return status_; }

 private:
  StateReader(kernels::Stream& stream, std::unique_ptr<kernels::Buffer> buffer, int64_t elements)
      : stream_(stream), buffer_(std::move(buffer)), elements_(elements) {}

  absl::Status Read(const Copy& copy, int64_t first, int64_t count, float* out) {
    auto* const staging = static_cast<float*>(buffer_->data());
    for (int64_t at = 0; at < count; at += elements_) {
      const int64_t now = std::min(elements_, count - at);
      copy(first + at, Tensor(staging, DType::kF32, {now}));
      RETURN_IF_ERROR(stream_.Synchronize());
      std::memcpy(out + at, staging, now * SizeOf(DType::kF32));
    }
    return absl::OkStatus();
  }

  kernels::Stream& stream_;
  const std::unique_ptr<kernels::Buffer> buffer_;  // what devices write fast, and kernels can
  const int64_t elements_;
  absl::Status status_;
};

std::vector<SavePiece> Trainer::SavePieces(StateReader& reader) {
  std::vector<SavePiece> pieces;
  for (int i = 0; i < static_cast<int>(layout_.buckets().size()); ++i) {
    const FlatRange saved = Saved(i);
    const int64_t begin = layout_.Part(i, groups_.shard().rank()).begin;
    for (int state = 0; state < kStates; ++state) {
      const auto copy = [this, i, state](int64_t first, const Tensor& to) {
        if (state == 0) {
          flat_->ReadMaster(*compute_, i, first, to);
        } else {
          kernels::Copy(*compute_, Moment(state, i).Rows(first, to.elements()), to);
        }
      };
      for (const FlatPiece& piece : layout_.Pieces(saved)) {
        const Parameter& parameter = model_.parameters().at(piece.parameter);
        if (!Saves(parameter)) continue;  // another rank does
        int64_t at = piece.flat - begin;
        for (Box& box : parameter.Boxes(piece.first, piece.first + piece.count)) {
          const int64_t size = box.elements();
          pieces.push_back(reader.Piece(StateName(state, parameter.name), parameter.global_shape,
                                        std::move(box), copy, at));
          at += size;
        }
      }
    }
  }
  AddResiduals(reader, pieces);
  return pieces;
}

void Trainer::AddResiduals(StateReader& reader, std::vector<SavePiece>& pieces) {
  if (compressor_ == nullptr) return;
  for (int i = 0; i < static_cast<int>(layout_.buckets().size()); ++i) {
    const FlatLayout::Bucket& bucket = layout_.buckets()[i];
    if (!bucket.compressed) continue;
    for (int state = 0; state < compressor_->states(); ++state) {
      const auto copy = [this, i, state](int64_t first, const Tensor& to) {
        kernels::Copy(*compute_, compressor_->state(state, i).Rows(first, to.elements()), to);
      };
      for (const ParameterId id : bucket.parameters) {
        const Parameter& parameter = model_.parameters().at(id);
        // The ranks of a tensor group compress the same gradient the same way.
        if (!SpeaksFor(parameter)) continue;
        int64_t at = layout_.offset(id) - bucket.range.begin;
        for (const Box& box : parameter.Boxes(0, parameter.elements())) {
          pieces.push_back(reader.Piece(ResidualName(state, parameter.name),
                                        PerRank(parameter.global_shape, gradient_group().size()),
                                        OfRank(box, gradient_group().rank()), copy, at));
          at += box.elements();
        }
      }
    }
  }
}

absl::Status Trainer::Save() {
  if (saved_step_ == step_) return absl::OkStatus();
  hooks_.OnPhase("saving");
  const auto start = std::chrono::steady_clock::now();

  // Every rank saves its share of every bucket, of each of the three states. Nothing is enqueued
  // meanwhile, so that pieces can be read when they are due.
  auto reader = StateReader::Make(
      device_, *compute_,
      SaveElementsOf(layout_, groups_.replicate().size(), compressor_ != nullptr));
  if (!reader.ok()) return Mark(reader.status(), FailureDomain::kMemory);
  const std::vector<SavePiece> pieces = SavePieces(**reader);
  ASSIGN_OR_RETURN(const kernels::StepState optimizer, optimizer_->GetState(*compute_));

  CheckpointState state;
  state.id = {options_.job, step_, options_.epoch};
  state.consumed_samples = consumed_samples_;
  for (const Axis axis : kAxes) {
    if (groups_.mesh().degree(axis) > 1 || axis == Axis::kData) {
      state.mesh[std::string(Name(axis))] = groups_.mesh().degree(axis);
    }
  }
  state.integers[kSeedKey] = static_cast<int64_t>(options_.seed);
  state.integers[kDataFingerprintKey] = static_cast<int64_t>(training_.fingerprint());
  state.integers[kUpdatesKey] = optimizer.updates;
  if (optimizer_->loss_scale() != nullptr) {
    state.numbers[kLossScaleKey] = optimizer.loss_scale;
    state.integers[kCleanStepsKey] = optimizer.clean_steps;
    state.integers[kHysteresisKey] = optimizer.hysteresis;
  }
  WriteDescription(model_.description(), state);
  absl::Status gather_status;
  absl::StatusOr<SaveResult> result = SaveCheckpoint(
      files_, options_.checkpoint_root, state, world_.rank(), pieces,
      [&](const std::string& text) {
        auto texts = GatherTexts(world_, *compute_, text);
        gather_status = texts.status();
        return texts;
      },
      several_directories_ ? options_.checkpoint_groups : std::vector<int>());
  if (!gather_status.ok()) return Mark(gather_status, FailureDomain::kCommunication);
  if (!(*reader)->status().ok()) return (*reader)->status();
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

absl::Status Trainer::LoadOwn(int state, WeightReader read) {
  std::vector<float> values;
  for (int i = 0; i < static_cast<int>(layout_.buckets().size()); ++i) {
    const FlatRange part = layout_.Part(i, groups_.shard().rank());
    for (const FlatPiece& piece : layout_.Pieces(part)) {
      const Parameter& parameter = model_.parameters().at(piece.parameter);
      values.resize(piece.count);
      float* to = values.data();
      for (const Box& box : parameter.Boxes(piece.first, piece.first + piece.count)) {
        RETURN_IF_ERROR(read(parameter.name, box, to));
        to += box.elements();
      }
      const int64_t at = piece.flat - part.begin;
      if (state == 0) {
        RETURN_IF_ERROR(flat_->WriteMaster(*compute_, i, at, values.data(), piece.count));
        continue;
      }
      kernels::Copy(*compute_, Tensor(values.data(), DType::kF32, {piece.count}),
                    Moment(state, i).Rows(at, piece.count));
      RETURN_IF_ERROR(compute_->Synchronize());
    }
  }
  return absl::OkStatus();
}

absl::Status Trainer::LoadTensors(CheckpointReader& reader) {
  for (int state = 0; state < kStates; ++state) {
    for (ParameterId id = 0; id < model_.parameters().size(); ++id) {
      const Parameter& parameter = model_.parameters().at(id);
      const std::string name = StateName(state, parameter.name);
      const auto found = reader.tensors().find(name);
      // What this rank needs of the others is found when it is read.
      if (found == reader.tensors().end() && reader.partial()) continue;
      if (found == reader.tensors().end() || found->second.shape != parameter.global_shape) {
        return absl::FailedPreconditionError(
            absl::StrFormat("%s: tensor %s is missing or has another shape than the model",
                            reader.directory(), name));
      }
    }
    RETURN_IF_ERROR(LoadOwn(state, [&](const std::string& name, const Box& box, float* out) {
      return reader.Read(StateName(state, name), DType::kF32, box, out);
    }));
  }
  return absl::OkStatus();
}

absl::Status Trainer::Initialize(WeightReader read) {
  CHECK_EQ(step_, 0);
  hooks_.OnPhase("restoring");
  // Peers may still be gathering the initial values of what is about to be overwritten.
  RETURN_IF_ERROR(gathering_->Synchronize());
  absl::Status status = LoadOwn(/*state=*/0, read);
  ASSIGN_OR_RETURN(const bool everywhere, Agree(status.ok()));
  if (!everywhere) {
    if (status.ok()) {
      status = absl::FailedPreconditionError(
          "another rank could not read the weights to begin with; see its log");
    }
    return Mark(std::move(status), FailureDomain::kStorage);
  }
  Publish();
  return absl::OkStatus();
}

// Another number of ranks inherits what has not been sent: the residuals of neighbouring ranks are
// added up, as their gradients would be, or stay with the first of several heirs. Either way their
// sum over all ranks is the same, to the bit for powers of two.
absl::Status Trainer::LoadResiduals(CheckpointReader& reader) {
  if (compressor_ == nullptr) return absl::OkStatus();
  compressor_->Reset(*compute_);
  const int64_t rank = gradient_group().rank(), ranks = gradient_group().size();
  std::vector<float> values, sum;
  for (int i = 0; i < static_cast<int>(layout_.buckets().size()); ++i) {
    const FlatLayout::Bucket& bucket = layout_.buckets()[i];
    if (!bucket.compressed) continue;
    for (int state = 0; state < compressor_->states(); ++state) {
      for (const ParameterId id : bucket.parameters) {
        const Parameter& parameter = model_.parameters().at(id);
        const std::string name = ResidualName(state, parameter.name);
        const auto found = reader.tensors().find(name);
        // Not compressed when it was saved: nothing is left over.
        if (found == reader.tensors().end()) continue;
        const int64_t owners = found->second.shape.empty() ? 0 : found->second.shape[0];
        if (found->second.shape != PerRank(parameter.global_shape, static_cast<int>(owners))) {
          return absl::FailedPreconditionError(absl::StrFormat(
              "%s: tensor %s has another shape than the model", reader.directory(), name));
        }
        const int64_t elements = parameter.elements();
        values.clear();
        int64_t count = 0;
        for (int64_t owner = 0; owner < owners; ++owner) {
          if (owner * ranks / owners != rank) continue;
          values.resize(++count * elements);
          float* to = values.data() + (count - 1) * elements;
          for (const Box& box : parameter.Boxes(0, elements)) {
            RETURN_IF_ERROR(
                reader.Read(name, DType::kF32, OfRank(box, static_cast<int>(owner)), to));
            to += box.elements();
          }
        }
        if (count == 0) continue;
        sum.resize(elements);
        for (int64_t j = 0; j < elements; ++j) {
          sum[j] = kernels::SumAsTree(count, [&](int64_t k) { return values[k * elements + j]; });
        }
        kernels::Copy(
            *compute_, Tensor(sum.data(), DType::kF32, {elements}),
            compressor_->state(state, i).Rows(layout_.offset(id) - bucket.range.begin, elements));
        RETURN_IF_ERROR(compute_->Synchronize());
      }
    }
  }
  return absl::OkStatus();
}

absl::Status Trainer::LoadUnsent(CheckpointReader& reader) {
  unsent_.clear();
  if (compressor_ == nullptr) return absl::OkStatus();
  std::vector<float> all, values;
  for (int i = 0; i < static_cast<int>(layout_.buckets().size()); ++i) {
    if (layout_.buckets()[i].compressed) continue;
    const FlatRange part = layout_.Part(i, groups_.shard().rank());
    for (const FlatPiece& piece : layout_.Pieces(part)) {
      // The stage that has the say over a tied table compresses it, and sends the other one its
      // sum.
      Parameter parameter = model_.parameters().at(piece.parameter);
      parameter.duplicate = false;
      const std::string name = ResidualName(/*state=*/0, parameter.name);
      const auto found = reader.tensors().find(name);
      if (found == reader.tensors().end() || Compresses(options_.compression, parameter)) continue;
      const int64_t owners = found->second.shape.empty() ? 0 : found->second.shape[0];
      if (found->second.shape != PerRank(parameter.global_shape, static_cast<int>(owners))) {
        return absl::FailedPreconditionError(absl::StrFormat(
            "%s: tensor %s has another shape than the model", reader.directory(), name));
      }
      values.resize(owners * piece.count);
      float* to = values.data();
      for (int owner = 0; owner < owners; ++owner) {
        for (const Box& box : parameter.Boxes(piece.first, piece.first + piece.count)) {
          RETURN_IF_ERROR(reader.Read(name, DType::kF32, OfRank(box, owner), to));
          to += box.elements();
        }
      }
      unsent_.push_back({i, piece.flat - part.begin, Tensor(nullptr, DType::kF32, {piece.count})});
      for (int64_t j = 0; j < piece.count; ++j) {
        all.push_back(kernels::SumAsTree(
            owners, [&](int64_t owner) { return values[owner * piece.count + j]; }));
      }
    }
  }
  if (unsent_.empty()) return absl::OkStatus();
  ASSIGN_OR_RETURN(unsent_memory_, device_.AllocateHost(all.size() * sizeof(float)));
  auto* at = static_cast<float*>(unsent_memory_->data());
  std::copy(all.begin(), all.end(), at);
  for (Unsent& piece : unsent_) {
    piece.elements = Tensor(at, DType::kF32, {piece.elements.elements()});
    at += piece.elements.elements();
  }
  return absl::OkStatus();
}

// Behind the sums over all ranks, each of which adds the same.
void Trainer::AddUnsent() {
  for (const Unsent& piece : unsent_) {
    kernels::Axpy(*compute_, 1.0f, piece.elements,
                  flat_->own_gradient(piece.bucket).Rows(piece.begin, piece.elements.elements()));
  }
}

absl::Status Trainer::Load(CheckpointReader& reader) {
  const CheckpointState& state = reader.state();
  // Peers may still be gathering the initial values of what is about to be overwritten.
  RETURN_IF_ERROR(gathering_->Synchronize());
  RETURN_IF_ERROR(LoadTensors(reader));
  RETURN_IF_ERROR(LoadResiduals(reader));
  RETURN_IF_ERROR(LoadUnsent(reader));
  const auto integer = [&](const char* key, int64_t otherwise) {
    const auto found = state.integers.find(key);
    return found == state.integers.end() ? otherwise : found->second;
  };
  // The loss scale starts anew after a run in another precision.
  kernels::StepState optimizer = optimizer_->initial_state();
  optimizer.updates = integer(kUpdatesKey, state.id.step);
  if (const auto scale = state.numbers.find(kLossScaleKey);
      scale != state.numbers.end() && optimizer_->loss_scale() != nullptr) {
    optimizer.loss_scale = static_cast<float>(scale->second);
    optimizer.clean_steps = static_cast<int32_t>(integer(kCleanStepsKey, 0));
    optimizer.hysteresis = static_cast<int32_t>(integer(kHysteresisKey, optimizer.hysteresis));
  }
  RETURN_IF_ERROR(optimizer_->SetState(*compute_, optimizer));
  step_ = state.id.step;
  consumed_samples_ = state.consumed_samples;
  saved_step_ = step_;
  return absl::OkStatus();
}

// Where hosts have directories of their own, a part that a rank does not find is not damage.
absl::StatusOr<bool> Trainer::SaysWhatIsElsewhere(const RestoreCandidate& candidate,
                                                  const absl::Status& status) {
  const char* const kind = status.ok() ? "" : absl::IsNotFound(status) ? "absent " : "damaged ";
  auto texts = GatherTexts(world_, *compute_, absl::StrCat(kind, status.message()));
  if (!texts.ok()) return Mark(texts.status(), FailureDomain::kCommunication);
  bool elsewhere = false;
  for (int rank = 0; rank < world_.size(); ++rank) {
    const std::string& text = (*texts)[rank];
    if (absl::StartsWith(text, "damaged ")) return false;
    if (!absl::StartsWith(text, "absent ") || std::exchange(elsewhere, true)) continue;
    hooks_.OnWarning(absl::NotFoundError(absl::StrFormat(
        "step %d cannot be restored here: rank %d does not find its part (%s). With "
        "checkpoint.storage: local a rank needs the disk of a host that held the same part",
        candidate.id.step, rank, text.substr(sizeof("absent ") - 1))));
  }
  return elsewhere;
}

absl::Status Trainer::Restore(const std::vector<RestoreCandidate>& candidates) {
  if (candidates.empty()) return absl::OkStatus();
  hooks_.OnPhase("restoring");
  const bool lead = world_.rank() == 0;
  for (const RestoreCandidate& candidate : candidates) {
    // One rank checks every byte before anybody changes its state. The coordinator knows the
    // checksum of one manifest alone.
    auto reader = CheckpointReader::Open(
        files_, candidate.directory, LeadsDirectory() ? Verify::kFull : Verify::kSizes,
        several_directories_ ? std::string() : candidate.manifest_checksum);
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
      Publish();
      for (const RestoreCandidate& older : candidates) {
        if (older.id.step <= step_) checkpoints_.insert(checkpoints_.begin(), older.id);
      }
      return absl::OkStatus();
    }
    if (several_directories_) {
      ASSIGN_OR_RETURN(const bool elsewhere, SaysWhatIsElsewhere(candidate, status));
      if (elsewhere) continue;
    }
    if (lead) {
      hooks_.OnDamaged(candidate.id, status.ok()
                                         ? absl::DataLossError("another rank could not read it")
                                         : status);
    }
  }
  if (several_directories_ && lead) {
    hooks_.OnWarning(absl::NotFoundError(
        "no committed checkpoint can be restored on these hosts: the job starts over"));
  }
  // A load that failed half-way has left its traces.
  step_ = 0;
  consumed_samples_ = 0;
  saved_step_ = -1;
  RETURN_IF_ERROR(flat_->Initialize(*compute_, options_.seed));
  RETURN_IF_ERROR(optimizer_->SetState(*compute_, optimizer_->initial_state()));
  if (compressor_ != nullptr) compressor_->Reset(*compute_);
  unsent_.clear();
  Publish();
  return absl::OkStatus();
}

void Trainer::Publish() {
  flat_->RefreshCopies(*compute_);
  gatherer_->AllUpdated();
}

void Trainer::Prune() {
  if (!LeadsDirectory() || options_.checkpoint_root.empty()) return;
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
    if (world_.rank() == 0) hooks_.OnRemoved(id);
    checkpoints_.erase(std::remove(checkpoints_.begin(), checkpoints_.end(), id),
                       checkpoints_.end());
  }
}

}  // namespace muster::parallel
