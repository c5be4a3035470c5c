#include "parallel/comm/mesh_groups.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "parallel/comm/null_communicator.h"

namespace muster::parallel {
namespace {

std::string NameOf(std::vector<Axis> axes) {
  std::sort(axes.begin(), axes.end());
  return absl::StrJoin(axes, "x",
                       [](std::string* out, Axis axis) { absl::StrAppend(out, ShortName(axis)); });
}

// A group of one rank: collectives in place have nothing to do.
class SoloCommunicator : public NullCommunicator {
 public:
  explicit SoloCommunicator(std::string name)
      : NullCommunicator(/*rank=*/0, /*size=*/1, std::move(name)) {}
  void Broadcast(kernels::Stream&, kernels::Tensor, int root) override { CHECK_EQ(root, 0); }
  void AllToAll(kernels::Stream&, kernels::Tensor, kernels::Tensor) override {
    CHECK(false) << "an all-to-all in group " << name() << " of one rank";
  }
  void Send(kernels::Stream&, kernels::Tensor, int to) override {
    CHECK(false) << "send to " << to << " in group " << name() << " of one rank";
  }
  void Receive(kernels::Stream&, kernels::Tensor, int from) override {
    CHECK(false) << "receive from " << from << " in group " << name() << " of one rank";
  }
  absl::StatusOr<std::unique_ptr<Communicator>> Split(int, int, const std::string& name) override {
    return std::make_unique<SoloCommunicator>(name);
  }
};

}  // namespace

MeshGroups::MeshGroups(const Mesh& mesh, Communicator& world)
    : mesh_(mesh), world_(world), coordinate_(mesh.CoordinateOf(world.rank())) {}
MeshGroups::~MeshGroups() = default;

absl::StatusOr<std::unique_ptr<MeshGroups>> MeshGroups::Make(const Mesh& mesh, Communicator& world,
                                                             int zero_shards) {
  if (mesh.world_size() != world.size()) {
    return absl::InvalidArgumentError(absl::StrCat("a mesh of ", mesh.world_size(),
                                                   " ranks over a communicator of ", world.size()));
  }
  const int group = mesh.degree(Axis::kData) * mesh.degree(Axis::kContext);
  zero_shards = std::max(1, zero_shards);
  if (group % zero_shards != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("ZeRO shards over ", zero_shards, " ranks, which does not divide the ", group,
                     " of data x context (", mesh.degrees().ToString(), ")"));
  }
  std::unique_ptr<MeshGroups> groups(new MeshGroups(mesh, world));
  RETURN_IF_ERROR(groups->Split(zero_shards));
  return groups;
}

absl::StatusOr<std::unique_ptr<MeshGroups>> MeshGroups::MakeData(Communicator& world,
                                                                 int zero_shards) {
  ASSIGN_OR_RETURN(const Mesh mesh,
                   Mesh::Make({.degrees = PerAxis(1, world.size(), 1, 1)}, world.size()));
  return Make(mesh, world, zero_shards);
}

absl::Status MeshGroups::Split(int zero_shards) {
  // Sizes follow from the mesh, so all ranks agree on which splits there are.
  const auto split = [this](
                         int size, int color,
                         const std::string& name) -> absl::StatusOr<std::unique_ptr<Communicator>> {
    if (size == 1) return std::make_unique<SoloCommunicator>(name);
    ASSIGN_OR_RETURN(auto made, world_.Split(color, world_.rank(), name));
    CHECK_EQ(made->size(), size) << name;
    return made;
  };
  for (const Axis axis : {Axis::kTensor, Axis::kContext, Axis::kPipeline}) {
    const std::string name = NameOf({axis});
    ASSIGN_OR_RETURN(along_[name],
                     split(mesh_.degree(axis), mesh_.ColorOf(world_.rank(), {axis}), name));
  }
  const std::vector<Axis> gradient = {Axis::kData, Axis::kContext};
  const std::vector<int> members = mesh_.GroupOf(world_.rank(), gradient);
  const int size = static_cast<int>(members.size());
  const int rank =
      static_cast<int>(std::find(members.begin(), members.end(), world_.rank()) - members.begin());
  const int color = mesh_.ColorOf(world_.rank(), gradient);
  const int replicas = size / zero_shards;
  const int shard_color = color * replicas + rank / zero_shards;
  ASSIGN_OR_RETURN(shard_, split(zero_shards, shard_color, "shard"));
  ASSIGN_OR_RETURN(gather_, split(zero_shards, shard_color, "gather"));
  ASSIGN_OR_RETURN(replicate_,
                   split(replicas, color * zero_shards + rank % zero_shards, "replicate"));
  std::shared_ptr<Communicator>& whole = along_[NameOf(gradient)];
  if (zero_shards == size) {
    whole = shard_;
  } else if (zero_shards == 1) {
    whole = replicate_;
  } else {
    ASSIGN_OR_RETURN(whole, split(size, color, NameOf(gradient)));
  }
  return absl::OkStatus();
}

int MeshGroups::Count(const Mesh& mesh, int zero_shards) {
  int count = 0;
  for (const Axis axis : {Axis::kTensor, Axis::kContext, Axis::kPipeline}) {
    if (mesh.degree(axis) > 1) ++count;
  }
  const int replicas = mesh.degree(Axis::kData) * mesh.degree(Axis::kContext) / zero_shards;
  if (zero_shards > 1) count += 2;
  if (replicas > 1) ++count;
  if (zero_shards > 1 && replicas > 1) ++count;
  return count;
}

Communicator& MeshGroups::Along(const std::vector<Axis>& axes) {
  const auto found = along_.find(NameOf(axes));
  CHECK(found != along_.end()) << "no communicator along " << NameOf(axes);
  return *found->second;
}

}  // namespace muster::parallel
