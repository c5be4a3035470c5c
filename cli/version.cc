#include "cli/version.h"

namespace muster::cli {

void PrintVersions(const std::string& client,
                   const absl::StatusOr<v1::GetVersionResponse>& coordinator, Format format,
                   Terminal& terminal) {
  if (format != Format::kTable) {
    Json object = {{"client", client}, {"coordinator", nullptr}};
    if (coordinator.ok()) {
      object["coordinator"] = coordinator->version();
      object["clusterId"] = coordinator->cluster_id();
    }
    Print(object, format, terminal.out);
    return;
  }
  terminal.out << "muster " << client << "\n";
  if (coordinator.ok()) {
    terminal.out << "coordinator " << coordinator->version() << ", cluster "
                 << coordinator->cluster_id() << "\n";
  } else {
    terminal.out << "coordinator: " << coordinator.status().message() << "\n";
  }
}

}  // namespace muster::cli
