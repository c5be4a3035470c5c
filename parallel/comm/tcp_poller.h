// The sockets that the thread of a TCP mesh waits for (epoll), and what the mesh's parts share.
#ifndef MUSTER_PARALLEL_COMM_TCP_POLLER_H_
#define MUSTER_PARALLEL_COMM_TCP_POLLER_H_

#include <sys/epoll.h>

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/mutex.h"
#include "parallel/comm/tcp_socket.h"

namespace muster::parallel {

// Thread-safe after Open.
class TcpPoller {
 public:
  // Ids of events that are no connection's.
  static constexpr uint64_t kWakeId = 1, kListenerId = 2;

  // kResourceExhausted.
  absl::Status Open();
  void Add(int fd, uint64_t id, uint32_t events) { Control(EPOLL_CTL_ADD, fd, id, events); }
  void Change(int fd, uint64_t id, uint32_t events) { Control(EPOLL_CTL_MOD, fd, id, events); }
  void Remove(int fd) { Control(EPOLL_CTL_DEL, fd, 0, 0); }
  // Makes Wait return.
  void Wake();
  void Awoken();  // after an event with kWakeId
  // Waits for events, at most `timeout`.
  std::vector<epoll_event> Wait(absl::Duration timeout);

 private:
  void Control(int operation, int fd, uint64_t id, uint32_t events);

  Socket epoll_, wake_;
};

// What the event loop, the links and the connector of one mesh share. All of their state is guarded
// by this mutex: their functions are called with it held, and some let go of it for a system call.
struct TcpMeshState {
  Mutex mutex;
  absl::Status ended;  // not OK: nothing is read or written any more
  TcpPoller poller;

  // An id in the poller that no connection has had: of a link's connection to `peer`, or of one
  // that is no link's yet (kNoPeer).
  static constexpr uint64_t kNoPeer = (uint64_t{1} << 24) - 1;
  uint64_t NewId(uint64_t peer) { return ++ids << 24 | peer; }
  static uint64_t PeerOf(uint64_t id) { return id & kNoPeer; }

  uint64_t ids = 0;
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_COMM_TCP_POLLER_H_
