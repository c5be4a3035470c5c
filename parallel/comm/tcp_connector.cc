#include "parallel/comm/tcp_connector.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/network.h"
#include "base/status_macros.h"
#include "parallel/comm/peer_failure.h"

namespace muster::parallel {
namespace {

// For one attempt to connect. The next one sends another SYN, so that the first one after a cut of
// the network comes soon.
constexpr absl::Duration kDialTimeout = absl::Seconds(1);
constexpr absl::Duration kDialAgainAfter = absl::Milliseconds(200);
// For the peer's process to answer once its host has accepted.
constexpr absl::Duration kHelloTimeout = absl::Seconds(5);
// In the bootstrap, where a refusal may only mean that the peer's port is being opened.
constexpr int kRefusalsMax = 5;
// Connections in a row that somebody accepted and closed without an answer: not the peer.
constexpr int kRejectionsMax = 10;
// Connections that have not said who they are.
constexpr size_t kUnknownMax = 64;

}  // namespace

TcpConnector::TcpConnector(TcpMeshState& state, std::deque<TcpLink>& links, int rank, int size,
                           const TcpOptions& options)
    : state_(state),
      links_(links),
      rank_(rank),
      options_(options),
      peers_(static_cast<size_t>(size)) {}

absl::Status TcpConnector::Listen() {
  ASSIGN_OR_RETURN(const PortRange ports, PortRange::Parse(options_.ports));
  ASSIGN_OR_RETURN(listener_, parallel::Listen(options_.address, ports, rank_));
  self_.address = options_.address;
  self_.port = SocketAddress::OfLocal(listener_).port();
  self_.label = options_.label;
  ASSIGN_OR_RETURN(self_.token, RandomToken());
  state_.poller.Add(listener_.fd(), TcpPoller::kListenerId, EPOLLIN);
  return absl::OkStatus();
}

// ---- the bootstrap ------------------------------------------------------------------------------

void TcpConnector::SetRecord(int rank, PeerRecord record) {
  link(rank).set_name(record.NameOf(rank));
  peer(rank).record = std::move(record);
}

bool TcpConnector::Connected(int rank) const {
  const auto index = static_cast<size_t>(rank);
  return rank == rank_ || (links_[index].ever_up() && peers_[index].reached);
}

bool TcpConnector::Decided() const {
  const auto connected = [this](const TcpLink& link) { return Connected(link.peer()); };
  const auto lost = [](const TcpLink& link) { return !link.lost().ok(); };
  return std::all_of(links_.begin(), links_.end(), connected) ||
         std::any_of(links_.begin(), links_.end(), lost);
}

absl::Status TcpConnector::Outcome() const {
  for (const TcpLink& link : links_) {
    if (!link.lost().ok()) return link.lost();
  }
  for (const TcpLink& link : links_) {
    if (!Connected(link.peer())) return Unconnected(link.peer());
  }
  return absl::OkStatus();
}

absl::Status TcpConnector::Unconnected(int rank) const {
  const TcpLink& link = links_[static_cast<size_t>(rank)];
  const std::string own = HostPort{self_.address, absl::StrCat(self_.port)}.ToString();
  const std::string why =
      peers_[static_cast<size_t>(rank)].reached
          ? absl::StrCat(
                "it has not connected to ", own,
                ", though it is reached from here: a firewall drops what comes from there?")
          : Diagnosis(link);
  return MarkPeer(absl::DeadlineExceededError(
                      absl::StrCat(link.name(), " is not connected after ",
                                   absl::FormatDuration(options_.connect_timeout), ": ", why)),
                  {PeerFailure::Kind::kUnreachable, rank});
}

std::string TcpConnector::Here() const {
  return absl::StrCat(options_.label, options_.label.empty() ? "" : ", ", self_.address);
}

std::string TcpConnector::Diagnosis(const TcpLink& link) const {
  const Peer& peer = peers_[static_cast<size_t>(link.peer())];
  const std::string& trouble = link.trouble();
  const std::string address = peer.record.has_value() ? peer.record->address : "";
  std::string cause;
  if (IsLoopbackAddress(address) != IsLoopbackAddress(self_.address)) {
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
  if (!peer.other_address.empty()) {
    absl::StrAppend(&text, "; its own connections come from ", peer.other_address,
                    ": there is NAT between the hosts, through which it cannot be reached");
  }
  return text;
}

// ---- the mesh's thread --------------------------------------------------------------------------

void TcpConnector::Tell(const std::string& text) {
  if (!options_.on_event) return;
  state_.mutex.Unlock();
  options_.on_event(text);
  state_.mutex.Lock();
}

bool TcpConnector::busy() const {
  return bootstrapping_ || !pending_.empty() ||
         std::any_of(links_.begin(), links_.end(), [this](const TcpLink& link) {
           return link.peer() != rank_ && link.lost().ok() && !link.up();
         });
}

void TcpConnector::OnListener(absl::Time now) {
  for (;;) {
    Socket socket = Accept(listener_);
    if (socket.fd() < 0) return;
    const auto unknown = static_cast<size_t>(std::count_if(
        pending_.begin(), pending_.end(), [](const auto& entry) { return !entry.second.dialed; }));
    if (unknown >= kUnknownMax + links_.size()) continue;  // closed
    const uint64_t id = state_.NewId(TcpMeshState::kNoPeer);
    state_.poller.Add(socket.fd(), id, EPOLLIN);
    Pending& pending = pending_[id];
    pending.socket = std::move(socket);
    pending.connected = true;
    pending.wanted = sizeof(Hello);
    // Longer than the dialer waits, who then knows that its message was not answered.
    pending.deadline = now + 2 * kHelloTimeout;
  }
}

void TcpConnector::OnEvent(uint64_t id, absl::Time now) {
  const auto found = pending_.find(id);
  if (found != pending_.end() && !Progress(id, found->second, now)) pending_.erase(id);
}

void TcpConnector::Close() {
  pending_.clear();
  listener_ = Socket();
}

void TcpConnector::Tick(absl::Time now) {
  TickPending(now);
  for (TcpLink& link : links_) {
    if (link.peer() == rank_ || !link.lost().ok() || !peer(link.peer()).record.has_value())
      continue;
    link.Tick(now);
    TickPeer(link, now);
  }
}

void TcpConnector::TickPeer(TcpLink& link, absl::Time now) {
  const Peer& peer = this->peer(link.peer());
  const bool wanted = !link.up() || (bootstrapping_ && !peer.reached);
  if (!wanted || !link.lost().ok()) return;
  if (link.ever_up() && !link.up() && now - link.alive() >= options_.silence_max) {
    return link.Lose(
        MarkPeer(absl::UnavailableError(absl::StrCat(
                     "the network between the hosts: nothing was heard from ", link.name(), " for ",
                     absl::FormatDuration(options_.silence_max), " (", link.trouble(),
                     "); this is ", options_.label, ", ", self_.address)),
                 {PeerFailure::Kind::kLost, link.peer()}));
  }
  // In the bootstrap a connection from a higher rank is waited for once that rank is reached.
  if (!link.ever_up() && peer.reached) return;
  // A connection that was given up is replaced at once.
  const bool due = now >= peer.dial_at || link.disconnects() != peer.disconnects_seen;
  if (peer.dialing == 0 && due) StartDial(link, now);
}

void TcpConnector::TickPending(absl::Time now) {
  std::vector<uint64_t> late;
  for (const auto& [id, pending] : pending_) {
    if (now >= pending.deadline) late.push_back(id);
  }
  for (const uint64_t id : late) {
    const auto found = pending_.find(id);
    if (found == pending_.end()) continue;
    const bool dialed = found->second.dialed, connected = found->second.connected;
    const int rank = found->second.peer;
    pending_.erase(found);
    if (!dialed) continue;
    DialFailed(link(rank), DialFailure::kOther,
               !connected           ? "connection attempts time out"
               : peer(rank).reached ? "connected, but its process does not answer"
                                    : absl::StrCat("connected, but a message of ", kPreflightBytes,
                                                   " bytes is not answered"),
               now);
  }
}

// ---- dialling -----------------------------------------------------------------------------------

void TcpConnector::DialNotBefore(TcpLink& link, absl::Time at) {
  Peer& peer = this->peer(link.peer());
  peer.dial_at = at;
  peer.disconnects_seen = link.disconnects();
}

void TcpConnector::StartDial(TcpLink& link, absl::Time now) {
  Peer& peer = this->peer(link.peer());
  if (peer.dialing_since == absl::InfiniteFuture()) peer.dialing_since = now;
  DialNotBefore(link, now + kDialAgainAfter);
  const auto to = SocketAddress::Parse(peer.record->address, peer.record->port);
  absl::StatusOr<Socket> socket = to.ok() ? Dial(options_.address, *to) : to.status();
  if (!socket.ok()) {
    const std::string why(socket.status().message());
    const bool refused = absl::StrContains(why, "refused");
    return DialFailed(link, refused ? DialFailure::kRefused : DialFailure::kOther, why, now);
  }
  const uint64_t id = state_.NewId(TcpMeshState::kNoPeer);
  state_.poller.Add(socket->fd(), id, EPOLLOUT);
  Pending& pending = pending_[id];
  pending.socket = *std::move(socket);
  pending.dialed = true;
  pending.peer = link.peer();
  pending.deadline = now + kDialTimeout;
  peer.dialing = id;
  const bool dials_links = link.peer() < rank_;
  pending.purpose = dials_links ? Purpose::kLink : Purpose::kPreflight;
  pending.probe = !dials_links && peer.reached;
  Hello hello;
  std::memcpy(hello.magic, kHelloMagic, sizeof(hello.magic));
  std::memcpy(hello.token, peer.record->token.data(), kTokenBytes);
  hello.from = static_cast<uint32_t>(rank_);
  hello.purpose = pending.purpose;
  hello.attempt = ++peer.attempts;
  hello.received = link.received();
  hello.padding = peer.reached ? 0 : kPreflightBytes;
  pending.out.assign(reinterpret_cast<const char*>(&hello), sizeof(hello));
  pending.out.append(hello.padding, '\0');
  pending.wanted = sizeof(Reply) + hello.padding;
}

void TcpConnector::DialFailed(TcpLink& link, DialFailure failure, const std::string& why,
                              absl::Time now) {
  Peer& peer = this->peer(link.peer());
  const bool refused = failure == DialFailure::kRefused;
  peer.dialing = 0;
  link.set_trouble(why);
  DialNotBefore(link, now + kDialAgainAfter);
  peer.refusals = refused ? peer.refusals + 1 : 0;
  peer.rejections = failure == DialFailure::kRejected ? peer.rejections + 1 : 0;
  if (!link.lost().ok()) return;
  if (peer.reached) {
    // The peer's own dial may have brought the connection back meanwhile.
    if (link.ever_up() && !link.up() && (refused || peer.rejections >= kRejectionsMax)) {
      link.Lose(absl::UnavailableError(
          absl::StrCat(link.name(), ": its process has ended (", why, " there)")));
    }
    return;
  }
  if (peer.refusals < kRefusalsMax && now - peer.dialing_since < options_.preflight_timeout) return;
  link.Lose(MarkPeer(absl::UnavailableError(absl::StrCat(Here(), ", does not reach ", link.name(),
                                                         ": ", Diagnosis(link))),
                     {PeerFailure::Kind::kUnreachable, link.peer()}));
}

// ---- connections on their way -------------------------------------------------------------------

bool TcpConnector::Progress(uint64_t id, Pending& pending, absl::Time now) {
  if (!pending.connected) {
    if (const int error = ConnectError(pending.socket); error != 0) {
      return Fail(pending, error, FailureText(error), now);
    }
    if (!Connect(pending, now)) return false;
  }
  if (const Step step = Write(id, pending, now); step != Step::kDone) {
    return step == Step::kWaiting;
  }
  if (pending.answering) {
    AttachAccepted(pending, now);
    return false;
  }
  state_.poller.Change(pending.socket.fd(), id, EPOLLIN);
  if (const Step step = Read(pending, now); step != Step::kDone) return step == Step::kWaiting;
  if (!pending.dialed) return Answer(pending) && Progress(id, pending, now);
  Answered(pending, now);
  return false;
}

bool TcpConnector::Fail(const Pending& pending, int error, const std::string& why, absl::Time now) {
  if (!pending.dialed) return false;
  const DialFailure failure = error == ECONNREFUSED ? DialFailure::kRefused
                              : pending.connected   ? DialFailure::kRejected
                                                    : DialFailure::kOther;
  DialFailed(link(pending.peer), failure, why, now);
  return false;
}

bool TcpConnector::Connect(Pending& pending, absl::Time now) {
  pending.connected = true;
  TcpLink& link = this->link(pending.peer);
  Peer& peer = this->peer(pending.peer);
  link.set_alive(now);
  pending.deadline =
      now + (peer.reached ? kHelloTimeout : std::min(kHelloTimeout, options_.preflight_timeout));
  if (!pending.probe) return true;
  peer.dialing = 0;
  // The kernel closes the sockets of a process that was killed one by one: its listener may have
  // outlived the connection by a moment, so that the first answer is checked soon.
  DialNotBefore(link, now + (peer.probes++ == 0 ? kDialAgainAfter : kDialTimeout));
  peer.rejections = peer.refusals = 0;
  link.set_trouble("its host answers");
  return false;
}

TcpConnector::Step TcpConnector::Write(uint64_t id, Pending& pending, absl::Time now) {
  const int fd = pending.socket.fd();
  while (pending.written < pending.out.size()) {
    const ssize_t sent = send(fd, pending.out.data() + pending.written,
                              pending.out.size() - pending.written, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno == EAGAIN) {
      state_.poller.Change(fd, id, EPOLLIN | EPOLLOUT);
      return Step::kWaiting;
    }
    if (sent < 0) {
      const int error = errno;
      Fail(pending, error, FailureText(error), now);
      return Step::kFailed;
    }
    pending.written += static_cast<size_t>(sent);
  }
  return Step::kDone;
}

TcpConnector::Step TcpConnector::Read(Pending& pending, absl::Time now) {
  while (pending.in.size() < pending.wanted) {
    char buffer[4096];
    const ssize_t got =
        recv(pending.socket.fd(), buffer,
             std::min(sizeof(buffer), pending.wanted - pending.in.size()), MSG_DONTWAIT);
    if (got < 0 && errno == EAGAIN) return Step::kWaiting;
    if (got <= 0) {
      const int error = got < 0 ? errno : 0;
      Fail(pending, error,
           got < 0 ? FailureText(error) : "the connection was closed without an answer", now);
      return Step::kFailed;
    }
    pending.in.append(buffer, static_cast<size_t>(got));
    if (!pending.dialed && pending.in.size() == sizeof(Hello)) {
      Hello hello;
      std::memcpy(&hello, pending.in.data(), sizeof(hello));
      if (!IsPeer(hello)) return Step::kFailed;
      pending.wanted = sizeof(Hello) + hello.padding;
    }
  }
  return Step::kDone;
}

bool TcpConnector::IsPeer(const Hello& hello) const {
  return std::memcmp(hello.magic, kHelloMagic, sizeof(hello.magic)) == 0 &&
         std::memcmp(hello.token, self_.token.data(), kTokenBytes) == 0 &&
         hello.from < links_.size() && static_cast<int>(hello.from) != rank_ &&
         hello.padding <= kPreflightBytes;
}

bool TcpConnector::Answer(Pending& pending) {
  Hello hello;
  std::memcpy(&hello, pending.in.data(), sizeof(hello));
  const int from = static_cast<int>(hello.from);
  TcpLink& link = this->link(from);
  Peer& peer = this->peer(from);
  if (const std::string address = SocketAddress::OfPeer(pending.socket).address();
      peer.record.has_value() && address != peer.record->address) {
    peer.other_address = address;
  }
  if (hello.purpose == Purpose::kLink) {
    if (hello.attempt <= peer.attempt_in || from < rank_) return false;
    peer.attempt_in = hello.attempt;
    // What the old connection has not delivered comes again on this one.
    link.Disconnect("its peer has made a new connection");
  }
  Reply reply;
  std::memcpy(reply.magic, kHelloMagic, sizeof(reply.magic));
  reply.welcome = link.lost().ok() ? 1 : 0;
  reply.received = link.received();
  pending.out.assign(reinterpret_cast<const char*>(&reply), sizeof(reply));
  pending.out.append(hello.padding, '\0');
  pending.written = 0;
  pending.answering = true;
  return true;
}

void TcpConnector::AttachAccepted(Pending& pending, absl::Time now) {
  Hello hello;
  std::memcpy(&hello, pending.in.data(), sizeof(hello));
  const int from = static_cast<int>(hello.from);
  // A newer dial may have overtaken this one.
  if (hello.purpose != Purpose::kLink || hello.attempt != peer(from).attempt_in ||
      !link(from).lost().ok()) {
    return;
  }
  Attach(link(from), pending, hello.received, now);
}

void TcpConnector::Answered(Pending& pending, absl::Time now) {
  Reply reply;
  std::memcpy(&reply, pending.in.data(), sizeof(reply));
  TcpLink& link = this->link(pending.peer);
  Peer& peer = this->peer(pending.peer);
  peer.dialing = 0;
  link.set_alive(now);
  peer.refusals = peer.rejections = 0;
  if (!link.lost().ok()) return;
  if (std::memcmp(reply.magic, kHelloMagic, sizeof(reply.magic)) != 0) {
    return DialFailed(link, DialFailure::kRejected, "another service answers there", now);
  }
  if (reply.welcome == 0) {
    return link.Lose(
        absl::UnavailableError(absl::StrCat(link.name(), " has given up this connection")));
  }
  peer.reached = true;
  if (pending.purpose == Purpose::kLink) Attach(link, pending, reply.received, now);
}

void TcpConnector::Attach(TcpLink& link, Pending& pending, uint64_t peer_received, absl::Time now) {
  state_.poller.Remove(pending.socket.fd());
  peer(link.peer()).probes = 0;
  const std::optional<absl::Duration> down =
      link.Attach(std::move(pending.socket), peer_received, now);
  if (!down.has_value()) return;
  Tell(absl::StrCat("the connection to ", link.name(), " is back after ",
                    absl::FormatDuration(absl::Trunc(*down, absl::Milliseconds(100)))));
}

}  // namespace muster::parallel
