#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/check.h"
#include "coordinator/scheduler/queue_tree.h"
#include "muster/v1/queue.pb.h"
#include "proto/spec/queues.h"
#include "tests/fuzz/targets/targets.h"

namespace muster::fuzz {
namespace {

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
