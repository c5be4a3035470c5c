// The mesh of ranks: every parallel degree in one validated type, and the bijection between a rank
// and its coordinate. Pure; knows nothing of devices or communicators.
//
// With the default order a neighbouring rank differs in the tensor coordinate first, then context,
// data and pipeline: the axes that talk most sit closest together (Narayanan et al., SC 2021,
// arXiv 2104.04473).
#ifndef MUSTER_PARALLEL_MESH_MESH_H_
#define MUSTER_PARALLEL_MESH_MESH_H_

#include <array>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace muster::parallel {

// `axis` is always an axis of the mesh, `dim` a dimension of a tensor.
enum class Axis { kPipeline, kData, kContext, kTensor };
inline constexpr int kAxisCount = 4;
inline constexpr std::array<Axis, kAxisCount> kAxes = {Axis::kPipeline, Axis::kData, Axis::kContext,
                                                       Axis::kTensor};

absl::string_view Name(Axis axis);       // "pipeline", "data", "context", "tensor"
absl::string_view ShortName(Axis axis);  // "pp", "dp", "cp", "tp"

// Ranks as people write them: "0-3, 6". Requires: ascending.
std::string RanksText(const std::vector<int>& ranks);

// One number per axis: degrees of a mesh, or the coordinate of a rank in it.
class PerAxis {
 public:
  PerAxis() = default;
  PerAxis(int pipeline, int data, int context, int tensor)
      : values_{pipeline, data, context, tensor} {}
  int& operator[](Axis axis) { return values_[static_cast<size_t>(axis)]; }
  int operator[](Axis axis) const { return values_[static_cast<size_t>(axis)]; }
  friend bool operator==(const PerAxis&, const PerAxis&) = default;
  // "pp=2 dp=4 cp=1 tp=8".
  std::string ToString() const;

 private:
  std::array<int, kAxisCount> values_{};
};

struct MeshOptions {
  PerAxis degrees{1, 1, 1, 1};
  // Every axis once; the coordinate of the first one changes fastest with the rank.
  std::array<Axis, kAxisCount> order = {Axis::kTensor, Axis::kContext, Axis::kData,
                                        Axis::kPipeline};
};

// Immutable value; copy freely; any thread.
class Mesh {
 public:
  // kInvalidArgument names the axis or the product: "the degrees pp=2 dp=4 cp=1 tp=8 make 64 ranks,
  // but the job has 32".
  static absl::StatusOr<Mesh> Make(const MeshOptions& options, int world_size);

  int world_size() const { return world_size_; }
  int degree(Axis axis) const { return options_.degrees[axis]; }
  const PerAxis& degrees() const { return options_.degrees; }

  // Requires: 0 <= rank < world_size().
  PerAxis CoordinateOf(int rank) const;
  // Requires: 0 <= coordinate[axis] < degree(axis) for every axis.
  int RankOf(const PerAxis& coordinate) const;

  // The ranks that differ from each other only along `axes` form a group. All groups along `axes`,
  // ordered by their first rank, each in ascending rank order: the same list on every rank, so it
  // is also the one global order in which communicators are made. Along no axis, every rank is
  // alone; along all of them, there is one group of everyone. Groups(kData, kContext) is the group
  // over which gradients are reduced.
  std::vector<std::vector<int>> Groups(const std::vector<Axis>& axes) const;
  // The group of `rank` and its index in Groups(axes): the color of Communicator::Split, whose key
  // is the rank.
  std::vector<int> GroupOf(int rank, const std::vector<Axis>& axes) const;
  int ColorOf(int rank, const std::vector<Axis>& axes) const;

 private:
  Mesh(const MeshOptions& options, int world_size) : options_(options), world_size_(world_size) {}

  MeshOptions options_;
  int world_size_;
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_MESH_MESH_H_
