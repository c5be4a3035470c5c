// Discovery of GPUs against a management library of our own (fake_nvml.cc).
#include "worker/daemon/gpus.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/clock.h"
#include "base/metrics.h"
#include "base/mutex.h"
#include "tests/support/temporary_directory.h"
#include "worker/daemon/gpu_memory.h"
#include "worker/daemon/gpu_sampler.h"
#include "worker/daemon/gpu_watch.h"

namespace muster::worker {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class Gpus : public ::testing::Test {
 protected:
  Gpus() {
    options_.library = FAKE_NVML_LIBRARY;
    options_.sysfs = directory_ / "sys";
    options_.cuda_major = 13;
    options_.architectures = "80-real,90a-real";
  }
  ~Gpus() override { ::unsetenv("FAKE_NVML"); }

  GpuReport Discover(const std::string& machine) {
    ::setenv("FAKE_NVML", machine.c_str(), 1);
    return DiscoverGpus(options_);
  }
  static std::vector<std::string> Uuids(const GpuReport& report) {
    std::vector<std::string> uuids;
    for (const v1::Device& device : report.devices) uuids.push_back(device.uuid());
    return uuids;
  }

  muster::testing::TemporaryDirectory directory_;
  GpuOptions options_;
};

TEST_F(Gpus, FourBehindSwitches_AreDescribedWithAllLinksToEachOther) {
  const std::string device = absl::StrCat(options_.sysfs, "/bus/pci/devices/0000:1b:00.0");
  std::filesystem::create_directories(device);
  std::ofstream(device + "/numa_node") << "1\n";
  const GpuReport report = Discover("gpus=4");
  EXPECT_THAT(report.warnings, IsEmpty());
  EXPECT_EQ(report.driver, "580.1.2");
  ASSERT_EQ(report.devices.size(), 4u);
  const v1::Device& second = report.devices[1];
  EXPECT_EQ(second.name(), "cuda:1");
  EXPECT_EQ(second.kind(), v1::DEVICE_KIND_CUDA);
  EXPECT_EQ(second.uuid(), "GPU-10000000-aaaa");
  EXPECT_EQ(second.model(), "NVIDIA Fake");
  EXPECT_EQ(second.memory_bytes(), int64_t{80} << 30);
  EXPECT_EQ(second.pci_address(), "00000000:1b:00.0");
  EXPECT_EQ(second.numa_node(), 1);
  EXPECT_EQ(report.devices[0].numa_node(), -1);
  EXPECT_EQ(second.unusable(), "");
  ASSERT_EQ(second.nvlinks().size(), 3u);
  for (const char* peer : {"cuda:0", "cuda:2", "cuda:3"}) EXPECT_EQ(second.nvlinks().at(peer), 18);
}

TEST_F(Gpus, PcieSwitches_AreThoseOfTheKernelOrOfTheDriver) {
  // As /sys/bus/pci/devices links to the bridges above a device; the last is below no switch.
  const auto link = [&](const std::string& address, const std::string& bridges) {
    const std::string path = absl::StrCat(options_.sysfs, "/devices/pci0000:17/", bridges, address);
    std::filesystem::create_directories(path);
    std::filesystem::create_directories(options_.sysfs + "/bus/pci/devices");
    std::filesystem::create_directory_symlink(
        path, absl::StrCat(options_.sysfs, "/bus/pci/devices/", address));
  };
  link("0000:1a:00.0", "0000:17:01.0/0000:18:00.0/0000:19:00.0/");
  link("0000:1b:00.0", "0000:17:01.0/0000:18:00.0/0000:19:01.0/");
  link("0000:1c:00.0", "0000:17:02.0/");
  const GpuReport report = Discover("gpus=3");
  ASSERT_EQ(report.devices.size(), 3u);
  EXPECT_EQ(report.devices[0].pcie_switch(), "0000:17:01.0");
  EXPECT_EQ(report.devices[1].pcie_switch(), "0000:17:01.0");
  EXPECT_EQ(report.devices[2].pcie_switch(), "");
  options_.sysfs += "/absent";
  const GpuReport by_driver = Discover("gpus=4 below_switch=2");
  ASSERT_EQ(by_driver.devices.size(), 4u);
  EXPECT_EQ(by_driver.devices[0].pcie_switch(), "00000000:1a:00.0");
  EXPECT_EQ(by_driver.devices[1].pcie_switch(), "00000000:1a:00.0");
  EXPECT_EQ(by_driver.devices[2].pcie_switch(), "00000000:1c:00.0");
  EXPECT_EQ(by_driver.devices[3].pcie_switch(), "00000000:1c:00.0");
}

TEST_F(Gpus, UsedMemory_IsToldByTheNameOfTheDevice) {
  const GpuReport report = Discover("gpus=2 used=700");
  const std::unique_ptr<GpuMemory> memory = GpuMemory::Open(options_.library, report.devices);
  ASSERT_NE(memory, nullptr);
  EXPECT_EQ(memory->UsedBytes("cuda:1"), int64_t{700} << 20);
  EXPECT_EQ(memory->UsedBytes("cuda:2"), std::nullopt);
  ::setenv("FAKE_NVML", "gpus=2 lost=1", 1);
  EXPECT_EQ(memory->UsedBytes("cuda:1"), std::nullopt) << "it does not answer";
  EXPECT_EQ(GpuMemory::Open("/nonexistent/library.so", report.devices), nullptr);
}

TEST_F(Gpus, DirectLinks_CountForTheirPeerAlone) {
  const GpuReport report = Discover("gpus=3 links=4 switches=0");
  ASSERT_EQ(report.devices.size(), 3u);
  ASSERT_EQ(report.devices[0].nvlinks().size(), 1u);
  EXPECT_EQ(report.devices[0].nvlinks().at("cuda:1"), 4);
}

TEST_F(Gpus, NoDriver_IsNoGpuAndNoWarning) {
  options_.library = "libmuster-absent.so.1";
  const GpuReport report = Discover("");
  EXPECT_THAT(report.devices, IsEmpty());
  EXPECT_THAT(report.warnings, IsEmpty());
}

TEST_F(Gpus, DriverThatCannotBeLoaded_IsAWarning) {
  options_.library = ::testing::TempDir() + "/not-a-library.so";
  std::ofstream(options_.library) << "text";
  EXPECT_THAT(Discover("").warnings, ElementsAre(HasSubstr("not-a-library.so")));
}

TEST_F(Gpus, DriverUpdatedUnderARunningKernel_IsNamed) {
  const GpuReport report = Discover("init=18");
  EXPECT_THAT(report.devices, IsEmpty());
  EXPECT_THAT(report.warnings, ElementsAre(HasSubstr("Driver/library version mismatch")));
}

TEST_F(Gpus, DriverOlderThanTheRuntime_MakesThemUnusableByName) {
  const GpuReport report = Discover("gpus=1 cuda=12040");
  ASSERT_EQ(report.devices.size(), 1u);
  EXPECT_THAT(report.devices[0].unusable(), HasSubstr("supports CUDA 12.4, this build needs 13"));
  EXPECT_THAT(report.warnings, ElementsAre(HasSubstr("GPU-00000000-aaaa: its driver")));
}

TEST_F(Gpus, Architectures_DecideAsCudaDoes) {
  const auto usable = [this](const std::string& architectures, int capability) {
    options_.architectures = architectures;
    const GpuReport report = Discover(absl::StrCat("gpus=1 cc=", capability));
    return report.devices.at(0).unusable().empty();
  };
  EXPECT_TRUE(usable("90a-real", 90));
  EXPECT_FALSE(usable("90a-real", 100));
  EXPECT_TRUE(usable("80-real", 86));
  EXPECT_FALSE(usable("80-real", 90));
  EXPECT_FALSE(usable("86-real", 80));
  EXPECT_TRUE(usable("80-virtual", 120));
  EXPECT_TRUE(usable("75,90a-real", 90));
  options_.architectures = "90a-real";
  EXPECT_THAT(Discover("gpus=1 cc=75").devices.at(0).unusable(),
              HasSubstr("compute capability 7.5"));
}

TEST_F(Gpus, BuildWithoutCuda_SaysSo) {
  options_.cuda_major = 0;
  EXPECT_THAT(Discover("gpus=1").devices.at(0).unusable(),
              ::testing::AllOf(HasSubstr("without CUDA"), HasSubstr("./dev package --cuda")));
}

TEST_F(Gpus, GpuOffTheBus_IsLeftOutAndNamed) {
  const GpuReport report = Discover("gpus=3 lost=1");
  EXPECT_THAT(Uuids(report), ElementsAre("GPU-00000000-aaaa", "GPU-20000000-aaaa"));
  EXPECT_THAT(report.warnings,
              ElementsAre(::testing::AllOf(HasSubstr("GPU-10000000-aaaa"), HasSubstr("reboot"))));
}

TEST_F(Gpus, DamagedMemory_IsNamed) {
  const GpuReport report = Discover("gpus=2 pending=1 ecc=3");
  ASSERT_EQ(report.devices.size(), 2u);
  EXPECT_EQ(report.devices[0].unusable(), "");
  EXPECT_THAT(report.devices[1].unusable(), HasSubstr("reset"));
  EXPECT_THAT(report.warnings, ElementsAre(HasSubstr("GPU-00000000-aaaa: 3 uncorrected"),
                                           HasSubstr("GPU-10000000-aaaa: a row")));
}

TEST_F(Gpus, VisibleDevices_AreNumberedAsRanksSeeThem) {
  options_.visible = "2,GPU-0000";
  EXPECT_THAT(Uuids(Discover("gpus=4")), ElementsAre("GPU-20000000-aaaa", "GPU-00000000-aaaa"));
  EXPECT_EQ(Discover("gpus=4").devices[0].name(), "cuda:0");
  options_.visible = "1,9,0";
  EXPECT_THAT(Uuids(Discover("gpus=4")), ElementsAre("GPU-10000000-aaaa"));
  options_.visible = "";
  EXPECT_THAT(Uuids(Discover("gpus=4")), IsEmpty());
}

TEST_F(Gpus, OfferedOnes_KeepTheirNumbers) {
  options_.offered = {1, 3};
  const GpuReport report = Discover("gpus=4");
  ASSERT_EQ(report.devices.size(), 2u);
  EXPECT_EQ(report.devices[0].name(), "cuda:1");
  EXPECT_EQ(report.devices[1].name(), "cuda:3");
}

// The explanation of every Xid that concerns the GPU itself says what to do.
TEST(ExplainXid, ErrorOfTheGpu_SaysWhatToDo) {
  for (const uint64_t xid : {48, 63, 64, 74, 79, 95, 119, 120}) {
    EXPECT_THAT(ExplainXid(xid), ::testing::ContainsRegex("reset|reboot|replace")) << xid;
  }
  for (const uint64_t xid : {13, 31, 43}) {
    EXPECT_THAT(ExplainXid(xid), HasSubstr("program")) << xid;
  }
  EXPECT_THAT(ExplainXid(94), HasSubstr("start again"));
  EXPECT_TRUE(LosesGpu(79));
  for (const uint64_t xid : {13, 31, 43, 45, 63, 94}) EXPECT_FALSE(LosesGpu(xid)) << xid;
  EXPECT_THAT(ExplainXid(4711), HasSubstr("look it up"));
}

// Keeps the values of gauges and counters, by name and labels.
class RecordingRegistry : public metrics::Registry {
 public:
  metrics::Counter& GetCounter(const metrics::Family& family,
                               const std::vector<std::string>& labels) override {
    return At(family, labels);
  }
  metrics::Gauge& GetGauge(const metrics::Family& family,
                           const std::vector<std::string>& labels) override {
    return At(family, labels);
  }
  metrics::Histogram& GetHistogram(const metrics::Family& family,
                                   const std::vector<std::string>& labels) override {
    return At(family, labels);
  }
  void Remove(const metrics::Family&, const std::vector<std::string>&) override {}

