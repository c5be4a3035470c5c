#include "cli/describe.h"

#include <algorithm>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "cli/arrays.h"
#include "cli/checkpoints.h"
#include "cli/events.h"
#include "cli/explain.h"
#include "cli/places.h"
#include "cli/usage.h"
#include "proto/job_state.h"
#include "proto/spec/elastic.h"
#include "proto/spec/names.h"
#include "proto/spec/spec.h"
#include "proto/time.h"

namespace muster::cli {
namespace {

using Rows = std::vector<std::vector<std::string>>;

std::string Indented(const std::string& text) {
  std::string out;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) absl::StrAppend(&out, "  ", line, "\n");
  return out;
}

struct StepTimesColumn {
  const char* title;
  double (v1::StepTimes::*seconds)() const;
};

std::vector<StepTimesColumn> WaitsByPurpose() {
  return {{"GRADIENTS", &v1::StepTimes::gradients_seconds},
          {"PARAMETERS", &v1::StepTimes::parameters_seconds},
          {"TENSOR", &v1::StepTimes::tensor_seconds},
          {"CONTEXT", &v1::StepTimes::context_seconds},
          {"PIPELINE", &v1::StepTimes::pipeline_seconds},
          {"SLOWEST", &v1::StepTimes::slowest_seconds}};
}

std::vector<StepTimesColumn> WaitsByCollective() {
  return {{"ALL-REDUCE", &v1::StepTimes::all_reduce_seconds},
          {"REDUCE-SCATTER", &v1::StepTimes::reduce_scatter_seconds},
          {"ALL-GATHER", &v1::StepTimes::all_gather_seconds},
          {"ALL-TO-ALL", &v1::StepTimes::all_to_all_seconds},
          {"BROADCAST", &v1::StepTimes::broadcast_seconds},
          {"SEND/RECEIVE", &v1::StepTimes::send_receive_seconds}};
}

// One row per rank; columns that are 0 for all ranks are left out. The rank that computes longest,
// and waits least for the slowest, is the slowest.
Rows StepTimesRows(const v1::Job& job, std::vector<StepTimesColumn> waits) {
  using Column = StepTimesColumn;
  waits.erase(std::remove_if(waits.begin(), waits.end(),
                             [&](const Column& column) {
                               return std::all_of(job.ranks().begin(), job.ranks().end(),
                                                  [&](const v1::RankStatus& rank) {
                                                    return (rank.times().*column.seconds)() <= 0;
                                                  });
                             }),
              waits.end());
  const auto milliseconds = [](double seconds) { return absl::StrFormat("%.1f", 1e3 * seconds); };
  Rows rows = {{"RANK", "STEP", "TOTAL", "COMPUTING"}};
  for (const Column& column : waits) rows[0].push_back(column.title);
  for (const v1::RankStatus& rank : job.ranks()) {
    if (!rank.has_times()) continue;
    double computing = rank.times().step_seconds();
    for (const Column& column : waits) computing -= (rank.times().*column.seconds)();
    rows.push_back({absl::StrCat(rank.rank()), absl::StrCat(rank.times().step()),
                    milliseconds(rank.times().step_seconds()), milliseconds(computing)});
    for (const Column& column : waits) {
      rows.back().push_back(milliseconds((rank.times().*column.seconds)()));
    }
  }
  return rows;
}

// One row per worker of the current attempt, in order of its lowest rank.
Rows HostRows(const v1::Job& job) {
  Rows rows = {{"WORKER", "HOST", "ADDRESS", "RANKS", "DEVICES"}};
  std::vector<std::string> seen;
  for (const v1::RankStatus& first : job.ranks()) {
    if (std::count(seen.begin(), seen.end(), first.worker()) > 0) continue;
    seen.push_back(first.worker());
    std::vector<int> ranks;
    std::vector<std::string> devices;
    for (const v1::RankStatus& rank : job.ranks()) {
      if (rank.worker() != first.worker()) continue;
      ranks.push_back(rank.rank());
      devices.push_back(rank.device());
    }
    rows.push_back({first.worker(), first.host().empty() ? "-" : first.host(),
                    first.address().empty() ? "-" : first.address(), parallel::RanksText(ranks),
                    absl::StrJoin(devices, " ")});
  }
  return rows;
}

// "12m3s of 2h": the running time of all attempts, and its limit. Empty of one that has never run.
std::string RanText(const v1::Job& job, absl::Time now) {
  if (!job.has_ran() && !job.has_running_since()) return "";
  absl::Duration ran = FromProto(job.ran());
  if (job.has_running_since()) {
    ran += std::max(absl::ZeroDuration(), now - FromProto(job.running_since()));
  }
  std::string text = ShortDuration(ran);
  if (job.spec().has_time_limit()) {
    absl::StrAppend(&text, " of ", ShortDuration(FromProto(job.spec().time_limit())));
  }
  return text;
}

// "4 ranks of 2, 4, 8; asked for 8".
std::string ElasticText(const v1::Job& job) {
  std::string text = absl::StrCat(job.ranks_size(), " ranks of ", job.sizes(0));
  if (job.sizes_size() > 8) {
    absl::StrAppend(&text, " to ", job.sizes(job.sizes_size() - 1));
  } else {
    for (int i = 1; i < job.sizes_size(); ++i) absl::StrAppend(&text, ", ", job.sizes(i));
  }
  if (job.ranks_wanted() != 0) absl::StrAppend(&text, "; asked for ", job.ranks_wanted());
  return text;
}

// Name and value of everything that is one number or text.
Rows SummaryRows(const v1::Job& job, const std::optional<parallel::Mesh>& mesh,
                 const std::optional<v1::DeadlineOutlook>& deadline, const Terminal& terminal) {
  Rows rows = {
      {"name:", job.name()},
      {"id:", job.id()},
      {"state:", Coloured(spec::EnumName(job.state()), terminal)},
      {"step:", StepText(job)},
      {"loss:", Loss(job.train_loss())},
      {"validation:", Loss(job.validation_loss())},
      {"tokens/s:", job.tokens_per_second() > 0 ? ShortNumber(job.tokens_per_second()) : "-"},
      {"committed:", job.last_committed_step() == 0
                         ? "no checkpoint yet"
                         : absl::StrCat("step ", job.last_committed_step())},
      {"attempts:", absl::StrCat(job.attempts(), " (", job.failures(), " of ",
                                 job.spec().restart().max_failures(), " failures counted)")},
      {"submitted:", LocalTime(job.submitted())},
      {"started:", LocalTime(job.started())},
      {"ended:", LocalTime(job.ended())}};
  if (!job.owner().empty()) rows.push_back({"owner:", job.owner()});
  if (job.membership() > 1) {
    rows.push_back({"membership:", absl::StrCat(job.membership(), " of attempt ", job.epoch())});
  }
  if (job.model_flops_utilization() > 0) {
    const auto percent = [](double share) { return absl::StrFormat("%.1f %%", 100 * share); };
    rows.insert(rows.begin() + 7,
                {"utilization:", absl::StrCat("MFU ", percent(job.model_flops_utilization()),
                                              ", HFU ", percent(job.hardware_flops_utilization()),
                                              " of the devices' arithmetic")});
  }
  if (const std::string goodput = GoodputText(job.usage(), absl::Now()); !goodput.empty()) {
    rows.push_back({"goodput:", goodput});
  }
  if (mesh.has_value() && mesh->world_size() > 1) {
    rows.insert(rows.begin() + 3, {"layout:", LayoutText(*mesh, job.spec().engine().parallel())});
  }
  if (!job.sizes().empty()) rows.insert(rows.begin() + 3, {"elastic:", ElasticText(job)});
  if (job.spec().resources().has_share() && job.spec().resources().share() < 1) {
    rows.insert(rows.begin() + 3,
                {"share:", absl::StrCat(job.spec().resources().share(), " of each device")});
  }
  if (!IsFinal(job.state()) && !job.phase().empty()) {
    rows.insert(rows.begin() + 3, {"phase:", job.phase()});
  }
  if (const std::string ran = RanText(job, absl::Now()); !ran.empty()) {
    rows.push_back({"ran:", ran});
  }
  if (deadline.has_value()) rows.push_back({"deadline:", DeadlineText(*deadline, absl::Now())});
  if (!job.spec().notes().empty()) rows.push_back({"notes:", job.spec().notes()});
  if (job.has_waiting()) rows.push_back({"waiting:", WaitText(job.waiting())});
  if (!job.message().empty()) rows.push_back({"message:", job.message()});
  return rows;
}

Rows RankRows(const v1::Job& job, const std::optional<parallel::Mesh>& mesh) {
  Rows rows = {{"RANK", "PLACE", "HOST", "DEVICE", "PID", "STATE", "STEP", "METRICS"}};
  for (const v1::RankStatus& rank : job.ranks()) {
    rows.push_back({absl::StrCat(rank.rank()),
                    mesh.has_value() ? PlaceText(*mesh, rank.rank()) : "-",
                    rank.host().empty() ? "-" : rank.host(), rank.device(),
                    rank.pid() > 0 ? absl::StrCat(rank.pid()) : "-", spec::EnumName(rank.state()),
                    job.steps() > 0 || rank.step() > 0 ? absl::StrCat(rank.step()) : "-",
                    rank.metrics_address().empty() ? "-" : rank.metrics_address()});
  }
  return rows;
}

Rows MemoryRows(const v1::Job& job) {
  Rows rows = {{"RANK", "ENGINE", "HOST", "IN USE", "OF"}};
  for (const v1::RankStatus& rank : job.ranks()) {
    if (!rank.has_memory()) continue;
    const auto of_device = [](int64_t bytes) { return bytes > 0 ? Bytes(bytes) : "-"; };
    rows.push_back({absl::StrCat(rank.rank()), Bytes(rank.memory().device_bytes()),
                    Bytes(rank.memory().host_bytes()), of_device(rank.memory().used_bytes()),
                    of_device(rank.memory().total_bytes())});
  }
  return rows;
}

Rows EndRows(const v1::Job& job) {
  Rows rows = {{"EPOCH", "CAUSE", "STEP", "COUNTED", "WHY"}};
  for (const v1::AttemptEnd& end : job.causes()) {
    rows.push_back({absl::StrCat(end.epoch()), spec::EnumName(end.cause()),
                    job.steps() > 0 || end.step() > 0 ? absl::StrCat(end.step()) : "-",
                    end.counted() ? "yes" : "no", end.message()});
  }
  return rows;
}

// Ranks that went to other devices before the attempt trained.
Rows ReplacementRows(const v1::Job& job) {
  Rows rows = {{"MEMBERSHIP", "TIME", "RANKS", "FROM", "TO", "CAUSE", "WHY"}};
  for (const v1::Replacement& replacement : job.replacements()) {
    std::vector<std::string> ranks;
    std::set<std::string> to;
    for (const v1::Placement& placement : replacement.ranks()) {
      ranks.push_back(absl::StrCat(placement.rank()));
      to.insert(placement.worker());
    }
    constexpr size_t kNamedMax = 8;
    const std::string moved =
        ranks.size() <= kNamedMax
            ? absl::StrJoin(ranks, ",")
            : absl::StrCat(ranks.size(), ", ", ranks.front(), " to ", ranks.back());
    rows.push_back({absl::StrCat(replacement.membership()), LocalTime(replacement.time()), moved,
                    replacement.worker(), absl::StrJoin(to, ","),
                    spec::EnumName(replacement.cause()), replacement.message()});
  }
  return rows;
}

void PrintRanks(const v1::Job& job, const std::optional<parallel::Mesh>& mesh, Terminal& terminal) {
  if (job.ranks().empty()) return;
  const auto any = [&job](auto predicate) {
    return std::any_of(job.ranks().begin(), job.ranks().end(), predicate);
  };
  terminal.out << "\nhosts of attempt " << job.epoch() << "\n" << Indented(Table(HostRows(job)));
  if (!job.placement_cost().axes().empty()) {
    terminal.out << "\nplacement of attempt " << job.epoch() << ": "
                 << CostText(job.placement_cost()) << "\n"
                 << Indented(Table(CostRows(job.placement_cost())));
  }
  terminal.out << "\nranks of attempt " << job.epoch() << "\n"
               << Indented(Table(RankRows(job, mesh)));
  if (any([](const v1::RankStatus& rank) { return rank.has_times(); })) {
    terminal.out << "\nmilliseconds of the last step of every rank, and how many it waited for\n"
                 << Indented(Table(StepTimesRows(job, WaitsByPurpose())));
    if (any([](const v1::RankStatus& rank) { return rank.times().slowest_seconds() > 0; })) {
      terminal.out << "\nthe same by the collectives that they waited in\n"
                   << Indented(Table(StepTimesRows(job, WaitsByCollective())));
    }
  }
  if (any([](const v1::RankStatus& rank) { return rank.has_memory(); })) {
    terminal.out << "\nmemory of every rank: what the engine has taken of its device and of the "
                    "host, and what of a GPU is in use\n"
                 << Indented(Table(MemoryRows(job)));
  }
}

}  // namespace

