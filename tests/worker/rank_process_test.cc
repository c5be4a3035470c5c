// muster-rank as a process, against a daemon that only answers calls and records them.
#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/file_system.h"
#include "base/mutex.h"
#include "base/rng.h"
#include "muster/v1/rank_service.grpc.pb.h"
#include "parallel/data/indexed_dataset.h"
#include "parallel/data/tokenize.h"
#include "parallel/data/tokenizer_file.h"
#include "proto/spec/spec.h"
#include "tests/support/status_matchers.h"
#include "worker/rank/rank_run.h"

extern char** environ;

namespace muster::worker {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr absl::Duration kPatience = absl::Seconds(60);

class NotingDaemon final : public v1::RankService::Service {
 public:
  explicit NotingDaemon(const std::string& socket) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("unix:" + socket, grpc::InsecureServerCredentials());
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }
  ~NotingDaemon() override { server_->Shutdown(std::chrono::system_clock::now()); }

  grpc::Status Report(grpc::ServerContext*, const v1::ReportRequest* request,
                      v1::ReportResponse* response) override {
    MutexLock lock(&mutex_);
    progress_[request->identity().rank()] = request->progress();
    response->set_last_committed_step(commits_.empty() ? 0 : commits_.back().step());
    response->set_membership(membership_);
    if (over_) return grpc::Status(grpc::StatusCode::ABORTED, "epoch 1 is over");
    return grpc::Status::OK;
  }
  grpc::Status Put(grpc::ServerContext*, const v1::PutRequest* request, v1::PutResponse*) override {
    MutexLock lock(&mutex_);
    values_[KeyOf(*request)] = request->value();
    return grpc::Status::OK;
  }
  grpc::Status Get(grpc::ServerContext*, const v1::GetRequest* request,
                   v1::GetResponse* response) override {
    MutexLock lock(&mutex_);
    const std::string key = KeyOf(*request);
    const auto present = [&]() { return values_.count(key) != 0; };
    if (!mutex_.AwaitWithTimeout(Condition(&present), absl::Seconds(2))) {
      return grpc::Status(grpc::StatusCode::UNAVAILABLE, "not yet");
    }
    response->set_value(values_[key]);
    return grpc::Status::OK;
  }
  grpc::Status Commit(grpc::ServerContext*, const v1::CommitRequest* request,
                      v1::CommitResponse*) override {
    MutexLock lock(&mutex_);
    commits_.push_back(request->checkpoint());
    return grpc::Status::OK;
  }
  grpc::Status Notify(grpc::ServerContext*, const v1::NotifyRequest* request,
                      v1::NotifyResponse*) override {
    MutexLock lock(&mutex_);
    notices_.push_back(*request);
    return grpc::Status::OK;
  }

  // Waits until the rank has finished `step`.
  bool Reached(int rank, int64_t step) {
    MutexLock lock(&mutex_);
    const auto reached = [&]() { return progress_[rank].step() >= step; };
    return mutex_.AwaitWithTimeout(Condition(&reached), kPatience);
  }
  // Waits until the rank reports this phase.
  bool Does(int rank, const std::string& phase) {
    MutexLock lock(&mutex_);
    const auto does = [&]() { return progress_[rank].phase() == phase; };
    return mutex_.AwaitWithTimeout(Condition(&does), kPatience);
  }
  void SetMembership(uint32_t membership) {
    MutexLock lock(&mutex_);
    membership_ = membership;
  }
  void EndAttempt() {
    MutexLock lock(&mutex_);
    over_ = true;
  }
  std::vector<v1::CheckpointRecord> commits() {
    MutexLock lock(&mutex_);
    return commits_;
  }
  std::vector<v1::NotifyRequest> notices() {
    MutexLock lock(&mutex_);
    return notices_;
  }

 private:
  // Keys belong to one membership of one attempt: ranks of the next one must not find the addresses
  // of the last.
  template <typename Request>
  static std::string KeyOf(const Request& request) {
    return absl::StrCat(request.identity().epoch(), ".", request.identity().membership(), "/",
                        request.key());
  }

  Mutex mutex_;
  bool over_ = false;
  uint32_t membership_ = 1;
  std::map<int, v1::RankProgress> progress_;
  std::map<std::string, std::string> values_;
  std::vector<v1::CheckpointRecord> commits_;
  std::vector<v1::NotifyRequest> notices_;
  std::unique_ptr<grpc::Server> server_;
};

