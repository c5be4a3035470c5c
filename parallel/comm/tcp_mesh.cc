#include "parallel/comm/tcp_mesh.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <deque>
#include <fstream>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "base/check.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "parallel/comm/peer_failure.h"
#include "parallel/comm/tcp_socket.h"

namespace muster::parallel {
namespace {

static_assert(std::endian::native == std::endian::little, "frames travel as they are in memory");

// Without a message a link says this often that it is there, and what it has received.
constexpr absl::Duration kPingEvery = absl::Seconds(1);
// Without a sign of the peer's host for so long its connection is replaced.
constexpr absl::Duration kSuspectAfter = absl::Milliseconds(2500);
// For one attempt to connect: then the next one sends a new SYN, so that the first one after a cut
// comes soon.
constexpr absl::Duration kDialTimeout = absl::Seconds(1);
constexpr absl::Duration kDialAgainAfter = absl::Milliseconds(200);
// For the peer's process to answer once its host has accepted.
constexpr absl::Duration kHelloTimeout = absl::Seconds(5);
// Of the bootstrap, where a refusal may only mean that the peer's port is being opened.
constexpr int kRefusalsMax = 5;
// Connections in a row that somebody accepted and closed without an answer: not our peer.
constexpr int kRejectionsMax = 10;
// For messages that are not acknowledged when the mesh is destroyed.
constexpr absl::Duration kFlushTimeout = absl::Seconds(5);
constexpr absl::Duration kTick = absl::Milliseconds(250);
constexpr absl::Duration kBusyTick = absl::Milliseconds(50);

// Messages up to this size are sent at once, and held by the receiver until it asks for them.
constexpr size_t kSmallBytesMax = 16 << 10;
constexpr int kTellReceivedEvery = 32;  // messages
constexpr size_t kStagingBytes = 64 << 10;
constexpr size_t kReadBudget = 8 << 20;  // of one link before the others get their turn
// More than one packet, whatever the network carries in one (jumbo frames: 9000 bytes).
constexpr size_t kPreflightBytes = 16 << 10;
constexpr size_t kTokenBytes = 16;
constexpr size_t kStrangersMax = 64;  // connections that have not said who they are

enum class FrameType : uint32_t {
  kData = 1,   // a message
  kReady = 2,  // the receive of a large message with this tag and size has been posted
  kTaken = 3,  // a small message with this tag has met its receive
  kPing = 4,   // nothing but `received`
  kAsk = 5,    // wants a ping back
  kBye = 6,    // the sender has ended
};
constexpr uint32_t kFrameMagic = 0x4d55534d;

// What goes over a connection, in front of a message's bytes.
struct Header {
  uint32_t magic = kFrameMagic;
  FrameType type = FrameType::kPing;
  uint64_t number = 0;  // of data, ready and taken frames, from 1; others are not numbered
  uint64_t tag = 0;
  uint64_t bytes = 0;     // of the message
  uint64_t received = 0;  // the last numbered frame that has arrived whole
};

enum class Purpose : uint32_t {
  kLink = 1,       // the conversation
  kPreflight = 2,  // proves that the dialer reaches the listener, and is closed
};
constexpr char kHelloMagic[8] = {'M', 'U', 'S', 'T', 'E', 'R', '0', '1'};

// The dialer's first words, followed by `padding` bytes.
struct Hello {
  char magic[8] = {};
  char token[kTokenBytes] = {};  // of the listener: who does not know it is a stranger
  uint32_t from = 0;
  Purpose purpose = Purpose::kLink;
  uint64_t attempt = 0;   // grows; an older one that comes late is dropped
  uint64_t received = 0;  // as Header's
  uint64_t padding = 0;
};
// The answer, followed by as many bytes.
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
  std::string label;

  std::string ToText() const {
    return absl::StrCat(address, "\n", port, "\n", absl::BytesToHexString(token), "\n", label);
  }
  static absl::StatusOr<PeerRecord> FromText(const std::string& text) {
    const std::vector<std::string> lines = absl::StrSplit(text, absl::MaxSplits('\n', 3));
    PeerRecord record;
    if (lines.size() != 4 || !absl::SimpleAtoi(lines[1], &record.port)) {
      return absl::InternalError("a rank's address in the store cannot be read");
    }
    record.address = lines[0];
    record.token = absl::HexStringToBytes(lines[2]);
    record.label = lines[3];
    if (record.token.size() != kTokenBytes) {
      return absl::InternalError("a rank's token in the store cannot be read");
    }
    return record;
  }
};

absl::StatusOr<std::string> RandomToken() {
  std::string token(kTokenBytes, '\0');
  std::ifstream random("/dev/urandom", std::ios::binary);
  if (!random.read(token.data(), static_cast<std::streamsize>(token.size()))) {
    return absl::InternalError("/dev/urandom cannot be read");
  }
  return token;
}

bool IsLoopback(const std::string& address) {
  return absl::StartsWith(address, "127.") || address == "::1";
}

struct Frame {
  Header header;
  char* data = nullptr;                   // of a message, in the sender's memory
  TcpMesh::Transfer* transfer = nullptr;  // done when the frame has been received
  size_t payload_bytes() const { return header.type == FrameType::kData ? header.bytes : 0; }
};

template <typename T>
using ByTag = std::unordered_map<uint64_t, std::deque<T>>;

// Takes the first of those with this tag; nothing when there is none.
template <typename T>
std::optional<T> TakeFirst(ByTag<T>& map, uint64_t tag) {
  const auto found = map.find(tag);
  if (found == map.end()) return std::nullopt;
  T first = std::move(found->second.front());
  found->second.pop_front();
  if (found->second.empty()) map.erase(found);
  return first;
}

}  // namespace

class TcpMesh::Impl {
 public:
  Impl(int rank, int size, TcpOptions options)
      : rank_(rank), options_(std::move(options)), links_(static_cast<size_t>(size)) {}
  ~Impl();

  absl::Status Listen();
  absl::Status Connect(KeyValueStore& store);

  void Post(Transfer& transfer);
  absl::Status Wait(Transfer& transfer, absl::Time deadline);
  void Withdraw(Transfer& transfer);
  absl::Status End(absl::Status why);
  absl::Status ended() const {
    MutexLock lock(&mutex_);
    return ended_;
  }
  void Flush();

