// The micro-batches of one data-parallel rank, read ahead by a thread of its own.
//
// Step k takes samples [consumed, consumed + global_batch) of the sampler's one global order.
// Micro-batch j of the step is samples [j, j + 1) * micro_batch of those, and rank r runs the
// micro-batches [r, r + 1) * (global_batch / micro_batch / ranks): which samples share a
// micro-batch does not depend on the number of ranks.
#ifndef MUSTER_PARALLEL_TRAIN_BATCH_LOADER_H_
#define MUSTER_PARALLEL_TRAIN_BATCH_LOADER_H_

#include <cstdint>
#include <deque>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "parallel/data/sampler.h"

namespace muster::parallel {

struct MicroBatch {
  std::vector<int32_t> tokens;   // micro_batch x S
  std::vector<int32_t> targets;  // < 0 = masked
  int64_t unmasked = 0;          // targets that count
};

struct BatchLoaderOptions {
  int64_t global_batch = 0;  // a multiple of micro_batch x ranks
  int64_t micro_batch = 0;
  int rank = 0;
  int ranks = 1;
  int64_t first_sample = 0;  // consumed so far; a multiple of global_batch is not needed
  int depth = 4;             // micro-batches held ready at most
};

// Next() from one thread. The sampler must outlive it.
class BatchLoader {
 public:
  BatchLoader(const Sampler& sampler, const BatchLoaderOptions& options);
  ~BatchLoader();  // ends the thread

  // The next micro-batch in order. An error of the sampler (kDataLoss) comes in its place in the
  // order and is final.
  absl::StatusOr<MicroBatch> Next();

 private:
  void Run();

  const Sampler& sampler_;
  const BatchLoaderOptions options_;
  Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::deque<absl::StatusOr<MicroBatch>> ready_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;  // last: starts when everything above exists
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_TRAIN_BATCH_LOADER_H_
