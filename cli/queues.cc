#include "cli/queues.h"

#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "base/status_macros.h"
#include "cli/explain.h"
#include "cli/spec_file.h"
#include "proto/spec/document.h"
#include "proto/spec/names.h"
#include "proto/spec/queues.h"

namespace muster::cli {
namespace {

// Shared devices count by their shares: "1.5". A coordinator of an older version has `whole` alone.
std::string Devices(int64_t whole, double shared) {
  return shared > 0 ? absl::StrCat(shared) : absl::StrCat(whole);
}

std::string LimitText(bool has, int64_t limit) { return has ? absl::StrCat(limit) : "-"; }

}  // namespace

std::string QueueTable(const std::vector<v1::QueueStatus>& queues) {
  std::vector<std::vector<std::string>> rows = {{"QUEUE", "DEVICE", "USED", "GUARANTEED",
                                                 "BORROWED", "LIMIT", "WAITING", "JOBS", "QUEUED",
                                                 "WEIGHT", "SHARE"}};
  std::map<std::string, int> depths;
  for (const v1::QueueStatus& queue : queues) {
    const int depth = queue.parent().empty() ? 0 : depths[queue.parent()] + 1;
    depths[queue.name()] = depth;
    const std::string jobs = absl::StrCat(
        queue.running_jobs(),
        queue.has_running_jobs_max() ? absl::StrCat("/", queue.running_jobs_max()) : "");
    std::vector<std::string> tail = {jobs, absl::StrCat(queue.waiting_jobs()),
                                     absl::StrFormat("%g", queue.weight()),
                                     absl::StrFormat("%.3f", queue.share())};
    std::string name = std::string(static_cast<size_t>(2 * depth), ' ') + queue.name();
    if (queue.uses().empty()) {
      std::vector<std::string> row = {name, "-", "-", "-", "-", "-", "-"};
      row.insert(row.end(), tail.begin(), tail.end());
      rows.push_back(std::move(row));
    }
    for (const v1::QueueUse& use : queue.uses()) {
      std::vector<std::string> row = {name,
                                      use.device(),
                                      Devices(use.used(), use.used_devices()),
                                      absl::StrCat(use.guaranteed()),
                                      Devices(use.borrowed(), use.borrowed_devices()),
                                      LimitText(use.has_limit(), use.limit()),
                                      Devices(use.waiting(), use.waiting_devices())};
      row.insert(row.end(), tail.begin(), tail.end());
      rows.push_back(std::move(row));
      name = "";
      tail = {"", "", "", ""};
    }
  }
  return Table(rows);
}

std::string HeadsText(const std::vector<v1::HeadOfQueue>& heads) {
  std::string text;
  for (const v1::HeadOfQueue& head : heads) {
    absl::StrAppend(&text, "Job ", head.job().job_name(), " of queue ", head.queue(), " ",
                    SetAsideText(head.set_aside(), head.job().device()), ".\n");
  }
  return text;
}

std::string SpareTable(const std::vector<v1::SpareStatus>& spares) {
  if (spares.empty()) return "";
  std::vector<std::vector<std::string>> rows = {
      {"SPARES OF EACH", "DEVICE", "DOMAINS", "WANTED", "FREE", "SHORT"}};
  for (const v1::SpareStatus& status : spares) {
    std::string names = "-";
    if (status.domains_short() > 0) {
      names = absl::StrCat(status.domains_short(), ": ", absl::StrJoin(status.short_names(), ", "));
      if (status.domains_short() > status.short_names_size()) absl::StrAppend(&names, ", ...");
    }
    rows.push_back({absl::StrReplaceAll(spec::EnumName(status.level()), {{"_", " "}}),
                    status.device(), absl::StrCat(status.domains()), absl::StrCat(status.wanted()),
                    absl::StrCat(status.free()), names});
  }
  std::string text = Table(rows);
  for (const v1::SpareStatus& status : spares) {
    if (status.too_small().empty()) continue;
    absl::StrAppend(&text, "In ", absl::StrJoin(status.too_small(), ", "), " every ",
                    status.device(),
                    " device is a spare: no job but one that recovers starts there.\n");
  }
  return text;
}

absl::Status GetSpares(CoordinatorClient& client, Format format, Terminal& terminal) {
  ASSIGN_OR_RETURN(const v1::GetQueuesResponse response, client.GetQueues());
  if (format != Format::kTable) {
    Json list = Json::array();
    for (const v1::SpareStatus& status : response.spares()) list.push_back(ToJson(status));
    Print(list, format, terminal.out);
    return absl::OkStatus();
  }
  const std::string table = SpareTable({response.spares().begin(), response.spares().end()});
  terminal.out << (table.empty()
                       ? "no device is kept free; `spares` of the queue policy does that, "
                         "with `muster admin queues apply`\n"
                       : table);
  return absl::OkStatus();
}

absl::Status Queues(CoordinatorClient& client, Format format, Terminal& terminal) {
  ASSIGN_OR_RETURN(const v1::GetQueuesResponse response, client.GetQueues());
  if (format != Format::kTable) {
    Json list = Json::array();
    for (const v1::QueueStatus& queue : response.queues()) {
      Json& row = list.emplace_back(ToJson(queue));
      row["heads"] = Json::array();
      for (const v1::HeadOfQueue& head : response.heads()) {
        if (head.queue() == queue.name()) row["heads"].push_back(ToJson(head));
      }
    }
    Print(list, format, terminal.out);
    return absl::OkStatus();
  }
  terminal.out << QueueTable({response.queues().begin(), response.queues().end()});
  const std::string spares = SpareTable({response.spares().begin(), response.spares().end()});
  if (!spares.empty()) terminal.out << "\n" << spares;
  const std::string heads = HeadsText({response.heads().begin(), response.heads().end()});
  if (!heads.empty()) terminal.out << "\n" << heads;
  return absl::OkStatus();
}

absl::Status ApplyQueues(CoordinatorClient& client, const std::string& file, Format format,
                         Terminal& terminal) {
  ASSIGN_OR_RETURN(const std::string text, ReadText(file, spec::kTextBytesMax));
  ASSIGN_OR_RETURN(const v1::QueuePolicy policy,
                   spec::ParseQueues(text, file == "-" ? "stdin" : file));
  ASSIGN_OR_RETURN(const v1::ApplyQueuesResponse response, client.ApplyQueues(policy));
  for (const std::string& warning : response.warnings()) {
    terminal.err << "warning: " << warning << "\n";
  }
  if (format != Format::kTable) {
    Print(ToJson(policy), format, terminal.out);
  } else {
    terminal.out << "defined " << policy.queues_size()
                 << (policy.queues_size() == 1 ? " queue" : " queues")
                 << "; `muster queue` shows them\n";
  }
  return absl::OkStatus();
}

absl::Status GetQueuePolicy(CoordinatorClient& client, Format format, Terminal& terminal) {
  ASSIGN_OR_RETURN(const v1::QueuePolicy policy, client.GetQueuePolicy());
  if (format == Format::kTable) {
    if (policy.ByteSizeLong() == 0) {
      terminal.out << "# no queues are defined: there is only \"default\"\n";
    }
    terminal.out << spec::QueuesToYaml(policy);
  } else {
    Print(ToJson(policy), format, terminal.out);
  }
  return absl::OkStatus();
}

}  // namespace muster::cli
