// Ranks as threads of one process. In a collective the ranks publish their pointers, wait for each
// other, read each other's memory, and wait again before anyone returns.
//
// A rank that gives up must not return (and free its memory) while another still reads it:
// `readers` counts the ranks that read, and a call that has failed lets nobody start to read.
#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/check.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "parallel/comm/arguments.h"
#include "parallel/comm/collective_plan.h"
#include "parallel/comm/communicator.h"
#include "parallel/comm/transfer_queue.h"

namespace muster::parallel {
namespace {

using kernels::Stream;
using kernels::Tensor;

// All communicators that came from one MakeLocalCommunicators.
struct Family {
  explicit Family(int size) : ended(static_cast<size_t>(size)) {}
  Mutex mutex;
  // By rank of the whole family: OK, or why that rank takes part in nothing any more.
  std::vector<absl::Status> ended ABSL_GUARDED_BY(mutex);
};

// One collective under way. Guarded by Family::mutex, apart from the memory of the tensors.
struct SharedCall {
  struct Entry {
    Tensor in;
    Tensor out;
    int phases = 0;  // barriers of this call that this rank has reached
    int color = 0;   // of Split
    int key = 0;
  };
  explicit SharedCall(size_t size) : table(size) {}
  std::vector<Entry> table;  // by rank
  std::string call;          // that of the first rank to come; the others must make the same
  int readers = 0;
  int left = 0;
  bool failed = false;
  std::map<int, std::shared_ptr<struct Group>> children;  // of Split, by color
};

struct Message {
  const void* data = nullptr;
  int64_t bytes = -1;  // -1: the sender has not posted it yet
  bool reading = false;
  bool taken = false;
  bool failed = false;
};

struct Group {
  Group(std::shared_ptr<Family> f, std::string n, std::vector<int> m, absl::Duration t)
      : family(std::move(f)),
        name(std::move(n)),
        members(std::move(m)),
        timeout(t),
        departed(members.size()) {}
  int size() const { return static_cast<int>(members.size()); }

  const std::shared_ptr<Family> family;
  const std::string name;
  const std::vector<int> members;  // ranks in the family
  const absl::Duration timeout;
  std::vector<bool> departed ABSL_GUARDED_BY(family->mutex);
  std::map<uint64_t, SharedCall> calls ABSL_GUARDED_BY(family->mutex);  // by number of the call
  // By (from, to, number between these two).
  std::map<std::tuple<int, int, uint64_t>, Message> messages ABSL_GUARDED_BY(family->mutex);
};

char* PartData(const Tensor& tensor, PartRange part) {
  return static_cast<char*>(tensor.data()) + part.begin * SizeOf(tensor.dtype());
}
void CopyPart(const Tensor& from, const Tensor& to, PartRange part) {
  if (part.count() == 0) return;
  std::memcpy(PartData(to, part), PartData(from, part),
              static_cast<size_t>(part.count() * SizeOf(to.dtype())));
}

// One rank's side of a group; shared by the communicator and the work it has enqueued.
class Member {
 public:
  Member(std::shared_ptr<Group> group, int rank) : group_(std::move(group)), rank_(rank) {}

  Group& group() { return *group_; }
  int rank() const { return rank_; }

  // Runs `body` between two barriers of all ranks. `body` may call Phase() for more of them. `call`
  // describes what must agree between the ranks.
  template <typename Body>
  absl::Status Call(uint64_t number, const std::string& call, Tensor in, Tensor out, Body body) {
    const std::string what = absl::StrCat(call, " (call ", number, ")");
    SharedCall* shared = nullptr;
    {
      MutexLock lock(&group_->family->mutex);
      shared = &group_->calls.try_emplace(number, group_->members.size()).first->second;
      if (shared->call.empty()) shared->call = call;
      if (shared->call != call) {
        return Give(*shared, absl::InvalidArgumentError(
                                 absl::StrCat(Where(what), "another rank calls ", shared->call)));
      }
      shared->table[Index()].in = in;
      shared->table[Index()].out = out;
      RETURN_IF_ERROR(Arrive(*shared, what));
    }
    RETURN_IF_ERROR(body(*shared, what));
    RETURN_IF_ERROR(Phase(*shared, what));
    MutexLock lock(&group_->family->mutex);
    --shared->readers;
    if (++shared->left == group_->size()) group_->calls.erase(number);
    return absl::OkStatus();
  }

