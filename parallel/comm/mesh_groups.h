// The communicators of a mesh: one per set of axes that ranks communicate along, made from one
// world communicator in one global order.
#ifndef MUSTER_PARALLEL_COMM_MESH_GROUPS_H_
#define MUSTER_PARALLEL_COMM_MESH_GROUPS_H_

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "parallel/comm/communicator.h"
#include "parallel/mesh/mesh.h"

namespace muster::parallel {

// Owns every communicator but the world's, which must outlive it. Make() is a collective over the
// whole world. A group of one rank costs nothing and its collectives do nothing. Groups of the same
// ranks are separate communicators where they are used from different streams. The gradient group
// is shard() or replicate() where one of them has all of its ranks. Communicators that nobody uses
// are not made: each takes up to a GiB of a GPU's memory
// (docs/decisions/0005-copy-engines-carry-large-collectives.md). Single-threaded, apart from what
// Communicator allows.
class MeshGroups {
 public:
  // `zero_shards`: ranks over which ZeRO shards, a divisor of the gradient group (data x context);
  // the rest of that group replicates (HSDP). 0 = 1. kInvalidArgument when it does not divide, or
  // when the mesh is not the world's size; else the status of Communicator::Split.
  static absl::StatusOr<std::unique_ptr<MeshGroups>> Make(const Mesh& mesh, Communicator& world,
                                                          int zero_shards = 1);
  // The groups of a mesh with data parallelism alone.
  static absl::StatusOr<std::unique_ptr<MeshGroups>> MakeData(Communicator& world,
                                                              int zero_shards = 1);
  ~MeshGroups();
  // How many communicators of several ranks Make() makes on each rank.
  static int Count(const Mesh& mesh, int zero_shards);

  const Mesh& mesh() const { return mesh_; }
  const PerAxis& coordinate() const { return coordinate_; }
  Communicator& world() { return world_; }

  // The group of this rank along the axes: {kTensor}, {kContext}, {kPipeline} or {kData, kContext},
  // whose order does not matter.
  Communicator& Along(const std::vector<Axis>& axes);

  // The gradient group, Along({kData, kContext}), is a grid of shard and replicate groups: its rank
  // i is rank i % zero_shards of a shard group and rank i / zero_shards of a replicate group.
  Communicator& shard() { return *shard_; }          // gradients are reduce-scattered here
  Communicator& gather() { return *gather_; }        // the same ranks, to gather parameters
  Communicator& replicate() { return *replicate_; }  // parts of gradients are all-reduced here
  int gradient_rank() { return Along({Axis::kData, Axis::kContext}).rank(); }
  int gradient_size() { return Along({Axis::kData, Axis::kContext}).size(); }

 private:
  MeshGroups(const Mesh& mesh, Communicator& world);
  absl::Status Split(int zero_shards);

  const Mesh mesh_;
  Communicator& world_;
  const PerAxis coordinate_;
  std::map<std::string, std::shared_ptr<Communicator>> along_;  // by name
  std::shared_ptr<Communicator> shard_, gather_, replicate_;
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_COMM_MESH_GROUPS_H_
