// Bounds of what the coordinator's shell and RPC services hold for their callers. core/limits.h has
// those of the core.
#ifndef MUSTER_COORDINATOR_LIMITS_H_
#define MUSTER_COORDINATOR_LIMITS_H_

#include <cstddef>
#include <cstdint>

#include "absl/time/time.h"

namespace muster::coordinator {

// ---- calls
// Large enough that an absurd spec still arrives, so that the rule that it breaks refuses it.
constexpr int kReceiveBytesMax = 16 << 20;
constexpr size_t kNameBytesMax = 253;  // of a job or worker that a call names
// An unknown name is compared with so many names, which are at most so much longer or shorter.
constexpr size_t kNearestNamesMax = 2000;
constexpr size_t kNearestLengthDifference = 2;
constexpr int kJobsPerCallMax = 1000;            // of SubmitJobs
constexpr size_t kCallsWaitingMax = 4096;        // of each kind; more: RESOURCE_EXHAUSTED
constexpr size_t kStatusMessageBytesMax = 2048;  // sent in HTTP/2 trailers, which are bounded
constexpr int kPageSizeDefault = 100;
constexpr int kPageSizeMax = 1000;
// A reply stays below the 4 MiB that gRPC clients accept by default.
constexpr size_t kPageBytesMax = 3 << 20;
// Rows read for one page of a filtered listing.
constexpr int kEventRowsPerPageMax = 50'000;
constexpr int kUsageRowsPerReplyMax = 10'000;  // the others are added up

// ---- streams
// More than `all`, or than `peer` from one address without its port: RESOURCE_EXHAUSTED. Clusters
// on one host, and hosts behind one NAT, have a single address.
struct SlotBound {
  size_t all, peer;
};
constexpr SlotBound kCallSlots = {8192, 3072};
constexpr SlotBound kOpeningSlots = {8192, 4096};
constexpr SlotBound kSessionSlots = {16'384, 12'288};
constexpr SlotBound kFollowerSlots = {2048, 1024};
constexpr SlotBound kWatcherSlots = {8192, 2048};
constexpr absl::Duration kHelloTimeout = absl::Seconds(10);
// Of PublishedState: readers of logs are among them.
constexpr size_t kWatchersMax = kFollowerSlots.all + kWatcherSlots.all;
constexpr absl::Duration kWatchJobInterval = absl::Milliseconds(100);
constexpr size_t kEventsReadAtOnce = 256;
constexpr size_t kSessionsMax = kSessionSlots.all;
// A daemon that leaves more unread has its stream closed; it reconnects and reconciles.
constexpr size_t kSessionQueueBytesMax = 128 << 20;

// ---- callers (rpc/gate.h)
constexpr int kTokenRolesMax = 100;
constexpr absl::Duration kTokenLifetimeMin = absl::Minutes(1);
constexpr absl::Duration kTokenLifetimeMax = absl::Hours(24 * 365);
constexpr absl::Duration kRecheckInterval = absl::Seconds(5);  // of those with an open stream
constexpr int kStuckTicksMax = 12;  // of that interval: a reader that takes no message is dropped
constexpr size_t kCertificatesKnownMax = 32'768;  // whose verification is remembered
constexpr size_t kRateLimitedMax = 65'536;        // callers whose rate is known
// Entries in the audit log for refused calls of one address and method; the others are counted.
constexpr double kRefusalsAuditedPerSecond = 1;
constexpr double kRefusalsAuditedAtOnce = 20;
// The keys of an issuer of identity tokens (rpc/issuer_keys.h).
constexpr absl::Duration kKeysRefresh = absl::Minutes(10);
constexpr absl::Duration kKeysRetry = absl::Seconds(10);
constexpr absl::Duration kKeysPatience = absl::Seconds(10);
// For so long a connection may shake hands, and be open without a call.
constexpr absl::Duration kHandshakeTimeout = absl::Seconds(10);
constexpr absl::Duration kIdleConnectionTimeout = absl::Minutes(10);
// What a connection may have open at a time, and what all requests together may take.
constexpr int kStreamsPerConnectionMax = 16'384;
constexpr size_t kRequestBytesMax = size_t{1} << 30;

// ---- logs
constexpr int64_t kLogChunkBytes = 256 << 10;
constexpr int32_t kProfileStepsMax = 1000;
// A rank leaves a record of its collectives in a second or two; one whose process is stopped never.
constexpr absl::Duration kCollectivesTimeout = absl::Minutes(1);
constexpr absl::Duration kLogReplyTimeout = absl::Seconds(10);
constexpr absl::Duration kLogFollowInterval = absl::Milliseconds(200);
constexpr absl::Duration kLogRetryInterval = absl::Seconds(1);

// ---- backups and snapshots
constexpr int64_t kSnapshotChunkBytes = 256 << 10;
constexpr int64_t kBackupsMax = 100;  // more: RESOURCE_EXHAUSTED

// ---- writer
// Outputs that wait for the disk; the core waits when there are more. Most of what workers report
// has to be told in its turn and not to be written: it counts for less.
constexpr size_t kBatchesWaitingMax = 4096;
constexpr size_t kOutputsWaitingMax = 65'536;  // with those that have nothing to write
constexpr size_t kWriteBytesMax = 32 << 20;    // of the outputs that share one sync, about

// ---- metrics
constexpr absl::Duration kWorkerSampleInterval = absl::Seconds(1);
// Those of larger fleets are looked at less often, so that it costs no more: of 10,000 workers with
// eight devices each, once a second was a tenth of a core.
constexpr int kWorkersSampledPerInterval = 2000;
constexpr absl::Duration kDiskSampleInterval = absl::Seconds(15);
constexpr absl::Duration kEndedJobSeriesKept = absl::Minutes(5);
// Queues with series of their own; jobs of more queues are counted under "other".
constexpr size_t kQueueSeriesMax = 64;

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_LIMITS_H_
