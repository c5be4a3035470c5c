#include "cli/convert.h"

#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "cli/process.h"

namespace muster::cli {

absl::Status Convert(const ConvertOptions& options, Format format, Terminal& terminal) {
  ASSIGN_OR_RETURN(
      const std::string text,
      RunAndCapture({options.rank_binary, "convert", "--from=" + options.source,
                     "--to=" + options.destination, "--dtype=" + options.dtype, "-o", "json"}));
  const Json converted = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!converted.is_object()) {
    return absl::InternalError("muster-rank convert printed no JSON: " + text.substr(0, 200));
  }
  if (format != Format::kTable) {
    Print(converted, format, terminal.out);
    return absl::OkStatus();
  }
  terminal.out << absl::StrFormat("%s: %s, %s, %d parameters, %.1f MB\n",
                                  converted.value("path", ""), converted.value("kind", ""),
                                  converted.value("family", ""),
                                  converted.value("parameters", int64_t{0}),
                                  static_cast<double>(converted.value("bytes", int64_t{0})) * 1e-6);
  return absl::OkStatus();
}

}  // namespace muster::cli
