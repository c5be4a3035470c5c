#include "parallel/comm/communicator.h"

#include "kernels/device/device.h"
#include "kernels/memory/memory.h"
#include "kernels/tensor.h"
#include "parallel/comm/arguments.h"

namespace muster::parallel {
namespace {

kernels::Tensor PartAt(const kernels::Tensor& all, const std::vector<int>& places, int rank,
                       int size) {
  const int64_t part = all.elements() / size;
  const int place = places.empty() ? rank : places[static_cast<size_t>(rank)];
  return all.Reshape({all.elements()}).Rows(place * part, part);
}

}  // namespace

kernels::Tensor AllToAllItem::PartFor(int to, int size) const {
  return PartAt(in, in_places, to, size);
}

kernels::Tensor AllToAllItem::PartFrom(int from, int size) const {
  return PartAt(out, out_places, from, size);
}

void Communicator::ReduceScatterTo(kernels::Stream& stream, kernels::Tensor data,
                                   kernels::Tensor sum, ReduceOp op) {
  ReduceScatter(stream, data, op);
  const int64_t part = data.elements() / size();
  kernels::Copy(stream, data.Reshape({data.elements()}).Rows(part * rank(), part),
                sum.Reshape({part}));
}

void Communicator::ReduceScatterBeforeGather(kernels::Stream& stream, kernels::Tensor data,
                                             ReduceOp op) {
  ReduceScatter(stream, data, op);
}

void Communicator::AllGatherFrom(kernels::Stream& stream, kernels::Tensor in, kernels::Tensor out) {
  const int64_t part = out.elements() / size();
  CHECK(in.contiguous() && in.dtype() == out.dtype() && in.elements() * size() == out.elements());
  kernels::Copy(stream, in.Reshape({part}),
                out.Reshape({out.elements()}).Rows(part * rank(), part));
  AllGather(stream, out);
}

void Communicator::AllToAllBatch(kernels::Stream& stream, const std::vector<AllToAllItem>& items) {
  CheckAllToAllBatch(items, size());
  if (size() > 1) {
    GroupBegin();
    for (const AllToAllItem& item : items) {
      for (int step = 1; step < size(); ++step) {
        const int to = (rank() + step) % size(), from = (rank() + size() - step) % size();
        Send(stream, item.PartFor(to, size()), to);
        Receive(stream, item.PartFrom(from, size()), from);
      }
    }
    GroupEnd(stream);
  }
  for (const AllToAllItem& item : items) {
    kernels::Copy(stream, item.PartFor(rank(), size()), item.PartFrom(rank(), size()));
  }
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

}  // namespace muster::parallel