class RankProcess : public ::testing::Test {
 protected:
  void SetUp() override {
    // Short: the path of a unix socket has at most 107 bytes.
    std::string pattern = ::testing::TempDir() + "/mrXXXXXX";
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    directory_ = pattern;
    ASSERT_OK_AND_ASSIGN(auto writer, parallel::IndexedDatasetWriter::Create(
                                          *files_, directory_ + "/text", parallel::TokenType::kU8));
    Rng rng(1);
    std::vector<int32_t> tokens(5000);
    for (int32_t& token : tokens) token = static_cast<int32_t>('a' + rng.Below(3));
    ASSERT_OK(writer->Append(tokens));
    ASSERT_OK(writer->EndDocument());
    ASSERT_OK(writer->Finish());
    daemon_ = std::make_unique<NotingDaemon>(directory_ + "/s");
    const char* spec = R"({
      name: tiny,
      engine: {
        model: {family: gpt2, layers: 1, hidden: 16, heads: 2, vocab: 256, sequence_length: 16},
        data: {train: [{path: text}], validation: [{path: text}]},
        training: {steps: 12, global_batch: 4, micro_batch: 2, seed: 3, evaluate_samples: 8,
                   optimizer: {adamw: {lr: 1.0e-2}}},
        parallel: {data: 2}},
      resources: {ranks: 2, threads_per_rank: 1},
      checkpoint: {path: saved, every_steps: 5, keep: 2}})";
    ASSERT_OK_AND_ASSIGN(spec_, spec::Parse(spec, "spec", {}));
    spec_.set_working_directory(directory_);
    spec::ApplyDefaults(spec_);
  }
  void TearDown() override {
    for (const auto& [rank, pid] : running_) kill(pid, SIGKILL);
    for (const auto& [rank, pid] : running_) waitpid(pid, nullptr, 0);
    daemon_.reset();
    ASSERT_OK(files_->RemoveTree(directory_));
  }

  std::string RunDirectory(int rank) {
    return absl::StrCat(directory_, "/e", epoch_, "-rank-", rank);
  }
  std::string Output(int rank) { return *files_->Read(RunDirectory(rank) + "/out"); }

  void Spawn(int key, const std::vector<std::string>& arguments, const std::string& output) {
    std::vector<char*> argv;
    std::string binary = MUSTER_RANK_BINARY;
    argv.push_back(binary.data());
    std::vector<std::string> copies = arguments;
    for (std::string& argument : copies) argv.push_back(argument.data());
    argv.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 1, output.c_str(), O_WRONLY | O_CREAT | O_TRUNC,
                                     0644);
    posix_spawn_file_actions_adddup2(&actions, 1, 2);
    pid_t pid = 0;
    ASSERT_EQ(posix_spawn(&pid, binary.c_str(), &actions, nullptr, argv.data(), environ), 0);
    posix_spawn_file_actions_destroy(&actions);
    running_[key] = pid;
  }

  void Start(int world_size, const std::vector<v1::CheckpointRecord>& restore = {}) {
    v1::ParallelSpec& parallel = *spec_.mutable_engine()->mutable_parallel();
    parallel.set_data(world_size /
                      (std::max(1, parallel.pipeline()) * std::max(1, parallel.context()) *
                       std::max(1, parallel.tensor())));
    spec_.mutable_resources()->set_ranks(world_size);
    for (int rank = 0; rank < world_size; ++rank) {
      Assign(rank, world_size, /*membership=*/1, restore);
      Run(rank);
    }
  }

  // Writes the rank's assignment into its run directory.
  void Assign(int rank, int world_size, uint32_t membership,
              const std::vector<v1::CheckpointRecord>& restore = {}) {
    v1::RankAssignment assignment;
    assignment.set_job_id("tiny-abcde");
    assignment.set_job_name("tiny");
    assignment.set_epoch(static_cast<uint64_t>(epoch_));
    assignment.set_rank(rank);
    assignment.set_world_size(world_size);
    assignment.set_membership(membership);
    assignment.set_device(absl::StrCat("cpu:", rank));
    assignment.set_threads(1);
    *assignment.mutable_spec() = spec_;
    if (adjust_) adjust_(rank, *assignment.mutable_spec());
    for (const v1::CheckpointRecord& record : restore) *assignment.add_restore() = record;
    assignment.set_daemon_socket(directory_ + "/s");
    assignment.set_run_directory(RunDirectory(rank));
    assignment.set_metrics_address("127.0.0.1:0");
    ASSERT_OK(files_->MakeDirectory(RunDirectory(rank)));
    const std::string path = RunDirectory(rank) + "/assignment.pb";
    ASSERT_OK(files_->WriteAtomically(path, assignment.SerializeAsString()));
  }
  void Run(int rank) {
    Spawn(rank, {"--assignment", RunDirectory(rank) + "/assignment.pb"},
          RunDirectory(rank) + "/out");
  }

  // Waits for the rank to end. Returns its exit code, or minus the signal.
  int Wait(int key) {
    int status = 0;
    waitpid(running_.at(key), &status, 0);
    running_.erase(key);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }
  v1::RankExitReport Report(int rank) {
    v1::RankExitReport report;
    const auto bytes = files_->Read(RunDirectory(rank) + "/exit.pb");
    EXPECT_OK(bytes.status()) << Output(rank);
    if (bytes.ok()) report.ParseFromString(*bytes);
    return report;
  }

  const std::unique_ptr<FileSystem> files_ = PosixFileSystem();
  std::string directory_;
  v1::JobSpec spec_;
  std::function<void(int rank, v1::JobSpec& spec)> adjust_;  // changes the spec of one rank
  int epoch_ = 1;
  std::unique_ptr<NotingDaemon> daemon_;
  std::map<int, pid_t> running_;
};

