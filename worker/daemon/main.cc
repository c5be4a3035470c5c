// muster-worker: the daemon of one machine. Builds the objects, prints where it is, waits for a
// signal. Run as `muster-worker shim ...` (by the daemon itself) it supervises one rank instead, as
// `muster-worker command ...` (by a shim) it is a rank that runs a command (command_rank.h), as
// `muster-worker supervise ...` it is pid 1 of a container (supervise.h).
#include <signal.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/file_system.h"
#include "base/log.h"
#include "base/metrics.h"
#include "base/probes.h"
#include "security/tls_files.h"
#include "worker/command/command_rank.h"
#include "worker/daemon/daemon.h"
#include "worker/daemon/machine.h"
#include "worker/daemon/metrics.h"
#include "worker/daemon/shim.h"
#include "worker/daemon/shim_server.h"
#include "worker/daemon/supervise.h"
#include "worker/run_directory/run_directory.h"

namespace muster::worker {
namespace {

struct Flags {
  DaemonOptions daemon;
  std::string metrics = "127.0.0.1:0";
  std::string gpus = "all";
  std::vector<std::string> labels;
  std::string log_level = "info";
  std::string log_format = "json";
  double stop_grace_s = 10;
  bool stop_ranks_on_exit = false;
  bool describe_metrics = false;
};

void Declare(CLI::App& app, Flags& flags) {
  app.set_version_flag("--version", std::string("muster-worker ") + MUSTER_VERSION);
  app.add_option("--coordinator", flags.daemon.coordinator,
                 "Coordinator: HOST:PORT, or file:PATH of a file that holds it (read again before "
                 "each connection)")
      ->envname("MUSTER_COORDINATOR");
  app.add_option("--tls-cert", flags.daemon.tls.certificate,
                 "This worker's certificate, PEM, which names it; read again when it changes "
                 "(docs/security.md)")
      ->envname("MUSTER_TLS_CERT")
      ->type_name("FILE");
  app.add_option("--tls-key", flags.daemon.tls.key, "Its private key, PEM")
      ->envname("MUSTER_TLS_KEY")
      ->type_name("FILE");
  app.add_option("--tls-ca", flags.daemon.tls.authorities,
                 "Authorities that sign the coordinator's certificate, PEM; read again")
      ->envname("MUSTER_TLS_CA")
      ->type_name("FILE");
  app.add_option("--tls-server-name", flags.daemon.tls_server_name,
                 "Name in the coordinator's certificate [default: the host of --coordinator]")
      ->envname("MUSTER_TLS_SERVER_NAME");
  app.add_flag("--insecure", flags.daemon.insecure,
               "Without TLS obey a coordinator on another machine, too: anybody on the way may run "
               "programs here");
  app.add_option("--name", flags.daemon.name,
                 "Name of this worker, unique in the cluster and stable over restarts "
                 "[default: the host's name]");
  app.add_option("--state-dir", flags.daemon.state_directory,
                 "Directory for what must survive a restart: records, rank logs, the ranks' "
                 "socket; one daemon at a time");
  app.add_option("--slots", flags.daemon.slots, "CPU slots to offer; each runs one rank")
      ->capture_default_str();
  app.add_option("--gpus", flags.gpus,
                 "GPUs to offer, each to one rank: all, none, or ordinals such as 0,1")
      ->capture_default_str();
  app.add_flag(
      "--mps", flags.daemon.mps,
      "An MPS control daemon runs for the GPUs: it holds ranks that share one "
      "(resources.share) to their shares of multiprocessors and memory (docs/operations.md)");
  app.add_option("--address", flags.daemon.address.address,
                 "IP address of this machine at which ranks of other workers reach those here "
                 "[default: that of the route to the coordinator]");
  app.add_option("--interface", flags.daemon.address.interface,
                 "The same by the name of a network interface (eth0), by a network (10.0.0.0/8) or "
                 "by an address");
  app.add_option("--rank-ports", flags.daemon.rank_ports,
                 "FIRST-LAST: ports for ranks to listen on, for firewalls; two for each device "
                 "[default: the system picks]");
  app.add_option("--host-id", flags.daemon.host_id,
                 "Ranks share memory and GPU links only with ranks of the same id "
                 "[default: the machine's boot id]");
  app.add_option("--label", flags.labels,
                 "NAME=VALUE: a label of this worker; may be repeated. zone, block, rack and "
                 "nvlink-domain say where it is, so that gangs are placed close together")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->allow_extra_args(false);
  app.add_option("--topology", flags.daemon.topology_file,
                 "YAML file with labels and with the links of this machine's devices, where the "
                 "driver does not tell them (docs/topology.md)")
      ->type_name("FILE");
  app.add_option("--secrets", flags.daemon.files.secrets_directory,
                 "Directory with a file for each secret that jobs may refer to as ${secret:NAME}, "
                 "of mode 0400; in folders named after queues for their jobs alone "
                 "(docs/security.md)")
      ->type_name("DIR");
  app.add_option("--allow-path", flags.daemon.files.allowed_paths,
                 "Directory in which a job's working_directory and checkpoint.path may lie, links "
                 "followed; may be repeated [default: anywhere]")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->allow_extra_args(false)
      ->type_name("DIR");
  app.add_option(
         "--job-user", flags.daemon.user.user,
         "Account as which ranks run, or owner: that of the user who submitted the job; the "
         "daemon must be root (docs/security.md) [default: the daemon's own user]")
      ->type_name("NAME");
  app.add_option("--job-user-map", flags.daemon.user.map_file,
                 "For --job-user owner: file with lines IDENTITY ACCOUNT, * for all others; read "
                 "again for each start [default: accounts have the names of identities]")
      ->type_name("FILE");
  app.add_option("--job-uid-min", flags.daemon.user.lowest_uid,
                 "For --job-user owner: accounts with a lower uid are refused")
      ->capture_default_str();
  app.add_option("--metrics", flags.metrics,
                 "HOST:PORT for HTTP: Prometheus metrics at /metrics, and /livez, /readyz, "
                 "/startupz; port 0 = the system picks")
      ->capture_default_str();
  app.add_option("--metrics-tls-cert", flags.daemon.metrics_tls.certificate,
                 "With it --metrics speaks HTTPS: certificate, PEM, for this host; ranks take it, "
                 "too (with --job-user they listen on loopback instead); read again for each "
                 "connection [default: plain HTTP]")
      ->type_name("FILE");
  app.add_option("--metrics-tls-key", flags.daemon.metrics_tls.key, "Its private key, PEM")
      ->type_name("FILE");
  app.add_option("--metrics-tls-ca", flags.daemon.metrics_tls.client_authorities,
                 "Authorities that sign scrapers' certificates, PEM: without one a caller gets "
                 "/livez, /readyz and /startupz alone [default: anybody may scrape]")
      ->type_name("FILE");
  app.add_option("--rank-binary", flags.daemon.rank_binary,
                 "Rank program [default: muster-rank beside this program]");
  app.add_option("--stop-grace", flags.stop_grace_s,
                 "Seconds from SIGTERM to SIGKILL for a rank, where the job does not say")
      ->capture_default_str();
  app.add_flag("--stop-ranks-on-exit", flags.stop_ranks_on_exit,
               "On SIGTERM end the ranks too. Without it they train on, and the next daemon on "
               "the same state directory takes them over");
  app.add_option("--log-level", flags.log_level, "debug, info, warning or error")
      ->capture_default_str();
  app.add_option("--log-format", flags.log_format,
                 "json (docs/logs.md), or text for people who read along; of the daemon and of its "
                 "ranks' own lines")
      ->check(CLI::IsMember({"json", "text"}))
      ->capture_default_str();
  app.add_option("--log-bytes-max", flags.daemon.log.bytes_max,
                 "Bytes of one log file of a rank before the next is begun")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  app.add_option("--log-files-max", flags.daemon.log.files_max, "Log files kept per rank")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  app.add_flag("--describe-metrics", flags.describe_metrics,
               "Print a table of the metrics and exit");
}

int Complain(const std::string& message) {
  std::cerr << "muster-worker: " << message << "\n";
  return 1;
}

absl::StatusOr<std::optional<GpuOptions>> ParseGpus(const std::string& text) {
  if (text == "none") return std::nullopt;
  GpuOptions options = GpuOptions::FromEnvironment();
  if (text == "all") return options;
  std::vector<int>& offered = options.offered.emplace();
  for (absl::string_view item : absl::StrSplit(text, ',')) {
    if (!absl::SimpleAtoi(item, &offered.emplace_back()) || offered.back() < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("--gpus: '", text, "' is not all, none or a list of ordinals"));
    }
  }
  return options;
}

int Serve(Flags& flags, const std::string& self) {
  if (flags.daemon.coordinator.empty() || flags.daemon.state_directory.empty()) {
    std::cerr << "muster-worker: --coordinator and --state-dir are needed; see --help\n";
    return 2;
  }
  if (flags.daemon.name.empty()) flags.daemon.name = HostName();
  if (flags.daemon.rank_binary.empty()) {
    flags.daemon.rank_binary = std::filesystem::path(self).parent_path() / "muster-rank";
  }
  flags.daemon.shim_binary = self;
  if (flags.daemon.tls.any()) {
    absl::Status files = security::CheckClientFiles(flags.daemon.tls, absl::Now());
    if (files.ok() && flags.daemon.tls.certificate.empty()) {
      files = absl::InvalidArgumentError(
          "--tls-ca needs --tls-cert and --tls-key beside it: a worker's certificate names it");
    }
    if (!files.ok()) return Complain(std::string(files.message()));
  }
  absl::StatusOr<std::optional<GpuOptions>> gpus = ParseGpus(flags.gpus);
  if (!gpus.ok()) return Complain(std::string(gpus.status().message()));
  flags.daemon.gpus = *std::move(gpus);
  for (const std::string& label : flags.labels) {
    const size_t cut = label.find('=');
    if (cut == 0 || cut == std::string::npos) {
      return Complain("--label: '" + label + "' is not NAME=VALUE");
    }
    flags.daemon.labels[label.substr(0, cut)] = label.substr(cut + 1);
  }
  if (const std::string& path = flags.daemon.topology_file; !path.empty()) {
    const absl::StatusOr<std::string> text = PosixFileSystem()->Read(path);
    if (!text.ok()) return Complain("--topology: " + std::string(text.status().message()));
    absl::StatusOr<spec::MachineTopology> topology = spec::ParseMachineTopology(*text, path);
    if (!topology.ok()) return Complain("--topology: " + std::string(topology.status().message()));
    flags.daemon.topology = *std::move(topology);
  }
  flags.daemon.version = MUSTER_VERSION;
  flags.daemon.stop_grace = absl::Seconds(flags.stop_grace_s);
  const absl::StatusOr<LogLevel> level = ParseLogLevel(flags.log_level);
  if (!level.ok()) return Complain(std::string(level.status().message()));
  const absl::StatusOr<LogFormat> format = ParseLogFormat(flags.log_format);
  if (!format.ok()) return Complain(std::string(format.status().message()));
  if (*format == LogFormat::kText) flags.daemon.rank_log_format = flags.log_format;
  const std::shared_ptr<Logger> log =
      Logger::ToStderr(*level, {.component = "worker", .worker = flags.daemon.name}, *format);
  const RealClock clock;
  absl::StatusOr<std::unique_ptr<metrics::PrometheusServer>> metrics =
      metrics::PrometheusServer::Start(flags.metrics, flags.daemon.metrics_tls);
  if (!metrics.ok()) return Complain(std::string(metrics.status().message()));
  flags.daemon.metrics_address = (*metrics)->address();
  (*metrics)->registry().GetGauge(kBuildInfo, {MUSTER_VERSION}).Set(1);
  Probes probes(clock);
  (*metrics)->SetPages(probes.Pages());
  const absl::Cleanup remove_pages = [&metrics] { (*metrics)->SetPages({}); };
  bool fatal = false;
  // Wakes the wait below; written before the signal, read after it.
  flags.daemon.on_fatal = [&fatal](const absl::Status&) {
    fatal = true;
    ::kill(::getpid(), SIGTERM);
  };
  absl::StatusOr<std::unique_ptr<Daemon>> daemon =
      Daemon::Start(flags.daemon, clock, (*metrics)->registry(), log, &probes);
  if (!daemon.ok()) return Complain(std::string(daemon.status().message()));

  probes.Started();
  nlohmann::ordered_json line;
  line["name"] = flags.daemon.name;
  line["pid"] = ::getpid();
  line["metrics"] =
      Advertised(flags.daemon.metrics_address, OutsideAddress(NetworkView::OfThisMachine()));
  line["socket"] = (*daemon)->socket();
  line["state_dir"] = (*daemon)->state_directory();
  std::cout << line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace)
            << std::endl;