  // Finds callers of ReduceScatterBeforeGather who write to the other ranks' parts too soon, which
  // only copy engines would notice: keeps what `data` holds outside of `own`, and the next call
  // compares it (CheckUntouched).
  void KeepOthers(const Tensor& data, PartRange own) {
    MutexLock lock(&kept_mutex_);
    kept_ = {data, own, Others(data, own)};
  }
  absl::Status CheckUntouched(const std::string& call) {
    MutexLock lock(&kept_mutex_);
    const Kept kept = std::exchange(kept_, {});
    if (kept.data.empty() || Others(kept.data, kept.own) == kept.others) return absl::OkStatus();
    return absl::InternalError(absl::StrCat(Where(call), "behind a reduce-scatter of ",
                                            kept.data.ToString(),
                                            " that this call ends, somebody has written to that"));
  }

  // A barrier inside a call: all ranks have finished reading what the phase before offered.
  absl::Status Phase(SharedCall& shared, const std::string& what) {
    MutexLock lock(&group_->family->mutex);
    --shared.readers;
    return Arrive(shared, what);
  }

  absl::Status Transfer(const std::vector<QueuedTransfer>& transfers);

  absl::StatusOr<std::shared_ptr<Group>> Split(uint64_t number, int color, int key,
                                               const std::string& name, int* rank_in_child);

  void End(absl::Status why) {
    MutexLock lock(&group_->family->mutex);
    if (MyEnd().ok()) MyEnd() = std::move(why);
  }
  void Depart() {
    MutexLock lock(&group_->family->mutex);
    group_->departed[Index()] = true;
  }

 private:
  struct Kept {
    Tensor data;
    PartRange own;
    std::string others;  // bytes
  };
  static std::string Others(const Tensor& data, PartRange own) {
    const char* const begin = PartData(data, {0, 0});
    const char* const end = begin + data.bytes();
    const int64_t size_of = SizeOf(data.dtype());
    std::string others(begin, begin + own.begin * size_of);
    others.append(begin + own.end * size_of, end);
    return others;
  }

  size_t Index() const { return static_cast<size_t>(rank_); }
  absl::Status& EndOf(int rank) ABSL_EXCLUSIVE_LOCKS_REQUIRED(group_->family->mutex) {
    return group_->family->ended[static_cast<size_t>(group_->members[static_cast<size_t>(rank)])];
  }
  absl::Status& MyEnd() ABSL_EXCLUSIVE_LOCKS_REQUIRED(group_->family->mutex) {
    return EndOf(rank_);
  }
  std::string Where(const std::string& what) {
    return absl::StrCat(what, " of group ", group_->name, ", rank ", rank_, " of ", group_->size(),
                        ": ");
  }
  // OK, or why `rank` will not come.
  absl::Status Gone(int rank, const std::string& what)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(group_->family->mutex) {
    if (!EndOf(rank).ok()) {
      return absl::UnavailableError(
          absl::StrCat(Where(what), "rank ", rank, " has stopped: ", EndOf(rank).message()));
    }
    if (group_->departed[static_cast<size_t>(rank)]) {
      return absl::UnavailableError(absl::StrCat(Where(what), "rank ", rank, " has left"));
    }
    return absl::OkStatus();
  }

  // Waits for all ranks to come this far. On success this rank counts as a reader.
  absl::Status Arrive(SharedCall& shared, const std::string& what)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(group_->family->mutex) {
    const int phase = ++shared.table[Index()].phases;
    absl::Status why = MyEnd();
    std::vector<int> missing;
    auto settled = [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
      missing.clear();
      for (int rank = 0; rank < group_->size(); ++rank) {
        if (shared.table[static_cast<size_t>(rank)].phases < phase) missing.push_back(rank);
      }
      if (shared.failed) return true;
      if (missing.empty()) return true;
      if (why = MyEnd(); !why.ok()) return true;
      for (int rank : missing) {
        if (why = Gone(rank, what); !why.ok()) return true;
      }
      return false;
    };
    if (why.ok() && !group_->family->mutex.AwaitWithTimeout(Condition(&settled), group_->timeout)) {
      why = absl::DeadlineExceededError(absl::StrCat(Where(what), "waited ",
                                                     absl::FormatDuration(group_->timeout),
                                                     " for rank ", absl::StrJoin(missing, ", ")));
    }
    if (why.ok() && shared.failed) {
      why = MyEnd();
      for (int rank = 0; why.ok() && rank < group_->size(); ++rank) why = Gone(rank, what);
      if (why.ok()) why = absl::UnavailableError(absl::StrCat(Where(what), "a peer has given up"));
    }
    if (!why.ok()) return Give(shared, why);
    ++shared.readers;
    return absl::OkStatus();
  }

