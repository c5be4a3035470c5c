#include "coordinator/core/queues.h"

#include <optional>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "coordinator/core/schema.h"

namespace muster::coordinator {

absl::Status Queues::Define(const v1::QueuePolicy& policy, Scheduling& scheduling, Turn& turn) {
  ASSIGN_OR_RETURN(QueueTree tree, QueueTree::Make(policy));
  turn.batch().Put(Table::kQueues, schema::kQueuePolicy, schema::Serialize(policy));
  v1::Event row;
  row.set_kind(v1::EVENT_KIND_QUEUES_CHANGED);
  row.set_rank(-1);
  row.set_message(absl::StrCat("the queues are defined anew: there are ", tree.queues().size()));
  turn.Log(std::move(row));
  policy_ = policy;
  scheduling.SetTree(std::move(tree), turn.now());
  turn.Reschedule();
  return absl::OkStatus();
}

absl::Status Queues::Load(Store& store, Scheduling& scheduling) {
  ASSIGN_OR_RETURN(const std::optional<std::string> row,
                   store.Get(Table::kQueues, schema::kQueuePolicy));
  if (row.has_value()) {
    RETURN_IF_ERROR(schema::Parse(Table::kQueues, schema::kQueuePolicy, *row, policy_));
    absl::StatusOr<QueueTree> tree = QueueTree::Make(policy_);
    if (!tree.ok()) {
      return absl::DataLossError(absl::StrCat("the stored queues: ", tree.status().message()));
    }
    scheduling.RecoverTree(*std::move(tree));
  }
  absl::Status status;
  const std::string prefix = schema::kQueueUsagePrefix;
  RETURN_IF_ERROR(
      store.Scan(Table::kMeta, prefix, "", [&](const std::string& key, const std::string& value) {
        if (!absl::StartsWith(key, prefix)) return false;
        v1::QueueUsage usage;
        status = schema::Parse(Table::kMeta, key, value, usage);
        if (status.ok()) scheduling.RestoreHistory(key.substr(prefix.size()), usage);
        return status.ok();
      }));
  return status;
}

void Queues::PutUsage(Scheduling& scheduling, Turn& turn) {
  for (const std::string& queue : scheduling.TakeAccrued()) {
    const std::string key = absl::StrCat(schema::kQueueUsagePrefix, queue);
    const std::optional<v1::QueueUsage> usage = scheduling.history().Stored(queue);
    v1::QueueUsageChange& logged = *turn.log_entry().add_queue_usage();
    logged.set_queue(queue);
    if (usage.has_value()) {
      turn.batch().Put(Table::kMeta, key, schema::Serialize(*usage));
      *logged.mutable_usage() = *usage;
    } else {
      turn.batch().Delete(Table::kMeta, key);
    }
  }
}

}  // namespace muster::coordinator
