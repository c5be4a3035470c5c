// Bounds of everything that the core holds or accepts, each far above what a healthy cluster needs.
// Its comment says whether more is refused or trimmed.
#ifndef MUSTER_COORDINATOR_CORE_LIMITS_H_
#define MUSTER_COORDINATOR_CORE_LIMITS_H_

#include <cstddef>
#include <cstdint>

#include "absl/time/time.h"

namespace muster::coordinator {

// ---- jobs
constexpr size_t kLiveJobsMax = 10'000;       // more: Submit gets RESOURCE_EXHAUSTED
constexpr size_t kEndedJobsMax = 10'000;      // more: the oldest ended job is forgotten
constexpr size_t kRequestIdBytesMax = 128;    // more: INVALID_ARGUMENT
constexpr size_t kReasonBytesMax = 1024;      // ChangeJobRequest.reason; more: INVALID_ARGUMENT
constexpr int kAttemptEndsMax = 256;          // Job.causes; the oldest are dropped
constexpr int kPastAttemptsMax = 16;          // placements kept to find logs of ended attempts
constexpr int kCheckpointRecordsMax = 256;    // Job.checkpoints; removed and damaged ones go first
constexpr int kLossPointsMax = 512;           // Job.losses; thinned
constexpr size_t kRestoreCandidatesMax = 16;  // checkpoints offered to an attempt, newest first
constexpr size_t kMessageBytesMax = 4096;     // any text that a worker or rank sent; cut
// How far above the current epoch one that a daemon holds is believed, after a restore.
constexpr uint64_t kEpochsAheadMax = 1'000'000;

// ---- restarts that do not count are bounded too, or a broken machine would restart a job for ever
constexpr int kLaunchFailuresMax = 20;    // attempts in a row that could not be started
constexpr int kRestartsInARowMax = 1000;  // attempts in a row without a newly committed step
constexpr uint32_t kMembershipsMax = 64;  // of one attempt; with another replacement it ends

// ---- workers
constexpr size_t kWorkersMax = 16'384;       // more: the stream is closed, RESOURCE_EXHAUSTED
constexpr int kDevicesPerWorkerMax = 1024;   // more: the stream is closed, INVALID_ARGUMENT
constexpr size_t kWorkerNameBytesMax = 253;  // a DNS name
constexpr int kLatestFaultsMax = 16;         // Reputation.latest
constexpr int kWorkerLabelsMax = 64;         // more: the stream is closed, INVALID_ARGUMENT
// Of specs and checkpoints in one Desired, of which a daemon takes 64 MiB; others follow when it
// holds these.
constexpr size_t kDesiredSpecBytesMax = 32 << 20;

// ---- requests of operators; more: INVALID_ARGUMENT
constexpr size_t kCordonReasonBytesMax = 1024;
constexpr int kAwayRecordedMax = 256;  // PlanRecord.away, undivided; more: no plan made again
constexpr int kReservationsMax = 256;  // of the cluster, by name
constexpr absl::Duration kDrainTimeoutMax = absl::Hours(30 * 24);
constexpr absl::Duration kDrainTimeout = absl::Minutes(30);  // without one in the request
constexpr absl::Duration kReservationMax = absl::Hours(366 * 24);

// ---- bootstrap keys; more: RESOURCE_EXHAUSTED
constexpr size_t kKeyBytesMax = 1024;
constexpr size_t kValueBytesMax = 1 << 20;
constexpr size_t kKeysPerEpochMax = 1 << 16;
constexpr size_t kKeyValueBytesPerEpochMax = 64 << 20;
constexpr size_t kWaitersPerEpochMax = 1 << 17;

// ---- events: the log keeps this many rows
constexpr uint64_t kEventsMax = 1'000'000;
constexpr uint64_t kLogEntriesMax = 1'000'000;  // of the log of changes (state_log.h), too

// ---- device time: rows of past periods, one for each job that held devices and one for the
// others; with 1,000 jobs at a time they reach back twelve weeks
constexpr uint64_t kUsageRowsMax = 2'000'000;
constexpr absl::Duration kUsagePeriod = absl::Hours(1);

// ---- access
constexpr size_t kTokensMax = 10'000;  // more: CreateToken gets RESOURCE_EXHAUSTED
constexpr absl::Duration kEndedTokensKept = absl::Hours(24 * 30);  // expired or revoked ones
constexpr uint64_t kAuditEntriesMax = 1'000'000;                   // the oldest are dropped

// ---- time
// While a worker or an attempt is watched, the core asks for a turn at least this often. When more
// than kPauseMin longer has gone by, the coordinator was stopped or starved: in that time it could
// hear nobody, so that the silence of workers and ranks does not count.
constexpr absl::Duration kTurnIntervalMax = absl::Seconds(1);
constexpr absl::Duration kPauseMin = absl::Seconds(1);
// How long an attempt waits, after the first exit by a failed collective, for the exit that caused
// it.
constexpr absl::Duration kCulpritGrace = absl::Seconds(1);
// From SIGTERM to SIGKILL for a gang that has failed. It is short, since the ranks that are left
// cannot finish the step at whose end they would stop.
constexpr absl::Duration kFailedStopGrace = absl::Seconds(2);
// Every daemon must have accepted an attempt within this time.
constexpr absl::Duration kPrepareTimeout = absl::Minutes(1);
// A change of a job's progress alone (step, loss) is made durable at most this often.
constexpr absl::Duration kProgressPersistInterval = absl::Seconds(1);
// The ranks of a gang with more of them than this are published at most this often.
constexpr int kPublishedAtOnceMax = 64;
constexpr absl::Duration kPublishInterval = absl::Milliseconds(250);
// A gang counts as hung, in the device time, when it has made no progress for so many steps' time,
// and for at least kHungMin.
constexpr int kHungSteps = 10;
constexpr absl::Duration kHungMin = absl::Seconds(30);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_LIMITS_H_
