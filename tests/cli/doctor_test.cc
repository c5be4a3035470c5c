// What `muster doctor` says of made-up machines, and that it can look at this one.
#include "cli/doctor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <map>
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
    facts_.now = absl::FromUnixSeconds(1'000'000'000);
    facts_.ports = "7600,20000-20999";
    facts_.ephemeral_ports = {32768, 60999};
    SetTls(absl::Hours(24 * 90));
    facts_.job_user = "owner";
  }
  Finding Of(const std::string& check) const {
    for (const Finding& finding : Examine(facts_)) {
      if (finding.check == check) return finding;
    }
    ADD_FAILURE() << "no check " << check;
    return {};
  }
  void SetTls(absl::Duration ends_in) {
    facts_.tls = std::map<std::string, security::Validity>{
        {"tls-ca", {facts_.now, facts_.now + absl::Hours(24 * 3650)}},
        {"tls-cert", {facts_.now, facts_.now + ends_in}}};
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
  facts_.taken_ports[7600] = absl::UnavailableError("Address already in use");
  facts_.tls = absl::InvalidArgumentError("--tls-cert x: no certificate");
  facts_.job_user_state = absl::NotFoundError("there is no such account");
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
  ASSERT_EQ(list.size(), 13u);
  EXPECT_EQ(list[4]["check"], "shm");
  EXPECT_EQ(list[4]["state"], "error");
  EXPECT_THAT(list[4]["remedy"].get<std::string>(), HasSubstr("--shm-size"));
}

TEST_F(DoctorTest, ThisMachine_CanBeLookedAt) {
  const testing::TemporaryDirectory directory;
  DoctorOptions options = {.directory = directory.path()};
  const absl::StatusOr<MachineFacts> facts = GatherFacts(options);
  ASSERT_OK(facts);
  EXPECT_OK(facts->sync.status());
  EXPECT_GT(facts->disk_size, 0);
  EXPECT_NE(facts->host, "");
  EXPECT_GT(facts->ephemeral_ports.last, facts->ephemeral_ports.first);
  options.directory += "/absent";
  EXPECT_FALSE(GatherFacts(options)->sync.ok());
}

TEST_F(DoctorTest, PortsThatAreTaken_AreNamed_AFewOfThem) {
  for (int port = 20000; port < 20007; ++port) {
    facts_.taken_ports[port] = absl::UnavailableError("Address already in use");
  }
  EXPECT_EQ(LevelOf("ports"), Finding::Level::kWarning);
  EXPECT_THAT(Of("ports").found, HasSubstr("20004 (Address already in use), 2 more"));
}

TEST_F(DoctorTest, PortsOfOutgoingConnections_AreAWarning) {
  facts_.ports = "7600,40000-40999";
  EXPECT_EQ(LevelOf("ports"), Finding::Level::kWarning);
  EXPECT_THAT(Of("ports").found, HasSubstr("40000-40999 is free, and within 32768-60999"));
}

TEST_F(DoctorTest, APortInUse_IsFound_AndAListThatIsNoneIsRefused) {
  const testing::TemporaryDirectory directory;
  const int taken = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  ASSERT_EQ(::bind(taken, reinterpret_cast<sockaddr*>(&address), size), 0);
  ASSERT_EQ(::listen(taken, 1), 0);
  ASSERT_EQ(::getsockname(taken, reinterpret_cast<sockaddr*>(&address), &size), 0);
  const int port = ntohs(address.sin_port);
  const auto facts = GatherFacts({.directory = directory.path(), .ports = std::to_string(port)});
  ASSERT_OK(facts);
  EXPECT_EQ(facts->taken_ports.count(port), 1u);
  ::close(taken);
  EXPECT_THAT(GatherFacts({.directory = directory.path(), .ports = "7600,http"}).status(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("--ports: 'http'")));
}

TEST_F(DoctorTest, CertificatesThatEnd_AreTold) {
  SetTls(absl::Hours(24 * 10));
  EXPECT_EQ(LevelOf("tls"), Finding::Level::kWarning);
  EXPECT_THAT(Of("tls").found, HasSubstr("--tls-cert is good until 2001-09-19"));
  SetTls(-absl::Hours(1));
  EXPECT_EQ(LevelOf("tls"), Finding::Level::kError);
  const testing::TemporaryDirectory directory;
  const auto facts = GatherFacts(
      {.directory = directory.path(), .tls = {.authorities = directory.path() + "/ca.crt"}});
  ASSERT_OK(facts);
  EXPECT_THAT(facts->tls->status(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("ca.crt")));
}

TEST_F(DoctorTest, AJobUserThatIsNot_IsAnError) {
  const testing::TemporaryDirectory directory;
  const auto facts =
      GatherFacts({.directory = directory.path(), .job_user = {.user = "muster-no-such-account"}});
  ASSERT_OK(facts);
  EXPECT_FALSE(facts->job_user_state.ok());
  facts_.job_user_state = facts->job_user_state;
  EXPECT_EQ(LevelOf("job-user"), Finding::Level::kError);
  EXPECT_THAT(Of("job-user").found, HasSubstr("muster-no-such-account"));
}

}  // namespace
}  // namespace muster::cli