TEST_F(RankProcess, TwoRanks_TrainCommitEvaluateAndReportCompletion) {
  Start(2);
  for (const int rank : {0, 1}) {
    EXPECT_EQ(Wait(rank), kExitCompleted) << Output(rank);
    EXPECT_EQ(Report(rank).cause(), v1::CAUSE_COMPLETED);
    EXPECT_EQ(Report(rank).progress().step(), 12);
    // Weights, both moments and gradients at least.
    EXPECT_GT(Report(rank).progress().memory().device_bytes(), 4 * 4 * 16 * 256);
    EXPECT_EQ(Report(rank).progress().memory().total_bytes(), 0);
    EXPECT_THAT(Output(rank), HasSubstr("step 12/12"));
  }
  const auto commits = daemon_->commits();
  ASSERT_EQ(commits.size(), 3u);
  EXPECT_EQ(commits[0].step(), 5);
  EXPECT_EQ(commits[2].step(), 12);
  EXPECT_EQ(commits[2].consumed_samples(), 48);
  EXPECT_EQ(commits[2].manifest_checksum().size(), 8u);
  int evaluations = 0, removed = 0;
  for (const v1::NotifyRequest& notice : daemon_->notices()) {
    evaluations += notice.has_evaluation();
    removed += notice.has_removed();
    if (notice.has_evaluation()) {
      EXPECT_EQ(notice.evaluation().step(), 12);
      EXPECT_EQ(notice.evaluation().tokens(), 128);
    }
  }
  EXPECT_EQ(evaluations, 1);
  EXPECT_EQ(removed, 1);
  EXPECT_FALSE(files_->Exists(commits[0].path()));

  Spawn(9, {"verify", "--checkpoint", commits[2].path()}, directory_ + "/verify");
  EXPECT_EQ(Wait(9), 0);
  EXPECT_THAT(*files_->Read(directory_ + "/verify"), HasSubstr("is sound"));
  for (const std::string name : {"first", "second"}) {
    Spawn(9,
          {"sample", "--checkpoint", commits[2].path(), "--prompt", "abc", "--tokens", "30",
           "--seed", "4"},
          directory_ + "/" + name);
    EXPECT_EQ(Wait(9), 0);
  }
  const std::string first = *files_->Read(directory_ + "/first");
  EXPECT_EQ(first.size(), 3u + 30 + 1);
  Spawn(9,
        {"sample", "--checkpoint", commits[2].path(), "--prompt", "abc", "--tokens", "30", "--seed",
         "4", "--verbose"},
        directory_ + "/spoken");
  EXPECT_EQ(Wait(9), 0);
  EXPECT_THAT(*files_->Read(directory_ + "/spoken"),
              AllOf(HasSubstr("prompt of 3 tokens in "), HasSubstr(", 29 more in "),
                    HasSubstr(" tokens/s")));
  EXPECT_EQ(first.substr(0, 3), "abc");
  EXPECT_EQ(*files_->Read(directory_ + "/second"), first);
}

