// Ranks as processes on any hosts. The mesh (tcp_mesh.h) gives tagged messages between every two of
// them; the collectives are made of them here.
//
// All-reduce: every rank sends part j of its data to rank j, which adds them as a tree over the
// ranks and sends the sum to everyone; in segments, so that adding overlaps with the wire. Messages
// are received in place; only the parts to be added need scratch.
//
// A tag names (group, call, step), so calls on different streams and groups share the connections
// without receiving each other's messages. It holds a hash of the call's kind and size, too: ranks
// that make different calls each run into the timeout, whose error says so. Groups made by Split
// end together: an error or Abort in one ends them all and closes the connections, which is how the
// peers notice within milliseconds.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/check.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "parallel/comm/arguments.h"
#include "parallel/comm/collective_plan.h"
#include "parallel/comm/communicator.h"
#include "parallel/comm/tcp_mesh.h"
#include "parallel/comm/transfer_queue.h"

namespace muster::parallel {
namespace {

using kernels::Stream;
using kernels::Tensor;

constexpr int64_t kSegmentBytes = int64_t{1} << 20;
// Steps of one call: segments of two rounds fit.
constexpr int kStepBits = 16;
constexpr int kGroupsMax = (1 << 15) - 1;
constexpr int64_t kSegmentsMax = int64_t{1} << (kStepBits - 1);

// The connections of this rank; shared by every group that came from one MakeTcpCommunicator.
class Connections {
 public:
  Connections(std::unique_ptr<TcpMesh> mesh, absl::Duration timeout)
      : mesh_(std::move(mesh)), timeout_(timeout) {}

  // Null for a single rank.
  TcpMesh* mesh() { return mesh_.get(); }
  absl::Duration timeout() const { return timeout_; }
  absl::Status ended() const {
    if (mesh_ != nullptr) return mesh_->ended();
    MutexLock lock(&mutex_);
    return ended_;
  }
  // The first reason stays; returns it.
  absl::Status End(absl::Status why) {
    if (mesh_ != nullptr) return mesh_->End(std::move(why));
    MutexLock lock(&mutex_);
    if (ended_.ok()) ended_ = std::move(why);
    return ended_;
  }

  // Group numbers only need to differ between groups that share a connection.
  int next_group() {
    MutexLock lock(&mutex_);
    return next_group_;
  }
  void set_next_group(int next) {
    MutexLock lock(&mutex_);
    next_group_ = std::max(next_group_, next);
  }

 private:
  const std::unique_ptr<TcpMesh> mesh_;
  const absl::Duration timeout_;
  mutable Mutex mutex_;
  absl::Status ended_ ABSL_GUARDED_BY(mutex_);  // of a single rank
  int next_group_ ABSL_GUARDED_BY(mutex_) = 1;
};

// Memory for parts to be added, kept from call to call so that no step allocates.
class Scratch {
 public:
  using Memory = std::vector<char>;
  // At least `bytes`.
  Memory Take(int64_t bytes) {
    Memory memory;
    {
      MutexLock lock(&mutex_);
      memory.swap(idle_);
    }
    if (static_cast<int64_t>(memory.size()) < bytes) memory.resize(static_cast<size_t>(bytes));
    return memory;
  }
  void Return(Memory memory) {
    MutexLock lock(&mutex_);
    if (memory.size() > idle_.size()) idle_.swap(memory);
  }

 private:
  Mutex mutex_;
  Memory idle_ ABSL_GUARDED_BY(mutex_);
};

// One rank's side of a group; shared by the communicator and the work it has enqueued.
struct Member {
  std::shared_ptr<Connections> connections;
  std::string name;
  std::vector<int> members;  // by rank in the group: rank in the connections
  int rank = 0;
  int group = 0;
  std::atomic<int64_t> bytes_sent{0};
  Scratch scratch;