  // Gives up: no rank starts to read this rank's memory any more, and those that do are waited for.
  absl::Status Give(SharedCall& shared, absl::Status why)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(group_->family->mutex) {
    shared.failed = true;
    if (MyEnd().ok()) MyEnd() = why;
    auto unread = [&] { return shared.readers == 0; };
    group_->family->mutex.Await(Condition(&unread));
    return why;
  }

  absl::Status Take(Message& message, const std::string& what, const Tensor& to);

  const std::shared_ptr<Group> group_;
  const int rank_;
  Mutex kept_mutex_;
  Kept kept_ ABSL_GUARDED_BY(kept_mutex_);
};

// The receiver's side of one message.
absl::Status Member::Take(Message& message, const std::string& what, const Tensor& to) {
  {
    MutexLock lock(&group_->family->mutex);
    if (message.failed) {
      return absl::UnavailableError(absl::StrCat(Where(what), "the sender has given up"));
    }
    if (message.bytes != to.bytes()) {
      return absl::InvalidArgumentError(
          absl::StrCat(Where(what), "expected ", to.bytes(), " bytes, was sent ", message.bytes));
    }
    message.reading = true;
  }
  if (to.bytes() > 0) std::memcpy(to.data(), message.data, static_cast<size_t>(to.bytes()));
  MutexLock lock(&group_->family->mutex);
  message.reading = false;
  message.taken = true;
  return absl::OkStatus();
}

absl::Status Member::Transfer(const std::vector<QueuedTransfer>& transfers) {
  const absl::Time deadline = absl::Now() + group_->timeout;
  // Waits until `done`; the other side is `peer`.
  auto wait = [&](const std::string& what, int peer,
                  auto done) ABSL_EXCLUSIVE_LOCKS_REQUIRED(group_->family->mutex) {
    absl::Status why;
    auto settled = [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
      if (done()) return true;
      why = MyEnd();
      if (why.ok()) why = Gone(peer, what);
      return !why.ok();
    };
    if (!group_->family->mutex.AwaitWithDeadline(Condition(&settled), deadline)) {
      why = absl::DeadlineExceededError(absl::StrCat(
          Where(what), "waited ", absl::FormatDuration(group_->timeout), " for rank ", peer));
    }
    return why;
  };

  absl::Status result;
  struct Posted {
    const QueuedTransfer* transfer = nullptr;
    Message* message = nullptr;
  };
  std::vector<Posted> posted;
  {
    MutexLock lock(&group_->family->mutex);
    result = MyEnd();
    for (const QueuedTransfer& transfer : transfers) {
      if (!result.ok() || !transfer.sends) continue;
      Message& message = group_->messages[{rank_, transfer.peer, transfer.number}];
      message.data = transfer.data.data();
      message.bytes = transfer.data.bytes();
      posted.push_back({&transfer, &message});
    }
  }
  for (const QueuedTransfer& transfer : transfers) {
    if (!result.ok() || transfer.sends) continue;
    const std::string what = absl::StrCat("receive from rank ", transfer.peer);
    Message* message = nullptr;
    {
      MutexLock lock(&group_->family->mutex);
      message = &group_->messages[{transfer.peer, rank_, transfer.number}];
      result = wait(what, transfer.peer, [&] { return message->bytes >= 0; });
    }
    if (result.ok()) result = Take(*message, what, transfer.data);
  }
  MutexLock lock(&group_->family->mutex);
  for (const auto& [transfer, message] : posted) {
    if (!result.ok()) break;
    result = wait(absl::StrCat("send to rank ", transfer->peer), transfer->peer,
                  [message = message] { return message->taken; });
  }
  if (!result.ok() && MyEnd().ok()) MyEnd() = result;
  for (const auto& [transfer, message] : posted) {
    if (message->taken) {
      group_->messages.erase({rank_, transfer->peer, transfer->number});
      continue;
    }
    message->failed = true;
    auto unread = [message = message] { return !message->reading; };
    group_->family->mutex.Await(Condition(&unread));
  }
  return result;
}

absl::StatusOr<std::shared_ptr<Group>> Member::Split(uint64_t number, int color, int key,
                                                     const std::string& name, int* rank_in_child) {
  std::shared_ptr<Group> child;
  auto body = [&](SharedCall& shared, const std::string& what) -> absl::Status {
    {
      MutexLock lock(&group_->family->mutex);
      shared.table[Index()].color = color;
      shared.table[Index()].key = key;
    }
    RETURN_IF_ERROR(Phase(shared, what));
    MutexLock lock(&group_->family->mutex);
    std::vector<std::pair<int, int>> order;  // (key, rank)
    for (int rank = 0; rank < group_->size(); ++rank) {
      const SharedCall::Entry& entry = shared.table[static_cast<size_t>(rank)];
      if (entry.color == color) order.emplace_back(entry.key, rank);
    }
    std::sort(order.begin(), order.end());
    std::vector<int> members;
    for (size_t i = 0; i < order.size(); ++i) {
      if (order[i].second == rank_) *rank_in_child = static_cast<int>(i);
      members.push_back(group_->members[static_cast<size_t>(order[i].second)]);
    }
    std::shared_ptr<Group>& made = shared.children[color];
    if (made == nullptr) {
      made = std::make_shared<Group>(group_->family, name, members, group_->timeout);
    }
    child = made;
    return absl::OkStatus();
  };
  RETURN_IF_ERROR(Call(number, "split", Tensor(), Tensor(), body));
  return child;
}

class LocalCommunicator : public Communicator {
 public:
  LocalCommunicator(std::shared_ptr<Group> group, int rank)
      : member_(std::make_shared<Member>(std::move(group), rank)) {}
  ~LocalCommunicator() override { member_->Depart(); }

