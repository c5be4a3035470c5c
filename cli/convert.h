// `muster convert`.
#ifndef MUSTER_CLI_CONVERT_H_
#define MUSTER_CLI_CONVERT_H_

#include <string>

#include "absl/status/status.h"
#include "cli/output.h"

namespace muster::cli {

struct ConvertOptions {
  std::string source;
  std::string destination;
  std::string dtype = "bf16";
  std::string rank_binary;  // muster-rank
};
// Runs `muster-rank convert`, which has the engine. kAborted: it failed, and has printed why.
absl::Status Convert(const ConvertOptions& options, Format format, Terminal& terminal);

}  // namespace muster::cli

#endif  // MUSTER_CLI_CONVERT_H_