// Its peer never comes, and another one takes its place.
TEST_F(RankProcess, NewMembershipBeforeItTrains_IsJoinedByTheSameProcess) {
  Assign(0, 2, /*membership=*/1);
  Run(0);
  ASSERT_TRUE(daemon_->Does(0, "bootstrapping")) << Output(0);
  for (const int rank : {0, 1}) Assign(rank, 2, /*membership=*/2);
  daemon_->SetMembership(2);
  Run(1);
  for (const int rank : {0, 1}) {
    EXPECT_EQ(Wait(rank), kExitCompleted) << Output(rank);
    EXPECT_EQ(Report(rank).progress().step(), 12);
  }
  EXPECT_THAT(Output(0), AllOf(HasSubstr("starts anew"), HasSubstr("step 12/12")));
  EXPECT_EQ(Output(1).find("starts anew"), std::string::npos);
  for (const v1::CheckpointRecord& commit : daemon_->commits()) {
    EXPECT_EQ(commit.membership(), 2u);
    EXPECT_TRUE(absl::EndsWith(commit.path(), ".e1.m2")) << commit.path();
  }
}

TEST_F(RankProcess, ZeroThree_ReportsTheSameLossesToTheLastBit) {
  // Wide enough that ZeRO shards the matrices instead of keeping them whole as small.
  spec_.mutable_engine()->mutable_model()->set_hidden(192);
  const auto losses = [this](int zero) {
    epoch_ = zero + 1;
    spec_.mutable_engine()->mutable_parallel()->set_zero(zero);
    spec_.mutable_checkpoint()->set_path(absl::StrCat(directory_, "/zero-", zero));
    Start(2);
    for (const int rank : {0, 1}) EXPECT_EQ(Wait(rank), kExitCompleted) << Output(rank);
    std::vector<double> curve;
    const v1::RankExitReport report = Report(0);
    for (const v1::LossPoint& point : report.progress().losses()) {
      curve.push_back(point.train_loss());
    }
    return curve;
  };
  const std::vector<double> whole = losses(0);
  EXPECT_EQ(whole.size(), 12u);
  EXPECT_EQ(losses(3), whole);
}

TEST_F(RankProcess, StepsFasterThanReports_AreAllInTheCurve) {
  spec_.mutable_engine()->mutable_training()->set_steps(150);
  spec_.clear_checkpoint();
  Start(1);
  EXPECT_EQ(Wait(0), kExitCompleted) << Output(0);
  const v1::RankExitReport report = Report(0);
  ASSERT_EQ(report.progress().losses_size(), 150);
  for (int i = 0; i < 150; ++i) EXPECT_EQ(report.progress().losses(i).step(), i + 1);
}

TEST_F(RankProcess, PipelineOfTwoStages_TrainsAndItsCheckpointIsWhole) {
  spec_.mutable_engine()->mutable_model()->set_layers(4);
  spec_.mutable_engine()->mutable_parallel()->set_pipeline(2);
  spec_.mutable_engine()->mutable_parallel()->set_pipeline_chunks(2);
  spec_.mutable_engine()->mutable_parallel()->set_pipeline_schedule(
      v1::PIPELINE_SCHEDULE_INTERLEAVED);
  Start(2);
  for (const int rank : {0, 1}) {
    EXPECT_EQ(Wait(rank), kExitCompleted) << Output(rank);
    EXPECT_EQ(Report(rank).progress().step(), 12);
  }
  ASSERT_FALSE(daemon_->commits().empty());
  Spawn(9,
        {"sample", "--checkpoint", daemon_->commits().back().path(), "--prompt", "abc", "--tokens",
         "30", "--seed", "4"},
        directory_ + "/sample");
  EXPECT_EQ(Wait(9), 0);
  EXPECT_EQ(files_->Read(directory_ + "/sample")->size(), 3u + 30 + 1);
}

TEST_F(RankProcess, ZeroBubblePipeline_ReportsTheLossesOfOneForwardOneBackward) {
  spec_.mutable_engine()->mutable_model()->set_layers(4);
  spec_.mutable_engine()->mutable_parallel()->set_pipeline(2);
  const auto losses = [this](v1::PipelineSchedule schedule) {
    epoch_ = schedule;
    spec_.mutable_engine()->mutable_parallel()->set_pipeline_schedule(schedule);
    spec_.mutable_checkpoint()->set_path(absl::StrCat(directory_, "/schedule-", schedule));
    Start(2);
    for (const int rank : {0, 1}) EXPECT_EQ(Wait(rank), kExitCompleted) << Output(rank);
    std::vector<double> curve;
    const v1::RankExitReport report = Report(0);
    for (const v1::LossPoint& point : report.progress().losses()) {
      curve.push_back(point.train_loss());
    }
    return curve;
  };
  const std::vector<double> expected = losses(v1::PIPELINE_SCHEDULE_1F1B);
  EXPECT_EQ(expected.size(), 12u);
  EXPECT_EQ(losses(v1::PIPELINE_SCHEDULE_ZERO_BUBBLE), expected);
}

