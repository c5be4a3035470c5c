// What travels over the connections of a TCP mesh (tcp_mesh.h), and what a rank publishes about
// itself. Numbers are little-endian, as in memory.
#ifndef MUSTER_PARALLEL_COMM_TCP_FRAME_H_
#define MUSTER_PARALLEL_COMM_TCP_FRAME_H_

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace muster::parallel {

static_assert(std::endian::native == std::endian::little, "frames travel as they are in memory");

// ---- a link's conversation

enum class FrameType : uint32_t {
  kData = 1,   // a message
  kReady = 2,  // the receive of a large message with this tag and size has been posted
  kTaken = 3,  // a small message with this tag has met its receive
  kPing = 4,   // nothing but `received`
  kAsk = 5,    // wants a ping back
  kBye = 6,    // the sender has ended
};
inline constexpr uint32_t kFrameMagic = 0x4d55534d;

// Precedes a message's bytes.
struct Header {
  uint32_t magic = kFrameMagic;
  FrameType type = FrameType::kPing;
  uint64_t number = 0;  // of data, ready and taken frames, from 1; others are not numbered
  uint64_t tag = 0;
  uint64_t bytes = 0;     // of the message
  uint64_t received = 0;  // the last numbered frame that has arrived whole
};

// ---- the set-up of a connection

enum class Purpose : uint32_t {
  kLink = 1,       // becomes the link's connection
  kPreflight = 2,  // proves that the dialer reaches the listener, and is closed
};
inline constexpr char kHelloMagic[8] = {'M', 'U', 'S', 'T', 'E', 'R', '0', '1'};
inline constexpr size_t kTokenBytes = 16;
// More than one packet, whatever the network carries in one (jumbo frames: 9000 bytes).
inline constexpr size_t kPreflightBytes = 16 << 10;

// What the dialer sends first, followed by `padding` bytes.
struct Hello {
  char magic[8] = {};
  char token[kTokenBytes] = {};  // of the listener: known to the ranks of the attempt alone
  uint32_t from = 0;
  Purpose purpose = Purpose::kLink;
  uint64_t attempt = 0;   // grows; an older one that comes late is dropped
  uint64_t received = 0;  // as Header's
  uint64_t padding = 0;
};
// The listener's answer, followed by as many bytes.
struct Reply {
  char magic[8] = {};
  uint32_t welcome = 0;  // 0: the listener has given up this link
  uint32_t reserved = 0;
  uint64_t received = 0;
};

// Where a rank listens and what it is called, as published in the store.
struct PeerRecord {
  std::string address;
  int port = 0;
  std::string token;
  std::string label;  // of its place, for people

  std::string ToText() const;
  // kInternal.
  static absl::StatusOr<PeerRecord> FromText(const std::string& text);
  // "rank 3 (worker-2 on host b, 10.0.0.2:20001)".
  std::string NameOf(int rank) const;
};

// kTokenBytes that nobody can guess. kInternal.
absl::StatusOr<std::string> RandomToken();

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_COMM_TCP_FRAME_H_
