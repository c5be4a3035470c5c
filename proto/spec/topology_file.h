// Topology files (docs/topology.md): where the workers of a cluster are, for the coordinator, and
// what connects the devices of one machine, for its daemon. Pure.
#ifndef MUSTER_PROTO_SPEC_TOPOLOGY_FILE_H_
#define MUSTER_PROTO_SPEC_TOPOLOGY_FILE_H_

#include <array>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "google/protobuf/repeated_field.h"
#include "muster/v1/job.pb.h"
#include "muster/v1/spec.pb.h"

namespace muster::spec {

// More is refused.
inline constexpr size_t kTopologyWorkersMax = 16'384;
inline constexpr size_t kTopologyDomainsMax = 16'384;
inline constexpr size_t kTopologyNameBytesMax = 253;
inline constexpr size_t kTopologyDevicesMax = 1024;

// One name for each level that has domains: zone, block, rack, NVLink domain.
using DomainNames = std::array<std::string, 4>;

struct ClusterTopology {
  DomainNames labels;  // of workers, that name their domains; empty: the default one
  std::map<std::string, DomainNames>
      workers;  // by worker; an empty name: in no domain of the level
};

struct MachineTopology {
  std::map<std::string, std::string> labels;  // of the worker
  // With name, and those of numa_node, pci_address, pcie_switch and nvlinks that the file gives;
  // numa_node is -1 where it gives none.
  std::vector<v1::Device> devices;
};

// YAML or JSON. kInvalidArgument: every problem found, one per line, as "FILE:LINE:COLUMN:
// domains[2].in: why". Bounds as of a job spec.
absl::StatusOr<ClusterTopology> ParseClusterTopology(const std::string& text,
                                                     const std::string& file);
absl::StatusOr<MachineTopology> ParseMachineTopology(const std::string& text,
                                                     const std::string& file);

// Fills in what the file says of devices and the driver did not tell. kInvalidArgument names the
// device, the field, and both values where they differ, or a device that is not there.
absl::Status ApplyTopology(const MachineTopology& topology, const std::string& file,
                           google::protobuf::RepeatedPtrField<v1::Device>& devices);

}  // namespace muster::spec

#endif  // MUSTER_PROTO_SPEC_TOPOLOGY_FILE_H_
