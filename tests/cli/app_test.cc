// The whole command line against a JobService in this process.
#include "cli/app.h"
#include "base/mutex.h"
#include "cli/reconnect.h"
#include "cli/top.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "muster/v1/job_service.grpc.pb.h"

namespace muster::cli {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Serves one job; tests set its fields, its events and its failures.
class FakeService : public v1::JobService::Service {
 public:
  grpc::Status Submit(grpc::ServerContext*, const v1::SubmitRequest* request,
                      v1::SubmitResponse* response) override {
    MutexLock lock(&mutex);
    submitted.push_back(*request);
    if (submit_failures-- > 0) return {grpc::StatusCode::UNAVAILABLE, "stopping"};
    if (submit_refusals-- > 0) return {grpc::StatusCode::RESOURCE_EXHAUSTED, "no more jobs"};
    *response->mutable_job() = job;
    *response->mutable_job()->mutable_spec() = request->spec();
    return grpc::Status::OK;
  }
  grpc::Status SubmitJobs(grpc::ServerContext* context, const v1::SubmitJobsRequest* request,
                          v1::SubmitJobsResponse* response) override {
    ++calls;
    for (const v1::SubmitRequest& job : request->jobs()) {
      v1::SubmitJobsResult& result = *response->add_results();
      const grpc::Status status = Submit(context, &job, result.mutable_accepted());
      result.set_code(status.error_code());
      result.set_message(status.error_message());
    }
    return grpc::Status::OK;
  }
  grpc::Status SubmitArray(grpc::ServerContext*, const v1::SubmitArrayRequest* request,
                           v1::SubmitArrayResponse* response) override {
    MutexLock lock(&mutex);
    array_submitted = *request;
    response->mutable_array()->set_array("sweep");
    response->mutable_array()->set_array_id("sweep-abcde");
    response->mutable_array()->set_tasks(request->tasks_size());
    return grpc::Status::OK;
  }
  grpc::Status ChangeArray(grpc::ServerContext*, const v1::ChangeArrayRequest* request,
                           v1::ChangeArrayResponse* response) override {
    MutexLock lock(&mutex);
    array_changed = *request;
    response->mutable_array()->set_array(request->name());
    response->mutable_array()->set_tasks(3);
    response->mutable_array()->set_changed(1);
    response->mutable_array()->set_ended(1);
    response->mutable_array()->set_refused(1);
    response->mutable_array()->add_refusals("job sweep-2 runs");
    return grpc::Status::OK;
  }
  grpc::Status GetJob(grpc::ServerContext*, const v1::GetJobRequest* request,
                      v1::Job* reply) override {
    if (request->name() != job.name()) {
      return {grpc::StatusCode::NOT_FOUND, "no job 'gpk'; did you mean 'gpt'?"};
    }
    *reply = job;
    return grpc::Status::OK;
  }
  grpc::Status ListJobs(grpc::ServerContext*, const v1::ListJobsRequest* request,
                        v1::ListJobsResponse* reply) override {
    *reply->add_jobs() = job;
    // Two pages.
    if (request->page_token().empty()) reply->set_next_page_token("2");
    return grpc::Status::OK;
  }
  grpc::Status ResizeJob(grpc::ServerContext*, const v1::ResizeJobRequest* request,
                         v1::Job* reply) override {
    MutexLock lock(&mutex);
    resize_asked = *request;
    *reply = job;
    return grpc::Status::OK;
  }
  grpc::Status GetVersion(grpc::ServerContext*, const v1::GetVersionRequest*,
                          v1::GetVersionResponse* reply) override {
    reply->set_version("4.5.6");
    reply->set_cluster_id("here");
    return grpc::Status::OK;
  }
  grpc::Status ListWorkers(grpc::ServerContext*, const v1::ListWorkersRequest*,
                           v1::ListWorkersResponse* reply) override {
    for (const v1::Worker& worker : workers) *reply->add_workers() = worker;
    return grpc::Status::OK;
  }
  grpc::Status GetUsage(grpc::ServerContext*, const v1::GetUsageRequest* request,
                        v1::GetUsageResponse* reply) override {
    MutexLock lock(&mutex);
    usage_asked = *request;
    *reply = usage;
    return grpc::Status::OK;
  }
  grpc::Status GetRankMaps(grpc::ServerContext*, const v1::GetRankMapsRequest*,
                           v1::GetRankMapsResponse* reply) override {
    *reply = rank_maps;
    return grpc::Status::OK;
  }
  grpc::Status ListEvents(grpc::ServerContext*, const v1::ListEventsRequest*,
                          v1::ListEventsResponse* reply) override {
    for (const v1::Event& event : events) *reply->add_events() = event;
    return grpc::Status::OK;
  }
  grpc::Status Explain(grpc::ServerContext*, const v1::ExplainRequest* request,
                       v1::ExplainResponse* reply) override {
    MutexLock lock(&mutex);
    explained.push_back(*request);
    if (request->has_spec()) {
      reply->add_placements()->set_worker("w7");
      reply->mutable_job()->set_name("not submitted");
      v1::PlacementCost& cost = *reply->mutable_job()->mutable_placement_cost();
      cost.set_total(12);
      cost.add_axes()->set_axis(v1::MESH_AXIS_DATA);
      return grpc::Status::OK;
    }
    *reply->mutable_job() = job;
    if (job.has_waiting()) *reply->mutable_waiting() = job.waiting();
    return grpc::Status::OK;
  }
  // The first stream breaks after one update; the next one reaches the end.
  grpc::Status WatchJob(grpc::ServerContext*, const v1::GetJobRequest* request,
                        grpc::ServerWriter<v1::Job>* writer) override {
    MutexLock lock(&mutex);
    watched.push_back(request->name());
    v1::Job now = job;
    if (watched.size() == 1) {
      now.set_state(v1::JOB_STATE_RUNNING);
      writer->Write(now);
      return {grpc::StatusCode::UNAVAILABLE, "stopping"};
    }
    writer->Write(now);
    return grpc::Status::OK;
  }
  grpc::Status GetLogs(grpc::ServerContext*, const v1::GetLogsRequest* request,
                       grpc::ServerWriter<v1::LogChunk>* writer) override {
    MutexLock lock(&mutex);
    v1::LogChunk chunk;
    chunk.set_epoch(1);
    chunk.set_rank(request->rank());
    chunk.set_data("abc");
    for (const auto& [offset, seconds] : log_times[request->rank()]) {
      v1::LogMark& mark = *chunk.add_marks();
      mark.set_offset(offset);
      mark.mutable_time()->set_seconds(seconds);
    }
    logs_since = request->since().seconds();
    writer->Write(chunk);
    if (request->follow() && ++log_streams == 1) return {grpc::StatusCode::UNAVAILABLE, "x"};
    chunk.set_offset(3);
    chunk.set_data(log_end);
    writer->Write(chunk);
    return grpc::Status::OK;
  }

  Mutex mutex;
  v1::Job job;
  std::vector<v1::Worker> workers;
  std::vector<v1::Event> events;
  std::atomic<int> calls = 0;  // of SubmitJobs
  int submit_failures = 0;
  int submit_refusals = 0;
  int log_streams = 0;
  std::string log_end = "def\n";  // behind "abc"
  std::map<int32_t, std::vector<std::pair<int64_t, int64_t>>>
      log_times;  // offset, seconds; by rank
  int64_t logs_since = 0;
  v1::ResizeJobRequest resize_asked;
  v1::SubmitArrayRequest array_submitted;
  v1::ChangeArrayRequest array_changed;
  v1::GetUsageRequest usage_asked;
  v1::GetUsageResponse usage;
  v1::GetRankMapsResponse rank_maps;
  std::vector<v1::SubmitRequest> submitted;
  std::vector<std::string> watched;
  std::vector<v1::ExplainRequest> explained;
};

constexpr char kSpec[] = R"(
name: gpt
engine:
  model: {family: gpt2, layers: 1, hidden: 8, heads: 2, vocab: 256, sequence_length: 16}
  data: {train: [{path: data/x}]}
  training: {steps: 10, global_batch: 4, micro_batch: 2, optimizer: {adamw: {lr: 0.001}}}
resources: {ranks: 2}
)";