  sigset_t stop;
  sigemptyset(&stop);
  sigaddset(&stop, SIGTERM);
  sigaddset(&stop, SIGINT);
  int received = 0;
  ::sigwait(&stop, &received);
  log->Info("stopping", {{"signal", received}, {"stop_ranks", flags.stop_ranks_on_exit}});
  if (flags.stop_ranks_on_exit && !fatal) (*daemon)->EndRanks();
  daemon->reset();
  return fatal ? 1 : 0;
}

int Main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  if (arguments.size() == 2 && arguments[0] == kCommandVerb) return RunCommandRank(arguments[1]);
  if (!arguments.empty() && arguments[0] == kShimVerb) {
    return RunShim(ParseShimArguments(arguments));
  }

  std::error_code error;
  const std::string self = std::filesystem::read_symlink("/proc/self/exe", error).string();
  if (error) return Complain("cannot read /proc/self/exe: " + error.message());
  if (!arguments.empty() && arguments[0] == kShimServerVerb) {
    return RunShimServer(argc, argv, [&self](const std::vector<std::string>& command) {
      const bool here = command.size() == 3 && command[0] == self && command[1] == kCommandVerb;
      return here ? std::function<int()>([&command] { return RunCommandRank(command[2]); })
                  : nullptr;
    });
  }
  if (!arguments.empty() && arguments[0] == "supervise") {
    return Supervise(self, {arguments.begin() + 1, arguments.end()});
  }

  // Blocked before any thread starts, so that only the wait in Serve takes them.
  sigset_t stop;
  sigemptyset(&stop);
  sigaddset(&stop, SIGTERM);
  sigaddset(&stop, SIGINT);
  ::pthread_sigmask(SIG_BLOCK, &stop, nullptr);
  ::signal(SIGPIPE, SIG_IGN);

  Flags flags;
  CLI::App app(
      "The Muster worker daemon: runs the ranks that the coordinator gives this machine. As "
      "`muster-worker supervise FLAGS` it is pid 1 of a container, which starts a daemon that "
      "ended by itself again while its ranks train on.");
  Declare(app, flags);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  if (flags.describe_metrics) {
    std::cout << metrics::DescribeFamilies(WorkerFamilies());
    return 0;
  }
  return Serve(flags, self);
}

}  // namespace
}  // namespace muster::worker

int main(int argc, char** argv) { return muster::worker::Main(argc, argv); }