 private:
  // Everything about one peer. Guarded by mutex_; `writing` marks a thread that is sending without
  // it.
  struct Link {
    int peer = -1;
    std::optional<PeerRecord> record;  // once the peer has published it

    // ---- connection
    std::shared_ptr<Socket> socket;  // null: down
    uint64_t id = 0;                 // of the socket, in epoll
    bool wants_write = false;
    bool writing = false;
    bool ever_up = false, reached = false;  // reached: our own dial was answered in the bootstrap
    uint64_t dialing = 0;                   // id of the dial under way; 0: none
    uint64_t attempts = 0;                  // of ours to dial
    uint64_t attempt_in = 0;                // the newest that the peer dialled with
    absl::Time dial_at = absl::InfinitePast();
    absl::Time heard, sent;  // anything, on this connection
    absl::Time alive;        // the newest proof that the peer's host is reached
    absl::Time down_since;
    int refusals = 0, rejections = 0;
    std::string trouble;        // of the newest dial that failed
    std::string other_address;  // that the peer's dials come from, where it is not its own
    absl::Time dialing_since = absl::InfiniteFuture();  // of the bootstrap
    absl::Status lost;

    // ---- sending
    std::deque<Frame> frames;  // not acknowledged
    size_t next = 0;           // the first that is not written whole to this connection,
    size_t offset = 0;         // and how many of its bytes are
    uint64_t last_number = 0;
    uint64_t acknowledged = 0;      // what the peer has received, as it has told
    std::optional<Header> control;  // being written
    size_t control_offset = 0;
    bool ping_due = false, ask_due = false, bye_due = false;
    ByTag<Transfer*> untaken;  // small ones that are on their way, or wait for their receive
    ByTag<Transfer*> sends;    // large ones whose receive is not ready
    ByTag<uint64_t> ready;     // bytes of receives without a send yet

    // ---- receiving
    std::vector<char> staging;  // read ahead: [staged_begin, staged_end)
    size_t staged_begin = 0, staged_end = 0;
    std::optional<Header> in;  // the frame whose bytes are arriving
    char* in_to = nullptr;
    size_t in_got = 0;
    std::vector<char> in_small;
    uint64_t received = 0, told_received = 0;
    ByTag<Transfer*> receives;
    ByTag<std::vector<char>> early;  // small messages without a receive yet
  };
  // A connection on its way to becoming a link's.
  struct Pending {
    Socket socket;
    bool dialed = false;
    int peer = -1;  // of a dial
    Purpose purpose = Purpose::kLink;
    bool probe = false;  // only whether somebody listens
    bool connected = false;
    bool answering = false;  // `out` is the answer, and the end of this
    std::string out;
    size_t written = 0;
    std::string in;
    size_t wanted = 0;
    absl::Time deadline;
  };

