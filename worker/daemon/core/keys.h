// What attempts and ranks are called: in maps, in messages and on disk.
#ifndef MUSTER_WORKER_DAEMON_CORE_KEYS_H_
#define MUSTER_WORKER_DAEMON_CORE_KEYS_H_

#include <compare>
#include <cstdint>
#include <string>

#include "base/ids.h"

namespace muster::worker {

struct AttemptKey {
  JobId job;
  Epoch epoch;
  friend auto operator<=>(const AttemptKey&, const AttemptKey&) = default;
};
// One rank of one attempt: the unit that is started, signalled and reaped.
struct RankKey {
  AttemptKey attempt;
  int32_t rank = 0;
  friend auto operator<=>(const RankKey&, const RankKey&) = default;
};

// The attempt that a message with job_id and epoch is about.
template <typename Message>
AttemptKey KeyOf(const Message& message) {
  return {JobId(message.job_id()), Epoch(message.epoch())};
}

// "gpt-kjv-x7k2p epoch 3 rank 1", for messages.
std::string ToString(const AttemptKey& key);
std::string ToString(const RankKey& key);

// "<job id>.e<epoch>", safe as a file name whatever the id holds.
std::string DirectoryName(const AttemptKey& key);
// "<job id>.e<epoch>/rank-<n>", below DaemonCoreConfig::attempts_directory.
std::string RunDirectoryName(const RankKey& key);

}  // namespace muster::worker

#endif  // MUSTER_WORKER_DAEMON_CORE_KEYS_H_
