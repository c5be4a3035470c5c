// muster-coordinator: builds the coordinator's parts from flags, serves, and stops them in order.
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <unistd.h>
#include <CLI/CLI.hpp>

#include <cstdlib>
#include <filesystem>
#include <functional>
#include <future>
#include <iostream>
#include <memory>
#include <random>
#include <string>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/file_system.h"
#include "base/log.h"
#include "base/metrics.h"
#include "base/mutex.h"
#include "base/network.h"
#include "base/probes.h"
#include "base/rng.h"
#include "base/status_macros.h"
#include "coordinator/core/core.h"
#include "coordinator/metrics.h"
#include "coordinator/rpc/gate.h"
#include "coordinator/rpc/server.h"
#include "coordinator/sampler.h"
#include "coordinator/shell.h"
#include "coordinator/state_tools.h"
#include "coordinator/store/store.h"
#include "coordinator/targets.h"
#include "coordinator/traces.h"
#include "google/protobuf/util/message_differencer.h"
#include "proto/spec/queues.h"
#include "proto/spec/topology_file.h"
#include "security/tls_files.h"

namespace muster::coordinator {
namespace {

// Calls that still run this long after a stop was asked for are cancelled.
constexpr absl::Duration kStopGrace = absl::Seconds(2);

struct Flags {
  std::string listen = "127.0.0.1:7600";
  std::string metrics = "127.0.0.1:0";
  metrics::ServerTls metrics_tls;
  std::string data_dir;
  std::string cluster_id;
  std::string topology_file;
  security::TlsFiles tls;
  GateOptions gate;
  bool insecure = false;
  std::string queues;
  TraceExporter::Options traces;  // no endpoint: none are sent
  absl::Duration slow_rpc = absl::Seconds(1);
  CoreConfig core;
};

// What the file says takes the place of what workers say of themselves.
absl::Status ReadTopology(const std::string& path, TopologyRules& rules) {
  ASSIGN_OR_RETURN(const std::string text, PosixFileSystem()->Read(path));
  ASSIGN_OR_RETURN(const spec::ClusterTopology topology, spec::ParseClusterTopology(text, path));
  for (size_t depth = 0; depth < rules.labels.size(); ++depth) {
    if (!topology.labels[depth].empty()) rules.labels[depth] = topology.labels[depth];
  }
  for (const auto& [worker, names] : topology.workers) rules.workers[worker] = {names};
  return absl::OkStatus();
}

// Off loopback everybody who reaches the port would be an operator and every worker.
absl::Status CheckListen(const Flags& flags) {
  if (!flags.traces.endpoint.empty()) {
    RETURN_IF_ERROR(TraceExporter::Check(flags.traces));
  } else if (!flags.traces.ca_file.empty()) {
    return absl::InvalidArgumentError("--otlp-ca needs --otlp-endpoint beside it");
  }
  if (flags.tls.any()) return security::CheckServerFiles(flags.tls, absl::Now());
  if (!flags.gate.crl.empty() || !flags.gate.access.empty()) {
    return absl::InvalidArgumentError(
        "--tls-crl and --access need --tls-cert, --tls-key and --tls-ca beside them");
  }
  ASSIGN_OR_RETURN(const HostPort address, ParseHostPort(flags.listen));
  if (IsLoopbackAddress(address.host) || address.host == "localhost" || flags.insecure) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "--listen ", flags.listen,
      " is open to other machines, and without TLS anybody who reaches it may run jobs there: give "
      "--tls-cert, --tls-key and --tls-ca (`muster admin pki init` makes them; docs/security.md), "
      "or "
      "--insecure where the network lets nobody else in"));
}

// Every connection is a descriptor, and so is every file of the store.
void RaiseOpenFiles() {
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

// Waits for SIGTERM, SIGINT or the failure of a part. Constructed before any thread starts, so that
// the signals are blocked in every thread.
class StopSignal {
 public:
  StopSignal() {
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGINT);
    pthread_sigmask(SIG_BLOCK, &signals, nullptr);
    // A client that went away, or an exceeded file size limit, must be an error of the system call.
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN);
    signals_ = signalfd(-1, &signals, SFD_CLOEXEC);
    failed_ = eventfd(0, EFD_CLOEXEC);
  }
  ~StopSignal() {
    close(signals_);
    close(failed_);
  }
  // Any thread.
  void Fail() {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(failed_, &one, sizeof(one));
  }
  // True: a signal came. False: a part failed.
  bool Wait() {
    pollfd waits[] = {{failed_, POLLIN, 0}, {signals_, POLLIN, 0}};
    while (poll(waits, 2, -1) < 0) {
    }
    return (waits[0].revents & POLLIN) == 0;
  }

 private:
  int signals_;
  int failed_;
};