  int rank() const override { return member_->rank(); }
  int size() const override { return member_->group().size(); }
  const std::string& name() const override { return member_->group().name; }
  int64_t bytes_sent() const override { return bytes_sent_; }

  void AllReduce(Stream& stream, Tensor data, ReduceOp op) override {
    bytes_sent_ += AllReduceBytes(data.elements(), SizeOf(data.dtype()), size(), rank());
    Enqueue(stream, absl::StrCat("all-reduce of ", data.ToString()), data, data,
            [data, op](Member& member, SharedCall& shared, const std::string& what) {
              const int size = member.group().size();
              const PartRange own = PartOf(data.elements(), size, member.rank());
              Reduce(shared, own, op, data);
              RETURN_IF_ERROR(member.Phase(shared, what));
              for (int rank = 0; rank < size; ++rank) {
                if (rank == member.rank()) continue;
                CopyPart(shared.table[static_cast<size_t>(rank)].in, data,
                         PartOf(data.elements(), size, rank));
              }
              return absl::OkStatus();
            });
  }
  void ReduceScatter(Stream& stream, Tensor data, ReduceOp op) override {
    Scatter(stream, data, op, /*before_gather=*/false);
  }
  void ReduceScatterBeforeGather(Stream& stream, Tensor data, ReduceOp op) override {
    Scatter(stream, data, op, /*before_gather=*/true);
  }
  void AllGather(Stream& stream, Tensor data) override {
    const int64_t part = EqualPart(data, size());
    bytes_sent_ += part * (size() - 1) * SizeOf(data.dtype());
    Enqueue(stream, absl::StrCat("all-gather of ", data.ToString()), data, data,
            [data, part](Member& member, SharedCall& shared, const std::string&) {
              for (int rank = 0; rank < member.group().size(); ++rank) {
                if (rank == member.rank()) continue;
                CopyPart(shared.table[static_cast<size_t>(rank)].in, data,
                         {part * rank, part * (rank + 1)});
              }
              return absl::OkStatus();
            });
  }
  void Broadcast(Stream& stream, Tensor data, int root) override {
    CheckBroadcast(data, root, size());
    bytes_sent_ += BroadcastBytes(data.elements(), SizeOf(data.dtype()), size(), rank(), root);
    Enqueue(stream, absl::StrCat("broadcast of ", data.ToString(), " from rank ", root), data, data,
            [data, root](Member& member, SharedCall& shared, const std::string&) {
              if (member.rank() != root) {
                CopyPart(shared.table[static_cast<size_t>(root)].in, data, {0, data.elements()});
              }
              return absl::OkStatus();
            });
  }
  void AllToAll(Stream& stream, Tensor in, Tensor out) override {
    const int64_t part = CheckAllToAll(in, out, size());
    bytes_sent_ += part * (size() - 1) * SizeOf(in.dtype());
    Enqueue(stream, absl::StrCat("all-to-all of ", in.ToString()), in, out,
            [out, part](Member& member, SharedCall& shared, const std::string&) {
              for (int rank = 0; rank < member.group().size(); ++rank) {
                const Tensor& from = shared.table[static_cast<size_t>(rank)].in;
                std::memcpy(PartData(out, {part * rank, 0}),
                            PartData(from, {part * member.rank(), 0}),
                            static_cast<size_t>(part * SizeOf(out.dtype())));
              }
              return absl::OkStatus();
            });
  }

