// One message under way between two ranks of a TCP mesh (tcp_mesh.h).
#ifndef MUSTER_PARALLEL_COMM_TCP_TRANSFER_H_
#define MUSTER_PARALLEL_COMM_TCP_TRANSFER_H_

#include <cstddef>
#include <cstdint>

#include "base/mutex.h"

namespace muster::parallel {

// Stays where it is from TcpMesh::Post until TcpMesh::Withdraw has returned.
class TcpTransfer {
 public:
  TcpTransfer(int peer, bool sends, uint64_t tag, void* data, size_t bytes)
      : peer_(peer), sends_(sends), tag_(tag), data_(static_cast<char*>(data)), bytes_(bytes) {}
  TcpTransfer(const TcpTransfer&) = delete;
  TcpTransfer& operator=(const TcpTransfer&) = delete;
  int peer() const { return peer_; }

 private:
  friend class TcpMesh;
  friend class TcpLink;

  // Wakes the waiter of this transfer alone: it is done, or nothing will ever come of it. With the
  // mesh's mutex held.
  void Decide(bool done) {
    done_ = done_ || done;
    if (!decided_.HasBeenNotified()) decided_.Notify();
  }

  const int peer_;
  const bool sends_;
  const uint64_t tag_;
  char* const data_;
  const size_t bytes_;
  bool done_ = false;  // guarded by the mesh's mutex
  Notification decided_;
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_COMM_TCP_TRANSFER_H_
