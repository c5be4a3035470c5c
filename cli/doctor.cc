#include "cli/doctor.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/statvfs.h>
#include <sys/timex.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "base/clock.h"
#include "base/network.h"
#include "base/shared_library.h"
#include "base/status_macros.h"

namespace muster::cli {
namespace {

constexpr int kSyncs = 25;
constexpr int kCudaNeeded = 13000;
constexpr int64_t kOpenFilesNeeded = 4096;
constexpr int64_t kSharedMemoryNeeded = int64_t{1} << 30;
constexpr int64_t kDiskNeeded = int64_t{5} << 30;
constexpr absl::Duration kSyncSlow = absl::Milliseconds(20);

constexpr absl::Duration kCertificateEndsSoon = absl::Hours(24 * 30);
constexpr int kPortsShown = 5;

using Level = Finding::Level;

int64_t Limit(int resource) {
  rlimit limit = {};
  if (::getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return -1;
  return static_cast<int64_t>(limit.rlim_cur);
}

// NVIDIA's management library, as far as it is asked here
// (https://docs.nvidia.com/deploy/nvml-api).
void AskDriver(MachineFacts& facts) {
  const absl::StatusOr<SharedLibrary> library = SharedLibrary::Open(
      "libnvidia-ml.so.1", {"/usr/local/nvidia/lib64", "/usr/lib64", "/usr/lib/x86_64-linux-gnu"});
  if (!library.ok()) {
    facts.driver = library.status();
    return;
  }
  int (*init)() = nullptr;
  int (*version)(char*, unsigned int) = nullptr;
  int (*cuda)(int*) = nullptr;
  int (*count)(unsigned int*) = nullptr;
  const absl::Status resolved = [&]() -> absl::Status {
    RETURN_IF_ERROR(library->Resolve("nvmlInit_v2", init));
    RETURN_IF_ERROR(library->Resolve("nvmlSystemGetDriverVersion", version));
    RETURN_IF_ERROR(library->Resolve("nvmlSystemGetCudaDriverVersion_v2", cuda));
    return library->Resolve("nvmlDeviceGetCount_v2", count);
  }();
  char text[96] = "";
  unsigned int gpus = 0;
  const int code = resolved.ok() ? init() : 0;
  if (!resolved.ok()) {
    facts.driver = resolved;
  } else if (code != 0 || version(text, sizeof(text)) != 0 || count(&gpus) != 0) {
    facts.driver = absl::UnavailableError(absl::StrCat(
        "the driver does not answer (NVML ", code, "); nvidia-smi and the kernel's log say more"));
  } else {
    facts.driver = std::string(text);
    facts.gpus = static_cast<int>(gpus);
    (void)cuda(&facts.cuda);
  }
}

absl::StatusOr<int64_t> SharedMemory() {
  struct statvfs disk = {};
  if (::statvfs("/dev/shm", &disk) != 0) {
    return absl::NotFoundError(absl::StrCat("/dev/shm: ", std::strerror(errno)));
  }
  if (::access("/dev/shm", W_OK) != 0) {
    return absl::PermissionDeniedError("/dev/shm cannot be written to by this user");
  }
  return static_cast<int64_t>(disk.f_blocks) * static_cast<int64_t>(disk.f_frsize);
}

// The median time of a synced write of 4 KiB to a file of `directory`.
absl::StatusOr<absl::Duration> TimeSync(const std::string& directory) {
  const std::string path = absl::StrCat(directory, "/.muster-doctor-", ::getpid());
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (file < 0) {
    return absl::PermissionDeniedError(absl::StrCat(directory, ": ", std::strerror(errno)));
  }
  (void)::unlink(path.c_str());
  const RealClock clock;
  const std::array<char, 4096> block = {};
  std::vector<absl::Duration> times;
  bool written = true;
  for (int i = 0; i < kSyncs && written; ++i) {
    const absl::Duration start = clock.Monotonic();
    written = ::write(file, block.data(), block.size()) == static_cast<ssize_t>(block.size()) &&
              ::fdatasync(file) == 0;
    times.push_back(clock.Monotonic() - start);
  }
  const int error = errno;
  ::close(file);
  if (!written) {
    return absl::UnavailableError(absl::StrCat(directory, ": ", std::strerror(error)));
  }
  std::nth_element(times.begin(), times.begin() + kSyncs / 2, times.end());
  return times[kSyncs / 2];
}

// Whether a service could listen on it, on any address of this machine.
absl::Status TryPort(int port) {
  const int listener = ::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int family = listener >= 0 ? AF_INET6 : AF_INET;
  const int fd = listener >= 0 ? listener : ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return absl::UnavailableError(std::strerror(errno));
  const int on = 1, off = 0;
  (void)::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  int bound = 0;
  if (family == AF_INET6) {
    (void)::setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
    sockaddr_in6 any = {};
    any.sin6_family = AF_INET6;
    any.sin6_port = htons(static_cast<uint16_t>(port));
    bound = ::bind(fd, reinterpret_cast<const sockaddr*>(&any), sizeof(any));
  } else {
    sockaddr_in any = {};
    any.sin_family = AF_INET;
    any.sin_port = htons(static_cast<uint16_t>(port));
    bound = ::bind(fd, reinterpret_cast<const sockaddr*>(&any), sizeof(any));
  }
  absl::Status status;
  if (bound != 0 || ::listen(fd, 1) != 0) status = absl::UnavailableError(std::strerror(errno));
  ::close(fd);
  return status;
}

absl::Status TryPorts(const std::string& list, std::map<int, absl::Status>& taken) {
  for (const absl::string_view item : absl::StrSplit(list, ',', absl::SkipEmpty())) {
    const absl::StatusOr<PortRange> range = PortRange::Parse(std::string(item));
    if (!range.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("--ports: '", item, "' is no port and no range such as 20000-20999"));
    }
    for (int port = range->first; port <= range->last; ++port) {
      if (absl::Status status = TryPort(port); !status.ok()) taken[port] = std::move(status);
    }
  }
  return absl::OkStatus();
}

// Of Linux: two numbers.
PortRange EphemeralPorts() {
  PortRange range;
  std::ifstream file("/proc/sys/net/ipv4/ip_local_port_range");
  file >> range.first >> range.last;
  return range;
}

absl::StatusOr<std::map<std::string, security::Validity>> LookAtTls(
    const security::TlsFiles& files) {
  RETURN_IF_ERROR(security::CheckClientFiles(files, absl::Now()));
  return security::ReadValidities(files);
}

Finding Ok(std::string check, std::string found) {
  return {Level::kOk, std::move(check), std::move(found), ""};
}

std::string Milliseconds(absl::Duration duration) {
  return absl::StrCat(absl::FormatDuration(absl::Trunc(duration, absl::Microseconds(1))));
}

Finding ExamineDriver(const MachineFacts& facts) {
  if (absl::IsNotFound(facts.driver.status())) {
    return Ok("driver", "no NVIDIA driver: this machine offers CPU slots");
  }
  if (!facts.driver.ok()) {
    return {Level::kError, "driver", std::string(facts.driver.status().message()),
            "reload the driver or restart the machine"};
  }
  const std::string found = absl::StrCat(*facts.driver, ", ", facts.gpus, " GPUs, CUDA ",
                                         facts.cuda / 1000, ".", facts.cuda % 1000 / 10);
  if (facts.cuda < kCudaNeeded) {
    return {Level::kError, "driver", found, "install driver 580 or newer, which has CUDA 13"};
  }
  if (facts.gpus == 0) {
    return {Level::kWarning, "driver", found,
            "no GPU is visible: look at nvidia-smi and, in a container, at its GPU request"};
  }
  return Ok("driver", found);
}

Finding ExamineLibraries(const MachineFacts& facts) {
  if (!facts.driver.ok() || facts.gpus == 0) return Ok("libraries", "not needed without GPUs");
  std::vector<std::string> missing;
  for (const auto& [name, status] : facts.libraries) {
    if (!status.ok()) missing.push_back(name);
  }
  if (missing.empty()) return Ok("libraries", "cuBLASLt, cuDNN and NCCL are found");
  // Our own attention kernels serve without cuDNN.
  const bool only_cudnn = missing.size() == 1 && missing[0] == "libcudnn.so.9";
  return {only_cudnn ? Level::kWarning : Level::kError, "libraries",
          absl::StrCat("missing: ", absl::StrJoin(missing, ", ")),
          "pip install nvidia-cublas nvidia-cudnn-cu13 nvidia-nccl-cu13, or put their folders into "
          "LD_LIBRARY_PATH of the daemon"};
}

Finding ExamineLocked(const MachineFacts& facts) {
  if (facts.locked_memory_max < 0) return Ok("memlock", "unlimited");
  const std::string found = Bytes(facts.locked_memory_max);
  if (facts.gpus == 0) return Ok("memlock", absl::StrCat(found, ", enough without GPUs"));
  return {Level::kWarning, "memlock", found,
          "RDMA falls back to TCP: ulimit -l unlimited, LimitMEMLOCK=infinity of the unit or of "
          "the container runtime's"};
}

Finding ExamineFiles(const MachineFacts& facts) {
  if (facts.open_files_max < 0) return Ok("files", "unlimited");
  const std::string found = absl::StrCat(facts.open_files_max, " open files");
  if (facts.open_files_max >= kOpenFilesNeeded) return Ok("files", found);
  return {Level::kWarning, "files", found,
          absl::StrCat("ulimit -n ", kOpenFilesNeeded, " or more, LimitNOFILE of the unit")};
}

Finding ExamineShared(const MachineFacts& facts) {
  constexpr char kRemedy[] =
      "mount /dev/shm larger: --shm-size of a container, workerDefaults.sharedMemory of the chart";
  if (!facts.shared_memory.ok()) {
    return {Level::kError, "shm", std::string(facts.shared_memory.status().message()), kRemedy};
  }
  const std::string found = absl::StrCat("/dev/shm has ", Bytes(*facts.shared_memory));
  if (*facts.shared_memory >= kSharedMemoryNeeded) return Ok("shm", found);
  return {facts.gpus > 0 ? Level::kError : Level::kWarning, "shm", found, kRemedy};
}

Finding ExamineSync(const MachineFacts& facts) {
  if (!facts.sync.ok()) {
    return {Level::kError, "disk", std::string(facts.sync.status().message()),
            "give the state a directory that this user can write to"};
  }
  const std::string found =
      absl::StrCat(facts.directory, ": a synced write takes ", Milliseconds(*facts.sync), ", ",
                   Bytes(facts.disk_free), " of ", Bytes(facts.disk_size), " are free");
  if (*facts.sync > kSyncSlow) {
    return {Level::kWarning, "disk", found,
            "put --data-dir and --state-dir on a local SSD: submissions and commits wait for it"};
  }
  if (facts.disk_free < kDiskNeeded) {
    return {Level::kWarning, "disk", found, "make room, or choose another disk"};
  }
  return Ok("disk", found);
}

Finding ExamineNetwork(const MachineFacts& facts) {
  if (facts.outside_address.empty()) {
    return {Level::kWarning, "address", "no address but loopback",
            "gangs over several hosts need one; --interface or --address of the daemon choose it"};
  }
  return Ok("address",
            absl::StrCat(facts.outside_address, " is told to others; --interface chooses another"));
}

Finding ExamineName(const MachineFacts& facts) {
  if (facts.host_addresses.empty()) {
    return {Level::kWarning, "dns", absl::StrCat("the name ", facts.host, " is not found"),
            "add it to /etc/hosts or DNS; ranks use addresses, people and scripts use names"};
  }
  return Ok("dns", absl::StrCat(facts.host, " is ", absl::StrJoin(facts.host_addresses, ", ")));
}

Finding ExaminePorts(const MachineFacts& facts) {
  if (facts.ports.empty()) return Ok("ports", "none were named: --ports 7600,20000-20999");
  if (!facts.taken_ports.empty()) {
    std::vector<std::string> some;
    for (const auto& [port, status] : facts.taken_ports) {
      if (some.size() == kPortsShown) {
        some.push_back(absl::StrCat(facts.taken_ports.size() - kPortsShown, " more"));
        break;
      }
      some.push_back(absl::StrCat(port, " (", status.message(), ")"));
    }
    return {
        Level::kWarning, "ports",
        absl::StrCat("cannot be listened on: ", absl::StrJoin(some, ", ")),
        "end what listens there (ss -ltnp), or choose others: --listen, --metrics, --rank-ports"};
  }
  for (const absl::string_view item : absl::StrSplit(facts.ports, ',', absl::SkipEmpty())) {
    const PortRange range = PortRange::Parse(std::string(item)).value_or(PortRange{});
    if (range.first <= facts.ephemeral_ports.last && range.last >= facts.ephemeral_ports.first) {
      return {Level::kWarning, "ports",
              absl::StrCat(item, " is free, and within ", facts.ephemeral_ports.ToString(),
                           ", from which outgoing connections take theirs"),
              "choose others, or keep them free: sysctl net.ipv4.ip_local_reserved_ports"};
    }
  }
  return Ok("ports", absl::StrCat(facts.ports, " can be listened on"));
}

Finding ExamineTls(const MachineFacts& facts) {
  if (!facts.tls.has_value()) {
    return Ok("tls", "none was named: --tls-ca, --tls-cert, --tls-key or $MUSTER_TLS_...");
  }
  if (!facts.tls->ok()) {
    return {Level::kError, "tls", std::string(facts.tls->status().message()),
            "docs/security.md says what the files are; muster admin pki issues them"};
  }
  std::string first_flag;
  absl::Time first_end = absl::InfiniteFuture();
  for (const auto& [flag, validity] : **facts.tls) {
    if (validity.not_after >= first_end) continue;
    first_end = validity.not_after;
    first_flag = flag;
  }
  const std::string found =
      absl::StrCat("--", first_flag, " is good until ",
                   absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", first_end, absl::UTCTimeZone()));
  if (first_end <= facts.now) {
    return {Level::kError, "tls", absl::StrCat("--", first_flag, " has ended"),
            "muster admin pki rotate, or your authority, issues another"};
  }
  if (first_end < facts.now + kCertificateEndsSoon) {
    return {Level::kWarning, "tls", found, "muster admin pki rotate issues again what ends soon"};
  }
  return Ok("tls", found);
}

Finding ExamineJobUser(const MachineFacts& facts) {
  if (facts.job_user.empty()) return Ok("job-user", "ranks run as the daemon's user");
  if (facts.job_user_state.ok()) {
    return Ok("job-user",
              absl::StrCat("a daemon of this user can run ranks with --job-user ", facts.job_user));
  }
  return {Level::kError, "job-user", std::string(facts.job_user_state.message()),
          "docs/security.md says which accounts and capabilities it takes"};
}

Finding ExamineCoordinator(const MachineFacts& facts) {
  if (!facts.coordinator.has_value()) {
    return Ok("coordinator", "none was named: --coordinator or $MUSTER_COORDINATOR");
  }
  if (!facts.coordinator->ok()) {
    return {Level::kError, "coordinator", std::string(facts.coordinator->status().message()),
            "is it up (its /livez), and does a firewall let this machine reach its port?"};
  }
  const std::string& version = **facts.coordinator;
  const std::string found = absl::StrCat(facts.coordinator_address, " answers, version ", version);
  if (version == facts.version) return Ok("coordinator", found);
  return {Level::kWarning, "coordinator", absl::StrCat(found, "; this is ", facts.version),
          "upgrade the coordinator first, then the workers"};
}

}  // namespace

absl::StatusOr<MachineFacts> GatherFacts(const DoctorOptions& options) {
  const std::string& directory = options.directory;
  MachineFacts facts;
  RETURN_IF_ERROR(TryPorts(options.ports, facts.taken_ports));
  facts.ports = options.ports;
  facts.ephemeral_ports = EphemeralPorts();
  facts.now = absl::Now();
  if (options.tls.any()) facts.tls = LookAtTls(options.tls);
  facts.job_user = options.job_user.user;
  facts.job_user_state = security::CheckJobUser(options.job_user);
  if (facts.job_user.empty() && !facts.job_user_state.ok()) facts.job_user = "(none)";
  AskDriver(facts);
  if (facts.driver.ok()) {
    for (const char* name : {"libcublasLt.so.13", "libcudnn.so.9", "libnccl.so.2"}) {
      facts.libraries[name] = SharedLibrary::Open(name, NvidiaLibraryDirectories()).status();
    }
  }
  facts.open_files_max = Limit(RLIMIT_NOFILE);
  facts.locked_memory_max = Limit(RLIMIT_MEMLOCK);
  facts.shared_memory = SharedMemory();
  facts.directory = directory;
  facts.sync = TimeSync(directory);
  struct statvfs disk = {};
  if (::statvfs(directory.c_str(), &disk) == 0) {
    facts.disk_free = static_cast<int64_t>(disk.f_bavail) * static_cast<int64_t>(disk.f_frsize);
    facts.disk_size = static_cast<int64_t>(disk.f_blocks) * static_cast<int64_t>(disk.f_frsize);
  }
  timex clock = {};
  facts.clock_synchronized = ::adjtimex(&clock) >= 0 && (clock.status & STA_UNSYNC) == 0;
  char host[256] = "";
  (void)::gethostname(host, sizeof(host) - 1);
  facts.host = host;
  const NetworkView network = NetworkView::OfThisMachine();
  facts.host_addresses = network.resolve(facts.host);
  facts.outside_address = OutsideAddress(network);
  return facts;
}

std::vector<Finding> Examine(const MachineFacts& facts) {
  const Finding clock =
      facts.clock_synchronized
          ? Ok("clock", "synchronized")
          : Finding{Level::kWarning, "clock", "not synchronized",
                    "run chrony or systemd-timesyncd: times in logs and events are the machine's"};
  return {ExamineDriver(facts),
          ExamineLibraries(facts),
          ExamineLocked(facts),
          ExamineFiles(facts),
          ExamineShared(facts),
          ExamineSync(facts),
          clock,
          ExamineNetwork(facts),
          ExamineName(facts),
          ExaminePorts(facts),
          ExamineTls(facts),
          ExamineJobUser(facts),
          ExamineCoordinator(facts)};
}

absl::Status Report(const std::vector<Finding>& findings, Format format, Terminal& terminal) {
  static constexpr const char* kLevels[] = {"ok", "warning", "error"};
  int errors = 0;
  Json list = Json::array();
  std::vector<std::vector<std::string>> rows = {{"CHECK", "STATE", "FOUND"}};
  for (const Finding& finding : findings) {
    const std::string level = kLevels[static_cast<int>(finding.level)];
    errors += finding.level == Level::kError ? 1 : 0;
    list.push_back({{"check", finding.check},
                    {"state", level},
                    {"found", finding.found},
                    {"remedy", finding.remedy}});
    rows.push_back({finding.check, level,
                    finding.remedy.empty() ? finding.found
                                           : absl::StrCat(finding.found, "; ", finding.remedy)});
  }
  if (format == Format::kTable) {
    terminal.out << Table(rows);
  } else {
    Print(list, format, terminal.out);
  }
  if (errors == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(errors, errors == 1 ? " check fails" : " checks fail"));
}

}  // namespace muster::cli
