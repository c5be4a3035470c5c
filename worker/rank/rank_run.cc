#include "worker/rank/rank_run.h"

#include <unistd.h>

#include <iostream>
#include <memory>
#include <optional>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "base/file_system.h"
#include "base/log.h"
#include "base/metrics.h"
#include "base/network.h"
#include "base/status_macros.h"
#include "muster/v1/rank.pb.h"
#include "parallel/comm/communicator.h"
#include "worker/rank/daemon_client.h"
#include "worker/rank/failure_cause.h"
#include "worker/rank/failure_deadline.h"
#include "worker/rank/flight_record.h"
#include "worker/rank/profiler.h"
#include "worker/rank/progress_reporter.h"
#include "worker/rank/rank_metrics.h"
#include "worker/rank/start_anew.h"
#include "worker/rank/training_run.h"
#include "worker/run_directory/run_directory.h"

namespace muster::worker {
namespace {

// How long a rank that has trained may take to hand its last commit and notices to the daemon.
// Without them the work since the commit before would be lost; but its device is held meanwhile.
constexpr absl::Duration kFlushTimeout = absl::Minutes(10);
// The same after a failure, when only the last progress is left to deliver.
constexpr absl::Duration kFailureFlushTimeout = absl::Seconds(5);
// How long a device may take to come back from collectives that have failed. It is well below the
// daemon's grace, so that peers of a lost rank end by themselves, with their reports.
constexpr absl::Duration kFailureGrace = absl::Seconds(1);

absl::StatusOr<v1::RankAssignment> ReadAssignment(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string bytes, PosixFileSystem()->Read(path));
  v1::RankAssignment assignment;
  if (!assignment.ParseFromString(bytes) || assignment.job_id().empty() ||
      assignment.world_size() < 1 || assignment.rank() < 0 ||
      assignment.rank() >= assignment.world_size()) {
    return absl::InvalidArgumentError(path + " is not a valid rank assignment");
  }
  return assignment;
}

// Serves metrics on the host of the daemon's own. Of --rank-ports it takes the last free port:
// ranks that listen for their peers begin at the first.
absl::StatusOr<std::unique_ptr<metrics::PrometheusServer>> ServeMetrics(
    const v1::RankAssignment& assignment) {
  ASSIGN_OR_RETURN(const PortRange ports, PortRange::Parse(assignment.rank_ports()));
  const metrics::ServerTls tls = {
      .certificate = assignment.metrics_tls().certificate(),
      .key = assignment.metrics_tls().key(),
      .client_authorities = assignment.metrics_tls().client_authorities()};
  if (ports.first == 0) return metrics::PrometheusServer::Start(assignment.metrics_address(), tls);
  ASSIGN_OR_RETURN(HostPort at, ParseHostPort(assignment.metrics_address()));
  absl::Status failure;
  for (int port = ports.last - assignment.local_rank(); port >= ports.first; --port) {
    at.port = absl::StrCat(port);
    auto started = metrics::PrometheusServer::Start(at.ToString(), tls);
    if (started.ok()) return started;
    failure = started.status();
  }
  return failure;
}

// Null when the assignment asks for none, or when the address cannot be had, which is logged.
std::unique_ptr<metrics::PrometheusServer> TryToServeMetrics(const v1::RankAssignment& assignment,
                                                             Logger& logger) {
  if (assignment.metrics_address().empty()) return nullptr;
  auto started = ServeMetrics(assignment);
  if (started.ok()) return *std::move(started);
  logger.Warning("this rank serves no metrics: its address cannot be listened on",
                 {{"address", assignment.metrics_address()},
                  {"rank_ports", assignment.rank_ports()},
                  {"reason", started.status().ToString()}});
  return nullptr;
}

// Ends the process when the training thread does not come back from a device whose collectives
// have failed.
void EndStuckProcess(const absl::Status& why, ExitReporter& exit, FlightRecord& flight) {
  const std::string message(why.message());
  const std::optional<int> peer = UnreachablePeerOf(why);
  const v1::Cause cause = peer.has_value() ? CauseOf(why) : v1::CAUSE_COMMUNICATION;
  // The report comes first: writing the record may take long, or hang with the device.
  exit.Write(cause, message, peer);
  flight.Dump();
  exit.EndProcess(cause, message, kExitFailed, peer);
}

Ending EndingOf(const absl::StatusOr<Ending>& trained) {
  if (trained.ok()) return *trained;
  return {CauseOf(trained.status()), std::string(trained.status().message()), kExitFailed,
          UnreachablePeerOf(trained.status())};
}

}  // namespace

