// Sends and receives that a host communicator has been asked for and has not enqueued yet.
#ifndef MUSTER_PARALLEL_COMM_TRANSFER_QUEUE_H_
#define MUSTER_PARALLEL_COMM_TRANSFER_QUEUE_H_

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "base/check.h"
#include "kernels/tensor.h"

namespace muster::parallel {

struct QueuedTransfer {
  kernels::Tensor data;
  int peer = 0;
  uint64_t number = 0;  // of those to, or from, this peer, from 0
  bool sends = false;
};

class TransferQueue {
 public:
  void Send(const kernels::Tensor& data, int to) {
    queued_.push_back({data, to, sent_to_[to]++, /*sends=*/true});
  }
  void Receive(const kernels::Tensor& data, int from) {
    queued_.push_back({data, from, received_from_[from]++, /*sends=*/false});
  }
  void GroupBegin() {
    CHECK(!grouping_) << "GroupBegin twice";
    grouping_ = true;
  }
  void GroupEnd() {
    CHECK(grouping_) << "GroupEnd without GroupBegin";
    grouping_ = false;
  }
  // Between GroupBegin and GroupEnd transfers stay in the queue.
  bool grouping() const { return grouping_; }
  std::vector<QueuedTransfer> Take() { return std::exchange(queued_, {}); }

 private:
  std::map<int, uint64_t> sent_to_, received_from_;
  bool grouping_ = false;
  std::vector<QueuedTransfer> queued_;
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_COMM_TRANSFER_QUEUE_H_
