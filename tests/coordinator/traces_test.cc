// Traces of jobs: spans of events, and what a collector gets.
#include "coordinator/traces.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <httplib.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <future>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/metrics.h"
#include "base/mutex.h"
#include "base/rng.h"
#include "coordinator/core/core.h"
#include "coordinator/core/schema.h"
#include "coordinator/metrics.h"
#include "coordinator/shell.h"
#include "coordinator/store/store.h"
#include "proto/time.h"
#include "tests/support/job_spec.h"
#include "tests/support/seed.h"
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
       {"127.0.0.1:4318", "grpc://127.0.0.1:4317", "http://", "https://", "http://a:0",
        "http://a:b", "http://fd00::1:4318", "https://user:password@collector",
        "http://127.0.0.1:4318/v1/traces", "HTTP://127.0.0.1:4318"}) {
    // Refused before anything is used.
    EXPECT_THAT(TraceExporter::Check({.endpoint = wrong}),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("is not http://HOST:PORT or https://HOST:PORT")))
        << wrong;
  }
  for (const char* right : {"http://127.0.0.1:4318", "https://collector.example.org:4318",
                            "https://collector.example.org", "http://[::1]:4318", "http://[::1]"}) {
    EXPECT_OK(TraceExporter::Check({.endpoint = right})) << right;
  }
}

TEST(TraceExporter, TheAuthoritiesOfACollectorAreChecked) {
  EXPECT_THAT(TraceExporter::Check({.endpoint = "http://127.0.0.1:4318", .ca_file = "/dev/null"}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("--otlp-ca")));
  EXPECT_THAT(TraceExporter::Check({.endpoint = "https://127.0.0.1:4318", .ca_file = "/dev/null"}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("--otlp-ca: /dev/null")));
  EXPECT_THAT(TraceExporter::Check({.endpoint = "https://127.0.0.1:4318", .ca_file = "/no/file"}),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("--otlp-ca: ")));
}

// Keeps the counters of dropped spans, by reason, and discards the rest.
class DroppedSpans : public metrics::Registry {
 public:
  metrics::Counter& GetCounter(const metrics::Family& family,
                               const std::vector<std::string>& labels) override {
    if (family.name != "muster_coordinator_trace_spans_dropped_total") {
      return others_->GetCounter(family, labels);
    }
    MutexLock lock(&mutex_);
    auto& counter = counters_[labels.at(0)];
    if (counter == nullptr) counter = std::make_unique<Counter>(*this);
    return *counter;
  }
  metrics::Gauge& GetGauge(const metrics::Family& family,
                           const std::vector<std::string>& labels) override {
    return others_->GetGauge(family, labels);
  }
  metrics::Histogram& GetHistogram(const metrics::Family& family,
                                   const std::vector<std::string>& labels) override {
    return others_->GetHistogram(family, labels);
  }
  void Remove(const metrics::Family& family, const std::vector<std::string>& labels) override {
    others_->Remove(family, labels);
  }

  bool Has(const std::string& reason) {
    MutexLock lock(&mutex_);
    return counters_.contains(reason);
  }
  // Waits until so many were dropped for this reason.
  void WaitFor(const std::string& reason, double spans) {
    MutexLock lock(&mutex_);
    const auto reached = [&] {
      const auto found = counters_.find(reason);
      return found != counters_.end() && found->second->value >= spans;
    };
    mutex_.Await(Condition(&reached));
  }
  double Value(const std::string& reason) {
    MutexLock lock(&mutex_);
    return counters_.at(reason)->value;
  }

 private:
  struct Counter : metrics::Counter {
    explicit Counter(DroppedSpans& of) : owner(of) {}
    void Increment(double by) override {
      MutexLock lock(&owner.mutex_);
      value += by;
    }
    DroppedSpans& owner;
    double value = 0;
  };

  const std::unique_ptr<metrics::Registry> others_ = metrics::DiscardRegistry();
  Mutex mutex_;
  std::map<std::string, std::unique_ptr<Counter>> counters_;  // guarded by mutex_
};

