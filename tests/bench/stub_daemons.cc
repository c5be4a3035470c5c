// The coordinator under a large fleet: a real muster-coordinator process, and in this process as
// many stub daemons as asked for, each on a live gRPC stream of its own. First they only heartbeat;
// then a gang of many ranks starts and stops several times. Prints one line of JSON: processor time
// and memory of the coordinator, and the times from a request, or from the last report that a
// command waits for, to the arrival of the command at each daemon. Both processes share this
// machine.
#include <grpcpp/grpcpp.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <deque>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "base/check.h"
#include "base/mutex.h"
#include "base/proc.h"
#include "muster/v1/job_service.grpc.pb.h"
#include "muster/v1/worker_service.grpc.pb.h"
#include "security/credentials.h"
#include "security/pki.h"
#include "tests/support/job_spec.h"

extern char** environ;

namespace muster {
namespace {

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Times between requests and the arrival of commands, in seconds.
class Latencies {
 public:
  void Begin(double at) {
    MutexLock lock(&mutex_);
    begin_ = at;
  }
  void Arrived() {
    MutexLock lock(&mutex_);
    seconds_.push_back(Now() - begin_);
  }
  // Milliseconds.
  double Percentile(double p) {
    MutexLock lock(&mutex_);
    if (seconds_.empty()) return 0;
    std::sort(seconds_.begin(), seconds_.end());
    return 1e3 * seconds_[std::min(seconds_.size() - 1,
                                   static_cast<size_t>(p * static_cast<double>(seconds_.size())))];
  }

 private:
  Mutex mutex_;
  double begin_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<double> seconds_ ABSL_GUARDED_BY(mutex_);
};

struct Fleet {
  std::atomic<int> welcomed{0};
  std::atomic<int> closed{0};
  Latencies prepare, run, stop;
};

// One daemon: it does at once what it is told, and says so.
class Stub : public grpc::ClientBidiReactor<v1::FromWorker, v1::FromCoordinator> {
 public:
  Stub(Fleet& fleet, v1::WorkerService::Stub& service, int number, int slots) : fleet_(fleet) {
    v1::FromWorker hello;
    hello.set_incarnation(1);
    hello.mutable_hello()->set_worker(absl::StrCat("w", number));
    hello.mutable_hello()->set_identity(absl::StrCat("identity-", number));
    hello.mutable_hello()->set_host("bench");
    hello.mutable_hello()->set_protocol_version(1);
    for (int slot = 0; slot < slots; ++slot) {
      v1::Device& device = *hello.mutable_hello()->add_devices();
      device.set_name(absl::StrCat("cpu:", slot));
      device.set_kind(v1::DEVICE_KIND_CPU);
    }
    service.async()->Session(&context_, this);
    AddHold();
    StartRead(&received_);
    StartCall();
    Send(std::move(hello));
  }

  void Heartbeat() {
    MutexLock lock(&mutex_);
    if (ended_) return;
    Report();
  }
  void Cancel() {
    context_.TryCancel();
    RemoveHold();
  }

  void OnReadDone(bool ok) override {
    if (!ok) return;
    if (received_.has_welcome()) ++fleet_.welcomed;
    if (received_.has_desired()) Apply(received_.desired());
    StartRead(&received_);
  }
  void OnWriteDone(bool ok) override {
    MutexLock lock(&mutex_);
    out_.pop_front();
    if (ok && !out_.empty()) StartWrite(&out_.front());
  }
  void OnDone(const grpc::Status& status) override {
    if (status.error_code() != grpc::CANCELLED) {
      std::fprintf(stderr, "a stream ended: %s\n", status.error_message().c_str());
    }
    ++fleet_.closed;
    MutexLock lock(&mutex_);
    ended_ = true;
  }

