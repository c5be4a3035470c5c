#include "cli/jobs.h"

#include <map>
#include <random>
#include <set>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/file_system.h"
#include "base/rng.h"
#include "base/status_macros.h"
#include "cli/arrays.h"
#include "cli/explain.h"
#include "cli/reconnect.h"
#include "cli/spec_file.h"
#include "cli/watch.h"
#include "proto/job_state.h"
#include "proto/spec/names.h"
#include "proto/spec/spec.h"

namespace muster::cli {
namespace {

constexpr absl::Duration kSubmitPatience = absl::Seconds(15);
// What is submitted in one call, so that replies are small and a long file shows progress.
constexpr int kJobsPerCall = 250;
constexpr size_t kBytesPerCall = 1 << 20;

std::string FreshRequestId() {
  std::random_device device;
  Rng rng((static_cast<uint64_t>(device()) << 32) | device());
  return "cli-" + rng.Letters(20);
}

std::vector<std::string> JobRow(const v1::Job& job, absl::Time now, const Terminal& terminal) {
  return {job.name(),
          Coloured(spec::EnumName(job.state()), terminal),
          StepText(job),
          Loss(job.train_loss()),
          Loss(job.validation_loss()),
          job.state() == v1::JOB_STATE_RUNNING && job.tokens_per_second() > 0
              ? ShortNumber(job.tokens_per_second())
              : "-",
          absl::StrCat(job.attempts()),
          Age(job.submitted(), now)};
}

const std::vector<std::string> kJobHeading = {"NAME",       "STATE",    "STEP",     "LOSS",
                                              "VALIDATION", "TOKENS/S", "ATTEMPTS", "AGE"};

void PrintAccepted(const v1::SubmitResponse& response, Terminal& terminal) {
  terminal.out << (response.existed() ? "already submitted: " : "submitted ")
               << response.job().name() << " (" << response.job().id() << ")" << std::endl;
}

struct Submitted {
  v1::Job job;  // of one job
  Json report;  // what is to be printed, unless that is a table, which has been
};

// What the job waits for, without jobs of these names.
google::protobuf::RepeatedPtrField<std::string> WithoutJobs(const v1::JobSpec& spec,
                                                            const std::set<std::string>& names) {
  google::protobuf::RepeatedPtrField<std::string> rest;
  for (const std::string& entry : spec.after()) {
    if (!names.contains(entry.substr(0, entry.find(':')))) *rest.Add() = entry;
  }
  return rest;
}

// One job, or all tasks of one array. `before`: the names of those that come before it in this
// call, which the coordinator does not know where nothing is submitted.
absl::StatusOr<Submitted> SubmitOne(CoordinatorClient& client, Submission submission,
                                    const SubmitOptions& options, Format format, Terminal& terminal,
                                    const std::set<std::string>& before = {}) {
  const std::string request_id = options.request_id.empty() ? FreshRequestId() : options.request_id;
  if (submission.specs[0].has_array_task()) {
    for (v1::JobSpec& task : submission.specs) {
      if (options.dry_run) *task.mutable_after() = WithoutJobs(task, before);
    }
    ASSIGN_OR_RETURN(Json report, SubmitTasks(client, std::move(submission.specs), request_id,
                                              options.dry_run, kSubmitPatience, format, terminal));
    return Submitted{.report = std::move(report)};
  }
  v1::SubmitRequest request;
  *request.mutable_spec() = submission.specs[0];
  if (options.dry_run) {
    *request.mutable_spec()->mutable_after() = WithoutJobs(request.spec(), before);
  }
  request.set_request_id(request_id);
  request.set_validate_only(options.dry_run);
  ASSIGN_OR_RETURN(v1::SubmitResponse response, client.Submit(request, kSubmitPatience));
  Submitted out{.job = response.job()};
  if (options.dry_run) *out.job.mutable_spec()->mutable_after() = submission.specs[0].after();
  if (format != Format::kTable) {
    out.report = options.dry_run ? ToJson(out.job.spec()) : ToJson(out.job);
  } else if (options.dry_run) {
    terminal.out << spec::ToYaml(out.job.spec());
  } else {
    PrintAccepted(response, terminal);
  }
  return out;
}

// What many jobs or arrays of one `muster submit` come to.
class Report {
 public:
  Report(Format format, Terminal& terminal) : format_(format), terminal_(terminal) {}