int RunRank(const std::string& path, LogFormat format) {
  const absl::StatusOr<v1::RankAssignment> assignment = ReadAssignment(path);
  if (!assignment.ok()) {
    std::cerr << "muster-rank: " << assignment.status().message() << std::endl;
    return kExitUsage;
  }
  parallel::SetNcclEnvironment(
      {.address = assignment->address(), .host_id = assignment->host_id()});
  // A thread of the process before it may have reported its end while another started it anew.
  if (assignment->membership() > 1) {
    PosixFileSystem()->RemoveFile(assignment->run_directory() + kRankExitFile).IgnoreError();
  }
  ExitReporter exit(assignment->run_directory());
  StopSignals signals(exit);
  const std::shared_ptr<Logger> logger = Logger::ToStderr(LogLevel::kInfo,
                                                          {.component = "rank",
                                                           .worker = assignment->worker(),
                                                           .job = assignment->job_id(),
                                                           .epoch = assignment->epoch(),
                                                           .rank = assignment->rank()},
                                                          format);

  const std::unique_ptr<metrics::Registry> discard = metrics::DiscardRegistry();
  const auto server = TryToServeMetrics(*assignment, *logger);
  const std::string metrics_address = server == nullptr ? "" : server->address();
  RankMetrics rank_metrics(server == nullptr ? *discard : server->registry(),
                           assignment->job_name(), assignment->rank());

  FlightRecord flight(assignment->run_directory(), *logger);
  DaemonClientOptions options = DaemonClientOptions::From(*assignment);
  options.on_aborted = [&exit, &flight](const absl::Status& why) {
    flight.Dump();
    exit.EndProcess(v1::CAUSE_CANCELLED,
                    absl::StrCat("the attempt is over: ", std::string(why.message())),
                    kExitStopped);
  };
  options.on_membership = [&logger, &exit](uint32_t membership) {
    logger->Info("ranks of the attempt were replaced before it trained: this one starts anew",
                 {{"membership", static_cast<int64_t>(membership)}});
    const absl::Status failed = StartAnew();
    exit.EndProcess(v1::CAUSE_LAUNCH, std::string(failed.message()), kExitFailed);
  };
  options.on_collectives = [&flight](uint64_t number) { flight.Answer(number); };
  options.on_stuck = [&flight](v1::RankProgress& progress) { flight.AddPositions(progress); };
  const auto client = DaemonClient::Make(std::move(options));
  if (!client.ok()) {
    exit.Write(v1::CAUSE_LAUNCH, client.status().ToString());
    return kExitFailed;
  }
  const std::unique_ptr<FileSystem> files = PosixFileSystem();
  Profiler profiler(*files, assignment->run_directory(), assignment->rank(),
                    absl::StrFormat("rank %d, %s, %s", assignment->rank(), assignment->device(),
                                    assignment->worker()),
                    flight.recorder());
  ProgressReporter reporter(*assignment, signals, {**client, exit, rank_metrics, profiler, *logger},
                            metrics_address);
  logger->Info("rank starts", {{"world_size", assignment->world_size()},
                               {"pid", static_cast<int64_t>(getpid())},
                               {"metrics", metrics_address}});

  FailureDeadline deadline(kFailureGrace, [&exit, &flight](const absl::Status& why) {
    EndStuckProcess(why, exit, flight);
  });
  const absl::StatusOr<Ending> trained =
      Train(*assignment, {**client, reporter, rank_metrics, profiler, flight, deadline, *logger});
  deadline.Disarm();
  if (!trained.ok()) {
    flight.Dump();
    logger->Error("rank failed", {{"status", trained.status().ToString()}});
  }
  const Ending ending = EndingOf(trained);
  signals.TrainingEnds();
  PrintLine(ending.message);
  const absl::Status flushed =
      (*client)->Flush(trained.ok() ? kFlushTimeout : kFailureFlushTimeout);
  if (!flushed.ok()) {
    logger->Warning("the daemon did not take everything that this rank had for it",
                    {{"reason", flushed.ToString()}});
  }
  // Without running destructors: the metrics server alone takes seconds to stop, and the device is
  // free only when the process is gone.
  exit.EndProcess(ending.cause, ending.message, ending.code, ending.peer);
}

}  // namespace muster::worker
