#include "cli/doctor.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/timex.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
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

MachineFacts GatherFacts(const std::string& directory) {
  MachineFacts facts;
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
