#include "cli/profile.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "base/status_macros.h"
#include "cli/step_breakdown.h"
#include "proto/spec/names.h"

namespace muster::cli {
namespace {

// Time from the request until every rank knows of it: ranks check at each step.
constexpr double kNoticeSeconds = 1.5;
constexpr int kAttempts = 3;

absl::StatusOr<v1::ProfileSteps> Choose(const v1::Job& job, int32_t steps, double notice) {
  if (job.spec().command_size() > 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        "job ", job.name(), " runs a command of its own; profiles are recorded by the engine"));
  }
  if (job.state() != v1::JOB_STATE_RUNNING) {
    return absl::FailedPreconditionError(absl::StrCat("job ", job.name(), " is ",
                                                      spec::EnumName(job.state()),
                                                      "; only one that trains has a profile"));
  }
  const int64_t ahead =
      job.step_seconds() > 0 ? static_cast<int64_t>(std::ceil(notice / job.step_seconds())) : 1;
  v1::ProfileSteps chosen;
  chosen.set_first_step(job.step() + 1 + std::max<int64_t>(1, ahead));
  chosen.set_steps(steps);
  if (chosen.first_step() + steps - 1 > job.steps()) {
    return absl::FailedPreconditionError(
        absl::StrFormat("job %s is at step %d of %d: it ends before %d steps from %d on could be "
                        "recorded",
                        job.name(), job.step(), job.steps(), steps, chosen.first_step()));
  }
  return chosen;
}

// The trace of one rank as far as it exists; with `wait` waits for all of it.
absl::StatusOr<std::string> Fetch(CoordinatorClient& client, const v1::Job& job, int32_t rank,
                                  const v1::ProfileSteps& steps, bool wait) {
  v1::GetProfileRequest request;
  request.set_name(job.id());
  request.set_rank(rank);
  request.set_wait(wait);
  *request.mutable_steps() = steps;
  std::string trace;
  const absl::Status status = client.GetProfile(request, [&](const v1::ProfileChunk& chunk) {
    trace += chunk.data();
    return true;
  });
  if (!status.ok()) return status;
  return trace;
}

absl::StatusOr<std::vector<std::string>> Record(CoordinatorClient& client, const v1::Job& job,
                                                const v1::ProfileSteps& steps) {
  const int32_t ranks = std::max(1, job.ranks_size());
  // Asks all ranks before it waits for any, so that they record the same steps.
  for (int32_t rank = 0; rank < ranks; ++rank) {
    RETURN_IF_ERROR(Fetch(client, job, rank, steps, /*wait=*/false).status());
  }
  std::vector<std::string> traces;
  for (int32_t rank = 0; rank < ranks; ++rank) {
    ASSIGN_OR_RETURN(std::string trace, Fetch(client, job, rank, steps, /*wait=*/true));
    traces.push_back(std::move(trace));
  }
  return traces;
}

// Every rank's trace is a JSON array of events, and so is the whole trace: their elements are
// joined.
absl::Status Write(const std::string& path, const v1::Job& job,
                   const std::vector<std::string>& traces) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << R"({"displayTimeUnit":"ms","otherData":{"job":")" << job.id() << R"("},"traceEvents":[)";
  const char* separator = "";
  for (const std::string& trace : traces) {
    absl::string_view events = absl::StripSuffix(absl::StripSuffix(trace, "\n"), "]");
    events = absl::StripPrefix(events, "[");
    file << separator << std::string(events);
    separator = ",\n";
  }
  file << "]}\n";
  file.close();
  if (!file) return absl::UnavailableError(absl::StrCat(path, ": cannot be written"));
  return absl::OkStatus();
}

// One table for ranks on GPUs and one for ranks on CPUs.
std::string BreakdownTable(const std::vector<StepBreakdown>& breakdowns) {
  std::string text;
  for (const bool gpu : {true, false}) {
    std::vector<std::vector<std::string>> rows;
    for (size_t rank = 0; rank < breakdowns.size(); ++rank) {
      const StepBreakdown& of = breakdowns[rank];
      if (of.steps == 0 || of.gpu != gpu) continue;
      if (rows.empty()) {
        rows.push_back({"RANK", "MS PER STEP"});
        for (const auto& part : of.parts) rows[0].push_back(absl::AsciiStrToUpper(part.first));
      }
      std::vector<std::string> row = {absl::StrCat(rank), absl::StrFormat("%.2f", of.step * 1e3)};
      for (const auto& part : of.parts) row.push_back(absl::StrFormat("%.2f", part.second * 1e3));
      rows.push_back(std::move(row));
    }
    if (!rows.empty()) absl::StrAppend(&text, Table(rows));
  }
  return text;
}

Json BreakdownJson(const std::vector<StepBreakdown>& breakdowns) {
  Json ranks = Json::array();
  for (const StepBreakdown& of : breakdowns) {
    Json seconds = Json::object();
    for (const auto& [name, value] : of.parts) seconds[name] = value;
    ranks.push_back({{"stepSeconds", of.step}, {"gpu", of.gpu}, {"seconds", seconds}});
  }
  return ranks;
}

}  // namespace

absl::Status Profile(CoordinatorClient& client, const ProfileOptions& options, Format format,
                     Terminal& terminal) {
  absl::StatusOr<std::vector<std::string>> traces;
  v1::ProfileSteps steps;
  v1::Job job;
  // A rank may pass the first step before it knows of the request; the next attempt gives more
  // notice.
  double notice = kNoticeSeconds;
  for (int attempt = 0; attempt < kAttempts; ++attempt, notice *= 3) {
    ASSIGN_OR_RETURN(job, client.GetJob(options.job));
    ASSIGN_OR_RETURN(steps, Choose(job, options.steps, notice));
    traces = Record(client, job, steps);
    if (traces.ok() || !absl::StrContains(traces.status().message(), "had come to step")) break;
  }
  if (!traces.ok()) return traces.status();
  const std::string path =
      options.output.empty() ? absl::StrCat(job.name(), ".trace.json") : options.output;
  RETURN_IF_ERROR(Write(path, job, *traces));
  std::vector<StepBreakdown> breakdowns;
  for (const std::string& trace : *traces) breakdowns.push_back(BreakDown(trace));
  const int64_t last = steps.first_step() + steps.steps() - 1;
  if (format != Format::kTable) {
    Print(Json{{"path", path},
               {"job", job.id()},
               {"firstStep", steps.first_step()},
               {"lastStep", last},
               {"ranks", traces->size()},
               {"breakdown", BreakdownJson(breakdowns)}},
          format, terminal.out);
  } else {
    terminal.out << BreakdownTable(breakdowns);
    terminal.out << absl::StrFormat(
        "%s: steps %d to %d of %d ranks; open it in https://ui.perfetto.dev or chrome://tracing\n",
        path, steps.first_step(), last, traces->size());
  }
  return absl::OkStatus();
}

}  // namespace muster::cli