TEST_F(RankProcess, MeasuredBalance_IsAgreedOnLoggedAndTrainsAsWhatWasEstimated) {
  ASSERT_OK_AND_ASSIGN(
      const v1::JobSpec llama,
      spec::Parse(
          "engine: {model: {preset: llama-1b, layers: 4, hidden: 48, heads: 6, kv_heads: 3, "
          "ffn: 37, vocab: 256, sequence_length: 16, tied: false}}",
          "spec", {}));
  *spec_.mutable_engine()->mutable_model() = llama.engine().model();
  spec_.clear_checkpoint();
  const auto losses = [this](v1::Balance balance, int tensor) {
    ++epoch_;
    v1::ParallelSpec& parallel = *spec_.mutable_engine()->mutable_parallel();
    parallel.set_pipeline(2);
    parallel.set_tensor(tensor);
    parallel.set_balance(balance);
    Start(2 * tensor);
    for (int rank = 0; rank < 2 * tensor; ++rank) {
      EXPECT_EQ(Wait(rank), kExitCompleted) << Output(rank);
    }
    std::vector<double> curve;
    const v1::RankExitReport report = Report(0);
    for (const v1::LossPoint& point : report.progress().losses()) {
      curve.push_back(point.train_loss());
    }
    return curve;
  };
  const std::vector<double> estimated = losses(v1::BALANCE_ESTIMATED, 1);
  EXPECT_EQ(Output(0).find("measured"), std::string::npos);
  EXPECT_EQ(estimated.size(), 12u);
  EXPECT_EQ(losses(v1::BALANCE_MEASURED, 1), estimated);
  EXPECT_THAT(Output(0), AllOf(HasSubstr("measured: embedding "),
                               HasSubstr("; engine.parallel.pipeline_blocks=[")));
  // Processes share cores, so measured speeds may have any ratio.
  const std::vector<double> shared = losses(v1::BALANCE_MEASURED, 2);
  ASSERT_EQ(shared.size(), 12u);
  for (size_t i = 0; i < shared.size(); ++i) EXPECT_NEAR(shared[i] / estimated[i], 1, 1e-5) << i;
}

TEST_F(RankProcess, ContextParallelOverTwoRanks_Trains) {
  spec_.mutable_engine()->mutable_parallel()->set_context(2);
  Start(2);
  for (const int rank : {0, 1}) {
    EXPECT_EQ(Wait(rank), kExitCompleted) << Output(rank);
    EXPECT_EQ(Report(rank).progress().step(), 12);
  }
}

TEST_F(RankProcess, LlamaOverTensorParallelRanks_LearnsAsOnOneRankAndCanBeSampled) {
  ASSERT_OK_AND_ASSIGN(
      const v1::JobSpec llama,
      spec::Parse(
          "engine: {model: {preset: llama-1b, layers: 2, hidden: 48, heads: 6, kv_heads: 3, "
          "ffn: 37, vocab: 256, sequence_length: 16}}",
          "spec", {}));
  *spec_.mutable_engine()->mutable_model() = llama.engine().model();
  const auto losses = [this](int ranks, const std::string& path) {
    ++epoch_;
    spec_.mutable_resources()->set_ranks(ranks);
    v1::ParallelSpec& parallel = *spec_.mutable_engine()->mutable_parallel();
    parallel.set_tensor(std::min(ranks, 2));
    parallel.set_sequence(ranks > 1);
    spec_.mutable_engine()->mutable_training()->set_recompute(ranks > 1 ? v1::RECOMPUTE_FULL
                                                                        : v1::RECOMPUTE_NONE);
    spec_.mutable_checkpoint()->set_path(directory_ + path);
    Start(ranks);
    for (int rank = 0; rank < ranks; ++rank) EXPECT_EQ(Wait(rank), kExitCompleted) << Output(rank);
    std::vector<double> curve;
    const v1::RankExitReport report = Report(0);
    for (const v1::LossPoint& point : report.progress().losses()) {
      curve.push_back(point.train_loss());
    }
    return curve;
  };
  const std::vector<double> alone = losses(1, "/alone"), cut = losses(2, "/cut");
  ASSERT_EQ(alone.size(), 12u);
  ASSERT_EQ(cut.size(), 12u);
  // Unevenly, with the tensor ranks two numbers apart.
  v1::ParallelSpec& parallel = *spec_.mutable_engine()->mutable_parallel();
  for (const double share : {2, 1}) parallel.add_tensor_shares(share);
  for (const v1::MeshAxis axis :
       {v1::MESH_AXIS_DATA, v1::MESH_AXIS_TENSOR, v1::MESH_AXIS_CONTEXT, v1::MESH_AXIS_PIPELINE}) {
    parallel.add_order(axis);
  }
  const std::vector<double> uneven = losses(4, "/uneven");
  ASSERT_EQ(uneven.size(), 12u);
  for (size_t i = 0; i < cut.size(); ++i) {
    EXPECT_NEAR(cut[i] / alone[i], 1, 1e-5) << i;
    EXPECT_NEAR(uneven[i] / alone[i], 1, 1e-5) << i;
  }
  Spawn(9,
        {"sample", "--checkpoint", daemon_->commits().back().path(), "--prompt", "abc", "--tokens",
         "30", "--seed", "4"},
        directory_ + "/sample");
  EXPECT_EQ(Wait(9), 0) << Output(9);
  EXPECT_EQ(files_->Read(directory_ + "/sample")->substr(0, 3), "abc");
}

