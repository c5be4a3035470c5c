#include "parallel/mesh/mesh.h"

#include <algorithm>
#include <cstdint>
#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/check.h"

namespace muster::parallel {

std::string RanksText(const std::vector<int>& ranks) {
  std::vector<std::string> parts;
  for (size_t begin = 0, end = 0; begin < ranks.size(); begin = end) {
    end = begin + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
    parts.push_back(end - begin == 1 ? absl::StrCat(ranks[begin])
                                     : absl::StrCat(ranks[begin], "-", ranks[end - 1]));
  }
  return absl::StrJoin(parts, ", ");
}

absl::string_view Name(Axis axis) {
  switch (axis) {
    case Axis::kPipeline:
      return "pipeline";
    case Axis::kData:
      return "data";
    case Axis::kContext:
      return "context";
    case Axis::kTensor:
      return "tensor";
  }
  CHECK(false) << "axis " << static_cast<int>(axis);
  return "";
}

absl::string_view ShortName(Axis axis) {
  switch (axis) {
    case Axis::kPipeline:
      return "pp";
    case Axis::kData:
      return "dp";
    case Axis::kContext:
      return "cp";
    case Axis::kTensor:
      return "tp";
  }
  CHECK(false) << "axis " << static_cast<int>(axis);
  return "";
}

std::string PerAxis::ToString() const {
  return absl::StrJoin(kAxes, " ", [this](std::string* out, Axis axis) {
    absl::StrAppend(out, ShortName(axis), "=", (*this)[axis]);
  });
}

absl::StatusOr<Mesh> Mesh::Make(const MeshOptions& options, int world_size) {
  if (world_size < 1) {
    return absl::InvalidArgumentError(absl::StrCat("a mesh of ", world_size, " ranks"));
  }
  int64_t product = 1;
  for (Axis axis : kAxes) {
    const int degree = options.degrees[axis];
    if (degree < 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("the ", Name(axis), "-parallel degree is ", degree, ", must be at least 1"));
    }
    if (std::count(options.order.begin(), options.order.end(), axis) != 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("the order of mesh axes must name ", Name(axis), " exactly once"));
    }
    // Stays far from overflow: what is beyond any world size is wrong already.
    product = std::min<int64_t>(product * degree, int64_t{1} << 31);
  }
  if (product != world_size) {
    return absl::InvalidArgumentError(
        absl::StrCat("the degrees ", options.degrees.ToString(), " make ",
                     product == int64_t{1} << 31 ? "2^31 or more" : absl::StrCat(product),
                     " ranks, but the job has ", world_size));
  }
  return Mesh(options, world_size);
}

PerAxis Mesh::CoordinateOf(int rank) const {
  CHECK(rank >= 0 && rank < world_size_) << "rank " << rank << " of " << world_size_;
  PerAxis coordinate;
  for (Axis axis : options_.order) {
    coordinate[axis] = rank % degree(axis);
    rank /= degree(axis);
  }
  return coordinate;
}

int Mesh::RankOf(const PerAxis& coordinate) const {
  int rank = 0;
  int stride = 1;
  for (Axis axis : options_.order) {
    CHECK(coordinate[axis] >= 0 && coordinate[axis] < degree(axis))
        << coordinate.ToString() << " in " << degrees().ToString();
    rank += coordinate[axis] * stride;
    stride *= degree(axis);
  }
  return rank;
}

std::vector<std::vector<int>> Mesh::Groups(const std::vector<Axis>& axes) const {
  std::vector<std::vector<int>> groups;
  std::map<int, size_t> index_of_first;
  for (int rank = 0; rank < world_size_; ++rank) {
    // The member with coordinate 0 along the axes is the group's smallest rank.
    PerAxis first = CoordinateOf(rank);
    for (Axis axis : axes) first[axis] = 0;
    auto [found, inserted] = index_of_first.try_emplace(RankOf(first), groups.size());
    if (inserted) groups.emplace_back();
    groups[found->second].push_back(rank);
  }
  return groups;
}

std::vector<int> Mesh::GroupOf(int rank, const std::vector<Axis>& axes) const {
  return Groups(axes)[static_cast<size_t>(ColorOf(rank, axes))];
}

int Mesh::ColorOf(int rank, const std::vector<Axis>& axes) const {
  const std::vector<std::vector<int>> groups = Groups(axes);
  for (size_t i = 0; i < groups.size(); ++i) {
    if (std::binary_search(groups[i].begin(), groups[i].end(), rank)) return static_cast<int>(i);
  }
  CHECK(false) << "rank " << rank << " of " << world_size_;
  return -1;
}

}  // namespace muster::parallel
