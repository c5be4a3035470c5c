#include "parallel/comm/tcp_link.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace muster::parallel {
namespace {

// Messages up to this size are sent at once, and held by the receiver until it asks for them.
constexpr size_t kSmallBytesMax = 16 << 10;
constexpr int kTellReceivedEvery = 32;  // messages
constexpr size_t kStagingBytes = 64 << 10;
// How much is read from one link before the others get their turn.
constexpr size_t kReadBudget = 8 << 20;

// A link without a message says this often that it is there, and what it has received.
constexpr absl::Duration kPingEvery = absl::Seconds(1);
// When the peer's host has given no sign for so long, the connection is replaced.
constexpr absl::Duration kSuspectAfter = absl::Milliseconds(2500);

}  // namespace

// Nothing when there is none with this tag.
template <typename T>
std::optional<T> TcpLink::TakeFirst(ByTag<T>& map, uint64_t tag) {
  const auto found = map.find(tag);
  if (found == map.end()) return std::nullopt;
  T first = std::move(found->second.front());
  found->second.pop_front();
  if (found->second.empty()) map.erase(found);
  return first;
}

TcpLink::TcpLink(TcpMeshState& state, int peer)
    : state_(state), peer_(peer), name_(absl::StrCat("rank ", peer)) {}

// ---- transfers ----------------------------------------------------------------------------------

void TcpLink::Post(TcpTransfer& transfer) {
  const bool small = transfer.bytes_ <= kSmallBytesMax;
  // What has arrived is delivered even if the link is lost.
  if (small && !transfer.sends_) {
    if (const auto early = TakeFirst(early_, transfer.tag_); early.has_value()) {
      Deliver(transfer, *early);
      return Pump();
    }
  }
  if (!lost_.ok()) return transfer.Decide(/*done=*/false);
  if (!transfer.sends_) {
    receives_[transfer.tag_].push_back(&transfer);
    if (small) return;
    Enqueue({{.type = FrameType::kReady, .tag = transfer.tag_, .bytes = transfer.bytes_}});
  } else if (small) {
    EnqueueMessage(transfer);
  } else if (const auto bytes = TakeFirst(ready_, transfer.tag_); !bytes.has_value()) {
    sends_[transfer.tag_].push_back(&transfer);
    return;
  } else if (*bytes != transfer.bytes_) {
    Garbled("expects another size of a message");
    return transfer.Decide(/*done=*/false);
  } else {
    EnqueueMessage(transfer);
  }
  Pump();
}

void TcpLink::GiveUpTransfers() {
  for (ByTag<TcpTransfer*>* const map : {&untaken_, &sends_, &receives_}) {
    for (const auto& [tag, transfers] : *map) {
      for (TcpTransfer* const transfer : transfers) transfer->Decide(/*done=*/false);
    }
  }
  for (const Frame& frame : frames_) {
    if (frame.transfer != nullptr) frame.transfer->Decide(/*done=*/false);
  }
}

void TcpLink::AskForAcknowledgement() {
  ask_due_ = true;
  Pump();
}

void TcpLink::Enqueue(Frame frame) {
  if (!lost_.ok()) return;
  frame.header.number = ++last_number_;
  frames_.push_back(frame);
}

void TcpLink::EnqueueMessage(TcpTransfer& transfer) {
  const bool small = transfer.bytes_ <= kSmallBytesMax;
  if (small) untaken_[transfer.tag_].push_back(&transfer);
  Enqueue({{.type = FrameType::kData, .tag = transfer.tag_, .bytes = transfer.bytes_},
           transfer.data_,
           small ? nullptr : &transfer});
}

// Only frames that are written whole are forgotten. The thread that writes the one at `next_` may
// not have learnt yet that its last byte has left; it calls this again when it has.
void TcpLink::Acknowledge(uint64_t received) {
  acknowledged_ = std::max(acknowledged_, received);
  while (next_ > 0 && !frames_.empty() && frames_.front().header.number <= acknowledged_) {
    if (TcpTransfer* transfer = frames_.front().transfer; transfer != nullptr) {
      transfer->Decide(/*done=*/true);
    }
    frames_.pop_front();
    --next_;
  }
}

// ---- the connection -----------------------------------------------------------------------------

