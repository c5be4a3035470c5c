// Measures durable submissions per second: clients over gRPC on loopback, the real core, RocksDB in
// a directory of this run, and no worker, so that the queue only grows. Prints one line of JSON:
// the rate, the rate of the second half (does it hold when the queue is long?), how long calls
// took, the processor time of server and clients, and the median of one scheduling pass over the
// whole queue. Server and clients share this machine. With --tls rounds without and with mutual TLS
// take turns, and a last line has the ratios of their medians.
#include <grpcpp/grpcpp.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "base/rng.h"
#include "coordinator/core/core.h"
#include "coordinator/metrics.h"
#include "coordinator/rpc/server.h"
#include "coordinator/scheduler/scheduler.h"
#include "coordinator/shell.h"
#include "coordinator/store/store.h"
#include "muster/v1/job_service.grpc.pb.h"
#include "security/credentials.h"
#include "security/pki.h"
#include "tests/support/job_spec.h"

namespace muster::coordinator {
namespace {

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Call {
  double answered, took;  // seconds
};

// Sends its jobs one after the other, each when the one before it is answered. The clients share
// the threads of gRPC: a thread for each of them would take time from the coordinator's processors
// that it has on a machine of its own in a cluster.
class Client {
 public:
  // Takes the numbers of its jobs from `next` until that is `jobs`. Then lowers `running`, the
  // number of clients that send, and notifies `done` where it was the last.
  Client(const std::shared_ptr<grpc::Channel>& channel, int jobs, std::atomic<int>& next,
         std::atomic<int>& running, Notification& done)
      : stub_(v1::JobService::NewStub(channel)),
        jobs_(jobs),
        next_(next),
        running_(running),
        done_(done) {}

  void Start() { SendNext(); }
  const std::vector<Call>& calls() const { return calls_; }

 private:
  void SendNext() {
    const int job = next_++;
    if (job >= jobs_) {
      if (--running_ == 0) done_.Notify();
      return;
    }
    context_.emplace();
    *request_.mutable_spec() = testing::SmallJobSpec(absl::StrCat("job-", job));
    request_.set_request_id(absl::StrCat("request-", job));
    begin_ = Now();
    stub_->async()->Submit(&*context_, &request_, &response_,
                           [this](const grpc::Status& status) { OnAnswer(status); });
  }
  void OnAnswer(const grpc::Status& status) {
    CHECK(status.ok()) << status.error_message();
    CHECK(response_.job().has_waiting());
    const double end = Now();
    calls_.push_back({end, end - begin_});
    SendNext();
  }

  const std::unique_ptr<v1::JobService::Stub> stub_;
  const int jobs_;
  std::atomic<int>& next_;
  std::atomic<int>& running_;
  Notification& done_;
  std::optional<grpc::ClientContext> context_;
  v1::SubmitRequest request_;
  v1::SubmitResponse response_;
  double begin_ = 0;
  std::vector<Call> calls_;
};

// Submits `jobs` jobs. Returns the calls in the order of their answers.
std::vector<Call> SubmitAll(const std::shared_ptr<grpc::Channel>& channel, int jobs, int clients) {
  std::atomic<int> next{0}, running{clients};
  Notification done;
  std::vector<std::unique_ptr<Client>> all;
  for (int i = 0; i < clients; ++i) {
    all.push_back(std::make_unique<Client>(channel, jobs, next, running, done));
  }
  for (const auto& client : all) client->Start();
  done.WaitForNotification();
  std::vector<Call> calls;
  for (const auto& client : all) {
    calls.insert(calls.end(), client->calls().begin(), client->calls().end());
  }
  std::sort(calls.begin(), calls.end(),
            [](const Call& a, const Call& b) { return a.answered < b.answered; });
  return calls;
}

double ProcessorSeconds() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
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
    CHECK(
        Plan({slots, running, kept, tree, use, history}, queue, SchedulePolicy(), absl::UnixEpoch())
            .decisions.empty());
    took.push_back(1e3 * (Now() - begin));
  }
  std::sort(took.begin(), took.end());
  return took[took.size() / 2];
}

struct Result {
  double submits_per_second, p99_ms, processor_seconds;
};

