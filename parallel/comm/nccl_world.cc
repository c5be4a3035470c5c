#include "parallel/comm/nccl_world.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "kernels/device/cuda_status.h"
#include "parallel/comm/peer_failure.h"

namespace muster::parallel {
namespace {

// How late the watchdog may notice the end of a call or a fault.
constexpr absl::Duration kPollInterval = absl::Milliseconds(10);
// Rank 0 enters the liveness barrier this often. The others wait in it all the time, so that they
// notice at once when a connection breaks; the barriers find machines that are gone without closing
// their connections.
constexpr absl::Duration kLivenessInterval = absl::Milliseconds(100);
// Aborted kernels of this rank send garbage to those of its peers, so the peers get this long to
// hear of the end first.
constexpr absl::Duration kPeersNotice = absl::Milliseconds(20);
// How long host threads may take to leave NCCL before its communicators are ended under them.
constexpr absl::Duration kEnteredPatience = absl::Milliseconds(500);
// How long streams may take to get through their waits for peers.
constexpr absl::Duration kReleasePatience = absl::Seconds(2);

}  // namespace

std::string NcclGroup::Describe(const NcclCall& call) const {
  return absl::StrCat(call.operation, " of ", kernels::Name(call.dtype), "[", call.elements,
                      "] (call ", call.number, ") of group ", name, ", rank ", rank, " of ", size);
}

NcclWorld::NcclWorld(NcclLibrary nccl, kernels::cuda::CudaDevice& device, NcclOptions options,
                     std::unique_ptr<Communicator> liveness)
    : nccl_(nccl),
      device_(device),
      options_(std::move(options)),
      liveness_(std::move(liveness)),
      watchdog_([this] { Watch(); }),
      listener_([this] { Listen(); }) {}

NcclWorld::~NcclWorld() {
  {
    MutexLock lock(&mutex_);
    CHECK(groups_.empty()) << "a group is still in use";
    stopping_ = true;
  }
  liveness_->Abort(absl::CancelledError("the communicator has gone"));
  listener_.join();
  watchdog_.join();
}

absl::Status NcclWorld::ended() {
  MutexLock lock(&mutex_);
  return ended_;
}

absl::Status NcclWorld::Add(NcclGroup& group, NcclGroup* parent, const std::string& what,
                            Make make) {
  // Shared with the thread, which may outlive this call.
  struct Making {
    Mutex mutex;
    bool done ABSL_GUARDED_BY(mutex) = false;
    ncclResult_t result ABSL_GUARDED_BY(mutex) = ncclInternalError;
    ncclComm_t comm ABSL_GUARDED_BY(mutex) = nullptr;
  };
  {
    MutexLock lock(&mutex_);
    RETURN_IF_ERROR(ended_);
    ++making_;
    if (parent != nullptr) RecordStart(*parent, {"split"}, absl::InfiniteFuture());
  }
  auto making = std::make_shared<Making>();
  std::thread thread([making, make = std::move(make), ordinal = device_.ordinal()] {
    ncclComm_t comm = nullptr;
    ncclResult_t result = ncclUnhandledCudaError;
    if (cudaSetDevice(ordinal) == cudaSuccess) result = make(&comm);
    MutexLock lock(&making->mutex);
    making->result = result;
    making->comm = comm;
    making->done = true;
  });
  const absl::Time deadline = absl::Now() + options_.connect_timeout;
  ncclComm_t comm = nullptr;
  absl::Status status;
  for (bool done = false; !done && status.ok();) {
    MutexLock lock(&making->mutex);
    done = making->mutex.AwaitWithTimeout(Condition(&making->done), kPollInterval);
    if (done) {
      status = nccl_.Check(making->result, nullptr, what);
      comm = making->comm;
    } else if (absl::Now() > deadline) {
      status = absl::DeadlineExceededError(
          absl::StrCat(what, ": not made after ", absl::FormatDuration(options_.connect_timeout)));
    } else {
      status = ended();
    }
  }
  if (comm != nullptr || status.ok()) {
    thread.join();
  } else {
    thread.detach();
  }
  {
    MutexLock lock(&mutex_);
    --making_;
    if (parent != nullptr) parent->entered = false;
    if (status.ok()) status = ended_;
    if (status.ok()) {
      group.comm = comm;
      groups_.push_back(&group);
      return absl::OkStatus();
    }
  }
  if (comm != nullptr) nccl_.CommAbort(comm);
  End(status);
  return status;
}

void NcclWorld::RecordStart(NcclGroup& group, const NcclCall& call, absl::Time at) {
  group.entered = true;
  group.entered_call = call;
  group.entered_at = at;
}

void NcclWorld::Remove(NcclGroup& group) {
  ncclComm_t comm = nullptr;
  {
    MutexLock lock(&mutex_);
    auto idle = [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
      return ended_.ok() ? group.pending.empty() : torn_down_;
    };
    mutex_.Await(Condition(&idle));
    // Work that waits for peers must not outlive the counters that it waits for.
    const absl::Time patience = absl::Now() + kReleasePatience;
    while (group.peers != nullptr && !Finished(group) && absl::Now() < patience) {
      group.peers->Release();
      auto never = [] { return false; };
      mutex_.AwaitWithTimeout(Condition(&never), kPollInterval);
    }
    group.peers = nullptr;
    comm = std::exchange(group.comm, nullptr);
    groups_.erase(std::remove(groups_.begin(), groups_.end(), &group), groups_.end());
  }
  // ncclCommDestroy may wait for the peers. Aborting is safe: no call of this rank is under way,
  // and calls of the peers do not need this rank any more.
  if (comm != nullptr) nccl_.CommAbort(comm);
  for (NcclGroup::Pending& pending : group.pending) group.idle_events.push_back(pending.done);
  for (cudaEvent_t event : group.idle_events) cudaEventDestroy(event);
}

void NcclWorld::Call(NcclGroup& group, kernels::Stream& stream, const NcclCall& call,
                     absl::FunctionRef<absl::Status(ncclComm_t, cudaStream_t)> issue) {
  kernels::cuda::CudaStream& cuda = kernels::cuda::CudaStream::Of(stream);
  const absl::Time now = absl::Now();
  cudaEvent_t done = nullptr;
  ncclComm_t comm = nullptr;
  {
    MutexLock lock(&mutex_);
    if (ended_.ok() && !lost_.ok()) EndLocked(lost_);
    if (!ended_.ok()) {
      stream.Fail(Annotate(ended_, group.Describe(call)));
      return;
    }
    RecordStart(group, call, now);
    comm = group.comm;
    if (!group.idle_events.empty()) {
      done = group.idle_events.back();
      group.idle_events.pop_back();
    }
  }
  absl::Status status;
  if (done == nullptr) {
    status = kernels::cuda::CudaStatus(cudaEventCreateWithFlags(&done, cudaEventDisableTiming),
                                       "making an event");
  }
  if (status.ok()) status = issue(comm, cuda.handle());
  if (status.ok()) {
    status = kernels::cuda::CudaStatus(cudaEventRecord(done, cuda.handle()), "recording an event");
  }
  MutexLock lock(&mutex_);
  group.entered = false;
  if (!ended_.ok()) status = ended_;  // the reason for an error of `issue`
  if (!status.ok()) {
    if (done != nullptr) group.idle_events.push_back(done);
    status = Annotate(status, group.Describe(call));
    EndLocked(status);
    stream.Fail(std::move(status));
    return;
  }
  group.pending.push_back({call, &stream, done, now});
}

void NcclWorld::End(absl::Status why) {
  MutexLock lock(&mutex_);
  EndLocked(std::move(why));
}

void NcclWorld::EndLocked(absl::Status why) {
  if (!ended_.ok()) return;
  ended_ = std::move(why);
  for (NcclGroup* group : groups_) {
    for (NcclGroup::Pending& pending : group->pending) {
      if (cudaEventQuery(pending.done) == cudaSuccess) continue;
      const std::string call = group->Describe(pending.call);
      const bool named = ended_.message().substr(0, call.size()) == call;
      pending.stream->Fail(named ? ended_ : Annotate(ended_, call));
    }
  }
}

void NcclWorld::SetPeers(NcclGroup& group, PeerGroup* peers) {
  MutexLock lock(&mutex_);
  group.peers = peers;
}

void NcclWorld::Release() {
  for (NcclGroup* group : groups_) {
    if (group->peers != nullptr) group->peers->Release();
  }
}

bool NcclWorld::Finished(const NcclGroup& group) {
  return std::all_of(
      group.pending.begin(), group.pending.end(),
      [](const NcclGroup::Pending& call) { return cudaEventQuery(call.done) == cudaSuccess; });
}

bool NcclWorld::busy() const {
  if (making_ > 0) return true;
  for (const NcclGroup* group : groups_) {
    if (group->entered || !group->pending.empty()) return true;
  }
  return false;
}

void NcclWorld::SweepGroup(NcclGroup& group, absl::Time now) {
  while (!group.pending.empty()) {
    const NcclGroup::Pending& first = group.pending.front();
    const cudaError_t state = cudaEventQuery(first.done);
    if (state == cudaErrorNotReady) break;
    if (state != cudaSuccess) {
      EndLocked(kernels::cuda::CudaStatus(
          state, absl::StrCat(group.Describe(first.call), ", on ", device_.name())));
      return;
    }
    group.idle_events.push_back(first.done);
    group.pending.pop_front();
    if (!group.pending.empty()) {
      group.pending.front().since = std::max(group.pending.front().since, now);
    }
  }
  const NcclCall* late = nullptr;
  if (!group.pending.empty() && now - group.pending.front().since > options_.operation_timeout) {
    late = &group.pending.front().call;
  } else if (group.entered && now - group.entered_at > options_.operation_timeout) {
    late = &group.entered_call;
  }
  if (late != nullptr) {
    const std::string others =
        group.size == 2 ? absl::StrCat("for rank ", 1 - group.rank)
                        : absl::StrCat("for one of the other ", group.size - 1,
                                       " ranks: the one whose flight record ends before this call");
    EndLocked(absl::DeadlineExceededError(
        absl::StrCat(group.Describe(*late), ": waited ",
                     absl::FormatDuration(options_.operation_timeout), " ", others)));
    return;
  }
  if (group.entered || group.comm == nullptr) return;
  ncclResult_t fault = ncclSuccess;
  nccl_.CommGetAsyncError(group.comm, &fault);
  absl::Status status = nccl_.Check(fault, group.comm, absl::StrCat("group ", group.name));
  if (!status.ok()) EndLocked(std::move(status));
}

void NcclWorld::Sweep() {
  const absl::Time now = absl::Now();
  for (NcclGroup* group : groups_) {
    SweepGroup(*group, now);
    if (!ended_.ok()) return;
  }
  if (!lost_.ok() && busy()) EndLocked(lost_);
}

void NcclWorld::TearDown() {
  const absl::Status why = ended_;
  mutex_.Unlock();
  if (options_.on_failure) options_.on_failure(why);
  liveness_->Abort(why);  // closes the host connections, which is how the peers notice
  absl::SleepFor(kPeersNotice);
  mutex_.Lock();
  auto left = [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    return making_ == 0 && std::all_of(groups_.begin(), groups_.end(),
                                       [](const NcclGroup* group) { return !group->entered; });
  };
  mutex_.AwaitWithTimeout(Condition(&left), kEnteredPatience);
  Release();
  std::vector<ncclComm_t> comms;
  for (NcclGroup* group : groups_) {
    if (group->comm != nullptr) comms.push_back(std::exchange(group->comm, nullptr));
  }
  mutex_.Unlock();
  nccl_.AbortAll(comms);
  mutex_.Lock();
  torn_down_ = true;
}

void NcclWorld::Watch() {
  device_.Select();
  MutexLock lock(&mutex_);
  for (;;) {
    auto work = [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
      return stopping_ || (ended_.ok() ? busy() : !torn_down_);
    };
    if (ended_.ok()) {
      mutex_.Await(Condition(&work));
    } else {
      mutex_.AwaitWithTimeout(Condition(&work), kPollInterval);
      if (torn_down_) Release();  // a peer that goes on may have overwritten the counters
    }
    if (stopping_) return;
    if (torn_down_) continue;
    if (ended_.ok()) Sweep();
    if (!ended_.ok()) {
      TearDown();
      continue;
    }
    auto ending = [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return stopping_ || !ended_.ok(); };
    mutex_.AwaitWithTimeout(Condition(&ending), kPollInterval);
  }
}

void NcclWorld::Listen() {
  for (;;) {
    absl::Status status = liveness_->Barrier();
    MutexLock lock(&mutex_);
    if (stopping_ || !ended_.ok()) return;
    if (!status.ok()) {
      lost_ = absl::UnavailableError(absl::StrCat("a peer is gone: ", status.message()));
      if (const auto failure = PeerFailureOf(status); failure.has_value()) {
        lost_ = MarkPeer(lost_, *failure);
      }
      return;
    }
    if (liveness_->rank() != 0) continue;
    auto ending = [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return stopping_ || !ended_.ok(); };
    mutex_.AwaitWithTimeout(Condition(&ending), kLivenessInterval);
    if (stopping_) return;
  }
}

}  // namespace muster::parallel
