// The port on which rank 0 of a command listens for the others (MASTER_PORT).
#ifndef MUSTER_WORKER_COMMAND_MASTER_PORT_H_
#define MUSTER_WORKER_COMMAND_MASTER_PORT_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "base/network.h"

namespace muster::worker {

// A port of this machine that nobody listened on when it was chosen. No other MasterPort, of any
// process, is the same while this one lives: it holds an abstract unix socket of that name, which
// the kernel frees with the process. Ports come from outside the range that the kernel gives to
// sockets without a port of their own, so that none of those takes it either.
class MasterPort {
 public:
  // A port of `range`; of {0, 0} any outside the kernel's range. The search begins at a port that
  // depends on `seed`, so that attempts that follow each other get different ones. kUnavailable:
  // all are taken.
  static absl::StatusOr<MasterPort> Choose(PortRange range, uint64_t seed);
  MasterPort(MasterPort&& other) noexcept;
  MasterPort& operator=(MasterPort&&) = delete;
  ~MasterPort();

  int port() const { return port_; }

 private:
  MasterPort(int port, int holder) : port_(port), holder_(holder) {}

  int port_;
  int holder_;  // the unix socket
};

}  // namespace muster::worker

#endif  // MUSTER_WORKER_COMMAND_MASTER_PORT_H_
