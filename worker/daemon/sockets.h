// The TCP sockets on which processes of this machine listen, as the kernel lists them.
#ifndef MUSTER_WORKER_DAEMON_SOCKETS_H_
#define MUSTER_WORKER_DAEMON_SOCKETS_H_

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <set>
#include <vector>

namespace muster::worker {

// By inode, which identifies a socket for as long as anybody holds it: the port it listens on.
using ListeningSockets = std::map<uint64_t, int>;

// Those of this machine, or of its network namespace.
ListeningSockets AllListeningSockets();
// Those that the process holds; empty when it has ended or this user may not look.
ListeningSockets ListeningSocketsOf(pid_t pid);
// The processes that hold one of these sockets, ascending.
std::vector<pid_t> HoldersOf(const std::set<uint64_t>& inodes);

}  // namespace muster::worker

#endif  // MUSTER_WORKER_DAEMON_SOCKETS_H_
