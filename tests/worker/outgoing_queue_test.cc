// What waits for the stream to the coordinator stays bounded, in order and complete.
#include "worker/daemon/outgoing_queue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "worker/daemon/core/limits.h"

namespace muster::worker {
namespace {

using ::testing::ElementsAre;

v1::FromWorker Report(uint64_t revision) {
  v1::FromWorker message;
  message.mutable_observed()->set_applied_revision(revision);
  return message;
}

v1::FromWorker Put(uint64_t request, const std::string& value = "") {
  v1::FromWorker message;
  message.mutable_put()->set_request(request);
  message.mutable_put()->set_value(value);
  return message;
}

v1::FromWorker Get(uint64_t request) {
  v1::FromWorker message;
  message.mutable_get()->set_request(request);
  return message;
}

v1::FromWorker Commit(const std::string& job, int64_t step) {
  v1::FromWorker message;
  message.mutable_commit()->set_job_id(job);
  message.mutable_commit()->mutable_checkpoint()->set_step(step);
  return message;
}

v1::FromWorker Log(uint64_t request, size_t bytes) {
  v1::FromWorker message;
  message.mutable_log()->set_request(request);
  message.mutable_log()->set_data(std::string(bytes, 'x'));
  return message;
}

std::string Text(const v1::FromWorker& message) {
  switch (message.kind_case()) {
    case v1::FromWorker::kObserved:
      return absl::StrCat("observed ", message.observed().applied_revision());
    case v1::FromWorker::kPut:
      return absl::StrCat("put ", message.put().request());
    case v1::FromWorker::kGet:
      return absl::StrCat("get ", message.get().request());
    case v1::FromWorker::kCommit:
      return absl::StrCat("commit ", message.commit().job_id(), " ",
                          message.commit().checkpoint().step());
    case v1::FromWorker::kNotice:
      return "notice";
    default:
      return "another";
  }
}

std::vector<std::string> Drain(OutgoingQueue& queue) {
  std::vector<std::string> sent;
  while (!queue.empty()) {
    sent.push_back(Text(queue.Send()));
    queue.Pop();
  }
  return sent;
}

TEST(OutgoingQueue, Observed_ReplacesTheUnsentOneAndStaysBehindWhatWasQueuedBefore) {
  OutgoingQueue queue;
  v1::FromWorker notice;
  notice.mutable_notice();
  ASSERT_TRUE(queue.Push(Report(1)));
  ASSERT_TRUE(queue.Push(Commit("a", 5)));
  ASSERT_TRUE(queue.Push(notice));
  ASSERT_TRUE(queue.Push(notice));
  ASSERT_TRUE(queue.Push(Report(2)));
  EXPECT_THAT(Drain(queue), ElementsAre("commit a 5", "notice", "notice", "observed 2"));
  EXPECT_EQ(queue.bytes(), 0u);
}

TEST(OutgoingQueue, MessageThatIsBeingSent_IsNotReplaced) {
  OutgoingQueue queue;
  ASSERT_TRUE(queue.Push(Report(1)));
  const v1::FromWorker& sending = queue.Send();
  ASSERT_TRUE(queue.Push(Report(2)));
  ASSERT_TRUE(queue.Push(Report(3)));
  EXPECT_EQ(Text(sending), "observed 1");
  EXPECT_THAT(Drain(queue), ElementsAre("observed 1", "observed 3"));
}

TEST(OutgoingQueue, RepeatedRequestsAndCommits_AreQueuedOnce) {
  OutgoingQueue queue;
  for (int round = 0; round < 1000; ++round) {
    ASSERT_TRUE(queue.Push(Put(1, "v")));
    ASSERT_TRUE(queue.Push(Get(2)));
    ASSERT_TRUE(queue.Push(Commit("a", 5)));
    ASSERT_TRUE(queue.Push(Commit("b", 5)));
    ASSERT_TRUE(queue.Push(Commit("a", 6)));
  }
  EXPECT_THAT(Drain(queue),
              ElementsAre("put 1", "get 2", "commit a 5", "commit b 5", "commit a 6"));
}

TEST(OutgoingQueue, RepliesBeyondTheirBound_GoWithoutDataAndSayWhy) {
  OutgoingQueue queue;
  constexpr size_t kEach = 1024 * 1024;
  for (uint64_t request = 0; request < kFileBytesUnsentMax / kEach; ++request) {
    ASSERT_TRUE(queue.Push(Log(request, kEach)));
  }
  v1::FromWorker trace;
  trace.mutable_profile()->set_data(std::string(kEach, 'x'));
  ASSERT_TRUE(queue.Push(trace));
  ASSERT_TRUE(queue.Push(Log(99, kEach)));
  EXPECT_LT(queue.bytes(), kFileBytesUnsentMax + kEach);
  v1::FromWorker last;
  while (!queue.empty()) {
    last = queue.Send();
    queue.Pop();
    if (last.has_profile()) trace = last;
  }
  EXPECT_EQ(trace.profile().data(), "");
  EXPECT_EQ(trace.profile().status_code(), static_cast<int>(absl::StatusCode::kResourceExhausted));
  EXPECT_EQ(last.log().request(), 99u);
  EXPECT_EQ(last.log().data(), "");
  EXPECT_EQ(last.log().status_code(), static_cast<int>(absl::StatusCode::kResourceExhausted));
  ASSERT_TRUE(queue.Push(Log(100, kEach)));
  EXPECT_EQ(queue.Send().log().data().size(), kEach);
}

TEST(OutgoingQueue, FullQueue_TakesNothingAndKeepsWhatItHas) {
  OutgoingQueue queue;
  uint64_t taken = 0;
  while (taken < 1000 && queue.Push(Put(taken, std::string(kValueBytesMax, 'x')))) ++taken;
  EXPECT_LE(queue.bytes(), kOutgoingBytesMax);
  EXPECT_GT(queue.bytes(), kOutgoingBytesMax - 2 * kValueBytesMax);
  EXPECT_EQ(queue.size(), taken);
  ASSERT_TRUE(queue.Push(Report(1)));
  EXPECT_EQ(Text(queue.Send()), "put 0");
}

}  // namespace
}  // namespace muster::worker
