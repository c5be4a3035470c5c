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

void Communicator::AllGatherInSteps(kernels::Stream& stream, kernels::Tensor in,
                                    kernels::Tensor out,
                                    absl::FunctionRef<void(int from)> arrived) {
  const kernels::Tensor all = out.Reshape({out.elements()});
  for (int step = 1; step < size(); ++step) {
    const int from = (rank() + size() - step) % size();
    Rotate(stream, in.Reshape({in.elements()}), all.Rows(from * in.elements(), in.elements()),
           step);
    arrived(from);
  }
}

void Communicator::AllToAllInSteps(kernels::Stream& stream, kernels::Tensor in, kernels::Tensor out,
                                   absl::FunctionRef<void(int to)> before) {
  const int64_t part = in.elements() / size();
  const auto part_of = [&](const kernels::Tensor& all, int of) {
    return all.Reshape({all.elements()}).Rows(of * part, part);
  };
  for (int step = 1; step < size(); ++step) {
    const int to = (rank() + step) % size(), from = (rank() + size() - step) % size();
    before(to);
    GroupBegin();
    Send(stream, part_of(in, to), to);
    Receive(stream, part_of(out, from), from);
    GroupEnd(stream);
  }
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