std::optional<absl::Duration> TcpLink::Attach(Socket socket, uint64_t peer_received,
                                              absl::Time now) {
  // A thread that still writes to the old connection reads memory that the new one may free.
  const auto idle = [this] { return !writing_; };
  state_.mutex.Await(Condition(&idle));
  if (!state_.ended.ok() || socket_ != nullptr) return std::nullopt;
  const uint64_t acknowledged = last_number_ - frames_.size();
  if (peer_received < acknowledged || peer_received > last_number_) {
    Garbled("counts other messages than were sent");
    return std::nullopt;
  }
  // Whatever the old connection has carried counts as written, so that it can be acknowledged; then
  // nothing has been written to the new one, and all that is kept is sent again.
  next_ = frames_.size();
  Acknowledge(peer_received);
  next_ = offset_ = 0;
  control_.reset();
  control_offset_ = 0;
  staging_.resize(kStagingBytes);
  staged_begin_ = staged_end_ = 0;
  in_.reset();
  wants_write_ = false;
  heard_ = sent_ = alive_ = now;
  id_ = state_.NewId(static_cast<uint64_t>(peer_));
  socket_ = std::make_shared<Socket>(std::move(socket));
  state_.poller.Add(socket_->fd(), id_, EPOLLIN);
  std::optional<absl::Duration> down;
  if (std::exchange(ever_up_, true)) down = now - down_since_;
  Pump();
  return down;
}

void TcpLink::Disconnect(const std::string& why) {
  if (socket_ == nullptr) return;
  state_.poller.Remove(socket_->fd());
  (void)shutdown(socket_->fd(), SHUT_RDWR);
  id_ = 0;
  socket_ = nullptr;
  trouble_ = why;
  down_since_ = absl::Now();
  ++disconnects_;
  state_.poller.Wake();
}

void TcpLink::Lose(absl::Status why) {
  if (!lost_.ok()) return;
  Disconnect(std::string(why.message()));
  lost_ = std::move(why);
  GiveUpTransfers();
}

bool TcpLink::Garbled(const std::string& what) {
  Lose(absl::InternalError(absl::StrCat(name_, " ", what)));
  return false;
}

void TcpLink::Close() {
  const auto idle = [this] { return !writing_; };
  state_.mutex.Await(Condition(&idle));
  if (socket_ == nullptr) return;
  // The peer learns of the end without dialling. Only between two frames, and without waiting: a
  // peer that is not told sees the connection end.
  if (offset_ == 0 && !control_.has_value()) {
    Header bye;
    bye.type = FrameType::kBye;
    Stamp(bye);
    (void)!send(socket_->fd(), &bye, sizeof(bye), MSG_NOSIGNAL | MSG_DONTWAIT);
  }
  (void)shutdown(socket_->fd(), SHUT_WR);
  socket_ = nullptr;
}

void TcpLink::OnEvent(uint32_t events) {
  const uint64_t id = id_;
  if ((events & EPOLLOUT) != 0) {
    wants_write_ = false;
    state_.poller.Change(socket_->fd(), id, EPOLLIN);
    Pump();
  }
  // Also after an error: what arrived before it is read first.
  if (id_ == id && (events & ~uint32_t{EPOLLOUT}) != 0) Read();
}

void TcpLink::Tick(absl::Time now) {
  if (socket_ != nullptr && now - sent_ >= kPingEvery) {
    ping_due_ = true;
    Pump();
  }
  if (socket_ == nullptr || now - heard_ < kSuspectAfter) return;
  // The kernel of a peer whose process is stopped or slow still acknowledges.
  const absl::Duration silent = std::min(now - heard_, SinceHeard(*socket_));
  alive_ = std::max(alive_, now - silent);
  if (silent < kSuspectAfter) return;
  Disconnect(absl::StrCat("nothing was heard for ",
                          absl::FormatDuration(absl::Trunc(silent, absl::Milliseconds(100)))));
}

// ---- writing ------------------------------------------------------------------------------------

void TcpLink::Stamp(Header& header) { header.received = told_received_ = received_; }

