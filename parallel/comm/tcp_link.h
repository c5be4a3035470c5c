// The conversation with one peer of a TCP mesh: numbers messages, acknowledges them, and sends
// again over a new connection what the peer has not acknowledged. How connections are made is
// tcp_connector.h's.
#ifndef MUSTER_PARALLEL_COMM_TCP_LINK_H_
#define MUSTER_PARALLEL_COMM_TCP_LINK_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "parallel/comm/tcp_frame.h"
#include "parallel/comm/tcp_poller.h"
#include "parallel/comm/tcp_socket.h"
#include "parallel/comm/tcp_transfer.h"

namespace muster::parallel {

// All functions are called with the mutex of the state held. Those that read or write the
// connection let go of it during system calls, so any thread may post meanwhile; one thread at a
// time writes, and only the mesh's own thread reads, attaches and disconnects for silence.
class TcpLink {
 public:
  TcpLink(TcpMeshState& state, int peer);

  int peer() const { return peer_; }
  // As messages name the peer: "rank 3", and where it is once that is known.
  const std::string& name() const { return name_; }
  void set_name(std::string name) { name_ = std::move(name); }

  // ---- transfers
  void Post(TcpTransfer& transfer);
  // Wakes all waiters of transfers that are not done: nothing will come of them.
  void GiveUpTransfers();
  // Whether the peer has acknowledged everything; AskForAcknowledgement makes it answer.
  bool acknowledged() const { return frames_.empty(); }
  void AskForAcknowledgement();

  // ---- the connection
  bool up() const { return socket_ != nullptr; }
  bool ever_up() const { return ever_up_; }
  uint64_t id() const { return id_; }  // of the connection in the poller; 0: none
  // Goes on over this connection behind frame `peer_received`, the last one that the peer has.
  // Returns for how long there was no connection, if this one replaces another.
  std::optional<absl::Duration> Attach(Socket socket, uint64_t peer_received, absl::Time now);
  // Gives up the connection, which another one may replace; `why` becomes trouble().
  void Disconnect(const std::string& why);
  // Why there is no connection, for people.
  const std::string& trouble() const { return trouble_; }
  void set_trouble(std::string trouble) { trouble_ = std::move(trouble); }
  // Counts the connections that were given up.
  int disconnects() const { return disconnects_; }
  // The newest proof that the peer's host is reached.
  absl::Time alive() const { return alive_; }
  void set_alive(absl::Time now) { alive_ = now; }
  // The number of frames that have arrived whole.
  uint64_t received() const { return received_; }

  // ---- the end
  // OK, or why there will be no connection any more.
  const absl::Status& lost() const { return lost_; }
  void Lose(absl::Status why);
  // After the mesh has ended: tells the peer, if that takes no waiting, and closes the connection.
  void Close();

  // ---- the mesh's thread
  // Reads and writes what the poller has announced.
  void OnEvent(uint32_t events);
  // Pings, and gives up a connection on which the peer's host has been silent for too long.
  void Tick(absl::Time now);

 private:
  // A numbered frame, kept until the peer has acknowledged it.
  struct Frame {
    Header header;
    char* data = nullptr;             // of a message, in the sender's memory
    TcpTransfer* transfer = nullptr;  // done when the frame has been acknowledged
    size_t payload_bytes() const { return header.type == FrameType::kData ? header.bytes : 0; }
  };
  template <typename T>
  using ByTag = std::unordered_map<uint64_t, std::deque<T>>;

  template <typename T>
  static std::optional<T> TakeFirst(ByTag<T>& map, uint64_t tag);

  void Enqueue(Frame frame);
  void EnqueueMessage(TcpTransfer& transfer);
  void Acknowledge(uint64_t received);
  void Stamp(Header& header);
  // Writes what the connection takes, in system calls without the mutex.
  void Pump() ABSL_NO_THREAD_SAFETY_ANALYSIS;
  void Read() ABSL_NO_THREAD_SAFETY_ANALYSIS;
  void Parse();
  // False: the connection is not to be read on.
  bool BeginFrame(const Header& header);
  bool BeginMessage(const Header& header);
  void FinishFrame();
  void Deliver(TcpTransfer& transfer, const std::vector<char>& bytes);
  // The peer has broken the protocol. Returns false.
  bool Garbled(const std::string& what);

  TcpMeshState& state_;
  const int peer_;
  std::string name_;

  // ---- connection
  std::shared_ptr<Socket> socket_;  // null: none
  uint64_t id_ = 0;
  bool wants_write_ = false;  // the poller will say when more can be written
  bool writing_ = false;      // a thread is inside Pump, maybe without the mutex
  bool ever_up_ = false;
  int disconnects_ = 0;
  absl::Time heard_, sent_;  // anything, on this connection
  absl::Time alive_;
  absl::Time down_since_;
  std::string trouble_;
  absl::Status lost_;

  // ---- sending
  std::deque<Frame> frames_;  // not acknowledged
  size_t next_ = 0;           // the first that is not written whole to this connection,
  size_t offset_ = 0;         // and how many of its bytes are
  uint64_t last_number_ = 0;
  uint64_t acknowledged_ = 0;      // the last frame that the peer has said it received
  std::optional<Header> control_;  // being written: a frame without a number
  size_t control_offset_ = 0;
  bool ping_due_ = false, ask_due_ = false;
  ByTag<TcpTransfer*> untaken_;  // small sends that are on their way, or wait for their receive
  ByTag<TcpTransfer*> sends_;    // large sends whose receive is not ready
  ByTag<uint64_t> ready_;        // bytes of large receives that wait for their send

  // ---- receiving
  std::vector<char> staging_;  // read ahead: [staged_begin_, staged_end_)
  size_t staged_begin_ = 0, staged_end_ = 0;
  std::optional<Header> in_;  // the frame whose bytes are arriving
  char* in_to_ = nullptr;
  size_t in_got_ = 0;
  std::vector<char> in_small_;
  uint64_t received_ = 0, told_received_ = 0;
  ByTag<TcpTransfer*> receives_;
  ByTag<std::vector<char>> early_;  // small messages that wait for their receive
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_COMM_TCP_LINK_H_
