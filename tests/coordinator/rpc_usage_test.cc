// Sums of device time over rows.
#include "coordinator/rpc/usage.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "coordinator/core/schema.h"
#include "proto/time.h"
#include "tests/support/status_matchers.h"

namespace muster::coordinator {
namespace {

using ::muster::testing::StatusIs;

class UsageTest : public ::testing::Test {
 protected:
  // A row of one class, in the store.
  void Add(const std::string& job, const std::string& queue, v1::UsageClass usage_class,
           int64_t begin_ms, int64_t end_ms, int64_t device_ms) {
    Batch batch;
    batch.Put(Table::kUsage, schema::EncodeU64(++open_.last_row),
              Row(job, queue, usage_class, begin_ms, end_ms, device_ms).SerializeAsString());
    EXPECT_OK(store_->Write({batch}));
  }
  static v1::UsageRow Row(const std::string& job, const std::string& queue,
                          v1::UsageClass usage_class, int64_t begin_ms, int64_t end_ms,
                          int64_t device_ms) {
    v1::UsageRow row;
    row.set_begin_ms(begin_ms);
    row.set_end_ms(end_ms);
    row.set_job_id(job.empty() ? "" : job + "-abcde");
    row.set_job_name(job);
    row.set_queue(queue);
    row.set_tenant(job.empty() ? "" : "of-" + job);
    v1::AccountEntry& entry = *row.add_entries();
    entry.set_usage_class(usage_class);
    entry.set_period_ms(device_ms);
    return row;
  }
  v1::GetUsageResponse Sum() {
    const auto response = SumUsage(*store_, open_, request_);
    EXPECT_OK(response.status());
    return *response;
  }

  std::unique_ptr<MemoryStore> store_ = MemoryStore::Make("test");
  OpenUsage open_{.as_of_ms = 10'000'000};
  v1::GetUsageRequest request_;
};

TEST_F(UsageTest, Rows_AreSummedByTheKeysAskedFor) {
  Add("a", "q", v1::USAGE_CLASS_PRODUCTIVE, 0, 3'600'000, 6'000);
  Add("", "", v1::USAGE_CLASS_IDLE, 0, 3'600'000, 90'000);
  Add("b", "q", v1::USAGE_CLASS_REPLAYED, 0, 3'600'000, 2'000);
  open_.rows.push_back(Row("a", "q", v1::USAGE_CLASS_HELD, 3'600'000, 4'000'000, 4'000));
  EXPECT_EQ(Sum().rows_size(), 1);
  EXPECT_DOUBLE_EQ(Sum().device_seconds(), 102);
  EXPECT_DOUBLE_EQ(Sum().goodput(), 0.5);  // of 12 s that were used
  request_.add_by(v1::USAGE_KEY_JOB);
  const v1::GetUsageResponse jobs = Sum();
  ASSERT_EQ(jobs.rows_size(), 3);
  EXPECT_EQ(jobs.rows(0).job_id(), "");
  EXPECT_EQ(jobs.rows(1).job_name(), "a");
  EXPECT_DOUBLE_EQ(jobs.rows(1).device_seconds(), 10);
  EXPECT_DOUBLE_EQ(jobs.rows(1).goodput(), 0.6);
  request_.set_tenant("of-b");
  EXPECT_DOUBLE_EQ(Sum().device_seconds(), 2);
  request_.clear_tenant();
  request_.clear_by();
  request_.add_by(v1::USAGE_KEY_QUEUE);
  request_.add_by(v1::USAGE_KEY_CLASS);
  EXPECT_EQ(Sum().rows_size(), 4);
}

TEST_F(UsageTest, HourThatLiesPartlyBefore_IsCutInProportion) {
  Add("a", "q", v1::USAGE_CLASS_PRODUCTIVE, 0, 3'600'000, 3'600'000);
  Add("a", "q", v1::USAGE_CLASS_PRODUCTIVE, 3'600'000, 7'200'000, 3'600'000);
  *request_.mutable_since() = ToProto(absl::FromUnixMillis(2'700'000));
  EXPECT_DOUBLE_EQ(Sum().device_seconds(), 900 + 3600);
  *request_.mutable_until() = ToProto(absl::FromUnixMillis(3'600'000));
  EXPECT_DOUBLE_EQ(Sum().device_seconds(), 900);
  EXPECT_EQ(Sum().until().seconds(), 3600);
  *request_.mutable_since() = ToProto(absl::FromUnixMillis(8'000'000));
  EXPECT_THAT(CheckUsageRequest(request_), StatusIs(absl::StatusCode::kInvalidArgument));
}

TEST_F(UsageTest, RowsBehindTheLastOneThatIsKnown_AreOpenOnes) {
  Add("a", "q", v1::USAGE_CLASS_PRODUCTIVE, 0, 3'600'000, 5'000);
  Add("a", "q", v1::USAGE_CLASS_PRODUCTIVE, 3'600'000, 7'200'000, 7'000);
  open_.last_row = 1;  // the second was written since
  EXPECT_DOUBLE_EQ(Sum().device_seconds(), 5);
}

TEST_F(UsageTest, UnknownKeyAndDamagedRow_AreSaid) {
  request_.add_by(static_cast<v1::UsageKey>(77));
  EXPECT_THAT(CheckUsageRequest(request_), StatusIs(absl::StatusCode::kInvalidArgument));
  Batch batch;
  batch.Put(Table::kUsage, schema::EncodeU64(++open_.last_row), "\xff\xff");
  EXPECT_OK(store_->Write({batch}));
  EXPECT_THAT(SumUsage(*store_, open_, {}), StatusIs(absl::StatusCode::kDataLoss));
}

}  // namespace
}  // namespace muster::coordinator
