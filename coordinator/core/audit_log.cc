#include "coordinator/core/audit_log.h"

#include <optional>
#include <string>
#include <utility>

#include "base/status_macros.h"
#include "coordinator/core/limits.h"
#include "coordinator/core/schema.h"
#include "proto/time.h"

namespace muster::coordinator {

v1::AuditEntry EntryOf(const Caller& caller, const absl::Status& status) {
  v1::AuditEntry entry;
  entry.set_who(caller.principal.ToString());
  entry.set_address(caller.address);
  entry.set_method(caller.method);
  entry.set_target(caller.target.substr(0, security::kPrincipalNameBytesMax));
  entry.set_status_code(static_cast<int32_t>(status.code()));
  entry.set_message(Bounded(status.message()));
  entry.set_proof(caller.proof);
  return entry;
}

absl::Status AuditLog::Load(Store& store) {
  ASSIGN_OR_RETURN(const std::optional<std::string> last,
                   store.Get(Table::kMeta, schema::kLastAudit));
  if (last.has_value()) {
    ASSIGN_OR_RETURN(last_, schema::DecodeU64(*last));
  }
  return absl::OkStatus();
}

void AuditLog::Append(v1::AuditEntry entry, Turn& turn) {
  const uint64_t sequence = ++last_;
  entry.set_sequence(sequence);
  *entry.mutable_time() = ToProto(turn.now());
  turn.batch().Put(Table::kAudit, schema::EncodeU64(sequence), schema::Serialize(entry));
  if (sequence > kAuditEntriesMax) {
    turn.batch().Delete(Table::kAudit, schema::EncodeU64(sequence - kAuditEntriesMax));
  }
  turn.batch().Put(Table::kMeta, schema::kLastAudit, schema::EncodeU64(sequence));
}

void AuditLog::Append(const Caller& caller, CallId call, Turn& turn) {
  if (caller.method.empty()) return;
  const ReplyAction* reply = turn.ReplyTo(call);
  v1::AuditEntry entry = EntryOf(caller, reply == nullptr ? absl::OkStatus() : reply->status);
  if (reply != nullptr && reply->status.ok() && !reply->job.id().empty()) {
    entry.set_target(reply->job.id());
  }
  Append(std::move(entry), turn);
}

}  // namespace muster::coordinator