class App : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "/muster-cli-XXXXXX";
    directory_ = ::mkdtemp(pattern.data());
    std::ofstream(directory_ + "/job.yaml") << kSpec;
    service_.job.set_name("gpt");
    service_.job.set_id("gpt-abcde");
    service_.job.set_state(v1::JOB_STATE_SUCCEEDED);
    service_.job.set_steps(10);
    service_.job.set_step(10);
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(&service_);
    server_ = builder.BuildAndStart();
    environment_["MUSTER_COORDINATOR"] = absl::StrCat("127.0.0.1:", port);
    environment_["MUSTER_HOME"] = directory_ + "/home";
  }
  void TearDown() override { server_->Shutdown(); }

  int RunApp(const std::vector<std::string>& arguments) {
    out_.str("");
    err_.str("");
    Surroundings surroundings = {
        .terminal = {.out = out_, .err = err_},
        .environment = [this](const std::string& name) { return environment_[name]; },
        .working_directory = directory_,
        .binaries = directory_,
        .version = "1.2.3"};
    return cli::Run(arguments, surroundings);
  }
  std::string SpecFile() const { return directory_ + "/job.yaml"; }

  FakeService service_;
  std::unique_ptr<grpc::Server> server_;
  std::map<std::string, std::string> environment_;
  std::string directory_;
  std::ostringstream out_, err_;
};

TEST_F(App, Submit_SendsTheSpecWithTheCallersDirectory) {
  EXPECT_EQ(RunApp({"submit", SpecFile(), "--set", "engine.training.steps=7"}), 0) << err_.str();
  ASSERT_EQ(service_.submitted.size(), 1u);
  EXPECT_EQ(service_.submitted[0].spec().working_directory(), directory_);
  EXPECT_EQ(service_.submitted[0].spec().engine().training().steps(), 7);
  EXPECT_EQ(out_.str(), "submitted gpt (gpt-abcde)\n");
}

TEST_F(App, SubmitOfSeveral_SendsEachInItsOrder) {
  const std::string many = directory_ + "/many.yaml";
  std::ofstream(many) << "# two jobs\n---\n"
                      << "name: a\ncommand: [\"true\"]\nresources: {device: cpu, ranks: 1}\n"
                      << "--- # the second\n"
                      << "name: b\ncommand: [\"true\"]\nresources: {device: cpu, ranks: 1}\n"
                      << "after: [\"a:succeeded\"]\n---\n";
  EXPECT_EQ(RunApp({"submit", many, SpecFile(), "--set", "priority=7"}), 0) << err_.str();
  ASSERT_EQ(service_.submitted.size(), 3u);
  EXPECT_EQ(service_.submitted[0].spec().name(), "a");
  EXPECT_EQ(service_.submitted[1].spec().name(), "b");
  EXPECT_EQ(service_.submitted[2].spec().priority(), 7);
  EXPECT_NE(service_.submitted[0].request_id(), service_.submitted[1].request_id());
  EXPECT_EQ(service_.calls, 1);
  EXPECT_EQ(RunApp({"submit", many, "-o", "json"}), 0) << err_.str();
  EXPECT_EQ(nlohmann::json::parse(out_.str()).size(), 2u);
  EXPECT_EQ(RunApp({"submit", many, "--dry-run"}), 0) << err_.str();
  EXPECT_THAT(out_.str(), HasSubstr("\n---\n"));
  EXPECT_EQ(service_.submitted.back().spec().after_size(), 0) << "of a job of the same call";
  EXPECT_THAT(out_.str(), HasSubstr("after: [\"a:succeeded\"]"));
  EXPECT_EQ(RunApp({"submit", many, "--watch"}), 1);
  EXPECT_THAT(err_.str(), HasSubstr("--watch follows one job, and there are 2"));
  EXPECT_EQ(RunApp({"submit", many, "--request-id", "r"}), 1);
  EXPECT_THAT(err_.str(), HasSubstr("--request-id is of one job"));
}

TEST_F(App, SubmitOfSeveral_IsRefusedAsAWholeForASpec_AndGoesOnAfterTheCoordinatorRefuses) {
  const std::string bad = directory_ + "/bad.yaml";
  std::ofstream(bad) << "name: a\ncommand: [\"true\"]\nresources: {device: cpu, ranks: 1}\n---\n"
                     << "name: b\ncommand: [\"true\"]\nresources: {device: cpu, ranks: 0}\n";
  service_.submitted.clear();
  EXPECT_EQ(RunApp({"submit", SpecFile(), bad}), 1);
  EXPECT_THAT(err_.str(), HasSubstr("bad.yaml, document 2:3:33: resources.ranks: "));
  EXPECT_TRUE(service_.submitted.empty());
  service_.submit_refusals = 1;
  EXPECT_EQ(RunApp({"submit", SpecFile(), SpecFile()}), 1);
  EXPECT_THAT(err_.str(), AllOf(HasSubstr("job.yaml: no more jobs"), HasSubstr("1 of 2 were not")));
  EXPECT_EQ(service_.submitted.size(), 2u);
}

TEST_F(App, SubmitOfMany_SendsThemInAFewCalls_AndAgainWhatAStoppingCoordinatorLost) {
  const std::string many = directory_ + "/many.yaml";
  std::ofstream file(many);
  for (int i = 0; i < 300; ++i) {
    file << "---\nname: j" << i << "\ncommand: [\"true\"]\nresources: {device: cpu, ranks: 1}\n";
  }
  file.close();
  EXPECT_EQ(RunApp({"submit", many}), 0) << err_.str();
  EXPECT_EQ(service_.calls, 2);
  ASSERT_EQ(service_.submitted.size(), 300u);
  EXPECT_EQ(service_.submitted[299].spec().name(), "j299");
  service_.submitted.clear();
  service_.submit_failures = 1;
  EXPECT_EQ(RunApp({"submit", SpecFile(), SpecFile()}), 0) << err_.str();
  ASSERT_EQ(service_.submitted.size(), 4u);
  EXPECT_EQ(service_.submitted[0].request_id(), service_.submitted[2].request_id());
}

TEST_F(App, SubmitOfAnArray_SendsAllTasksAtOnce) {
  const std::vector<std::string> submit = {
      "submit", SpecFile(),
      "--set",  "name=sweep",
      "--set",  "array={lr: [0.1, 0.2]}",
      "--set",  "engine.training.optimizer.adamw.lr=\"${array.lr}\""};
  EXPECT_EQ(RunApp(submit), 0) << err_.str();
  EXPECT_EQ(out_.str(), "submitted sweep (sweep-abcde), 2 tasks\n");
  ASSERT_EQ(service_.array_submitted.tasks_size(), 2);
  EXPECT_EQ(service_.array_submitted.tasks(1).name(), "sweep-1");
  EXPECT_EQ(service_.array_submitted.tasks(1).engine().training().optimizer().adamw().lr(), 0.2);
  EXPECT_FALSE(service_.array_submitted.request_id().empty());
  std::vector<std::string> watched = submit;
  watched.push_back("--watch");
  EXPECT_EQ(RunApp(watched), 1);
  EXPECT_THAT(err_.str(), HasSubstr("--watch follows one job"));
  std::vector<std::string> dry = submit;
  dry.push_back("--dry-run");
  EXPECT_EQ(RunApp(dry), 0) << err_.str();
  EXPECT_TRUE(service_.array_submitted.validate_only());
  EXPECT_THAT(out_.str(), AllOf(HasSubstr("sweep-1  0.2"), HasSubstr("array_task:")));
}