  int size() const { return static_cast<int>(members.size()); }
  int Peer(int r) const { return members[static_cast<size_t>(r)]; }
};

// The messages of one call. Everything posted is waited for or given up by the destructor's end.
class Exchange {
 public:
  // Requires: a group of several ranks.
  Exchange(Member& member, std::string what, uint64_t tag)
      : member_(member),
        mesh_(*member.connections->mesh()),
        what_(std::move(what)),
        tag_(tag),
        deadline_(absl::Now() + member.connections->timeout()) {}
  ~Exchange() {
    // After an error the mesh has ended, and lets go of our memory without a wait for peers.
    for (TcpMesh::Transfer& transfer : transfers_) mesh_.Withdraw(transfer);
    member_.scratch.Return(std::move(scratch_));
  }
  // Once per call: memory that lives as long as the messages may be written to.
  char* TakeScratch(int64_t bytes) {
    scratch_ = member_.scratch.Take(bytes);
    return scratch_.data();
  }

  // Post a message of step `step`; nothing for no bytes. After an error later calls do nothing, and
  // the waits return it.
  void Send(int to, int64_t step, const void* data, int64_t bytes) {
    member_.bytes_sent.fetch_add(bytes, std::memory_order_relaxed);
    Post(to, step, const_cast<void*>(data), bytes, /*sends=*/true);
  }
  // Returns an index for Wait.
  size_t Receive(int from, int64_t step, void* data, int64_t bytes) {
    Post(from, step, data, bytes, /*sends=*/false);
    return transfers_.empty() ? 0 : transfers_.size() - 1;
  }
  absl::Status Wait(size_t index) {
    if (status_.ok() && index < transfers_.size()) Finish(index);
    return status_;
  }
  absl::Status WaitAll() {
    for (size_t i = 0; i < transfers_.size() && status_.ok(); ++i) Finish(i);
    return status_;
  }

 private:
  void Post(int peer, int64_t step, void* data, int64_t bytes, bool sends) {
    if (!status_.ok() || bytes == 0) return;
    peers_.push_back(peer);
    mesh_.Post(transfers_.emplace_back(member_.Peer(peer), sends,
                                       tag_ | static_cast<uint64_t>(step), data,
                                       static_cast<size_t>(bytes)));
  }

  void Finish(size_t index) {
    absl::Status status = mesh_.Wait(transfers_[index], deadline_);
    if (status.ok()) return;
    if (const absl::Status ended = mesh_.ended(); !ended.ok()) {
      status_ = ended;
      return;
    }
    const int peer = peers_[index];
    const std::string where = absl::StrCat(what_, " of group ", member_.name, ", rank ",
                                           member_.rank, " of ", member_.size());
    if (absl::IsDeadlineExceeded(status)) {
      status = absl::DeadlineExceededError(
          absl::StrCat(where, ": waited ", absl::FormatDuration(member_.connections->timeout()),
                       " for rank ", peer, ", which has not made this call (another one?)"));
    } else {
      status = Annotate(status, absl::StrCat(where, ": lost the connection to rank ", peer));
    }
    status_ = mesh_.End(std::move(status));
  }

