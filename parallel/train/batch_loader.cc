#include "parallel/train/batch_loader.h"

#include <algorithm>
#include <utility>

#include "absl/types/span.h"
#include "base/check.h"

namespace muster::parallel {

BatchLoader::BatchLoader(const Sampler& sampler, const BatchLoaderOptions& options)
    : sampler_(sampler), options_(options) {
  CHECK_EQ(options.global_batch % (options.micro_batch * options.ranks), 0);
  thread_ = std::thread([this] { Run(); });
}

BatchLoader::~BatchLoader() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
  }
  thread_.join();
}

void BatchLoader::Run() {
  const int64_t per_rank = options_.global_batch / options_.ranks;
  std::vector<int64_t> samples(options_.micro_batch);
  for (int64_t step_first = options_.first_sample;; step_first += options_.global_batch) {
    const int64_t begin = step_first + options_.rank * per_rank;
    for (int64_t first = begin; first < begin + per_rank; first += options_.micro_batch) {
      for (int64_t i = 0; i < options_.micro_batch; ++i) samples[i] = first + i;
      MicroBatch batch;
      batch.tokens.resize(options_.micro_batch * sampler_.sequence_length());
      batch.targets.resize(batch.tokens.size());
      const absl::Status status =
          sampler_.Fill(samples, absl::MakeSpan(batch.tokens), absl::MakeSpan(batch.targets));
      batch.unmasked = std::count_if(batch.targets.begin(), batch.targets.end(),
                                     [](int32_t target) { return target >= 0; });
      MutexLock lock(&mutex_);
      const auto room = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
        return stopping_ || ready_.size() < static_cast<size_t>(options_.depth);
      };
      mutex_.Await(Condition(&room));
      if (stopping_) return;
      if (!status.ok()) {
        ready_.push_back(status);
        return;
      }
      ready_.push_back(std::move(batch));
    }
  }
}

absl::StatusOr<MicroBatch> BatchLoader::Next() {
  MutexLock lock(&mutex_);
  const auto available = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return !ready_.empty(); };
  mutex_.Await(Condition(&available));
  if (!ready_.front().ok()) return ready_.front().status();
  absl::StatusOr<MicroBatch> batch = std::move(ready_.front());
  ready_.pop_front();
  return batch;
}

}  // namespace muster::parallel
