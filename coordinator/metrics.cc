#include "coordinator/metrics.h"

#include "proto/job_state.h"
#include "proto/spec/names.h"

namespace muster::coordinator {
namespace {

using metrics::Family;
using metrics::Kind;

const std::vector<double> kWaitBuckets = {0.1, 0.5, 1, 5, 15, 60, 300, 900, 3600, 14400, 86400};
const std::vector<double> kRecoveryBuckets = {0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 300};
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
const Family kWorkers = {Kind::kGauge, "muster_coordinator_workers", "Workers by state", {"state"}};
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

// One series per live job, removed some minutes after the job has ended.
const Family kJobStep = {Kind::kGauge, "muster_job_step", "Last optimizer step finished", {"job"}};
const Family kJobSteps = {Kind::kGauge, "muster_job_steps", "Optimizer steps to do", {"job"}};
const Family kJobTrainLoss = {Kind::kGauge,
                              "muster_job_train_loss",
                              "Training loss of the last reported step, nats per token",
                              {"job"}};
const Family kJobValidationLoss = {Kind::kGauge,
                                   "muster_job_validation_loss",
                                   "Loss of the last evaluation, nats per token",
                                   {"job"}};
const Family kJobTokensPerSecond = {
    Kind::kGauge, "muster_job_tokens_per_second", "Training throughput of all ranks", {"job"}};
const Family kJobMfu = {Kind::kGauge,
                        "muster_job_model_flops_utilization",
                        "Arithmetic of the model as a share of what its devices could do at best, "
                        "0 to 1; 0 where that is not known",
                        {"job"}};
const Family kJobStepSeconds = {
    Kind::kGauge, "muster_job_step_seconds", "Median time of a step over the last report", {"job"}};
const Family kJobCommittedStep = {Kind::kGauge,
                                  "muster_job_last_committed_step",
                                  "Step of the newest committed checkpoint",
                                  {"job"}};
const Family kJobAttempts = {
    Kind::kGauge, "muster_job_attempts", "Attempts started so far", {"job"}};

}  // namespace

std::vector<const Family*> Metrics::Catalogue() {
  return {&kJobs,
          &kQueueWait,
          &kAttemptsEnded,
          &kFailureDetection,
          &kJobRecovery,
          &kPlacement,
          &kSlots,
          &kSlotsFree,
          &kWorkers,
          &kSessions,
          &kWatchers,
          &kEventSequence,
          &kCheckpointsCommitted,
          &kCheckpointsRefused,
          &kCheckpointSave,
          &kStoreWrite,
          &kStoreBatches,
          &kStoreBytes,
          &kLeaderTerm,
          &kRecovery,
          &kRpcs,
          &kJobStep,
          &kJobSteps,
          &kJobTrainLoss,
          &kJobValidationLoss,
          &kJobTokensPerSecond,
          &kJobMfu,
          &kJobStepSeconds,
          &kJobCommittedStep,
          &kJobAttempts};
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
  for (const Family* family : Catalogue()) {
    if (family->kind == Kind::kHistogram) registry_.GetHistogram(*family);
  }
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

void Metrics::ForgetJob(const std::string& name) {
  for (const Family* family :
       {&kJobStep, &kJobSteps, &kJobTrainLoss, &kJobValidationLoss, &kJobTokensPerSecond, &kJobMfu,
        &kJobStepSeconds, &kJobCommittedStep, &kJobAttempts}) {
    registry_.Remove(*family, {name});
  }
}

void Metrics::EventPublished(const v1::Event& event) {
  registry_.GetGauge(kEventSequence).Set(static_cast<double>(event.sequence()));
  switch (event.kind()) {
    case v1::EVENT_KIND_ATTEMPT_ENDED:
      registry_.GetCounter(kAttemptsEnded, {spec::EnumName(event.cause())}).Increment();
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
  for (const v1::Worker& worker : workers) {
    ++by_state[worker.state()];
    if (worker.state() != v1::WORKER_STATE_LOST) slots += worker.slots();
    if (worker.state() == v1::WORKER_STATE_READY) free += worker.slots_free();
  }
  for (int state = v1::WORKER_STATE_READY; state <= v1::WorkerState_MAX; ++state) {
    const auto known = static_cast<v1::WorkerState>(state);
    registry_.GetGauge(kWorkers, {spec::EnumName(known)}).Set(static_cast<double>(by_state[known]));
  }
  registry_.GetGauge(kSlots).Set(static_cast<double>(slots));
  registry_.GetGauge(kSlotsFree).Set(static_cast<double>(free));
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

void Metrics::RpcDone(absl::string_view method, absl::string_view code) {
  registry_.GetCounter(kRpcs, {std::string(method), std::string(code)}).Increment();
}

}  // namespace muster::coordinator