  Member& member_;
  TcpMesh& mesh_;
  const std::string what_;
  const uint64_t tag_;
  const absl::Time deadline_;
  Scratch::Memory scratch_;
  std::deque<TcpMesh::Transfer> transfers_;
  std::vector<int> peers_;  // of the transfers, by their rank in the group
  absl::Status status_;
};

char* At(const Tensor& tensor, int64_t element) {
  return static_cast<char*>(tensor.data()) + element * SizeOf(tensor.dtype());
}

// The reduction of `part` of `data`, whose steps count from 0; afterwards `data` holds it there.
// `ready` is called with each finished range.
template <typename Parts, typename Ready>
absl::Status ReduceParts(Member& member, Exchange& exchange, Tensor data, ReduceOp op, Parts parts,
                         int64_t segment, Ready ready) {
  const int64_t width = SizeOf(data.dtype());
  const PartRange own = parts(member.rank);
  const int peers = member.size() - 1;
  // Segment by segment, one row per peer in each, so that the rows of a segment are contiguous.
  char* scratch = exchange.TakeScratch(own.count() * peers * width);
  std::vector<size_t> received;
  for (int64_t begin = 0, step = 0; begin < own.count(); begin += segment, ++step) {
    const int64_t count = std::min(segment, own.count() - begin);
    char* row = scratch + begin * peers * width;
    for (int rank = 0; rank < member.size(); ++rank) {
      if (rank == member.rank) continue;
      received.push_back(exchange.Receive(rank, step, row, count * width));
      row += count * width;
    }
  }
  // Each rank starts with another peer, so that not all of them send to rank 0 first.
  for (int hop = 1; hop < member.size(); ++hop) {
    const int rank = (member.rank + hop) % member.size();
    const PartRange part = parts(rank);
    for (int64_t begin = 0, step = 0; begin < part.count(); begin += segment, ++step) {
      const int64_t count = std::min(segment, part.count() - begin);
      exchange.Send(rank, step, At(data, part.begin + begin), count * width);
    }
  }
  size_t next = 0;
  for (int64_t begin = 0; begin < own.count(); begin += segment) {
    const int64_t count = std::min(segment, own.count() - begin);
    const char* row = scratch + begin * peers * width;
    std::vector<const void*> inputs;
    for (int rank = 0; rank < member.size(); ++rank) {
      if (rank == member.rank) {
        inputs.push_back(At(data, own.begin + begin));
        continue;
      }
      RETURN_IF_ERROR(exchange.Wait(received[next++]));
      inputs.push_back(row);
      row += count * width;
    }
    ReduceAsTree(inputs, data.dtype(), op, count, At(data, own.begin + begin));
    ready(own.begin + begin, count);
  }
  return absl::OkStatus();
}

// Elements per segment, so that the largest part has few enough of them.
int64_t SegmentOf(int64_t part_elements, int64_t width) {
  return std::max(kSegmentBytes / width, (part_elements + kSegmentsMax - 1) / kSegmentsMax);
}

absl::Status AllReduceInTwoRounds(Member& member, Exchange& exchange, Tensor data, ReduceOp op) {
  const int64_t width = SizeOf(data.dtype());
  auto parts = [&](int rank) { return PartOf(data.elements(), member.size(), rank); };
  const int64_t segment = SegmentOf(parts(0).count(), width);
  // The sums of the others may be received over what they are still to be sent: a segment comes
  // back only after its owner has all of it.
  for (int rank = 0; rank < member.size(); ++rank) {
    if (rank == member.rank) continue;
    const PartRange part = parts(rank);
    for (int64_t begin = 0, step = kSegmentsMax; begin < part.count(); begin += segment, ++step) {
      const int64_t count = std::min(segment, part.count() - begin);
      exchange.Receive(rank, step, At(data, part.begin + begin), count * width);
    }
  }
  const int64_t own_begin = parts(member.rank).begin;
  RETURN_IF_ERROR(
      ReduceParts(member, exchange, data, op, parts, segment, [&](int64_t begin, int64_t count) {
        const int64_t step = kSegmentsMax + (begin - own_begin) / segment;
        for (int hop = 1; hop < member.size(); ++hop) {
          exchange.Send((member.rank + hop) % member.size(), step, At(data, begin), count * width);
        }
      }));
  return exchange.WaitAll();
}

absl::Status AllReduceInOneRound(Member& member, Exchange& exchange, Tensor data, ReduceOp op) {
  if (data.elements() == 0) return absl::OkStatus();
  // Row r is rank r's data; our own is copied, since the result is written over `data`.
  char* table = exchange.TakeScratch(data.bytes() * member.size());
  char* own = table + member.rank * data.bytes();
  std::memcpy(own, data.data(), static_cast<size_t>(data.bytes()));
  std::vector<const void*> inputs;
  for (int rank = 0; rank < member.size(); ++rank) {
    char* row = table + rank * data.bytes();
    inputs.push_back(row);
    if (rank == member.rank) continue;
    exchange.Receive(rank, 0, row, data.bytes());
    exchange.Send(rank, 0, own, data.bytes());
  }
  RETURN_IF_ERROR(exchange.WaitAll());
  ReduceAsTree(inputs, data.dtype(), op, data.elements(), data.data());
  return absl::OkStatus();
}

absl::Status BroadcastFrom(Member& member, Exchange& exchange, Tensor data, int root) {
  const int64_t width = SizeOf(data.dtype());
  if (!BroadcastsInParts(data.bytes(), member.size())) {
    if (member.rank != root) {
      exchange.Receive(root, 0, data.data(), data.bytes());
      return exchange.WaitAll();
    }
    for (int rank = 0; rank < member.size(); ++rank) {
      if (rank != root) exchange.Send(rank, 0, data.data(), data.bytes());
    }
    return exchange.WaitAll();
  }
  // Step 0: the root gives rank j part j. Step 1: every rank gives its part to all but the root.
  auto part_of = [&](int rank) { return PartOf(data.elements(), member.size(), rank); };
  const PartRange own = part_of(member.rank);
  size_t first = 0;
  if (member.rank != root) {
    first = exchange.Receive(root, 0, At(data, own.begin), own.count() * width);
    for (int rank = 0; rank < member.size(); ++rank) {
      if (rank == member.rank) continue;
      exchange.Receive(rank, 1, At(data, part_of(rank).begin), part_of(rank).count() * width);
    }
    if (own.count() > 0) RETURN_IF_ERROR(exchange.Wait(first));
  }
  for (int rank = 0; rank < member.size(); ++rank) {
    if (rank == member.rank || rank == root) continue;
    if (member.rank == root) {
      exchange.Send(rank, 0, At(data, part_of(rank).begin), part_of(rank).count() * width);
    }
    exchange.Send(rank, 1, At(data, own.begin), own.count() * width);
  }
  return exchange.WaitAll();
}

class TcpCommunicator : public Communicator {
 public:
  explicit TcpCommunicator(std::shared_ptr<Member> member) : member_(std::move(member)) {}

