// The coordinator under a large fleet: a real muster-coordinator process, and in this process as
// many stub daemons as asked for, each on a live gRPC stream of its own. First they only heartbeat;
// then a gang of many ranks starts and stops several times. Prints one line of JSON: processor time
// and memory of the coordinator, and the times from a request, or from the last report that a
// command waits for, to the arrival of the command at each daemon. Both processes share this
// machine.
//
// With --restart: as many jobs of a rank as there are daemons run, the history has --events events,
// and the coordinator is killed -9 and started again, several times. Prints the times from exec
// until it answers a call, and until every daemon's stream is re-adopted and every job has been
// heard of again; and the attempts that a restart has ended.
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
#include <optional>
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
#include "coordinator/core/schema.h"
#include "coordinator/store/store.h"
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
  std::atomic<bool> killed{false};  // the coordinator: streams end
  std::atomic<int> adopted{0};      // got the first Desired of their stream
  Latencies prepare, run, stop;
};

// As a daemon of today: it echoes memberships and histories, and keeps specs.
constexpr uint32_t kProtocolVersion = 5;

// One daemon: it does at once what it is told, and says so.
class Stub : public grpc::ClientBidiReactor<v1::FromWorker, v1::FromCoordinator> {
 public:
  // Goes on from the attempts that it held before, as a daemon whose stream has broken.
  Stub(Fleet& fleet, v1::WorkerService::Stub& service, int number, int slots,
       const v1::Observed& held = {})
      : fleet_(fleet) {
    {
      MutexLock lock(&mutex_);
      *observed_.mutable_attempts() = held.attempts();
    }
    v1::FromWorker hello;
    *hello.mutable_hello()->mutable_observed() = held;
    hello.mutable_hello()->mutable_observed()->clear_applied_revision();
    hello.set_incarnation(1);
    hello.mutable_hello()->set_worker(absl::StrCat("w", number));
    hello.mutable_hello()->set_identity(absl::StrCat("identity-", number));
    hello.mutable_hello()->set_host("bench");
    hello.mutable_hello()->set_protocol_version(kProtocolVersion);
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
  v1::Observed Held() {
    MutexLock lock(&mutex_);
    return observed_;
  }
  void Cancel() {
    context_.TryCancel();
    RemoveHold();
  }

  void OnReadDone(bool ok) override {
    if (!ok) return;
    if (received_.has_welcome()) ++fleet_.welcomed;
    if (received_.has_desired()) {
      if (received_.desired().revision() == 1) ++fleet_.adopted;
      Apply(received_.desired());
    }
    StartRead(&received_);
  }
  void OnWriteDone(bool ok) override {
    MutexLock lock(&mutex_);
    out_.pop_front();
    if (ok && !out_.empty()) StartWrite(&out_.front());
  }
  void OnDone(const grpc::Status& status) override {
    if (status.error_code() != grpc::CANCELLED && !fleet_.killed) {
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
    v1::Observed before;
    before.Swap(&observed_);
    for (const v1::DesiredAttempt& attempt : desired.attempts()) {
      if (attempt.phase() == v1::DESIRED_PHASE_STOPPED) {
        fleet_.stop.Arrived();
        continue;  // it holds nothing of it any more
      }
      v1::ObservedAttempt& out = *observed_.add_attempts();
      out.set_job_id(attempt.job_id());
      out.set_epoch(attempt.epoch());
      out.set_history_id(attempt.history_id());
      out.set_membership(attempt.membership());
      out.set_has_spec(attempt.has_spec() || HasSpec(before, attempt));
      v1::RankState state = v1::RANK_STATE_PREPARED;
      if (!out.has_spec()) {
        state = v1::RANK_STATE_ASSIGNED;  // its ranks wait for a later Desired
      } else if (attempt.phase() == v1::DESIRED_PHASE_RUNNING) {
        state = v1::RANK_STATE_TRAINING;
        fleet_.run.Arrived();
      } else {
        fleet_.prepare.Arrived();
        fleet_.run.Begin(Now());  // the last one counts
      }
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
  // Whether the spec of the attempt came with an earlier Desired.
  static bool HasSpec(const v1::Observed& held, const v1::DesiredAttempt& attempt) {
    return std::any_of(
        held.attempts().begin(), held.attempts().end(), [&attempt](const v1::ObservedAttempt& one) {
          return one.has_spec() && one.job_id() == attempt.job_id() &&
                 one.epoch() == attempt.epoch() && one.history_id() == attempt.history_id();
        });
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
              const security::TlsFiles& tls)
      : binary_(binary), directory_(directory), tls_(tls) {
    Start();
  }
  ~Coordinator() { End(SIGTERM); }
  // Listens where it did before.
  void Start() {
    int out[2];
    CHECK(pipe(out) == 0);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, out[1], 1);
    posix_spawn_file_actions_addclose(&actions, out[0]);
    std::vector<std::string> words = {binary_, "--listen",   address_,  "--log-level",
                                      "error", "--data-dir", directory_};
    if (tls_.any()) {
      words.insert(words.end(), {"--tls-cert", tls_.certificate, "--tls-key", tls_.key, "--tls-ca",
                                 tls_.authorities});
    }
    std::vector<char*> arguments;
    for (std::string& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    CHECK(posix_spawn(&pid_, binary_.c_str(), &actions, nullptr, arguments.data(), environ) == 0)
        << binary_;
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
  void End(int signal) {
    kill(pid_, signal);
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
  const std::string binary_, directory_;
  const security::TlsFiles tls_;
  pid_t pid_ = 0;
  std::string address_ = "127.0.0.1:0";
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

// Channels of their own, each of which carries many streams.
std::vector<std::unique_ptr<v1::WorkerService::Stub>> Services(
    const std::string& address, const std::shared_ptr<grpc::ChannelCredentials>& credentials) {
  static int serial = 0;  // channels of equal arguments share a connection
  std::vector<std::unique_ptr<v1::WorkerService::Stub>> services;
  for (int i = 0; i < 32; ++i) {
    grpc::ChannelArguments arguments;
    arguments.SetInt("channel", serial++);
    services.push_back(
        v1::WorkerService::NewStub(grpc::CreateCustomChannel(address, credentials, arguments)));
  }
  return services;
}

// As many at a time as the coordinator takes from one address. Returns when all are let in.
std::vector<std::unique_ptr<Stub>> Join(
    Fleet& fleet, const std::vector<std::unique_ptr<v1::WorkerService::Stub>>& services,
    int daemons, int slots, const std::vector<v1::Observed>& held = {}) {
  const double begin = Now();
  std::vector<std::unique_ptr<Stub>> stubs;
  const auto await = [&](int welcomed) {
    while (fleet.welcomed < welcomed) {
      CHECK(fleet.closed == 0 && Now() - begin < 120) << fleet.welcomed << " were let in";
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  };
  for (int i = 0; i < daemons; ++i) {
    await(i - 1000);
    stubs.push_back(std::make_unique<Stub>(fleet, *services[i % services.size()], i, slots,
                                           held.empty() ? v1::Observed() : held[i]));
  }
  await(daemons);
  return stubs;
}

// Each daemon heartbeats once a second while this lives.
class Heartbeats {
 public:
  explicit Heartbeats(const std::vector<std::unique_ptr<Stub>>& stubs)
      : thread_([this, &stubs] {
          double next = Now();
          for (size_t i = 0; !done_; i = (i + 1) % stubs.size()) {
            stubs[i]->Heartbeat();
            next += 1.0 / static_cast<double>(stubs.size());
            if (next > Now()) {
              std::this_thread::sleep_for(std::chrono::duration<double>(next - Now()));
            }
          }
        }) {}
  ~Heartbeats() {
    done_ = true;
    thread_.join();
  }

 private:
  std::atomic<bool> done_{false};
  std::thread thread_;
};

void CancelAll(Fleet& fleet, const std::vector<std::unique_ptr<Stub>>& stubs) {
  for (const auto& stub : stubs) stub->Cancel();
  while (fleet.closed < static_cast<int>(stubs.size())) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(100));  // reactors leave OnDone
}

// Fills the history with events of jobs that are gone. No coordinator may run; `directory` is that
// of its store.
void AddEvents(const std::string& directory, uint64_t count) {
  using coordinator::Table;
  CHECK(std::filesystem::exists(directory + "/CURRENT")) << directory << " is no store";
  auto store = coordinator::OpenRocksDbStore(directory, "", "");
  CHECK_OK(store.status());
  const auto meta = (*store)->Get(Table::kMeta, coordinator::schema::kLastEvent);
  CHECK_OK(meta.status());
  uint64_t last = meta->has_value() ? coordinator::schema::DecodeU64(**meta).value() : 0;
  while (last < count) {
    coordinator::Batch batch;
    for (int i = 0; i < 10'000 && last < count; ++i) {
      v1::Event event;
      event.set_sequence(++last);
      event.set_kind(v1::EVENT_KIND_CHECKPOINT_COMMITTED);
      event.set_job_id(absl::StrCat("gone-", last % 5000));
      event.set_epoch(1);
      event.set_step(static_cast<int64_t>(last));
      event.set_message("checkpoints/gone/step-00001000, 1.2 GiB");
      batch.Put(Table::kEvents, coordinator::schema::EventKey(last),
                coordinator::schema::Serialize(event));
    }
    batch.Put(Table::kMeta, coordinator::schema::kLastEvent, coordinator::schema::EncodeU64(last));
    CHECK_OK((*store)->Write({batch}));
  }
}

struct Seen {
  int running = 0, first_attempts = 0;
};
Seen LiveJobs(v1::JobService::Stub& jobs) {
  Seen seen;
  v1::ListJobsRequest request;
  request.set_page_size(1000);
  request.set_summary(true);
  request.set_live(true);
  do {
    grpc::ClientContext context;
    v1::ListJobsResponse response;
    const grpc::Status status = jobs.ListJobs(&context, request, &response);
    CHECK(status.ok()) << status.error_message();
    for (const v1::Job& job : response.jobs()) {
      seen.running += job.state() == v1::JOB_STATE_RUNNING ? 1 : 0;
      seen.first_attempts += job.attempts() == 1 ? 1 : 0;
    }
    request.set_page_token(response.next_page_token());
  } while (!request.page_token().empty());
  return seen;
}

void SubmitAll(v1::JobService::Stub& jobs, int count) {
  std::atomic<int> next{0};
  std::vector<std::thread> clients;
  for (int t = 0; t < 32; ++t) {
    clients.emplace_back([&] {
      for (int i = next++; i < count; i = next++) {
        v1::SubmitRequest request;
        v1::JobSpec& spec = *request.mutable_spec();
        spec = testing::SmallJobSpec(absl::StrCat("job-", i));
        spec.mutable_resources()->set_ranks(1);
        grpc::ClientContext context;
        v1::SubmitResponse response;
        const grpc::Status status = jobs.Submit(&context, request, &response);
        CHECK(status.ok()) << status.error_message();
      }
    });
  }
  for (std::thread& client : clients) client.join();
}

void Restart(const std::string& binary, const std::string& directory, int daemons, int times,
             uint64_t events) {
  const std::string data = directory + "/data";
  const auto insecure = grpc::InsecureChannelCredentials();
  { Coordinator coordinator(binary, data, {}); }  // makes the store
  AddEvents(data + "/store", events);
  Coordinator coordinator(binary, data, {});
  std::vector<v1::Observed> held(daemons);
  std::vector<double> serving, adopted, heard;
  int attempts_ended = 0;
  double peak_mib = 0;
  for (int time = 0; time <= times; ++time) {
    const bool restart = time > 0;
    const double exec = Now();
    if (restart) coordinator.Start();
    const auto jobs = v1::JobService::NewStub(grpc::CreateChannel(coordinator.address(), insecure));
    {
      grpc::ClientContext context;
      v1::GetVersionResponse version;
      CHECK(jobs->GetVersion(&context, {}, &version).ok());
    }
    if (restart) serving.push_back(Now() - exec);
    Fleet fleet;
    const auto services = Services(coordinator.address(), insecure);
    const std::vector<std::unique_ptr<Stub>> stubs = Join(fleet, services, daemons, 1, held);
    {
      const Heartbeats heartbeats(stubs);
      if (!restart) SubmitAll(*jobs, daemons);
      while (restart && fleet.adopted < daemons) {
        CHECK(Now() - exec < 60) << fleet.adopted << " were re-adopted";
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
      if (restart) adopted.push_back(Now() - exec);
      Seen seen = LiveJobs(*jobs);
      const double give_up = Now() + 300;
      while (seen.running < daemons) {
        CHECK(Now() < give_up) << seen.running << " jobs run";
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        seen = LiveJobs(*jobs);
      }
      if (restart) heard.push_back(Now() - exec);
      attempts_ended += daemons - seen.first_attempts;
      std::this_thread::sleep_for(std::chrono::seconds(3));  // what is wrong shows in heartbeats
      seen = LiveJobs(*jobs);
      attempts_ended += daemons - seen.first_attempts;
    }
    for (int i = 0; i < daemons; ++i) held[i] = stubs[i]->Held();
    peak_mib = std::max(peak_mib, coordinator.PeakMiB());
    fleet.killed = true;
    coordinator.End(SIGKILL);
    CancelAll(fleet, stubs);
  }
  coordinator.Start();  // its destructor ends it
  const auto middle = [](std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values.empty() ? 0 : values[values.size() / 2];
  };
  const auto most = [](const std::vector<double>& values) {
    return values.empty() ? 0 : *std::max_element(values.begin(), values.end());
  };
  std::printf(
      "{\"benchmark\":\"restart\",\"daemons\":%d,\"jobs\":%d,\"events\":%llu,\"restarts\":%d,"
      "\"serving_seconds\":[%.2f,%.2f],\"adopted_seconds\":[%.2f,%.2f],\"heard_seconds\":[%.2f,%."
      "2f],"
      "\"attempts_ended\":%d,\"peak_mib\":%.0f}\n",
      daemons, daemons, static_cast<unsigned long long>(events), times, middle(serving),
      most(serving), middle(adopted), most(adopted), middle(heard), most(heard), attempts_ended,
      peak_mib);
  std::fflush(stdout);
}

int Main(int argc, char** argv) {
  int daemons = 10'000, slots = 8, ranks = 4096, times = 10;
  double idle = 10;
  bool tls = false, restart = false;
  uint64_t events = 1'000'000;
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
  app.add_flag("--restart", restart, "Kill and restart the coordinator under jobs of one rank");
  app.add_option("--events", events, "Events in the history of --restart")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  std::string directory =
      (std::filesystem::temp_directory_path() / "muster-bench-daemons-XXXXXX").string();
  CHECK(mkdtemp(directory.data()) != nullptr);
  if (restart) {
    Restart(binary, directory, daemons, times, events);
  } else {
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
    const auto services = Services(coordinator.address(), worker_credentials);
    const double begin = Now();
    const std::vector<std::unique_ptr<Stub>> stubs = Join(fleet, services, daemons, slots);
    const double joined = Now() - begin;

    auto heartbeats = std::make_optional<Heartbeats>(stubs);
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
    heartbeats.reset();
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
    CancelAll(fleet, stubs);
  }
  std::filesystem::remove_all(directory);
  return 0;
}

}  // namespace
}  // namespace muster

int main(int argc, char** argv) { return muster::Main(argc, argv); }
