#include "cli/jobs.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <random>
#include <sstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "base/rng.h"
#include "base/status_macros.h"
#include "cli/places.h"
#include "cli/process.h"
#include "cli/watch.h"
#include "proto/spec/document.h"
#include "proto/spec/names.h"
#include "proto/spec/spec.h"

namespace muster::cli {
namespace {

constexpr absl::Duration kSubmitPatience = absl::Seconds(15);
constexpr absl::Duration kFirstAnswerTimeout = absl::Seconds(5);
constexpr absl::Duration kWatchPatience = absl::Minutes(10);
constexpr absl::Duration kReconnectInterval = absl::Milliseconds(300);

std::string StepOf(const v1::Job& job) { return absl::StrCat(job.step(), "/", job.steps()); }

absl::StatusOr<std::string> ReadText(const std::string& path) {
  std::ifstream file;
  if (path != "-") {
    file.open(path, std::ios::binary);
    if (!file) return absl::NotFoundError(absl::StrCat(path, ": cannot be opened"));
  }
  std::istream& in = path == "-" ? std::cin : file;
  // One byte more than is allowed: enough for the parser to refuse it.
  std::string text(spec::kTextBytesMax + 1, '\0');
  in.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(in.gcount()));
  if (in.bad() || (path != "-" && text.empty() && !file.eof())) {
    return absl::NotFoundError(absl::StrCat(path, ": cannot be read"));
  }
  return text;
}

std::string FreshRequestId() {
  std::random_device device;
  Rng rng((static_cast<uint64_t>(device()) << 32) | device());
  return "cli-" + rng.Letters(20);
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

// A row per rank; kinds of waiting that no rank did are left out. Whoever computes longest and
// waits least for the slowest is the slowest.
std::vector<std::vector<std::string>> StepTimesRows(const v1::Job& job,
                                                    std::vector<StepTimesColumn> waits) {
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
  std::vector<std::vector<std::string>> rows = {{"RANK", "STEP", "TOTAL", "COMPUTING"}};
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

std::vector<std::string> JobRow(const v1::Job& job, absl::Time now, const Terminal& terminal) {
  return {job.name(),
          Coloured(spec::EnumName(job.state()), terminal),
          StepOf(job),
          Loss(job.train_loss()),
          Loss(job.validation_loss()),
          job.state() == v1::JOB_STATE_RUNNING ? ShortNumber(job.tokens_per_second()) : "-",
          absl::StrCat(job.attempts()),
          Age(job.submitted(), now)};
}

const std::vector<std::string> kJobHeading = {"NAME",       "STATE",    "STEP",     "LOSS",
                                              "VALIDATION", "TOKENS/S", "ATTEMPTS", "AGE"};

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

std::vector<std::vector<std::string>> CheckpointRows(const v1::Job& job, bool with_removed) {
  std::vector<std::vector<std::string>> rows = {
      {"STEP", "EPOCH", "SIZE", "STATE", "COMMITTED", "PATH"}};
  for (const v1::CheckpointRecord& record : job.checkpoints()) {
    if (record.removed() && !with_removed) continue;
    rows.push_back({absl::StrCat(record.step()), absl::StrCat(record.epoch()),
                    Bytes(record.bytes()),
                    record.damaged()   ? "damaged"
                    : record.removed() ? "removed"
                                       : "committed",
                    LocalTime(record.committed()), record.path()});
  }
  return rows;
}

std::string Indented(const std::string& text) {
  std::string out;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) absl::StrAppend(&out, "  ", line, "\n");
  return out;
}

// Calls `open` until it ends for another reason than a coordinator that went away; says so at once
// when there is none from the start.
absl::Status Reconnecting(CoordinatorClient& client, Terminal& terminal,
                          const std::function<absl::Status(Absence&)>& open) {
  RETURN_IF_ERROR(client.GetVersion(kFirstAnswerTimeout).status());
  Absence absence(kWatchPatience);
  bool told = false;
  for (;;) {
    absence.Opened(absl::Now());
    const absl::Status status = open(absence);
    if (status.code() != absl::StatusCode::kUnavailable || !absence.Bearable(absl::Now())) {
      return status;
    }
    if (!std::exchange(told, true)) {
      terminal.err << "muster: " << status.message() << "; trying again" << std::endl;
    }
    absl::SleepFor(kReconnectInterval);
  }
}

}  // namespace

absl::StatusOr<v1::JobSpec> LoadSpec(const std::string& file,
                                     const std::vector<std::string>& overrides,
                                     const std::string& working_directory) {
  ASSIGN_OR_RETURN(const std::string text, ReadText(file));
  absl::StatusOr<v1::JobSpec> loaded =
      spec::Load(text, file == "-" ? "stdin" : file, overrides, working_directory);
  if (!loaded.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("the spec is refused\n", loaded.status().message()));
  }
  return loaded;
}