  int rank() const override { return member_->rank; }
  int size() const override { return member_->size(); }
  const std::string& name() const override { return member_->name; }
  int64_t bytes_sent() const override { return member_->bytes_sent; }

  void AllReduce(Stream& stream, Tensor data, ReduceOp op) override {
    CHECK(data.contiguous());
    Enqueue(stream, absl::StrCat("all-reduce of ", data.ToString()),
            [data, op](Member& member, Exchange& exchange) {
              return data.bytes() <= kOneRoundBytesMax
                         ? AllReduceInOneRound(member, exchange, data, op)
                         : AllReduceInTwoRounds(member, exchange, data, op);
            });
  }
  void ReduceScatter(Stream& stream, Tensor data, ReduceOp op) override {
    const int64_t part = EqualPart(data, size());
    Enqueue(stream, absl::StrCat("reduce-scatter of ", data.ToString()),
            [data, op, part](Member& member, Exchange& exchange) {
              auto parts = [&](int rank) { return PartRange{part * rank, part * (rank + 1)}; };
              RETURN_IF_ERROR(ReduceParts(member, exchange, data, op, parts,
                                          SegmentOf(part, SizeOf(data.dtype())),
                                          [](int64_t, int64_t) {}));
              return exchange.WaitAll();
            });
  }
  void AllGather(Stream& stream, Tensor data) override {
    const int64_t part = EqualPart(data, size());
    Enqueue(stream, absl::StrCat("all-gather of ", data.ToString()),
            [data, part](Member& member, Exchange& exchange) {
              const int64_t bytes = part * SizeOf(data.dtype());
              for (int hop = 1; hop < member.size(); ++hop) {
                const int from = (member.rank + member.size() - hop) % member.size();
                exchange.Receive(from, 0, At(data, part * from), bytes);
              }
              for (int hop = 1; hop < member.size(); ++hop) {
                exchange.Send((member.rank + hop) % member.size(), 0, At(data, part * member.rank),
                              bytes);
              }
              return exchange.WaitAll();
            });
  }
  void Broadcast(Stream& stream, Tensor data, int root) override {
    CheckBroadcast(data, root, size());
    Enqueue(stream, absl::StrCat("broadcast of ", data.ToString(), " from rank ", root),
            [data, root](Member& member, Exchange& exchange) {
              return BroadcastFrom(member, exchange, data, root);
            });
  }
  void AllToAll(Stream& stream, Tensor in, Tensor out) override {
    const int64_t part = CheckAllToAll(in, out, size());
    Enqueue(stream, absl::StrCat("all-to-all of ", in.ToString()),
            [in, out, part](Member& member, Exchange& exchange) {
              const int64_t bytes = part * SizeOf(in.dtype());
              for (int hop = 1; hop < member.size(); ++hop) {
                const int from = (member.rank + member.size() - hop) % member.size();
                exchange.Receive(from, 0, At(out, part * from), bytes);
              }
              for (int hop = 1; hop < member.size(); ++hop) {
                const int to = (member.rank + hop) % member.size();
                exchange.Send(to, 0, At(in, part * to), bytes);
              }
              if (bytes > 0) {
                std::memcpy(At(out, part * member.rank), At(in, part * member.rank),
                            static_cast<size_t>(bytes));
              }
              return exchange.WaitAll();
            });
  }

