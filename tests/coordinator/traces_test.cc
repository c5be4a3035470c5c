// Traces of jobs: spans of events, and what a collector gets.
#include "coordinator/traces.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/time.h"
#include "tests/support/status_matchers.h"

namespace muster::coordinator {
namespace {

using ::muster::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

absl::Time At(int seconds) { return absl::UnixEpoch() + absl::Seconds(1000 + seconds); }

v1::Event Event(uint64_t sequence, int seconds, v1::EventKind kind, const std::string& from = "",
                const std::string& to = "") {
  v1::Event event;
  event.set_sequence(sequence);
  *event.mutable_time() = ToProto(At(seconds));
  event.set_kind(kind);
  event.set_job_id("gpt-x1");
  event.set_job_name("gpt");
  event.set_from(from);
  event.set_to(to);
  return event;
}
v1::Event State(uint64_t sequence, int seconds, const std::string& from, const std::string& to) {
  return Event(sequence, seconds, v1::EVENT_KIND_JOB_STATE, from, to);
}

TEST(TraceBuilder, AJobsLifeIsOneTrace) {
  TraceBuilder builder;
  std::vector<Span> spans;
  const auto take = [&](const v1::Event& event) {
    for (Span& span : builder.Take(event)) spans.push_back(std::move(span));
  };
  take(State(1, 0, "", "pending"));
  take(State(2, 0, "pending", "queued"));
  take(State(3, 5, "queued", "placing"));
  take(State(4, 6, "placing", "starting"));
  take(State(5, 9, "starting", "running"));
  v1::Event saved = Event(6, 20, v1::EVENT_KIND_CHECKPOINT_COMMITTED);
  saved.set_step(100);
  take(saved);
  v1::Event ended = Event(7, 30, v1::EVENT_KIND_ATTEMPT_ENDED);
  ended.set_cause(v1::CAUSE_CRASH);
  ended.set_message("rank 1 was ended by signal 11");
  take(ended);
  take(State(8, 31, "running", "recovering"));
  take(State(9, 33, "recovering", "queued"));
  take(State(10, 40, "queued", "failed"));
  std::vector<std::string> names;
  std::set<std::string> ids;
  for (const Span& span : spans) {
    names.push_back(absl::StrCat(span.name, " ", absl::ToInt64Seconds(span.end - span.begin)));
    ids.insert(span.span_id);
    EXPECT_EQ(span.trace_id, spans[0].trace_id);
    EXPECT_THAT(span.trace_id, SizeIs(32));
    EXPECT_EQ(span.parent_id, &span == &spans.back() ? "" : spans.back().span_id);
  }
  EXPECT_THAT(names, ElementsAre("submit 0", "queue 5", "place 1", "launch 3", "checkpoint 0",
                                 "attempt ended 0", "train 22", "restart 2", "queue 7", "job 40"));
  EXPECT_THAT(ids, SizeIs(spans.size()));
  EXPECT_EQ(spans[4].attributes.at("muster.step"), "100");
  EXPECT_TRUE(spans[5].failed);
  EXPECT_EQ(spans[5].attributes.at("muster.cause"), "crash");
  EXPECT_TRUE(spans.back().failed);
}

TEST(TraceBuilder, AClockThatWasSetBackMakesNoNegativeSpan) {
  TraceBuilder builder;
  EXPECT_THAT(builder.Take(State(1, 10, "", "queued")), IsEmpty());
  const std::vector<Span> spans = builder.Take(State(2, 5, "queued", "placing"));
  ASSERT_THAT(spans, SizeIs(1));
  EXPECT_EQ(spans[0].begin, spans[0].end);
}

TEST(OtlpJson, IsWhatTheProtocolSays) {
  TraceBuilder builder;
  builder.Take(State(1, 0, "", "queued"));
  const auto body = nlohmann::json::parse(
      OtlpJson(builder.Take(State(2, 5, "queued", "failed")), "prod", "1.2.3"));
  const auto& resource = body["resourceSpans"][0];
  EXPECT_EQ(resource["resource"]["attributes"][0]["key"], "service.name");
  EXPECT_EQ(resource["resource"]["attributes"][0]["value"]["stringValue"], "muster");
  const auto& spans = resource["scopeSpans"][0]["spans"];
  ASSERT_EQ(spans.size(), 2u);
  EXPECT_EQ(spans[0]["name"], "queue");
  EXPECT_EQ(spans[0]["startTimeUnixNano"], "1000000000000");
  EXPECT_EQ(spans[0]["endTimeUnixNano"], "1005000000000");
  EXPECT_EQ(spans[0]["parentSpanId"], spans[1]["spanId"]);
  EXPECT_FALSE(spans[1].contains("parentSpanId"));
  EXPECT_EQ(spans[1]["status"]["code"], 2);
}

TEST(TraceExporter, TheCollectorsAddressIsChecked) {
  for (const char* wrong :
       {"127.0.0.1:4318", "https://127.0.0.1:4318", "http://", "http://127.0.0.1:4318/v1/traces"}) {
    // Refused before anything is used.
    EXPECT_THAT(TraceExporter::CheckEndpoint(wrong),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("--otlp-endpoint")));
  }
  EXPECT_OK(TraceExporter::CheckEndpoint("http://127.0.0.1:4318"));
}

}  // namespace
}  // namespace muster::coordinator
