// The RPCs about queues: GetQueues, ApplyQueues and GetQueuePolicy.
#include <map>
#include <string>

#include "muster/v1/admin_service.grpc.pb.h"
#include "tests/coordinator/rpc_fixture.h"

namespace muster::coordinator {
namespace {

using ::testing::HasSubstr;

class QueueRpcTest : public RpcTest {
 protected:
  static v1::QueuePolicy Policy() {
    v1::QueuePolicy policy;
    v1::QueueSpec& research = *policy.add_queues();
    research.set_name("research");
    (*research.mutable_guaranteed())["cpu"] = 2;
    v1::QueueSpec& vision = *policy.add_queues();
    vision.set_name("vision");
    vision.set_parent("research");
    vision.set_running_jobs_max(3);
    policy.add_queues()->set_name("default");
    return policy;
  }
  grpc::Status Apply(const v1::QueuePolicy& policy) {
    v1::ApplyQueuesRequest request;
    *request.mutable_policy() = policy;
    v1::ApplyQueuesResponse response;
    return admin_->ApplyQueues(Context().get(), request, &response);
  }
  std::map<std::string, v1::QueueStatus> Queues() {
    v1::GetQueuesResponse response;
    EXPECT_TRUE(stub_->GetQueues(Context().get(), {}, &response).ok());
    std::map<std::string, v1::QueueStatus> by_name;
    for (const v1::QueueStatus& queue : response.queues()) by_name[queue.name()] = queue;
    return by_name;
  }

  std::unique_ptr<v1::AdminService::Stub> admin_ =
      v1::AdminService::NewStub(coordinator_->Channel());
};

TEST_F(QueueRpcTest, WithoutAPolicy_ThereIsTheDefaultQueue_AndItCountsItsJobs) {
  MustSubmit("gpt");
  const auto queues = Queues();
  ASSERT_EQ(queues.size(), 1u);
  const v1::QueueStatus& queue = queues.at("default");
  EXPECT_EQ(queue.waiting_jobs(), 1);
  EXPECT_EQ(queue.running_jobs(), 0);
  ASSERT_EQ(queue.uses_size(), 1);
  EXPECT_EQ(queue.uses(0).device(), "cpu");
  EXPECT_EQ(queue.uses(0).waiting(), testing::SmallJobSpec("gpt").resources().ranks());
  EXPECT_FALSE(queue.uses(0).has_limit());
}

TEST_F(QueueRpcTest, AppliedPolicy_IsServed_AlsoAfterARestart) {
  ASSERT_TRUE(Apply(Policy()).ok());
  for (int start = 0; start < 2; ++start) {
    v1::QueuePolicy read;
    ASSERT_TRUE(admin_->GetQueuePolicy(Context().get(), {}, &read).ok());
    EXPECT_EQ(read.queues_size(), 3);
    const auto queues = Queues();
    ASSERT_EQ(queues.size(), 3u);
    EXPECT_EQ(queues.at("vision").parent(), "research");
    EXPECT_EQ(queues.at("vision").running_jobs_max(), 3);
    ASSERT_EQ(queues.at("research").uses_size(), 1);
    EXPECT_EQ(queues.at("research").uses(0).guaranteed(), 2);
    coordinator_->Restart();
  }
}

TEST_F(QueueRpcTest, ParentsComeBeforeTheQueuesBelowThem) {
  v1::QueuePolicy policy = Policy();
  policy.mutable_queues()->SwapElements(0, 1);
  ASSERT_TRUE(Apply(policy).ok());
  v1::GetQueuesResponse response;
  ASSERT_TRUE(stub_->GetQueues(Context().get(), {}, &response).ok());
  std::map<std::string, int> place;
  for (int i = 0; i < response.queues_size(); ++i) place[response.queues(i).name()] = i;
  EXPECT_LT(place["research"], place["vision"]);
}

TEST_F(QueueRpcTest, RunningJobs_CountInTheirQueueAndInThoseAbove) {
  ASSERT_TRUE(Apply(Policy()).ok());
  const v1::JobSpec small = testing::SmallJobSpec("gpt");
  const int ranks = small.resources().ranks();
  Daemon daemon(*coordinator_, "w", ranks);
  daemon.ReadUntil([](const auto& message) { return message.has_welcome(); });
  v1::JobSpec spec = small;
  spec.set_queue("vision");
  v1::SubmitResponse submitted;
  ASSERT_TRUE(Submit(spec, "", &submitted).ok());
  EXPECT_EQ(submitted.job().state(), v1::JOB_STATE_PLACING);
  const auto queues = Queues();
  for (const char* name : {"vision", "research"}) {
    EXPECT_EQ(queues.at(name).running_jobs(), 1) << name;
    ASSERT_EQ(queues.at(name).uses_size(), 1) << name;
    EXPECT_EQ(queues.at(name).uses(0).used(), ranks) << name;
  }
  EXPECT_EQ(queues.at("default").running_jobs(), 0);
  daemon.Cancel();
}

TEST_F(QueueRpcTest, ContradictoryPolicy_IsRefusedByField_AndChangesNothing) {
  ASSERT_TRUE(Apply(Policy()).ok());
  v1::QueuePolicy policy = Policy();
  policy.mutable_queues(1)->set_parent("nowhere");
  const grpc::Status status = Apply(policy);
  EXPECT_EQ(status.error_code(), grpc::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("queues[1].parent"));
  EXPECT_EQ(Queues().at("vision").parent(), "research");
}

TEST_F(QueueRpcTest, JobForAQueueThatIsNotDefined_IsRefused) {
  ASSERT_TRUE(Apply(Policy()).ok());
  v1::JobSpec spec = testing::SmallJobSpec("gpt");
  v1::SubmitResponse response;
  for (const char* queue : {"nowhere", "research"}) {
    spec.set_queue(queue);
    const grpc::Status status = Submit(spec, "", &response);
    EXPECT_FALSE(status.ok()) << queue;
    EXPECT_THAT(status.error_message(), HasSubstr("queue: ")) << queue;
  }
}

}  // namespace
}  // namespace muster::coordinator
