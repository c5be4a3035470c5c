// Bounds of the worker daemon's queues and messages.
#ifndef MUSTER_WORKER_DAEMON_CORE_LIMITS_H_
#define MUSTER_WORKER_DAEMON_CORE_LIMITS_H_

#include <cstddef>
#include <cstdint>

namespace muster::worker {

constexpr size_t kKeyBytesMax = 1024;                   // of a bootstrap key
constexpr size_t kValueBytesMax = 1024 * 1024;          // of its value
constexpr size_t kKeyValueCallsMax = 16384;             // puts and gets that wait for an answer
constexpr size_t kKeyValueBytesMax = 64 * 1024 * 1024;  // of keys and values of those puts
constexpr size_t kNoticesMax = 4096;                    // notices that wait for the coordinator
constexpr size_t kCommitsMax = 4096;                    // commits without a verdict
constexpr size_t kCheckpointBytesMax = 16 * 1024;       // of what a rank tells of one checkpoint
constexpr size_t kExitMessageBytesMax = 4096;           // of a rank's own exit report
constexpr int64_t kReportBytesMax = 4 << 20;            // of a file that a rank leaves its daemon
constexpr int64_t kLogReplyBytesMax = 1024 * 1024;      // of data in one LogReply or ProfileReply
constexpr int64_t kCollectivesBytesMax = 4 << 20;       // of a rank's record of collectives
constexpr size_t kFileBytesUnsentMax =
    16 * 1024 * 1024;  // of ranks' files that wait for the stream
// Of messages that wait for the stream: more than the bounds above and one Observed allow.
constexpr size_t kOutgoingBytesMax = 320 * 1024 * 1024;
constexpr size_t kOutputsWaitingMax = 1024;  // of the core's outputs, for the disk
constexpr int kAttemptsKept = 20;            // attempt directories that are kept after their end
constexpr int kMessageBytesMax = 64 * 1024 * 1024;  // of one gRPC message

}  // namespace muster::worker

#endif  // MUSTER_WORKER_DAEMON_CORE_LIMITS_H_
