#include "parallel/comm/mesh_groups.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/check.h"
#include "base/status_macros.h"

namespace muster::parallel {
namespace {

// Every set of axes that somebody communicates along, in the one order of creation.
std::vector<std::vector<Axis>> AxisSets() {
  return {{Axis::kTensor},
          {Axis::kContext},
          {Axis::kData},
          {Axis::kPipeline},
          {Axis::kData, Axis::kContext},
          {Axis::kPipeline, Axis::kTensor}};
}

std::string NameOf(std::vector<Axis> axes) {
  std::sort(axes.begin(), axes.end());
  return absl::StrJoin(axes, "x",
                       [](std::string* out, Axis axis) { absl::StrAppend(out, ShortName(axis)); });
}

// A group of one: there is nobody to talk to.
class SoloCommunicator : public Communicator {
 public:
  explicit SoloCommunicator(std::string name) : name_(std::move(name)) {}
  int rank() const override { return 0; }
  int size() const override { return 1; }
  const std::string& name() const override { return name_; }
  void AllReduce(kernels::Stream&, kernels::Tensor, ReduceOp) override {}
  void ReduceScatter(kernels::Stream&, kernels::Tensor, ReduceOp) override {}
  void AllGather(kernels::Stream&, kernels::Tensor) override {}
  void Broadcast(kernels::Stream&, kernels::Tensor, int root) override { CHECK_EQ(root, 0); }
  void AllToAll(kernels::Stream&, kernels::Tensor, kernels::Tensor) override {
    CHECK(false) << "an all-to-all in group " << name_ << " of one rank";
  }
  void Send(kernels::Stream&, kernels::Tensor, int to) override {
    CHECK(false) << "send to " << to << " in group " << name_ << " of one rank";
  }
  void Receive(kernels::Stream&, kernels::Tensor, int from) override {
    CHECK(false) << "receive from " << from << " in group " << name_ << " of one rank";
  }
  void GroupBegin() override {}
  void GroupEnd(kernels::Stream&) override {}
  absl::Status Barrier() override { return absl::OkStatus(); }
  absl::StatusOr<std::unique_ptr<Communicator>> Split(int, int, const std::string& name) override {
    return std::make_unique<SoloCommunicator>(name);
  }
  void Abort(absl::Status) override {}
  int64_t bytes_sent() const override { return 0; }

 private:
  const std::string name_;
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
  for (const std::vector<Axis>& axes : AxisSets()) {
    int size = 1;
    for (const Axis axis : axes) size *= mesh_.degree(axis);
    const std::string name = NameOf(axes);
    ASSIGN_OR_RETURN(along_[name], split(size, mesh_.ColorOf(world_.rank(), axes), name));
  }
  const std::vector<Axis> gradient = {Axis::kData, Axis::kContext};
  const int replicas = gradient_size() / zero_shards;
  const int color = mesh_.ColorOf(world_.rank(), gradient);
  const int shard_color = color * replicas + gradient_rank() / zero_shards;
  ASSIGN_OR_RETURN(shard_, split(zero_shards, shard_color, "shard"));
  ASSIGN_OR_RETURN(gather_, split(zero_shards, shard_color, "gather"));
  ASSIGN_OR_RETURN(replicate_, split(replicas, color * zero_shards + gradient_rank() % zero_shards,
                                     "replicate"));
  return absl::OkStatus();
}

Communicator& MeshGroups::Along(const std::vector<Axis>& axes) {
  const auto found = along_.find(NameOf(axes));
  CHECK(found != along_.end()) << "no communicator along " << NameOf(axes);
  return *found->second;
}

}  // namespace muster::parallel
