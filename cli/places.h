// A job's layout, and the place of each rank in it, as text.
#ifndef MUSTER_CLI_PLACES_H_
#define MUSTER_CLI_PLACES_H_

#include <optional>
#include <string>

#include "muster/v1/spec.pb.h"
#include "parallel/mesh/mesh.h"

namespace muster::cli {

// The mesh of a spec with defaults; absent when its degrees do not multiply to its ranks.
std::optional<parallel::Mesh> MeshOf(const v1::JobSpec& spec);
// "pipeline 2 x data 4, ZeRO-1": the degrees above 1.
std::string LayoutText(const parallel::Mesh& mesh, const v1::ParallelSpec& split);
// "pp 0 dp 3": the rank's coordinate on the axes that have more than one rank, named like the
// groups of collectives; "-" when there are none.
std::string PlaceText(const parallel::Mesh& mesh, int rank);

}  // namespace muster::cli

#endif  // MUSTER_CLI_PLACES_H_
