#include "coordinator/metrics.h"

#include <algorithm>
#include <utility>

#include "coordinator/limits.h"
#include "proto/job_state.h"
#include "proto/spec/names.h"

namespace muster::coordinator {
namespace {

using metrics::Family;
using metrics::Kind;

const std::vector<double> kWaitBuckets = {0.1, 0.5, 1, 5, 15, 60, 300, 900, 3600, 14400, 86400};
const std::vector<double> kRecoveryBuckets = {0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 300};
const std::vector<double> kRpcBuckets = {0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05,
                                         0.1,    0.25,  0.5,    1,     2.5,  10,    60};
const std::vector<double> kDiskBuckets = {0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5};

const Family kJobs = {Kind::kGauge, "muster_coordinator_jobs", "Jobs by state", {"state"}};
const Family kQueueWait = {
    Kind::kHistogram,
    "muster_coordinator_queue_wait_seconds",
    "From submission, or the end of the attempt before, until devices were allocated",
    {},
    kWaitBuckets};
const Family kAttemptsEnded = {Kind::kCounter,
                               "muster_coordinator_attempts_ended_total",
                               "Attempts that ended, by cause",
                               {"cause"}};
const Family kFailureDetection = {Kind::kHistogram,
                                  "muster_coordinator_failure_detection_seconds",
                                  "From the last sign of life until a failure was decided",
                                  {},
                                  kRecoveryBuckets};
const Family kJobRecovery = {Kind::kHistogram,
                             "muster_coordinator_job_recovery_seconds",
                             "From the end of an attempt until the next one trains",
                             {},
                             kRecoveryBuckets};
const Family kPlacement = {
    Kind::kHistogram,
    "muster_coordinator_placement_seconds",
    "From the allocation of an attempt's devices until every daemon has accepted it",
    {},
    kRecoveryBuckets};
const Family kSlots = {Kind::kGauge,
                       "muster_coordinator_slots",
                       "Devices that ranks can have on workers that are not lost",
                       {}};
const Family kSlotsFree = {Kind::kGauge,
                           "muster_coordinator_slots_free",
                           "Slots that a new rank could get now (on ready workers)",
                           {}};
const Family kDevices = {Kind::kGauge,
                         "muster_coordinator_devices",
                         "Devices of workers that are not forgotten, by kind (cpu, cuda) and by "
                         "the state of device and worker (usable, unusable, unreachable, lost)",
                         {"device", "state"}};
const Family kSpareDevices = {
    Kind::kGauge,
    "muster_coordinator_spare_devices",
    "Devices for jobs that recover from a fault (spares of the queue policy): free, and missing "
    "where fewer are free than the policy wants",
    {"state"}};
const Family kSlotsWanted = {
    Kind::kGauge,
    "muster_coordinator_slots_wanted",
    "Devices that all jobs that are not finished want, whole gangs, shared ones by their shares",
    {"device"}};
const Family kSlotsAllocated = {Kind::kGauge,
                                "muster_coordinator_slots_allocated",
                                "Devices that attempts hold, shared ones by their shares, by kind",
                                {"device"}};
const Family kQueueOldest = {
    Kind::kGauge,
    "muster_coordinator_queue_oldest_seconds",
    "How long the job that has waited longest for devices has waited; 0 when none waits",
    {}};
const Family kQueueSmallest = {
    Kind::kGauge,
    "muster_coordinator_queue_smallest_gang_slots",
    "Devices that the smallest job that waits wants, by kind; 0 when none waits",
    {"device"}};
const Family kDeviceSeconds = {
    Kind::kCounter,
    "muster_device_seconds_total",
    "Time of devices by what they were used for (idle, held, launching, initializing, productive, "
    "checkpoint_stall, replayed, hung, preempted, spare, away) and by the queue of the job, empty "
    "for devices that no attempt holds; every device is in one class at any time. At most 64 "
    "queues, more are \"other\". Counts from the start of the coordinator; `muster usage` from "
    "that of the cluster",
    {"class", "queue"}};
const Family kWorkers = {Kind::kGauge, "muster_coordinator_workers", "Workers by state", {"state"}};
const Family kWorkersAvoided = {Kind::kGauge,
                                "muster_coordinator_workers_avoided",
                                "Workers that get ranks only as a last resort, since too many "
                                "attempts ended for causes of their "
                                "own; `muster get workers` names them",
                                {}};
const Family kWorkerFaults = {
    Kind::kCounter,
    "muster_coordinator_worker_faults_total",
    "Faults that were noted of workers, by cause (slow: a rank computed longer than others); "
    "`muster describe worker` lists them",
    {"cause"}};
const Family kReplacements = {
    Kind::kCounter,
    "muster_coordinator_replacements_total",
    "Times that the ranks of a worker went to other devices inside their attempt, before it "
    "trained, by cause; `muster describe job` lists them",
    {"cause"}};
const Family kSessions = {
    Kind::kGauge, "muster_coordinator_sessions", "Open streams of daemons", {}};
const Family kWatchers = {
    Kind::kGauge, "muster_coordinator_watchers", "Open watch and log streams of clients", {}};
const Family kEventSequence = {
    Kind::kGauge, "muster_coordinator_event_sequence", "Sequence of the newest durable event", {}};
const Family kCheckpointsCommitted = {Kind::kCounter,
                                      "muster_coordinator_checkpoints_committed_total",
                                      "Checkpoints committed, all jobs",
                                      {}};
const Family kCheckpointsRefused = {Kind::kCounter,
                                    "muster_coordinator_checkpoints_refused_total",
                                    "Commits refused because their attempt was stale",
                                    {}};
const Family kCheckpointSave = {Kind::kHistogram,
                                "muster_coordinator_checkpoint_save_seconds",
                                "From the start of a save to its commit request",
                                {},
                                kWaitBuckets};
const Family kStoreWrite = {Kind::kHistogram,
                            "muster_coordinator_store_write_seconds",
                            "Time of one synced write to the store",
                            {},
                            kDiskBuckets};
const Family kStoreBatches = {Kind::kHistogram,
                              "muster_coordinator_store_write_batches",
                              "Transitions that shared one synced write",
                              {},
                              {1, 2, 4, 8, 16, 32, 64, 128, 256, 1024}};
const Family kStoreBytes = {Kind::kCounter,
                            "muster_coordinator_store_written_bytes_total",
                            "Bytes of keys and values written to the store",
                            {}};
const Family kLeaderTerm = {Kind::kGauge,
                            "muster_coordinator_leader_term",
                            "Starts of a coordinator on this data directory",
                            {}};
const Family kRecovery = {Kind::kGauge,
                          "muster_coordinator_recovery_seconds",
                          "Time this start took to rebuild its state from the store",
                          {}};
const Family kRpcs = {Kind::kCounter,
                      "muster_coordinator_rpcs_total",
                      "Calls that ended, by method and status code",
                      {"method", "code"}};

const Family kRpcSeconds = {Kind::kHistogram,
                            "muster_coordinator_rpc_duration_seconds",
                            "Time of a call with a single reply, by method",
                            {"method"},
                            kRpcBuckets};
const Family kLoopDelay = {Kind::kHistogram,
                           "muster_coordinator_loop_delay_seconds",
                           "How late the event loop ran work that was due, measured once a second",
                           {},
                           kRpcBuckets};
const Family kStateBytes = {
    Kind::kGauge, "muster_coordinator_state_bytes", "Bytes of the files of the durable state", {}};
const Family kStateDiskFree = {
    Kind::kGauge,
    "muster_coordinator_state_disk_free_bytes",
    "Bytes that are free for the coordinator on the file system of --data-dir",
    {}};
const Family kStateDisk = {Kind::kGauge,
                           "muster_coordinator_state_disk_bytes",
                           "Size of the file system of --data-dir in bytes",
                           {}};
const Family kCertificateBegin = {
    Kind::kGauge,
    "muster_coordinator_certificate_not_before_timestamp_seconds",
    "When the newest certificate, or revocation list, in the file of a flag (tls-cert, tls-ca, "
    "tls-crl, metrics-tls-cert, metrics-tls-ca) begins; 0 while it cannot be read",
    {"file"}};
const Family kCertificateEnd = {
    Kind::kGauge,
    "muster_coordinator_certificate_not_after_timestamp_seconds",
    "When the first certificate, or revocation list, in the file of a flag (tls-cert, tls-ca, "
    "tls-crl, metrics-tls-cert, metrics-tls-ca) ends; 0 while it cannot be read",
    {"file"}};
const Family kTraceSpansDropped = {
    Kind::kCounter,
    "muster_coordinator_trace_spans_dropped_total",
    "Spans that the collector of --otlp-endpoint will not get, by reason: queue_full (it took too "
    "little for too long, and the oldest that waited was dropped), refused (it answered with an "
    "error for good). Without --otlp-endpoint there is no such series",
    {"reason"}};
const Family kBuildInfo = {
    Kind::kGauge, "muster_coordinator_build_info", "1, with the version", {"version"}};

// One series per live job, removed some minutes after the job has ended.
const Family kJobStep = {
    Kind::kGauge, "muster_job_step", "Last optimizer step finished", {"job_name"}};
const Family kJobSteps = {Kind::kGauge, "muster_job_steps", "Optimizer steps to do", {"job_name"}};
const Family kJobTrainLoss = {Kind::kGauge,
                              "muster_job_train_loss",
                              "Training loss of the last reported step, nats per token",
                              {"job_name"}};
const Family kJobValidationLoss = {Kind::kGauge,
                                   "muster_job_validation_loss",
                                   "Loss of the last evaluation, nats per token",
                                   {"job_name"}};
const Family kJobTokensPerSecond = {
    Kind::kGauge, "muster_job_tokens_per_second", "Training throughput of all ranks", {"job_name"}};
const Family kJobMfu = {Kind::kGauge,
                        "muster_job_model_flops_utilization",
                        "Arithmetic of the model as a share of what its devices could do at best, "
                        "0 to 1; 0 where that is not known",
                        {"job_name"}};
const Family kJobStepSeconds = {Kind::kGauge,
                                "muster_job_step_seconds",
                                "Median time of a step over the last report",
                                {"job_name"}};
const Family kJobCommittedStep = {Kind::kGauge,
                                  "muster_job_last_committed_step",
                                  "Step of the newest committed checkpoint",
                                  {"job_name"}};
const Family kJobAttempts = {
    Kind::kGauge, "muster_job_attempts", "Attempts started so far", {"job_name"}};

const Family kJobState = {Kind::kGauge,
                          "muster_job_state",
                          "State as its number in proto/muster/v1/job.proto: 1 pending, 2 queued, "
                          "3 placing, 4 starting, 5 running, 6 recovering, 7 preempting, "
                          "8 resizing, 9 held, 10 stopping, 11 succeeded, 12 failed, 13 cancelled",
                          {"job_name"}};
const Family kJobRanks = {Kind::kGauge, "muster_job_ranks", "Ranks of one attempt", {"job_name"}};
const Family kJobStarted = {Kind::kGauge,
                            "muster_job_started_timestamp_seconds",
                            "When the first attempt began to train, in Unix time; 0 before that",
                            {"job_name"}};
const Family kJobCheckpointEvery = {Kind::kGauge,
                                    "muster_job_checkpoint_every_steps",
                                    "Steps between checkpoints that the spec asks for",
                                    {"job_name"}};
const Family kJobCheckpointTime = {
    Kind::kGauge,
    "muster_job_last_checkpoint_timestamp_seconds",
    "When the newest checkpoint was committed, in Unix time; 0 before the first",
    {"job_name"}};
const Family kJobAttemptsEnded = {
    Kind::kGauge,
    "muster_job_attempts_ended",
    "Ended attempts by cause, of the 256 newest; survives restarts of the coordinator",
    {"job_name", "cause"}};

// Those with the label job_name alone.
std::vector<const Family*> JobFamilies() {
  return {&kJobState,           &kJobRanks,           &kJobStep,
          &kJobSteps,           &kJobStarted,         &kJobTrainLoss,
          &kJobValidationLoss,  &kJobTokensPerSecond, &kJobMfu,
          &kJobStepSeconds,     &kJobCommittedStep,   &kJobCheckpointTime,
          &kJobCheckpointEvery, &kJobAttempts};
}

// States of kDevices.
constexpr absl::string_view kDeviceStates[] = {"usable", "unusable", "unreachable", "lost"};
constexpr v1::DeviceKind kDeviceKinds[] = {v1::DEVICE_KIND_CPU, v1::DEVICE_KIND_CUDA};

absl::string_view StateOf(const v1::Worker& worker, const v1::Device& device) {
  if (worker.state() == v1::WORKER_STATE_LOST) return "lost";
  if (worker.state() == v1::WORKER_STATE_UNREACHABLE) return "unreachable";
  return device.unusable().empty() ? "usable" : "unusable";
}

double UnixSeconds(const google::protobuf::Timestamp& time) {
  return static_cast<double>(time.seconds()) + static_cast<double>(time.nanos()) * 1e-9;
}

}  // namespace

std::vector<const Family*> Metrics::Catalogue() {
  std::vector<const Family*> all = {&kJobs,
                                    &kQueueWait,
                                    &kQueueOldest,
                                    &kAttemptsEnded,
                                    &kFailureDetection,
                                    &kJobRecovery,
                                    &kPlacement,
                                    &kSlots,
                                    &kSlotsFree,
                                    &kSlotsWanted,
                                    &kSlotsAllocated,
                                    &kQueueSmallest,
                                    &kDevices,
                                    &kSpareDevices,
                                    &kDeviceSeconds,
                                    &kWorkers,
                                    &kWorkersAvoided,
                                    &kWorkerFaults,
                                    &kReplacements,
                                    &kSessions,
                                    &kWatchers,
                                    &kEventSequence,
                                    &kCheckpointsCommitted,
                                    &kCheckpointsRefused,
                                    &kCheckpointSave,
                                    &kStoreWrite,
                                    &kStoreBatches,
                                    &kStoreBytes,
                                    &kStateBytes,
                                    &kStateDiskFree,
                                    &kStateDisk,
                                    &kCertificateBegin,
                                    &kCertificateEnd,
                                    &kLoopDelay,
                                    &kLeaderTerm,
                                    &kRecovery,
                                    &kRpcs,
                                    &kRpcSeconds,
                                    &kTraceSpansDropped,
                                    &kBuildInfo};
  for (const Family* family : JobFamilies()) all.push_back(family);
  all.push_back(&kJobAttemptsEnded);
  return all;
}

Metrics::Metrics(metrics::Registry& registry) : registry_(registry) {
  // Series that are zero until something happens exist from the start: rates and alerts need a
  // first sample.
  for (int state = v1::JOB_STATE_PENDING; state <= v1::JobState_MAX; ++state) {
    if (v1::JobState_IsValid(state)) {
      registry_.GetGauge(kJobs, {spec::EnumName(static_cast<v1::JobState>(state))}).Set(0);
    }
  }
  for (int cause = v1::CAUSE_COMPLETED; cause <= v1::Cause_MAX; ++cause) {
    if (!v1::Cause_IsValid(cause)) continue;
    registry_.GetCounter(kAttemptsEnded, {spec::EnumName(static_cast<v1::Cause>(cause))});
  }
  registry_.GetCounter(kCheckpointsCommitted);
  registry_.GetCounter(kCheckpointsRefused);
  registry_.GetCounter(kStoreBytes);
  for (const v1::UsageClass unheld : {v1::USAGE_CLASS_IDLE, v1::USAGE_CLASS_AWAY}) {
    registry_.GetCounter(kDeviceSeconds, {spec::EnumName(unheld), ""});
  }
  for (const Family* family : Catalogue()) {
    if (family->kind == Kind::kHistogram && family->labels.empty()) registry_.GetHistogram(*family);
  }
  Queue({});
  Workers({});
  Sessions(0);
  Watchers(0);
}

void Metrics::Recovered(uint64_t leader_term, absl::Duration took) {
  registry_.GetGauge(kLeaderTerm).Set(static_cast<double>(leader_term));
  registry_.GetGauge(kRecovery).Set(absl::ToDoubleSeconds(took));
}

void Metrics::Wrote(size_t batches, size_t bytes, absl::Duration took) {
  registry_.GetHistogram(kStoreWrite).Observe(absl::ToDoubleSeconds(took));
  registry_.GetHistogram(kStoreBatches).Observe(static_cast<double>(batches));
  registry_.GetCounter(kStoreBytes).Increment(static_cast<double>(bytes));
}

void Metrics::JobPublished(const v1::Job* before, const v1::Job* after) {
  const bool moved = before == nullptr || after == nullptr || before->state() != after->state();
  if (moved) {
    MutexLock lock(&mutex_);
    if (before != nullptr) {
      registry_.GetGauge(kJobs, {spec::EnumName(before->state())})
          .Set(static_cast<double>(--jobs_by_state_[before->state()]));
    }
    if (after != nullptr) {
      registry_.GetGauge(kJobs, {spec::EnumName(after->state())})
          .Set(static_cast<double>(++jobs_by_state_[after->state()]));
    }
  }
  // A job that had ended before gets no series: they were removed already, or it never had any.
  const bool ended_before = before == nullptr || IsFinal(before->state());
  if (after != nullptr && !(IsFinal(after->state()) && ended_before)) SetJobSeries(*after);
}

void Metrics::SetJobSeries(const v1::Job& job) {
  // Before its first attempt a job has no values, and thousands of jobs may wait.
  if (job.attempts() == 0) return;
  const std::vector<std::string> labels = {job.name()};
  registry_.GetGauge(kJobState, labels).Set(job.state());
  registry_.GetGauge(kJobStarted, labels).Set(UnixSeconds(job.started()));
  registry_.GetGauge(kJobStep, labels).Set(static_cast<double>(job.step()));
  registry_.GetGauge(kJobSteps, labels).Set(static_cast<double>(job.steps()));
  registry_.GetGauge(kJobTrainLoss, labels).Set(job.train_loss());
  registry_.GetGauge(kJobValidationLoss, labels).Set(job.validation_loss());
  registry_.GetGauge(kJobTokensPerSecond, labels).Set(job.tokens_per_second());
  registry_.GetGauge(kJobMfu, labels).Set(job.model_flops_utilization());
  registry_.GetGauge(kJobStepSeconds, labels).Set(job.step_seconds());
  registry_.GetGauge(kJobCommittedStep, labels).Set(static_cast<double>(job.last_committed_step()));
  registry_.GetGauge(kJobAttempts, labels).Set(job.attempts());
}

void Metrics::JobPartsPublished(const JobView& before, const JobView& after) {
  const v1::Job& state = *after[JobPart::kState];
  const v1::Job* state_before = before[JobPart::kState].get();
  const bool ended_before = state_before == nullptr || IsFinal(state_before->state());
  if (state.attempts() == 0 || (IsFinal(state.state()) && ended_before)) return;
  const std::string& name = state.name();
  const v1::Job* spec = after[JobPart::kSpec].get();
  const v1::Job* gang = after[JobPart::kRanks].get();
  // Once for each job: reports of progress come often.
  const bool begins = state_before == nullptr || state_before->attempts() == 0;
  if (spec != nullptr && begins) {
    registry_.GetGauge(kJobCheckpointEvery, {name})
        .Set(static_cast<double>(spec->spec().checkpoint().every_steps()));
  }
  // An elastic job changes its number of ranks. Before the first attempt it is the largest.
  const bool placed = gang != nullptr && gang->ranks_size() > 0;
  if (placed ? gang != before[JobPart::kRanks].get() : spec != nullptr && begins) {
    registry_.GetGauge(kJobRanks, {name})
        .Set(placed ? gang->ranks_size() : spec->spec().resources().ranks());
  }
  const v1::Job* history = after[JobPart::kHistory].get();
  if (history == nullptr || history == before[JobPart::kHistory].get()) return;
  double newest = 0;
  for (const v1::CheckpointRecord& record : history->checkpoints()) {
    newest = std::max(newest, UnixSeconds(record.committed()));
  }
  registry_.GetGauge(kJobCheckpointTime, {name}).Set(newest);
  std::map<int, int> ended;
  for (const v1::AttemptEnd& end : history->causes()) ++ended[end.cause()];
  for (int cause = v1::CAUSE_COMPLETED; cause <= v1::Cause_MAX; ++cause) {
    if (!v1::Cause_IsValid(cause)) continue;
    const std::vector<std::string> labels = {name, spec::EnumName(static_cast<v1::Cause>(cause))};
    if (ended[cause] > 0) {
      registry_.GetGauge(kJobAttemptsEnded, labels).Set(ended[cause]);
    } else {
      registry_.Remove(kJobAttemptsEnded, labels);  // of an earlier job of this name
    }
  }
}

void Metrics::ForgetJob(const std::string& name) {
  for (const Family* family : JobFamilies()) registry_.Remove(*family, {name});
  for (int cause = v1::CAUSE_COMPLETED; cause <= v1::Cause_MAX; ++cause) {
    if (!v1::Cause_IsValid(cause)) continue;
    registry_.Remove(kJobAttemptsEnded, {name, spec::EnumName(static_cast<v1::Cause>(cause))});
  }
}

void Metrics::EventPublished(const v1::Event& event) {
  registry_.GetGauge(kEventSequence).Set(static_cast<double>(event.sequence()));
  switch (event.kind()) {
    case v1::EVENT_KIND_ATTEMPT_ENDED:
      registry_.GetCounter(kAttemptsEnded, {spec::EnumName(event.cause())}).Increment();
      break;
    case v1::EVENT_KIND_WORKER_FAULT:
      registry_
          .GetCounter(
              kWorkerFaults,
              {event.cause() == v1::CAUSE_UNSPECIFIED ? "slow" : spec::EnumName(event.cause())})
          .Increment();
      break;
    case v1::EVENT_KIND_RANKS_REPLACED:
      registry_.GetCounter(kReplacements, {spec::EnumName(event.cause())}).Increment();
      break;
    case v1::EVENT_KIND_CHECKPOINT_COMMITTED:
      registry_.GetCounter(kCheckpointsCommitted).Increment();
      break;
    case v1::EVENT_KIND_CHECKPOINT_REFUSED:
      registry_.GetCounter(kCheckpointsRefused).Increment();
      break;
    default:
      break;
  }
}

void Metrics::Workers(const std::vector<v1::Worker>& workers) {
  std::map<v1::WorkerState, int64_t> by_state;
  int64_t slots = 0;
  int64_t free = 0;
  int64_t avoided = 0;
  std::map<std::pair<v1::DeviceKind, absl::string_view>, int64_t> devices;
  for (const v1::Worker& worker : workers) {
    for (const v1::Device& device : worker.devices()) {
      ++devices[{device.kind(), StateOf(worker, device)}];
    }
    ++by_state[worker.state()];
    if (worker.reputation().standing() == v1::WORKER_STANDING_AVOIDED) ++avoided;
    if (worker.state() != v1::WORKER_STATE_LOST) slots += worker.slots();
    if (worker.state() == v1::WORKER_STATE_READY) free += worker.slots_free();
  }
  for (int state = v1::WORKER_STATE_READY; state <= v1::WorkerState_MAX; ++state) {
    const auto known = static_cast<v1::WorkerState>(state);
    registry_.GetGauge(kWorkers, {spec::EnumName(known)}).Set(static_cast<double>(by_state[known]));
  }
  for (const v1::DeviceKind kind : kDeviceKinds) {
    for (const absl::string_view state : kDeviceStates) {
      registry_.GetGauge(kDevices, {spec::EnumName(kind), std::string(state)})
          .Set(static_cast<double>(devices[{kind, state}]));
    }
  }
  registry_.GetGauge(kWorkersAvoided).Set(static_cast<double>(avoided));
  registry_.GetGauge(kSlots).Set(static_cast<double>(slots));
  registry_.GetGauge(kSlotsFree).Set(static_cast<double>(free));
}

void Metrics::Spares(int64_t free, int64_t missing) {
  registry_.GetGauge(kSpareDevices, {"free"}).Set(static_cast<double>(free));
  registry_.GetGauge(kSpareDevices, {"missing"}).Set(static_cast<double>(missing));
}

void Metrics::Sessions(size_t open) {
  registry_.GetGauge(kSessions).Set(static_cast<double>(open));
}
void Metrics::Watchers(size_t open) {
  registry_.GetGauge(kWatchers).Set(static_cast<double>(open));
}

void Metrics::Observe(const Measured& measured) {
  const Family* family = nullptr;
  switch (measured.what) {
    case Measured::What::kQueueWait:
      family = &kQueueWait;
      break;
    case Measured::What::kDetectFailure:
      family = &kFailureDetection;
      break;
    case Measured::What::kRecover:
      family = &kJobRecovery;
      break;
    case Measured::What::kCheckpointSave:
      family = &kCheckpointSave;
      break;
    case Measured::What::kPlacement:
      family = &kPlacement;
      break;
  }
  registry_.GetHistogram(*family).Observe(measured.seconds);
}

void Metrics::Queue(const QueueSample& sample) {
  for (const v1::DeviceKind kind : kDeviceKinds) {
    const auto count = [kind](const auto& by_kind) {
      const auto found = by_kind.find(kind);
      return found == by_kind.end() ? 0.0 : static_cast<double>(found->second);
    };
    registry_.GetGauge(kSlotsWanted, {spec::EnumName(kind)}).Set(count(sample.wanted));
    registry_.GetGauge(kSlotsAllocated, {spec::EnumName(kind)}).Set(count(sample.allocated));
    registry_.GetGauge(kQueueSmallest, {spec::EnumName(kind)}).Set(count(sample.smallest_waiting));
  }
  registry_.GetGauge(kQueueOldest).Set(absl::ToDoubleSeconds(sample.oldest_wait));
}

void Metrics::DeviceSeconds(v1::UsageClass usage_class, const std::string& queue, double seconds) {
  std::string label = queue;
  bool first = false;
  if (!queue.empty()) {
    MutexLock lock(&mutex_);
    if (!queues_.contains(label) && queues_.size() >= kQueueSeriesMax) label = "other";
    first = queues_.insert(label).second;
  }
  if (first) {
    // A rate needs a first sample, of what has not happened yet too.
    for (int of_job = v1::USAGE_CLASS_HELD; of_job <= v1::USAGE_CLASS_PREEMPTED; ++of_job) {
      registry_.GetCounter(kDeviceSeconds,
                           {spec::EnumName(static_cast<v1::UsageClass>(of_job)), label});
    }
  }
  registry_.GetCounter(kDeviceSeconds, {spec::EnumName(usage_class), label}).Increment(seconds);
}

void Metrics::StateDisk(int64_t state_bytes, int64_t free_bytes, int64_t total_bytes) {
  registry_.GetGauge(kStateBytes).Set(static_cast<double>(state_bytes));
  registry_.GetGauge(kStateDiskFree).Set(static_cast<double>(free_bytes));
  registry_.GetGauge(kStateDisk).Set(static_cast<double>(total_bytes));
}

void Metrics::CertificateFile(const std::string& flag, absl::Time not_before,
                              absl::Time not_after) {
  registry_.GetGauge(kCertificateBegin, {flag})
      .Set(absl::ToDoubleSeconds(not_before - absl::UnixEpoch()));
  registry_.GetGauge(kCertificateEnd, {flag})
      .Set(absl::ToDoubleSeconds(not_after - absl::UnixEpoch()));
}

void Metrics::LoopDelay(absl::Duration delay) {
  registry_.GetHistogram(kLoopDelay).Observe(absl::ToDoubleSeconds(delay));
}

void Metrics::Version(const std::string& version) {
  registry_.GetGauge(kBuildInfo, {version}).Set(1);
}

void Metrics::TraceSpansDropped(const std::string& reason, size_t spans) {
  registry_.GetCounter(kTraceSpansDropped, {reason}).Increment(static_cast<double>(spans));
}

void Metrics::RpcTook(absl::string_view method, absl::Duration took) {
  registry_.GetHistogram(kRpcSeconds, {std::string(method)}).Observe(absl::ToDoubleSeconds(took));
}

void Metrics::RpcDone(absl::string_view method, absl::string_view code) {
  registry_.GetCounter(kRpcs, {std::string(method), std::string(code)}).Increment();
}

}  // namespace muster::coordinator
