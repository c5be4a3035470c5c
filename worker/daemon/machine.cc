#include "worker/daemon/machine.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace muster::worker {
namespace {

// Node numbers, ascending; empty when the kernel does not tell.
std::vector<int> NumaNodes() {
  std::vector<int> nodes;
  std::error_code error;
  for (std::filesystem::directory_iterator it("/sys/devices/system/node", error), end;
       !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    int node = 0;
    if (absl::StartsWith(name, "node") && absl::SimpleAtoi(name.substr(4), &node)) {
      nodes.push_back(node);
    }
  }
  std::sort(nodes.begin(), nodes.end());
  return nodes;
}

}  // namespace

std::vector<v1::Device> CpuSlots(int slots) {
  const std::vector<int> nodes = NumaNodes();
  const int64_t memory = static_cast<int64_t>(::sysconf(_SC_PHYS_PAGES)) * ::sysconf(_SC_PAGE_SIZE);
  std::vector<v1::Device> devices;
  for (int slot = 0; slot < slots; ++slot) {
    v1::Device& device = devices.emplace_back();
    device.set_name(absl::StrCat("cpu:", slot));
    device.set_kind(v1::DEVICE_KIND_CPU);
    device.set_memory_bytes(memory / slots);
    device.set_numa_node(nodes.empty() ? -1
                                       : nodes[static_cast<size_t>(slot) * nodes.size() / slots]);
  }
  return devices;
}

int UsableCpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
  return std::max(1, CPU_COUNT(&set));
}

std::string HostName() {
  char name[256] = {};
  if (::gethostname(name, sizeof(name) - 1) != 0) return "unknown";
  return name;
}

}  // namespace muster::worker
