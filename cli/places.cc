#include "cli/places.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace muster::cli {

std::optional<parallel::Mesh> MeshOf(const v1::JobSpec& spec) {
  const v1::ParallelSpec& split = spec.engine().parallel();
  parallel::MeshOptions options;
  options.degrees =
      parallel::PerAxis(split.pipeline(), split.data(), split.context(), split.tensor());
  for (int i = 0; i < split.order_size() && i < parallel::kAxisCount; ++i) {
    switch (split.order(i)) {
      case v1::MESH_AXIS_DATA:
        options.order[i] = parallel::Axis::kData;
        break;
      case v1::MESH_AXIS_CONTEXT:
        options.order[i] = parallel::Axis::kContext;
        break;
      case v1::MESH_AXIS_TENSOR:
        options.order[i] = parallel::Axis::kTensor;
        break;
      default:
        options.order[i] = parallel::Axis::kPipeline;
    }
  }
  const auto mesh = parallel::Mesh::Make(options, spec.resources().ranks());
  return mesh.ok() ? std::make_optional(*mesh) : std::nullopt;
}

std::string LayoutText(const parallel::Mesh& mesh, const v1::ParallelSpec& split) {
  std::vector<std::string> parts;
  for (const parallel::Axis axis : parallel::kAxes) {
    if (mesh.degree(axis) == 1) continue;
    parts.push_back(absl::StrCat(parallel::Name(axis), " ", mesh.degree(axis)));
  }
  std::string text = absl::StrJoin(parts, " x ");
  if (split.sequence()) text += ", sequence";
  if (split.zero() > 0) absl::StrAppend(&text, ", ZeRO-", split.zero());
  if (split.zero() > 0 && split.zero_shards() > 0) {
    absl::StrAppend(&text, " over ", split.zero_shards());
  }
  return text;
}

std::string PlaceText(const parallel::Mesh& mesh, int rank) {
  if (rank < 0 || rank >= mesh.world_size()) return "-";
  const parallel::PerAxis coordinate = mesh.CoordinateOf(rank);
  std::vector<std::string> parts;
  for (const parallel::Axis axis : parallel::kAxes) {
    if (mesh.degree(axis) == 1) continue;
    parts.push_back(absl::StrCat(parallel::ShortName(axis), " ", coordinate[axis]));
  }
  return parts.empty() ? "-" : absl::StrJoin(parts, " ");
}

}  // namespace muster::cli
