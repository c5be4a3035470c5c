// A rank's place in a group whose other ranks are not there: collectives return at once and change
// nothing. It stands in where only the rank's own work counts, or where a group has one rank.
#ifndef MUSTER_PARALLEL_COMM_NULL_COMMUNICATOR_H_
#define MUSTER_PARALLEL_COMM_NULL_COMMUNICATOR_H_

#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "parallel/comm/communicator.h"

namespace muster::parallel {

class NullCommunicator : public Communicator {
 public:
  NullCommunicator(int rank, int size, std::string name)
      : rank_(rank), size_(size), name_(std::move(name)) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  const std::string& name() const override { return name_; }
  void AllReduce(kernels::Stream&, kernels::Tensor, ReduceOp) override {}
  void ReduceScatter(kernels::Stream&, kernels::Tensor, ReduceOp) override {}
  void AllGather(kernels::Stream&, kernels::Tensor) override {}
  void Broadcast(kernels::Stream&, kernels::Tensor, int) override {}
  void AllToAll(kernels::Stream&, kernels::Tensor, kernels::Tensor) override {}
  void Send(kernels::Stream&, kernels::Tensor, int) override {}
  void Receive(kernels::Stream&, kernels::Tensor, int) override {}
  void GroupBegin() override {}
  void GroupEnd(kernels::Stream&) override {}
  absl::Status Barrier() override { return absl::OkStatus(); }
  absl::StatusOr<std::unique_ptr<Communicator>> Split(int, int, const std::string&) override {
    return absl::UnimplementedError("a group without its other ranks cannot be split");
  }
  void Abort(absl::Status) override {}
  int64_t bytes_sent() const override { return 0; }

 private:
  const int rank_, size_;
  const std::string name_;
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_COMM_NULL_COMMUNICATOR_H_
