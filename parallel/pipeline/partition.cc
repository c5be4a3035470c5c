#include "parallel/pipeline/partition.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"

namespace muster::parallel {
namespace {

// The best cut of the first layers into some number of parts, with the beginning of the last part.
struct Cut {
  double largest = std::numeric_limits<double>::infinity();
  double squares = std::numeric_limits<double>::infinity();
  int begin = 0;  // of the last part
};

}  // namespace

absl::StatusOr<std::vector<int>> PartitionLayers(absl::Span<const double> costs, int parts) {
  return PartitionLayersWithin(costs, parts, [](int, int, int) { return true; });
}

absl::StatusOr<std::vector<int>> PartitionLayersWithin(
    absl::Span<const double> costs, int parts, absl::FunctionRef<bool(int, int, int)> fits) {
  const int layers = static_cast<int>(costs.size());
  if (parts < 1 || layers < parts) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%d layers (embedding and head counted) cannot be cut into %d parts of at least one",
        layers, parts));
  }
  std::vector<double> sums = {0};
  for (int i = 0; i < layers; ++i) {
    if (!std::isfinite(costs[i]) || costs[i] < 0) {
      return absl::InvalidArgumentError(
          absl::StrFormat("layer %d has cost %g; costs are finite and not negative", i, costs[i]));
    }
    sums.push_back(sums.back() + costs[i]);
  }
  // best[part][end]: layers [0, end) in part + 1 parts.
  std::vector<std::vector<Cut>> best(parts, std::vector<Cut>(layers + 1));
  for (int part = 0; part < parts; ++part) {
    // Every later part needs a layer, and the last one ends with the layers.
    const int behind = parts - 1 - part;
    int first = part;  // the first layer with which a range up to `end` fits
    for (int end = behind == 0 ? layers : part + 1; end <= layers - behind; ++end) {
      while (first < end && !fits(part, first, end)) ++first;
      Cut& cut = best[part][end];
      if (part == 0 && first == 0) cut = {sums[end], sums[end] * sums[end], 0};
      for (int begin = first; part > 0 && begin < end; ++begin) {
        const Cut& before = best[part - 1][begin];
        if (!std::isfinite(before.largest)) continue;
        const double cost = sums[end] - sums[begin];
        const double largest = std::max(before.largest, cost);
        const double squares = before.squares + cost * cost;
        if (std::make_pair(largest, squares) < std::make_pair(cut.largest, cut.squares)) {
          cut = {largest, squares, begin};
        }
      }
    }
  }
  if (!std::isfinite(best[parts - 1][layers].largest)) {
    return absl::FailedPreconditionError(
        absl::StrFormat("no cut of %d layers into %d parts fits", layers, parts));
  }
  std::vector<int> boundaries(parts + 1, layers);
  for (int part = parts - 1; part >= 0; --part) {
    boundaries[part] = best[part][boundaries[part + 1]].begin;
  }
  return boundaries;
}

}  // namespace muster::parallel