  void Accepted(Json report) {
    if (format_ != Format::kTable) list_.push_back(std::move(report));
  }
  void Accepted(const v1::SubmitResponse& response) {
    if (format_ != Format::kTable) return Accepted(ToJson(response.job()));
    PrintAccepted(response, terminal_);
  }
  void Refused(const std::string& source, const absl::Status& status, size_t submissions = 1) {
    refused_ += submissions;
    terminal_.err << "muster: " << source << ": " << status.message() << std::endl;
    // None of the others would fare better.
    futile_ |= absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status) ||
               absl::IsUnauthenticated(status);
  }
  bool futile() const { return futile_; }

  absl::Status End(size_t submissions, size_t tried, bool dry_run) {
    if (format_ != Format::kTable) Print(list_, format_, terminal_.out);
    const size_t missing = refused_ + submissions - tried;
    if (missing == 0) return absl::OkStatus();
    return absl::FailedPreconditionError(absl::StrCat(missing, " of ", submissions, " were not ",
                                                      dry_run ? "accepted" : "submitted"));
  }

 private:
  const Format format_;
  Terminal& terminal_;
  Json list_ = Json::array();
  size_t refused_ = 0;
  bool futile_ = false;
};

// Submits jobs of submissions[first] and behind it in one call, up to an array or to what one call
// takes. Returns how many.
size_t SubmitBatch(CoordinatorClient& client, const std::vector<Submission>& submissions,
                   size_t first, Report& report) {
  v1::SubmitJobsRequest request;
  size_t bytes = 0;
  for (size_t i = first; i < submissions.size() && request.jobs_size() < kJobsPerCall; ++i) {
    const v1::JobSpec& spec = submissions[i].specs[0];
    bytes += spec.ByteSizeLong();
    if (spec.has_array_task() || (i > first && bytes > kBytesPerCall)) break;
    v1::SubmitRequest& job = *request.add_jobs();
    *job.mutable_spec() = spec;
    job.set_request_id(FreshRequestId());
  }
  const size_t jobs = request.jobs_size();
  const absl::StatusOr<v1::SubmitJobsResponse> response =
      client.SubmitJobs(request, kSubmitPatience);
  if (!response.ok()) {
    report.Refused(jobs == 1 ? submissions[first].source
                             : absl::StrCat(submissions[first].source, " and ", jobs - 1, " more"),
                   response.status(), jobs);
    return jobs;
  }
  for (size_t i = 0; i < jobs && i < static_cast<size_t>(response->results_size()); ++i) {
    const v1::SubmitJobsResult& result = response->results(static_cast<int>(i));
    if (result.code() == 0) {
      report.Accepted(result.accepted());
    } else {
      report.Refused(submissions[first + i].source,
                     absl::Status(static_cast<absl::StatusCode>(result.code()), result.message()));
    }
  }
  return jobs;
}

absl::Status SubmitSeveral(CoordinatorClient& client, std::vector<Submission> submissions,
                           const SubmitOptions& options, Format format, Terminal& terminal) {
  if (options.watch || !options.request_id.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(options.watch ? "--watch follows" : "--request-id is of",
                     " one job, and there are ", submissions.size(), "; submit them one by one"));
  }
  Report report(format, terminal);
  size_t tried = 0;
  std::set<std::string> names;
  while (tried < submissions.size() && !report.futile()) {
    const v1::JobSpec& first = submissions[tried].specs[0];
    if (!options.dry_run && !first.has_array_task()) {
      tried += SubmitBatch(client, submissions, tried, report);
      continue;
    }
    if (options.dry_run && format == Format::kTable && tried > 0) terminal.out << "---\n";
    const std::string name = first.has_array_task() ? first.array_task().array() : first.name();
    absl::StatusOr<Submitted> one =
        SubmitOne(client, submissions[tried], options, format, terminal, names);
    names.insert(name);
    if (one.ok()) {
      report.Accepted(std::move(one->report));
    } else {
      report.Refused(submissions[tried].source, one.status());
    }
    ++tried;
  }
  return report.End(submissions.size(), tried, options.dry_run);
}

}  // namespace

