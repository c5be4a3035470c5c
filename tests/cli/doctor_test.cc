// What `muster doctor` says of made-up machines, and that it can look at this one.
#include "cli/doctor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>
#include <string>

#include "tests/support/status_matchers.h"
#include "tests/support/temporary_directory.h"

namespace muster::cli {
namespace {

using ::muster::testing::StatusIs;
using ::testing::HasSubstr;

class DoctorTest : public ::testing::Test {
 protected:
  // A machine with eight GPUs on which all is well.
  DoctorTest() {
    facts_.driver = std::string("580.65");
    facts_.cuda = 13000;
    facts_.gpus = 8;
    for (const char* name : {"libcublasLt.so.13", "libcudnn.so.9", "libnccl.so.2"}) {
      facts_.libraries[name] = absl::OkStatus();
    }
    facts_.open_files_max = 65536;
    facts_.shared_memory = int64_t{64} << 30;
    facts_.directory = "/state";
    facts_.sync = absl::Milliseconds(1);
    facts_.disk_free = int64_t{500} << 30;
    facts_.disk_size = int64_t{1000} << 30;
    facts_.host = "node-1";
    facts_.host_addresses = {"10.0.0.1"};
    facts_.outside_address = "10.0.0.1";
    facts_.version = "0.1.0";
    facts_.coordinator = std::string("0.1.0");
    facts_.coordinator_address = "head:7600";
  }
  Finding Of(const std::string& check) const {
    for (const Finding& finding : Examine(facts_)) {
      if (finding.check == check) return finding;
    }
    ADD_FAILURE() << "no check " << check;
    return {};
  }
  Finding::Level LevelOf(const std::string& check) const { return Of(check).level; }

  MachineFacts facts_;
};

TEST_F(DoctorTest, SoundMachine_HasNothingToMend) {
  for (const Finding& finding : Examine(facts_)) {
    EXPECT_EQ(finding.level, Finding::Level::kOk) << finding.check << ": " << finding.found;
    EXPECT_EQ(finding.remedy, "");
  }
}

TEST_F(DoctorTest, EveryFinding_SaysHowToMendIt) {
  facts_.driver = absl::UnavailableError("the driver does not answer");
  facts_.open_files_max = 1024;
  facts_.locked_memory_max = 8 << 20;
  facts_.shared_memory = int64_t{64} << 20;
  facts_.sync = absl::PermissionDeniedError("/state: Permission denied");
  facts_.clock_synchronized = false;
  facts_.host_addresses.clear();
  facts_.outside_address.clear();
  facts_.coordinator = absl::UnavailableError("no answer");
  for (const Finding& finding : Examine(facts_)) {
    if (finding.check == "libraries") continue;  // not asked without a driver
    EXPECT_NE(finding.level, Finding::Level::kOk) << finding.check;
    EXPECT_NE(finding.remedy, "") << finding.check;
  }
}

TEST_F(DoctorTest, DriverOfAnOlderCuda_IsAnError) {
  facts_.cuda = 12090;
  EXPECT_EQ(LevelOf("driver"), Finding::Level::kError);
  EXPECT_THAT(Of("driver").found, HasSubstr("CUDA 12.9"));
}

TEST_F(DoctorTest, CudnnAlone_MayBeMissing) {
  facts_.libraries["libcudnn.so.9"] = absl::NotFoundError("");
  EXPECT_EQ(LevelOf("libraries"), Finding::Level::kWarning);
  facts_.libraries["libnccl.so.2"] = absl::NotFoundError("");
  EXPECT_EQ(LevelOf("libraries"), Finding::Level::kError);
  EXPECT_THAT(Of("libraries").found, HasSubstr("libnccl.so.2"));
}

TEST_F(DoctorTest, MachineWithoutGpus_NeedsLess) {
  facts_.driver = absl::NotFoundError("no driver");
  facts_.gpus = 0;
  facts_.libraries.clear();
  facts_.locked_memory_max = 8 << 20;
  EXPECT_EQ(LevelOf("driver"), Finding::Level::kOk);
  EXPECT_EQ(LevelOf("libraries"), Finding::Level::kOk);
  EXPECT_EQ(LevelOf("memlock"), Finding::Level::kOk);
}

TEST_F(DoctorTest, SlowDisk_IsAWarning) {
  facts_.sync = absl::Milliseconds(35);
  EXPECT_EQ(LevelOf("disk"), Finding::Level::kWarning);
  EXPECT_THAT(Of("disk").found, HasSubstr("35ms"));
}

TEST_F(DoctorTest, Report_FailsWhenACheckDoes) {
  std::ostringstream out, err;
  Terminal terminal{out, err};
  EXPECT_OK(Report(Examine(facts_), Format::kTable, terminal));
  facts_.shared_memory = absl::NotFoundError("/dev/shm: No such file");
  out.str("");
  EXPECT_THAT(Report(Examine(facts_), Format::kJson, terminal),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("1 check fails")));
  const Json list = Json::parse(out.str());
  ASSERT_EQ(list.size(), 10u);
  EXPECT_EQ(list[4]["check"], "shm");
  EXPECT_EQ(list[4]["state"], "error");
  EXPECT_THAT(list[4]["remedy"].get<std::string>(), HasSubstr("--shm-size"));
}

TEST_F(DoctorTest, ThisMachine_CanBeLookedAt) {
  const testing::TemporaryDirectory directory;
  const MachineFacts facts = GatherFacts(directory.path());
  EXPECT_OK(facts.sync.status());
  EXPECT_GT(facts.disk_size, 0);
  EXPECT_NE(facts.host, "");
  EXPECT_FALSE(GatherFacts(directory.path() + "/absent").sync.ok());
}

}  // namespace
}  // namespace muster::cli