uint64_t SystemSeed() {
  std::random_device device;
  return (static_cast<uint64_t>(device()) << 32) | device();
}

// The port in the file `path`, to which an earlier start wrote its address; 0 when there is none.
int EarlierPort(FileSystem& files, const std::string& path) {
  const absl::StatusOr<std::string> text = files.Read(path);
  if (!text.ok()) return 0;
  return PortOf(std::string(absl::StripAsciiWhitespace(*text))).value_or(0);
}

std::string Quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out + "\"";
}

// Defines the queues as the file says, unless they are so already. An empty path: nothing.
absl::Status ApplyQueuesFile(const std::string& path, FileSystem& files, Shell& shell) {
  if (path.empty()) return absl::OkStatus();
  ASSIGN_OR_RETURN(const std::string text, files.Read(path));
  ASSIGN_OR_RETURN(const v1::QueuePolicy policy, spec::ParseQueues(text, path));
  std::promise<absl::StatusOr<v1::QueuePolicy>> known;
  shell.GetQueuePolicy(
      [&known](absl::StatusOr<v1::QueuePolicy> now) { known.set_value(std::move(now)); });
  ASSIGN_OR_RETURN(const v1::QueuePolicy now, known.get_future().get());
  if (google::protobuf::util::MessageDifferencer::Equals(now, policy)) return absl::OkStatus();
  std::promise<absl::Status> applied;
  shell.ApplyQueues(policy, "coordinator", [&applied](const absl::StatusOr<JobReply>& reply) {
    applied.set_value(reply.status());
  });
  return Annotate(applied.get_future().get(), path);
}

absl::Status Run(const Flags& flags, Logger& log, StopSignal& stop) {
  RealClock clock;
  const std::unique_ptr<FileSystem> files = PosixFileSystem();
  RETURN_IF_ERROR(files->MakeDirectory(flags.data_dir));
  Rng rng(SystemSeed());

  const absl::Duration start = clock.Monotonic();
  Probes probes(clock);
  ASSIGN_OR_RETURN(const std::unique_ptr<metrics::PrometheusServer> prometheus,
                   metrics::PrometheusServer::Start(flags.metrics, flags.metrics_tls));
  Metrics metrics(prometheus->registry());
  metrics.Version(MUSTER_VERSION);
  // Before the store is read, which may take long, so that /startupz answers meanwhile.
  prometheus->SetPages(probes.Pages());
  ASSIGN_OR_RETURN(const std::unique_ptr<Store> store,
                   OpenRocksDbStore(StateDirectoryOf(flags.data_dir), flags.cluster_id,
                                    "muster-" + rng.Letters(8)));

  ASSIGN_OR_RETURN(
      const std::unique_ptr<Shell> shell,
      Shell::Start(
          {.store = *store, .clock = clock, .log = log, .metrics = metrics, .probes = &probes},
          [&](absl::Time now, CoreOutput* output) {
            return Core::Recover(flags.core, *store, rng, now, output);
          },
          [&stop](const absl::Status&) { stop.Fail(); }));

  RETURN_IF_ERROR(ApplyQueuesFile(flags.queues, *files, *shell));
  const std::string address_file = flags.data_dir + "/address";
  const std::string backups = std::filesystem::absolute(flags.data_dir).string() + "/backups";
  ASSIGN_OR_RETURN(const std::unique_ptr<RpcServer> server,
                   RpcServer::Start(*shell, {.listen = flags.listen,
                                             .version = MUSTER_VERSION,
                                             .earlier_port = EarlierPort(*files, address_file),
                                             .backups = backups,
                                             .tls = flags.tls,
                                             .gate = flags.gate,
                                             .slow_call = flags.slow_rpc,
                                             .trace_seed = SystemSeed()}));
  if (!flags.tls.any() && flags.insecure) {
    log.Warning("--insecure: anybody who reaches the port may run jobs",
                {{"listen", flags.listen}});
  }
  // Nobody can dial a wildcard: an address of this machine is told instead.
  std::string outside = OutsideAddress(NetworkView::OfThisMachine());
  if (outside.empty()) outside = "127.0.0.1";
  const std::string address = Advertised(server->address(), outside);
  const std::string metrics_address = Advertised(prometheus->address(), outside);
  RETURN_IF_ERROR(files->WriteAtomically(address_file, address + "\n"));
  std::unique_ptr<TraceExporter> traces;
  if (!flags.traces.endpoint.empty()) {
    TraceExporter::Options options = flags.traces;
    options.version = MUSTER_VERSION;
    ASSIGN_OR_RETURN(traces, TraceExporter::Start(options, *shell, clock, log));
  }
  const Sampler sampler({clock, shell->published(), metrics}, flags.data_dir, flags.tls,
                        flags.gate.crl, flags.metrics_tls.Files());
  metrics::Pages pages = probes.Pages();
  pages["/targets"] = [&shell, &metrics_address] {
    return metrics::PageReply{
        .body = TargetsJson(shell->published(), shell->cluster_id(), metrics_address),
        .content_type = "application/json"};
  };
  prometheus->SetPages(std::move(pages));
  const absl::Cleanup remove_pages = [&prometheus] { prometheus->SetPages({}); };
  probes.Started();
  probes.Ready();
  std::cout << "{\"address\":" << Quoted(address) << ",\"metrics\":" << Quoted(metrics_address)
            << ",\"cluster_id\":" << Quoted(shell->cluster_id()) << ",\"pid\":" << getpid() << "}"
            << std::endl;
  log.Info("serving", {{"address", address},
                       {"metrics", metrics_address},
                       {"listens", server->address()},
                       {"cluster_id", shell->cluster_id()},
                       {"leader_term", shell->leader_term()},
                       {"version", MUSTER_VERSION},
                       {"tls", flags.tls.any()},
                       {"start_seconds", absl::ToDoubleSeconds(clock.Monotonic() - start)}});

  const bool asked = stop.Wait();
  probes.NotReady("the coordinator is stopping");
  log.Info("stopping", {{"reason", asked ? "signal" : "the store failed"}});
  server->Stop(kStopGrace);
  log.Info("stopped");
  return asked ? absl::OkStatus() : absl::UnavailableError("the state cannot be written");
}