absl::Status Submit(CoordinatorClient& client, const SubmitOptions& options, Format format,
                    Terminal& terminal) {
  ASSIGN_OR_RETURN(std::vector<Submission> submissions,
                   LoadSubmissions(options.files, options.overrides, options.working_directory));
  std::set<std::string> checked;  // jobs, and tasks of an array, mostly share model and data sets
  for (const Submission& submission : submissions) {
    for (const v1::JobSpec& spec : submission.specs) {
      const v1::EngineSpec& engine = spec.engine();
      if (checked.insert(engine.model().SerializeAsString() + engine.data().SerializeAsString())
              .second) {
        RETURN_IF_ERROR(CheckDataSets(*PosixFileSystem(), spec));
      }
    }
  }
  if (submissions.size() > 1) {
    return SubmitSeveral(client, std::move(submissions), options, format, terminal);
  }
  const bool array = submissions[0].specs[0].has_array_task();
  if (array && options.watch) {
    return absl::InvalidArgumentError(
        "--watch follows one job, and the file has an array of them; submit it without, then "
        "`muster watch` one of its tasks");
  }
  ASSIGN_OR_RETURN(const Submitted submitted,
                   SubmitOne(client, std::move(submissions[0]), options, format, terminal));
  if (options.watch && !options.dry_run) {
    return Watch(client, submitted.job.id(), format, terminal, kReconnectPatience);
  }
  if (format != Format::kTable) {
    Print(submitted.report, format, terminal.out);
  } else if (terminal.is_tty && !array && !options.dry_run) {
    terminal.out << "follow it with: muster watch " << submitted.job.name() << std::endl;
  }
  return absl::OkStatus();
}