TEST_F(App, CommandsForAnArray_ActOnAllOfItsTasks) {
  v1::ArrayTask& task = *service_.job.mutable_spec()->mutable_array_task();
  task.set_array("sweep");
  task.set_array_id("sweep-abcde");
  task.set_tasks(3);
  service_.job.set_name("sweep-0");
  service_.job.set_state(v1::JOB_STATE_RUNNING);
  EXPECT_EQ(RunApp({"cancel", "sweep"}), 0) << err_.str();
  EXPECT_EQ(service_.array_changed.change(), v1::ARRAY_CHANGE_CANCEL);
  EXPECT_EQ(out_.str(),
            "sweep: cancelled 1 of 3 tasks; 1 had ended; 1 were refused\n  job sweep-2 runs\n");
  EXPECT_EQ(RunApp({"hold", "sweep", "--reason", "later"}), 0) << err_.str();
  EXPECT_EQ(service_.array_changed.change(), v1::ARRAY_CHANGE_HOLD);
  EXPECT_EQ(service_.array_changed.reason(), "later");
  EXPECT_EQ(RunApp({"requeue", "sweep"}), 0) << err_.str();
  EXPECT_EQ(service_.array_changed.change(), v1::ARRAY_CHANGE_REQUEUE);
  EXPECT_EQ(RunApp({"preempt", "sweep"}), 0) << err_.str();
  EXPECT_EQ(service_.array_changed.change(), v1::ARRAY_CHANGE_PREEMPT);
  EXPECT_EQ(RunApp({"suspend", "sweep"}), 0) << err_.str();
  EXPECT_EQ(service_.array_changed.change(), v1::ARRAY_CHANGE_SUSPEND);
  EXPECT_THAT(out_.str(), HasSubstr("sweep: suspended 1 of 3 tasks"));
  // One that is refused keeps none of the others from being asked.
  EXPECT_EQ(RunApp({"hold", "nosuch", "sweep", "sweep"}), 1);
  EXPECT_THAT(out_.str(), AllOf(HasSubstr("sweep: held 1"), Not(HasSubstr("suspended"))));
  EXPECT_THAT(err_.str(), HasSubstr("muster: "));
  EXPECT_EQ(RunApp({"get", "jobs"}), 0) << err_.str();
  EXPECT_THAT(out_.str(), HasSubstr("\nsweep  2 running"));  // the fake has two pages
  EXPECT_EQ(RunApp({"get", "jobs", "--tasks"}), 0) << err_.str();
  EXPECT_THAT(out_.str(), HasSubstr("\nsweep-0  running"));
  EXPECT_EQ(RunApp({"describe", "job", "sweep"}), 0) << err_.str();
  EXPECT_THAT(out_.str(), HasSubstr("array:"));
}

TEST_F(App, Submit_RepeatsItselfWithTheSameRequestId) {
  service_.submit_failures = 2;
  EXPECT_EQ(RunApp({"submit", SpecFile()}), 0) << err_.str();
  ASSERT_EQ(service_.submitted.size(), 3u);
  EXPECT_FALSE(service_.submitted[0].request_id().empty());
  EXPECT_EQ(service_.submitted[0].request_id(), service_.submitted[2].request_id());
}

TEST_F(App, Submit_OfABadSpec_NamesFileLineAndField) {
  EXPECT_EQ(RunApp({"submit", SpecFile(), "--set", "engine.model.heads=3"}), 1);
  EXPECT_THAT(err_.str(), HasSubstr("engine.model.heads: 3 does not divide hidden (8)"));
  EXPECT_TRUE(service_.submitted.empty());
  EXPECT_EQ(RunApp({"submit", directory_ + "/none.yaml"}), 1);
  EXPECT_THAT(err_.str(), HasSubstr("none.yaml: cannot be opened"));
}

TEST_F(App, SubmitWatch_OfAFailedJob_ExitsWithOneAndSaysWhy) {
  service_.job.set_state(v1::JOB_STATE_FAILED);
  service_.job.set_message("data/x.idx is missing");
  EXPECT_EQ(RunApp({"submit", SpecFile(), "--watch"}), 1);
  EXPECT_THAT(err_.str(), HasSubstr("gpt failed: data/x.idx is missing"));
}

TEST_F(App, Watch_GoesOnByIdAfterTheStreamBroke) {
  EXPECT_EQ(RunApp({"watch", "gpt"}), 0) << err_.str();
  EXPECT_THAT(service_.watched, ::testing::ElementsAre("gpt", "gpt-abcde"));
  EXPECT_THAT(out_.str(), AllOf(HasSubstr("gpt  running  10/10"), HasSubstr("gpt succeeded")));
}

TEST(Absence, WatchWithoutNewsForAnHour_SurvivesARestart) {
  const absl::Time start = absl::UnixEpoch();
  Absence absence(absl::Minutes(10));
  absence.Opened(start);
  EXPECT_TRUE(absence.ShouldRetry(start + absl::Hours(1)));
}

TEST(Absence, SecondRestartLongAfterTheFirst_IsRetriedAgain) {
  const absl::Time start = absl::UnixEpoch();
  Absence absence(absl::Minutes(10));
  absence.Opened(start);
  EXPECT_TRUE(absence.ShouldRetry(start + absl::Seconds(1)));
  absence.Opened(start + absl::Seconds(2));
  absence.Heard();
  EXPECT_TRUE(absence.ShouldRetry(start + absl::Hours(1)));
}

TEST(Absence, LongerThanThePatience_EndsTheRetries) {
  const absl::Time start = absl::UnixEpoch();
  Absence absence(absl::Minutes(10));
  for (absl::Duration away; away <= absl::Minutes(10); away += absl::Seconds(1)) {
    absence.Opened(start + away);
    EXPECT_TRUE(absence.ShouldRetry(start + away));
  }
  absence.Opened(start + absl::Seconds(601));
  EXPECT_FALSE(absence.ShouldRetry(start + absl::Seconds(601)));
}

TEST_F(App, Version_IsAFlagToo) {
  EXPECT_EQ(RunApp({"--version"}), 0) << err_.str();
  EXPECT_EQ(out_.str(), "muster 1.2.3\n");
}

TEST_F(App, Follow_WithoutACoordinator_FailsAtOnce) {
  environment_["MUSTER_COORDINATOR"] = "127.0.0.1:1";
  EXPECT_EQ(RunApp({"logs", "gpt", "-f"}), 1);
  EXPECT_EQ(RunApp({"events", "-f"}), 1);
}

TEST_F(App, Logs_FollowedAcrossABrokenStream_RepeatNothing) {
  EXPECT_EQ(RunApp({"logs", "gpt", "-f"}), 0) << err_.str();
  EXPECT_EQ(out_.str(), "abcdef\n");
}

TEST_F(App, LogsOfAllRanks_AreLinesWithTheirRank) {
  service_.job.mutable_spec()->mutable_resources()->set_ranks(2);
  service_.log_end = "def\nsecond\nno end";
  EXPECT_EQ(RunApp({"logs", "gpt", "--all-ranks"}), 0) << err_.str();
  EXPECT_EQ(out_.str(),
            "[rank 0] abcdef\n[rank 0] second\n[rank 0] no end\n"
            "[rank 1] abcdef\n[rank 1] second\n[rank 1] no end\n");
}

