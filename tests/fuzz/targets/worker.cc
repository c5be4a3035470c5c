// What a daemon reads of ranks, of its operator's files, and of specs.
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "muster/v1/rank.pb.h"
#include "proto/spec/command_variables.h"
#include "security/accounts.h"
#include "security/certificates.h"
#include "tests/fuzz/targets/targets.h"
#include "worker/command/environment.h"
#include "worker/command/progress_file.h"
#include "worker/daemon/shim.h"

namespace muster::fuzz {

// The first byte says which reader gets the rest.
void WorkerText(const std::string& bytes) {
  if (bytes.empty()) return;
  const std::string text = bytes.substr(1);
  switch (bytes[0] % 6) {
    case 0: {
      const auto map = security::ParseAccountMap(text);
      if (!map.ok()) break;
      std::string again;
      for (const auto& [identity, account] : *map) {
        CHECK(!identity.empty() && !account.empty());
        absl::StrAppend(&again, identity, " ", account, "\n");
      }
      const auto twice = security::ParseAccountMap(again);
      CHECK(twice.ok() && *twice == *map) << text;
      break;
    }
    case 1:
      if (const std::optional<std::string> name = spec::SecretIn(text); name.has_value()) {
        CHECK(absl::StrCat(spec::kSecretPrefix, *name, "}") == text);
        // It is a file of the directory of secrets, and nothing else.
        CHECK(name->find('/') == std::string::npos && (*name)[0] != '.');
      }
      break;
    case 2:
      for (const worker::CommandReport& report : worker::ParseReports(text).reports) {
        if (report.checkpoint.has_value()) CHECK(report.checkpoint->step >= 1);
      }
      break;
    case 3:
      if (const auto start = worker::CommandStart::FromText(text); start.ok()) {
        const auto again = worker::CommandStart::FromText(start->ToText());
        CHECK(again.ok() && again->master_port == start->master_port &&
              again->restore_path == start->restore_path);
      }
      break;
    case 4:
      security::ReadValidity(text).status().IgnoreError();
      security::CheckKeyPair(text, text).IgnoreError();
      break;
    default: {
      const worker::ShimOptions shim = worker::ParseShimArguments(
          {"shim", text, "/own", "/run", "/work", "1", "1", "/bin/true"});
      // No text makes it root.
      if (shim.user.has_value()) CHECK(shim.user->uid != 0);
    }
  }
}

}  // namespace muster::fuzz
