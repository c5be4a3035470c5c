// The operations that benchmarks of collectives on GPUs time, and their results.
#ifndef MUSTER_TESTS_BENCH_COLLECTIVE_CALLS_H_
#define MUSTER_TESTS_BENCH_COLLECTIVE_CALLS_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "base/check.h"
#include "kernels/device/device.h"
#include "kernels/tensor.h"
#include "parallel/comm/communicator.h"

namespace muster::parallel {

template <typename T>
T Take(absl::StatusOr<T> made) {
  CHECK_OK(made);
  return *std::move(made);
}

enum class Operation { kAllReduce, kAllGather, kReduceScatter };
inline constexpr std::array<Operation, 3> kOperations = {
    Operation::kAllReduce, Operation::kAllGather, Operation::kReduceScatter};
inline const char* NameOf(Operation operation) {
  return operation == Operation::kAllReduce   ? "all-reduce"
         : operation == Operation::kAllGather ? "all-gather"
                                              : "reduce-scatter";
}

inline void Issue(Communicator& group, kernels::Stream& stream, Operation operation,
                  const kernels::Tensor& data) {
  if (operation == Operation::kAllReduce) group.AllReduce(stream, data, ReduceOp::kSum);
  if (operation == Operation::kAllGather) group.AllGather(stream, data);
  if (operation == Operation::kReduceScatter) group.ReduceScatter(stream, data, ReduceOp::kSum);
}

// Element i of rank `rank` before a call that is verified; sums of it are exact in any order.
inline float ValueOf(int rank, int64_t i) { return static_cast<float>((i * 7 + rank * 13) % 61); }
// The element after the call, on rank `self` of `ranks`; negative where it is undefined.
inline float ExpectedOf(Operation operation, int self, int ranks, int64_t i, int64_t elements) {
  const auto owner = static_cast<int>(i / (elements / ranks));
  if (operation == Operation::kAllGather) return ValueOf(owner, i);
  if (operation == Operation::kReduceScatter && owner != self) return -1;
  float sum = 0;
  for (int rank = 0; rank < ranks; ++rank) sum += ValueOf(rank, i);
  return sum;
}

inline double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace muster::parallel

#endif  // MUSTER_TESTS_BENCH_COLLECTIVE_CALLS_H_
