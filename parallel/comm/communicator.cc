#include "parallel/comm/communicator.h"

#include "kernels/ops.h"

namespace muster::parallel {

void Communicator::ReduceScatterTo(kernels::Stream& stream, kernels::Tensor data,
                                   kernels::Tensor sum, ReduceOp op) {
  ReduceScatter(stream, data, op);
  const int64_t part = data.elements() / size();
  kernels::Copy(stream, data.Reshape({data.elements()}).Rows(part * rank(), part),
                sum.Reshape({part}));
}

void Communicator::Rotate(kernels::Stream& stream, kernels::Tensor in, kernels::Tensor out,
                          int by) {
  const int ranks = size();
  const int places = (by % ranks + ranks) % ranks;
  GroupBegin();
  Send(stream, in, (rank() + places) % ranks);
  Receive(stream, out, (rank() + ranks - places) % ranks);
  GroupEnd(stream);
}

absl::StatusOr<std::unique_ptr<SharedMemory>> Communicator::Share(
    const std::vector<kernels::Tensor>&, const ShareOptions&) {
  return nullptr;
}

}  // namespace muster::parallel
