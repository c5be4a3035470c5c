#include "cli/workers.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "proto/spec/names.h"

namespace muster::cli {
namespace {

// "4 x NVIDIA H200 (NV18)", "8 x NVIDIA A100 (NV4-12), 1 unusable": in parentheses the number of
// NVLinks between any two of them.
std::string GpusOf(const v1::Worker& worker) {
  std::map<std::string, int> models;
  int unusable = 0;
  int fewest = 0, most = 0;
  for (const v1::Device& device : worker.devices()) {
    if (device.kind() != v1::DEVICE_KIND_CUDA) continue;
    ++models[device.model()];
    if (!device.unusable().empty()) ++unusable;
    for (const auto& [peer, links] : device.nvlinks()) {
      fewest = fewest == 0 ? links : std::min(fewest, links);
      most = std::max(most, links);
    }
  }
  if (models.empty()) return "-";
  std::vector<std::string> parts;
  for (const auto& [model, count] : models) parts.push_back(absl::StrCat(count, " x ", model));
  std::string text = absl::StrJoin(parts, " + ");
  if (most > 0) {
    absl::StrAppend(&text, " (NV", fewest == most ? "" : absl::StrCat(fewest, "-"), most, ")");
  }
  if (unusable > 0) absl::StrAppend(&text, ", ", unusable, " unusable");
  return text;
}

// "127.0.0.1 (10.0.0.1)": in parentheses the address for gangs that span hosts.
std::string AddressOf(const v1::Worker& worker) {
  if (worker.address().empty()) return "-";
  return worker.outside_address().empty()
             ? worker.address()
             : absl::StrCat(worker.address(), " (", worker.outside_address(), ")");
}

}  // namespace

absl::Status GetWorkers(CoordinatorClient& client, Format format, Terminal& terminal) {
  ASSIGN_OR_RETURN(const std::vector<v1::Worker> workers, client.ListWorkers());
  if (format != Format::kTable) {
    Json list = Json::array();
    for (const v1::Worker& worker : workers) list.push_back(ToJson(worker));
    Print(list, format, terminal.out);
    return absl::OkStatus();
  }
  if (workers.empty()) {
    terminal.out << "no workers; start muster-worker on a machine, or `muster local up`\n";
    return absl::OkStatus();
  }
  std::vector<std::vector<std::string>> rows = {{"NAME", "STATE", "HOST", "SLOTS", "FREE", "GPUS",
                                                 "JOBS", "LAST HEARD", "ADDRESS", "METRICS",
                                                 "VERSION"}};
  for (const v1::Worker& worker : workers) {
    rows.push_back({worker.name(), Coloured(spec::EnumName(worker.state()), terminal),
                    worker.host(), absl::StrCat(worker.slots()), absl::StrCat(worker.slots_free()),
                    GpusOf(worker), worker.jobs().empty() ? "-" : absl::StrJoin(worker.jobs(), ","),
                    Age(worker.last_heard(), absl::Now()), AddressOf(worker),
                    worker.metrics_address().empty() ? "-" : worker.metrics_address(),
                    worker.version()});
  }
  terminal.out << Table(rows);
  const char* separator = "\n";
  for (const v1::Worker& worker : workers) {
    for (const v1::Device& device : worker.devices()) {
      if (device.unusable().empty()) continue;
      terminal.out << std::exchange(separator, "") << worker.name() << " " << device.name() << " "
                   << device.uuid() << " gets no rank: " << device.unusable() << "\n";
    }
  }
  return absl::OkStatus();
}

}  // namespace muster::cli