absl::Status Submit(CoordinatorClient& client, const SubmitOptions& options, Format format,
                    Terminal& terminal) {
  v1::SubmitRequest request;
  ASSIGN_OR_RETURN(*request.mutable_spec(),
                   LoadSpec(options.file, options.overrides, options.working_directory));
  request.set_request_id(options.request_id.empty() ? FreshRequestId() : options.request_id);
  request.set_validate_only(options.dry_run);
  ASSIGN_OR_RETURN(const v1::SubmitResponse response, client.Submit(request, kSubmitPatience));
  const v1::Job& job = response.job();
  if (options.dry_run) {
    if (format == Format::kTable) {
      terminal.out << spec::ToYaml(job.spec());
    } else {
      Print(ToJson(job.spec()), format, terminal.out);
    }
    return absl::OkStatus();
  }
  if (format != Format::kTable && !options.watch) {
    Print(ToJson(job), format, terminal.out);
  } else if (format == Format::kTable) {
    terminal.out << (response.existed() ? "already submitted: " : "submitted ") << job.name()
                 << " (" << job.id() << ")" << std::endl;
  }
  if (options.watch) return Watch(client, job.id(), format, terminal, kWatchPatience);
  if (format == Format::kTable && terminal.is_tty) {
    terminal.out << "follow it with: muster watch " << job.name() << std::endl;
  }
  return absl::OkStatus();
}

absl::Status GetJobs(CoordinatorClient& client, Format format, Terminal& terminal) {
  ASSIGN_OR_RETURN(const std::vector<v1::Job> jobs, client.ListJobs());
  if (format != Format::kTable) {
    Json list = Json::array();
    for (const v1::Job& job : jobs) list.push_back(ToJson(job));
    Print(list, format, terminal.out);
    return absl::OkStatus();
  }
  if (jobs.empty()) {
    terminal.out << "no jobs; `muster submit FILE` makes one\n";
    return absl::OkStatus();
  }
  std::vector<std::vector<std::string>> rows = {kJobHeading};
  const absl::Time now = absl::Now();
  for (const v1::Job& job : jobs) rows.push_back(JobRow(job, now, terminal));
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
  if (!job.waiting().empty()) terminal.out << "waiting: " << job.waiting() << "\n";
  if (!job.message().empty()) terminal.out << "message: " << job.message() << "\n";
  return absl::OkStatus();
}

// "4 x NVIDIA H200 (NV18)", "8 x NVIDIA A100 (NV4-12), 1 unusable"; the links are those between
// any two of them.
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

// "127.0.0.1 (10.0.0.1)": where gangs across hosts reach it, in brackets.
std::string AddressOf(const v1::Worker& worker) {
  if (worker.address().empty()) return "-";
  return worker.outside_address().empty()
             ? worker.address()
             : absl::StrCat(worker.address(), " (", worker.outside_address(), ")");
}