absl::Status DescribeJob(CoordinatorClient& client, const std::string& name, Format format,
                         Terminal& terminal) {
  const absl::StatusOr<v1::Job> found = client.GetJob(name);
  // An array whose name an older job has, too, is what is meant while it is live.
  if (found.ok() ? IsFinal(found->state()) : found.status().code() == absl::StatusCode::kNotFound) {
    ASSIGN_OR_RETURN(const std::vector<v1::Job> tasks, TasksOf(client, name));
    if (AnyLive(tasks) || (!found.ok() && !tasks.empty())) {
      return DescribeArray(tasks, format, terminal);
    }
  }
  RETURN_IF_ERROR(found.status());
  const v1::Job& job = *found;
  ASSIGN_OR_RETURN(const std::vector<v1::Event> events, client.ListEvents(job.id()));
  if (format != Format::kTable) {
    Json object = ToJson(job);
    object["events"] = Json::array();
    for (const v1::Event& event : events) object["events"].push_back(ToJson(event));
    Print(object, format, terminal.out);
    return absl::OkStatus();
  }
  std::optional<v1::DeadlineOutlook> deadline;
  if (!job.spec().deadline().empty() && !IsFinal(job.state())) {
    v1::ExplainRequest request;
    request.set_name(job.id());
    ASSIGN_OR_RETURN(const v1::ExplainResponse explained, client.Explain(request));
    if (explained.has_deadline()) deadline = explained.deadline();
  }
  // Of an elastic job the layout of its attempt, else of its largest size.
  const int32_t size = job.ranks_size() > 0 || job.sizes().empty()
                           ? job.ranks_size()
                           : job.sizes(job.sizes_size() - 1);
  const std::optional<parallel::Mesh> mesh = MeshOf(spec::AtSize(job.spec(), size));
  terminal.out << Table(SummaryRows(job, mesh, deadline, terminal));
  PrintRanks(job, mesh, terminal);
  if (!job.replacements().empty()) {
    terminal.out << "\nmemberships of attempt " << job.epoch()
                 << ": ranks that were replaced before it trained\n"
                 << Indented(Table(ReplacementRows(job)));
  }
  if (!job.causes().empty()) {
    terminal.out << "\nended attempts\n" << Indented(Table(EndRows(job)));
  }
  if (!job.checkpoints().empty()) {
    terminal.out << "\ncheckpoints (those removed since: muster checkpoints " << job.name() << ")\n"
                 << Indented(Table(CheckpointRows(job, /*with_removed=*/false)));
  }
  if (!events.empty()) {
    terminal.out << "\nevents\n";
    for (const v1::Event& event : events) terminal.out << "  " << EventLine(event) << "\n";
  }
  terminal.out << "\nspec\n" << Indented(spec::ToYaml(job.spec()));
  return absl::OkStatus();
}

}  // namespace muster::cli
