#include "cli/plan.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "cli/explain.h"
#include "cli/process.h"
#include "cli/spec_file.h"
#include "proto/spec/elastic.h"
#include "proto/spec/spec.h"

namespace muster::cli {
namespace {

// A file that only this user can read, removed by the destructor.
class TemporaryFile {
 public:
  static absl::StatusOr<TemporaryFile> With(const std::string& bytes) {
    std::error_code failed;
    const std::filesystem::path folder = std::filesystem::temp_directory_path(failed);
    std::string path = (failed ? std::filesystem::path("/tmp") : folder) / "muster-spec-XXXXXX";
    const int file = mkstemp(path.data());
    if (file < 0) return absl::UnavailableError(path + ": cannot be made");
    TemporaryFile made(path);
    const auto size = static_cast<ssize_t>(bytes.size());
    const bool written = write(file, bytes.data(), bytes.size()) == size;
    if (close(file) != 0 || !written) return absl::UnavailableError(path + ": cannot be written");
    return made;
  }
  TemporaryFile(TemporaryFile&& other) noexcept : path_(std::move(other.path_)) {
    other.path_.clear();
  }
  TemporaryFile& operator=(TemporaryFile&&) = delete;
  ~TemporaryFile() {
    if (!path_.empty()) unlink(path_.c_str());
  }
  const std::string& path() const { return path_; }

