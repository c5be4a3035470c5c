#include "parallel/comm/tcp_frame.h"

#include <fstream>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/network.h"

namespace muster::parallel {

std::string PeerRecord::ToText() const {
  return absl::StrCat(address, "\n", port, "\n", absl::BytesToHexString(token), "\n", label);
}

absl::StatusOr<PeerRecord> PeerRecord::FromText(const std::string& text) {
  const std::vector<std::string> lines = absl::StrSplit(text, absl::MaxSplits('\n', 3));
  PeerRecord record;
  if (lines.size() != 4 || !absl::SimpleAtoi(lines[1], &record.port)) {
    return absl::InternalError("a rank's address in the store cannot be read");
  }
  record.address = lines[0];
  record.token = absl::HexStringToBytes(lines[2]);
  record.label = lines[3];
  if (record.token.size() != kTokenBytes) {
    return absl::InternalError("a rank's token in the store cannot be read");
  }
  return record;
}

std::string PeerRecord::NameOf(int rank) const {
  return absl::StrCat("rank ", rank, " (", label, label.empty() ? "" : ", ",
                      HostPort{address, absl::StrCat(port)}.ToString(), ")");
}

absl::StatusOr<std::string> RandomToken() {
  std::string token(kTokenBytes, '\0');
  std::ifstream random("/dev/urandom", std::ios::binary);
  if (!random.read(token.data(), static_cast<std::streamsize>(token.size()))) {
    return absl::InternalError("/dev/urandom cannot be read");
  }
  return token;
}

}  // namespace muster::parallel
