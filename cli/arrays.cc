#include "cli/arrays.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "proto/job_state.h"
#include "proto/spec/array.h"
#include "proto/spec/names.h"
#include "proto/spec/spec.h"
#include "proto/time.h"

namespace muster::cli {
namespace {

using Rows = std::vector<std::vector<std::string>>;

// A request larger than 16 MiB is refused by the transport, without a hint.
constexpr size_t kRequestBytesMax = 15 << 20;

std::string Tasks(int64_t n) { return absl::StrCat(n, n == 1 ? " task" : " tasks"); }

std::vector<std::string> KeysOf(const v1::JobSpec& spec) {
  std::vector<std::string> keys;
  for (const v1::ArrayValue& value : spec.array_task().values()) {
    keys.push_back(absl::AsciiStrToUpper(value.key()));
  }
  return keys;
}

// The smaller of the losses that are known; 0: none is.
double Smaller(double a, double b) { return a == 0 ? b : b == 0 ? a : std::min(a, b); }

}  // namespace

absl::StatusOr<Json> SubmitTasks(CoordinatorClient& client, std::vector<v1::JobSpec> tasks,
                                 const std::string& request_id, bool dry_run,
                                 absl::Duration patience, Format format, Terminal& terminal) {
  const v1::JobSpec first = tasks[0];
  Rows rows = {KeysOf(first)};
  rows[0].insert(rows[0].begin(), "NAME");
  v1::SubmitArrayRequest request;
  for (v1::JobSpec& task : tasks) {
    std::vector<std::string>& row = rows.emplace_back();
    row.push_back(task.name());
    for (const v1::ArrayValue& value : task.array_task().values()) row.push_back(value.value());
    *request.add_tasks() = std::move(task);
  }
  request.set_request_id(request_id);
  request.set_validate_only(dry_run);
  if (const size_t bytes = request.ByteSizeLong(); bytes > kRequestBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("array: the specs of its ", request.tasks_size(), " tasks take ", bytes,
                     " bytes in all; at most ", kRequestBytesMax,
                     ": put long texts into a file, or submit several arrays"));
  }
  ASSIGN_OR_RETURN(const v1::SubmitArrayResponse response, client.SubmitArray(request, patience));
  if (format != Format::kTable) return ToJson(response);
  const v1::ArrayReport& array = response.array();
  if (dry_run) {
    v1::JobSpec complete = first;
    spec::ApplyDefaults(complete);
    terminal.out << Tasks(array.tasks()) << "\n"
                 << Table(rows) << "\nthe first of them\n"
                 << spec::ToYaml(complete);
    return Json();
  }
  terminal.out << (response.existed() ? "already submitted: " : "submitted ") << array.array()
               << " (" << array.array_id() << "), " << Tasks(array.tasks()) << "\n";
  if (terminal.is_tty) {
    terminal.out << "see them with: muster describe job " << array.array() << "\n";
  }
  return Json();
}

absl::StatusOr<std::vector<v1::Job>> TasksOf(CoordinatorClient& client, const std::string& name) {
  std::vector<v1::Job> tasks;
  const bool can_be_name = !name.empty() && std::all_of(name.begin(), name.end(), [](char c) {
    return absl::ascii_islower(static_cast<unsigned char>(c)) ||
           absl::ascii_isdigit(static_cast<unsigned char>(c)) || c == '-';
  });
  if (!can_be_name) return tasks;
  ASSIGN_OR_RETURN(std::vector<v1::Job> jobs,
                   client.ListJobSummaries(absl::StrCat(spec::kArrayLabel, "=", name)));
  // Others may have such a label, and older arrays the name; the newest come first.
  for (v1::Job& job : jobs) {
    const v1::ArrayTask& task = job.spec().array_task();
    if (task.array() != name) continue;
    if (!tasks.empty() && task.array_id() != tasks[0].spec().array_task().array_id()) break;
    tasks.push_back(std::move(job));
  }
  std::reverse(tasks.begin(), tasks.end());
  return tasks;
}

bool AnyLive(const std::vector<v1::Job>& tasks) {
  return std::any_of(tasks.begin(), tasks.end(),
                     [](const v1::Job& task) { return !IsFinal(task.state()); });
}