  void Send(Stream& stream, Tensor data, int to) override {
    CheckPeer(data, to, rank(), size());
    bytes_sent_ += data.bytes();
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
    return member_->Call(calls_++, "barrier", Tensor(), Tensor(),
                         [](SharedCall&, const std::string&) { return absl::OkStatus(); });
  }
  absl::StatusOr<std::unique_ptr<Communicator>> Split(int color, int key,
                                                      const std::string& name) override {
    int rank_in_child = 0;
    ASSIGN_OR_RETURN(std::shared_ptr<Group> child,
                     member_->Split(calls_++, color, key, name, &rank_in_child));
    return std::make_unique<LocalCommunicator>(std::move(child), rank_in_child);
  }
  void Abort(absl::Status why) override {
    member_->End(absl::AbortedError(absl::StrCat("aborted: ", why.message())));
  }

 private:
  static void Reduce(SharedCall& shared, PartRange part, ReduceOp op, const Tensor& data) {
    if (part.count() == 0) return;
    std::vector<const void*> inputs;
    for (const SharedCall::Entry& entry : shared.table) inputs.push_back(PartData(entry.in, part));
    ReduceAsTree(inputs, data.dtype(), op, part.count(), PartData(data, part));
  }
  template <typename Body>
  void Enqueue(Stream& stream, std::string call, Tensor in, Tensor out, Body body) {
    CHECK(in.contiguous() && out.contiguous());
    if (stream.device().kind() != kernels::DeviceKind::kCpu) {
      // One rank alone serves any device: its results are in place already.
      CHECK(size() == 1 && in.data() == out.data()) << call << " between threads on a device";
      return;
    }
    const uint64_t number = calls_++;
    stream.Enqueue([member = member_, &stream, number, call = std::move(call), in, out, body] {
      absl::Status status = member->CheckUntouched(call);
      if (!status.ok()) {
        member->End(status);
      } else {
        status =
            member->Call(number, call, in, out, [&](SharedCall& shared, const std::string& what) {
              return body(*member, shared, what);
            });
      }
      if (!status.ok()) stream.Fail(std::move(status));
    });
  }
  void Scatter(Stream& stream, Tensor data, ReduceOp op, bool before_gather) {
    const int64_t part = EqualPart(data, size());
    bytes_sent_ += part * (size() - 1) * SizeOf(data.dtype());
    Enqueue(
        stream, absl::StrCat("reduce-scatter of ", data.ToString()), data, data,
        [data, op, part, before_gather](Member& member, SharedCall& shared, const std::string&) {
          const PartRange own = {part * member.rank(), part * (member.rank() + 1)};
          Reduce(shared, own, op, data);
          if (before_gather) member.KeepOthers(data, own);
          return absl::OkStatus();
        });
  }
  void FlushTransfers(Stream& stream) {
    CHECK(stream.device().kind() == kernels::DeviceKind::kCpu);
    stream.Enqueue([member = member_, &stream, transfers = queue_.Take()] {
      absl::Status status = member->Transfer(transfers);
      if (!status.ok()) stream.Fail(std::move(status));
    });
  }

  const std::shared_ptr<Member> member_;
  uint64_t calls_ = 0;
  TransferQueue queue_;
  int64_t bytes_sent_ = 0;
};

}  // namespace

std::vector<std::unique_ptr<Communicator>> MakeLocalCommunicators(int size,
                                                                  absl::Duration timeout) {
  CHECK_GE(size, 1);
  std::vector<int> everyone;
  for (int rank = 0; rank < size; ++rank) everyone.push_back(rank);
  auto group = std::make_shared<Group>(std::make_shared<Family>(size), "world", everyone, timeout);
  std::vector<std::unique_ptr<Communicator>> communicators;
  for (int rank = 0; rank < size; ++rank) {
    communicators.push_back(std::make_unique<LocalCommunicator>(group, rank));
  }
  return communicators;
}

}  // namespace muster::parallel