TEST_F(App, LogsOfAllRanks_AreInOrderOfTime) {
  service_.job.mutable_spec()->mutable_resources()->set_ranks(2);
  service_.log_end = "def\nsecond\nno end";
  service_.log_times[0] = {{0, 1000}, {7, 1030}};
  service_.log_times[1] = {{0, 1010}, {7, 1020}, {14, 1040}};
  EXPECT_EQ(RunApp({"logs", "gpt", "--all-ranks", "--since", "2001-09-09T01:46:40Z"}), 0)
      << err_.str();
  EXPECT_EQ(out_.str(),
            "[rank 0] abcdef\n[rank 1] abcdef\n[rank 1] second\n"
            "[rank 0] second\n[rank 0] no end\n[rank 1] no end\n");
  EXPECT_EQ(service_.logs_since, 1'000'000'000);
  EXPECT_EQ(RunApp({"logs", "gpt", "--since", "yesterday"}), 1);
  EXPECT_THAT(err_.str(), HasSubstr("--since 'yesterday': give how long ago"));
}

TEST_F(App, Usage_HasALineForEachKeyAndAColumnForEachClass) {
  const auto add = [this](const std::string& queue, v1::UsageClass usage_class, double hours) {
    v1::UsageTotal& row = *service_.usage.add_rows();
    row.set_queue(queue);
    row.set_usage_class(usage_class);
    row.set_device_seconds(3600 * hours);
  };
  add("", v1::USAGE_CLASS_IDLE, 2);
  add("research", v1::USAGE_CLASS_PRODUCTIVE, 3);
  add("research", v1::USAGE_CLASS_REPLAYED, 1);
  service_.usage.set_goodput(0.75);
  EXPECT_EQ(RunApp({"usage", "--since", "2h", "--by", "queue"}), 0) << err_.str();
  EXPECT_THAT(out_.str(), HasSubstr("goodput 75.0 % of the device-hours in use"));
  EXPECT_THAT(out_.str(),
              HasSubstr("QUEUE     DEVICE-HOURS  GOODPUT  IDLE    PRODUCTIVE  REPLAYED\n"
                        "research  4.0000        75.0 %   -       3.0000      1.0000\n"
                        "-         2.0000        -        2.0000  -           -\n"
                        "all       6.0000        75.0 %   2.0000  3.0000      1.0000\n"));
  EXPECT_THAT(service_.usage_asked.by(),
              ::testing::ElementsAre(v1::USAGE_KEY_QUEUE, v1::USAGE_KEY_CLASS));
  EXPECT_EQ(RunApp({"usage", "gpt", "--by", "job,cause", "-o", "json"}), 0) << err_.str();
  EXPECT_EQ(Json::parse(out_.str())["rows"].size(), 3u);
  EXPECT_EQ(service_.usage_asked.job(), "gpt");
  EXPECT_EQ(service_.usage_asked.by_size(), 3);
  EXPECT_EQ(RunApp({"usage", "--by", "colour"}), 2);
}

TEST_F(App, UsageByJob_NamesJobsAndTellsThoseOfOneNameApart) {
  const auto add = [this](const std::string& id, const std::string& name, double hours) {
    v1::UsageTotal& row = *service_.usage.add_rows();
    row.set_job_id(id);
    row.set_job_name(name);
    row.set_usage_class(v1::USAGE_CLASS_PRODUCTIVE);
    row.set_device_seconds(3600 * hours);
  };
  add("gpt-abcde", "gpt", 4);
  add("bert-fghij", "bert", 3);
  add("gpt-klmno", "gpt", 2);
  add("", "", 1);
  ASSERT_EQ(RunApp({"usage", "--by", "job"}), 0) << err_.str();
  EXPECT_THAT(out_.str(), HasSubstr("JOB              DEVICE-HOURS  GOODPUT  PRODUCTIVE\n"
                                    "gpt (gpt-abcde)  4.00          100.0 %  4.00\n"
                                    "bert             3.00          100.0 %  3.00\n"
                                    "gpt (gpt-klmno)  2.00          100.0 %  2.00\n"
                                    "-                1.00          100.0 %  1.00\n"));
  ASSERT_EQ(RunApp({"usage", "--by", "job", "-o", "json"}), 0) << err_.str();
  const Json row = Json::parse(out_.str())["rows"][1];
  EXPECT_EQ(row["jobId"], "bert-fghij");
  EXPECT_EQ(row["jobName"], "bert");
}

TEST_F(App, DiffRankMap_ShowsTheRanksThatMoved) {
  service_.rank_maps.set_job_id("gpt-abcde");
  for (const uint64_t epoch : {3, 7, 8}) {
    v1::RankMap& map = *service_.rank_maps.add_maps();
    map.set_epoch(epoch);
    for (int rank = 0; rank < 2; ++rank) {
      v1::Placement& placement = *map.add_placements();
      placement.set_rank(rank);
      placement.set_worker(rank == 1 && epoch == 8 ? "w9" : "w1");
      placement.set_device(absl::StrCat("cuda:", rank));
    }
  }
  EXPECT_EQ(RunApp({"diff-rankmap", "gpt"}), 0) << err_.str();
  EXPECT_EQ(out_.str(),
            "gpt-abcde: 1 of 2 ranks moved between epoch 7 and 8\n"
            "RANK  EPOCH 7    EPOCH 8\n"
            "1     w1 cuda:1  w9 cuda:1\n");
  EXPECT_EQ(RunApp({"diff-rankmap", "gpt", "3", "7"}), 0) << err_.str();
  EXPECT_EQ(out_.str(), "gpt-abcde: 0 of 2 ranks moved between epoch 3 and 7\n");
  service_.rank_maps.mutable_maps(2)->mutable_placements()->RemoveLast();
  EXPECT_EQ(RunApp({"diff-rankmap", "gpt"}), 0) << err_.str();
  EXPECT_THAT(out_.str(), HasSubstr("0 of 1 ranks moved between epoch 7 and 8, 1 were given up\n"));
  EXPECT_EQ(RunApp({"diff-rankmap", "gpt", "4", "8"}), 1);
  EXPECT_THAT(err_.str(), HasSubstr("nothing is known of epoch 4; known are 3, 7, 8"));
}

TEST_F(App, TopOnce_ShowsJobsWorkersAndWhatDevicesDo) {
  service_.job.set_state(v1::JOB_STATE_RUNNING);
  service_.job.mutable_spec()->set_queue("research");
  v1::ClassTime& time = *service_.job.mutable_usage()->add_times();
  time.set_usage_class(v1::USAGE_CLASS_PRODUCTIVE);
  time.set_device_seconds(90);
  time.set_devices(2);
  v1::Worker worker;
  worker.set_name("w1");
  worker.set_state(v1::WORKER_STATE_READY);
  worker.add_devices();
  worker.add_devices();
  service_.workers = {worker};
  EXPECT_EQ(RunApp({"top", "--once"}), 0) << err_.str();
  EXPECT_THAT(out_.str(), AllOf(HasSubstr("workers  1 ready\n"),
                                HasSubstr("devices  2: 2 held (2 productive), 0 free\n"),
                                HasSubstr("1 training, 0 waiting"), HasSubstr("research"),
                                HasSubstr("gpt  running  2        productive  10/10")));
  service_.workers[0].mutable_cordon();
  service_.workers[0].set_slots_used(1);
  EXPECT_EQ(RunApp({"top", "--once"}), 0) << err_.str();
  EXPECT_THAT(out_.str(), HasSubstr("0 free, 1 cordoned\n"));
  EXPECT_EQ(RunApp({"top", "-o", "json"}), 0) << err_.str();
  EXPECT_EQ(Json::parse(out_.str())["jobs"][0]["name"], "gpt");
}

TEST(TopFrame, FitsTheTerminal) {
  TopData data;
  for (int i = 0; i < 200; ++i) {
    v1::Job& job = data.jobs.emplace_back();
    job.set_name(absl::StrCat("job-", 100 + i, std::string(60, 'x')));
    job.set_tokens_per_second(i);
    data.workers.emplace_back().set_name(absl::StrCat("w", i));
  }
  for (const int lines : {1, 2, 5, 24, 60}) {
    for (const int columns : {1, 20, 80, 300}) {
      TopView view{.columns = columns, .lines = lines, .keys = true};
      const std::vector<std::string> frame = TopFrame(data, view, absl::UnixEpoch());
      EXPECT_LE(frame.size(), static_cast<size_t>(std::max(2, lines)));
      for (const std::string& line : frame) EXPECT_LE(line.size(), static_cast<size_t>(columns));
    }
  }
  const auto first = [&](TopView view) {
    for (const std::string& line : TopFrame(data, view, absl::UnixEpoch())) {
      if (line.starts_with("job-")) return line.substr(0, 7);
    }
    return std::string();
  };
  EXPECT_EQ(first({.columns = 200, .lines = 40, .sort = "tokens"}), "job-299");
  EXPECT_EQ(first({.columns = 200, .lines = 40, .sort = "tokens", .reversed = true}), "job-100");
  EXPECT_EQ(first({.columns = 200, .lines = 40, .workers = true}), "");
}

TEST_F(App, LogsWithGrep_AreTheLinesThatMatch) {
  service_.log_end = "def\nsecond\nno end";
  EXPECT_EQ(RunApp({"logs", "gpt", "--grep", "^(a.*f|no end)$"}), 0) << err_.str();
  EXPECT_EQ(out_.str(), "abcdef\nno end\n");
}

TEST_F(App, LogsWithGrep_HaveTheOffsetOfEachLineAsJson) {
  service_.log_end = "def\nsecond\nno end";
  EXPECT_EQ(RunApp({"logs", "gpt", "--grep", "e", "-o", "json"}), 0) << err_.str();
  EXPECT_EQ(out_.str(),
            "{\"epoch\":1,\"rank\":0,\"offset\":0,\"text\":\"abcdef\"}\n"
            "{\"epoch\":1,\"rank\":0,\"offset\":7,\"text\":\"second\"}\n"
            "{\"epoch\":1,\"rank\":0,\"offset\":14,\"text\":\"no end\"}\n");
}

TEST_F(App, LogsWithAWrongExpression_SayWhatIsWrong) {
  EXPECT_EQ(RunApp({"logs", "gpt", "--grep", "(a"}), 1);
  EXPECT_THAT(err_.str(), HasSubstr("--grep '(a': Unmatched"));
}

TEST_F(App, GetJobs_ReadsEveryPage) {
  EXPECT_EQ(RunApp({"get", "jobs", "-o", "json"}), 0) << err_.str();
  EXPECT_EQ(Json::parse(out_.str()).size(), 2u);
}

TEST_F(App, GetWorkers_SaysWhyAGpuGetsNoRank) {
  v1::Worker worker;
  worker.set_name("w1");
  for (const char* name : {"cuda:0", "cuda:1"}) {
    v1::Device& device = *worker.add_devices();
    device.set_kind(v1::DEVICE_KIND_CUDA);
    device.set_name(name);
    device.set_model("NVIDIA H200");
    device.set_uuid(absl::StrCat("GPU-", name + 5));
  }
  worker.mutable_devices(1)->set_unusable("a row of its memory is damaged; reset the device");
  service_.workers = {worker};
  EXPECT_EQ(RunApp({"get", "workers"}), 0) << err_.str();
  EXPECT_THAT(out_.str(),
              AllOf(HasSubstr("2 x NVIDIA H200, 1 unusable"),
                    HasSubstr("\n\nw1 cuda:1 GPU-1 gets no rank: a row of its memory is "
                              "damaged; reset the device\n"),
                    ::testing::Not(HasSubstr("GPU-0"))));
}

TEST_F(App, WorkersAsATree_HaveTheirDomains) {
  const auto add = [this](const std::string& name, const std::string& rack, int free) {
    v1::Worker worker;
    worker.set_name(name);
    worker.set_state(v1::WORKER_STATE_READY);
    worker.set_slots(2);
    worker.set_slots_free(free);
    if (!rack.empty()) {
      worker.add_domains()->set_level(v1::TOPOLOGY_LEVEL_RACK);
      worker.mutable_domains(0)->set_name(rack);
      worker.add_domains()->set_level(v1::TOPOLOGY_LEVEL_ZONE);
      worker.mutable_domains(1)->set_name("a");
    }
    service_.workers.push_back(worker);
  };
  add("w1", "r1", 1);
  add("w2", "r1", 2);
  add("w3", "", 0);
  service_.workers[1].mutable_cordon()->set_drain(true);
  service_.workers[1].mutable_cordon()->set_drained(true);
  EXPECT_EQ(RunApp({"workers", "--tree"}), 0) << err_.str();
  EXPECT_EQ(out_.str(),
            "cluster  3 of 6 slots free, 3 workers\n"
            "|-- zone a  3 of 4 slots free, 2 workers\n"
            "|   `-- rack r1  3 of 4 slots free, 2 workers\n"
            "|       |-- w1  1 of 2 slots free, ready\n"
            "|       `-- w2  2 of 2 slots free, ready, drained\n"
            "`-- w3  0 of 2 slots free, ready\n");
}

TEST_F(App, EventsOfAnAttemptThatEndedBetweenTwoWorkers_NameThem) {
  v1::Event event;
  event.set_sequence(7);
  event.set_kind(v1::EVENT_KIND_ATTEMPT_ENDED);
  event.set_job_name("gpt");
  event.set_epoch(3);
  event.set_cause(v1::CAUSE_NETWORK);
  event.set_message("rank 0 lost rank 1");
  event.add_between("w1");
  event.add_between("w2");
  service_.events = {event};
  EXPECT_EQ(RunApp({"events", "gpt"}), 0) << err_.str();
  EXPECT_THAT(out_.str(),
              HasSubstr("attempt_ended  gpt/3 between w1 and w2  rank 0 lost rank 1\n"));
  EXPECT_EQ(RunApp({"events", "gpt", "-o", "json"}), 0) << err_.str();
  EXPECT_EQ(Json::parse(out_.str())[0]["between"], Json::array({"w1", "w2"}));
}

TEST_F(App, DescribeJob_ShowsThePhaseUntilTheJobHasEnded) {
  service_.job.set_state(v1::JOB_STATE_STARTING);
  service_.job.set_phase("allocating");
  EXPECT_EQ(RunApp({"describe", "job", "gpt"}), 0) << err_.str();
  EXPECT_THAT(out_.str(), ::testing::ContainsRegex("phase: +allocating\n"));
  service_.job.set_state(v1::JOB_STATE_FAILED);
  EXPECT_EQ(RunApp({"describe", "job", "gpt"}), 0) << err_.str();
  EXPECT_THAT(out_.str(), ::testing::Not(HasSubstr("phase:")));
}

TEST_F(App, DescribeJob_ShowsWhatWasReplacedFromTheSecondMembershipOn) {
  service_.job.set_epoch(3);
  service_.job.set_membership(1);
  EXPECT_EQ(RunApp({"describe", "job", "gpt"}), 0) << err_.str();
  EXPECT_THAT(out_.str(), ::testing::Not(HasSubstr("membership")));
  service_.job.set_membership(2);
  v1::Replacement& replacement = *service_.job.add_replacements();
  replacement.set_membership(2);
  replacement.set_worker("w2");
  replacement.set_cause(v1::CAUSE_WORKER_LOST);
  replacement.set_message("rank 4 is lost");
  for (const int rank : {4, 5}) {
    v1::Placement& placement = *replacement.add_ranks();
    placement.set_rank(rank);
    placement.set_worker("w7");
  }
  EXPECT_EQ(RunApp({"describe", "job", "gpt"}), 0) << err_.str();
  EXPECT_THAT(out_.str(), ::testing::ContainsRegex("membership: +2 of attempt 3\n"));
  EXPECT_THAT(out_.str(),
              ::testing::ContainsRegex("2 +- +4,5 +w2 +w7 +worker_lost +rank 4 is lost"));
}

TEST_F(App, UnknownJob_ExitsWithOneAndTheCoordinatorsHint) {
  EXPECT_EQ(RunApp({"get", "job", "gpk"}), 1);
  EXPECT_EQ(err_.str(), "muster: no job 'gpk'; did you mean 'gpt'?\n");
}

TEST_F(App, WrongUsage_ExitsWithTwo) {
  for (const std::vector<std::string>& arguments :
       std::vector<std::vector<std::string>>{{},
                                             {"frobnicate"},
                                             {"get"},
                                             {"get", "job"},
                                             {"get", "jobs", "-o", "xml"},
                                             {"submit"},
                                             {"get", "jobs", "--nope"}}) {
    EXPECT_EQ(RunApp(arguments), 2) << ::testing::PrintToString(arguments);
    EXPECT_FALSE(err_.str().empty());
  }
  for (const auto& [option, text, problem] : std::vector<std::array<std::string, 3>>{
           {"--tokens", "abc", "'abc' is not a whole number, at least 1"},
           {"--tokens", "0", "'0' is not a whole number, at least 1"},
           {"--top-k", "1.5", "'1.5' is not a whole number, at least 0"},
           {"--temperature", "nan", "'nan' is not a number, at least 0"}}) {
    EXPECT_EQ(RunApp({"sample", "gpt", "--prompt", "x", option, text}), 2);
    EXPECT_THAT(err_.str(), HasSubstr(option + ": " + problem));
  }
  EXPECT_EQ(RunApp({"sample", "gpt", "--prompt", ""}), 2);
  EXPECT_THAT(err_.str(), HasSubstr("--prompt: it is empty"));
  RunApp({"gte", "jobs"});
  EXPECT_THAT(err_.str(), HasSubstr("unknown command 'gte'; did you mean 'get'?"));
  RunApp({"describe", "gpt"});
  EXPECT_THAT(err_.str(), HasSubstr("unknown command 'describe gpt'; it goes on with worker, job; "
                                    "see muster describe --help"));
}

TEST_F(App, UnreachableCoordinator_IsNamedWithWhereItsAddressCameFrom) {
  server_->Shutdown();
  EXPECT_EQ(RunApp({"get", "jobs"}), 1);
  EXPECT_THAT(err_.str(), AllOf(HasSubstr(environment_["MUSTER_COORDINATOR"]),
                                HasSubstr("$MUSTER_COORDINATOR")));
  environment_.erase("MUSTER_COORDINATOR");
  EXPECT_EQ(RunApp({"get", "jobs"}), 1);
  EXPECT_THAT(err_.str(), HasSubstr("muster local up"));
}

TEST_F(App, Version_NamesBothSidesAndIsNoFailureWithoutACoordinator) {
  EXPECT_EQ(RunApp({"version"}), 0);
  EXPECT_EQ(out_.str(), "muster 1.2.3\ncoordinator 4.5.6, cluster here\n");
  server_->Shutdown();
  EXPECT_EQ(RunApp({"version", "-o", "json"}), 0);
  EXPECT_EQ(Json::parse(out_.str())["coordinator"], nullptr);
}

TEST_F(App, Plan_ShowsRanksCategoriesAndAdvice) {
  // Stands in for muster-rank: keeps the spec and prints a plan.
  const std::string rank = directory_ + "/muster-rank", seen = directory_ + "/seen";
  std::ofstream(rank) << "#!/bin/sh\n"
                         "cp \"${2#--spec=}\" "
                      << seen
                      << "\n"
                         "echo \"$@\" > "
                      << seen
                      << ".args\n"
                         "cat <<END\n"
                         R"({"device": "cuda", "degrees": {"pipeline": 2, "data": 4, "tensor": 1},
  "parameters": 8030261248, "flopsPerToken": 51000000000, "tokensPerStep": 262144,
  "flopsPerStep": 1.3e16, "microBatches": 16, "bubble": 0.0588, "neededBytes": 107374182400,
  "imbalance": 0.25, "deviceMemoryBytes": 85899345920, "fits": false,
  "with": ["zero 1", "sequence"],
  "shares": {"state-space heads": [15, 9], "MLP columns": [640, 384]},
  "advice": "engine.parallel.zero=1 would fit", "ranks": [
  {"pipeline": 0, "tensor": 0, "ranks": 4, "blocks": 17, "embedding": true, "head": false,
   "parameters": 4000000000,
   "wholeParameters": {"tables": 1000000000, "keys": 0, "small": 266240},
   "neededBytes": 107374182400, "deviceBytes": 107374182400,
   "hostBytes": 1048576, "device": {"gathered": 0, "activations": 107374182400},
   "sent": {"pipeline": 2147483648, "tensor": 0}, "sentBytes": 2147483648, "tooUneven": true},
  {"pipeline": 1, "tensor": 0, "ranks": 4, "blocks": 15, "embedding": false, "head": true,
   "parameters": 4030261248, "neededBytes": 64424509440, "deviceBytes": 64424509440,
   "hostBytes": 1048576, "device": {"gathered": 0, "activations": 64424509440},
   "sent": {"pipeline": 2147483648, "tensor": 0}, "sentBytes": 2147483648}]})"
                         "\nEND\n";
  ASSERT_EQ(::chmod(rank.c_str(), 0700), 0);
  ASSERT_EQ(
      RunApp({"plan", SpecFile(), "--set", "engine.training.steps=7", "--device-memory", "80GiB"}),
      0)
      << err_.str();
  v1::JobSpec spec;
  std::ifstream bytes(seen);
  ASSERT_TRUE(spec.ParseFromIstream(&bytes));
  EXPECT_EQ(spec.engine().training().steps(), 7);
  std::ifstream asked(seen + ".args");
  EXPECT_THAT(std::string(std::istreambuf_iterator<char>(asked), {}),
              HasSubstr("--device-memory=85899345920"));
  EXPECT_THAT(
      out_.str(),
      AllOf(HasSubstr("pipeline 2 x data 4 on cuda; zero 1, sequence\n"), HasSubstr("idles 5.9 %"),
            HasSubstr("shares  state-space heads 15 + 9, MLP columns 640 + 384 by tensor rank\n"),
            HasSubstr("100.0 GiB for the largest rank, 25.0 % above the mean"),
            HasSubstr("whole   1.0G of 4.0G parameters of a rank are not sharded: 1.0G of "
                      "tied embedding and head, 266.2k in small ones\n"),
            HasSubstr("ACTIVATIONS"), ::testing::Not(HasSubstr("GATHERED")),
            HasSubstr("embedding+17"), HasSubstr("15+head"), HasSubstr("125 %"),
            HasSubstr("STAGE  TENSOR  SENDS PER STEP  PIPELINE\n"),
            HasSubstr("what they exchange goes through NCCL.\n"),
            HasSubstr("does not fit into 80.0 GiB for each rank. engine.parallel.zero=1 "
                      "would fit.")));
  ASSERT_EQ(RunApp({"plan", SpecFile(), "-o", "json"}), 0) << err_.str();
  EXPECT_EQ(Json::parse(out_.str())["ranks"][1]["blocks"], 15);
  EXPECT_FALSE(Json::parse(out_.str()).contains("cluster"));
  EXPECT_TRUE(service_.explained.empty()) << "only --cluster asks the coordinator";
  ASSERT_EQ(RunApp({"plan", SpecFile(), "--cluster", "-o", "json"}), 0) << err_.str();
  EXPECT_EQ(Json::parse(out_.str())["cluster"]["placements"][0]["worker"], "w7");
  EXPECT_EQ(Json::parse(out_.str())["cluster"]["job"]["placementCost"]["total"], 12);
  EXPECT_EQ(Json::parse(out_.str())["cluster"]["job"]["name"], "");
  ASSERT_EQ(service_.explained.size(), 1u);
  EXPECT_EQ(service_.explained[0].spec().resources().ranks(), 2);
  ASSERT_EQ(RunApp({"plan", SpecFile(), "--cluster"}), 0) << err_.str();
  EXPECT_THAT(out_.str(), AllOf(HasSubstr("it would start at once.\nWORKER  RANKS"),
                                HasSubstr("cost 12"), HasSubstr("data")));
  EXPECT_EQ(RunApp({"plan", SpecFile(), "--device-memory", "much"}), 2);
  EXPECT_EQ(RunApp({"plan", SpecFile(), "--set", "engine.model.heads=3"}), 1);
  EXPECT_THAT(err_.str(), HasSubstr("engine.model.heads: 3 does not divide hidden (8)"));
}