 private:
  void Apply(const v1::Desired& desired) {
    MutexLock lock(&mutex_);
    applied_ = desired.revision();
    observed_.clear_attempts();
    for (const v1::DesiredAttempt& attempt : desired.attempts()) {
      v1::RankState state = v1::RANK_STATE_PREPARED;
      if (attempt.phase() == v1::DESIRED_PHASE_RUNNING) {
        state = v1::RANK_STATE_TRAINING;
        fleet_.run.Arrived();
      } else if (attempt.phase() == v1::DESIRED_PHASE_STOPPED) {
        fleet_.stop.Arrived();
        continue;  // it holds nothing of it any more
      } else {
        fleet_.prepare.Arrived();
        fleet_.run.Begin(Now());  // the last one counts
      }
      v1::ObservedAttempt& out = *observed_.add_attempts();
      out.set_job_id(attempt.job_id());
      out.set_epoch(attempt.epoch());
      for (const v1::RankAssignment& assigned : attempt.ranks()) {
        v1::ObservedRank& rank = *out.add_ranks();
        rank.set_rank(assigned.rank());
        rank.set_state(state);
        if (state != v1::RANK_STATE_TRAINING) continue;
        rank.mutable_progress()->set_step(1);
        rank.mutable_progress()->set_train_loss(2.5);
      }
    }
    Report();
  }
  void Report() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    observed_.set_applied_revision(applied_);
    v1::FromWorker message;
    message.set_incarnation(1);
    *message.mutable_observed() = observed_;
    SendLocked(std::move(message));
  }
  void Send(v1::FromWorker message) {
    MutexLock lock(&mutex_);
    SendLocked(std::move(message));
  }
  void SendLocked(v1::FromWorker message) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    out_.push_back(std::move(message));
    if (out_.size() == 1) StartWrite(&out_.front());
  }

  Fleet& fleet_;
  grpc::ClientContext context_;
  v1::FromCoordinator received_;
  Mutex mutex_;
  std::deque<v1::FromWorker> out_ ABSL_GUARDED_BY(mutex_);  // the first one is being written
  v1::Observed observed_ ABSL_GUARDED_BY(mutex_);
  uint64_t applied_ ABSL_GUARDED_BY(mutex_) = 0;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
};

// A muster-coordinator of this run.
class Coordinator {
 public:
  Coordinator(const std::string& binary, const std::string& directory,
              const security::TlsFiles& tls) {
    int out[2];
    CHECK(pipe(out) == 0);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, out[1], 1);
    posix_spawn_file_actions_addclose(&actions, out[0]);
    std::vector<std::string> words = {binary,  "--listen",   "127.0.0.1:0", "--log-level",
                                      "error", "--data-dir", directory};
    if (tls.any()) {
      words.insert(words.end(), {"--tls-cert", tls.certificate, "--tls-key", tls.key, "--tls-ca",
                                 tls.authorities});
    }
    std::vector<char*> arguments;
    for (std::string& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    CHECK(posix_spawn(&pid_, binary.c_str(), &actions, nullptr, arguments.data(), environ) == 0)
        << binary;
    posix_spawn_file_actions_destroy(&actions);
    close(out[1]);
    std::string line;
    for (char c = 0; read(out[0], &c, 1) == 1 && c != '\n';) line.push_back(c);
    close(out[0]);
    // {"address":"127.0.0.1:1234",...
    const std::vector<std::string> parts = absl::StrSplit(line, '"');
    CHECK(parts.size() > 3) << "the coordinator said '" << line << "'";
    address_ = parts[3];
  }
  ~Coordinator() {
    kill(pid_, SIGTERM);
    waitpid(pid_, nullptr, 0);
  }
  const std::string& address() const { return address_; }
  double ProcessorSeconds() const {
    const std::string stat = ReadKernelFile(absl::StrCat("/proc/", pid_, "/stat"));
    const std::vector<std::string> fields = absl::StrSplit(stat.substr(stat.rfind(')') + 2), ' ');
    return (std::stod(fields[11]) + std::stod(fields[12])) /
           static_cast<double>(sysconf(_SC_CLK_TCK));
  }
  double PeakMiB() const {
    for (const std::string& line : std::vector<std::string>(
             absl::StrSplit(ReadKernelFile(absl::StrCat("/proc/", pid_, "/status")), '\n'))) {
      if (line.rfind("VmHWM:", 0) == 0) return std::stod(line.substr(6)) / 1024;
    }
    return 0;
  }