void AddDuration(CLI::App& app, const std::string& name, absl::Duration& target,
                 const std::string& help) {
  app.add_option_function<std::string>(
         name,
         [name, &target](const std::string& text) {
           if (!absl::ParseDuration(text, &target) || target <= absl::ZeroDuration() ||
               target == absl::InfiniteDuration()) {
             throw CLI::ValidationError(
                 name, "'" + text + "' is not a duration above 0 such as 500ms, 3s or 10m");
           }
         },
         help)
      ->type_name("DURATION")
      ->default_str(absl::FormatDuration(target));
}

// Runs a tool and prints what the state holds as one JSON line.
int RunTool(const std::function<absl::StatusOr<StoreContents>()>& tool) {
  const absl::StatusOr<StoreContents> contents = tool();
  if (!contents.ok()) {
    std::cerr << contents.status().message() << "\n";
    return 1;
  }
  std::cout << "{\"clusterId\":" << Quoted(contents->cluster_id)
            << ",\"historyId\":" << Quoted(contents->history_id)
            << ",\"leaderTerm\":" << contents->leader_term
            << ",\"lastEvent\":" << contents->last_event << ",\"jobs\":" << contents->jobs
            << ",\"liveJobs\":" << contents->live_jobs << ",\"workers\":" << contents->workers
            << ",\"events\":" << contents->events << "}" << std::endl;
  return 0;
}

// The report as one JSON line; 1 when the state differs.
int RunReplay(const ReplayOptions& options) {
  const absl::StatusOr<ReplayReport> report = ReplayState(options);
  if (!report.ok()) {
    std::cerr << report.status().message() << "\n";
    return 1;
  }
  const Replayed& replayed = report->replayed;
  std::cout << "{\"clusterId\":" << Quoted(report->cluster_id)
            << ",\"entries\":" << replayed.entries << ",\"firstEntry\":" << replayed.first_index
            << ",\"lastEntry\":" << replayed.last_index << ",\"differences\":[";
  const char* comma = "";
  for (const std::string& difference : replayed.differences) {
    std::cout << std::exchange(comma, ",") << Quoted(difference);
  }
  std::cout << "],\"jobs\":[";
  comma = "";
  for (const v1::Job& job : report->jobs) {
    std::cout << std::exchange(comma, ",") << "{\"id\":" << Quoted(job.id())
              << ",\"name\":" << Quoted(job.name())
              << ",\"state\":" << Quoted(v1::JobState_Name(job.state()))
              << ",\"epoch\":" << job.epoch() << ",\"attempts\":" << job.attempts()
              << ",\"failures\":" << job.failures()
              << ",\"lastCommittedStep\":" << job.last_committed_step() << "}";
  }
  const DecisionReport& decisions = report->decisions;
  std::cout << "],\"plans\":" << decisions.plans << ",\"plansDifferent\":" << decisions.different
            << ",\"decisions\":[";
  comma = "";
  for (const DecisionDifference& difference : decisions.differences) {
    std::cout << std::exchange(comma, ",") << "{\"entry\":" << difference.entry
              << ",\"job\":" << Quoted(difference.job) << ",\"then\":" << Quoted(difference.then)
              << ",\"now\":" << Quoted(difference.now) << "}";
  }
  std::cout << "],\"notComparable\":[";
  comma = "";
  for (const auto& [reason, plans] : decisions.not_comparable) {
    std::cout << std::exchange(comma, ",") << "{\"reason\":" << Quoted(reason)
              << ",\"plans\":" << plans << "}";
  }
  std::cout << "]}" << std::endl;
  return 0;
}

