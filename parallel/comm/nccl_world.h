// One rank's NCCL communicators, and the threads that watch over them.
//
// NCCL reports neither a dead peer nor a call that never ends: its kernel waits on the GPU for
// ever. So every call leaves an event behind it, and the watchdog ends all communicators
// (ncclCommAbort makes their kernels return) when a call takes too long, when NCCL reports a fault,
// and when the host connections say that a peer is gone. Calls by copy engines (peer_group.h) are
// watched in the same way; what they wait for is then released.
#ifndef MUSTER_PARALLEL_COMM_NCCL_WORLD_H_
#define MUSTER_PARALLEL_COMM_NCCL_WORLD_H_

#include <cuda_runtime_api.h>

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/mutex.h"
#include "kernels/device/device.h"
#include "kernels/device/device_cuda.h"
#include "kernels/tensor.h"
#include "parallel/comm/communicator.h"
#include "parallel/comm/nccl_library.h"
#include "parallel/comm/peer_group.h"

namespace muster::parallel {

// What messages say about a call.
struct NcclCall {
  const char* operation = "";
  kernels::DType dtype = kernels::DType::kU8;
  int64_t elements = 0;
  uint64_t number = 0;  // in its group
};

// One communicator. NcclWorld alone reads and writes the fields.
struct NcclGroup {
  struct Pending {
    NcclCall call;
    kernels::Stream* stream = nullptr;
    cudaEvent_t done = nullptr;
    absl::Time since;
  };
  std::string name;
  int rank = 0;
  int size = 1;
  ncclComm_t comm = nullptr;   // null once it is ended
  bool entered = false;        // a host thread is inside an NCCL call on it
  NcclCall entered_call;       // that call,
  absl::Time entered_at;       // and since when
  PeerGroup* peers = nullptr;  // null: all calls are NCCL's
  std::deque<Pending> pending;
  std::vector<cudaEvent_t> idle_events;

  std::string Describe(const NcclCall& call) const;
};

// Thread-safe. Outlives its groups.
class NcclWorld {
 public:
  // `liveness` is a host communicator of all ranks for this object alone.
  NcclWorld(NcclLibrary nccl, kernels::cuda::CudaDevice& device, NcclOptions options,
            std::unique_ptr<Communicator> liveness);
  ~NcclWorld();

  const NcclLibrary& nccl() const { return nccl_; }
  const NcclOptions& options() const { return options_; }
  kernels::cuda::CudaDevice& device() { return device_; }

  using Make = std::function<ncclResult_t(ncclComm_t*)>;
  // Makes group.comm by `make`, on a thread that is left behind when it does not come back in time:
  // `make` must own what it uses. `parent` counts as inside a call meanwhile. After an error all
  // groups have ended.
  absl::Status Add(NcclGroup& group, NcclGroup* parent, const std::string& what, Make make)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // `peers` is released when the group ends. Called before its first call.
  void SetPeers(NcclGroup& group, PeerGroup* peers) ABSL_LOCKS_EXCLUDED(mutex_);
  // Waits for the calls of the group, then ends it.
  void Remove(NcclGroup& group) ABSL_LOCKS_EXCLUDED(mutex_);
  // Watches what `issue` enqueues; an error fails the stream.
  void Call(NcclGroup& group, kernels::Stream& stream, const NcclCall& call,
            absl::FunctionRef<absl::Status(ncclComm_t, cudaStream_t)> issue)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // The first reason stays.
  void End(absl::Status why) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status ended() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  static void RecordStart(NcclGroup& group, const NcclCall& call, absl::Time at);
  void Watch();
  void Listen();
  void Sweep() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SweepGroup(NcclGroup& group, absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndLocked(absl::Status why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void TearDown() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool busy() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Lets streams that wait for peers go on.
  void Release() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static bool Finished(const NcclGroup& group);
  const NcclLibrary nccl_;
  kernels::cuda::CudaDevice& device_;
  const NcclOptions options_;
  const std::unique_ptr<Communicator> liveness_;
  Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool torn_down_ ABSL_GUARDED_BY(mutex_) = false;
  int making_ ABSL_GUARDED_BY(mutex_) = 0;  // threads inside Add
  absl::Status ended_ ABSL_GUARDED_BY(mutex_);
  absl::Status lost_ ABSL_GUARDED_BY(mutex_);  // a peer is gone: no call can begin
  std::vector<NcclGroup*> groups_ ABSL_GUARDED_BY(mutex_);
  std::thread watchdog_;
  std::thread listener_;  // last: both start when everything above exists
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_COMM_NCCL_WORLD_H_
