#include "parallel/train/checkpoint_shares.h"

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "parallel/comm/gather_texts.h"
#include "parallel/train/failure.h"

namespace muster::parallel {

absl::StatusOr<CheckpointShares> CheckpointShares::Make(const TrainerInputs& inputs,
                                                        RankMemory& memory) {
  CheckpointShares shares(inputs);
  const std::vector<int>& directories = inputs.options.checkpoint_groups;
  shares.saver_ = inputs.groups.replicate().rank();
  shares.savers_ = inputs.groups.replicate().size();
  shares.verify_share_ = {inputs.world().rank(), inputs.world().size()};
  shares.several_directories_ = std::any_of(directories.begin(), directories.end(),
                                            [](int directory) { return directory != 0; });
  if (shares.several_directories_) RETURN_IF_ERROR(shares.DivideByDirectory(memory));
  return shares;
}

absl::Status CheckpointShares::DivideByDirectory(RankMemory& memory) {
  const std::vector<int>& directories = inputs_->options.checkpoint_groups;
  for (const std::vector<int>& group : inputs_->groups.mesh().Groups({Axis::kTensor})) {
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
  // Ranks with the same text hold the same slices of the same parameters.
  const auto holds = [](int stage, int shard, int tensor) {
    return absl::StrFormat("%d %d %d", stage, shard, tensor);
  };
  const PerAxis& coordinate = inputs_->groups.coordinate();
  const int shard = inputs_->groups.shard().rank(), tensor = coordinate[Axis::kTensor];
  const std::string own = holds(coordinate[Axis::kPipeline], shard, tensor);
  Communicator& world = inputs_->world();
  auto texts = GatherTexts(world, memory.compute(), own);
  if (!texts.ok()) return Mark(texts.status(), FailureDomain::kCommunication);
  saver_ = savers_ = 0;
  saves_duplicates_ = true;
  verify_share_ = {0, 0};
  for (int rank = 0; rank < world.size(); ++rank) {
    if (directories[rank] != directories[world.rank()]) continue;
    if (rank < world.rank()) ++verify_share_.index;
    ++verify_share_.count;
    // Of a table that both the first and the last stage hold, the first stage's copy is saved where
    // the directory has one.
    if ((*texts)[rank] == holds(0, shard, tensor)) saves_duplicates_ = false;
    if ((*texts)[rank] != own) continue;
    if (rank < world.rank()) ++saver_;
    ++savers_;
  }
  return absl::OkStatus();
}

bool CheckpointShares::leads_directory() const {
  const int rank = inputs_->world().rank();
  return several_directories_ ? inputs_->options.checkpoint_groups[rank] == rank : rank == 0;
}

FlatRange CheckpointShares::Saved(const FlatLayout& layout, int bucket) const {
  const FlatRange part = layout.Part(bucket, inputs_->groups.shard().rank());
  return {part.begin + part.size() * saver_ / savers_,
          part.begin + part.size() * (saver_ + 1) / savers_};
}

bool CheckpointShares::Saves(const Parameter& parameter) const {
  if (!parameter.duplicate || !saves_duplicates_) return inputs_->Owns(parameter);
  Parameter held = parameter;
  held.duplicate = false;
  return inputs_->Owns(held);
}

}  // namespace muster::parallel
