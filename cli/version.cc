#include "cli/version.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace muster::cli {

void PrintVersions(const std::string& client,
                   const absl::StatusOr<v1::GetVersionResponse>& coordinator, Format format,
                   Terminal& terminal) {
  if (format != Format::kTable) {
    Json object = {{"client", client}, {"coordinator", nullptr}};
    if (coordinator.ok()) {
      object["coordinator"] = coordinator->version();
      object["clusterId"] = coordinator->cluster_id();
      object["caller"] = coordinator->caller();
      object["roles"] =
          std::vector<std::string>(coordinator->roles().begin(), coordinator->roles().end());
    }
    Print(object, format, terminal.out);
    return;
  }
  terminal.out << "muster " << client << "\n";
  if (coordinator.ok()) {
    terminal.out << "coordinator " << coordinator->version() << ", cluster "
                 << coordinator->cluster_id() << "\n";
    if (!coordinator->caller().empty()) {
      terminal.out << "you are " << coordinator->caller() << ", "
                   << (coordinator->roles().empty()
                           ? "without a role"
                           : absl::StrCat("with ", absl::StrJoin(coordinator->roles(), ", ")))
                   << "\n";
    }
  } else {
    terminal.out << "coordinator: " << coordinator.status().message() << "\n";
  }
}

}  // namespace muster::cli
