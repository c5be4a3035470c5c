#include <filesystem>
#include <fstream>

#include "coordinator/state_tools.h"
#include "muster/v1/admin_service.grpc.pb.h"
#include "proto/time.h"
#include "tests/coordinator/rpc_fixture.h"
#include "tests/support/status_matchers.h"

namespace muster::coordinator {
namespace {

using ::muster::testing::StatusIs;
using ::testing::HasSubstr;

namespace fs = std::filesystem;

class AdminTest : public RpcTest {
 protected:
  std::unique_ptr<v1::AdminService::Stub> admin_ =
      v1::AdminService::NewStub(coordinator_->Channel());
};

TEST_F(AdminTest, RemoveWorker_ChecksTheNameAndForgetsTheWorker) {
  v1::RemoveWorkerResponse response;
  const auto remove = [&](const std::string& name) {
    v1::RemoveWorkerRequest request;
    request.set_name(name);
    return admin_->RemoveWorker(Context().get(), request, &response);
  };
  EXPECT_EQ(remove("").error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(remove(std::string(300, 'x')).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(remove("nobody").error_code(), grpc::StatusCode::NOT_FOUND);
  Daemon daemon(*coordinator_, "w", 1);
  daemon.ReadUntil([](const auto& message) { return message.has_welcome(); });
  EXPECT_EQ(remove("w").error_code(), grpc::StatusCode::OK);
  v1::FromCoordinator rest;
  while (daemon.Read(&rest)) continue;
  EXPECT_THAT(daemon.Finish().error_message(), HasSubstr("removed by an operator"));
  v1::ListWorkersResponse workers;
  ASSERT_TRUE(stub_->ListWorkers(Context().get(), {}, &workers).ok());
  EXPECT_EQ(workers.workers_size(), 0);
}

TEST_F(AdminTest, Fleet_IsChangedAndReturned) {
  v1::FleetResponse response;
  v1::CordonRequest cordon;
  cordon.add_workers("w");
  EXPECT_EQ(admin_->Cordon(Context().get(), cordon, &response).error_code(),
            grpc::StatusCode::NOT_FOUND);
  Daemon daemon(*coordinator_, "w", 1);
  daemon.ReadUntil([](const auto& message) { return message.has_welcome(); });
  cordon.set_reason("new fans");
  ASSERT_TRUE(admin_->Cordon(Context().get(), cordon, &response).ok());
  ASSERT_EQ(response.workers_size(), 1);
  EXPECT_EQ(response.workers(0).cordon().reason(), "new fans");
  EXPECT_THAT(response.workers(0).cordon().actor(), HasSubstr("client "));
  v1::DrainRequest drain;
  drain.add_workers("w");
  ASSERT_TRUE(admin_->Drain(Context().get(), drain, &response).ok());
  EXPECT_TRUE(response.workers(0).cordon().drain());
  v1::UncordonRequest uncordon;
  uncordon.add_workers("w");
  ASSERT_TRUE(admin_->Uncordon(Context().get(), uncordon, &response).ok());
  EXPECT_FALSE(response.workers(0).has_cordon());
  v1::ForgiveRequest forgive;
  forgive.add_workers("w");
  ASSERT_TRUE(admin_->Forgive(Context().get(), forgive, &response).ok());
  EXPECT_FALSE(response.workers(0).has_reputation());
  v1::ReserveRequest reserve;
  EXPECT_EQ(admin_->Reserve(Context().get(), reserve, &response).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
  reserve.mutable_reservation()->set_name("r");
  reserve.mutable_reservation()->set_queue("default");
  *reserve.mutable_reservation()->mutable_until() = ToProto(absl::Now() + absl::Hours(1));
  reserve.add_workers()->set_worker("w");
  ASSERT_TRUE(admin_->Reserve(Context().get(), reserve, &response).ok());
  EXPECT_EQ(response.workers(0).reservations_size(), 1);
  v1::UnreserveRequest unreserve;
  unreserve.set_name("r");
  EXPECT_TRUE(admin_->Unreserve(Context().get(), unreserve, &response).ok());
  EXPECT_EQ(admin_->Unreserve(Context().get(), unreserve, &response).error_code(),
            grpc::StatusCode::NOT_FOUND);
}

TEST_F(AdminTest, Backup_IsRestoredToANewDirectoryAndNeverOverAState) {
  const v1::Job job = MustSubmit("a");
  v1::BackupResponse backup;
  ASSERT_TRUE(admin_->Backup(Context().get(), {}, &backup).ok());
  EXPECT_GT(backup.bytes(), 0);
  MustSubmit("b");  // after the backup
  ASSERT_OK_AND_ASSIGN(const StoreContents contents, VerifyBackup(backup.path()));
  EXPECT_EQ(contents.cluster_id, "test-cluster");
  EXPECT_EQ(contents.live_jobs, 1);
  const std::string restored = directory_ + "/restored";
  Rng rng(1);
  ASSERT_OK(RestoreBackup(backup.path(), restored, rng, absl::Now()).status());
  {
    const Coordinator other(restored);
    const auto jobs = v1::JobService::NewStub(other.Channel());
    v1::ListJobsResponse found;
    ASSERT_TRUE(jobs->ListJobs(Context().get(), {}, &found).ok());
    ASSERT_EQ(found.jobs_size(), 1);
    EXPECT_EQ(found.jobs(0).id(), job.id());
  }
  EXPECT_THAT(RestoreBackup(backup.path(), restored, rng, absl::Now()).status(),
              StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("never over a state")));
  // A damaged backup is refused, and leaves nothing behind.
  for (const auto& entry : fs::directory_iterator(backup.path())) {
    if (entry.path().extension() == ".sst") fs::resize_file(entry.path(), 100);
  }
  const std::string broken = directory_ + "/broken";
  EXPECT_THAT(RestoreBackup(backup.path(), broken, rng, absl::Now()).status(),
              StatusIs(absl::StatusCode::kDataLoss));
  EXPECT_FALSE(fs::exists(StateDirectoryOf(broken)));
  EXPECT_THAT(VerifyBackup(directory_ + "/none").status(), StatusIs(absl::StatusCode::kNotFound));
}

TEST_F(AdminTest, Snapshot_IsOneFileThatReplays) {
  v1::SubmitResponse submitted;
  ASSERT_TRUE(Submit(testing::SmallJobSpec("kept"), "k", &submitted).ok());
  const auto workers = v1::WorkerService::NewStub(coordinator_->Channel());
  grpc::ClientContext session;
  const auto stream = workers->Session(&session);
  v1::FromWorker hello;
  hello.set_incarnation(1);
  hello.mutable_hello()->set_worker("w");
  hello.mutable_hello()->set_identity("a secret of its daemon");
  v1::FromCoordinator welcome;
  ASSERT_TRUE(stream->Write(hello) && stream->Read(&welcome));
  const std::string path = directory_ + "/snapshot";
  const auto fetch = [&](const std::string& to) {
    const auto context = Context();
    v1::SnapshotChunk chunk;
    std::ofstream file(to, std::ios::binary);
    const auto reader = admin_->Snapshot(context.get(), v1::SnapshotRequest());
    while (reader->Read(&chunk)) file << chunk.data();
    EXPECT_TRUE(reader->Finish().ok());
  };
  fetch(path);
  absl::StatusOr<ReplayReport> report = ReplayState({.path = path});
  ASSERT_OK(report.status());
  EXPECT_EQ(report->cluster_id, "test-cluster");
  EXPECT_THAT(report->replayed.differences, ::testing::IsEmpty());
  EXPECT_TRUE(report->replayed.rows.contains({Table::kWorkers, "w"}));
  std::ifstream file(path, std::ios::binary);
  const std::string bytes(std::istreambuf_iterator<char>(file), {});
  EXPECT_THAT(bytes, ::testing::Not(HasSubstr("a secret of its daemon")));
  ASSERT_EQ(report->jobs.size(), 1u);
  EXPECT_EQ(report->jobs[0].name(), "kept");
  EXPECT_EQ(report->jobs[0].state(), v1::JOB_STATE_QUEUED);
  ASSERT_TRUE(Submit(testing::SmallJobSpec("second"), "s", &submitted).ok());
  fetch(path + "-2");
  report = ReplayState({.path = path + "-2", .from = path});
  ASSERT_OK(report.status());
  EXPECT_GE(report->replayed.entries, 1);
  EXPECT_EQ(report->jobs.size(), 2u);
  fs::resize_file(path, fs::file_size(path) - 1);
  EXPECT_EQ(ReplayState({.path = path}).status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(ReplayState({.path = path + "-3"}).status().code(), absl::StatusCode::kNotFound);
  session.TryCancel();
  coordinator_->Stop();
  EXPECT_TRUE(fs::is_empty(directory_ + "/snapshots")) << "copies that were read are gone";
}

}  // namespace
}  // namespace muster::coordinator
