// Saves small checkpoints on threads as ranks.
#ifndef MUSTER_TESTS_PARALLEL_CHECKPOINT_SAVING_H_
#define MUSTER_TESTS_PARALLEL_CHECKPOINT_SAVING_H_

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "parallel/checkpoint/box.h"
#include "parallel/checkpoint/checkpoint.h"

namespace muster::parallel {

// All-gathers the texts of `size` threads, as often as they ask.
class TextExchange {
 public:
  explicit TextExchange(int size) : texts_(static_cast<size_t>(size)) {}
  TextGatherer For(int rank) {
    return [this, rank](
               absl::FunctionRef<std::string()> text) -> absl::StatusOr<std::vector<std::string>> {
      std::string own = text();
      std::unique_lock<std::mutex> lock(mutex_);
      texts_[static_cast<size_t>(rank)] = std::move(own);
      const int64_t round = arrived_++ / static_cast<int64_t>(texts_.size());
      changed_.notify_all();
      // A thread that comes to the next round first would overwrite its text of this one.
      changed_.wait(lock,
                    [&] { return arrived_ >= (round + 1) * static_cast<int64_t>(texts_.size()); });
      std::vector<std::string> all = texts_;
      ++left_;
      changed_.notify_all();
      changed_.wait(lock,
                    [&] { return left_ >= (round + 1) * static_cast<int64_t>(texts_.size()); });
      return all;
    };
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> texts_;
  int64_t arrived_ = 0, left_ = 0;  // by all threads, in all rounds
};

inline std::vector<float> Counting(const Box& box, const std::vector<int64_t>& shape) {
  std::vector<float> whole(static_cast<size_t>(Box::Whole(shape).elements()));
  for (size_t i = 0; i < whole.size(); ++i) whole[i] = static_cast<float>(i);
  std::vector<float> out(static_cast<size_t>(box.elements()));
  CopyBox(box, 4, Box::Whole(shape), reinterpret_cast<const char*>(whole.data()), box,
          reinterpret_cast<char*>(out.data()));
  return out;
}

inline CheckpointState StateAt(int64_t step, uint64_t epoch) {
  CheckpointState state;
  state.id = {JobId("gpt-kjv-x7k2p"), step, Epoch(epoch)};
  state.consumed_samples = step * 32;
  state.mesh = {{"data", 2}};
  state.integers = {{"optimizer.step", step}, {"negative", -3}};
  state.numbers = {{"third", 1.0 / 3}};
  state.texts = {{"note", "caf\xC3\xA9 \"quoted\""}};
  return state;
}

// "weight" [6, 4] cut as flat ranges over the ranks, as ZeRO does, and "ids" [3] on rank 0.
inline std::vector<absl::StatusOr<SaveResult>> SaveOn(int ranks, FileSystem& files,
                                                      const CheckpointState& state,
                                                      int64_t missing = 0) {
  TextExchange exchange(ranks);
  std::vector<absl::StatusOr<SaveResult>> results(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      const std::vector<int64_t> shape = {6, 4};
      const int64_t ids[3] = {7, -8, int64_t{1} << 40};
      std::vector<std::vector<float>> data;
      std::vector<SaveChunk> chunks;
      const int64_t end = (24 - missing) * (rank + 1) / ranks;
      for (const Box& box :
           FlatRangeToBoxes(Box::Whole(shape), (24 - missing) * rank / ranks, end)) {
        data.push_back(Counting(box, shape));
        chunks.push_back({"weight", kernels::DType::kF32, shape, box, data.back().data()});
      }
      if (rank == 0) chunks.push_back({"ids", kernels::DType::kI64, {3}, Box::Whole({3}), ids});
      results[static_cast<size_t>(rank)] =
          SaveCheckpoint(files, "root", state, rank, chunks, exchange.For(rank));
    });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

}  // namespace muster::parallel

#endif  // MUSTER_TESTS_PARALLEL_CHECKPOINT_SAVING_H_