  // The first value of the series, once it has one.
  double Await(const std::string& key) {
    MutexLock lock(&mutex_);
    const auto there = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return values_.contains(key); };
    mutex_.Await(Condition(&there));
    return values_[key];
  }

 private:
  struct Cell : metrics::Counter, metrics::Gauge, metrics::Histogram {
    Cell(RecordingRegistry& in, std::string as) : registry(in), key(std::move(as)) {}
    void Increment(double by) override {
      MutexLock lock(&registry.mutex_);
      registry.values_[key] += by;
    }
    void Set(double to) override {
      MutexLock lock(&registry.mutex_);
      registry.values_[key] = to;
    }
    void Observe(double) override {}
    RecordingRegistry& registry;
    const std::string key;
  };
  Cell& At(const metrics::Family& family, const std::vector<std::string>& labels) {
    const std::string key =
        absl::StrCat(std::string(family.name), "{", absl::StrJoin(labels, ","), "}");
    MutexLock lock(&mutex_);
    auto& cell = cells_[key];
    if (cell == nullptr) cell = std::make_unique<Cell>(*this, key);
    return *cell;
  }

  Mutex mutex_;
  std::map<std::string, double> values_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::unique_ptr<Cell>> cells_ ABSL_GUARDED_BY(mutex_);
};

