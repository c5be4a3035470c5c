#include "cli/workers.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
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

// "zone a, rack r7", the broadest first; "-" when nothing says it.
std::string DomainsOf(const v1::Worker& worker) {
  std::vector<std::string> parts;
  for (auto domain = worker.domains().rbegin(); domain != worker.domains().rend(); ++domain) {
    parts.push_back(absl::StrCat(absl::StrReplaceAll(spec::EnumName(domain->level()), {{"_", " "}}),
                                 " ", domain->name()));
  }
  return parts.empty() ? "-" : absl::StrJoin(parts, ", ");
}

// A domain with what is inside; workers are leaves.
struct Branch {
  std::map<std::string, Branch> below;  // by kind and name, "rack r7"
  std::vector<const v1::Worker*> workers;
  int64_t slots = 0;
  int64_t free = 0;
  int64_t count = 0;
};

void WriteBranch(const Branch& branch, const std::string& indent, Terminal& terminal) {
  const size_t total = branch.below.size() + branch.workers.size();
  size_t at = 0;
  const auto fork = [&] { return ++at == total ? "`-- " : "|-- "; };
  for (const auto& [name, below] : branch.below) {
    const char* mark = fork();
    terminal.out << indent << mark << name << "  " << below.free << " of " << below.slots
                 << " slots free, " << below.count
                 << (below.count == 1 ? " worker\n" : " workers\n");
    WriteBranch(below, indent + (at == total ? "    " : "|   "), terminal);
  }
  for (const v1::Worker* worker : branch.workers) {
    const std::string gpus = GpusOf(*worker);
    terminal.out << indent << fork() << worker->name() << "  " << worker->slots_free() << " of "
                 << worker->slots() << " slots free, " << spec::EnumName(worker->state())
                 << (gpus == "-" ? "" : ", ") << (gpus == "-" ? "" : gpus);
    if (const std::string scheduling = SchedulingText(*worker); scheduling != "schedulable") {
      terminal.out << ", " << scheduling;
    }
    if (!worker->jobs().empty()) terminal.out << ": " << absl::StrJoin(worker->jobs(), ", ");
    terminal.out << "\n";
  }
}

void WriteTree(const std::vector<v1::Worker>& workers, Terminal& terminal) {
  Branch root;
  for (const v1::Worker& worker : workers) {
    Branch* at = &root;
    const auto add = [&] {
      at->slots += worker.slots();
      at->free += worker.slots_free();
      ++at->count;
    };
    add();
    for (auto domain = worker.domains().rbegin(); domain != worker.domains().rend(); ++domain) {
      at = &at->below[absl::StrCat(
          absl::StrReplaceAll(spec::EnumName(domain->level()), {{"_", " "}}), " ", domain->name())];
      add();
    }
    at->workers.push_back(&worker);
  }
  terminal.out << "cluster  " << root.free << " of " << root.slots << " slots free, " << root.count
               << (root.count == 1 ? " worker\n" : " workers\n");
  WriteBranch(root, "", terminal);
}

// "2.4 faults".
std::string FaultsText(double faults) { return absl::StrFormat("%.1f faults", faults); }

std::string StandingText(const v1::Reputation& reputation) {
  switch (reputation.standing()) {
    case v1::WORKER_STANDING_SUSPECT:
      return "suspect: of placements that cost the same, others win";
    case v1::WORKER_STANDING_AVOIDED:
      return absl::StrCat("avoided since ", LocalTime(reputation.avoided_since()),
                          ": it gets ranks only where nothing else holds a gang");
    default:
      return "good";
  }
}

}  // namespace

std::string SchedulingText(const v1::Worker& worker) {
  std::string text = "schedulable";
  if (worker.has_cordon()) {
    const v1::Cordon& cordon = worker.cordon();
    text = cordon.drained() ? "drained"
           : cordon.drain() ? absl::StrCat("draining until ", LocalTime(cordon.until()))
                            : "cordoned";
  }
  if (worker.reputation().standing() == v1::WORKER_STANDING_AVOIDED) {
    absl::StrAppend(&text, ", avoided (", FaultsText(worker.reputation().faults()), ")");
  }
  for (const v1::Reservation& reservation : worker.reservations()) {
    absl::StrAppend(&text, ", ",
                    reservation.devices().empty()
                        ? ""
                        : absl::StrCat(reservation.devices_size(), " device(s) "),
                    "reserved by ", reservation.name());
  }
  return text;
}

