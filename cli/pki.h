// `muster admin pki`: certificates for clusters without an authority of their own.
#ifndef MUSTER_CLI_PKI_H_
#define MUSTER_CLI_PKI_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cli/output.h"

namespace muster::cli {

struct PkiOptions {
  std::string directory;  // --pki-dir
  std::string cluster = "cluster";
  std::vector<std::string> hosts;  // of the coordinator, or of a daemon's metrics
  std::string name;                // of a worker or user
  std::vector<std::string> roles;  // of a user
  std::string lifetime = "365d";
  std::string before = "30d";  // rotate: what ends within
  bool new_authority = false;
  bool retire = false;
  std::string certificate;  // revoke: its path; empty = only renew the list
};

absl::Status PkiInit(const PkiOptions& options, Format format, Terminal& terminal);
absl::Status PkiIssueWorker(const PkiOptions& options, Format format, Terminal& terminal);
absl::Status PkiIssueUser(const PkiOptions& options, Format format, Terminal& terminal);
absl::Status PkiIssueMetrics(const PkiOptions& options, Format format, Terminal& terminal);
absl::Status PkiRotate(const PkiOptions& options, Format format, Terminal& terminal);
absl::Status PkiRevoke(const PkiOptions& options, Format format, Terminal& terminal);

// "90d", "12h", "30m", "45s" or any absl::Duration. kInvalidArgument names `flag`.
absl::StatusOr<absl::Duration> ParseSpan(const std::string& text, const std::string& flag);

}  // namespace muster::cli

#endif  // MUSTER_CLI_PKI_H_
