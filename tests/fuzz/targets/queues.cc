#include <cmath>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "coordinator/core/reputation.h"
#include "coordinator/scheduler/queue_tree.h"
#include "coordinator/scheduler/slot_index.h"
#include "coordinator/scheduler/spares.h"
#include "muster/v1/queue.pb.h"
#include "proto/spec/queues.h"
#include "tests/fuzz/targets/targets.h"

namespace muster::fuzz {
namespace {

// Two racks of two hosts with a GPU and two CPU slots each; one CPU slot is taken.
coordinator::SlotIndex SmallCluster() {
  coordinator::SlotIndex index;
  for (int i = 0; i < 4; ++i) {
    coordinator::WorkerView worker{.id = WorkerId(absl::StrCat("worker-", i)), .ready = true};
    worker.path.names[coordinator::DepthOf(v1::TOPOLOGY_LEVEL_RACK)] = absl::StrCat("rack-", i / 2);
    worker.slots = {coordinator::SlotView{.device = "cpu:0"},
                    coordinator::SlotView{.device = "cpu:1"},
                    coordinator::SlotView{.device = "cuda:0", .kind = v1::DEVICE_KIND_CUDA}};
    if (i == 0) worker.slots[0].held_by = JobId("job");
    index.Put(std::move(worker));
  }
  return index;
}

void CheckSpares(const coordinator::QueueTree& tree) {
  coordinator::SlotIndex index = SmallCluster();
  const coordinator::SlotIndex before = index;
  const coordinator::SpareCount count = coordinator::SpareDevices(index, tree);
  // 4 GPUs and 7 CPU slots are free.
  CHECK(count.free >= 0 && count.free <= 11 && count.missing >= 0);
  for (const v1::SpareStatus& status : coordinator::CountSpares(index, tree)) {
    CHECK(status.free() >= 0 && status.free() <= 7);
    CHECK(status.domains_short() >= 0 && status.domains_short() <= status.domains());
  }
  CHECK(index == before);
}

void CheckReputation(const coordinator::QueueTree& tree) {
  CHECK(tree.avoid_above() > 0 && std::isfinite(tree.avoid_above()));
  CHECK(tree.fault_half_life() > absl::ZeroDuration());
  const double left = coordinator::reputation::Decayed(1, absl::Hours(1), tree.fault_half_life());
  CHECK(left >= 0 && left < 1);
}

void CheckTree(const v1::QueuePolicy& policy) {
  const absl::StatusOr<coordinator::QueueTree> made = coordinator::QueueTree::Make(policy);
  if (!made.ok()) {
    CHECK(made.status().code() == absl::StatusCode::kInvalidArgument) << made.status();
    return;
  }
  CHECK(made->Find("default") != coordinator::QueueTree::kNone);
  coordinator::QueueUse use(*made);
  for (size_t i = 0; i < made->queues().size(); ++i) {
    const int queue = static_cast<int>(i);
    CHECK(made->Find(made->at(queue).name) == queue);
    CHECK(made->Path(queue).back() == queue && made->at(queue).parent < queue);
    CHECK(made->at(queue).weight > 0);
    use.Count(*made, queue, v1::DEVICE_KIND_CPU, 3, "tenant", 1);
  }
  coordinator::QueueHistory history;
  for (size_t i = 0; i < made->queues().size(); ++i) {
    const int queue = static_cast<int>(i);
    history.Begin(made->at(queue).name, absl::UnixEpoch());
    const absl::Time later = absl::UnixEpoch() + absl::Hours(1);
    CHECK(history.Average(*made, use, queue, v1::DEVICE_KIND_CPU, later) > 0);
    const bool may = made->CheckJob(made->at(queue).name, v1::DEVICE_KIND_CPU, 3).ok();
    const coordinator::QueueUse none(*made);
    const auto limit = coordinator::FindLimit(*made, none, queue, v1::DEVICE_KIND_CPU, 3, "tenant");
    // What is accepted runs when nothing else does, unless no job may run.
    CHECK(!may || !limit.has_value() || limit->kind == coordinator::QueueLimit::Kind::kJobs);
    use.Count(*made, queue, v1::DEVICE_KIND_CPU, 3, "tenant", -1);
  }
  CHECK(use == coordinator::QueueUse(*made));
  CheckSpares(*made);
  CheckReputation(*made);
}

}  // namespace

void QueuePolicyYaml(const std::string& bytes) {
  const absl::StatusOr<v1::QueuePolicy> parsed = spec::ParseQueues(bytes, "queues.yaml");
  if (!parsed.ok()) {
    CHECK(parsed.status().code() == absl::StatusCode::kInvalidArgument) << parsed.status();
    return;
  }
  CheckTree(*parsed);
  const std::string yaml = spec::QueuesToYaml(*parsed);
  const absl::StatusOr<v1::QueuePolicy> again = spec::ParseQueues(yaml, "again.yaml");
  CHECK(again.ok()) << again.status() << yaml;
  CHECK(spec::QueuesToYaml(*again) == yaml) << yaml;
}

void QueuePolicyProto(const std::string& bytes) {
  v1::QueuePolicy policy;
  if (policy.ParseFromString(bytes)) CheckTree(policy);
}

}  // namespace muster::fuzz
