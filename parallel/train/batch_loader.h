// Reads the micro-batches of one data-parallel rank ahead, on a thread of its own, into pinned
// memory.
//
// A step takes samples [consumed, consumed + global_batch) of the sampler's one global order.
// Micro-batch g of the step is samples [g, g + 1) * micro_batch of those, and a rank runs the
// micro-batches GradientReducer::MicroBatchOf(j, ...). So the samples of a micro-batch do not
// depend on the layout.
#ifndef MUSTER_PARALLEL_TRAIN_BATCH_LOADER_H_
#define MUSTER_PARALLEL_TRAIN_BATCH_LOADER_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "kernels/device/device.h"
#include "kernels/tensor.h"
#include "parallel/data/sampler.h"

namespace muster::parallel {

// A slot of the loader's ring: views of pinned host memory.
struct MicroBatch {
  kernels::Tensor tokens;    // [micro_batch x S] i32
  kernels::Tensor targets;   // [micro_batch x S] i32, < 0 = masked
  kernels::Tensor unmasked;  // [1] fp32: targets that count
  // [2] i32: the lower and the upper 32 bits of the first sample's number in the global order.
  kernels::Tensor sample;
  // [micro_batch x S] i32, with BatchLoaderOptions::documents: see Sampler::Documents.
  kernels::Tensor documents;
  int slot = 0;
};

struct BatchLoaderOptions {
  int64_t global_batch = 0;  // a multiple of micro_batch x ranks
  int64_t micro_batch = 0;
  int rank = 0;
  int ranks = 1;
  int ranks_summed_first = 1;  // see GradientReducer::MicroBatchOf
  int64_t first_sample = 0;    // consumed so far; a multiple of global_batch is not needed
  bool documents = false;      // fill MicroBatch::documents
  int depth = 4;               // slots: micro-batches that are ready or being copied, at most
};

// Next() and Release() from one thread. The sampler and device must outlive it.
class BatchLoader {
 public:
  // Host memory of the slots.
  static int64_t Bytes(int64_t micro_batch, int64_t sequence_length, bool documents,
                       int depth = BatchLoaderOptions().depth);
  // kResourceExhausted without memory for the slots.
  static absl::StatusOr<std::unique_ptr<BatchLoader>> Start(const Sampler& sampler,
                                                            kernels::Device& device,
                                                            const BatchLoaderOptions& options);
  ~BatchLoader();  // ends the thread

  // The next micro-batch in order; blocks until it is read. An error of the sampler (kDataLoss)
  // comes in place of the micro-batch that it belongs to, and nothing comes after it.
  absl::StatusOr<MicroBatch> Next();
  // The slot may be filled again once `stream` has done what is enqueued by now.
  void Release(const MicroBatch& batch, kernels::Stream& stream);

 private:
  struct Slot {
    std::unique_ptr<kernels::Buffer> memory;
    std::unique_ptr<kernels::Event> copied;
    MicroBatch batch;
  };
  BatchLoader(const Sampler& sampler, const BatchLoaderOptions& options)
      : sampler_(sampler), options_(options) {}
  void Run();
  absl::Status Fill(int64_t first_sample, Slot& slot);
  // The slot to fill next; -1: the loader is being destroyed.
  int WaitForFreeSlot();

  const Sampler& sampler_;
  const BatchLoaderOptions options_;
  std::vector<Slot> slots_;
  Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::deque<int> free_ ABSL_GUARDED_BY(mutex_);
  std::deque<absl::StatusOr<int>> ready_ ABSL_GUARDED_BY(mutex_);  // slots
  std::thread thread_;  // last, since it uses everything above
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_TRAIN_BATCH_LOADER_H_