int Main(int argc, char** argv) {
  Flags flags;
  ReplayOptions replay_options;
  std::string backup;
  std::string level = "info";
  std::string format = "json";
  bool describe_metrics = false;
  CLI::App app(
      "The Muster coordinator: takes jobs, places them on workers and keeps them alive. It prints "
      "one JSON line with its addresses once it serves; logs go to stderr as JSON lines, or with "
      "--log-format text.");
  app.add_option("--listen", flags.listen, "HOST:PORT for gRPC; port 0 lets the system pick")
      ->capture_default_str();
  app.add_option("--metrics", flags.metrics,
                 "HOST:PORT for HTTP: Prometheus metrics at /metrics, its service discovery at "
                 "/targets, and /livez, /readyz, /startupz")
      ->capture_default_str();
  app.add_option("--metrics-tls-cert", flags.metrics_tls.certificate,
                 "With it --metrics speaks HTTPS: certificate, PEM, for this host; read again for "
                 "each connection [default: plain HTTP]")
      ->type_name("FILE");
  app.add_option("--metrics-tls-key", flags.metrics_tls.key, "Its private key, PEM")
      ->type_name("FILE");
  app.add_option("--metrics-tls-ca", flags.metrics_tls.client_authorities,
                 "Authorities that sign scrapers' certificates, PEM: without one a caller gets "
                 "/livez, /readyz and /startupz alone [default: anybody may scrape]")
      ->type_name("FILE");
  app.add_option("--data-dir", flags.data_dir,
                 "Directory of the durable state and of the file `address`; made when missing")
      ->type_name("DIR");
  app.add_option("--cluster-id", flags.cluster_id,
                 "Refuse a data directory of another cluster; names a new one (default: random)");
  app.add_option("--topology", flags.topology_file,
                 "YAML file that says in which zone, block, rack and NVLink domain workers are, "
                 "instead of their labels (docs/topology.md); read at the start")
      ->type_name("FILE");
  app.add_option(
         "--tls-cert", flags.tls.certificate,
         "The coordinator's certificate, PEM; read again when it changes. With --tls-key and "
         "--tls-ca every caller must prove who they are (docs/security.md)")
      ->type_name("FILE");
  app.add_option("--tls-key", flags.tls.key, "Its private key, PEM")->type_name("FILE");
  app.add_option("--tls-ca", flags.tls.authorities,
                 "Authorities that sign the certificates of workers and users, PEM; read again")
      ->type_name("FILE");
  app.add_option(
         "--tls-crl", flags.gate.crl,
         "What these authorities revoked, PEM; read again. A revoked certificate is refused "
         "within ten seconds")
      ->type_name("FILE");
  app.add_option("--access", flags.gate.access,
                 "YAML: roles of users and groups, and the issuer of identity tokens; read again")
      ->type_name("FILE");
  app.add_option("--calls-per-second", flags.gate.calls_per_second,
                 "Calls of one user; more are refused. 0 = no limit. Counts with TLS alone")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_flag("--insecure", flags.insecure,
               "Listen for other machines without TLS: anybody who reaches the port may run jobs");
  app.add_option("--log-level", level, "debug, info, warning or error")->capture_default_str();
  app.add_option("--log-format", format, "json (docs/logs.md), or text for people who read along")
      ->check(CLI::IsMember({"json", "text"}))
      ->capture_default_str();
  app.add_option(
         "--queues", flags.queues,
         "YAML file that defines the queues (docs/queues.md), applied at every start; without "
         "it they stay as they were last defined")
      ->type_name("FILE");
  app.add_option("--otlp-endpoint", flags.traces.endpoint,
                 "http://HOST:PORT or https://HOST:PORT of an OpenTelemetry collector that gets a "
                 "trace of each job (docs/monitoring.md)")
      ->type_name("URL");
  app.add_option("--otlp-ca", flags.traces.ca_file,
                 "Authorities that sign the certificate of an https:// collector, PEM; read again "
                 "after a failure [default: those of the system]")
      ->type_name("FILE");
  AddDuration(app, "--slow-rpc", flags.slow_rpc,
              "A call that takes so long is logged with the id of its trace (docs/monitoring.md)");
  AddDuration(app, "--heartbeat-interval", flags.core.heartbeat_interval,
              "How often daemons report at least");
  AddDuration(app, "--unreachable-after", flags.core.unreachable_after,
              "Silence after which a worker is UNREACHABLE; its ranks train on");
  AddDuration(app, "--lost-after", flags.core.lost_after,
              "Silence after which a worker is LOST and its jobs restart elsewhere");
  AddDuration(app, "--partition-hold", flags.core.partition_hold,
              "How long workers are not given up while most of them, or most of a zone, block or "
              "rack, are silent at once");
  AddDuration(app, "--stop-grace", flags.core.stop_grace,
              "From SIGTERM to SIGKILL when ranks are ended");
  AddDuration(app, "--progress-timeout", flags.core.progress_timeout,
              "A job that finishes no step for this long has hung and is restarted");
  app.add_flag("--describe-metrics", describe_metrics,
               "Print the catalogue of metrics as a Markdown table and exit");
  app.set_version_flag("--version", std::string("muster-coordinator ") + MUSTER_VERSION);
  CLI::App* verify = app.add_subcommand("verify", "Read a backup through and say what it holds");
  verify->add_option("BACKUP", backup, "Directory of the backup")->required();
  CLI::App* restore =
      app.add_subcommand("restore", "Make a new --data-dir from a backup, ready to be served");
  restore->add_option("BACKUP", backup, "Directory of the backup")->required();
  restore->fallthrough();
  CLI::App* replay = app.add_subcommand(
      "replay", "Fold the log of a snapshot or backup, and compare with its state");
  replay->add_option("FILE", replay_options.path, "A snapshot's file, or a backup")->required();
  replay->add_option("--from", replay_options.from, "An earlier one to begin with");
  replay->add_option("--until", replay_options.until, "The last entry of the log to fold");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  if (describe_metrics) {
    std::cout << metrics::DescribeFamilies(Metrics::Catalogue());
    return 0;
  }
  if (replay->parsed()) return RunReplay(replay_options);
  if (verify->parsed()) return RunTool([&backup] { return VerifyBackup(backup); });
  const absl::StatusOr<LogLevel> parsed = ParseLogLevel(level);
  if (!parsed.ok() || flags.data_dir.empty()) {
    std::cerr << (parsed.ok() ? "--data-dir is required" : std::string(parsed.status().message()))
              << "\nRun with --help for more information.\n";
    return 2;
  }
  if (flags.core.heartbeat_interval >= flags.core.unreachable_after ||
      flags.core.unreachable_after >= flags.core.lost_after ||
      flags.core.lost_after > flags.core.partition_hold) {
    std::cerr << "--heartbeat-interval must be below --unreachable-after, that below --lost-after, "
                 "and that not above --partition-hold\n";
    return 2;
  }
  if (restore->parsed()) {
    Rng rng(SystemSeed());
    return RunTool([&] { return RestoreBackup(backup, flags.data_dir, rng, absl::Now()); });
  }
  if (const absl::Status safe = CheckListen(flags); !safe.ok()) {
    std::cerr << "muster-coordinator: " << safe.message() << "\n";
    return 2;
  }
  if (!flags.topology_file.empty()) {
    if (const absl::Status read = ReadTopology(flags.topology_file, flags.core.topology);
        !read.ok()) {
      std::cerr << "muster-coordinator: --topology: " << read.message() << "\n";
      return 2;
    }
  }
  // gRPC's own log lines are not JSON. What matters is in the Status of calls, which is logged.
  setenv("GRPC_VERBOSITY", "NONE", /*overwrite=*/0);
  RaiseOpenFiles();
  StopSignal stop;
  const std::shared_ptr<Logger> log = Logger::ToStderr(
      *parsed, {.component = "coordinator"}, ParseLogFormat(format).value_or(LogFormat::kJson));
  const absl::Status status = Run(flags, *log, stop);
  if (status.ok()) return 0;
  log->Error("muster-coordinator ends with an error", {{"status", status.ToString()}});
  return 1;
}

}  // namespace
}  // namespace muster::coordinator

int main(int argc, char** argv) {
  muster::SkipLockOrderCheck();
  return muster::coordinator::Main(argc, argv);
}
