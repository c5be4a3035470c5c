// Messages between every two ranks of a world over TCP, across hosts.
//
// A link is the pair's conversation, and outlives its connections: messages are numbered, the
// receiver acknowledges them, and the sender keeps what is not acknowledged (tcp_link.h). When
// nothing has been heard for 2.5 s the connection is given up and the higher rank dials again about
// once a second (tcp_connector.h); the new connection goes on behind the last message that arrived
// whole. So a cut of the network costs the time it lasts and about a second, where TCP alone, whose
// retransmissions back off exponentially, would stay silent for as long again. A connection that
// ends although its peer lives (a firewall that forgot it, an interface that was restarted) is
// replaced the same way.
//
// A link is lost for good when its peer says goodbye, when nobody listens at its address any more
// (its process has ended), or when nothing was heard from its host for TcpOptions::silence_max. A
// peer that is merely stopped (SIGSTOP) still acknowledges at the level of TCP and is waited for.
//
// A send is done when its receive has the message. Large messages are sent once the receiver has
// said that it is ready: they go from the sender's memory to the receiver's without a copy of ours.
// Small ones are sent at once.
#ifndef MUSTER_PARALLEL_COMM_TCP_MESH_H_
#define MUSTER_PARALLEL_COMM_TCP_MESH_H_

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "parallel/comm/communicator.h"
#include "parallel/comm/tcp_transfer.h"

namespace muster::parallel {

// Thread-safe.
class TcpMesh {
 public:
  using Transfer = TcpTransfer;

  // Blocks until every two ranks have proved to each other that they can talk, both ways and in
  // packets of full size. `store` is not used afterwards. Status codes as of MakeTcpCommunicator.
  static absl::StatusOr<std::unique_ptr<TcpMesh>> Connect(KeyValueStore& store, int rank, int size,
                                                          const TcpOptions& options);
  // Waits a few seconds for messages that are not acknowledged, and says goodbye. Requires: no
  // transfer is under way.
  ~TcpMesh();

  // Begins; at least one byte. A message goes to the receive of the same tag and size; those of one
  // tag are matched in the order in which they were posted.
  void Post(Transfer& transfer);
  // OK: a send's memory may be reused, a receive's is filled. kDeadlineExceeded: not by then.
  // kUnavailable: the link is lost, with a PeerFailure when its network is why. Else End's status.
  // Wakes for this transfer alone, whatever else the mesh is doing.
  absl::Status Wait(Transfer& transfer, absl::Time deadline);
  // Returns when the memory of the transfer is not touched any more. Requires: the transfer is
  // done, or the mesh has ended.
  void Withdraw(Transfer& transfer);

  // Ends all transfers and links. The first reason stays and is returned.
  absl::Status End(absl::Status why);
  // OK until then.
  absl::Status ended() const;

 private:
  class Impl;
  explicit TcpMesh(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_COMM_TCP_MESH_H_
