// What this rank's collectives are doing, left in its run directory when the rank fails or when
// somebody asks (`muster debug`).
#ifndef MUSTER_WORKER_RANK_FLIGHT_RECORD_H_
#define MUSTER_WORKER_RANK_FLIGHT_RECORD_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "base/log.h"
#include "base/mutex.h"
#include "muster/v1/rank.pb.h"
#include "parallel/comm/flight_recorder.h"

namespace muster::worker {

class FlightRecord {
 public:
  // An empty run directory: nothing is written. `logger` must outlive it.
  FlightRecord(std::string run_directory, Logger& logger);

  // The recorder to put around the rank's communicators.
  const std::shared_ptr<parallel::FlightRecorder>& recorder() const { return recorder_; }

  // Writes a v1::CollectiveRecord under this number and removes the one before. A failure is
  // logged. For one thread.
  void Answer(uint64_t number);

  // Sets `progress.groups`. Thread-safe.
  void AddPositions(v1::RankProgress& progress) const;

  // Writes collectives.log and logs which collectives are unfinished; once, if there were any.
  // Thread-safe.
  void Dump() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  const std::string run_directory_;
  Logger& logger_;
  const std::shared_ptr<parallel::FlightRecorder> recorder_;
  std::string answer_;  // path of the newest answer
  Mutex mutex_;
  bool dumped_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace muster::worker

#endif  // MUSTER_WORKER_RANK_FLIGHT_RECORD_H_
