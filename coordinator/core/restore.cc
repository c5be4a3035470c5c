#include "coordinator/core/restore.h"

#include <algorithm>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "coordinator/core/job_entry.h"
#include "coordinator/core/limits.h"
#include "coordinator/core/migrate.h"
#include "coordinator/core/schema.h"
#include "coordinator/core/state_log.h"
#include "muster/v1/job.pb.h"
#include "proto/job_state.h"
#include "proto/time.h"

namespace muster::coordinator {
namespace {

// How far numbers leap where the clock does not say how far. A coordinator that starts once a
// second for 12 days, and a job that starts 10,000 times between two backups, stay below.
constexpr uint64_t kTermLeap = 1 << 20;
constexpr uint64_t kEpochLeap = 10'000;
constexpr uint64_t kEventLeap = 1'000'000'000;
// A clock that shows an earlier time was never set.
constexpr int64_t kClockSetMs = 1'000'000'000'000;

// The numbers that a restore begins with, above all that are in use. They are the time, so that two
// restores of one backup, which begin with the same numbers in use, do not share any: in the time
// between them fewer coordinators start than 1,000 in a millisecond, fewer attempts of a job than
// one, and fewer events happen than 1,000.
class Leaps {
 public:
  explicit Leaps(absl::Time now) : ms_(absl::ToUnixMillis(now)) {}
  uint64_t Term(uint64_t used) const { return Beyond(used, 1000, kTermLeap); }
  uint64_t Epoch(uint64_t used) const { return Beyond(used, 1, kEpochLeap); }
  // Of the event log, the log of changes and the audit log.
  uint64_t Entry(uint64_t used) const { return Beyond(used, 1000, kEventLeap); }

 private:
  uint64_t Beyond(uint64_t used, uint64_t per_ms, uint64_t leap) const {
    if (ms_ < kClockSetMs) return used + leap;
    const uint64_t time = static_cast<uint64_t>(ms_) * per_ms;
    return time > used ? time : used + leap;
  }