TEST_F(RankProcess, TokenizerOfTheData_IsKeptWithTheCheckpointsAndDecodesSamples) {
  const std::string file =
      *files_->Read(MUSTER_SOURCE_DIR "/tests/parallel/tokenizers/llama2.json");
  ASSERT_OK_AND_ASSIGN(const auto tokenizer, parallel::ParseTokenizer(file, "llama2.json"));
  std::string text;
  for (int i = 0; i < 300; ++i) text += "Der Käfer läuft über die Straße, 今天天气 very well. ";
  ASSERT_OK(files_->WriteAtomically(directory_ + "/text.txt", text));
  parallel::TokenizeOptions options;
  options.inputs = {directory_ + "/text.txt"};
  options.output = directory_ + "/tokens";
  options.tokenizer_file = file;
  ASSERT_OK(parallel::Tokenize(*files_, *tokenizer, options));
  v1::EngineSpec& engine = *spec_.mutable_engine();
  engine.mutable_data()->mutable_train(0)->set_path("tokens");
  engine.mutable_data()->mutable_validation(0)->set_path("tokens");
  Start(1);
  EXPECT_EQ(Wait(0), kExitFailed);
  EXPECT_EQ(Report(0).cause(), v1::CAUSE_USER_ERROR);
  EXPECT_THAT(Report(0).message(),
              AllOf(HasSubstr("engine.model.vocab: 256, but the ids of engine.data.train[0].path"),
                    HasSubstr("it must be at least "), HasSubstr("and 431 holds all tokens")));

  // Some rows more than the tokenizer has tokens.
  engine.mutable_model()->set_vocab(448);
  ++epoch_;
  Start(2);
  for (const int rank : {0, 1}) EXPECT_EQ(Wait(rank), kExitCompleted) << Output(rank);
  const std::string checkpoint = daemon_->commits().back().path();
  int kept = 0;
  for (const auto& commit : daemon_->commits()) {
    if (!files_->Exists(commit.path() + "/manifest.json")) continue;
    EXPECT_EQ(*files_->Read(commit.path() + "/tokenizer"), file);
    ++kept;
  }
  EXPECT_GT(kept, 1);
  Spawn(9,
        {"sample", "--checkpoint", checkpoint, "--prompt", "Der Käfer", "--tokens", "7", "--seed",
         "4"},
        directory_ + "/sample");
  EXPECT_EQ(Wait(9), 0) << *files_->Read(directory_ + "/sample");
  EXPECT_EQ(files_->Read(directory_ + "/sample")->substr(0, 10), "Der Käfer");
  Spawn(9, {"convert", "--from", checkpoint, "--to", directory_ + "/hf"}, directory_ + "/convert");
  EXPECT_EQ(Wait(9), 0) << *files_->Read(directory_ + "/convert");
  EXPECT_EQ(*files_->Read(directory_ + "/hf/tokenizer.json"), file);

  // What the spec asks for is checked by the ranks too.
  engine.mutable_data()->set_tokenizer("bytes");
  ++epoch_;
  Start(1);
  EXPECT_EQ(Wait(0), kExitFailed);
  EXPECT_THAT(Report(0).message(), AllOf(HasSubstr("engine.data.train[0].path"),
                                         HasSubstr("engine.data.tokenizer asks for bytes")));
  engine.mutable_data()->set_tokenizer("");

  // Ids of another tokenizer mean other text.
  ASSERT_OK(files_->WriteAtomically(directory_ + "/text.txt", text.substr(1)));
  options.output = directory_ + "/others";
  options.tokenizer_file = file + "\n";
  ASSERT_OK(parallel::Tokenize(*files_, *tokenizer, options));
  engine.mutable_data()->mutable_validation(0)->set_path("others");
  ++epoch_;
  Start(1);
  EXPECT_EQ(Wait(0), kExitFailed);
  EXPECT_THAT(Report(0).message(),
              AllOf(HasSubstr("engine.data.validation[0].path"),
                    HasSubstr("but engine.data.train[0].path of llama2.json")));
}

