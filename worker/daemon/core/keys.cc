#include "worker/daemon/core/keys.h"

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace muster::worker {

std::string ToString(const AttemptKey& key) {
  return absl::StrCat(key.job.value(), " epoch ", key.epoch.value());
}

std::string ToString(const RankKey& key) {
  return absl::StrCat(ToString(key.attempt), " rank ", key.rank);
}

std::string DirectoryName(const AttemptKey& key) {
  std::string name;
  for (const char c : key.job.value()) {
    if (absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '_') {
      name.push_back(c);
    } else {
      absl::StrAppendFormat(&name, "%%%02X", static_cast<unsigned char>(c));
    }
  }
  return absl::StrCat(name, ".e", key.epoch.value());
}

std::string RunDirectoryName(const RankKey& key) {
  return absl::StrCat(DirectoryName(key.attempt), "/rank-", key.rank);
}

}  // namespace muster::worker
