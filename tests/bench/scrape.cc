// What Prometheus costs the coordinator: scrapes of /metrics and /targets over HTTP, with 1,000
// workers of eight devices and 1,000 jobs of eight ranks that all train. Prints one line of JSON.
#include <httplib.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/loop.h"
#include "base/metrics.h"
#include "base/network.h"
#include "coordinator/metrics.h"
#include "coordinator/published_state.h"
#include "coordinator/targets.h"

namespace muster::coordinator {
namespace {

constexpr int kWorkers = 1000;
constexpr int kJobs = 1000;
constexpr int kRanks = 8;
constexpr int kScrapes = 21;

void Fill(PublishedState& published, Metrics& metrics) {
  std::vector<v1::Worker> workers(kWorkers);
  for (int i = 0; i < kWorkers; ++i) {
    workers[i].set_name(absl::StrCat("worker-", i));
    workers[i].set_state(v1::WORKER_STATE_READY);
    workers[i].set_metrics_address(absl::StrCat("10.0.", i / 250, ".", i % 250 + 1, ":9071"));
    for (int d = 0; d < kRanks; ++d) workers[i].add_devices()->set_kind(v1::DEVICE_KIND_CUDA);
  }
  metrics.Workers(workers);
  published.SetWorkers(std::move(workers));
  for (int i = 0; i < kJobs; ++i) {
    v1::Job state, spec, history, ranks;
    state.set_id(absl::StrCat("job-", i, "-abcde"));
    state.set_name(absl::StrCat("job-", i));
    state.set_state(v1::JOB_STATE_RUNNING);
    state.set_attempts(2);
    state.set_step(i);
    state.set_step_seconds(0.5);
    spec.mutable_spec()->mutable_resources()->set_ranks(kRanks);
    history.add_causes()->set_cause(v1::CAUSE_CRASH);
    for (int r = 0; r < kRanks; ++r) {
      v1::RankStatus& rank = *ranks.add_ranks();
      rank.set_rank(r);
      rank.set_worker(absl::StrCat("worker-", i));
      rank.set_state(v1::RANK_STATE_TRAINING);
      rank.set_metrics_address(absl::StrCat("10.0.", i / 250, ".", i % 250 + 1, ":", 20000 + r));
    }
    JobChanged change{JobId(state.id()), static_cast<uint64_t>(i + 1), {}};
    change.changed[JobPart::kState] = std::make_shared<const v1::Job>(state);
    change.changed[JobPart::kSpec] = std::make_shared<const v1::Job>(spec);
    change.changed[JobPart::kHistory] = std::make_shared<const v1::Job>(history);
    change.changed[JobPart::kRanks] = std::make_shared<const v1::Job>(ranks);
    published.PublishJob(change);
  }
}

struct Scrape {
  double median_ms = 0, worst_ms = 0;
  std::string body;
};

Scrape Measure(httplib::Client& client, const char* path) {
  const RealClock clock;
  std::vector<double> milliseconds;
  Scrape scrape;
  for (int i = 0; i < kScrapes; ++i) {
    const absl::Duration start = clock.Monotonic();
    const auto response = client.Get(path);
    CHECK(response && response->status == 200) << path;
    milliseconds.push_back(absl::ToDoubleMilliseconds(clock.Monotonic() - start));
    scrape.body = response->body;
  }
  std::sort(milliseconds.begin(), milliseconds.end());
  scrape.median_ms = milliseconds[kScrapes / 2];
  scrape.worst_ms = milliseconds.back();
  return scrape;
}

int Main() {
  const RealClock clock;
  ThreadLoop loop(clock);
  auto server = metrics::PrometheusServer::Start("127.0.0.1:0");
  CHECK(server.ok()) << server.status();
  Metrics metrics((*server)->registry());
  PublishedState published(loop, metrics);
  Fill(published, metrics);
  (*server)->SetPages({{"/targets", [&published] {
                          return metrics::PageReply{
                              .body = TargetsJson(published, "bench", "10.0.0.1:9070")};
                        }}});
  const HostPort at = *ParseHostPort((*server)->address());
  httplib::Client client(at.host, std::stoi(at.port));
  const Scrape scrape = Measure(client, "/metrics");
  int series = 0;
  for (size_t begin = 0; begin < scrape.body.size();) {
    series += scrape.body[begin] == '#' ? 0 : 1;
    begin = scrape.body.find('\n', begin) + 1;
  }
  const Scrape targets = Measure(client, "/targets");
  std::printf(
      "{\"workers\":%d,\"jobs\":%d,\"series\":%d,\"metrics_bytes\":%zu,\"metrics_ms\":%.1f,"
      "\"metrics_worst_ms\":%.1f,\"targets_bytes\":%zu,\"targets_ms\":%.1f,"
      "\"targets_worst_ms\":%.1f}\n",
      kWorkers, kJobs, series, scrape.body.size(), scrape.median_ms, scrape.worst_ms,
      targets.body.size(), targets.median_ms, targets.worst_ms);
  (*server)->SetPages({});
  return 0;
}

}  // namespace
}  // namespace muster::coordinator

int main() { return muster::coordinator::Main(); }
