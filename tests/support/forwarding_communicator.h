// A communicator that forwards every call; tests override the calls that they disturb or count.
#ifndef MUSTER_TESTS_SUPPORT_FORWARDING_COMMUNICATOR_H_
#define MUSTER_TESTS_SUPPORT_FORWARDING_COMMUNICATOR_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "parallel/comm/communicator.h"

namespace muster::testing {

class ForwardingCommunicator : public parallel::Communicator {
 public:
  explicit ForwardingCommunicator(std::unique_ptr<parallel::Communicator> inner)
      : inner_(std::move(inner)) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  const std::string& name() const override { return inner_->name(); }
  void AllReduce(kernels::Stream& stream, kernels::Tensor data, parallel::ReduceOp op) override {
    inner_->AllReduce(stream, data, op);
  }
  void ReduceScatter(kernels::Stream& stream, kernels::Tensor data,
                     parallel::ReduceOp op) override {
    inner_->ReduceScatter(stream, data, op);
  }
  void AllGather(kernels::Stream& stream, kernels::Tensor data) override {
    inner_->AllGather(stream, data);
  }
  void Broadcast(kernels::Stream& stream, kernels::Tensor data, int root) override {
    inner_->Broadcast(stream, data, root);
  }
  void AllToAll(kernels::Stream& stream, kernels::Tensor in, kernels::Tensor out) override {
    inner_->AllToAll(stream, in, out);
  }
  void AllToAllBatch(kernels::Stream& stream,
                     const std::vector<parallel::AllToAllItem>& items) override {
    inner_->AllToAllBatch(stream, items);
  }
  void Send(kernels::Stream& stream, kernels::Tensor data, int to) override {
    inner_->Send(stream, data, to);
  }
  void Receive(kernels::Stream& stream, kernels::Tensor data, int from) override {
    inner_->Receive(stream, data, from);
  }
  void GroupBegin() override { inner_->GroupBegin(); }
  void GroupEnd(kernels::Stream& stream) override { inner_->GroupEnd(stream); }
  absl::Status Barrier() override { return inner_->Barrier(); }
  // The new group is not wrapped.
  absl::StatusOr<std::unique_ptr<parallel::Communicator>> Split(int color, int key,
                                                                const std::string& name) override {
    return inner_->Split(color, key, name);
  }
  void Abort(absl::Status why) override { inner_->Abort(std::move(why)); }
  int64_t bytes_sent() const override { return inner_->bytes_sent(); }

 protected:
  const std::unique_ptr<parallel::Communicator> inner_;
};

}  // namespace muster::testing

#endif  // MUSTER_TESTS_SUPPORT_FORWARDING_COMMUNICATOR_H_
