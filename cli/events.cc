#include "cli/events.h"

#include <cstdint>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "cli/reconnect.h"
#include "proto/spec/names.h"

namespace muster::cli {

std::string EventLine(const v1::Event& event) {
  std::string subject = event.job_name();
  if (event.epoch() > 0) absl::StrAppend(&subject, "/", event.epoch());
  if (subject.empty()) subject = event.worker();
  if (!event.between().empty()) {
    absl::StrAppend(&subject, event.between_size() == 1 ? " within " : " between ",
                    absl::StrJoin(event.between(), " and "));
  }
  return absl::StrCat(LocalTime(event.time()), "  ", event.sequence(), "  ",
                      spec::EnumName(event.kind()), "  ", subject.empty() ? "-" : subject, "  ",
                      event.message());
}

absl::Status Events(CoordinatorClient& client, const std::string& job, bool follow, Format format,
                    Terminal& terminal) {
  if (follow) {
    uint64_t last = 0;
    return ReadReconnecting(client, terminal, [&](Absence& absence) {
      return client.WatchEvents(job, last, [&](const v1::Event& event) {
        absence.Heard();
        last = event.sequence();
        if (format == Format::kTable) {
          terminal.out << EventLine(event) << std::endl;
        } else {
          PrintItem(ToJson(event), format, terminal.out);
        }
        return terminal.out.good();
      });
    });
  }
  ASSIGN_OR_RETURN(const std::vector<v1::Event> events, client.ListEvents(job));
  if (format != Format::kTable) {
    Json list = Json::array();
    for (const v1::Event& event : events) list.push_back(ToJson(event));
    Print(list, format, terminal.out);
    return absl::OkStatus();
  }
  for (const v1::Event& event : events) terminal.out << EventLine(event) << "\n";
  return absl::OkStatus();
}

}  // namespace muster::cli