absl::Status ChangeTasks(CoordinatorClient& client, const std::string& array,
                         v1::ArrayChange change, const std::string& reason, Format format,
                         Terminal& terminal) {
  v1::ChangeArrayRequest request;
  request.set_name(array);
  request.set_change(change);
  request.set_reason(reason);
  ASSIGN_OR_RETURN(const v1::ChangeArrayResponse response, client.ChangeArray(request));
  const v1::ArrayReport& report = response.array();
  if (format != Format::kTable) {
    Print(ToJson(report), format, terminal.out);
    return absl::OkStatus();
  }
  static const std::map<v1::ArrayChange, std::string> kDone = {
      {v1::ARRAY_CHANGE_CANCEL, "cancelled"},  {v1::ARRAY_CHANGE_HOLD, "held"},
      {v1::ARRAY_CHANGE_RELEASE, "released"},  {v1::ARRAY_CHANGE_REQUEUE, "requeued"},
      {v1::ARRAY_CHANGE_PREEMPT, "preempted"}, {v1::ARRAY_CHANGE_SUSPEND, "suspended"}};
  terminal.out << report.array() << ": " << kDone.at(change) << " " << report.changed() << " of "
               << Tasks(report.tasks());
  if (report.ended() > 0) terminal.out << "; " << report.ended() << " had ended";
  if (report.refused() > 0) terminal.out << "; " << report.refused() << " were refused";
  terminal.out << "\n";
  for (const std::string& why : report.refusals()) terminal.out << "  " << why << "\n";
  if (report.refused() > report.refusals_size()) {
    terminal.out << "  and " << report.refused() - report.refusals_size() << " more\n";
  }
  return absl::OkStatus();
}

absl::Status DescribeArray(const std::vector<v1::Job>& tasks, Format format, Terminal& terminal) {
  if (format != Format::kTable) {
    Json list = Json::array();
    for (const v1::Job& task : tasks) list.push_back(ToJson(task));
    Print(list, format, terminal.out);
    return absl::OkStatus();
  }
  const v1::ArrayTask& array = tasks[0].spec().array_task();
  Rows summary = {{"array:", array.array()},
                  {"id:", array.array_id()},
                  {"tasks:", absl::StrCat(array.tasks())},
                  {"states:", StatesText(tasks)}};
  if (array.max_running() > 0) {
    summary.push_back({"running:", absl::StrCat("at most ", array.max_running(), " at a time")});
  }
  const auto forgotten = array.tasks() - static_cast<int64_t>(tasks.size());
  if (forgotten > 0) {
    summary.push_back({"forgotten:", Tasks(forgotten) + " that ended long ago"});
  }
  Rows rows = {KeysOf(tasks[0].spec())};
  rows[0].insert(rows[0].begin(), "TASK");
  rows[0].insert(rows[0].end(), {"STATE", "STEP", "LOSS", "BEST", "VALIDATION", "BEST VALIDATION"});
  for (const v1::Job& task : tasks) {
    std::vector<std::string>& row = rows.emplace_back();
    row.push_back(task.name());
    for (const v1::ArrayValue& value : task.spec().array_task().values()) {
      row.push_back(value.value());
    }
    row.resize(rows[0].size() - 6);
    row.insert(row.end(), {Coloured(spec::EnumName(task.state()), terminal), StepText(task),
                           Loss(task.train_loss()), Loss(task.best_train_loss()),
                           Loss(task.validation_loss()), Loss(task.best_validation_loss())});
  }
  terminal.out << Table(summary) << "\n" << Table(rows);
  return absl::OkStatus();
}

std::string StatesText(const std::vector<v1::Job>& tasks) {
  std::map<v1::JobState, int64_t> counts;
  for (const v1::Job& task : tasks) ++counts[task.state()];
  std::vector<std::pair<int64_t, v1::JobState>> order;
  for (const auto& [state, count] : counts) order.emplace_back(-count, state);
  std::sort(order.begin(), order.end());
  std::vector<std::string> parts;
  for (const auto& [count, state] : order) {
    parts.push_back(absl::StrCat(-count, " ", spec::EnumName(state)));
  }
  return absl::StrJoin(parts, ", ");
}

std::vector<std::string> ArrayRow(const std::vector<v1::Job>& tasks, absl::Time now) {
  double train = 0, validation = 0, tokens_per_second = 0;
  int64_t ended = 0, attempts = 0;
  for (const v1::Job& task : tasks) {
    train = Smaller(train, task.best_train_loss());
    validation = Smaller(validation, task.best_validation_loss());
    attempts += task.attempts();
    ended += IsFinal(task.state()) ? 1 : 0;
    if (task.state() == v1::JOB_STATE_RUNNING) tokens_per_second += task.tokens_per_second();
  }
  return {tasks[0].spec().array_task().array(),
          StatesText(tasks),
          absl::StrCat(ended, "/", tasks.size(), " ended"),
          Loss(train),
          Loss(validation),
          tokens_per_second > 0 ? ShortNumber(tokens_per_second) : "-",
          absl::StrCat(attempts),
          Age(tasks[0].submitted(), now)};
}

}  // namespace muster::cli
