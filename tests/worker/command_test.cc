// The rank of a command: its environment, the port of rank 0, and what it makes of a progress file.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "proto/spec/command_variables.h"
#include "tests/support/status_matchers.h"
#include "worker/command/command_progress.h"
#include "worker/command/environment.h"
#include "worker/command/master_port.h"
#include "worker/command/progress_file.h"

namespace muster::worker {
namespace {

using ::muster::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class Folder {
 public:
  Folder() {
    std::string path = ::testing::TempDir() + "/muster-command-XXXXXX";
    path_ = ::mkdtemp(path.data());
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

void Write(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

v1::RankAssignment Rank(int rank = 0) {
  v1::RankAssignment assignment;
  assignment.set_job_id("ddp-abcde");
  assignment.set_job_name("ddp");
  assignment.set_epoch(7);
  assignment.set_rank(rank);
  assignment.set_world_size(4);
  assignment.set_local_rank(1);
  assignment.set_local_ranks(2);
  assignment.set_group_rank(1);
  assignment.set_group_world_size(2);
  assignment.set_attempt(3);
  assignment.set_device("cuda:5");
  assignment.add_local_devices("cuda:3");
  assignment.add_local_devices("cuda:5");
  assignment.set_run_directory("/run/dir");
  assignment.set_worker("worker-1");
  assignment.mutable_spec()->add_command("true");
  assignment.mutable_spec()->mutable_restart()->set_max_failures(4);
  assignment.mutable_spec()->set_working_directory("/work");
  return assignment;
}

std::map<std::string, std::string> AsMap(const std::vector<std::string>& entries) {
  std::map<std::string, std::string> map;
  for (const std::string& entry : entries) {
    map.insert(static_cast<std::pair<std::string, std::string>>(
        absl::StrSplit(entry, absl::MaxSplits('=', 1))));
  }
  return map;
}

const CommandStart kStart = {"10.0.0.7", 23456, 40, "/ckpt/40"};

TEST(CommandEnvironment, GivesWhatTorchrunGives) {
  const auto all = AsMap(CommandEnvironment(Rank(3), kStart, {}));
  const std::map<std::string, std::string> expected = {
      {"RANK", "3"},
      {"LOCAL_RANK", "1"},
      {"WORLD_SIZE", "4"},
      {"LOCAL_WORLD_SIZE", "2"},
      {"GROUP_RANK", "1"},
      {"NODE_RANK", "1"},
      {"GROUP_WORLD_SIZE", "2"},
      {"ROLE_RANK", "3"},
      {"ROLE_WORLD_SIZE", "4"},
      {"MASTER_ADDR", "10.0.0.7"},
      {"MASTER_PORT", "23456"},
      {"CUDA_VISIBLE_DEVICES", "3,5"},
      {"TORCHELASTIC_RESTART_COUNT", "2"},
      {"TORCHELASTIC_MAX_RESTARTS", "4"},
      {"TORCHELASTIC_RUN_ID", "ddp-abcde"},
      {"TORCHELASTIC_USE_AGENT_STORE", "False"},
      {"MUSTER_ATTEMPT", "3"},
      {"MUSTER_EPOCH", "7"},
      {"MUSTER_RUN_DIRECTORY", "/run/dir"},
      {"MUSTER_PROGRESS_FILE", "/run/dir/progress.json"},
      {"MUSTER_RESTORE_PATH", "/ckpt/40"},
      {"MUSTER_RESTORE_STEP", "40"},
  };
  for (const auto& [name, value] : expected) {
    ASSERT_TRUE(all.contains(name)) << name;
    EXPECT_EQ(all.at(name), value) << name;
  }
}

TEST(CommandEnvironment, ShareOfADevice_IsTold) {
  v1::RankAssignment assignment = Rank(3);
  EXPECT_FALSE(AsMap(CommandEnvironment(assignment, kStart, {"MUSTER_DEVICE_SHARE=0.1"}))
                   .contains("MUSTER_DEVICE_SHARE"));
  assignment.mutable_spec()->mutable_resources()->set_share(0.5);
  assignment.set_device_memory_limit_bytes(int64_t{40} << 30);
  auto all = AsMap(CommandEnvironment(assignment, kStart, {}));
  EXPECT_EQ(all["MUSTER_DEVICE_SHARE"], "0.5");
  EXPECT_EQ(all["MUSTER_DEVICE_MEMORY_LIMIT"], "42949672960");
  EXPECT_FALSE(all.contains("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"));
  assignment.set_mps(true);
  all = AsMap(CommandEnvironment(assignment, kStart, {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=5=1M"}));
  EXPECT_EQ(all["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"], "50");
  EXPECT_EQ(all["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"], "1=40960M") << "by local rank";
}

TEST(CommandEnvironment, EveryVariableOfTorchrun_IsSetAndCannotBeGiven) {
  const auto all = AsMap(CommandEnvironment(Rank(), kStart, {}));
  for (const absl::string_view name : spec::kTorchrunVariables) {
    EXPECT_TRUE(all.contains(std::string(name))) << name;
  }
  const std::set<std::string> defaults = {"PYTHONUNBUFFERED", "TORCH_NCCL_ASYNC_ERROR_HANDLING"};
  for (const auto& [name, value] : all) {
    EXPECT_NE(spec::IsReservedVariable(name), defaults.contains(name)) << name;
  }
}

TEST(CommandEnvironment, SecretsAreThoseThatTheDaemonGave) {
  v1::RankAssignment assignment = Rank();
  (*assignment.mutable_spec()->mutable_env())["TOKEN"] = "${secret:hf-token}";
  (*assignment.mutable_spec()->mutable_env())["OTHER"] = "${secret:none}";
  const auto all = AsMap(CommandEnvironment(assignment, kStart, {"TOKEN=value"}));
  EXPECT_EQ(all.at("TOKEN"), "value");
  EXPECT_FALSE(all.contains("OTHER"));
}

TEST(CommandEnvironment, EnvWinsOverTheDaemonsEnvironment_AndMusterOverBoth) {
  v1::RankAssignment assignment = Rank();
  (*assignment.mutable_spec()->mutable_env())["PATH"] = "/mine";
  (*assignment.mutable_spec()->mutable_env())["OMP_NUM_THREADS"] = "9";
  (*assignment.mutable_spec()->mutable_env())["RANK"] = "17";  // which no valid spec has
  CommandStart fresh = kStart;
  fresh.restore_step = 0;
  const auto all = AsMap(CommandEnvironment(
      assignment, fresh,
      {"PATH=/theirs", "OMP_NUM_THREADS=2", "HOME=/root", "PYTHONUNBUFFERED=0", "X=a=b",
       "MUSTER_RESTORE_PATH=/of/another/job", "MUSTER_RESTORE_STEP=3"}));
  EXPECT_EQ(all.at("PATH"), "/mine");
  EXPECT_EQ(all.at("OMP_NUM_THREADS"), "9");
  EXPECT_EQ(all.at("HOME"), "/root");
  EXPECT_EQ(all.at("PYTHONUNBUFFERED"), "0");
  EXPECT_EQ(all.at("X"), "a=b");
  EXPECT_EQ(all.at("RANK"), "0");
  EXPECT_FALSE(all.contains("MUSTER_RESTORE_PATH"));
  EXPECT_FALSE(all.contains("MUSTER_RESTORE_STEP"));
}

TEST(CommandEnvironment, CpuRanks_SeeNoGpu) {
  v1::RankAssignment assignment = Rank();
  assignment.set_device("cpu:1");
  assignment.clear_local_devices();
  EXPECT_EQ(AsMap(CommandEnvironment(assignment, kStart, {})).at("CUDA_VISIBLE_DEVICES"), "");
}

TEST(CommandStart, TextReadsBack_AndOtherTextIsRefused) {
  ASSERT_OK_AND_ASSIGN(const CommandStart back, CommandStart::FromText(kStart.ToText()));
  EXPECT_EQ(back.master_address, kStart.master_address);
  EXPECT_EQ(back.master_port, kStart.master_port);
  EXPECT_EQ(back.restore_step, kStart.restore_step);
  EXPECT_EQ(back.restore_path, kStart.restore_path);
  for (const char* text : {"", "a\nb\nc\nd", "10.0.0.1\n1", "x\n1\n\n"}) {
    EXPECT_FALSE(CommandStart::FromText(text).ok()) << text;
  }
}

TEST(FindProgram, LooksInThePathOfTheCommand) {
  const Folder folder;
  Write(folder / "tool", "#!/bin/sh\n");
  const std::string path = absl::StrCat("PATH=/nowhere:", folder.path());
  EXPECT_THAT(FindProgram("tool", {path}),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("no program tool in PATH")));
  EXPECT_THAT(FindProgram(folder / "tool", {path}),
              StatusIs(absl::StatusCode::kPermissionDenied, HasSubstr("chmod +x")));
  ::chmod((folder / "tool").c_str(), 0755);
  EXPECT_EQ(FindProgram("tool", {path}).value(), folder / "tool");
  EXPECT_EQ(FindProgram(folder / "tool", {path}).value(), folder / "tool");
  EXPECT_THAT(FindProgram(folder / "absent", {path}),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr(folder / "absent")));
  EXPECT_THAT(FindProgram(folder.path(), {path}),
              StatusIs(absl::StatusCode::kPermissionDenied, HasSubstr("not a file")));
}

TEST(MasterPort, EachIsAnotherFreePort_UntilAllAreTaken) {
  ASSERT_OK_AND_ASSIGN(const MasterPort probe, MasterPort::Choose({0, 0}, 5));
  EXPECT_GE(probe.port(), 1024);
  const PortRange two = {probe.port(), probe.port() + 1};
  std::vector<MasterPort> held;
  while (true) {
    absl::StatusOr<MasterPort> next = MasterPort::Choose(two, 1);
    if (!next.ok()) break;
    EXPECT_NE(next->port(), probe.port()) << "another one holds it";
    held.push_back(*std::move(next));
    ASSERT_LE(held.size(), 2u);
  }
  EXPECT_THAT(MasterPort::Choose(two, 0),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("--rank-ports")));
  // Some other program may have had the second port; what we held is free again.
  const size_t before = held.size();
  held.clear();
  EXPECT_EQ(MasterPort::Choose(two, 0).ok(), before > 0);
}

TEST(MasterPort, PortOnWhichSomebodyListens_IsNotChosen) {
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(::bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  ASSERT_EQ(::listen(fd, 1), 0);
  socklen_t size = sizeof(address);
  ASSERT_EQ(::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size), 0);
  const int port = ntohs(address.sin_port);
  EXPECT_FALSE(MasterPort::Choose({port, port}, 0).ok());
  ::close(fd);
}

TEST(ParseReport, TakesEveryField) {
  ASSERT_OK_AND_ASSIGN(
      const CommandReport report,
      ParseReport(R"({"step": 12.0, "steps": 100, "loss": 2.5, "validation_loss": 3,
                      "tokens": 4096, "tokens_per_second": 10.5, "phase": "evaluating",
                      "checkpoint": {"step": 10, "path": "a/b"}, "anything": [1]})"));
  EXPECT_EQ(report.step, 12);
  EXPECT_EQ(report.steps, 100);
  EXPECT_EQ(report.loss, 2.5);
  EXPECT_EQ(report.validation_loss, 3);
  EXPECT_EQ(report.tokens, 4096);
  EXPECT_EQ(report.tokens_per_second, 10.5);
  EXPECT_EQ(report.phase, "evaluating");
  ASSERT_TRUE(report.checkpoint.has_value());
  EXPECT_EQ(report.checkpoint->step, 10);
  EXPECT_EQ(report.checkpoint->path, "a/b");
}

TEST(ParseReport, HostileText_IsRefusedByField) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", "not a JSON object"},
      {"[1]", "not a JSON object"},
      {"3", "not a JSON object"},
      {"{\"step\": 1", "not a JSON object"},
      {R"({"step": -1})", "\"step\""},
      {R"({"step": 1.5})", "\"step\""},
      {R"({"step": 1e300})", "\"step\""},
      {R"({"step": "1"})", "\"step\""},
      {R"({"loss": "low"})", "\"loss\""},
      {R"({"loss": NaN})", "not a JSON object"},
      {R"({"tokens_per_second": -3})", "\"tokens_per_second\""},
      {R"({"phase": "a\nb"})", "\"phase\""},
      {absl::StrCat(R"({"phase": ")", std::string(33, 'x'), "\"}"), "\"phase\""},
      {R"({"checkpoint": "a"})", "\"checkpoint\""},
      {R"({"checkpoint": {"step": 0, "path": "a"}})", "\"checkpoint\""},
      {R"({"checkpoint": {"step": 1}})", "\"checkpoint\""},
      {absl::StrCat(R"({"checkpoint": {"step": 1, "path": ")", std::string(5000, 'x'), "\"}}"),
       "\"path\""},
      {std::string(100'000, '['), "not a JSON object"},
  };
  for (const auto& [text, field] : cases) {
    EXPECT_THAT(ParseReport(text), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(field)))
        << text.substr(0, 80);
  }
}

std::vector<int64_t> Steps(const CommandReports& read) {
  std::vector<int64_t> steps;
  for (const CommandReport& report : read.reports) steps.push_back(report.step.value_or(-1));
  return steps;
}

TEST(ParseReports, OneObjectOrOnePerLine) {
  EXPECT_THAT(Steps(ParseReports("{\n  \"step\": 3\n}\n")), ElementsAre(3));
  EXPECT_THAT(Steps(ParseReports("{\"step\": 3}\n\n{\"step\": 4}\n{\"st")), ElementsAre(3, 4));
  const CommandReports mixed = ParseReports("{\"step\": 1}\nepoch 2\n{\"step\": 5}\n");
  EXPECT_THAT(Steps(mixed), ElementsAre(1, 5));
  EXPECT_THAT(mixed.problem, HasSubstr("line 2"));
  EXPECT_THAT(ParseReports("").problem, IsEmpty());
}

TEST(ProgressFile, IsReadAgainWhenItHasChanged_HoweverItWasWritten) {
  const Folder folder;
  ProgressFile file(folder / "p");
  EXPECT_THAT(file.Read().reports, IsEmpty());
  Write(folder / "p", "{\"step\": 1}\n");
  EXPECT_THAT(Steps(file.Read()), ElementsAre(1));
  EXPECT_THAT(file.Read().reports, IsEmpty()) << "nothing new";
  std::ofstream(folder / "p", std::ios::app) << "{\"step\": 2}\n";
  EXPECT_THAT(Steps(file.Read()), ElementsAre(1, 2));
  Write(folder / "new", "{\"step\": 3}\n");  // as long as the first one
  std::filesystem::rename(folder / "new", folder / "p");
  EXPECT_THAT(Steps(file.Read()), ElementsAre(3));
}

TEST(ProgressFile, Problem_IsToldOnceAndNotOfAHalfWrittenLine) {
  const Folder folder;
  ProgressFile file(folder / "p");
  Write(folder / "p", "{\"step\": 1}\n{\"ste");
  EXPECT_THAT(file.Read().problem, IsEmpty()) << "it may be about to be finished";
  std::ofstream(folder / "p", std::ios::app) << "p\": 2}\n";
  EXPECT_THAT(Steps(file.Read()), ElementsAre(1, 2));
  EXPECT_THAT(file.Read().problem, IsEmpty());
  std::ofstream(folder / "p", std::ios::app) << "broken\n";
  EXPECT_THAT(file.Read().problem, IsEmpty());
  EXPECT_THAT(file.Read().problem, HasSubstr("line 3"));
  EXPECT_THAT(file.Read().problem, IsEmpty());
  std::ofstream(folder / "p", std::ios::app) << "broken again\n";
  EXPECT_THAT(file.Read(/*last=*/true).problem, IsEmpty()) << "said before";
}

TEST(ProgressFile, OfALongFile_TheLastLinesCount) {
  const Folder folder;
  std::string text;
  while (static_cast<int64_t>(text.size()) < 2 * ProgressFile::kBytesMax) {
    absl::StrAppend(&text, "{\"step\": ", text.size() + 1, "}\n");
  }
  absl::StrAppend(&text, "{\"step\": 9999999}\n");
  Write(folder / "p", text);
  ProgressFile file(folder / "p");
  const CommandReports read = file.Read(/*last=*/true);
  EXPECT_THAT(read.problem, IsEmpty());
  ASSERT_THAT(read.reports, ::testing::Not(IsEmpty()));
  EXPECT_EQ(read.reports.back().step, 9999999);
  EXPECT_LT(read.reports.size() * 10, static_cast<size_t>(ProgressFile::kBytesMax));
}

TEST(ProgressFile, ThatIsNoFile_IsIgnored) {
  const Folder folder;
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  EXPECT_THAT(ProgressFile(folder / "pipe").Read(/*last=*/true).reports, IsEmpty());
  EXPECT_THAT(ProgressFile(folder.path()).Read(/*last=*/true).reports, IsEmpty());
}

TEST(ReadErrorFile, IsWhatRecordWrites) {
  const Folder folder;
  Write(folder / "e", R"({"message": {"message": "ValueError: odd\nnumber",
                          "extraInfo": {"timestamp": "1"}}})");
  EXPECT_EQ(ReadErrorFile(folder / "e"), "ValueError: odd number");
  Write(folder / "e", R"({"message": "short"})");
  EXPECT_EQ(ReadErrorFile(folder / "e"), "short");
  for (const char* text :
       {"", "[]", "{}", R"({"message": 3})", R"({"message": {"message": []}})"}) {
    Write(folder / "e", text);
    EXPECT_EQ(ReadErrorFile(folder / "e"), "") << text;
  }
  EXPECT_EQ(ReadErrorFile(folder / "absent"), "");
}

CommandReport Report(const std::string& json) { return *ParseReport(json); }

TEST(CommandProgress, FieldsKeepTheirValues_AndAStepNeverGoesBack) {
  const v1::RankAssignment assignment = Rank();
  CommandProgress progress(assignment);
  const absl::Time start = absl::UnixEpoch();
  EXPECT_FALSE(progress.progress().reports());
  progress.Take({Report(R"({"step": 5, "steps": 10, "loss": 2})")}, start);
  progress.Take({Report(R"({"step": 3, "loss": 1})")}, start);
  EXPECT_TRUE(progress.progress().reports());
  EXPECT_EQ(progress.progress().step(), 5);
  EXPECT_EQ(progress.progress().steps(), 10);
  EXPECT_EQ(progress.progress().train_loss(), 1);
}

TEST(CommandProgress, Speed_IsMeasuredWhereItIsNotGiven) {
  const v1::RankAssignment assignment = Rank();
  CommandProgress progress(assignment);
  const absl::Time start = absl::UnixEpoch();
  progress.Take({Report(R"({"step": 10, "tokens": 1000})")}, start);
  EXPECT_EQ(progress.progress().step_seconds(), 0);
  progress.Take({Report(R"({"step": 14, "tokens": 1400})")}, start + absl::Seconds(2));
  EXPECT_DOUBLE_EQ(progress.progress().step_seconds(), 0.5);
  EXPECT_DOUBLE_EQ(progress.progress().tokens_per_second(), 200);
  progress.Take({Report(R"({"step": 15, "tokens": 1500, "tokens_per_second": 7})")},
                start + absl::Seconds(4));
  EXPECT_DOUBLE_EQ(progress.progress().tokens_per_second(), 7);
}

TEST(CommandProgress, Checkpoint_IsTakenOnceItIsThere_AndOnce) {
  const Folder folder;
  v1::RankAssignment assignment = Rank();
  assignment.mutable_spec()->set_working_directory(folder.path());
  CommandProgress progress(assignment);
  const auto report = Report(R"({"step": 9, "checkpoint": {"step": 8, "path": "c8"}})");
  progress.Take({report}, absl::UnixEpoch());
  EXPECT_THAT(progress.TakeCheckpoints(), IsEmpty());
  EXPECT_THAT(progress.TakeProblems(), ElementsAre(HasSubstr("does not exist")));
  Write(folder / "c8", "four");
  progress.Take({report, report}, absl::UnixEpoch());
  const std::vector<v1::CheckpointRecord> taken = progress.TakeCheckpoints();
  ASSERT_THAT(taken, SizeIs(1));
  EXPECT_EQ(taken[0].step(), 8);
  EXPECT_EQ(taken[0].epoch(), 7u);
  EXPECT_EQ(taken[0].path(), folder / "c8");
  EXPECT_EQ(taken[0].bytes(), 4);
  progress.Take({report, Report(R"({"checkpoint": {"step": 8, "path": "s3://b/c8"}})")},
                absl::UnixEpoch());
  EXPECT_THAT(progress.TakeCheckpoints(), IsEmpty());
  EXPECT_THAT(progress.TakeProblems(), ElementsAre(HasSubstr("the first one counts")));
  progress.Take({Report(R"({"checkpoint": {"step": 9, "path": "s3://b/c9"}})")}, absl::UnixEpoch());
  EXPECT_THAT(progress.TakeCheckpoints(), SizeIs(1)) << "an address is not looked for";
}

TEST(CommandProgress, CheckpointsOfOtherRanks_DoNotCount) {
  const v1::RankAssignment assignment = Rank(1);
  CommandProgress progress(assignment);
  const auto report = Report(R"({"checkpoint": {"step": 8, "path": "s3://b/c8"}})");
  progress.Take({report}, absl::UnixEpoch());
  progress.Take({report}, absl::UnixEpoch());
  EXPECT_THAT(progress.TakeCheckpoints(), IsEmpty());
  EXPECT_THAT(progress.TakeProblems(), ElementsAre(HasSubstr("rank 0 alone")));
}

}  // namespace
}  // namespace muster::worker
