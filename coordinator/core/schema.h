// Keys and rows of the durable state. Numbers in keys are big endian, so that keys sort by number.
// Values are serialized messages of job.proto and stored.proto, except where a line says otherwise.
//
//   kMeta      "cluster_id", "schema_version"   written by the store when it is created
//              "leader_term", "last_event", "last_log_entry"    u64 big endian
//              "history_id"                      text, FromCoordinator.history_id
//              "queue_usage/" QUEUE              QueueUsage
//              "plan_conditions"                 PlanConditions, as the log has them
//   kSpecs       JOB_ID                            SpecRow
//   kStates      JOB_ID                            StateRow
//   kProgress    JOB_ID                            ProgressRow
//   kAttempts    JOB_ID 0x00 u64 epoch             AttemptRow
//   kEnds        JOB_ID 0x00 u64 epoch             AttemptEnd
//   kCheckpoints JOB_ID 0x00 u64 epoch u64 step    CheckpointRecord
//   kCurves      JOB_ID 0x00 u64 step              LossPoint
//   kEvents      u64 sequence                      Event
//   kWorkers     NAME                              Worker
//   kLog         u64 index                         LogEntry
//   kKeyValue    JOB_ID 0x00 u64 epoch KEY         bytes
//   kUsage       "fleet"                           FleetAccount
//                u64 sequence                      UsageRow
//   kQueues      "policy"                          QueuePolicy
//   kRequests    REQUEST_ID                        JOB_ID
//   kJobs        JOB_ID                            JobRecord, of schema 1 alone (migrate.h)
#ifndef MUSTER_COORDINATOR_CORE_SCHEMA_H_
#define MUSTER_COORDINATOR_CORE_SCHEMA_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/ids.h"
#include "coordinator/store/store.h"
#include "google/protobuf/message_lite.h"
#include "muster/v1/job.pb.h"

namespace muster::coordinator::schema {

constexpr char kLeaderTerm[] = "leader_term";
constexpr char kHistoryId[] = "history_id";
constexpr char kLastEvent[] = "last_event";
constexpr char kLastLogEntry[] = "last_log_entry";
constexpr char kFleetAccount[] = "fleet";  // sorts behind every sequence
constexpr char kLastAudit[] = "last_audit";
// Before the name of a queue: its QueueUsage.
constexpr char kQueueUsagePrefix[] = "queue_usage/";
constexpr char kPlanConditions[] = "plan_conditions";
// Of kQueues.
constexpr char kQueuePolicy[] = "policy";

std::string EncodeU64(uint64_t value);
// kDataLoss unless `bytes` is 8 long.
absl::StatusOr<uint64_t> DecodeU64(absl::string_view bytes);

std::string EventKey(uint64_t sequence);

// The key of one of many rows of a job.
struct JobKey {
  JobId job;
  std::vector<uint64_t> numbers;
};
std::string Encode(const JobKey& key);
// kDataLoss, which names the row, unless the key has as many numbers.
absl::StatusOr<JobKey> DecodeJobKey(Table table, absl::string_view bytes, size_t numbers);
std::string CheckpointKey(const JobId& job, const v1::CheckpointRecord& record);

struct KeyValueKey {
  JobId job;
  Epoch epoch;
  std::string key;
};
std::string Encode(const KeyValueKey& key);
absl::StatusOr<KeyValueKey> DecodeKeyValueKey(absl::string_view bytes);

// Deterministic bytes: equal messages give equal rows (maps are sorted).
std::string Serialize(const google::protobuf::MessageLite& message);
// kDataLoss names the row.
absl::Status Parse(Table table, absl::string_view key, const std::string& value,
                   google::protobuf::MessageLite& message);

}  // namespace muster::coordinator::schema

#endif  // MUSTER_COORDINATOR_CORE_SCHEMA_H_