  void Send(Stream& stream, Tensor data, int to) override {
    CheckPeer(data, to, rank(), size());
    queue_.Send(data, to);
    if (!queue_.grouping()) FlushTransfers(stream);
  }
  void Receive(Stream& stream, Tensor data, int from) override {
    CheckPeer(data, from, rank(), size());
    queue_.Receive(data, from);
    if (!queue_.grouping()) FlushTransfers(stream);
  }
  void GroupBegin() override { queue_.GroupBegin(); }
  void GroupEnd(Stream& stream) override {
    queue_.GroupEnd();
    FlushTransfers(stream);
  }

  absl::Status Barrier() override {
    int32_t nothing = 0;
    return GatherHere("barrier", &nothing, 1);
  }
  absl::StatusOr<std::unique_ptr<Communicator>> Split(int color, int key,
                                                      const std::string& name) override;
  void Abort(absl::Status why) override {
    // An earlier end keeps its reason.
    (void)member_->connections->End(absl::AbortedError(absl::StrCat("aborted: ", why.message())));
  }

 private:
  // The number only needs to differ between calls under way.
  static uint64_t Numbered(uint64_t number, const std::string& call) {
    uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
    for (const char c : call) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
    return (hash >> 48) << 16 | (number & 0xFFFF);
  }
  // Bits from the top: group 15, point-to-point 1, hash of the call 16, its number 16, step 16.
  uint64_t Tag(bool point_to_point, uint64_t numbered) const {
    return static_cast<uint64_t>(member_->group) << 49 | uint64_t{point_to_point} << 48 |
           numbered << kStepBits;
  }

  template <typename Body>
  static absl::Status Run(Member& member, const std::string& what, uint64_t tag, Body& body) {
    RETURN_IF_ERROR(member.connections->ended());
    if (member.size() == 1) return absl::OkStatus();
    Exchange exchange(member, what, tag);
    return body(member, exchange);
  }
  template <typename Body>
  void Enqueue(Stream& stream, std::string call, Body body) {
    CHECK(stream.device().kind() == kernels::DeviceKind::kCpu);
    const uint64_t number = calls_++;
    stream.Enqueue([member = member_, &stream, tag = Tag(false, Numbered(number, call)), body,
                    what = absl::StrCat(call, " (call ", number, ")")]() mutable {
      absl::Status status = Run(*member, what, tag, body);
      if (!status.ok()) stream.Fail(std::move(status));
    });
  }
  void FlushTransfers(Stream& stream) {
    CHECK(stream.device().kind() == kernels::DeviceKind::kCpu);
    stream.Enqueue([member = member_, &stream, transfers = queue_.Take(), tag = Tag(true, 0)] {
      auto body = [&](Member& m, Exchange& exchange) {
        for (const QueuedTransfer& transfer : transfers) {
          const auto step = static_cast<int64_t>(
              Numbered(transfer.number, absl::StrCat(transfer.data.bytes())) << kStepBits);
          if (transfer.sends) {
            exchange.Send(transfer.peer, step, transfer.data.data(), transfer.data.bytes());
          } else {
            exchange.Receive(transfer.peer, step, transfer.data.data(), transfer.data.bytes());
          }
        }
        return exchange.WaitAll();
      };
      absl::Status status = Run(*member, "send and receive", tag, body);
      if (!status.ok()) stream.Fail(std::move(status));
    });
  }

