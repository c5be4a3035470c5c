#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/check.h"
#include "coordinator/scheduler/placement.h"
#include "coordinator/scheduler/slot_index.h"
#include "coordinator/scheduler/topology.h"
#include "proto/spec/topology_file.h"
#include "tests/fuzz/targets/targets.h"

namespace muster::fuzz {
namespace {

// Workers that no topology file needs more of.
constexpr size_t kWorkersPlaced = 64;

void CheckRefusal(const absl::Status& status) {
  CHECK(status.code() == absl::StatusCode::kInvalidArgument) << status;
  CHECK(!status.message().empty());
}

// Workers where the file says hold a gang, inside one rack or not.
void PlaceOn(const spec::ClusterTopology& topology) {
  coordinator::SlotIndex index;
  for (const auto& [name, domains] : topology.workers) {
    if (index.workers().size() == kWorkersPlaced) break;
    coordinator::WorkerView worker;
    worker.id = WorkerId(name);
    worker.ready = true;
    worker.path.names = domains;
    worker.slots = {coordinator::SlotView{.device = "cpu:0"},
                    coordinator::SlotView{.device = "cpu:1"}};
    index.Put(worker);
  }
  if (index.empty()) return;
  const coordinator::SlotIndex before = index;
  coordinator::WaitingJob job;
  job.id = JobId("gang");
  job.ranks = static_cast<int32_t>(index.workers().size()) + 1;
  for (const v1::TopologyLevel level : {v1::TOPOLOGY_LEVEL_UNSPECIFIED, v1::TOPOLOGY_LEVEL_RACK}) {
    job.placement.required = level;
    coordinator::SlotIndex::Trial trial(index);
    const auto placed = coordinator::PlaceGang(trial, job);
    CHECK(placed.has_value() == coordinator::CouldFit(job, index) ||
          level != v1::TOPOLOGY_LEVEL_UNSPECIFIED);
  }
  CHECK(index == before);
}

}  // namespace

void TopologyFile(const std::string& bytes) {
  const absl::StatusOr<spec::ClusterTopology> cluster = spec::ParseClusterTopology(bytes, "t.yaml");
  if (cluster.ok()) {
    CHECK_LE(cluster->workers.size(), spec::kTopologyWorkersMax);
    PlaceOn(*cluster);
  } else {
    CheckRefusal(cluster.status());
  }
  const absl::StatusOr<spec::MachineTopology> machine = spec::ParseMachineTopology(bytes, "t.yaml");
  if (!machine.ok()) return CheckRefusal(machine.status());
  google::protobuf::RepeatedPtrField<v1::Device> devices;
  for (const v1::Device& said : machine->devices) {
    v1::Device& device = *devices.Add();
    device.set_name(said.name());
    device.set_kind(v1::DEVICE_KIND_CUDA);
    device.set_numa_node(-1);
  }
  CHECK(spec::ApplyTopology(*machine, "t.yaml", devices).ok());
  // What was filled in agrees with the file.
  CHECK(spec::ApplyTopology(*machine, "t.yaml", devices).ok());
}

}  // namespace muster::fuzz
