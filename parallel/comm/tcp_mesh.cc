#include "parallel/comm/tcp_mesh.h"

#include <sys/epoll.h>

#include <algorithm>
#include <deque>
#include <string>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/check.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "parallel/comm/tcp_connector.h"
#include "parallel/comm/tcp_frame.h"
#include "parallel/comm/tcp_link.h"
#include "parallel/comm/tcp_poller.h"

namespace muster::parallel {
namespace {

// For messages that are not acknowledged when the mesh is destroyed.
constexpr absl::Duration kFlushTimeout = absl::Seconds(5);
constexpr absl::Duration kTick = absl::Milliseconds(250);
constexpr absl::Duration kBusyTick = absl::Milliseconds(50);

}  // namespace

// Owns the thread that reads, writes and connects. A thread that posts a transfer writes as well.
class TcpMesh::Impl {
 public:
  Impl(int rank, int size, TcpOptions options)
      : rank_(rank),
        options_(std::move(options)),
        connector_(state_, links_, rank_, size, options_) {
    for (int peer = 0; peer < size; ++peer) links_.emplace_back(state_, peer);
  }
  ~Impl();

  absl::Status Listen();
  absl::Status Connect(KeyValueStore& store);

  void Post(Transfer& transfer);
  absl::Status Wait(Transfer& transfer, absl::Time deadline);
  void Withdraw(Transfer& transfer);
  absl::Status End(absl::Status why);
  absl::Status ended() {
    MutexLock lock(&state_.mutex);
    return state_.ended;
  }
  // Waits a while for what is not acknowledged.
  void Flush();

 private:
  // Gets the records of all peers; the connector dials those that are known meanwhile.
  absl::Status GetRecords(KeyValueStore& store, const std::string& where, absl::Time deadline);
  TcpLink& link(int peer) { return links_[static_cast<size_t>(peer)]; }
  void Run();
  void Dispatch(uint64_t id, uint32_t events, absl::Time now);
  void CloseAll();