TEST_F(RankProcess, DamagedCheckpoint_IsReportedAndTheOneBeforeRestored) {
  Start(1);
  ASSERT_EQ(Wait(0), kExitCompleted) << Output(0);
  auto commits = daemon_->commits();
  ASSERT_EQ(commits.size(), 3u);
  const std::string shard = commits[2].path() + "/rank-00000.safetensors";
  ASSERT_EQ(truncate(shard.c_str(), 1000), 0);
  epoch_ = 2;
  spec_.mutable_engine()->mutable_training()->set_steps(14);
  Start(1, {commits[2], commits[1]});
  ASSERT_EQ(Wait(0), kExitCompleted) << Output(0);
  EXPECT_THAT(Output(0), HasSubstr("restored step 10"));
  int damaged = 0;
  for (const v1::NotifyRequest& notice : daemon_->notices()) {
    if (!notice.has_damaged()) continue;
    ++damaged;
    EXPECT_EQ(notice.damaged().checkpoint().step(), 12);
    EXPECT_THAT(notice.damaged().reason(), HasSubstr("rank-00000.safetensors"));
  }
  EXPECT_EQ(damaged, 1);
}

TEST_F(RankProcess, MissingData_IsADataErrorThatNamesFieldAndPath) {
  spec_.mutable_engine()->mutable_data()->mutable_train(0)->set_path("absent");
  Start(1);
  EXPECT_EQ(Wait(0), kExitFailed);
  EXPECT_EQ(Report(0).cause(), v1::CAUSE_DATA);
  EXPECT_THAT(Report(0).message(),
              AllOf(HasSubstr("engine.data.train[0].path"), HasSubstr(directory_ + "/absent")));
}

TEST_F(RankProcess, UnwritableCheckpointPath_IsAStorageErrorThatNamesFieldAndPath) {
  ASSERT_OK(files_->WriteAtomically(directory_ + "/saved", "a file in the way"));
  Start(1);
  EXPECT_EQ(Wait(0), kExitFailed);
  EXPECT_EQ(Report(0).cause(), v1::CAUSE_STORAGE);
  EXPECT_THAT(Report(0).message(),
              AllOf(HasSubstr("checkpoint.path"), HasSubstr(directory_ + "/saved")));
}

TEST_F(RankProcess, ImpossibleSpec_IsAUserError) {
  spec_.mutable_engine()->mutable_training()->set_global_batch(5);
  Start(1);
  EXPECT_EQ(Wait(0), kExitFailed);
  EXPECT_EQ(Report(0).cause(), v1::CAUSE_USER_ERROR);
  EXPECT_THAT(Report(0).message(), HasSubstr("engine.training.global_batch"));
}

TEST_F(RankProcess, RanksWithDifferentSpecs_NameEachOtherAndTheField) {
  spec_.mutable_engine()->mutable_training()->set_global_batch(6);
  adjust_ = [](int rank, v1::JobSpec& spec) {
    if (rank != 1) return;
    v1::TrainingSpec& training = *spec.mutable_engine()->mutable_training();
    training.mutable_optimizer()->mutable_adamw()->set_lr(0.5);
  };
  Start(3);
  for (const int rank : {0, 1, 2}) {
    EXPECT_EQ(Wait(rank), kExitFailed);
    EXPECT_EQ(Report(rank).cause(), v1::CAUSE_USER_ERROR) << Report(rank).message();
    EXPECT_THAT(Report(rank).message(),
                AllOf(HasSubstr("do not have the same job spec, by its hash: rank 1 has "),
                      HasSubstr(", but rank 0 has "),
                      HasSubstr("engine.training.optimizer.adamw.lr: 0.01 -> 0.5")));
  }
}

