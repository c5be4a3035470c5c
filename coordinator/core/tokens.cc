#include "coordinator/core/tokens.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "coordinator/core/limits.h"
#include "coordinator/core/schema.h"
#include "proto/time.h"

namespace muster::coordinator {

absl::Status Tokens::Load(Store& store) {
  absl::Status row_status;
  const absl::Status scanned =
      store.Scan(Table::kTokens, "", "", [&](const std::string& key, const std::string& value) {
        row_status = schema::Parse(Table::kTokens, key, value, rows_[key]);
        return row_status.ok();
      });
  return scanned.ok() ? row_status : scanned;
}

void Tokens::Announce(Turn& turn) const {
  for (const auto& [id, row] : rows_) turn.Act(TokenChanged{row});
}

void Tokens::Put(const v1::TokenRow& row, Turn& turn) {
  turn.batch().Put(Table::kTokens, row.token().id(), schema::Serialize(row));
  turn.Act(TokenChanged{row});
}

void Tokens::ForgetEnded(Turn& turn) {
  for (auto row = rows_.begin(); row != rows_.end();) {
    const v1::Token& token = row->second.token();
    absl::Time ended = FromProto(token.expires());
    if (token.has_revoked()) ended = std::min(ended, FromProto(token.revoked()));
    if (ended + kEndedTokensKept > turn.now()) {
      ++row;
      continue;
    }
    turn.batch().Delete(Table::kTokens, row->first);
    turn.Act(TokenForgotten{row->first});
    row = rows_.erase(row);
  }
}

absl::Status Tokens::Create(v1::TokenRow row, const std::string& actor, Turn& turn) {
  ForgetEnded(turn);
  if (rows_.size() >= kTokensMax) {
    return absl::ResourceExhaustedError(
        absl::StrCat("there are ", rows_.size(),
                     " tokens, as many as may be; those that were revoked or expired are forgotten "
                     "after ",
                     absl::FormatDuration(kEndedTokensKept)));
  }
  *row.mutable_token()->mutable_created() = ToProto(turn.now());
  row.mutable_token()->set_created_by(actor);
  const std::string id = row.token().id();
  const auto [added, is_new] = rows_.try_emplace(id, std::move(row));
  if (!is_new) return absl::AlreadyExistsError("a token of this id exists; retry");
  Put(added->second, turn);
  return absl::OkStatus();
}

absl::Status Tokens::Revoke(const std::string& id, Turn& turn) {
  const auto row = rows_.find(id);
  if (row == rows_.end()) {
    return absl::NotFoundError(
        absl::StrCat("no token has this id; `muster admin token list` shows them"));
  }
  if (row->second.token().has_revoked()) return absl::OkStatus();
  *row->second.mutable_token()->mutable_revoked() = ToProto(turn.now());
  Put(row->second, turn);
  return absl::OkStatus();
}

}  // namespace muster::coordinator