TEST_F(App, Explain_SaysWhyWhatWouldChangeItAndWhen) {
  service_.job.set_state(v1::JOB_STATE_QUEUED);
  v1::WaitReason& reason = *service_.job.mutable_waiting();
  reason.set_code(v1::WAIT_CODE_SLOTS_TAKEN);
  reason.set_queue("default");
  reason.set_ranks(2);
  reason.set_device(v1::DEVICE_KIND_CPU);
  reason.set_slots_total(2);
  reason.set_ahead(1);
  reason.mutable_change()->add_jobs_end()->set_job_name("other");
  ASSERT_EQ(RunApp({"explain", "gpt"}), 0) << err_.str();
  EXPECT_THAT(out_.str(),
              AllOf(HasSubstr("gpt (gpt-abcde)"), HasSubstr("queued"),
                    HasSubstr("needs 2 cpu slots, 0 are free of 2"),
                    HasSubstr("starts when job other (0 slots) ends"),
                    HasSubstr("default, behind 1 other job\n"), HasSubstr("not known")));
  ASSERT_EQ(RunApp({"explain", "gpt", "-o", "json"}), 0) << err_.str();
  EXPECT_EQ(Json::parse(out_.str())["waiting"]["code"], "WAIT_CODE_SLOTS_TAKEN");
  service_.job.set_state(v1::JOB_STATE_RUNNING);
  service_.job.clear_waiting();
  service_.job.add_ranks()->set_worker("w1");
  ASSERT_EQ(RunApp({"explain", "gpt"}), 0) << err_.str();
  EXPECT_THAT(out_.str(), HasSubstr("it waits for nothing: attempt 0, step 10/10, ranks on w1"));
}