absl::Status GetWorkers(CoordinatorClient& client, bool tree, Format format, Terminal& terminal) {
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
  if (tree) {
    WriteTree(workers, terminal);
    return absl::OkStatus();
  }
  std::vector<std::vector<std::string>> rows = {{"NAME", "STATE", "HOST", "SLOTS", "FREE", "GPUS",
                                                 "JOBS", "LAST HEARD", "ADDRESS", "METRICS",
                                                 "VERSION"}};
  // Columns that say something about a worker at least.
  const auto any = [&workers](auto says) {
    return std::any_of(workers.begin(), workers.end(), says);
  };
  const bool domains = any([](const v1::Worker& worker) { return !worker.domains().empty(); });
  // Elsewhere it is what is not free.
  const bool shared = any([](const v1::Worker& worker) {
    return std::any_of(worker.devices().begin(), worker.devices().end(), [](const auto& device) {
      return device.jobs_size() > 1 || (device.used() > 0 && device.used() < 1);
    });
  });
  const bool scheduling = any([](const v1::Worker& worker) {
    return worker.has_cordon() || !worker.reservations().empty() ||
           worker.reputation().standing() == v1::WORKER_STANDING_AVOIDED;
  });
  if (shared) rows[0].push_back("USED");
  if (domains) rows[0].push_back("DOMAINS");
  if (scheduling) rows[0].push_back("SCHEDULING");
  for (const v1::Worker& worker : workers) {
    rows.push_back({worker.name(), Coloured(spec::EnumName(worker.state()), terminal),
                    worker.host(), absl::StrCat(worker.slots()), absl::StrCat(worker.slots_free()),
                    GpusOf(worker), worker.jobs().empty() ? "-" : absl::StrJoin(worker.jobs(), ","),
                    Age(worker.last_heard(), absl::Now()), AddressOf(worker),
                    worker.metrics_address().empty() ? "-" : worker.metrics_address(),
                    worker.version()});
    if (shared) rows.back().push_back(absl::StrCat(worker.slots_used(), "/", worker.slots()));
    if (domains) rows.back().push_back(DomainsOf(worker));
    if (scheduling) rows.back().push_back(SchedulingText(worker));
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

namespace {

std::string LabelsOf(const v1::Worker& worker) {
  const std::map<std::string, std::string> labels(worker.labels().begin(), worker.labels().end());
  return labels.empty() ? "-" : absl::StrJoin(labels, " ", absl::PairFormatter("="));
}

}  // namespace

absl::Status DescribeWorker(CoordinatorClient& client, const std::string& name, Format format,
                            Terminal& terminal) {
  ASSIGN_OR_RETURN(const std::vector<v1::Worker> workers, client.ListWorkers());
  const auto found = std::find_if(workers.begin(), workers.end(),
                                  [&](const v1::Worker& worker) { return worker.name() == name; });
  if (found == workers.end()) {
    return absl::NotFoundError(absl::StrCat("no worker has the name ", spec::Quoted(name),
                                            "; `muster get workers` lists them"));
  }
  const v1::Worker& worker = *found;
  if (format != Format::kTable) {
    Print(ToJson(worker), format, terminal.out);
    return absl::OkStatus();
  }
  const v1::Reputation& reputation = worker.reputation();
  terminal.out << Table(
      {{"worker:", worker.name()},
       {"state:", Coloured(spec::EnumName(worker.state()), terminal)},
       {"host:", absl::StrCat(worker.host(), ", ", AddressOf(worker))},
       {"version:", worker.version()},
       {"last heard:", Age(worker.last_heard(), absl::Now())},
       {"domains:", DomainsOf(worker)},
       {"labels:", LabelsOf(worker)},
       {"scheduling:", SchedulingText(worker)},
       {"slots:", absl::StrCat(worker.slots_free(), " free of ", worker.slots())},
       {"jobs:", worker.jobs().empty() ? "-" : absl::StrJoin(worker.jobs(), ", ")},
       {"reputation:",
        reputation.faults() == 0
            ? StandingText(reputation)
            : absl::StrCat(StandingText(reputation), "; ", FaultsText(reputation.faults()),
                           " as of ", LocalTime(reputation.as_of()))}});
  terminal.out << "\n";
  std::vector<std::vector<std::string>> rows = {
      {"DEVICE", "MODEL", "NUMA", "PCIE SWITCH", "FAULTS", "UNUSABLE"}};
  for (const v1::Device& device : worker.devices()) {
    double faults = 0;
    for (const v1::DeviceFaults& one : reputation.devices()) {
      if (one.device() == device.name()) faults = one.faults();
    }
    rows.push_back({device.name(), device.model().empty() ? "-" : device.model(),
                    device.numa_node() < 0 ? "-" : absl::StrCat(device.numa_node()),
                    device.pcie_switch().empty() ? "-" : device.pcie_switch(),
                    absl::StrFormat("%.1f", faults),
                    device.unusable().empty() ? "-" : device.unusable()});
  }
  terminal.out << Table(rows);
  if (reputation.latest().empty()) return absl::OkStatus();
  rows = {{"FAULT", "CAUSE", "DEVICE", "COUNTED", "JOB"}};
  for (const v1::WorkerFault& fault : reputation.latest()) {
    rows.push_back(
        {LocalTime(fault.time()),
         fault.slowdown() > 0
             ? absl::StrFormat("slow (rank %d, %.2f times)", fault.rank(), fault.slowdown())
             : spec::EnumName(fault.cause()),
         fault.device().empty() ? "-" : fault.device(), absl::StrFormat("%g", fault.weight()),
         fault.job_name().empty() ? "-" : fault.job_name()});
  }
  terminal.out << "\n" << Table(rows);
  return absl::OkStatus();
}

}  // namespace muster::cli
