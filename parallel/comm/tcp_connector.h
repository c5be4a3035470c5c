// How the ranks of a TCP mesh get connections to each other: listens, dials, checks who the other
// end is, and finds out why two ranks do not reach each other. What a connection carries afterwards
// is tcp_link.h's.
//
// The higher rank of a pair dials the link's connection; the lower one only checks, before the
// first collective, that it reaches the higher one (Purpose::kPreflight), and later, while the
// connection is down, whether the peer still listens.
#ifndef MUSTER_PARALLEL_COMM_TCP_CONNECTOR_H_
#define MUSTER_PARALLEL_COMM_TCP_CONNECTOR_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "parallel/comm/communicator.h"
#include "parallel/comm/tcp_frame.h"
#include "parallel/comm/tcp_link.h"
#include "parallel/comm/tcp_poller.h"
#include "parallel/comm/tcp_socket.h"

namespace muster::parallel {

// Called with the mutex of the state held, all but Listen by the mesh's thread unless said
// otherwise.
class TcpConnector {
 public:
  // `links`, by rank, and `state` outlive it; the link of this rank itself is not used.
  TcpConnector(TcpMeshState& state, std::deque<TcpLink>& links, int rank, int size,
               const TcpOptions& options);

  // Before the mesh's thread starts. kInvalidArgument, kResourceExhausted.
  absl::Status Listen();
  // What this rank publishes.
  const PeerRecord& self() const { return self_; }

  // ---- the bootstrap, on any thread
  // From now on the peer is dialled.
  void SetRecord(int peer, PeerRecord record);
  // Whether every peer has been reached and has a connection, or a link is lost.
  bool Decided() const;
  // OK when every peer has; else why a link is lost or not connected in time.
  absl::Status Outcome() const;
  void EndBootstrap() { bootstrapping_ = false; }

  // Whether it wants to be ticked often.
  bool busy() const;
  void OnListener(absl::Time now);
  void OnEvent(uint64_t id, absl::Time now);
  // Dials, gives up what takes too long, and loses links whose host has been silent for too long.
  void Tick(absl::Time now);
  // After the mesh has ended: a peer that dials learns at once that nobody listens.
  void Close();

 private:
  struct Peer {
    std::optional<PeerRecord> record;  // once the peer has published it
    bool reached = false;              // a dial of this rank was answered
    uint64_t dialing = 0;              // id of the dial under way; 0: none
    uint64_t attempts = 0;             // number of this rank's newest dial
    uint64_t attempt_in = 0;           // number of the peer's newest dial
    absl::Time dial_at = absl::InfinitePast();
    int disconnects_seen = 0;          // TcpLink::disconnects when dial_at was set
    int refusals = 0, rejections = 0;  // in a row
    int probes = 0;                    // that were accepted since the link was up
    // An address other than the record's that the peer's dials come from; empty: none.
    std::string other_address;
    absl::Time dialing_since = absl::InfiniteFuture();
  };
  // A connection that is no link's yet.
  struct Pending {
    Socket socket;
    bool dialed = false;  // by this rank
    int peer = -1;        // that was dialled
    Purpose purpose = Purpose::kLink;
    bool probe = false;  // only finds out whether somebody listens
    bool connected = false;
    bool answering = false;  // `out` is the answer, the last that is written
    std::string out;
    size_t written = 0;
    std::string in;
    size_t wanted = 0;
    absl::Time deadline;
  };
  enum class DialFailure {
    kOther,
    kRefused,   // nobody listens there
    kRejected,  // somebody accepted and did not answer as a peer does
  };
  enum class Step { kWaiting, kDone, kFailed };

  TcpLink& link(int peer) { return links_[static_cast<size_t>(peer)]; }
  Peer& peer(int rank) { return peers_[static_cast<size_t>(rank)]; }
  bool Connected(int peer) const;
  absl::Status Unconnected(int peer) const;
  std::string Here() const;  // this rank's label and address
  // What a person would look at first when `link` has no connection.
  std::string Diagnosis(const TcpLink& link) const;
  void Tell(const std::string& text) ABSL_NO_THREAD_SAFETY_ANALYSIS;

  void TickPending(absl::Time now);
  void TickPeer(TcpLink& link, absl::Time now);
  void DialNotBefore(TcpLink& link, absl::Time at);
  void StartDial(TcpLink& link, absl::Time now);
  void DialFailed(TcpLink& link, DialFailure failure, const std::string& why, absl::Time now);

  // False: the connection is done with.
  bool Progress(uint64_t id, Pending& pending, absl::Time now);
  bool Fail(const Pending& pending, int error, const std::string& why, absl::Time now);
  // A dial has connected. False: that was all it was to find out.
  bool Connect(Pending& pending, absl::Time now);
  Step Write(uint64_t id, Pending& pending, absl::Time now);
  Step Read(Pending& pending, absl::Time now);
  bool IsPeer(const Hello& hello) const;
  // An accepted connection has said what it wants: makes the answer. False: there is none to give.
  bool Answer(Pending& pending);
  void AttachAccepted(Pending& pending, absl::Time now);
  // A peer has answered a dial.
  void Answered(Pending& pending, absl::Time now);
  void Attach(TcpLink& link, Pending& pending, uint64_t peer_received, absl::Time now);

  TcpMeshState& state_;
  std::deque<TcpLink>& links_;
  const int rank_;
  const TcpOptions& options_;
  PeerRecord self_;
  Socket listener_;
  std::vector<Peer> peers_;              // by rank
  std::map<uint64_t, Pending> pending_;  // by id in the poller
  bool bootstrapping_ = true;
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_COMM_TCP_CONNECTOR_H_