  void Run() ABSL_LOCKS_EXCLUDED(mutex_);
  void Dispatch(uint64_t id, uint32_t events, absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Tick(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void TickLink(Link& link, absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void TickPending(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool Busy() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CloseAll() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Wake() { (void)!write(wake_.fd(), &kOne, sizeof(kOne)); }
  void Watch(int fd, uint64_t id, uint32_t events, int operation);
  void Tell(const std::string& text) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // ---- connections
  void AcceptAll(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void StartDial(Link& link, absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void DialFailed(Link& link, bool refused, bool rejected, const std::string& why, absl::Time now)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // False: it is done with, and erased.
  bool Progress(uint64_t id, Pending& pending, uint32_t events, absl::Time now)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool Answer(Pending& pending) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AttachAccepted(Pending& pending, absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Answered(Pending& pending, absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Attach(Link& link, Socket socket, uint64_t peer_received, absl::Time now)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Disconnect(Link& link, const std::string& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Lose(Link& link, absl::Status why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::string NameOf(const Link& link) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::string Diagnosis(const Link& link) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // ---- frames
  void Enqueue(Link& link, Frame frame) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EnqueueMessage(Link& link, Transfer& transfer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Acknowledged(Link& link, uint64_t received) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Stamp(Link& link, Header& header) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Pump(Link& link) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Read(Link& link) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Parse(Link& link) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // False: the connection is not to be read on.
  bool BeginFrame(Link& link, const Header& header) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FinishFrame(Link& link) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Deliver(Link& link, Transfer& transfer, const std::vector<char>& bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Garbled(Link& link, const std::string& what) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndLocked(absl::Status why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  static constexpr uint64_t kOne = 1;
  static constexpr uint64_t kWakeId = 1, kListenerId = 2;

  const int rank_;
  const TcpOptions options_;
  PeerRecord self_;
  Socket epoll_, wake_, listener_;

  mutable Mutex mutex_;
  std::vector<Link> links_ ABSL_GUARDED_BY(mutex_);
  std::unordered_map<uint64_t, int> link_of_ ABSL_GUARDED_BY(mutex_);  // by id of its socket
  std::map<uint64_t, Pending> pending_ ABSL_GUARDED_BY(mutex_);        // by id
  uint64_t next_id_ ABSL_GUARDED_BY(mutex_) = kListenerId + 1;
  bool bootstrapping_ ABSL_GUARDED_BY(mutex_) = true;
  absl::Status ended_ ABSL_GUARDED_BY(mutex_);
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;  // after it ended: no memory is touched any more
  std::thread thread_;
};

// ---- life ---------------------------------------------------------------------------------------

absl::Status TcpMesh::Impl::Listen() {
  ASSIGN_OR_RETURN(const PortRange ports, PortRange::Parse(options_.ports));
  ASSIGN_OR_RETURN(listener_, parallel::Listen(options_.address, ports, rank_));
  self_.address = options_.address;
  self_.port = SocketAddress::OfLocal(listener_).port();
  self_.label = options_.label;
  ASSIGN_OR_RETURN(self_.token, RandomToken());
  epoll_ = Socket(epoll_create1(EPOLL_CLOEXEC));
  wake_ = Socket(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (epoll_.fd() < 0 || wake_.fd() < 0) {
    return absl::ResourceExhaustedError(absl::StrCat("epoll: ", std::strerror(errno)));
  }
  Watch(wake_.fd(), kWakeId, EPOLLIN, EPOLL_CTL_ADD);
  Watch(listener_.fd(), kListenerId, EPOLLIN, EPOLL_CTL_ADD);
  {
    MutexLock lock(&mutex_);
    for (size_t peer = 0; peer < links_.size(); ++peer) links_[peer].peer = static_cast<int>(peer);
  }
  thread_ = std::thread([this] { Run(); });
  return absl::OkStatus();
}

absl::Status TcpMesh::Impl::Connect(KeyValueStore& store) {
  const absl::Time deadline = absl::Now() + options_.connect_timeout;
  int size = 0;
  {
    MutexLock lock(&mutex_);
    size = static_cast<int>(links_.size());
  }
  const auto key = [](int rank) { return absl::StrCat("comm/world/", rank); };
  const std::string where = absl::StrCat("bootstrap of ", size, " ranks, rank ", rank_);
  RETURN_IF_ERROR(Annotate(store.Put(key(rank_), self_.ToText()), where));
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank_) continue;
    const absl::Duration left = std::max(deadline - absl::Now(), absl::Milliseconds(1));
    const absl::StatusOr<std::string> text = store.Get(key(peer), left);
    if (!text.ok()) {
      return Annotate(text.status(), absl::StrCat(where, ": rank ", peer, " has not come"));
    }
    ASSIGN_OR_RETURN(PeerRecord record, PeerRecord::FromText(*text));
    MutexLock lock(&mutex_);
    // A failure of the network is known before the last rank has come.
    for (const Link& link : links_) {
      if (!link.lost.ok()) return Annotate(link.lost, where);
    }
    links_[static_cast<size_t>(peer)].record = std::move(record);
    Wake();
  }
  MutexLock lock(&mutex_);
  const auto decided = [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    return std::all_of(links_.begin(), links_.end(),
                       [this](const Link& link) {
                         return link.peer == rank_ || (link.ever_up && link.reached);
                       }) ||
           std::any_of(links_.begin(), links_.end(),
                       [](const Link& link) { return !link.lost.ok(); });
  };
  mutex_.AwaitWithDeadline(Condition(&decided), deadline);
  for (const Link& link : links_) {
    if (!link.lost.ok()) return Annotate(link.lost, where);
  }
  for (const Link& link : links_) {
    if (link.peer == rank_ || (link.ever_up && link.reached)) continue;
    const std::string why =
        link.reached ? absl::StrCat("it has not connected to ", self_.address, ":", self_.port,
                                    ", though it is reached from here: a firewall drops what "
                                    "comes from there?")
                     : Diagnosis(link);
    return MarkPeer(absl::DeadlineExceededError(
                        absl::StrCat(where, ": ", NameOf(link), " is not connected after ",
                                     absl::FormatDuration(options_.connect_timeout), ": ", why)),
                    {PeerFailure::Kind::kUnreachable, link.peer});
  }
  bootstrapping_ = false;
  return absl::OkStatus();
}

void TcpMesh::Impl::Flush() {
  MutexLock lock(&mutex_);
  for (Link& link : links_) {
    if (link.frames.empty()) continue;
    link.ask_due = true;
    Pump(link);
  }
  const auto flushed = [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    return !ended_.ok() || std::all_of(links_.begin(), links_.end(), [](const Link& link) {
      return link.frames.empty() || !link.lost.ok();
    });
  };
  mutex_.AwaitWithTimeout(Condition(&flushed), kFlushTimeout);
}

TcpMesh::Impl::~Impl() {
  (void)End(absl::CancelledError("the communicator was destroyed"));
  if (thread_.joinable()) thread_.join();
}

absl::Status TcpMesh::Impl::End(absl::Status why) {
  MutexLock lock(&mutex_);
  EndLocked(std::move(why));
  return ended_;
}

void TcpMesh::Impl::EndLocked(absl::Status why) {
  if (!ended_.ok()) return;
  ended_ = std::move(why);
  Wake();
}

void TcpMesh::Impl::Tell(const std::string& text) {
  if (!options_.on_event) return;
  mutex_.Unlock();
  options_.on_event(text);
  mutex_.Lock();
}

// ---- transfers ----------------------------------------------------------------------------------

void TcpMesh::Impl::Post(Transfer& transfer) {
  CHECK_GT(transfer.bytes_, 0u);
  MutexLock lock(&mutex_);
  if (!ended_.ok()) return;
  Link& link = links_[static_cast<size_t>(transfer.peer_)];
  const bool small = transfer.bytes_ <= kSmallBytesMax;
  if (transfer.sends_) {
    if (small) {
      EnqueueMessage(link, transfer);
    } else if (const auto bytes = TakeFirst(link.ready, transfer.tag_); bytes.has_value()) {
      if (*bytes != transfer.bytes_) return Garbled(link, "expects another size of a message");
      EnqueueMessage(link, transfer);
    } else {
      link.sends[transfer.tag_].push_back(&transfer);
      return;
    }
  } else if (small) {
    if (auto early = TakeFirst(link.early, transfer.tag_); early.has_value()) {
      Deliver(link, transfer, *early);
    } else {
      link.receives[transfer.tag_].push_back(&transfer);
      return;
    }
  } else {
    link.receives[transfer.tag_].push_back(&transfer);
    Enqueue(link, {{.type = FrameType::kReady, .tag = transfer.tag_, .bytes = transfer.bytes_}});
  }
  Pump(link);
}

absl::Status TcpMesh::Impl::Wait(Transfer& transfer, absl::Time deadline) {
  MutexLock lock(&mutex_);
  const Link& link = links_[static_cast<size_t>(transfer.peer_)];
  const auto decided = [this, &transfer, &link]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    return transfer.done_ || !ended_.ok() || !link.lost.ok();
  };
  mutex_.AwaitWithDeadline(Condition(&decided), deadline);
  if (transfer.done_) return absl::OkStatus();
  if (!ended_.ok()) return ended_;
  if (!link.lost.ok()) return link.lost;
  return absl::DeadlineExceededError(absl::StrCat("no message of ", NameOf(link)));
}

void TcpMesh::Impl::Withdraw(Transfer& transfer) {
  MutexLock lock(&mutex_);
  CHECK(transfer.done_ || !ended_.ok()) << "a message is under way";
  const auto idle = [this, &transfer]()
                        ABSL_NO_THREAD_SAFETY_ANALYSIS { return transfer.done_ || closed_; };
  mutex_.Await(Condition(&idle));
}

// ---- the thread ---------------------------------------------------------------------------------

void TcpMesh::Impl::Watch(int fd, uint64_t id, uint32_t events, int operation) {
  epoll_event event = {};
  event.events = events;
  event.data.u64 = id;
  (void)epoll_ctl(epoll_.fd(), operation, fd, &event);
}

bool TcpMesh::Impl::Busy() const {
  return bootstrapping_ || !pending_.empty() ||
         std::any_of(links_.begin(), links_.end(), [this](const Link& link) {
           return link.peer != rank_ && link.lost.ok() && link.socket == nullptr;
         });
}

void TcpMesh::Impl::Run() {
  epoll_event events[64];
  absl::Duration timeout = kBusyTick;
  absl::Time ticked = absl::InfinitePast();
  for (;;) {
    const int count =
        epoll_wait(epoll_.fd(), events, 64, static_cast<int>(absl::ToInt64Milliseconds(timeout)));
    const absl::Time now = absl::Now();
    MutexLock lock(&mutex_);
    for (int i = 0; i < count && ended_.ok(); ++i) {
      Dispatch(events[i].data.u64, events[i].events, now);
    }
    if (!ended_.ok()) {
      CloseAll();
      return;
    }
    if (now - ticked >= kBusyTick) {
      Tick(now);
      ticked = now;
    }
    timeout = Busy() ? kBusyTick : kTick;
  }
}

void TcpMesh::Impl::Dispatch(uint64_t id, uint32_t events, absl::Time now) {
  if (id == kWakeId) {
    uint64_t count = 0;
    (void)!read(wake_.fd(), &count, sizeof(count));
    return;
  }
  if (id == kListenerId) return AcceptAll(now);
  if (const auto found = link_of_.find(id); found != link_of_.end()) {
    Link& link = links_[static_cast<size_t>(found->second)];
    if ((events & EPOLLOUT) != 0) {
      link.wants_write = false;
      Watch(link.socket->fd(), id, EPOLLIN, EPOLL_CTL_MOD);
      Pump(link);
    }
    // Also after an error: what arrived before it is read first.
    if (link.id == id && (events & ~uint32_t{EPOLLOUT}) != 0) Read(link);
    return;
  }
  if (const auto found = pending_.find(id); found != pending_.end()) {
    if (!Progress(id, found->second, events, now)) pending_.erase(id);
  }
}

void TcpMesh::Impl::CloseAll() {
  pending_.clear();
  listener_ = Socket();  // a peer that dials learns at once that nobody is here
  for (Link& link : links_) {
    if (link.socket == nullptr) continue;
    const auto idle = [&link] { return !link.writing; };
    mutex_.Await(Condition(&idle));
    if (link.socket == nullptr) continue;
    // The peer learns without dialling. Between two frames only, and never waiting: a link that is
    // not told sees the connection end.
    if (link.offset == 0 && !link.control.has_value()) {
      Header bye;
      bye.type = FrameType::kBye;
      Stamp(link, bye);
      (void)!send(link.socket->fd(), &bye, sizeof(bye), MSG_NOSIGNAL | MSG_DONTWAIT);
    }
    (void)shutdown(link.socket->fd(), SHUT_WR);
    link.socket = nullptr;
  }
  closed_ = true;
}

void TcpMesh::Impl::Tick(absl::Time now) {
  TickPending(now);
  for (Link& link : links_) {
    if (link.peer != rank_ && link.lost.ok() && link.record.has_value()) TickLink(link, now);
  }
}

void TcpMesh::Impl::TickLink(Link& link, absl::Time now) {
  if (link.socket != nullptr) {
    if (now - link.sent >= kPingEvery) {
      link.ping_due = true;
      Pump(link);
    }
    if (link.socket != nullptr && now - link.heard >= kSuspectAfter) {
      // The kernel of a peer whose process is stopped or slow still acknowledges.
      const absl::Duration silent = std::min(now - link.heard, SinceHeard(*link.socket));
      link.alive = std::max(link.alive, now - silent);
      if (silent >= kSuspectAfter) {
        Disconnect(
            link, absl::StrCat("nothing was heard for ",
                               absl::FormatDuration(absl::Trunc(silent, absl::Milliseconds(100)))));
      }
    }
  }
  const bool wanted = link.socket == nullptr || (bootstrapping_ && !link.reached);
  if (!wanted || !link.lost.ok()) return;
  if (link.ever_up && link.socket == nullptr && now - link.alive >= options_.silence_max) {
    Lose(link, MarkPeer(absl::UnavailableError(absl::StrCat(
                            "the network between the hosts: nothing was heard from ", NameOf(link),
                            " for ", absl::FormatDuration(options_.silence_max), " (", link.trouble,
                            "); this is ", options_.label, ", ", self_.address)),
                        {PeerFailure::Kind::kLost, link.peer}));
    return;
  }
  // In the bootstrap a link from a higher rank is waited for once it is reached.
  if (!link.ever_up && link.reached) return;
  if (link.dialing == 0 && now >= link.dial_at) StartDial(link, now);
}

void TcpMesh::Impl::TickPending(absl::Time now) {
  std::vector<uint64_t> late;
  for (const auto& [id, pending] : pending_) {
    if (now >= pending.deadline) late.push_back(id);
  }
  for (const uint64_t id : late) {
    const auto found = pending_.find(id);
    if (found == pending_.end()) continue;
    const bool dialed = found->second.dialed, connected = found->second.connected;
    const int peer = found->second.peer;
    pending_.erase(found);
    if (!dialed) continue;
    Link& link = links_[static_cast<size_t>(peer)];
    DialFailed(link, false, false,
               !connected     ? "connection attempts time out"
               : link.reached ? "connected, but its process does not answer"
                              : absl::StrCat("connected, but a message of ", kPreflightBytes,
                                             " bytes is not answered"),
               now);
  }
}

// ---- connections --------------------------------------------------------------------------------

std::string TcpMesh::Impl::NameOf(const Link& link) const {
  if (!link.record.has_value()) return absl::StrCat("rank ", link.peer);
  const std::string& address = link.record->address;
  const bool v6 = absl::StrContains(address, ':');
  return absl::StrCat("rank ", link.peer, " (", link.record->label,
                      link.record->label.empty() ? "" : ", ", v6 ? "[" : "", address, v6 ? "]" : "",
                      ":", link.record->port, ")");
}

// What a person would look at first.
std::string TcpMesh::Impl::Diagnosis(const Link& link) const {
  const std::string& trouble = link.trouble;
  const std::string& address = link.record->address;
  std::string cause;
  if (IsLoopback(address) != IsLoopback(self_.address)) {
    cause =
        "a loopback address is reached from its own host alone; give the daemon there "
        "--address or --interface";
  } else if (absl::StrContains(trouble, "time out")) {
    cause = absl::StrCat(
        "a firewall drops them (the ports of --rank-ports must be open between "
        "workers), or ",
        address, " is an interface that this host does not reach (--interface)");
  } else if (absl::StrContains(trouble, "refused")) {
    cause = absl::StrCat("a firewall rejects them, or ", address,
                         " belongs to another machine (NAT, a wrong interface)");
  } else if (absl::StrContains(trouble, "route") || absl::StrContains(trouble, "unreachable")) {
    cause = absl::StrCat(address,
                         " is an interface that this host does not reach: --interface of "
                         "one of the two daemons names the wrong network");
  } else if (absl::StrContains(trouble, "not answered") ||
             absl::StrContains(trouble, "without an answer")) {
    cause = "packets of full size are lost on the way (MTU), or the process there is stopped";
  }
  std::string text = trouble.empty() ? "no attempt to connect has ended" : trouble;
  if (!cause.empty()) absl::StrAppend(&text, ": ", cause);
  if (!link.other_address.empty()) {
    absl::StrAppend(&text, "; its own connections come from ", link.other_address,
                    ": there is NAT between the hosts, through which it cannot be reached");
  }
  return text;
}

void TcpMesh::Impl::AcceptAll(absl::Time now) {
  for (;;) {
    Socket socket = Accept(listener_);
    if (socket.fd() < 0) return;
    const auto strangers = static_cast<size_t>(std::count_if(
        pending_.begin(), pending_.end(), [](const auto& entry) { return !entry.second.dialed; }));
    if (strangers >= kStrangersMax + links_.size()) continue;  // closed
    const uint64_t id = next_id_++;
    Watch(socket.fd(), id, EPOLLIN, EPOLL_CTL_ADD);
    Pending& pending = pending_[id];
    pending.socket = std::move(socket);
    pending.connected = true;
    pending.wanted = sizeof(Hello);
    // Longer than the dialer waits, who then knows that its message was not answered.
    pending.deadline = now + 2 * kHelloTimeout;
  }
}

void TcpMesh::Impl::StartDial(Link& link, absl::Time now) {
  if (link.dialing_since == absl::InfiniteFuture()) link.dialing_since = now;
  link.dial_at = now + kDialAgainAfter;
  const auto to = SocketAddress::Parse(link.record->address, link.record->port);
  absl::StatusOr<Socket> socket = to.ok() ? Dial(options_.address, *to) : to.status();
  if (!socket.ok()) {
    const std::string why(socket.status().message());
    return DialFailed(link, absl::StrContains(why, "refused"), false, why, now);
  }
  const uint64_t id = next_id_++;
  Watch(socket->fd(), id, EPOLLOUT, EPOLL_CTL_ADD);
  Pending& pending = pending_[id];
  pending.socket = *std::move(socket);
  pending.dialed = true;
  pending.peer = link.peer;
  pending.deadline = now + kDialTimeout;
  link.dialing = id;
  const bool dials_links = link.peer < rank_;
  pending.purpose = dials_links ? Purpose::kLink : Purpose::kPreflight;
  // The other one dials the connection; this one only learns whether it can.
  pending.probe = !dials_links && link.reached;
  Hello hello;
  std::memcpy(hello.magic, kHelloMagic, sizeof(hello.magic));
  std::memcpy(hello.token, link.record->token.data(), kTokenBytes);
  hello.from = static_cast<uint32_t>(rank_);
  hello.purpose = pending.purpose;
  hello.attempt = ++link.attempts;
  hello.received = link.received;
  hello.padding = link.reached ? 0 : kPreflightBytes;
  pending.out.assign(reinterpret_cast<const char*>(&hello), sizeof(hello));
  pending.out.append(hello.padding, '\0');
  pending.wanted = sizeof(Reply) + hello.padding;
}

void TcpMesh::Impl::DialFailed(Link& link, bool refused, bool rejected, const std::string& why,
                               absl::Time now) {
  link.dialing = 0;
  link.trouble = why;
  link.dial_at = now + kDialAgainAfter;
  link.refusals = refused ? link.refusals + 1 : 0;
  link.rejections = rejected ? link.rejections + 1 : 0;
  if (!link.lost.ok()) return;
  if (link.reached) {
    // In the meantime it may have come back by the peer's dial.
    if (link.ever_up && link.socket == nullptr && (refused || link.rejections >= kRejectionsMax)) {
      Lose(link, absl::UnavailableError(
                     absl::StrCat(NameOf(link), ": its process has ended (", why, " there)")));
    }
    return;
  }
  if (link.refusals < kRefusalsMax && now - link.dialing_since < options_.preflight_timeout) return;
  Lose(link, MarkPeer(absl::UnavailableError(absl::StrCat(
                          options_.label, options_.label.empty() ? "" : ", ", self_.address,
                          ", does not reach ", NameOf(link), ": ", Diagnosis(link))),
                      {PeerFailure::Kind::kUnreachable, link.peer}));
}

bool TcpMesh::Impl::Progress(uint64_t id, Pending& pending, uint32_t events, absl::Time now) {
  const auto fail = [&](int error, const std::string& why) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    if (pending.dialed) {
      DialFailed(links_[static_cast<size_t>(pending.peer)], error == ECONNREFUSED,
                 pending.connected, why, now);
    }
    return false;
  };
  const int fd = pending.socket.fd();
  if (!pending.connected) {
    if (const int error = ConnectError(pending.socket); error != 0) {
      return fail(error, FailureText(error));
    }
    pending.connected = true;
    Link& link = links_[static_cast<size_t>(pending.peer)];
    link.alive = now;
    pending.deadline =
        now + (link.reached ? kHelloTimeout : std::min(kHelloTimeout, options_.preflight_timeout));
    if (pending.probe) {
      link.dialing = 0;
      link.dial_at = now + kDialTimeout;
      link.rejections = link.refusals = 0;
      link.trouble = "its host answers";
      return false;
    }
  }
  while (pending.written < pending.out.size()) {
    const ssize_t sent = send(fd, pending.out.data() + pending.written,
                              pending.out.size() - pending.written, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno == EAGAIN) {
      Watch(fd, id, EPOLLIN | EPOLLOUT, EPOLL_CTL_MOD);
      return true;
    }
    if (sent < 0) return fail(errno, FailureText(errno));
    pending.written += static_cast<size_t>(sent);
  }
  if (pending.answering) {
    AttachAccepted(pending, now);
    return false;
  }
  Watch(fd, id, EPOLLIN, EPOLL_CTL_MOD);
  while (pending.in.size() < pending.wanted) {
    char buffer[4096];
    const ssize_t got = recv(
        fd, buffer, std::min(sizeof(buffer), pending.wanted - pending.in.size()), MSG_DONTWAIT);
    if (got < 0 && errno == EAGAIN) return true;
    if (got < 0) return fail(errno, FailureText(errno));
    if (got == 0) return fail(0, "the connection was closed without an answer");
    pending.in.append(buffer, static_cast<size_t>(got));
    if (!pending.dialed && pending.in.size() == sizeof(Hello)) {
      Hello hello;
      std::memcpy(&hello, pending.in.data(), sizeof(hello));
      const bool ours = std::memcmp(hello.magic, kHelloMagic, sizeof(hello.magic)) == 0 &&
                        std::memcmp(hello.token, self_.token.data(), kTokenBytes) == 0 &&
                        hello.from < links_.size() && static_cast<int>(hello.from) != rank_ &&
                        hello.padding <= kPreflightBytes;
      if (!ours) return false;  // a stranger
      pending.wanted = sizeof(Hello) + hello.padding;
    }
  }
  if (!pending.dialed) return Answer(pending) && Progress(id, pending, EPOLLOUT, now);
  Answered(pending, now);
  return false;
}

// A peer has said what it wants: makes the answer. False: there is none to give.
bool TcpMesh::Impl::Answer(Pending& pending) {
  Hello hello;
  std::memcpy(&hello, pending.in.data(), sizeof(hello));
  Link& link = links_[hello.from];
  if (const std::string from = SocketAddress::OfPeer(pending.socket).address();
      link.record.has_value() && from != link.record->address) {
    link.other_address = from;
  }
  if (hello.purpose == Purpose::kLink) {
    if (hello.attempt <= link.attempt_in || static_cast<int>(hello.from) < rank_) return false;
    link.attempt_in = hello.attempt;
    // What the old connection has not delivered comes again on this one.
    Disconnect(link, "its peer has made a new connection");
  }
  Reply reply;
  std::memcpy(reply.magic, kHelloMagic, sizeof(reply.magic));
  reply.welcome = link.lost.ok() ? 1 : 0;
  reply.received = link.received;
  pending.out.assign(reinterpret_cast<const char*>(&reply), sizeof(reply));
  pending.out.append(hello.padding, '\0');
  pending.written = 0;
  pending.answering = true;
  return true;
}

void TcpMesh::Impl::AttachAccepted(Pending& pending, absl::Time now) {
  Hello hello;
  std::memcpy(&hello, pending.in.data(), sizeof(hello));
  Link& link = links_[hello.from];
  // A newer dial may have overtaken this one.
  if (hello.purpose != Purpose::kLink || hello.attempt != link.attempt_in || !link.lost.ok())
    return;
  (void)epoll_ctl(epoll_.fd(), EPOLL_CTL_DEL, pending.socket.fd(), nullptr);
  Attach(link, std::move(pending.socket), hello.received, now);
}

// A peer has answered our dial.
void TcpMesh::Impl::Answered(Pending& pending, absl::Time now) {
  Reply reply;
  std::memcpy(&reply, pending.in.data(), sizeof(reply));
  Link& link = links_[static_cast<size_t>(pending.peer)];
  link.dialing = 0;
  link.alive = now;
  link.refusals = link.rejections = 0;
  if (!link.lost.ok()) return;
  if (std::memcmp(reply.magic, kHelloMagic, sizeof(reply.magic)) != 0) {
    return DialFailed(link, false, true, "another service answers there", now);
  }
  if (reply.welcome == 0) {
    return Lose(
        link, absl::UnavailableError(absl::StrCat(NameOf(link), " has given up this connection")));
  }
  link.reached = true;
  if (pending.purpose != Purpose::kLink) return;
  (void)epoll_ctl(epoll_.fd(), EPOLL_CTL_DEL, pending.socket.fd(), nullptr);
  Attach(link, std::move(pending.socket), reply.received, now);
}

void TcpMesh::Impl::Attach(Link& link, Socket socket, uint64_t peer_received, absl::Time now) {
  // A thread that still writes to the old connection reads memory that the new one may free.
  const auto idle = [&link] { return !link.writing; };
  mutex_.Await(Condition(&idle));
  if (!ended_.ok() || link.socket != nullptr) return;
  const uint64_t acknowledged = link.last_number - link.frames.size();
  if (peer_received < acknowledged || peer_received > link.last_number) {
    return Garbled(link, "counts other messages than were sent");
  }
  // Of this connection nothing has been written: all that is kept is sent again.
  link.next = link.frames.size();
  Acknowledged(link, peer_received);
  link.next = link.offset = 0;
  link.control.reset();
  link.control_offset = 0;
  link.staging.resize(kStagingBytes);
  link.staged_begin = link.staged_end = 0;
  link.in.reset();
  link.wants_write = false;
  link.heard = link.sent = link.alive = now;
  link.id = next_id_++;
  link.socket = std::make_shared<Socket>(std::move(socket));
  link_of_[link.id] = link.peer;
  Watch(link.socket->fd(), link.id, EPOLLIN, EPOLL_CTL_ADD);
  const bool again = std::exchange(link.ever_up, true);
  Pump(link);
  if (again) {
    Tell(absl::StrCat(
        "the connection to ", NameOf(link), " is back after ",
        absl::FormatDuration(absl::Trunc(now - link.down_since, absl::Milliseconds(100)))));
  }
}

void TcpMesh::Impl::Disconnect(Link& link, const std::string& why) {
  if (link.socket == nullptr) return;
  (void)epoll_ctl(epoll_.fd(), EPOLL_CTL_DEL, link.socket->fd(), nullptr);
  (void)shutdown(link.socket->fd(), SHUT_RDWR);
  link_of_.erase(link.id);
  link.id = 0;
  link.socket = nullptr;
  link.trouble = why;
  link.down_since = absl::Now();
  link.dial_at = absl::InfinitePast();
  Wake();
}

void TcpMesh::Impl::Lose(Link& link, absl::Status why) {
  if (!link.lost.ok()) return;
  Disconnect(link, std::string(why.message()));
  link.lost = std::move(why);
}

// ---- frames -------------------------------------------------------------------------------------

void TcpMesh::Impl::Enqueue(Link& link, Frame frame) {
  if (!link.lost.ok()) return;
  frame.header.number = ++link.last_number;
  link.frames.push_back(frame);
}

void TcpMesh::Impl::EnqueueMessage(Link& link, Transfer& transfer) {
  const bool small = transfer.bytes_ <= kSmallBytesMax;
  if (small) link.untaken[transfer.tag_].push_back(&transfer);
  Enqueue(link, {{.type = FrameType::kData, .tag = transfer.tag_, .bytes = transfer.bytes_},
                 transfer.data_,
                 small ? nullptr : &transfer});
}

// Frames that are written whole alone: of the one at `next` a thread may still be about to find out
// that its last byte has left, and comes here then.
void TcpMesh::Impl::Acknowledged(Link& link, uint64_t received) {
  link.acknowledged = std::max(link.acknowledged, received);
  while (link.next > 0 && !link.frames.empty() &&
         link.frames.front().header.number <= link.acknowledged) {
    if (Transfer* transfer = link.frames.front().transfer; transfer != nullptr) {
      transfer->done_ = true;
    }
    link.frames.pop_front();
    --link.next;
  }
}

void TcpMesh::Impl::Stamp(Link& link, Header& header) {
  header.received = link.told_received = link.received;
}

// Writes what the connection takes. One thread at a time, in system calls without the mutex.
void TcpMesh::Impl::Pump(Link& link) {
  if (link.writing) return;
  link.writing = true;
  while (link.socket != nullptr && !link.wants_write && ended_.ok()) {
    const std::shared_ptr<Socket> socket = link.socket;
    if (!link.control.has_value() && link.offset == 0 && (link.ping_due || link.ask_due)) {
      Header header;
      header.type = link.ask_due ? FrameType::kAsk : FrameType::kPing;
      Stamp(link, header);
      link.control = header;
      link.control_offset = 0;
      link.ping_due = link.ask_due = false;
    }
    iovec parts[2];
    size_t count = 0;
    if (link.control.has_value()) {
      parts[count++] = {reinterpret_cast<char*>(&*link.control) + link.control_offset,
                        sizeof(Header) - link.control_offset};
    } else if (link.next < link.frames.size()) {
      Frame& frame = link.frames[link.next];
      if (link.offset == 0) Stamp(link, frame.header);
      if (link.offset < sizeof(Header)) {
        parts[count++] = {reinterpret_cast<char*>(&frame.header) + link.offset,
                          sizeof(Header) - link.offset};
      }
      const size_t at = link.offset < sizeof(Header) ? 0 : link.offset - sizeof(Header);
      if (frame.payload_bytes() > at) {
        parts[count++] = {frame.data + at, frame.payload_bytes() - at};
      }
    } else {
      break;
    }
    msghdr message = {};
    message.msg_iov = parts;
    message.msg_iovlen = count;
    mutex_.Unlock();
    const ssize_t sent = sendmsg(socket->fd(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    const int error = errno;
    mutex_.Lock();
    if (socket != link.socket) continue;  // replaced meanwhile: it begins anew
    if (sent < 0) {
      if (error == EINTR) continue;
      if (error != EAGAIN) {
        Disconnect(link, FailureText(error));
        continue;
      }
      link.wants_write = true;
      Watch(socket->fd(), link.id, EPOLLIN | EPOLLOUT, EPOLL_CTL_MOD);
      break;
    }
    link.sent = absl::Now();
    if (link.control.has_value()) {
      link.control_offset += static_cast<size_t>(sent);
      if (link.control_offset == sizeof(Header)) link.control.reset();
      continue;
    }
    link.offset += static_cast<size_t>(sent);
    if (link.offset == sizeof(Header) + link.frames[link.next].payload_bytes()) {
      ++link.next;
      link.offset = 0;
      Acknowledged(link, 0);
    }
  }
  link.writing = false;
}

void TcpMesh::Impl::Read(Link& link) {
  for (size_t budget = kReadBudget; budget > 0;) {
    const std::shared_ptr<Socket> socket = link.socket;
    if (socket == nullptr || !ended_.ok()) return;
    iovec parts[2];
    int count = 0;
    size_t wanted = 0;
    if (link.in.has_value()) {
      wanted = link.in->bytes - link.in_got;
      parts[count++] = {link.in_to + link.in_got, wanted};
    }
    parts[count++] = {link.staging.data() + link.staged_end, kStagingBytes - link.staged_end};
    mutex_.Unlock();
    const ssize_t got = readv(socket->fd(), parts, count);
    const int error = errno;
    mutex_.Lock();
    if (socket != link.socket) return;
    if (got < 0 && (error == EAGAIN || error == EINTR)) break;
    if (got <= 0) {
      return Disconnect(link, got == 0 ? "the connection was closed" : FailureText(error));
    }
    link.heard = link.alive = absl::Now();
    const auto bytes = static_cast<size_t>(got);
    const size_t direct = std::min(bytes, wanted);
    link.in_got += direct;
    link.staged_end += bytes - direct;
    Parse(link);
    budget -= std::min(budget, bytes);
    // Less than was asked for: there is no more.
    if (bytes < wanted + parts[count - 1].iov_len) break;
  }
  Pump(link);
}

void TcpMesh::Impl::Parse(Link& link) {
  for (;;) {
    const size_t staged = link.staged_end - link.staged_begin;
    const char* from = link.staging.data() + link.staged_begin;
    if (link.in.has_value()) {
      const size_t take = std::min<size_t>(staged, link.in->bytes - link.in_got);
      std::memcpy(link.in_to + link.in_got, from, take);
      link.in_got += take;
      link.staged_begin += take;
      if (link.in_got < link.in->bytes) break;
      FinishFrame(link);
      continue;
    }
    if (staged < sizeof(Header)) break;
    Header header;
    std::memcpy(&header, from, sizeof(header));
    link.staged_begin += sizeof(header);
    if (!BeginFrame(link, header)) return;
  }
  // The end of the room must not be reached in the middle of a header.
  const size_t left = link.staged_end - link.staged_begin;
  if (left > 0) std::memmove(link.staging.data(), link.staging.data() + link.staged_begin, left);
  link.staged_begin = 0;
  link.staged_end = left;
}

bool TcpMesh::Impl::BeginFrame(Link& link, const Header& header) {
  const auto garbled = [&](const std::string& what) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    Garbled(link, what);
    return false;
  };
  if (header.magic != kFrameMagic) return garbled("sent what is no frame");
  if (header.received > link.last_number) {
    return garbled("counts other messages than were sent");
  }
  // The thread that sent what the peer has received may not have come back from its system call. It
  // is waited for: what arrives next may go to the memory that it has sent from.
  const auto known = [&link, &header] {
    return link.socket == nullptr || link.next >= link.frames.size() ||
           link.frames[link.next].header.number > header.received;
  };
  mutex_.Await(Condition(&known));
  if (link.socket == nullptr) return false;
  Acknowledged(link, header.received);
  switch (header.type) {
    case FrameType::kPing:
      return true;
    case FrameType::kAsk:
      link.ping_due = true;
      return true;
    case FrameType::kBye:
      Lose(link, absl::UnavailableError(absl::StrCat(NameOf(link), " has ended")));
      return false;
    case FrameType::kReady:
    case FrameType::kTaken:
    case FrameType::kData:
      break;
    default:
      return garbled("sent a frame of an unknown type");
  }
  if (header.number != link.received + 1 || header.bytes == 0) {
    return garbled("sent a message out of turn");
  }
  if (header.type != FrameType::kData) {
    ++link.received;
    if (link.received - link.told_received >= kTellReceivedEvery) link.ping_due = true;
  }
  if (header.type == FrameType::kTaken) {
    const std::optional<Transfer*> send = TakeFirst(link.untaken, header.tag);
    if (!send.has_value()) return garbled("has taken what was not sent");
    (*send)->done_ = true;
    return true;
  }
  if (header.type == FrameType::kReady) {
    const std::optional<Transfer*> send = TakeFirst(link.sends, header.tag);
    if (!send.has_value()) {
      link.ready[header.tag].push_back(header.bytes);
    } else if ((*send)->bytes_ != header.bytes) {
      return garbled("expects another size of a message");
    } else {
      EnqueueMessage(link, **send);
    }
    return true;
  }
  const auto posted = link.receives.find(header.tag);
  const bool small = header.bytes <= kSmallBytesMax;
  if (posted == link.receives.end() && !small) return garbled("sent what nobody was ready for");
  if (posted != link.receives.end() && posted->second.front()->bytes_ != header.bytes) {
    return garbled("sent another size of a message than is expected");
  }
  link.in = header;
  link.in_got = 0;
  if (small) {
    link.in_small.resize(header.bytes);
    link.in_to = link.in_small.data();
  } else {
    link.in_to = posted->second.front()->data_;
  }
  return true;
}

void TcpMesh::Impl::FinishFrame(Link& link) {
  const Header header = *std::exchange(link.in, std::nullopt);
  ++link.received;
  if (header.bytes > kSmallBytesMax) {
    // The sender waits for this to have its memory back.
    (*TakeFirst(link.receives, header.tag))->done_ = true;
    link.ping_due = true;
    return;
  }
  if (link.received - link.told_received >= kTellReceivedEvery) link.ping_due = true;
  if (const auto receive = TakeFirst(link.receives, header.tag); receive.has_value()) {
    Deliver(link, **receive, link.in_small);
  } else {
    link.early[header.tag].push_back(std::move(link.in_small));
    link.in_small = {};
  }
}

void TcpMesh::Impl::Deliver(Link& link, Transfer& transfer, const std::vector<char>& bytes) {
  if (bytes.size() != transfer.bytes_) {
    return Garbled(link, "sent another size of a message than is expected");
  }
  std::memcpy(transfer.data_, bytes.data(), bytes.size());
  transfer.done_ = true;
  Enqueue(link, {{.type = FrameType::kTaken, .tag = transfer.tag_, .bytes = transfer.bytes_}});
}

void TcpMesh::Impl::Garbled(Link& link, const std::string& what) {
  Lose(link, absl::InternalError(absl::StrCat(NameOf(link), " ", what)));
}

// ---- TcpMesh ------------------------------------------------------------------------------------

TcpMesh::TcpMesh(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

absl::StatusOr<std::unique_ptr<TcpMesh>> TcpMesh::Connect(KeyValueStore& store, int rank, int size,
                                                          const TcpOptions& options) {
  auto impl = std::make_unique<Impl>(rank, size, options);
  RETURN_IF_ERROR(impl->Listen());
  RETURN_IF_ERROR(impl->Connect(store));
  return std::unique_ptr<TcpMesh>(new TcpMesh(std::move(impl)));
}

TcpMesh::~TcpMesh() { impl_->Flush(); }

void TcpMesh::Post(Transfer& transfer) { impl_->Post(transfer); }
absl::Status TcpMesh::Wait(Transfer& transfer, absl::Time deadline) {
  return impl_->Wait(transfer, deadline);
}
void TcpMesh::Withdraw(Transfer& transfer) { impl_->Withdraw(transfer); }
absl::Status TcpMesh::End(absl::Status why) { return impl_->End(std::move(why)); }
absl::Status TcpMesh::ended() const { return impl_->ended(); }

}  // namespace muster::parallel