// A port of loopback on which nobody listens, for as long as this lives.
class ClosedPort {
 public:
  ClosedPort() : socket_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    CHECK_EQ(bind(socket_, reinterpret_cast<sockaddr*>(&address), size), 0);
    CHECK_EQ(getsockname(socket_, reinterpret_cast<sockaddr*>(&address), &size), 0);
    port_ = ntohs(address.sin_port);
  }
  ~ClosedPort() { close(socket_); }
  int port() const { return port_; }

 private:
  const int socket_;
  int port_ = 0;
};

// A coordinator without gRPC, whose events are traced.
class TraceExporterTest : public ::testing::Test {
 protected:
  TraceExporterTest() {
    auto shell = Shell::Start(
        {*store_, clock_, *log_, metrics_},
        [this](absl::Time now, CoreOutput* output) {
          return Core::Recover(CoreConfig(), *store_, Rng(testing::TestSeed()), now, output);
        },
        nullptr);
    CHECK_OK(shell);
    shell_ = *std::move(shell);
  }
  void Export(int port, size_t spans_max) {
    auto started = TraceExporter::Start({.endpoint = absl::StrCat("http://127.0.0.1:", port),
                                         .version = "1.2.3",
                                         .spans_max = spans_max},
                                        *shell_, clock_, *log_);
    CHECK_OK(started);
    exporter_ = *std::move(started);
  }
  // Submits jobs and cancels them. Returns how many spans they had.
  size_t RunJobs(int count) {
    for (int i = 0; i < count; ++i) {
      const std::string name = absl::StrCat("job-", i);
      v1::JobSpec spec = testing::SmallJobSpec(name);
      spec.set_queue("default");
      std::promise<absl::Status> submitted, cancelled;
      shell_->Submit(std::move(spec), "", "client", [&](const absl::StatusOr<JobReply>& reply) {
        submitted.set_value(reply.status());
      });
      EXPECT_OK(submitted.get_future().get());
      shell_->Cancel(name, "client", [&](const absl::StatusOr<JobReply>& reply) {
        cancelled.set_value(reply.status());
      });
      EXPECT_OK(cancelled.get_future().get());
    }
    TraceBuilder builder;
    size_t spans = 0;
    EXPECT_OK(store_->Scan(Table::kEvents, "", schema::EventKey(~uint64_t{0}),
                           [&](const std::string& key, const std::string& value) {
                             v1::Event event;
                             EXPECT_OK(schema::Parse(Table::kEvents, key, value, event));
                             spans += builder.Take(event).size();
                             return true;
                           }));
    return spans;
  }

  const std::unique_ptr<MemoryStore> store_ = MemoryStore::Make("traced");
  RealClock clock_;
  const std::shared_ptr<Logger> log_ = Logger::Discard();
  DroppedSpans dropped_;
  Metrics metrics_{dropped_};
  std::unique_ptr<Shell> shell_;
  std::unique_ptr<TraceExporter> exporter_;
};

TEST_F(TraceExporterTest, WithoutACollector_WhatFindsNoPlaceInTheQueueIsCounted) {
  const ClosedPort down;
  EXPECT_FALSE(dropped_.Has("queue_full"));
  Export(down.port(), /*spans_max=*/4);
  EXPECT_TRUE(dropped_.Has("queue_full"));
  const size_t spans = RunJobs(5);
  ASSERT_GE(spans, 10u);
  dropped_.WaitFor("queue_full", static_cast<double>(spans - 4));
  exporter_.reset();
  EXPECT_EQ(dropped_.Value("queue_full"), static_cast<double>(spans - 4));
  EXPECT_EQ(dropped_.Value("refused"), 0);
}

TEST_F(TraceExporterTest, WhatTheCollectorRefusesForGoodIsCounted) {
  httplib::Server server;
  server.Post("/v1/traces",
              [](const httplib::Request&, httplib::Response& response) { response.status = 400; });
  const int port = server.bind_to_any_port("127.0.0.1");
  std::thread serving([&server] { server.listen_after_bind(); });
  Export(port, /*spans_max=*/1000);
  const size_t spans = RunJobs(3);
  dropped_.WaitFor("refused", static_cast<double>(spans));
  exporter_.reset();
  EXPECT_EQ(dropped_.Value("refused"), static_cast<double>(spans));
  EXPECT_EQ(dropped_.Value("queue_full"), 0);
  server.stop();
  serving.join();
}

}  // namespace
}  // namespace muster::coordinator