 private:
  pid_t pid_ = 0;
  std::string address_;
};

v1::Job Get(v1::JobService::Stub& jobs, const std::string& name) {
  grpc::ClientContext context;
  v1::GetJobRequest request;
  request.set_name(name);
  v1::Job job;
  const grpc::Status status = jobs.GetJob(&context, request, &job);
  CHECK(status.ok()) << status.error_message();
  return job;
}

void AwaitState(v1::JobService::Stub& jobs, const std::string& name, v1::JobState state) {
  const double give_up = Now() + 120;
  while (Get(jobs, name).state() != state) {
    CHECK(Now() < give_up) << name << " is not " << v1::JobState_Name(state) << ": "
                           << Get(jobs, name).ShortDebugString().substr(0, 500);
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
}

int Main(int argc, char** argv) {
  int daemons = 10'000, slots = 8, ranks = 4096, times = 10;
  double idle = 10;
  bool tls = false;
  std::string binary =
      (std::filesystem::read_symlink("/proc/self/exe").parent_path() / "muster-coordinator")
          .string();
  CLI::App app("The coordinator under a fleet of stub daemons");
  app.add_option("--daemons", daemons, "Daemons, each with a stream")->capture_default_str();
  app.add_option("--slots", slots, "Slots of a daemon")->capture_default_str();
  app.add_option("--ranks", ranks, "Ranks of the gang")->capture_default_str();
  app.add_option("--times", times, "How often the gang starts and stops")->capture_default_str();
  app.add_option("--idle", idle, "Seconds of heartbeats alone")->capture_default_str();
  app.add_option("--coordinator", binary, "muster-coordinator")->capture_default_str();
  app.add_flag("--tls", tls, "Over mutual TLS, all daemons with one certificate");
  CLI11_PARSE(app, argc, argv);
  std::string directory =
      (std::filesystem::temp_directory_path() / "muster-bench-daemons-XXXXXX").string();
  CHECK(mkdtemp(directory.data()) != nullptr);
  {
    security::TlsFiles server, worker, user;
    if (tls) {
      security::Pki pki(directory + "/pki", absl::Now());
      constexpr absl::Duration kDay = absl::Hours(24);
      CHECK_OK(pki.Init("bench", {"localhost"}, kDay).status());
      const auto files = [&](const absl::StatusOr<security::Issued>& issued) {
        CHECK_OK(issued.status());
        return security::TlsFiles{issued->certificate, issued->key, directory + "/pki/ca.crt"};
      };
      server = {directory + "/pki/coordinator.crt", directory + "/pki/coordinator.key",
                directory + "/pki/ca.crt"};
      worker = files(pki.IssueWorker("*", kDay));
      user = files(pki.IssueUser("bench", {{security::Role::kAdmin, ""}}, kDay));
    }
    const auto credentials = [&](const security::TlsFiles& files) {
      return tls ? security::ChannelCredentials(files) : grpc::InsecureChannelCredentials();
    };
    Coordinator coordinator(binary, directory + "/data", server);
    Fleet fleet;
    const auto worker_credentials = credentials(worker);
    std::vector<std::unique_ptr<v1::WorkerService::Stub>> services;
    for (int i = 0; i < 32; ++i) {
      grpc::ChannelArguments arguments;
      arguments.SetInt("channel", i);  // a connection of its own
      services.push_back(v1::WorkerService::NewStub(
          grpc::CreateCustomChannel(coordinator.address(), worker_credentials, arguments)));
    }
    const double begin = Now();
    std::vector<std::unique_ptr<Stub>> stubs;
    for (int i = 0; i < daemons; ++i) {
      // As many at a time as the coordinator takes from one address.
      while (i - fleet.welcomed > 1000) {
        CHECK(fleet.closed == 0 && Now() - begin < 120) << fleet.welcomed << " were let in";
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
      stubs.push_back(std::make_unique<Stub>(fleet, *services[i % services.size()], i, slots));
    }
    while (fleet.welcomed < daemons) {
      CHECK(fleet.closed == 0 && Now() - begin < 120) << fleet.welcomed << " were let in";
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    const double joined = Now() - begin;

    std::atomic<bool> done{false};
    std::thread heartbeats([&] {  // each daemon once a second
      double next = Now();
      for (size_t i = 0; !done; i = (i + 1) % stubs.size()) {
        stubs[i]->Heartbeat();
        next += 1.0 / static_cast<double>(stubs.size());
        if (next > Now()) {
          std::this_thread::sleep_for(std::chrono::duration<double>(next - Now()));
        }
      }
    });
    const auto cores = [&](auto work) {
      const double cpu = coordinator.ProcessorSeconds(), from = Now();
      work();
      return (coordinator.ProcessorSeconds() - cpu) / (Now() - from);
    };
    const double idle_cores =
        cores([&] { std::this_thread::sleep_for(std::chrono::duration<double>(idle)); });
    const auto channel = grpc::CreateChannel(coordinator.address(), credentials(user));
    const auto jobs = v1::JobService::NewStub(channel);
    const double gang_begin = Now();
    const double gang_cores = cores([&] {
      for (int i = 0; i < times; ++i) {
        const std::string name = absl::StrCat("gang-", i);
        v1::SubmitRequest request;
        v1::JobSpec& spec = *request.mutable_spec();
        spec = testing::SmallJobSpec(name);
        spec.mutable_resources()->set_ranks(ranks);
        spec.mutable_engine()->mutable_parallel()->set_data(ranks);
        spec.mutable_engine()->mutable_training()->set_global_batch(ranks);
        grpc::ClientContext context;
        v1::SubmitResponse response;
        fleet.prepare.Begin(Now());
        const grpc::Status status = jobs->Submit(&context, request, &response);
        CHECK(status.ok()) << status.error_message();
        AwaitState(*jobs, name, v1::JOB_STATE_RUNNING);
        grpc::ClientContext cancel_context;
        v1::CancelJobRequest cancel;
        cancel.set_name(name);
        v1::Job cancelled;
        fleet.stop.Begin(Now());
        CHECK(jobs->CancelJob(&cancel_context, cancel, &cancelled).ok());
        AwaitState(*jobs, name, v1::JOB_STATE_CANCELLED);
      }
    });
    const double gang_seconds = (Now() - gang_begin) / times;
    done = true;
    heartbeats.join();
    std::printf(
        "{\"benchmark\":\"daemons\",\"tls\":%s,\"daemons\":%d,\"slots\":%d,\"ranks\":%d,\"times\":%"
        "d,"
        "\"join_seconds\":%.2f,\"cores_idle\":%.3f,\"cores_gangs\":%.3f,\"peak_mib\":%.0f,"
        "\"seconds_per_gang\":%.2f,\"prepare_ms\":[%.0f,%.0f],\"run_ms\":[%.0f,%.0f],"
        "\"stop_ms\":[%.0f,%.0f],\"streams_lost\":%d}\n",
        tls ? "true" : "false", daemons, slots, ranks, times, joined, idle_cores, gang_cores,
        coordinator.PeakMiB(), gang_seconds, fleet.prepare.Percentile(0.5),
        fleet.prepare.Percentile(0.99), fleet.run.Percentile(0.5), fleet.run.Percentile(0.99),
        fleet.stop.Percentile(0.5), fleet.stop.Percentile(0.99), fleet.closed.load());
    std::fflush(stdout);
    for (const auto& stub : stubs) stub->Cancel();
    while (fleet.closed < daemons) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    std::this_thread::sleep_for(std::chrono::milliseconds(100));  // reactors leave OnDone
  }
  std::filesystem::remove_all(directory);
  return 0;
}

}  // namespace
}  // namespace muster

int main(int argc, char** argv) { return muster::Main(argc, argv); }
