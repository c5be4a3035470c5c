// The calls that KEDA makes, and what follows from the answers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>

#include "externalscaler/external_scaler.grpc.pb.h"
#include "tests/coordinator/rpc_fixture.h"

namespace muster::coordinator {
namespace {

namespace keda = ::externalscaler;
using ::testing::HasSubstr;

class ExternalScalerTest : public RpcTest {
 protected:
  ExternalScalerTest() : keda_(keda::ExternalScaler::NewStub(coordinator_->Channel())) {
    object_.set_name("workers");
    object_.set_namespace_("muster");
    auto& metadata = *object_.mutable_scalermetadata();
    metadata["workers"] = "muster-worker-cpu";
    metadata["device"] = "cpu";
    metadata["devicesPerWorker"] = "1";
    metadata["maxWorkers"] = "8";
  }
  bool Active() {
    keda::IsActiveResponse response;
    EXPECT_TRUE(keda_->IsActive(Context().get(), object_, &response).ok());
    return response.result();
  }
  // Replicas as KEDA and the autoscaler of Kubernetes make them of the answers: none while nothing
  // is active, else ceil(metric / target), between 1 and the object's maximum.
  int Replicas() {
    if (!Active()) return 0;
    keda::GetMetricSpecResponse specs;
    EXPECT_TRUE(keda_->GetMetricSpec(Context().get(), object_, &specs).ok());
    EXPECT_EQ(specs.metricspecs_size(), 1);
    keda::GetMetricsRequest request;
    *request.mutable_scaledobjectref() = object_;
    request.set_metricname(specs.metricspecs(0).metricname());
    keda::GetMetricsResponse metrics;
    EXPECT_TRUE(keda_->GetMetrics(Context().get(), request, &metrics).ok());
    EXPECT_EQ(metrics.metricvalues_size(), 1);
    EXPECT_EQ(metrics.metricvalues(0).metricname(), specs.metricspecs(0).metricname());
    EXPECT_EQ(static_cast<double>(metrics.metricvalues(0).metricvalue()),
              metrics.metricvalues(0).metricvaluefloat());
    return static_cast<int>(std::ceil(metrics.metricvalues(0).metricvaluefloat() /
                                      specs.metricspecs(0).targetsizefloat()));
  }

  std::unique_ptr<keda::ExternalScaler::Stub> keda_;
  keda::ScaledObjectRef object_;
};

TEST_F(ExternalScalerTest, ReplicasFollowTheGangsThatWait) {
  EXPECT_EQ(Replicas(), 0);
  const v1::Job job = MustSubmit("first");
  const int ranks = job.spec().resources().ranks();
  EXPECT_EQ(Replicas(), ranks);
  MustSubmit("second");
  EXPECT_EQ(Replicas(), std::min(8, 2 * ranks));
  for (const char* name : {"first", "second"}) {
    v1::CancelJobRequest cancel;
    cancel.set_name(name);
    v1::Job cancelled;
    ASSERT_TRUE(stub_->CancelJob(Context().get(), cancel, &cancelled).ok());
  }
  EXPECT_EQ(Replicas(), 0);
}

TEST_F(ExternalScalerTest, TheStreamTellsAtOnceAndWhenItChanges) {
  const auto context = Context();
  const auto stream = keda_->StreamIsActive(context.get(), object_);
  keda::IsActiveResponse response;
  ASSERT_TRUE(stream->Read(&response));
  EXPECT_FALSE(response.result());
  MustSubmit("first");
  ASSERT_TRUE(stream->Read(&response));
  EXPECT_TRUE(response.result());
  context->TryCancel();
  stream->Finish();
}

TEST_F(ExternalScalerTest, AWrongTriggerIsRefusedByName) {
  (*object_.mutable_scalermetadata())["device"] = "tpu";
  keda::IsActiveResponse response;
  const grpc::Status status = keda_->IsActive(Context().get(), object_, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(),
              HasSubstr("trigger of ScaledObject 'workers': device: 'tpu'"));
  const auto context = Context();
  EXPECT_EQ(keda_->StreamIsActive(context.get(), object_)->Finish().error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
}

}  // namespace
}  // namespace muster::coordinator