void TcpLink::Pump() {
  if (writing_) return;
  writing_ = true;
  while (socket_ != nullptr && !wants_write_ && state_.ended.ok()) {
    const std::shared_ptr<Socket> socket = socket_;
    if (!control_.has_value() && offset_ == 0 && (ping_due_ || ask_due_)) {
      Header header;
      header.type = ask_due_ ? FrameType::kAsk : FrameType::kPing;
      Stamp(header);
      control_ = header;
      control_offset_ = 0;
      ping_due_ = ask_due_ = false;
    }
    iovec parts[2];
    size_t count = 0;
    if (control_.has_value()) {
      parts[count++] = {reinterpret_cast<char*>(&*control_) + control_offset_,
                        sizeof(Header) - control_offset_};
    } else if (next_ < frames_.size()) {
      Frame& frame = frames_[next_];
      if (offset_ == 0) Stamp(frame.header);
      if (offset_ < sizeof(Header)) {
        parts[count++] = {reinterpret_cast<char*>(&frame.header) + offset_,
                          sizeof(Header) - offset_};
      }
      const size_t at = offset_ < sizeof(Header) ? 0 : offset_ - sizeof(Header);
      if (frame.payload_bytes() > at) {
        parts[count++] = {frame.data + at, frame.payload_bytes() - at};
      }
    } else {
      break;
    }
    msghdr message = {};
    message.msg_iov = parts;
    message.msg_iovlen = count;
    state_.mutex.Unlock();
    const ssize_t sent = sendmsg(socket->fd(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    const int error = errno;
    state_.mutex.Lock();
    if (socket != socket_) continue;  // replaced meanwhile: the new connection begins anew
    if (sent < 0) {
      if (error == EINTR) continue;
      if (error != EAGAIN) {
        Disconnect(FailureText(error));
        continue;
      }
      wants_write_ = true;
      state_.poller.Change(socket->fd(), id_, EPOLLIN | EPOLLOUT);
      break;
    }
    sent_ = absl::Now();
    if (control_.has_value()) {
      control_offset_ += static_cast<size_t>(sent);
      if (control_offset_ == sizeof(Header)) control_.reset();
      continue;
    }
    offset_ += static_cast<size_t>(sent);
    if (offset_ == sizeof(Header) + frames_[next_].payload_bytes()) {
      ++next_;
      offset_ = 0;
      Acknowledge(0);
    }
  }
  writing_ = false;
}

// ---- reading ------------------------------------------------------------------------------------

void TcpLink::Read() {
  for (size_t budget = kReadBudget; budget > 0;) {
    const std::shared_ptr<Socket> socket = socket_;
    if (socket == nullptr || !state_.ended.ok()) return;
    iovec parts[2];
    int count = 0;
    size_t wanted = 0;
    if (in_.has_value()) {
      wanted = in_->bytes - in_got_;
      parts[count++] = {in_to_ + in_got_, wanted};
    }
    parts[count++] = {staging_.data() + staged_end_, kStagingBytes - staged_end_};
    state_.mutex.Unlock();
    const ssize_t got = readv(socket->fd(), parts, count);
    const int error = errno;
    state_.mutex.Lock();
    if (socket != socket_) return;
    if (got < 0 && (error == EAGAIN || error == EINTR)) break;
    if (got <= 0) {
      return Disconnect(got == 0 ? "the connection was closed" : FailureText(error));
    }
    heard_ = alive_ = absl::Now();
    const auto bytes = static_cast<size_t>(got);
    const size_t direct = std::min(bytes, wanted);
    in_got_ += direct;
    staged_end_ += bytes - direct;
    Parse();
    budget -= std::min(budget, bytes);
    // Less than was asked for: there is no more.
    if (bytes < wanted + parts[count - 1].iov_len) break;
  }
  Pump();
}

void TcpLink::Parse() {
  for (;;) {
    const size_t staged = staged_end_ - staged_begin_;
    const char* from = staging_.data() + staged_begin_;
    if (in_.has_value()) {
      const size_t take = std::min<size_t>(staged, in_->bytes - in_got_);
      std::memcpy(in_to_ + in_got_, from, take);
      in_got_ += take;
      staged_begin_ += take;
      if (in_got_ < in_->bytes) break;
      FinishFrame();
      continue;
    }
    if (staged < sizeof(Header)) break;
    Header header;
    std::memcpy(&header, from, sizeof(header));
    staged_begin_ += sizeof(header);
    if (!BeginFrame(header)) return;
  }
  // The rest moves to the front, so that the buffer never ends in the middle of a header.
  const size_t left = staged_end_ - staged_begin_;
  if (left > 0) std::memmove(staging_.data(), staging_.data() + staged_begin_, left);
  staged_begin_ = 0;
  staged_end_ = left;
}

bool TcpLink::BeginFrame(const Header& header) {
  if (header.magic != kFrameMagic) return Garbled("sent what is no frame");
  if (header.received > last_number_) return Garbled("counts other messages than were sent");
  // The thread that has sent what the peer acknowledges may not have returned from its system call.
  // It is waited for: what arrives next may go to the memory that it has sent from.
  const auto written = [this, &header] {
    return socket_ == nullptr || next_ >= frames_.size() ||
           frames_[next_].header.number > header.received;
  };
  state_.mutex.Await(Condition(&written));
  if (socket_ == nullptr) return false;
  Acknowledge(header.received);
  switch (header.type) {
    case FrameType::kPing:
      return true;
    case FrameType::kAsk:
      ping_due_ = true;
      return true;
    case FrameType::kBye:
      Lose(absl::UnavailableError(absl::StrCat(name_, " has ended")));
      return false;
    case FrameType::kReady:
    case FrameType::kTaken:
    case FrameType::kData:
      break;
    default:
      return Garbled("sent a frame of an unknown type");
  }
  if (header.number != received_ + 1 || header.bytes == 0) {
    return Garbled("sent a message out of turn");
  }
  if (header.type == FrameType::kData) return BeginMessage(header);
  ++received_;
  if (received_ - told_received_ >= kTellReceivedEvery) ping_due_ = true;
  if (header.type == FrameType::kTaken) {
    const std::optional<TcpTransfer*> send = TakeFirst(untaken_, header.tag);
    if (!send.has_value()) return Garbled("has taken what was not sent");
    (*send)->Decide(/*done=*/true);
    return true;
  }
  const std::optional<TcpTransfer*> send = TakeFirst(sends_, header.tag);
  if (!send.has_value()) {
    ready_[header.tag].push_back(header.bytes);
  } else if ((*send)->bytes_ != header.bytes) {
    (*send)->Decide(/*done=*/false);
    return Garbled("expects another size of a message");
  } else {
    EnqueueMessage(**send);
  }
  return true;
}

bool TcpLink::BeginMessage(const Header& header) {
  const auto posted = receives_.find(header.tag);
  const bool small = header.bytes <= kSmallBytesMax;
  if (posted == receives_.end() && !small) return Garbled("sent what nobody was ready for");
  if (posted != receives_.end() && posted->second.front()->bytes_ != header.bytes) {
    return Garbled("sent another size of a message than is expected");
  }
  in_ = header;
  in_got_ = 0;
  if (small) {
    in_small_.resize(header.bytes);
    in_to_ = in_small_.data();
  } else {
    in_to_ = posted->second.front()->data_;
  }
  return true;
}

void TcpLink::FinishFrame() {
  const Header header = *std::exchange(in_, std::nullopt);
  ++received_;
  if (header.bytes > kSmallBytesMax) {
    // The sender waits for the acknowledgement to have its memory back.
    (*TakeFirst(receives_, header.tag))->Decide(/*done=*/true);
    ping_due_ = true;
    return;
  }
  if (received_ - told_received_ >= kTellReceivedEvery) ping_due_ = true;
  if (const auto receive = TakeFirst(receives_, header.tag); receive.has_value()) {
    Deliver(**receive, in_small_);
  } else {
    early_[header.tag].push_back(std::move(in_small_));
    in_small_ = {};
  }
}

void TcpLink::Deliver(TcpTransfer& transfer, const std::vector<char>& bytes) {
  if (bytes.size() != transfer.bytes_) {
    Garbled("sent another size of a message than is expected");
    return transfer.Decide(/*done=*/false);
  }
  std::memcpy(transfer.data_, bytes.data(), bytes.size());
  Enqueue({{.type = FrameType::kTaken, .tag = transfer.tag_, .bytes = transfer.bytes_}});
  transfer.Decide(/*done=*/true);
}

}  // namespace muster::parallel