absl::Status GetWorkers(CoordinatorClient& client, Format format, Terminal& terminal) {
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
  std::vector<std::vector<std::string>> rows = {{"NAME", "STATE", "HOST", "SLOTS", "FREE", "GPUS",
                                                 "JOBS", "LAST HEARD", "ADDRESS", "METRICS",
                                                 "VERSION"}};
  for (const v1::Worker& worker : workers) {
    rows.push_back({worker.name(), Coloured(spec::EnumName(worker.state()), terminal),
                    worker.host(), absl::StrCat(worker.slots()), absl::StrCat(worker.slots_free()),
                    GpusOf(worker), worker.jobs().empty() ? "-" : absl::StrJoin(worker.jobs(), ","),
                    Age(worker.last_heard(), absl::Now()), AddressOf(worker),
                    worker.metrics_address().empty() ? "-" : worker.metrics_address(),
                    worker.version()});
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

// One row per worker of the current attempt, in order of its lowest rank.
std::vector<std::vector<std::string>> HostRows(const v1::Job& job) {
  std::vector<std::vector<std::string>> rows = {{"WORKER", "HOST", "ADDRESS", "RANKS", "DEVICES"}};
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

absl::Status DescribeJob(CoordinatorClient& client, const std::string& name, Format format,
                         Terminal& terminal) {
  ASSIGN_OR_RETURN(const v1::Job job, client.GetJob(name));
  ASSIGN_OR_RETURN(const std::vector<v1::Event> events, client.ListEvents(job.id()));
  if (format != Format::kTable) {
    Json object = ToJson(job);
    object["events"] = Json::array();
    for (const v1::Event& event : events) object["events"].push_back(ToJson(event));
    Print(object, format, terminal.out);
    return absl::OkStatus();
  }
  std::vector<std::vector<std::string>> head = {
      {"name:", job.name()},
      {"id:", job.id()},
      {"state:", Coloured(spec::EnumName(job.state()), terminal)},
      {"step:", StepOf(job)},
      {"loss:", Loss(job.train_loss())},
      {"validation:", Loss(job.validation_loss())},
      {"tokens/s:", ShortNumber(job.tokens_per_second())},
      {"committed:", job.last_committed_step() == 0
                         ? "no checkpoint yet"
                         : absl::StrCat("step ", job.last_committed_step())},
      {"attempts:", absl::StrCat(job.attempts(), " (", job.failures(), " of ",
                                 job.spec().restart().max_failures(), " failures counted)")},
      {"submitted:", LocalTime(job.submitted())},
      {"started:", LocalTime(job.started())},
      {"ended:", LocalTime(job.ended())}};
  if (job.model_flops_utilization() > 0) {
    const auto percent = [](double share) { return absl::StrFormat("%.1f %%", 100 * share); };
    head.insert(head.begin() + 7,
                {"utilization:", absl::StrCat("MFU ", percent(job.model_flops_utilization()),
                                              ", HFU ", percent(job.hardware_flops_utilization()),
                                              " of the devices' arithmetic")});
  }
  const std::optional<parallel::Mesh> mesh = MeshOf(job.spec());
  if (mesh.has_value() && mesh->world_size() > 1) {
    head.insert(head.begin() + 3, {"layout:", LayoutText(*mesh, job.spec().engine().parallel())});
  }
  if (!IsFinal(job.state()) && !job.phase().empty()) {
    head.insert(head.begin() + 3, {"phase:", job.phase()});
  }
  if (!job.waiting().empty()) head.push_back({"waiting:", job.waiting()});
  if (!job.message().empty()) head.push_back({"message:", job.message()});
  terminal.out << Table(head);
  if (!job.ranks().empty()) {
    std::vector<std::vector<std::string>> rows = {
        {"RANK", "PLACE", "HOST", "DEVICE", "PID", "STATE", "STEP", "METRICS"}};
    for (const v1::RankStatus& rank : job.ranks()) {
      rows.push_back(
          {absl::StrCat(rank.rank()), mesh.has_value() ? PlaceText(*mesh, rank.rank()) : "-",
           rank.host().empty() ? "-" : rank.host(), rank.device(), absl::StrCat(rank.pid()),
           spec::EnumName(rank.state()), absl::StrCat(rank.step()),
           rank.metrics_address().empty() ? "-" : rank.metrics_address()});
    }
    terminal.out << "\nhosts of attempt " << job.epoch() << "\n" << Indented(Table(HostRows(job)));
    terminal.out << "\nranks of attempt " << job.epoch() << "\n" << Indented(Table(rows));
  }
  if (std::any_of(job.ranks().begin(), job.ranks().end(),
                  [](const v1::RankStatus& rank) { return rank.has_times(); })) {
    terminal.out << "\nmilliseconds of the last step of every rank, and how many it waited for\n"
                 << Indented(Table(StepTimesRows(job, WaitsByPurpose())));
    if (std::any_of(job.ranks().begin(), job.ranks().end(), [](const v1::RankStatus& rank) {
          return rank.times().slowest_seconds() > 0;
        })) {
      terminal.out << "\nthe same by the collectives that they waited in\n"
                   << Indented(Table(StepTimesRows(job, WaitsByCollective())));
    }
  }
  if (std::any_of(job.ranks().begin(), job.ranks().end(),
                  [](const v1::RankStatus& rank) { return rank.has_memory(); })) {
    std::vector<std::vector<std::string>> rows = {{"RANK", "ENGINE", "HOST", "IN USE", "OF"}};
    for (const v1::RankStatus& rank : job.ranks()) {
      if (!rank.has_memory()) continue;
      const auto of_device = [](int64_t bytes) { return bytes > 0 ? Bytes(bytes) : "-"; };
      rows.push_back({absl::StrCat(rank.rank()), Bytes(rank.memory().device_bytes()),
                      Bytes(rank.memory().host_bytes()), of_device(rank.memory().used_bytes()),
                      of_device(rank.memory().total_bytes())});
    }
    terminal.out << "\nmemory of every rank: what the engine has taken of its device and of the "
                    "host, and what of a GPU is in use\n"
                 << Indented(Table(rows));
  }
  if (!job.causes().empty()) {
    std::vector<std::vector<std::string>> rows = {{"EPOCH", "CAUSE", "STEP", "COUNTED", "WHY"}};
    for (const v1::AttemptEnd& end : job.causes()) {
      rows.push_back({absl::StrCat(end.epoch()), spec::EnumName(end.cause()),
                      absl::StrCat(end.step()), end.counted() ? "yes" : "no", end.message()});
    }
    terminal.out << "\nended attempts\n" << Indented(Table(rows));
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

absl::Status Cancel(CoordinatorClient& client, const std::string& name, Format format,
                    Terminal& terminal) {
  ASSIGN_OR_RETURN(const v1::Job job, client.CancelJob(name));
  if (format != Format::kTable) {
    Print(ToJson(job), format, terminal.out);
  } else {
    terminal.out << job.name() << (IsFinal(job.state()) ? " has ended: " : " is ")
                 << spec::EnumName(job.state()) << "\n";
  }
  return absl::OkStatus();
}

absl::Status Checkpoints(CoordinatorClient& client, const std::string& name, Format format,
                         Terminal& terminal) {
  ASSIGN_OR_RETURN(const v1::Job job, client.GetJob(name));
  if (format != Format::kTable) {
    Json list = Json::array();
    for (const v1::CheckpointRecord& record : job.checkpoints()) list.push_back(ToJson(record));
    Print(list, format, terminal.out);
  } else if (job.checkpoints().empty()) {
    terminal.out << job.name() << " has no checkpoint yet\n";
  } else {
    terminal.out << Table(CheckpointRows(job, /*with_removed=*/true));
  }
  return absl::OkStatus();
}

absl::Status Events(CoordinatorClient& client, const std::string& job, bool follow, Format format,
                    Terminal& terminal) {
  if (follow) {
    uint64_t last = 0;
    return Reconnecting(client, terminal, [&](Absence& absence) {
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

absl::Status Logs(CoordinatorClient& client, const LogsOptions& options, Format format,
                  Terminal& terminal) {
  v1::GetLogsRequest request;
  request.set_name(options.job);
  request.set_rank(options.rank);
  request.set_epoch(options.epoch);
  request.set_follow(options.follow);
  request.set_tail_bytes(options.tail_bytes);
  // Where the next byte belongs, so that a stream opened again repeats nothing.
  uint64_t epoch = 0;
  int64_t next_offset = 0;
  const auto open = [&](Absence& absence) {
    return client.GetLogs(request, [&](const v1::LogChunk& chunk) {
      absence.Heard();
      if (chunk.epoch() < epoch) return true;
      if (chunk.epoch() > epoch) next_offset = 0;
      epoch = chunk.epoch();
      const int64_t skip = std::clamp<int64_t>(next_offset - chunk.offset(), 0,
                                               static_cast<int64_t>(chunk.data().size()));
      const std::string data = chunk.data().substr(static_cast<size_t>(skip));
      next_offset =
          std::max(next_offset, chunk.offset() + static_cast<int64_t>(chunk.data().size()));
      if (data.empty()) return true;
      if (format == Format::kTable) {
        terminal.out << data << std::flush;
      } else {
        PrintItem(Json{{"epoch", chunk.epoch()},
                       {"rank", chunk.rank()},
                       {"offset", chunk.offset() + skip},
                       {"text", data}},
                  format, terminal.out);
      }
      return terminal.out.good();
    });
  };
  if (options.follow) return Reconnecting(client, terminal, open);
  Absence once(absl::ZeroDuration());
  return open(once);
}

absl::Status Sample(CoordinatorClient& client, const SampleOptions& options, Format format,
                    Terminal& terminal) {
  ASSIGN_OR_RETURN(const v1::Job job, client.GetJob(options.job));
  const v1::CheckpointRecord* chosen = nullptr;
  for (const v1::CheckpointRecord& record : job.checkpoints()) {
    if (record.damaged() || record.removed()) continue;
    if (options.step != 0 && record.step() != options.step) continue;
    if (chosen == nullptr || record.step() >= chosen->step()) chosen = &record;
  }
  if (chosen == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat(job.name(), " has no sound checkpoint",
                     options.step == 0 ? " yet" : absl::StrCat(" of step ", options.step),
                     "; see muster checkpoints ", job.name()));
  }
  std::error_code ignored;
  if (!std::filesystem::is_directory(chosen->path(), ignored)) {
    return absl::FailedPreconditionError(
        absl::StrCat("checkpoint ", chosen->path(), " cannot be read on this machine"));
  }
  const std::vector<std::string> command = {options.rank_binary,
                                            "sample",
                                            "--checkpoint",
                                            chosen->path(),
                                            "--prompt=" + options.prompt,
                                            "--tokens",
                                            absl::StrCat(options.tokens),
                                            "--temperature",
                                            absl::StrCat(options.temperature),
                                            "--top-k",
                                            absl::StrCat(options.top_k),
                                            "--seed",
                                            absl::StrCat(options.seed)};
  ASSIGN_OR_RETURN(const std::string text, RunAndCapture(command));
  if (format != Format::kTable) {
    Print(Json{{"job", job.name()},
               {"step", chosen->step()},
               {"checkpoint", chosen->path()},
               {"prompt", options.prompt},
               {"text", text}},
          format, terminal.out);
    return absl::OkStatus();
  }
  terminal.out << text << (text.empty() || text.back() != '\n' ? "\n" : "");
  return absl::OkStatus();
}

}  // namespace muster::cli