TEST_F(App, ExplainOfAnEndedJob_SaysHowItEndedAndWhereItRanLast) {
  service_.job.clear_waiting();
  service_.job.set_state(v1::JOB_STATE_FAILED);
  service_.job.set_message("rank 1 exited with code 3");
  service_.job.mutable_ended()->set_seconds(1'700'000'000);
  service_.job.mutable_placement_cost()->set_total(12);
  ASSERT_EQ(RunApp({"explain", "gpt"}), 0) << err_.str();
  EXPECT_THAT(out_.str(), AllOf(HasSubstr("failed\n"), HasSubstr("ended:"),
                                HasSubstr("rank 1 exited with code 3\n"),
                                HasSubstr("never: it ended before its first attempt"),
                                ::testing::Not(HasSubstr("placement:"))));
  service_.job.set_attempts(2);
  for (const char* worker : {"w1", "w1", "w2"}) service_.job.add_ranks()->set_worker(worker);
  ASSERT_EQ(RunApp({"explain", "gpt"}), 0) << err_.str();
  EXPECT_THAT(out_.str(), AllOf(HasSubstr("attempt 2, to step 10/10, ranks on w1, w2\n"),
                                ::testing::Not(HasSubstr("placement:"))));
}

TEST_F(App, CheckpointsStoredPerHost_NameTheHostsThatHaveTheParts) {
  service_.job.mutable_spec()->mutable_checkpoint()->set_storage(v1::CHECKPOINT_STORAGE_LOCAL);
  service_.job.set_epoch(2);
  for (int i = 0; i < 4; ++i) {
    v1::RankStatus& rank = *service_.job.add_ranks();
    rank.set_rank(i);
    rank.set_host(i < 2 ? "alpha" : "beta");
    rank.set_worker(i < 2 ? "w1" : "w2");
  }
  v1::CheckpointRecord& record = *service_.job.add_checkpoints();
  record.set_step(10);
  record.set_epoch(2);
  record.set_path(directory_ + "/not-here");
  const std::string parts = "alpha (w1) of ranks 0-1, beta (w2) of ranks 2-3";
  EXPECT_EQ(RunApp({"checkpoints", "gpt"}), 0) << err_.str();
  EXPECT_THAT(out_.str(),
              AllOf(HasSubstr("step 10: checkpoint.storage is local"), HasSubstr(parts)));
  EXPECT_EQ(RunApp({"sample", "gpt", "--prompt", "x"}), 1);
  EXPECT_THAT(err_.str(), AllOf(HasSubstr("cannot be read on this machine"), HasSubstr(parts)));
  // The rank map of an earlier attempt is not known any more.
  service_.job.set_epoch(3);
  EXPECT_EQ(RunApp({"sample", "gpt", "--prompt", "x"}), 1);
  EXPECT_THAT(err_.str(), HasSubstr("`muster events gpt` says where attempt 2 ran"));
}

TEST_F(App, LocalStatusOfADamagedStateFile_SaysWhatToDo) {
  const std::string home = environment_["MUSTER_HOME"];
  std::filesystem::create_directories(home + "/local");
  for (const char* text : {"", "{", "[]", "{\"coordinator\": 1, \"workers\": []}",
                           "{\"coordinator\": {\"pid\": 1, \"startTime\": 2}, \"workers\": [3]}"}) {
    std::ofstream(home + "/local/state.json") << text;
    EXPECT_EQ(RunApp({"local", "status"}), 1) << text;
    EXPECT_THAT(err_.str(), HasSubstr("state.json is damaged")) << text;
  }
}

TEST_F(App, Complete_OffersCommandsFlagsAndJobs) {
  RunApp({"__complete", "--", "get", "j"});
  EXPECT_EQ(out_.str(), "jobs\njob\n");
  RunApp({"__complete", "--", "logs", "g"});
  EXPECT_EQ(out_.str(), "gpt\n");
  RunApp({"__complete", "--", "cancel", "other", "g"});
  EXPECT_EQ(out_.str(), "gpt\n");
  RunApp({"__complete", "--", "plan", "--dev"});
  EXPECT_EQ(out_.str(), "--device-memory\n");
  RunApp({"__complete", "--", "submit", "--wa"});
  EXPECT_EQ(out_.str(), "--watch\n");
  RunApp({"__complete", "--", "get", "jobs", "-o", ""});
  EXPECT_EQ(out_.str(), "table\njson\nyaml\n");
}

TEST_F(App, DataTokenize_WritesTheSplitsThatInspectReads) {
  const std::string text = directory_ + "/text", out = directory_ + "/set";
  std::ofstream(text) << "ab\nab\nab\nba\n";
  EXPECT_EQ(RunApp({"data", "tokenize", "--input", text, "--output", out, "--split",
                    "train=0.75,validation=0.25", "-o", "json"}),
            0)
      << err_.str();
  const Json splits = Json::parse(out_.str());
  ASSERT_EQ(splits.size(), 2u);
  EXPECT_EQ(splits[0]["prefix"], out + ".train");
  EXPECT_EQ(splits[0]["tokens"], 9);
  EXPECT_EQ(splits[1]["tokens"], 3);
  EXPECT_EQ(RunApp({"data", "inspect", out + ".validation", "-o", "json"}), 0) << err_.str();
  const Json summary = Json::parse(out_.str());
  EXPECT_EQ(summary["documents"], 1);
  EXPECT_EQ(summary["tokens"], 3);
  EXPECT_EQ(summary["idsDistinct"], 3);
  EXPECT_EQ(summary["snippet"], "ba\n");
  EXPECT_EQ(RunApp({"data", "inspect", out + ".train"}), 0) << err_.str();
  EXPECT_THAT(out_.str(), HasSubstr("tokens:"));
}

TEST_F(App, DataTrainTokenizer_WritesAFileThatTokenizeAndInspectUse) {
  const std::string text = directory_ + "/text.jsonl", out = directory_ + "/set";
  const std::string tokenizer = directory_ + "/made/tokenizer.json";
  std::ofstream(text) << R"({"text": "a banana, another banana and a third banana"})"
                      << "\n";
  EXPECT_EQ(
      RunApp({"data", "train-tokenizer", "--input", text, "--field", "text", "--output", tokenizer,
              "--vocabulary", "262", "--pattern", "llama3", "--special", "<eos>", "-o", "json"}),
      0)
      << err_.str();
  EXPECT_EQ(Json::parse(out_.str())["tokens"], 262);
  EXPECT_EQ(RunApp({"data", "tokenize", "--input", text, "--output", out, "--tokenizer", tokenizer,
                    "--eos", "<eos>", "--threads", "2", "-o", "json"}),
            0)
      << err_.str();
  const Json sets = Json::parse(out_.str());
  EXPECT_LT(sets[0]["tokens"], 30);
  EXPECT_EQ(sets[0]["eos"], Json({261}));
  EXPECT_EQ(RunApp({"data", "inspect", out, "-o", "json"}), 0) << err_.str();
  EXPECT_EQ(Json::parse(out_.str())["snippet"], "a banana, another banana and a third banana<eos>");
  EXPECT_EQ(RunApp({"data", "inspect", out, "--tokenizer", "none", "-o", "json"}), 0);
  EXPECT_EQ(Json::parse(out_.str())["snippet"], "");
  EXPECT_EQ(RunApp({"data", "merge", "--input", out, out, "--output", out + "2"}), 0) << err_.str();
  EXPECT_EQ(RunApp({"data", "stats", out + "2"}), 0) << err_.str();
  EXPECT_THAT(out_.str(), AllOf(HasSubstr("duplicates:   1 documents"), HasSubstr("####")));
  EXPECT_EQ(RunApp({"data", "stats", out + "2", "-o", "json"}), 0);
  EXPECT_EQ(Json::parse(out_.str())["duplicates"], 1);
  EXPECT_EQ(RunApp({"data", "sample", out + "2", "--count", "1", "--tokens", "1000"}), 0);
  EXPECT_THAT(out_.str(), HasSubstr("a banana, another banana and a third banana<eos>"));
  EXPECT_EQ(RunApp({"data", "validate", out + "2"}), 0) << err_.str();
  EXPECT_THAT(out_.str(), HasSubstr("is sound: 2 documents"));
  // The tokenizer of a data set is checked against what its description names.
  std::ofstream(out + ".tokenizer", std::ios::app) << " ";
  EXPECT_EQ(RunApp({"data", "inspect", out}), 1);
  EXPECT_THAT(err_.str(), HasSubstr(out + ".dataset.json names"));
}

TEST_F(App, Submit_OfAVocabularyBelowTheIdsOfTheData_IsRefusedWithTheNumberThatFits) {
  std::ofstream(directory_ + "/text") << "a zebra\n";
  EXPECT_EQ(RunApp({"data", "tokenize", "--input", directory_ + "/text", "--output",
                    directory_ + "/data/x"}),
            0)
      << err_.str();
  EXPECT_EQ(RunApp({"submit", SpecFile(), "--set", "engine.model.vocab=100"}), 1);
  EXPECT_THAT(err_.str(),
              AllOf(HasSubstr("engine.model.vocab: 100"), HasSubstr("engine.data.train[0].path"),
                    HasSubstr("at least 123"), HasSubstr("256 holds all")));
  const std::string digest(64, 'a');
  EXPECT_EQ(RunApp({"submit", SpecFile(), "--set", "engine.data.tokenizer=" + digest}), 1);
  EXPECT_THAT(err_.str(), AllOf(HasSubstr("was made with the tokenizer bytes"), HasSubstr(digest)));
  EXPECT_TRUE(service_.submitted.empty());
  EXPECT_EQ(RunApp({"submit", SpecFile(), "--set", "engine.data.tokenizer=words"}), 1);
  EXPECT_THAT(err_.str(), HasSubstr("'words' is neither bytes nor a SHA-256"));
  EXPECT_EQ(RunApp({"submit", SpecFile(), "--set", "engine.data.tokenizer=bytes"}), 0)
      << err_.str();
  EXPECT_EQ(service_.submitted.size(), 1u);
}

TEST_F(App, DataTokenize_OfBadInput_SaysWhatIsWrongAndLeavesNoDataset) {
  const std::string text = directory_ + "/text", empty = directory_ + "/empty";
  const std::string out = directory_ + "/set";
  std::ofstream(text) << "some text\n";
  std::ofstream(empty).flush();
  struct Case {
    std::vector<std::string> arguments;
    std::string error;
  };
  const std::vector<Case> cases = {
      {{"--input", directory_ + "/none"}, directory_ + "/none"},
      {{"--input", empty}, "the input files are empty"},
      {{"--input", text, "--split", "train"}, "'train' is no split: expected NAME=FRACTION"},
      {{"--input", text, "--split", "train=-1"}, "'train=-1' is no split"},
      {{"--input", text, "--split", "a=1,a=1"}, "split 'a' is given twice"},
      {{"--input", text, "--split", "../a=1"}, "must not contain '/'"},
      {{"--input", text, "--tokenizer", "bpe"},
       "the tokenizer is neither bytes nor a file: cannot stat bpe"},
  };
  for (const Case& bad : cases) {
    std::vector<std::string> arguments = {"data", "tokenize", "--output", out};
    arguments.insert(arguments.end(), bad.arguments.begin(), bad.arguments.end());
    EXPECT_EQ(RunApp(arguments), 1) << bad.error;
    EXPECT_THAT(err_.str(), HasSubstr(bad.error));
    EXPECT_FALSE(std::ifstream(out + ".idx").good()) << bad.error;
  }
  EXPECT_EQ(RunApp({"data", "tokenize", "--input", text, "--output", out, "--documents", "page"}),
            2);
}

TEST_F(App, DataInspect_OfADamagedDataset_NamesTheFileAndTheDamage) {
  const std::string text = directory_ + "/text", out = directory_ + "/set";
  EXPECT_EQ(RunApp({"data", "inspect", out}), 1);
  EXPECT_THAT(err_.str(), HasSubstr(out + ".idx"));
  std::ofstream(text) << "some text\n";
  ASSERT_EQ(RunApp({"data", "tokenize", "--input", text, "--output", out}), 0) << err_.str();
  {
    std::fstream index(out + ".idx", std::ios::in | std::ios::out | std::ios::binary);
    index.write("NOTMAGIC", 8);
  }
  EXPECT_EQ(RunApp({"data", "inspect", out}), 1);
  EXPECT_THAT(err_.str(), AllOf(HasSubstr(out + ".idx"), HasSubstr("begins with 'NOTMAGIC")));
  ASSERT_EQ(RunApp({"data", "tokenize", "--input", text, "--output", out}), 0) << err_.str();
  std::ofstream(out + ".bin", std::ios::app) << "more";
  EXPECT_EQ(RunApp({"data", "inspect", out}), 1);
  EXPECT_THAT(err_.str(), AllOf(HasSubstr(out + ".bin"), HasSubstr("add up to 10")));
}

TEST_F(App, Resize_SendsTheNumberOrZeroForAuto) {
  service_.job.set_state(v1::JOB_STATE_RESIZING);
  service_.job.set_attempt_state(v1::ATTEMPT_STATE_STOPPING);
  service_.job.add_ranks();
  EXPECT_EQ(RunApp({"resize", "gpt", "4", "--reason", "night"}), 0) << err_.str();
  EXPECT_THAT(out_.str(), HasSubstr("gpt is resizing with 1 rank(s); it goes on with 4"));
  {
    MutexLock lock(&service_.mutex);
    EXPECT_EQ(service_.resize_asked.ranks(), 4);
    EXPECT_EQ(service_.resize_asked.reason(), "night");
  }
  EXPECT_EQ(RunApp({"resize", "gpt", "auto"}), 0) << err_.str();
  EXPECT_THAT(out_.str(), HasSubstr("the scheduler chooses their number"));
  EXPECT_EQ(RunApp({"resize", "gpt", "none"}), 1);
  EXPECT_THAT(err_.str(), HasSubstr("'none' is neither a number of ranks nor auto"));
}

TEST_F(App, LocalUp_ThatCannotStart_SaysWhyAndLeavesNothing) {
  EXPECT_EQ(RunApp({"local", "up"}), 1);
  EXPECT_THAT(err_.str(), HasSubstr("muster-coordinator cannot be started"));
  EXPECT_EQ(RunApp({"local", "down"}), 0) << err_.str();
}

}  // namespace
}  // namespace muster::cli
