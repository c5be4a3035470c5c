#include "cli/access.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "cli/pki.h"
#include "proto/time.h"

namespace muster::cli {
namespace {

std::string StateOf(const v1::Token& token) {
  if (token.has_revoked()) return "revoked";
  return FromProto(token.expires()) <= absl::Now() ? "expired" : "valid";
}

std::string CodeName(int code) {
  return code == 0 ? "ok" : absl::StatusCodeToString(static_cast<absl::StatusCode>(code));
}

}  // namespace

absl::Status TokenCreate(CoordinatorClient& client, const TokenOptions& options, Format format,
                         Terminal& terminal) {
  ASSIGN_OR_RETURN(const absl::Duration lifetime, ParseSpan(options.expires, "--expires"));
  v1::CreateTokenRequest request;
  request.set_user(options.user);
  for (const std::string& role : options.roles) request.add_roles(role);
  request.set_lifetime_s(absl::ToInt64Seconds(lifetime));
  ASSIGN_OR_RETURN(const v1::CreateTokenResponse made, client.CreateToken(request));
  if (format != Format::kTable) {
    Print(ToJson(made), format, terminal.out);
    return absl::OkStatus();
  }
  // The token alone on stdout, so that it can be sent to a file.
  terminal.out << made.token() << "\n";
  terminal.err << "token " << made.described().id() << " of user " << made.described().user()
               << ", valid until " << LocalTime(made.described().expires())
               << "; it is not shown again. Use it by $MUSTER_TOKEN or --token-file\n";
  return absl::OkStatus();
}

absl::Status TokenList(CoordinatorClient& client, Format format, Terminal& terminal) {
  ASSIGN_OR_RETURN(const v1::ListTokensResponse list, client.ListTokens());
  if (format != Format::kTable) {
    Json tokens = Json::array();
    for (const v1::Token& token : list.tokens()) tokens.push_back(ToJson(token));
    Print(tokens, format, terminal.out);
    return absl::OkStatus();
  }
  std::vector<std::vector<std::string>> rows = {
      {"ID", "USER", "ROLES", "STATE", "EXPIRES", "CREATED BY"}};
  for (const v1::Token& token : list.tokens()) {
    rows.push_back({token.id(), token.user(), absl::StrJoin(token.roles(), ","), StateOf(token),
                    LocalTime(token.expires()), token.created_by()});
  }
  terminal.out << Table(rows);
  return absl::OkStatus();
}

absl::Status TokenRevoke(CoordinatorClient& client, const TokenOptions& options, Format format,
                         Terminal& terminal) {
  ASSIGN_OR_RETURN(const v1::Token token, client.RevokeToken(options.id));
  if (format != Format::kTable) {
    Print(ToJson(token), format, terminal.out);
  } else {
    terminal.out << "token " << token.id() << " of user " << token.user() << " revoked\n";
  }
  return absl::OkStatus();
}

absl::Status Audit(CoordinatorClient& client, const std::string& since, Format format,
                   Terminal& terminal) {
  v1::ListAuditRequest request;
  absl::Time from = absl::InfinitePast();
  std::string error;
  if (!since.empty() && !absl::ParseTime(absl::RFC3339_full, since, &from, &error)) {
    const absl::StatusOr<absl::Duration> ago = ParseSpan(since, "--since");
    if (!ago.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat(ago.status().message(), ", nor a moment such as 2026-11-24T08:00:00Z"));
    }
    from = absl::Now() - *ago;
  }
  if (from != absl::InfinitePast()) *request.mutable_since() = ToProto(from);
  ASSIGN_OR_RETURN(const std::vector<v1::AuditEntry> entries, client.ListAudit(request));
  if (format != Format::kTable) {
    Json list = Json::array();
    for (const v1::AuditEntry& entry : entries) list.push_back(ToJson(entry));
    Print(list, format, terminal.out);
    return absl::OkStatus();
  }
  std::vector<std::vector<std::string>> rows = {
      {"TIME", "WHO", "FROM", "METHOD", "TARGET", "RESULT", "PROOF", "MESSAGE"}};
  for (const v1::AuditEntry& entry : entries) {
    std::string message = absl::StrReplaceAll(entry.message(), {{"\n", "; "}});
    if (entry.more() > 0) absl::StrAppend(&message, " (and ", entry.more(), " refused before)");
    rows.push_back({LocalTime(entry.time()), entry.who(), entry.address(), entry.method(),
                    entry.target().empty() ? "-" : entry.target(), CodeName(entry.status_code()),
                    entry.proof().empty() ? "-" : entry.proof(), message});
  }
  terminal.out << Table(rows);
  return absl::OkStatus();
}

}  // namespace muster::cli
