#include "cli/pki.h"

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "security/pki.h"
#include "security/principal.h"

namespace muster::cli {
namespace {

std::string Day(absl::Time time) {
  return absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", time, absl::UTCTimeZone());
}

void Print(const std::vector<security::Issued>& issued, Format format, Terminal& terminal) {
  if (format != Format::kTable) {
    Json list = Json::array();
    for (const security::Issued& one : issued) {
      list.push_back(
          {{"certificate", one.certificate}, {"key", one.key}, {"notAfter", Day(one.not_after)}});
    }
    return cli::Print(list, format, terminal.out);
  }
  std::vector<std::vector<std::string>> rows = {{"CERTIFICATE", "KEY", "VALID UNTIL"}};
  for (const security::Issued& one : issued) {
    rows.push_back({one.certificate, one.key, Day(one.not_after)});
  }
  terminal.out << Table(rows);
}

}  // namespace

absl::StatusOr<absl::Duration> ParseSpan(const std::string& text, const std::string& flag) {
  absl::Duration out;
  int64_t days = 0;
  if (absl::EndsWith(text, "d") && absl::SimpleAtoi(text.substr(0, text.size() - 1), &days)) {
    out = absl::Hours(24) * days;
  } else if (!absl::ParseDuration(text, &out)) {
    out = absl::ZeroDuration();
  }
  if (out <= absl::ZeroDuration() || out > absl::Hours(24 * 36'500)) {
    return absl::InvalidArgumentError(
        absl::StrCat(flag, ": '", text, "' is not a time above 0 such as 90d, 12h or 30m"));
  }
  return out;
}

absl::Status PkiInit(const PkiOptions& options, Format format, Terminal& terminal) {
  ASSIGN_OR_RETURN(const absl::Duration lifetime, ParseSpan(options.lifetime, "--lifetime"));
  ASSIGN_OR_RETURN(
      const security::Issued issued,
      security::Pki(options.directory, absl::Now()).Init(options.cluster, options.hosts, lifetime));
  Print({issued}, format, terminal);
  if (format == Format::kTable) {
    terminal.out << "\nThe authority is " << options.directory << "/ca.crt; keep "
                 << options.directory
                 << "/ca.key on this machine alone.\nOn the coordinator: muster-coordinator "
                    "--tls-cert coordinator.crt --tls-key coordinator.key --tls-ca ca.crt "
                    "--tls-crl ca.crl ...\nNext: muster admin pki issue-user NAME --role admin; "
                    "muster admin pki issue-worker NAME\n";
  }
  return absl::OkStatus();
}

absl::Status PkiIssueWorker(const PkiOptions& options, Format format, Terminal& terminal) {
  ASSIGN_OR_RETURN(const absl::Duration lifetime, ParseSpan(options.lifetime, "--lifetime"));
  ASSIGN_OR_RETURN(
      const security::Issued issued,
      security::Pki(options.directory, absl::Now()).IssueWorker(options.name, lifetime));
  Print({issued}, format, terminal);
  return absl::OkStatus();
}

absl::Status PkiIssueMetrics(const PkiOptions& options, Format format, Terminal& terminal) {
  ASSIGN_OR_RETURN(const absl::Duration lifetime, ParseSpan(options.lifetime, "--lifetime"));
  ASSIGN_OR_RETURN(
      const security::Issued issued,
      security::Pki(options.directory, absl::Now()).IssueMetrics(options.hosts, lifetime));
  Print({issued}, format, terminal);
  return absl::OkStatus();
}

absl::Status PkiIssueUser(const PkiOptions& options, Format format, Terminal& terminal) {
  ASSIGN_OR_RETURN(const absl::Duration lifetime, ParseSpan(options.lifetime, "--lifetime"));
  std::vector<security::Grant> roles;
  for (const std::string& role : options.roles) {
    absl::StatusOr<security::Grant> grant = security::ParseGrant(role);
    if (!grant.ok()) {
      return absl::InvalidArgumentError(absl::StrCat("--role: ", grant.status().message()));
    }
    roles.push_back(*std::move(grant));
  }
  ASSIGN_OR_RETURN(
      const security::Issued issued,
      security::Pki(options.directory, absl::Now()).IssueUser(options.name, roles, lifetime));
  Print({issued}, format, terminal);
  return absl::OkStatus();
}

absl::Status PkiRotate(const PkiOptions& options, Format format, Terminal& terminal) {
  security::Pki pki(options.directory, absl::Now());
  if (options.new_authority) {
    RETURN_IF_ERROR(pki.AddAuthority());
    if (format == Format::kTable) {
      terminal.out << "a new authority is trusted beside the others: bring " << options.directory
                   << "/ca.crt to every machine, then issue what is there again with\n"
                      "muster admin pki rotate --before 3650d\n";
      return absl::OkStatus();
    }
    Print({}, format, terminal);
    return absl::OkStatus();
  }
  if (options.retire) {
    RETURN_IF_ERROR(pki.RetireAuthorities());
    if (format == Format::kTable) {
      terminal.out << "only the newest authority is trusted: bring " << options.directory
                   << "/ca.crt and ca.crl to every machine\n";
      return absl::OkStatus();
    }
    Print({}, format, terminal);
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(const absl::Duration before, ParseSpan(options.before, "--before"));
  ASSIGN_OR_RETURN(const std::vector<security::Issued> issued, pki.Rotate(before));
  if (issued.empty() && format == Format::kTable) {
    terminal.out << "no certificate in " << options.directory << " ends within " << options.before
                 << "\n";
    return absl::OkStatus();
  }
  Print(issued, format, terminal);
  return absl::OkStatus();
}

absl::Status PkiRevoke(const PkiOptions& options, Format format, Terminal& terminal) {
  RETURN_IF_ERROR(security::Pki(options.directory, absl::Now()).Revoke(options.certificate));
  const std::string list = options.directory + "/ca.crl";
  if (format != Format::kTable) {
    cli::Print(Json{{"certificate", options.certificate}, {"list", list}}, format, terminal.out);
  } else {
    terminal.out << options.certificate << " is revoked once " << list
                 << " is on the coordinator as its --tls-crl\n";
  }
  return absl::OkStatus();
}

}  // namespace muster::cli
