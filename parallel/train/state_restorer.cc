#include "parallel/train/state_restorer.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "kernels/device/device.h"
#include "kernels/memory/memory.h"
#include "kernels/optimizer/optimizer.h"
#include "kernels/optimizer/step_math.h"
#include "kernels/tensor.h"
#include "parallel/train/checkpoint_names.h"
#include "parallel/train/failure.h"

namespace muster::parallel {
namespace {

using kernels::DType;
using kernels::Tensor;

constexpr char kVerifying[] = "verifying";
constexpr char kRestoring[] = "restoring";
constexpr char kLoading[] = "loading";
// How ranks tell each other what is wrong with a candidate.
constexpr absl::string_view kAbsent = "absent ", kDamaged = "damaged ";

// How many ranks the residuals of a tensor were saved by.
absl::StatusOr<int64_t> OwnersOf(const CheckpointReader& reader, const std::string& name,
                                 const TensorInfo& saved, const Parameter& parameter) {
  const int64_t owners = saved.shape.empty() ? 0 : saved.shape[0];
  if (saved.shape != PerRank(parameter.global_shape, owners)) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "%s: tensor %s has another shape than the model", reader.directory(), name));
  }
  return owners;
}

// Reads what one rank had not sent of the elements [first, first + count) of the parameter.
absl::Status ReadResidual(CheckpointReader& reader, const std::string& name,
                          const Parameter& parameter, int64_t first, int64_t count, int64_t owner,
                          float* to) {
  for (const Box& box : parameter.Boxes(first, first + count)) {
    RETURN_IF_ERROR(reader.Read(name, DType::kF32, OfRank(box, owner), to));
    to += box.elements();
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::optional<TrainingPosition>> StateRestorer::Restore(
    const std::vector<RestoreCandidate>& candidates) {
  TrainerHooks& hooks = inputs_.hooks;
  for (const RestoreCandidate& candidate : candidates) {
    std::unique_ptr<CheckpointReader> reader;
    absl::Status own;  // why this rank cannot use the candidate
    const auto run = [&](const char* phase,
                         absl::FunctionRef<absl::Status(ControlChannel::Work&)> body) {
      hooks.OnPhase(phase);
      return channel_.Run(
          [&](ControlChannel::Work& work) {
            own = body(work);
            return own;
          },
          [&](double fraction) { hooks.OnProgress(phase, fraction); });
    };
    ASSIGN_OR_RETURN(bool sound, run(kVerifying, [&](ControlChannel::Work& work) {
                       return Verify(candidate, work, reader);
                     }));
    if (sound) {
      RETURN_IF_ERROR(CheckData(*reader));
      ASSIGN_OR_RETURN(
          sound, run(kRestoring, [&](ControlChannel::Work& work) { return Load(*reader, work); }));
    }
    if (sound) {
      const CheckpointState& state = reader->state();
      return TrainingPosition{state.id.step, state.consumed_samples};
    }
    RETURN_IF_ERROR(Reject(candidate, own));
  }
  if (shares_.several_directories() && inputs_.world().rank() == 0) {
    hooks.OnWarning(absl::NotFoundError(
        "no committed checkpoint can be restored on these hosts: the job starts over"));
  }
  RETURN_IF_ERROR(Reset());
  return std::nullopt;
}

absl::Status StateRestorer::Verify(const RestoreCandidate& candidate, ControlChannel::Work& work,
                                   std::unique_ptr<CheckpointReader>& reader) {
  // The coordinator knows the checksum of rank 0's manifest; every directory has its own.
  ASSIGN_OR_RETURN(reader, CheckpointReader::Open(
                               inputs_.files, candidate.directory, muster::parallel::Verify::kSizes,
                               shares_.several_directories() ? "" : candidate.manifest_checksum));
  const VerifyShare share = shares_.verify_share();
  work.Expect(reader->BytesOf(share));
  return reader->VerifyBytes(share, [&](int64_t bytes) {
    work.Advance(bytes);
    return !work.pointless();
  });
}

absl::Status StateRestorer::CheckData(const CheckpointReader& reader) const {
  const auto fingerprint = reader.state().integers.find(kDataFingerprintKey);
  if (fingerprint == reader.state().integers.end() ||
      fingerprint->second == static_cast<int64_t>(inputs_.training.fingerprint())) {
    return absl::OkStatus();
  }
  return Mark(absl::FailedPreconditionError(absl::StrCat(
                  reader.directory(),
                  " was trained on other data than the data sets now hold: resuming would "
                  "repeat or skip samples")),
              FailureDomain::kData);
}

absl::Status StateRestorer::Load(CheckpointReader& reader, ControlChannel::Work& work) {
  RETURN_IF_ERROR(LoadTensors(reader, work));
  RETURN_IF_ERROR(LoadResiduals(reader));
  RETURN_IF_ERROR(LoadCarried(reader));
  return LoadScalars(reader.state());
}

absl::Status StateRestorer::LoadTensors(CheckpointReader& reader, ControlChannel::Work& work) {
  const ParameterRegistry& parameters = inputs_.model.parameters();
  work.Expect(kOptimizerStates * memory_.layout().local_elements() * SizeOf(DType::kF32));
  for (int state = 0; state < kOptimizerStates; ++state) {
    for (ParameterId id = 0; id < parameters.size(); ++id) {
      const Parameter& parameter = parameters.at(id);
      const std::string name = StateName(state, parameter.name);
      const auto found = reader.tensors().find(name);
      // Other directories may have it. Read() finds out whether this rank needs it.
      if (found == reader.tensors().end() && reader.partial()) continue;
      if (found == reader.tensors().end() || found->second.shape != parameter.global_shape) {
        return absl::FailedPreconditionError(
            absl::StrFormat("%s: tensor %s is missing or has another shape than the model",
                            reader.directory(), name));
      }
    }
    const auto read = [&](const std::string& name, const Box& box, float* out) {
      return reader.Read(StateName(state, name), DType::kF32, box, out);
    };
    RETURN_IF_ERROR(LoadOwn(state, read, work));
  }
  return absl::OkStatus();
}

absl::Status StateRestorer::LoadOwn(int state, WeightReader read, ControlChannel::Work& work) {
  const FlatLayout& layout = memory_.layout();
  kernels::Stream& compute = memory_.compute();
  std::vector<float> values;
  for (int i = 0; i < static_cast<int>(layout.buckets().size()); ++i) {
    const FlatRange part = layout.Part(i, inputs_.groups.shard().rank());
    for (const FlatSlice& slice : layout.Slices(part)) {
      if (work.pointless()) return absl::CancelledError("another rank has failed");
      const Parameter& parameter = inputs_.model.parameters().at(slice.parameter);
      values.resize(slice.count);
      float* to = values.data();
      for (const Box& box : parameter.Boxes(slice.first, slice.first + slice.count)) {
        RETURN_IF_ERROR(read(parameter.name, box, to));
        to += box.elements();
      }
      work.Advance(slice.count * SizeOf(DType::kF32));
      const int64_t at = slice.flat - part.begin;
      if (state == 0) {
        RETURN_IF_ERROR(memory_.flat().WriteMaster(compute, i, at, values.data(), slice.count));
        continue;
      }
      kernels::Copy(compute, Tensor(values.data(), DType::kF32, {slice.count}),
                    Moment(state, i).Rows(at, slice.count));
      RETURN_IF_ERROR(compute.Synchronize());
    }
  }
  return absl::OkStatus();
}

// Another number of ranks inherits what has not been sent: the residuals of neighbouring ranks are
// added up, as their gradients would be, or go to the first of several heirs. Either way their sum
// over all ranks is the same, to the bit for powers of two.
absl::Status StateRestorer::LoadResiduals(CheckpointReader& reader) {
  GradientCompressor* const compressor = gradients_.compressor();
  if (compressor == nullptr) return absl::OkStatus();
  kernels::Stream& compute = memory_.compute();
  compressor->Reset(compute);
  const int64_t rank = inputs_.gradient_group().rank(), ranks = inputs_.gradient_group().size();
  std::vector<float> values, sum;
  for (int i = 0; i < static_cast<int>(memory_.layout().buckets().size()); ++i) {
    const FlatLayout::Bucket& bucket = memory_.layout().buckets()[i];
    if (!bucket.compressed) continue;
    for (int state = 0; state < compressor->states(); ++state) {
      for (const ParameterId id : bucket.parameters) {
        const Parameter& parameter = inputs_.model.parameters().at(id);
        const std::string name = ResidualName(state, parameter.name);
        const auto found = reader.tensors().find(name);
        // It was not compressed when it was saved: nothing is left over.
        if (found == reader.tensors().end()) continue;
        ASSIGN_OR_RETURN(const int64_t owners, OwnersOf(reader, name, found->second, parameter));
        const int64_t elements = parameter.elements();
        values.clear();
        int64_t count = 0;  // owners whose heir this rank is
        for (int64_t owner = 0; owner < owners; ++owner) {
          if (owner * ranks / owners != rank) continue;
          values.resize(++count * elements);
          RETURN_IF_ERROR(ReadResidual(reader, name, parameter, 0, elements, owner,
                                       values.data() + (count - 1) * elements));
        }
        if (count == 0) continue;
        sum.resize(elements);
        for (int64_t j = 0; j < elements; ++j) {
          sum[j] = kernels::SumAsTree(count, [&](int64_t k) { return values[k * elements + j]; });
        }
        const int64_t at = memory_.layout().offset(id) - bucket.range.begin;
        kernels::Copy(compute, Tensor(sum.data(), DType::kF32, {elements}),
                      compressor->state(state, i).Rows(at, elements));
        RETURN_IF_ERROR(compute.Synchronize());
      }
    }
  }
  return absl::OkStatus();
}

absl::Status StateRestorer::LoadCarried(CheckpointReader& reader) {
  gradients_.Carry({}, nullptr);
  if (gradients_.compressor() == nullptr) return absl::OkStatus();
  const FlatLayout& layout = memory_.layout();
  std::vector<GradientReduction::Carried> carried;
  std::vector<float> all, values;
  for (int i = 0; i < static_cast<int>(layout.buckets().size()); ++i) {
    if (layout.buckets()[i].compressed) continue;
    const FlatRange part = layout.Part(i, inputs_.groups.shard().rank());
    for (const FlatSlice& slice : layout.Slices(part)) {
      // Of a tied table, the stage that owns it compresses it and sends the other one its sum.
      Parameter parameter = inputs_.model.parameters().at(slice.parameter);
      parameter.duplicate = false;
      const std::string name = ResidualName(/*state=*/0, parameter.name);
      const auto found = reader.tensors().find(name);
      if (found == reader.tensors().end() || Compresses(inputs_.options.compression, parameter)) {
        continue;
      }
      ASSIGN_OR_RETURN(const int64_t owners, OwnersOf(reader, name, found->second, parameter));
      values.resize(owners * slice.count);
      for (int64_t owner = 0; owner < owners; ++owner) {
        RETURN_IF_ERROR(ReadResidual(reader, name, parameter, slice.first, slice.count, owner,
                                     values.data() + owner * slice.count));
      }
      carried.push_back({i, slice.flat - part.begin, Tensor(nullptr, DType::kF32, {slice.count})});
      for (int64_t j = 0; j < slice.count; ++j) {
        all.push_back(kernels::SumAsTree(
            owners, [&](int64_t owner) { return values[owner * slice.count + j]; }));
      }
    }
  }
  if (carried.empty()) return absl::OkStatus();
  ASSIGN_OR_RETURN(auto memory, inputs_.device.AllocateHost(all.size() * sizeof(float)));
  auto* at = static_cast<float*>(memory->data());
  std::copy(all.begin(), all.end(), at);
  for (GradientReduction::Carried& slice : carried) {
    slice.elements = Tensor(at, DType::kF32, {slice.elements.elements()});
    at += slice.elements.elements();
  }
  gradients_.Carry(std::move(carried), std::move(memory));
  return absl::OkStatus();
}

absl::Status StateRestorer::LoadScalars(const CheckpointState& state) {
  const auto integer = [&](const char* key, int64_t otherwise) {
    const auto found = state.integers.find(key);
    return found == state.integers.end() ? otherwise : found->second;
  };
  // The loss scale starts anew after a run in another precision.
  kernels::StepState optimizer = optimizer_.initial_state();
  optimizer.updates = integer(kUpdatesKey, state.id.step);
  if (const auto scale = state.numbers.find(kLossScaleKey);
      scale != state.numbers.end() && optimizer_.loss_scale() != nullptr) {
    optimizer.loss_scale = static_cast<float>(scale->second);
    optimizer.clean_steps = static_cast<int32_t>(integer(kCleanStepsKey, 0));
    optimizer.hysteresis = static_cast<int32_t>(integer(kHysteresisKey, optimizer.hysteresis));
  }
  return optimizer_.SetState(memory_.compute(), optimizer);
}

absl::Status StateRestorer::LoadWeights(WeightReader read) {
  TrainerHooks& hooks = inputs_.hooks;
  hooks.OnPhase(kLoading);
  absl::Status own;
  ASSIGN_OR_RETURN(const bool everywhere,
                   channel_.Run(
                       [&](ControlChannel::Work& work) {
                         work.Expect(memory_.layout().local_elements() * SizeOf(DType::kF32));
                         own = LoadOwn(/*state=*/0, read, work);
                         return own;
                       },
                       [&](double fraction) { hooks.OnProgress(kLoading, fraction); }));
  if (everywhere) return absl::OkStatus();
  if (own.ok() || absl::IsCancelled(own)) {
    own = absl::FailedPreconditionError(
        "another rank could not read the weights to begin with; see its log");
  }
  return Mark(std::move(own), FailureDomain::kStorage);
}

absl::Status StateRestorer::Reject(const RestoreCandidate& candidate, const absl::Status& own) {
  std::string text;
  if (!own.ok() && !absl::IsCancelled(own)) {
    // Where hosts have directories of their own, a part that a rank does not find is not damage.
    const bool absent = shares_.several_directories() && absl::IsNotFound(own);
    text = absl::StrCat(absent ? kAbsent : kDamaged, own.message());
  }
  ASSIGN_OR_RETURN(const std::vector<std::string> texts, channel_.Gather(text));
  const int this_rank = inputs_.world().rank();
  const auto begins = [](absl::string_view prefix) {
    return [prefix](const std::string& other) { return absl::StartsWith(other, prefix); };
  };
  if (const auto damaged = std::find_if(texts.begin(), texts.end(), begins(kDamaged));
      damaged != texts.end()) {
    const auto rank = static_cast<int>(damaged - texts.begin());
    if (this_rank != 0) return absl::OkStatus();
    inputs_.hooks.OnDamaged(
        candidate.id, rank == 0 ? own
                                : absl::DataLossError(absl::StrCat(
                                      "rank ", rank, ": ", damaged->substr(kDamaged.size()))));
    return absl::OkStatus();
  }
  if (const auto absent = std::find_if(texts.begin(), texts.end(), begins(kAbsent));
      absent != texts.end()) {
    inputs_.hooks.OnWarning(absl::NotFoundError(absl::StrFormat(
        "step %d cannot be restored here: rank %d does not find its part (%s). With "
        "checkpoint.storage: local a rank needs the disk of a host that held the same part",
        candidate.id.step, absent - texts.begin(), absent->substr(kAbsent.size()))));
  }
  return absl::OkStatus();
}

// Undoes what a load that failed may have written.
absl::Status StateRestorer::Reset() {
  FlatBuffers& flat = memory_.flat();
  kernels::Stream& compute = memory_.compute();
  for (int i = 0; i < static_cast<int>(memory_.layout().buckets().size()); ++i) {
    for (const int state : {1, 2}) {
      const Tensor moment = Moment(state, i);
      if (flat.offloaded(i)) {
        std::memset(moment.data(), 0, moment.bytes());
      } else {
        kernels::Zero(compute, moment);
      }
    }
  }
  if (gradients_.compressor() != nullptr) gradients_.compressor()->Reset(compute);
  gradients_.Carry({}, nullptr);
  return optimizer_.SetState(compute, optimizer_.initial_state());
}

Tensor StateRestorer::Moment(int state, int bucket) {
  return state == 1 ? memory_.flat().m(bucket) : memory_.flat().v(bucket);
}

}  // namespace muster::parallel