 private:
  explicit TemporaryFile(std::string path) : path_(std::move(path)) {}
  std::string path_;
};

double Number(const Json& object, const char* key) { return object.value(key, 0.0); }
int64_t Integer(const Json& object, const char* key) { return object.value(key, int64_t{0}); }

std::string Degrees(const Json& degrees) {
  std::vector<std::string> parts;
  for (const auto& [axis, degree] : degrees.items()) {
    if (degree.get<int64_t>() > 1) parts.push_back(absl::StrCat(axis, " ", degree.get<int64_t>()));
  }
  return parts.empty() ? "one rank" : absl::StrJoin(parts, " x ");
}

// The parameters that ZeRO 2 and 3 do not shard, on the rank that has most of them.
void WriteWhole(const Json& plan, Terminal& terminal) {
  const auto total = [](const Json& rank) {
    double sum = 0;
    if (!rank.contains("wholeParameters")) return sum;
    for (const auto& [kind, count] : rank["wholeParameters"].items()) sum += count.get<double>();
    return sum;
  };
  const Json& ranks = plan["ranks"];
  const Json& most =
      *std::max_element(ranks.begin(), ranks.end(),
                        [&](const Json& a, const Json& b) { return total(a) < total(b); });
  if (total(most) == 0) return;
  constexpr std::array<std::pair<const char*, const char*>, 3> kKinds = {
      {{"tables", "of tied embedding and head"},
       {"keys", "of key/value heads that tensor ranks share"},
       {"small", "in small ones"}}};
  std::vector<std::string> parts;
  for (const auto& [kind, text] : kKinds) {
    const double count = Number(most["wholeParameters"], kind);
    if (count > 0) parts.push_back(absl::StrCat(ShortNumber(count), " ", text));
  }
  terminal.out << "whole   " << ShortNumber(total(most)) << " of "
               << ShortNumber(Number(most, "parameters"))
               << " parameters of a rank are not sharded: " << absl::StrJoin(parts, ", ") << "\n";
}

void WriteSummary(const Json& plan, Terminal& terminal) {
  std::ostream& out = terminal.out;
  out << "model   " << ShortNumber(Number(plan, "parameters")) << " parameters, "
      << ShortNumber(Number(plan, "flopsPerToken")) << " FLOPs per token\n";
  const std::vector<std::string> with = plan.value("with", std::vector<std::string>());
  out << "layout  " << Degrees(plan["degrees"]) << " on " << plan.value("device", "")
      << (with.empty() ? "" : "; ") << absl::StrJoin(with, ", ") << "\n";
  if (const Json shares = plan.value("shares", Json::object()); !shares.empty()) {
    std::vector<std::string> parts;
    for (const auto& [what, of_ranks] : shares.items()) {
      parts.push_back(
          absl::StrCat(what, " ", absl::StrJoin(of_ranks.get<std::vector<int64_t>>(), " + ")));
    }
    out << "shares  " << absl::StrJoin(parts, ", ") << " by tensor rank\n";
  }
  out << "step    " << ShortNumber(Number(plan, "tokensPerStep")) << " tokens, "
      << absl::StrFormat("%.3g FLOPs, ", Number(plan, "flopsPerStep"))
      << Integer(plan, "microBatches") << " micro-batches per rank";
  if (Number(plan, "bubble") > 0) {
    out << absl::StrFormat("; the pipeline idles %.1f %% of it", 100 * Number(plan, "bubble"));
  }
  out << "\nmemory  " << Bytes(Integer(plan, "neededBytes")) << " for the largest rank";
  if (Number(plan, "imbalance") >= 0.0005) {
    out << absl::StrFormat(", %.1f %% above the mean", 100 * Number(plan, "imbalance"));
  }
  out << "\n";
  WriteWhole(plan, terminal);
  out << "\n";
}

// The categories under `key` that are not 0 on every rank.
std::vector<std::string> Used(const Json& ranks, const char* key) {
  std::vector<std::string> categories;
  for (const auto& [category, bytes] : ranks[0][key].items()) {
    bool used = false;
    for (const Json& rank : ranks) used = used || Integer(rank[key], category.c_str()) > 0;
    if (used) categories.push_back(category);
  }
  return categories;
}

// What ranks send in a step, by category; prints nothing when they send nothing.
void WriteSent(const Json& plan, Terminal& terminal) {
  const Json& ranks = plan["ranks"];
  if (!ranks[0].contains("sent")) return;
  const std::vector<std::string> categories = Used(ranks, "sent");
  if (categories.empty()) return;
  std::vector<std::vector<std::string>> rows = {{"STAGE", "TENSOR", "SENDS PER STEP"}};
  for (const std::string& category : categories) {
    rows[0].push_back(absl::AsciiStrToUpper(category));
  }
  for (const Json& rank : ranks) {
    std::vector<std::string> row = {absl::StrCat(Integer(rank, "pipeline")),
                                    absl::StrCat(Integer(rank, "tensor")),
                                    Bytes(Integer(rank, "sentBytes"))};
    for (const std::string& category : categories) {
      row.push_back(Bytes(Integer(rank["sent"], category.c_str())));
    }
    rows.push_back(std::move(row));
  }
  terminal.out << "\n" << Table(rows);
}

// One row for each kind of rank; categories that no rank needs are left out.
void WriteRanks(const Json& plan, Terminal& terminal) {
  const Json& ranks = plan["ranks"];
  const std::vector<std::string> categories = Used(ranks, "device");
  const int64_t memory = Integer(plan, "deviceMemoryBytes");
  std::vector<std::vector<std::string>> rows = {{"STAGE", "TENSOR", "RANKS", "BLOCKS", "PARAMS"}};
  for (const std::string& category : categories) {
    rows[0].push_back(absl::AsciiStrToUpper(category));
  }
  rows[0].insert(rows[0].end(), {"DEVICE", "HOST"});
  if (memory > 0) rows[0].push_back("SHARE");
  for (const Json& rank : ranks) {
    std::string blocks = absl::StrCat(Integer(rank, "blocks"));
    if (rank.value("embedding", false)) blocks = "embedding+" + blocks;
    if (rank.value("head", false)) blocks += "+head";
    std::vector<std::string> row = {
        absl::StrCat(Integer(rank, "pipeline")), absl::StrCat(Integer(rank, "tensor")),
        absl::StrCat(Integer(rank, "ranks")), blocks, ShortNumber(Number(rank, "parameters"))};
    for (const std::string& category : categories) {
      row.push_back(Bytes(Integer(rank["device"], category.c_str())));
    }
    row.push_back(Bytes(Integer(rank, "deviceBytes")));
    row.push_back(Bytes(Integer(rank, "hostBytes")));
    if (memory > 0) {
      row.push_back(absl::StrFormat(
          "%.0f %%", 100.0 * Number(rank, "neededBytes") / static_cast<double>(memory)));
    }
    rows.push_back(std::move(row));
  }
  terminal.out << Table(rows);
}

// Nothing is known of what a command computes; where it would run is.
absl::Status PlanCommand(const v1::ExplainResponse& outlook, bool with_cluster, Format format,
                         Terminal& terminal) {
  if (!with_cluster) {
    return absl::FailedPreconditionError(
        "the spec has a command of its own, whose memory and arithmetic are not known; `muster "
        "plan FILE --cluster` says whether, where and when it would start");
  }
  if (format != Format::kTable) {
    Print(Json{{"cluster", ToJson(outlook)}}, format, terminal.out);
  } else {
    WriteOutlook(outlook, absl::Now(), terminal);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status Plan(const PlanOptions& options, CoordinatorClient* client, Format format,
                  Terminal& terminal) {
  ASSIGN_OR_RETURN(const std::vector<v1::JobSpec> specs,
                   LoadSpecs(options.file, options.overrides, options.working_directory));
  const v1::JobSpec& spec = specs[0];
  if (spec.has_array_task() && format == Format::kTable) {
    terminal.out << "Of " << spec.name() << ", the first of the " << specs.size()
                 << " tasks of the array.\n\n";
  }
  v1::ExplainResponse outlook;
  if (client != nullptr) {
    v1::ExplainRequest request;
    *request.mutable_spec() = spec;
    ASSIGN_OR_RETURN(outlook, client->Explain(request));
    // All that the coordinator knows of a job that does not exist.
    const v1::PlacementCost cost = outlook.job().placement_cost();
    outlook.clear_job();
    if (!cost.axes().empty()) *outlook.mutable_job()->mutable_placement_cost() = cost;
  }
  if (spec.command_size() > 0) return PlanCommand(outlook, client != nullptr, format, terminal);
  // Of an elastic job, what it takes with its largest size.
  v1::JobSpec planned = spec;
  if (spec::IsElastic(spec)) {
    spec::ApplyDefaults(planned);
    planned = spec::AtSize(planned, spec::SizesOf(planned).back());
  }
  ASSIGN_OR_RETURN(const TemporaryFile file, TemporaryFile::With(planned.SerializeAsString()));
  ASSIGN_OR_RETURN(const std::string text,
                   RunAndCapture({options.rank_binary, "plan", "--spec=" + file.path(),
                                  absl::StrCat("--device-memory=", options.device_memory)}));
  Json plan = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!plan.is_object() || !plan.contains("ranks") || plan["ranks"].empty()) {
    return absl::InternalError("muster-rank plan printed no plan: " + text.substr(0, 200));
  }
  if (format != Format::kTable) {
    if (client != nullptr) plan["cluster"] = ToJson(outlook);
    Print(plan, format, terminal.out);
    return absl::OkStatus();
  }
  WriteSummary(plan, terminal);
  WriteRanks(plan, terminal);
  WriteSent(plan, terminal);
  if (std::any_of(plan["ranks"].begin(), plan["ranks"].end(),
                  [](const Json& rank) { return rank.value("tooUneven", false); })) {
    terminal.out << "\nTensor ranks are too uneven for copy engines: what they exchange goes "
                    "through NCCL.\n";
  }
  for (const Json& warning : plan.value("warnings", Json::array())) {
    terminal.out << "\n" << warning.get<std::string>() << ".\n";
  }
  if (plan.contains("even")) {
    terminal.out << "\nMemory is uneven: " << plan["even"].value("advice", "") << ".\n";
  }
  if (plan.contains("fits")) {
    terminal.out << "\n"
                 << (plan.value("fits", false)
                         ? absl::StrCat("It fits into ", Bytes(Integer(plan, "deviceMemoryBytes")),
                                        " for each rank.")
                         : absl::StrCat("It does not fit into ",
                                        Bytes(Integer(plan, "deviceMemoryBytes")),
                                        " for each rank. ", plan.value("advice", ""), "."))
                 << "\n";
  }
  if (client != nullptr) {
    terminal.out << "\n";
    WriteOutlook(outlook, absl::Now(), terminal);
  }
  return absl::OkStatus();
}

}  // namespace muster::cli