TEST_F(Gpus, Sampler_TellsWhatTheLibraryTells) {
  ::setenv("FAKE_NVML", "gpus=2 pending=1", 1);
  RecordingRegistry registry;
  const RealClock clock;
  const auto sampler = GpuSampler::Start(FAKE_NVML_LIBRARY, clock, registry);
  ASSERT_NE(sampler, nullptr);
  // The last series of the last GPU: those before it are there too.
  EXPECT_EQ(registry.Await("muster_worker_gpu_remapped_rows{GPU-10000000-aaaa,failed}"), 0);
  const std::string gpu = "{GPU-10000000-aaaa}";
  EXPECT_EQ(registry.Await("muster_worker_gpu_info{GPU-10000000-aaaa,cuda:1,NVIDIA Fake}"), 1);
  EXPECT_EQ(registry.Await("muster_worker_gpu_up" + gpu), 1);
  EXPECT_EQ(registry.Await("muster_worker_gpu_power_watts" + gpu), 650);
  EXPECT_EQ(registry.Await("muster_worker_gpu_power_limit_watts" + gpu), 700);
  EXPECT_EQ(registry.Await("muster_worker_gpu_temperature_celsius" + gpu), 61);
  EXPECT_EQ(registry.Await("muster_worker_gpu_sm_clock_hertz" + gpu), 1755e6);
  EXPECT_EQ(registry.Await("muster_worker_gpu_memory_clock_hertz" + gpu), 2619e6);
  EXPECT_EQ(registry.Await("muster_worker_gpu_memory_used_bytes" + gpu), double{1ull << 30});
  EXPECT_EQ(registry.Await("muster_worker_gpu_memory_bytes" + gpu), double{80ull << 30});
  EXPECT_EQ(registry.Await("muster_worker_gpu_busy_ratio" + gpu), 0.97);
  EXPECT_EQ(registry.Await("muster_worker_gpu_remapped_rows{GPU-10000000-aaaa,pending}"), 1);
  EXPECT_EQ(
      registry.Await("muster_worker_gpu_throttled_seconds_total{GPU-10000000-aaaa,power_cap}"), 0);
}

TEST_F(Gpus, SamplerOfALostGpu_SaysSo) {
  ::setenv("FAKE_NVML", "gpus=2 lost=0", 1);
  RecordingRegistry registry;
  const RealClock clock;
  const auto sampler = GpuSampler::Start(FAKE_NVML_LIBRARY, clock, registry);
  ASSERT_NE(sampler, nullptr);
  EXPECT_EQ(registry.Await("muster_worker_gpu_up{GPU-10000000-aaaa}"), 1);
  EXPECT_EQ(registry.Await("muster_worker_gpu_up{GPU-00000000-aaaa}"), 0);
}

TEST_F(Gpus, SamplerWithoutADriver_IsNone) {
  RecordingRegistry registry;
  const RealClock clock;
  EXPECT_EQ(GpuSampler::Start("libmuster-absent.so.1", clock, registry), nullptr);
}

}  // namespace
}  // namespace muster::worker