TEST_F(RankProcess, ModelLargerThanMemory_IsAnOutOfMemoryError) {
  auto& model = *spec_.mutable_engine()->mutable_model();
  model.set_layers(512);
  model.set_hidden(16384);
  Start(1);
  EXPECT_EQ(Wait(0), kExitFailed);
  EXPECT_EQ(Report(0).cause(), v1::CAUSE_OUT_OF_MEMORY) << Report(0).message();
  EXPECT_THAT(Report(0).message(),
              AllOf(HasSubstr("rank 0 "), HasSubstr(" needs "), HasSubstr("optimizer 12288.")));
}

TEST_F(RankProcess, Sigterm_StopsAllRanksAtAStepBoundaryWithACheckpoint) {
  spec_.mutable_engine()->mutable_training()->set_steps(1'000'000);
  spec_.mutable_checkpoint()->set_every_steps(1'000'000);
  Start(2);
  ASSERT_TRUE(daemon_->Reached(1, 3)) << Output(1);
  kill(running_.at(1), SIGTERM);
  for (const int rank : {0, 1}) {
    EXPECT_EQ(Wait(rank), kExitStopped) << Output(rank);
    EXPECT_EQ(Report(rank).cause(), v1::CAUSE_PREEMPTED);
  }
  ASSERT_EQ(daemon_->commits().size(), 1u);
  EXPECT_EQ(daemon_->commits()[0].step(), Report(0).progress().step());
}

TEST_F(RankProcess, PeerKilled_EndsTheOtherRankWithACommunicationError) {
  spec_.mutable_engine()->mutable_training()->set_steps(1'000'000);
  Start(2);
  ASSERT_TRUE(daemon_->Reached(0, 3)) << Output(0);
  kill(running_.at(1), SIGKILL);
  EXPECT_EQ(Wait(1), -SIGKILL);
  EXPECT_EQ(Wait(0), kExitFailed) << Output(0);
  EXPECT_EQ(Report(0).cause(), v1::CAUSE_COMMUNICATION) << Report(0).message();
}

TEST_F(RankProcess, AttemptThatIsOver_EndsTheRank) {
  spec_.mutable_engine()->mutable_training()->set_steps(1'000'000);
  Start(1);
  ASSERT_TRUE(daemon_->Reached(0, 2)) << Output(0);
  daemon_->EndAttempt();
  EXPECT_EQ(Wait(0), kExitStopped) << Output(0);
  EXPECT_EQ(Report(0).cause(), v1::CAUSE_CANCELLED);
}

TEST_F(RankProcess, DaemonAway_TrainingGoesOnAndEverythingIsDeliveredLater) {
  spec_.mutable_engine()->mutable_training()->set_steps(60);
  // Without a daemon the test follows what the rank prints. The pipe is opened before the rank
  // starts, so that neither side waits for the other.
  ASSERT_OK(files_->MakeDirectory(RunDirectory(0)));
  const std::string output = RunDirectory(0) + "/out";
  ASSERT_EQ(mkfifo(output.c_str(), 0600), 0);
  const int fifo = open(output.c_str(), O_RDONLY | O_NONBLOCK);
  ASSERT_GE(fifo, 0);
  Start(1);
  ASSERT_EQ(fcntl(fifo, F_SETFL, 0), 0);
  FILE* lines = fdopen(fifo, "r");
  const auto wait_for = [&](const std::string& text) {
    char line[1000];
    while (std::fgets(line, sizeof line, lines) != nullptr) {
      if (absl::StrContains(line, text)) return true;
    }
    return false;  // the rank has ended
  };
  ASSERT_TRUE(wait_for("step 1/60"));
  daemon_.reset();
  ASSERT_TRUE(wait_for("step 60  saved"));
  daemon_ = std::make_unique<NotingDaemon>(directory_ + "/s");
  EXPECT_EQ(Wait(0), kExitCompleted);
  std::fclose(lines);
  ASSERT_FALSE(daemon_->commits().empty());
  EXPECT_EQ(daemon_->commits().back().step(), 60);
}

TEST_F(RankProcess, BadArguments_AreAUsageError) {
  Spawn(0, {"--assignment", directory_ + "/absent"}, directory_ + "/out");
  EXPECT_EQ(Wait(0), kExitUsage);
  Spawn(0, {"frobnicate"}, directory_ + "/out");
  EXPECT_EQ(Wait(0), kExitUsage);
  Spawn(0, {"--describe-metrics"}, directory_ + "/out");
  EXPECT_EQ(Wait(0), 0);
  EXPECT_THAT(*files_->Read(directory_ + "/out"), HasSubstr("muster_rank_steps_total"));
}

}  // namespace
}  // namespace muster::worker
