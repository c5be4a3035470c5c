#include "parallel/train/batch_loader.h"

#include <algorithm>
#include <utility>

#include "absl/types/span.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "parallel/optim/gradient_reducer.h"

namespace muster::parallel {

using kernels::DType;
using kernels::Tensor;

int64_t BatchLoader::Bytes(int64_t micro_batch, int64_t sequence_length, bool documents,
                           int depth) {
  constexpr int64_t kNumbers = 3;  // one of `unmasked`, two of `sample`
  return depth * ((documents ? 3 : 2) * micro_batch * sequence_length + kNumbers) *
         SizeOf(DType::kI32);
}

absl::StatusOr<std::unique_ptr<BatchLoader>> BatchLoader::Start(const Sampler& sampler,
                                                                kernels::Device& device,
                                                                const BatchLoaderOptions& options) {
  CHECK_EQ(options.global_batch % (options.micro_batch * options.ranks), 0);
  std::unique_ptr<BatchLoader> loader(new BatchLoader(sampler, options));
  const int64_t tokens = options.micro_batch * sampler.sequence_length();
  MutexLock lock(&loader->mutex_);
  for (int i = 0; i < options.depth; ++i) {
    Slot slot;
    ASSIGN_OR_RETURN(slot.memory,
                     device.AllocateHost(Bytes(options.micro_batch, sampler.sequence_length(),
                                               options.documents, /*depth=*/1)));
    ASSIGN_OR_RETURN(slot.copied, device.MakeEvent());
    auto* const data = static_cast<int32_t*>(slot.memory->data());
    slot.batch.tokens = Tensor(data, DType::kI32, {tokens});
    slot.batch.targets = Tensor(data + tokens, DType::kI32, {tokens});
    slot.batch.unmasked = Tensor(data + 2 * tokens, DType::kF32, {1});
    slot.batch.sample = Tensor(data + 2 * tokens + 1, DType::kI32, {2});
    if (options.documents) {
      slot.batch.documents = Tensor(data + 2 * tokens + 3, DType::kI32, {tokens});
    }
    slot.batch.slot = i;
    loader->slots_.push_back(std::move(slot));
    loader->free_.push_back(i);
  }
  loader->thread_ = std::thread([raw = loader.get()] { raw->Run(); });
  return loader;
}

BatchLoader::~BatchLoader() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
  }
  if (thread_.joinable()) thread_.join();
}

int BatchLoader::WaitForFreeSlot() {
  int slot = -1;
  {
    MutexLock lock(&mutex_);
    const auto free_or_stopping = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
      return stopping_ || !free_.empty();
    };
    mutex_.Await(Condition(&free_or_stopping));
    if (stopping_) return -1;
    slot = free_.front();
    free_.pop_front();
  }
  slots_[slot].copied->Synchronize();
  return slot;
}

absl::Status BatchLoader::Fill(int64_t first_sample, Slot& slot) {
  std::vector<int64_t> samples(options_.micro_batch);
  for (int64_t i = 0; i < options_.micro_batch; ++i) samples[i] = first_sample + i;
  slot.batch.sample.as<uint32_t>()[0] = static_cast<uint32_t>(first_sample);
  slot.batch.sample.as<uint32_t>()[1] = static_cast<uint32_t>(first_sample >> 32);
  const auto span = [](const Tensor& tensor) {
    return absl::MakeSpan(tensor.as<int32_t>(), tensor.elements());
  };
  const absl::Span<int32_t> targets = span(slot.batch.targets);
  const absl::Status status = sampler_.Fill(samples, span(slot.batch.tokens), targets);
  const auto counted =
      std::count_if(targets.begin(), targets.end(), [](int32_t target) { return target >= 0; });
  *slot.batch.unmasked.f32() = static_cast<float>(counted);
  if (options_.documents) sampler_.Documents(samples, span(slot.batch.documents));
  return status;
}

void BatchLoader::Run() {
  const int64_t count = options_.global_batch / options_.micro_batch / options_.ranks;
  for (int64_t step_first = options_.first_sample;; step_first += options_.global_batch) {
    for (int64_t j = 0; j < count; ++j) {
      const int64_t index =
          GradientReducer::MicroBatchOf(j, count, options_.rank, options_.ranks_summed_first);
      const int slot = WaitForFreeSlot();
      if (slot < 0) return;
      absl::Status status = Fill(step_first + index * options_.micro_batch, slots_[slot]);
      MutexLock lock(&mutex_);
      if (!status.ok()) {
        ready_.push_back(std::move(status));
        return;
      }
      ready_.push_back(slot);
    }
  }
}

absl::StatusOr<MicroBatch> BatchLoader::Next() {
  MutexLock lock(&mutex_);
  const auto available = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return !ready_.empty(); };
  mutex_.Await(Condition(&available));
  if (!ready_.front().ok()) return ready_.front().status();
  const MicroBatch batch = slots_[*ready_.front()].batch;
  ready_.pop_front();
  return batch;
}

void BatchLoader::Release(const MicroBatch& batch, kernels::Stream& stream) {
  stream.Record(*slots_[batch.slot].copied);
  MutexLock lock(&mutex_);
  free_.push_back(batch.slot);
}

}  // namespace muster::parallel