absl::Status GetJobs(CoordinatorClient& client, const std::string& labels, bool tasks,
                     Format format, Terminal& terminal) {
  if (format != Format::kTable) {
    ASSIGN_OR_RETURN(const std::vector<v1::Job> jobs, client.ListJobs(labels));
    Json list = Json::array();
    for (const v1::Job& job : jobs) list.push_back(ToJson(job));
    Print(list, format, terminal.out);
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(const std::vector<v1::Job> jobs, client.ListJobSummaries(labels));
  if (jobs.empty()) {
    terminal.out << (labels.empty() ? "no jobs; `muster submit FILE` makes one"
                                    : "no job has labels that match " + labels)
                 << "\n";
    return absl::OkStatus();
  }
  std::vector<std::vector<std::string>> rows = {kJobHeading};
  const absl::Time now = absl::Now();
  std::map<std::string, std::vector<v1::Job>> arrays;
  for (const v1::Job& job : jobs) {
    if (!tasks && job.spec().has_array_task()) {
      arrays[job.spec().array_task().array_id()].push_back(job);
    }
  }
  for (const v1::Job& job : jobs) {
    if (tasks || !job.spec().has_array_task()) {
      rows.push_back(JobRow(job, now, terminal));
    } else if (const auto array = arrays.extract(job.spec().array_task().array_id())) {
      rows.push_back(ArrayRow(array.mapped(), now));  // where the first of its tasks would be
    }
  }
  terminal.out << Table(rows);
  return absl::OkStatus();
}

absl::Status GetJob(CoordinatorClient& client, const std::string& name, Format format,
                    Terminal& terminal) {
  ASSIGN_OR_RETURN(const v1::Job job, client.GetJob(name));
  if (format != Format::kTable) {
    Print(ToJson(job), format, terminal.out);
    return absl::OkStatus();
  }
  terminal.out << Table({kJobHeading, JobRow(job, absl::Now(), terminal)});
  if (job.has_waiting()) terminal.out << "waiting: " << WaitText(job.waiting()) << "\n";
  if (!job.message().empty()) terminal.out << "message: " << job.message() << "\n";
  return absl::OkStatus();
}

namespace {

// Whether `name` stands for an array: some of its tasks are live, or no job has the name.
absl::StatusOr<bool> IsArray(CoordinatorClient& client, const std::string& name) {
  ASSIGN_OR_RETURN(const std::vector<v1::Job> tasks, TasksOf(client, name));
  if (tasks.empty() || AnyLive(tasks)) return !tasks.empty();
  return client.GetJob(name).status().code() == absl::StatusCode::kNotFound;
}

v1::ArrayChange ArrayChangeOf(CoordinatorClient::JobChange change) {
  using JobChange = CoordinatorClient::JobChange;
  switch (change) {
    case JobChange::kHold:
      return v1::ARRAY_CHANGE_HOLD;
    case JobChange::kRelease:
    case JobChange::kResume:
      return v1::ARRAY_CHANGE_RELEASE;
    case JobChange::kRequeue:
      return v1::ARRAY_CHANGE_REQUEUE;
    case JobChange::kPreempt:
      return v1::ARRAY_CHANGE_PREEMPT;
    case JobChange::kSuspend:
      return v1::ARRAY_CHANGE_SUSPEND;
  }
  return v1::ARRAY_CHANGE_UNSPECIFIED;
}

}  // namespace

absl::Status ChangeJob(CoordinatorClient& client, CoordinatorClient::JobChange change,
                       const v1::ChangeJobRequest& request, Format format, Terminal& terminal) {
  ASSIGN_OR_RETURN(const bool array, IsArray(client, request.name()));
  if (array) {
    return ChangeTasks(client, request.name(), ArrayChangeOf(change), request.reason(), format,
                       terminal);
  }
  ASSIGN_OR_RETURN(const v1::Job job, client.ChangeJob(change, request));
  if (format != Format::kTable) {
    Print(ToJson(job), format, terminal.out);
    return absl::OkStatus();
  }
  terminal.out << job.name() << " is " << spec::EnumName(job.state());
  using JobChange = CoordinatorClient::JobChange;
  const bool saves = change == JobChange::kPreempt || change == JobChange::kSuspend;
  if (saves && job.waiting().code() == v1::WAIT_CODE_RELEASING) {
    terminal.out << ": its ranks save a checkpoint at the end of their step and stop";
  } else if (job.has_waiting()) {
    terminal.out << ": " << WaitText(job.waiting());
  }
  terminal.out << "\n";
  return absl::OkStatus();
}

absl::Status ResizeJob(CoordinatorClient& client, const std::string& name, const std::string& ranks,
                       const std::string& reason, Format format, Terminal& terminal) {
  v1::ResizeJobRequest request;
  request.set_name(name);
  request.set_reason(reason);
  int32_t number = 0;
  if (ranks != "auto" && (!absl::SimpleAtoi(ranks, &number) || number < 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("RANKS: '", ranks, "' is neither a number of ranks nor auto"));
  }
  request.set_ranks(number);
  ASSIGN_OR_RETURN(const v1::Job job, client.ResizeJob(request));
  if (format != Format::kTable) {
    Print(ToJson(job), format, terminal.out);
    return absl::OkStatus();
  }
  const bool runs = job.attempt_state() != v1::ATTEMPT_STATE_UNSPECIFIED &&
                    job.attempt_state() != v1::ATTEMPT_STATE_RELEASED;
  terminal.out << job.name() << " is " << spec::EnumName(job.state());
  if (runs) terminal.out << " with " << job.ranks_size() << " rank(s)";
  if (number == 0) {
    terminal.out << "; the scheduler chooses their number";
  } else if (!runs) {
    terminal.out << " and will start with " << number;
  } else if (job.state() == v1::JOB_STATE_RESIZING) {
    terminal.out << "; it goes on with " << number << " when its checkpoint is saved";
  } else if (job.ranks_size() != number) {
    terminal.out << "; it goes on with " << number
                 << " as soon as so many slots are free and no job waits for them";
  }
  terminal.out << "\n";
  return absl::OkStatus();
}

absl::Status Cancel(CoordinatorClient& client, const std::string& name, Format format,
                    Terminal& terminal) {
  ASSIGN_OR_RETURN(const bool array, IsArray(client, name));
  if (array) {
    return ChangeTasks(client, name, v1::ARRAY_CHANGE_CANCEL, /*reason=*/"", format, terminal);
  }
  ASSIGN_OR_RETURN(const v1::Job job, client.CancelJob(name));
  if (format != Format::kTable) {
    Print(ToJson(job), format, terminal.out);
  } else {
    terminal.out << job.name() << (IsFinal(job.state()) ? " has ended: " : " is ")
                 << spec::EnumName(job.state()) << "\n";
  }
  return absl::OkStatus();
}

}  // namespace muster::cli
