// `muster diff-rankmap`.
#ifndef MUSTER_CLI_RANK_MAP_H_
#define MUSTER_CLI_RANK_MAP_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "cli/coordinator_client.h"
#include "cli/output.h"

namespace muster::cli {

// Which ranks an attempt has elsewhere than another one. Epoch 0: of `to` the newest, of `from` the
// one before `to`.
absl::Status DiffRankMap(CoordinatorClient& client, const std::string& job, uint64_t from,
                         uint64_t to, Format format, Terminal& terminal);

}  // namespace muster::cli

#endif  // MUSTER_CLI_RANK_MAP_H_