  const int rank_;
  const TcpOptions options_;
  TcpMeshState state_;
  std::deque<TcpLink> links_;  // by rank; that of this rank is not used
  TcpConnector connector_;
  Notification closed_;  // after the end: no memory of transfers is touched any more
  std::thread thread_;
};

absl::Status TcpMesh::Impl::Listen() {
  RETURN_IF_ERROR(state_.poller.Open());
  RETURN_IF_ERROR(connector_.Listen());
  thread_ = std::thread([this] { Run(); });
  return absl::OkStatus();
}

absl::Status TcpMesh::Impl::GetRecords(KeyValueStore& store, const std::string& where,
                                       absl::Time deadline) {
  const auto key = [](int rank) { return absl::StrCat("comm/world/", rank); };
  RETURN_IF_ERROR(Annotate(store.Put(key(rank_), connector_.self().ToText()), where));
  for (TcpLink& link : links_) {
    if (link.peer() == rank_) continue;
    const absl::Duration left = std::max(deadline - absl::Now(), absl::Milliseconds(1));
    const absl::StatusOr<std::string> text = store.Get(key(link.peer()), left);
    if (!text.ok()) {
      return Annotate(text.status(), absl::StrCat(where, ": rank ", link.peer(), " has not come"));
    }
    ASSIGN_OR_RETURN(PeerRecord record, PeerRecord::FromText(*text));
    MutexLock lock(&state_.mutex);
    // A failure of the network is known before the last rank has come.
    for (const TcpLink& other : links_) {
      if (!other.lost().ok()) return Annotate(other.lost(), where);
    }
    connector_.SetRecord(link.peer(), std::move(record));
    state_.poller.Wake();
  }
  return absl::OkStatus();
}

absl::Status TcpMesh::Impl::Connect(KeyValueStore& store) {
  const absl::Time deadline = absl::Now() + options_.connect_timeout;
  const std::string where = absl::StrCat("bootstrap of ", links_.size(), " ranks, rank ", rank_);
  RETURN_IF_ERROR(GetRecords(store, where, deadline));
  MutexLock lock(&state_.mutex);
  const auto decided = [this] { return connector_.Decided(); };
  state_.mutex.AwaitWithDeadline(Condition(&decided), deadline);
  RETURN_IF_ERROR(Annotate(connector_.Outcome(), where));
  connector_.EndBootstrap();
  return absl::OkStatus();
}

void TcpMesh::Impl::Flush() {
  MutexLock lock(&state_.mutex);
  for (TcpLink& link : links_) {
    if (!link.acknowledged()) link.AskForAcknowledgement();
  }
  const auto flushed = [this] {
    return !state_.ended.ok() || std::all_of(links_.begin(), links_.end(), [](const TcpLink& link) {
      return link.acknowledged() || !link.lost().ok();
    });
  };
  state_.mutex.AwaitWithTimeout(Condition(&flushed), kFlushTimeout);
}

TcpMesh::Impl::~Impl() {
  (void)End(absl::CancelledError("the communicator was destroyed"));
  if (thread_.joinable()) thread_.join();
}

absl::Status TcpMesh::Impl::End(absl::Status why) {
  MutexLock lock(&state_.mutex);
  if (!state_.ended.ok()) return state_.ended;
  state_.ended = std::move(why);
  for (TcpLink& link : links_) link.GiveUpTransfers();
  state_.poller.Wake();
  return state_.ended;
}

// ---- transfers ----------------------------------------------------------------------------------

void TcpMesh::Impl::Post(Transfer& transfer) {
  CHECK_GT(transfer.bytes_, 0u);
  MutexLock lock(&state_.mutex);
  if (!state_.ended.ok()) return transfer.Decide(/*done=*/false);
  link(transfer.peer_).Post(transfer);
}

absl::Status TcpMesh::Impl::Wait(Transfer& transfer, absl::Time deadline) {
  transfer.decided_.WaitForNotificationWithTimeout(deadline - absl::Now());
  MutexLock lock(&state_.mutex);
  if (transfer.done_) return absl::OkStatus();
  if (!state_.ended.ok()) return state_.ended;
  const TcpLink& link = this->link(transfer.peer_);
  if (!link.lost().ok()) return link.lost();
  return absl::DeadlineExceededError(absl::StrCat("no message of ", link.name()));
}

void TcpMesh::Impl::Withdraw(Transfer& transfer) {
  {
    MutexLock lock(&state_.mutex);
    CHECK(transfer.done_ || !state_.ended.ok()) << "a message is under way";
    if (transfer.done_) return;
  }
  closed_.WaitForNotification();
}

// ---- the thread ---------------------------------------------------------------------------------

void TcpMesh::Impl::Run() {
  absl::Duration timeout = kBusyTick;
  absl::Time ticked = absl::InfinitePast();
  for (;;) {
    const std::vector<epoll_event> events = state_.poller.Wait(timeout);
    const absl::Time now = absl::Now();
    MutexLock lock(&state_.mutex);
    for (const epoll_event& event : events) {
      if (state_.ended.ok()) Dispatch(event.data.u64, event.events, now);
    }
    if (!state_.ended.ok()) return CloseAll();
    if (now - ticked >= kBusyTick) {
      connector_.Tick(now);
      ticked = now;
    }
    timeout = connector_.busy() ? kBusyTick : kTick;
  }
}

void TcpMesh::Impl::Dispatch(uint64_t id, uint32_t events, absl::Time now) {
  if (id == TcpPoller::kWakeId) return state_.poller.Awoken();
  if (id == TcpPoller::kListenerId) return connector_.OnListener(now);
  const uint64_t peer = TcpMeshState::PeerOf(id);
  if (peer == TcpMeshState::kNoPeer) return connector_.OnEvent(id, now);
  // An event of a connection that has been replaced meanwhile is dropped.
  if (links_[peer].id() == id) links_[peer].OnEvent(events);
}

void TcpMesh::Impl::CloseAll() {
  connector_.Close();
  for (TcpLink& link : links_) link.Close();
  closed_.Notify();
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
