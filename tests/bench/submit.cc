// Measures durable submissions per second: clients over gRPC on loopback, the real core, RocksDB in
// a directory of this run, and no worker, so that the queue only grows. Prints one line of JSON:
// the rate, the rate of the second half (does it hold when the queue is long?), and the median of
// one scheduling pass over the whole queue. Server and clients share this machine.
#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/rng.h"
#include "coordinator/core/core.h"
#include "coordinator/metrics.h"
#include "coordinator/rpc/server.h"
#include "coordinator/scheduler/scheduler.h"
#include "coordinator/shell.h"
#include "coordinator/store/store.h"
#include "muster/v1/job_service.grpc.pb.h"
#include "tests/support/job_spec.h"

namespace muster::coordinator {
namespace {

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Submits `jobs` jobs; each client sends its own one after the other. Returns the times of the
// answers in ascending order.
std::vector<double> SubmitAll(const std::string& address, int jobs, int clients) {
  std::atomic<int> next{0};
  std::vector<std::vector<double>> answered(static_cast<size_t>(clients));
  std::vector<std::thread> threads;
  const auto channel = grpc::CreateChannel(address, grpc::InsecureChannelCredentials());
  for (int i = 0; i < clients; ++i) {
    threads.emplace_back([&, i] {
      const auto stub = v1::JobService::NewStub(channel);
      for (int job = next++; job < jobs; job = next++) {
        grpc::ClientContext context;
        v1::SubmitRequest request;
        v1::SubmitResponse response;
        *request.mutable_spec() = testing::SmallJobSpec(absl::StrCat("job-", job));
        request.set_request_id(absl::StrCat("request-", job));
        const grpc::Status status = stub->Submit(&context, request, &response);
        CHECK(status.ok()) << status.error_message();
        CHECK(response.job().has_waiting());
        answered[static_cast<size_t>(i)].push_back(Now());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<double> all;
  for (const auto& of_one : answered) all.insert(all.end(), of_one.begin(), of_one.end());
  std::sort(all.begin(), all.end());
  return all;
}

// Milliseconds of one scheduling pass in which no job can start.
double PlanMilliseconds(int jobs) {
  SlotIndex slots;
  RunningJobs running;
  RunningJob holder;
  holder.name = "holder";
  running.Put(JobId("holder"), holder);
  const KeptSlots kept;
  const QueueTree tree;
  const QueueUse use(tree);
  const QueueHistory history;
  for (int i = 0; i < 128; ++i) {
    WorkerView worker{.id = WorkerId(absl::StrCat("worker-", i)), .ready = true};
    for (int slot = 0; slot < 8; ++slot) {
      worker.slots.push_back({.device = absl::StrCat("cpu:", slot), .held_by = JobId("holder")});
    }
    slots.Put(std::move(worker));
  }
  WaitingQueue queue;
  for (int i = 0; i < jobs; ++i) {
    WaitingJob job;
    job.name = absl::StrCat("job-", i);
    job.id = JobId(job.name);
    job.queue = "default";
    job.ranks = 8;
    job.submit_sequence = static_cast<uint64_t>(i) + 1;
    queue.Add(std::move(job));
  }
  std::vector<double> took;
  for (int i = 0; i < 101; ++i) {
    const double begin = Now();
    CHECK(Plan({slots, running, kept, tree, use, history}, queue, SchedulePolicy(),
               absl::UnixEpoch())
              .decisions.empty());
    took.push_back(1e3 * (Now() - begin));
  }
  std::sort(took.begin(), took.end());
  return took[took.size() / 2];
}

int Main(int argc, char** argv) {
  int jobs = 10'000;
  int clients = 64;
  CLI::App app("Durable submissions per second over gRPC");
  app.add_option("--jobs", jobs, "Jobs to submit")->capture_default_str();
  app.add_option("--clients", clients, "Clients, each with one call at a time")
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  std::string directory =
      (std::filesystem::temp_directory_path() / "muster-bench-submit-XXXXXX").string();
  CHECK(mkdtemp(directory.data()) != nullptr);
  {
    RealClock clock;
    const std::shared_ptr<Logger> log = Logger::Discard();
    const std::unique_ptr<metrics::Registry> registry = metrics::DiscardRegistry();
    Metrics metrics(*registry);
    auto store = OpenRocksDbStore(directory + "/store", "", "bench");
    CHECK_OK(store.status());
    auto shell = Shell::Start(
        {**store, clock, *log, metrics},
        [&](absl::Time now, CoreOutput* output) {
          return Core::Recover(CoreConfig(), **store, Rng(1), now, output);
        },
        nullptr);
    CHECK_OK(shell.status());
    auto server = RpcServer::Start(**shell, {.listen = "127.0.0.1:0", .version = "bench"});
    CHECK_OK(server.status());
    const double begin = Now();
    const std::vector<double> answered = SubmitAll((*server)->address(), jobs, clients);
    const size_t half = answered.size() / 2;
    std::printf(
        "{\"benchmark\":\"submit\",\"jobs\":%d,\"clients\":%d,\"seconds\":%.3f,"
        "\"submits_per_second\":%.0f,\"submits_per_second_second_half\":%.0f,"
        "\"plan_ms_median\":%.3f}\n",
        jobs, clients, answered.back() - begin, jobs / (answered.back() - begin),
        static_cast<double>(answered.size() - half) / (answered.back() - answered[half - 1]),
        PlanMilliseconds(jobs));
    (*server)->Stop(absl::Seconds(2));
  }
  std::filesystem::remove_all(directory);
  return 0;
}

}  // namespace
}  // namespace muster::coordinator

int main(int argc, char** argv) { return muster::coordinator::Main(argc, argv); }
