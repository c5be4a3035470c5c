// How a job is split and where each of its ranks stands, as users read it.
#ifndef MUSTER_CLI_PLACES_H_
#define MUSTER_CLI_PLACES_H_

#include <optional>
#include <string>

#include "muster/v1/spec.pb.h"
#include "parallel/mesh/mesh.h"

namespace muster::cli {

// Nothing for jobs of other kinds than the engine's. Of a spec that has its defaults.
std::optional<parallel::Mesh> MeshOf(const v1::JobSpec& spec);
// "pipeline 2 x data 4, ZeRO-1": degrees above 1.
std::string LayoutText(const parallel::Mesh& mesh, const v1::ParallelSpec& split);
// "pp 0 dp 3", of the axes that have more than one rank, as groups of collectives are called.
std::string PlaceText(const parallel::Mesh& mesh, int rank);

}  // namespace muster::cli

#endif  // MUSTER_CLI_PLACES_H_