  int64_t ms_;  // Unix time
};

absl::StatusOr<uint64_t> MetaNumber(Store& store, const char* key) {
  ASSIGN_OR_RETURN(const std::optional<std::string> value, store.Get(Table::kMeta, key));
  return value.has_value() ? schema::DecodeU64(*value) : uint64_t{0};
}

// Calls `row(key, message)` for every row of the table.
template <typename Message, typename Row>
absl::Status ForEach(Store& store, Table table, Row row) {
  absl::Status parsed;
  RETURN_IF_ERROR(store.Scan(table, "", "", [&](const std::string& key, const std::string& value) {
    Message message;
    parsed = schema::Parse(table, key, value, message);
    if (parsed.ok()) row(key, message);
    return parsed.ok();
  }));
  return parsed;
}

// Of a job whose attempt was being placed: it is ended, and the job waits for the proof that its
// daemons hold nothing of it.
void StopPlacement(v1::StateRow& state) {
  state.set_attempt_state(v1::ATTEMPT_STATE_STOPPING);
  state.set_stop_cause(v1::CAUSE_COORDINATOR);
  state.set_stop_message("the coordinator's state was restored from a backup");
  state.set_stop_rank(-1);
  state.set_state(v1::JOB_STATE_RECOVERING);
  state.set_after_release(v1::JOB_STATE_QUEUED);
}

}  // namespace

absl::StatusOr<StoreContents> Verify(Store& store) {
  StoreContents contents;
  ASSIGN_OR_RETURN(const std::optional<std::string> cluster,
                   store.Get(Table::kMeta, kMetaClusterId));
  if (!cluster.has_value()) return absl::DataLossError("the store has no cluster id");
  contents.cluster_id = *cluster;
  ASSIGN_OR_RETURN(const std::optional<std::string> history,
                   store.Get(Table::kMeta, schema::kHistoryId));
  contents.history_id = history.value_or("");
  ASSIGN_OR_RETURN(contents.leader_term, MetaNumber(store, schema::kLeaderTerm));
  ASSIGN_OR_RETURN(contents.last_event, MetaNumber(store, schema::kLastEvent));
  // Of schema 1; a restore brings them to the current one.
  RETURN_IF_ERROR(ForEach<v1::JobRecord>(
      store, Table::kJobs, [&](const std::string&, const v1::JobRecord& record) {
        ++contents.jobs;
        contents.live_jobs += IsFinal(record.job().state()) ? 0 : 1;
      }));
  ASSIGN_OR_RETURN(const auto jobs, LoadJobs(store, absl::UnixEpoch()));
  for (const auto& [sequence, job] : jobs) {
    ++contents.jobs;
    contents.live_jobs += job.live() ? 1 : 0;
  }
  RETURN_IF_ERROR(ForEach<v1::Worker>(
      store, Table::kWorkers, [&](const std::string&, const v1::Worker&) { ++contents.workers; }));
  RETURN_IF_ERROR(ForEach<v1::Event>(
      store, Table::kEvents, [&](const std::string&, const v1::Event&) { ++contents.events; }));
  RETURN_IF_ERROR(ForEach<v1::LogEntry>(
      store, Table::kLog,
      [&](const std::string&, const v1::LogEntry&) { ++contents.log_entries; }));
  RETURN_IF_ERROR(
      ForEach<v1::TokenRow>(store, Table::kTokens, [](const std::string&, const v1::TokenRow&) {}));
  RETURN_IF_ERROR(ForEach<v1::AuditEntry>(store, Table::kAudit,
                                          [](const std::string&, const v1::AuditEntry&) {}));
  const auto readable = [](const std::string&, const std::string&) { return true; };
  RETURN_IF_ERROR(store.Scan(Table::kKeyValue, "", "", readable));
  RETURN_IF_ERROR(store.Scan(Table::kRequests, "", "", readable));
  return contents;
}

std::string NewHistoryId(Rng& rng) {
  const uint64_t high = rng.Next();
  return absl::StrFormat("%016x%016x", high, rng.Next());
}

absl::Status MarkRestored(Store& store, Rng& rng, absl::Time now) {
  RETURN_IF_ERROR(Migrate(store));
  ASSIGN_OR_RETURN(const uint64_t term, MetaNumber(store, schema::kLeaderTerm));
  ASSIGN_OR_RETURN(const uint64_t last_event, MetaNumber(store, schema::kLastEvent));
  ASSIGN_OR_RETURN(const uint64_t last_entry, MetaNumber(store, schema::kLastLogEntry));
  const Leaps leaps(now);
  Batch batch;
  batch.Put(Table::kMeta, schema::kHistoryId, NewHistoryId(rng));
  batch.Put(Table::kMeta, schema::kLeaderTerm, schema::EncodeU64(leaps.Term(term)));
  batch.Put(Table::kMeta, schema::kLastEvent, schema::EncodeU64(leaps.Entry(last_event)));
  v1::Event event;
  event.set_sequence(leaps.Entry(last_event));
  *event.mutable_time() = ToProto(now);
  event.set_kind(v1::EVENT_KIND_STATE_RESTORED);
  event.set_rank(-1);
  event.set_actor("coordinator");
  event.set_message(absl::StrCat("restored from a backup, whose last event is ", last_event,
                                 "; jobs that were accepted and checkpoints that were committed "
                                 "after it are not known"));
  batch.Put(Table::kEvents, schema::EventKey(event.sequence()), schema::Serialize(event));
  std::set<JobId> stopped;
  RETURN_IF_ERROR(ForEach<v1::StateRow>(
      store, Table::kStates, [&](const std::string& key, v1::StateRow& state) {
        if (IsFinal(state.state())) return;
        // The floor may be of another restored state, which has started attempts above it.
        state.set_epoch_floor(leaps.Epoch(std::max(state.epoch_floor(), state.epoch())));
        if (state.attempt_live() && state.attempt_state() == v1::ATTEMPT_STATE_ALLOCATED) {
          StopPlacement(state);
          stopped.insert(JobId(key));
        }
        batch.Put(Table::kStates, key, schema::Serialize(state));
      }));
  // Bootstrap keys end with their attempt. One whose ranks were replaced may have some.
  absl::Status decoded;
  RETURN_IF_ERROR(
      store.Scan(Table::kKeyValue, "", "", [&](const std::string& key, const std::string&) {
        const auto row = schema::DecodeKeyValueKey(key);
        decoded = row.status();
        if (row.ok() && stopped.contains(row->job)) batch.Delete(Table::kKeyValue, key);
        return row.ok();
      }));
  RETURN_IF_ERROR(decoded);
  // One may have been revoked after the backup.
  RETURN_IF_ERROR(
      ForEach<v1::TokenRow>(store, Table::kTokens, [&](const std::string& key, v1::TokenRow& row) {
        if (row.token().has_revoked()) return;
        *row.mutable_token()->mutable_revoked() = ToProto(now);
        batch.Put(Table::kTokens, key, schema::Serialize(row));
      }));
  ASSIGN_OR_RETURN(const uint64_t last_audit, MetaNumber(store, schema::kLastAudit));
  batch.Put(Table::kMeta, schema::kLastAudit, schema::EncodeU64(leaps.Entry(last_audit)));
  StateLog log;
  log.Recover(leaps.Entry(last_entry));
  log.set_term(leaps.Term(term));
  v1::LogEntry restored;
  restored.set_restored(true);
  log.Append(now, "coordinator", event.sequence(), batch, std::move(restored));
  return store.Write({batch});
}

}  // namespace muster::coordinator
