// The queues: how an operator defines them, and what is stored of them.
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "coordinator/core/core_impl.h"
#include "coordinator/core/schema.h"

namespace muster::coordinator {

void CoreImpl::On(const ApplyQueuesEvent& event, Turn& turn) {
  ReplyAction reply;
  reply.call = event.call;
  absl::StatusOr<QueueTree> tree = QueueTree::Make(event.policy);
  if (!tree.ok()) {
    reply.status = tree.status();
    turn.Act(std::move(reply));
    return;
  }
  turn.batch().Put(Table::kQueues, schema::kQueuePolicy, schema::Serialize(event.policy));
  v1::Event row;
  row.set_kind(v1::EVENT_KIND_QUEUES_CHANGED);
  row.set_rank(-1);
  row.set_message(absl::StrCat("the queues are defined anew: there are ", tree->queues().size()));
  turn.Log(std::move(row));
  queue_policy_ = event.policy;
  scheduling_.SetTree(*std::move(tree), turn.now());
  turn.Reschedule();
  turn.Act(std::move(reply));
}

absl::Status CoreImpl::LoadQueues(Store& store) {
  ASSIGN_OR_RETURN(const std::optional<std::string> row,
                   store.Get(Table::kQueues, schema::kQueuePolicy));
  if (row.has_value()) {
    RETURN_IF_ERROR(schema::Parse(Table::kQueues, schema::kQueuePolicy, *row, queue_policy_));
    absl::StatusOr<QueueTree> tree = QueueTree::Make(queue_policy_);
    if (!tree.ok()) {
      return absl::DataLossError(absl::StrCat("the stored queues: ", tree.status().message()));
    }
    scheduling_.RecoverTree(*std::move(tree));
  }
  absl::Status status;
  const std::string prefix = schema::kQueueUsagePrefix;
  RETURN_IF_ERROR(
      store.Scan(Table::kMeta, prefix, "", [&](const std::string& key, const std::string& value) {
        if (!absl::StartsWith(key, prefix)) return false;
        v1::QueueUsage usage;
        status = schema::Parse(Table::kMeta, key, value, usage);
        if (status.ok()) scheduling_.RestoreHistory(key.substr(prefix.size()), usage);
        return status.ok();
      }));
  return status;
}

void CoreImpl::PersistQueueUsage(Turn& turn) {
  for (const std::string& queue : scheduling_.TakeAccrued()) {
    const std::string key = absl::StrCat(schema::kQueueUsagePrefix, queue);
    const std::optional<v1::QueueUsage> usage = scheduling_.history().Stored(queue);
    if (usage.has_value()) {
      turn.batch().Put(Table::kMeta, key, schema::Serialize(*usage));
    } else {
      turn.batch().Delete(Table::kMeta, key);
    }
  }
}

}  // namespace muster::coordinator
