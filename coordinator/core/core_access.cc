// Tokens and the audit log.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "coordinator/core/core_impl.h"
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

void CoreImpl::Audit(const Caller& caller, CallId call, Turn& turn) {
  if (caller.method.empty()) return;
  const ReplyAction* reply = turn.ReplyTo(call);
  v1::AuditEntry entry = EntryOf(caller, reply == nullptr ? absl::OkStatus() : reply->status);
  if (reply != nullptr && reply->status.ok() && !reply->job.id().empty()) {
    entry.set_target(reply->job.id());
  }
  Append(std::move(entry), turn);
}

void CoreImpl::Append(v1::AuditEntry entry, Turn& turn) {
  const uint64_t sequence = ++last_audit_;
  entry.set_sequence(sequence);
  *entry.mutable_time() = ToProto(turn.now());
  turn.batch().Put(Table::kAudit, schema::EncodeU64(sequence), schema::Serialize(entry));
  if (sequence > kAuditEntriesMax) {
    turn.batch().Delete(Table::kAudit, schema::EncodeU64(sequence - kAuditEntriesMax));
  }
  turn.batch().Put(Table::kMeta, schema::kLastAudit, schema::EncodeU64(sequence));
}

void CoreImpl::On(const AuditEvent& event, Turn& turn) { Append(event.entry, turn); }

void CoreImpl::PutToken(const v1::TokenRow& row, Turn& turn) {
  turn.batch().Put(Table::kTokens, row.token().id(), schema::Serialize(row));
  turn.Act(TokenChanged{row});
}

// Forgets the tokens that ended long ago.
void CoreImpl::ForgetTokens(Turn& turn) {
  for (auto row = tokens_.begin(); row != tokens_.end();) {
    const v1::Token& token = row->second.token();
    absl::Time ended = FromProto(token.expires());
    if (token.has_revoked()) ended = std::min(ended, FromProto(token.revoked()));
    if (ended + kEndedTokensKept > turn.now()) {
      ++row;
      continue;
    }
    turn.batch().Delete(Table::kTokens, row->first);
    turn.Act(TokenForgotten{row->first});
    row = tokens_.erase(row);
  }
}

void CoreImpl::On(const CreateTokenEvent& event, Turn& turn) {
  ReplyAction reply;
  reply.call = event.call;
  ForgetTokens(turn);
  if (tokens_.size() >= kTokensMax) {
    reply.status = absl::ResourceExhaustedError(
        absl::StrCat("there are ", tokens_.size(),
                     " tokens, as many as may be; those that were revoked or expired are forgotten "
                     "after ",
                     absl::FormatDuration(kEndedTokensKept)));
  } else if (tokens_.contains(event.row.token().id())) {
    reply.status = absl::AlreadyExistsError("a token of this id exists; retry");
  } else {
    v1::TokenRow row = event.row;
    *row.mutable_token()->mutable_created() = ToProto(turn.now());
    row.mutable_token()->set_created_by(event.caller.actor);
    tokens_[row.token().id()] = row;
    PutToken(row, turn);
  }
  turn.Act(std::move(reply));
}

void CoreImpl::On(const RevokeTokenEvent& event, Turn& turn) {
  ReplyAction reply;
  reply.call = event.call;
  if (const auto row = tokens_.find(event.id); row == tokens_.end()) {
    reply.status = absl::NotFoundError(
        absl::StrCat("no token has this id; `muster admin token list` shows them"));
  } else if (!row->second.token().has_revoked()) {
    *row->second.mutable_token()->mutable_revoked() = ToProto(turn.now());
    PutToken(row->second, turn);
  }
  turn.Act(std::move(reply));
}

absl::Status CoreImpl::LoadAccess(Store& store) {
  absl::StatusOr<std::optional<std::string>> last = store.Get(Table::kMeta, schema::kLastAudit);
  if (!last.ok()) return last.status();
  if (last->has_value()) {
    const absl::StatusOr<uint64_t> sequence = schema::DecodeU64(**last);
    if (!sequence.ok()) return sequence.status();
    last_audit_ = *sequence;
  }
  absl::Status row_status;
  const absl::Status scanned =
      store.Scan(Table::kTokens, "", "", [&](const std::string& key, const std::string& value) {
        row_status = schema::Parse(Table::kTokens, key, value, tokens_[key]);
        return row_status.ok();
      });
  return scanned.ok() ? row_status : scanned;
}

}  // namespace muster::coordinator