  // Gathers `count` numbers of every rank into values[rank * count], on the calling thread.
  absl::Status GatherHere(const std::string& call, int32_t* values, int count,
                          std::vector<int32_t>* all = nullptr) {
    std::vector<int32_t> table(static_cast<size_t>(size() * count));
    std::copy(values, values + count, table.begin() + rank() * count);
    const uint64_t number = calls_++;
    auto body = [&](Member& member, Exchange& exchange) {
      const int64_t bytes = count * static_cast<int64_t>(sizeof(int32_t));
      for (int peer = 0; peer < member.size(); ++peer) {
        if (peer == member.rank) continue;
        exchange.Receive(peer, 0, table.data() + peer * count, bytes);
        exchange.Send(peer, 0, table.data() + member.rank * count, bytes);
      }
      return exchange.WaitAll();
    };
    RETURN_IF_ERROR(Run(*member_, absl::StrCat(call, " (call ", number, ")"),
                        Tag(false, Numbered(number, call)), body));
    if (all != nullptr) *all = std::move(table);
    return absl::OkStatus();
  }

  const std::shared_ptr<Member> member_;
  uint64_t calls_ = 0;
  TransferQueue queue_;
};

absl::StatusOr<std::unique_ptr<Communicator>> TcpCommunicator::Split(int color, int key,
                                                                     const std::string& name) {
  int32_t mine[3] = {color, key, member_->connections->next_group()};
  std::vector<int32_t> all;
  RETURN_IF_ERROR(GatherHere("split", mine, 3, &all));
  auto child = std::make_shared<Member>();
  child->connections = member_->connections;
  child->name = name;
  std::vector<std::pair<int, int>> order;  // (key, rank)
  for (int peer = 0; peer < size(); ++peer) {
    const int32_t* row = all.data() + peer * 3;
    if (row[0] == color) order.emplace_back(row[1], peer);
    child->group = std::max(child->group, row[2]);
  }
  CHECK_LT(child->group, kGroupsMax) << "groups of one attempt";
  member_->connections->set_next_group(child->group + 1);
  std::sort(order.begin(), order.end());
  for (size_t i = 0; i < order.size(); ++i) {
    if (order[i].second == rank()) child->rank = static_cast<int>(i);
    child->members.push_back(member_->Peer(order[i].second));
  }
  return std::make_unique<TcpCommunicator>(std::move(child));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Communicator>> MakeTcpCommunicator(KeyValueStore& store, int rank,
                                                                  int size,
                                                                  const TcpOptions& options) {
  if (size < 1 || rank < 0 || rank >= size) {
    return absl::InvalidArgumentError(absl::StrCat("rank ", rank, " of ", size));
  }
  std::unique_ptr<TcpMesh> mesh;
  if (size > 1) {
    ASSIGN_OR_RETURN(mesh, TcpMesh::Connect(store, rank, size, options));
  }
  auto member = std::make_shared<Member>();
  member->connections = std::make_shared<Connections>(std::move(mesh), options.operation_timeout);
  member->name = "world";
  member->rank = rank;
  for (int peer = 0; peer < size; ++peer) member->members.push_back(peer);
  return std::make_unique<TcpCommunicator>(std::move(member));
}

}  // namespace muster::parallel
