// What the daemon counts; served at --metrics.
#ifndef MUSTER_WORKER_DAEMON_METRICS_H_
#define MUSTER_WORKER_DAEMON_METRICS_H_

#include <vector>

#include "base/metrics.h"
#include "worker/daemon/gpu_sampler.h"

namespace muster::worker {

inline const metrics::Family kSlots = {
    metrics::Kind::kGauge, "muster_worker_slots", "Devices that this worker offers.", {}};
inline const metrics::Family kSlotsUsed = {
    metrics::Kind::kGauge,
    "muster_worker_slots_used",
    "Devices given to a rank whose release is not proven yet.",
    {}};
inline const metrics::Family kAttempts = {
    metrics::Kind::kGauge, "muster_worker_attempts", "Attempts that this worker holds.", {}};
inline const metrics::Family kRanks = {
    metrics::Kind::kGauge, "muster_worker_ranks", "Ranks held, by state.", {"state"}};
inline const metrics::Family kRankStarts = {
    metrics::Kind::kCounter, "muster_worker_rank_starts_total", "Rank processes started.", {}};
inline const metrics::Family kRankExits = {metrics::Kind::kCounter,
                                           "muster_worker_rank_exits_total",
                                           "Rank processes that ended, by cause.",
                                           {"cause"}};
inline const metrics::Family kGpuErrors = {
    metrics::Kind::kCounter,
    "muster_worker_gpu_errors_total",
    "Errors that the driver reported of a GPU (Xid), by its UUID and the error's number.",
    {"gpu", "xid"}};
inline const metrics::Family kReattached = {
    metrics::Kind::kCounter,
    "muster_worker_ranks_reattached_total",
    "Running ranks found again after a restart of the daemon.",
    {}};
inline const metrics::Family kRefusals = {
    metrics::Kind::kCounter,
    "muster_worker_refusals_total",
    "Attempts that could not be prepared, or a rank of which could not be started.",
    {}};
inline const metrics::Family kSessionUp = {
    metrics::Kind::kGauge,
    "muster_worker_session_up",
    "1 while the coordinator has welcomed this worker, else 0.",
    {}};
inline const metrics::Family kSessions = {metrics::Kind::kCounter,
                                          "muster_worker_sessions_total",
                                          "Sessions that the coordinator welcomed.",
                                          {}};
inline const metrics::Family kDials = {metrics::Kind::kCounter,
                                       "muster_worker_dials_total",
                                       "Attempts to open a session with the coordinator.",
                                       {}};
inline const metrics::Family kCommitsPending = {
    metrics::Kind::kGauge,
    "muster_worker_checkpoint_commits_pending",
    "Checkpoint commits stored here that wait for the coordinator's verdict.",
    {}};
inline const metrics::Family kKeyValuePending = {
    metrics::Kind::kGauge,
    "muster_worker_key_value_calls_pending",
    "Bootstrap puts and gets that wait for the coordinator.",
    {}};
inline const metrics::Family kLogBytes = {
    metrics::Kind::kGauge,
    "muster_worker_rank_log_bytes",
    "Bytes of rank logs on disk, of current and ended attempts.",
    {}};
inline const metrics::Family kStateDiskFree = {
    metrics::Kind::kGauge,
    "muster_worker_state_disk_free_bytes",
    "Bytes that are free for the daemon on the file system of --state-dir.",
    {}};
inline const metrics::Family kStateDisk = {metrics::Kind::kGauge,
                                           "muster_worker_state_disk_bytes",
                                           "Size of the file system of --state-dir in bytes.",
                                           {}};
inline const metrics::Family kCertificateBegin = {
    metrics::Kind::kGauge,
    "muster_worker_certificate_not_before_timestamp_seconds",
    "When the newest certificate in the file of a flag (tls-cert, tls-ca, metrics-tls-cert, "
    "metrics-tls-ca) begins; 0 while it cannot be read.",
    {"file"}};
inline const metrics::Family kCertificateEnd = {
    metrics::Kind::kGauge,
    "muster_worker_certificate_not_after_timestamp_seconds",
    "When the first certificate in the file of a flag (tls-cert, tls-ca, metrics-tls-cert, "
    "metrics-tls-ca) ends; 0 while it cannot be read.",
    {"file"}};
inline const metrics::Family kBuildInfo = {
    metrics::Kind::kGauge, "muster_worker_build_info", "1, with the version.", {"version"}};
inline const metrics::Family kPersistSeconds = {
    metrics::Kind::kHistogram,
    "muster_worker_persist_seconds",
    "Time to make the changes of the daemon's state that wait for the disk durable.",
    {},
    {0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1}};

// The catalogue behind --describe-metrics and docs/metrics.md.
inline std::vector<const metrics::Family*> WorkerFamilies() {
  std::vector<const metrics::Family*> all = {
      &kSlots,          &kSlotsUsed,       &kAttempts,         &kRanks,
      &kRankStarts,     &kRankExits,       &kGpuErrors,        &kReattached,
      &kRefusals,       &kSessionUp,       &kSessions,         &kDials,
      &kCommitsPending, &kKeyValuePending, &kLogBytes,         &kPersistSeconds,
      &kStateDiskFree,  &kStateDisk,       &kCertificateBegin, &kCertificateEnd,
      &kBuildInfo};
  for (const metrics::Family* family : GpuFamilies()) all.push_back(family);
  return all;
}

}  // namespace muster::worker

#endif  // MUSTER_WORKER_DAEMON_METRICS_H_