// One round on a coordinator of its own; prints its line.
Result Measure(int jobs, int clients, const security::TlsFiles& server_files,
               const security::TlsFiles& client_files) {
  std::string directory =
      (std::filesystem::temp_directory_path() / "muster-bench-submit-XXXXXX").string();
  CHECK(mkdtemp(directory.data()) != nullptr);
  Result result = {};
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
    auto server = RpcServer::Start(**shell, {.listen = "127.0.0.1:0",
                                             .version = "bench",
                                             .tls = server_files,
                                             .gate = {.calls_per_second = 0}});
    CHECK_OK(server.status());
    const bool tls = client_files.any();
    const auto channel =
        grpc::CreateChannel((*server)->address(), tls ? security::ChannelCredentials(client_files)
                                                      : grpc::InsecureChannelCredentials());
    const double begin = Now(), processor = ProcessorSeconds();
    const std::vector<Call> calls = SubmitAll(channel, jobs, clients);
    result.processor_seconds = ProcessorSeconds() - processor;
    const double seconds = calls.back().answered - begin;
    const size_t half = calls.size() / 2;
    std::vector<double> took;
    for (const Call& call : calls) took.push_back(1e3 * call.took);
    std::sort(took.begin(), took.end());
    result.submits_per_second = jobs / seconds;
    result.p99_ms = took[took.size() * 99 / 100];
    std::printf(
        "{\"benchmark\":\"submit\",\"tls\":%s,\"jobs\":%d,\"clients\":%d,\"seconds\":%.3f,"
        "\"submits_per_second\":%.0f,\"submits_per_second_second_half\":%.0f,"
        "\"call_ms\":[%.2f,%.2f],\"processor_seconds\":%.2f,\"plan_ms_median\":%.3f}\n",
        tls ? "true" : "false", jobs, clients, seconds, result.submits_per_second,
        static_cast<double>(calls.size() - half) /
            (calls.back().answered - calls[half - 1].answered),
        took[took.size() / 2], result.p99_ms, result.processor_seconds, PlanMilliseconds(jobs));
    std::fflush(stdout);
    (*server)->Stop(absl::Seconds(2));
  }
  std::filesystem::remove_all(directory);
  return result;
}

void CompareTls(int jobs, int clients, int rounds) {
  std::string directory =
      (std::filesystem::temp_directory_path() / "muster-bench-pki-XXXXXX").string();
  CHECK(mkdtemp(directory.data()) != nullptr);
  security::Pki pki(directory + "/pki", absl::Now());
  CHECK_OK(pki.Init("bench", {"localhost"}, absl::Hours(24)).status());
  CHECK_OK(pki.IssueUser("bench", {{security::Role::kSubmitter, ""}}, absl::Hours(24)).status());
  const auto path = [&](const char* name) { return absl::StrCat(directory, "/pki/", name); };
  const security::TlsFiles server{path("coordinator.crt"), path("coordinator.key"), path("ca.crt")};
  const security::TlsFiles client{path("user-bench.crt"), path("user-bench.key"), path("ca.crt")};
  std::vector<double> rate[2], p99[2], processor[2];
  for (int round = 0; round < rounds; ++round) {
    for (const int tls : {0, 1}) {
      const Result result =
          tls == 1 ? Measure(jobs, clients, server, client) : Measure(jobs, clients, {}, {});
      rate[tls].push_back(result.submits_per_second);
      p99[tls].push_back(result.p99_ms);
      processor[tls].push_back(result.processor_seconds);
    }
  }
  std::printf(
      "{\"benchmark\":\"submit_tls_over_plain\",\"rounds\":%d,\"submits_per_second\":%.3f,"
      "\"p99\":%.3f,\"processor_seconds\":%.3f}\n",
      rounds, Median(rate[1]) / Median(rate[0]), Median(p99[1]) / Median(p99[0]),
      Median(processor[1]) / Median(processor[0]));
  std::filesystem::remove_all(directory);
}

int Main(int argc, char** argv) {
  int jobs = 10'000;
  int clients = 64;
  int rounds = 5;
  bool tls = false;
  CLI::App app("Durable submissions per second over gRPC");
  app.add_option("--jobs", jobs, "Jobs to submit")->capture_default_str();
  app.add_option("--clients", clients, "Clients, each with one call at a time")
      ->capture_default_str();
  app.add_flag("--tls", tls, "Rounds without and with mutual TLS, in turn");
  app.add_option("--rounds", rounds, "How many of each, with --tls")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  if (tls) {
    CompareTls(jobs, clients, rounds);
  } else {
    Measure(jobs, clients, {}, {});
  }
  return 0;
}

}  // namespace
}  // namespace muster::coordinator

int main(int argc, char** argv) {
  muster::SkipLockOrderCheck();  // as muster-coordinator does
  return muster::coordinator::Main(argc, argv);
}
