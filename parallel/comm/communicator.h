// The communicator seam: collectives among the ranks of a group. `local` (threads of one process),
// TCP (processes on CPUs) and NCCL (GPUs) pass one contract suite.
#ifndef MUSTER_PARALLEL_COMM_COMMUNICATOR_H_
#define MUSTER_PARALLEL_COMM_COMMUNICATOR_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/device/device.h"
#include "kernels/tensor.h"

namespace muster::parallel {

enum class ReduceOp { kSum, kMax, kMin };

struct ShareOptions {
  // Of where things stand in each piece of memory: ranks with another number do not read it.
  std::vector<uint64_t> layouts = {};
  // Calls on less data stay as they are: below, meeting takes longer than NCCL's whole call.
  int64_t least_bytes = int64_t{4} << 20;
};

// Of Communicator::AllToAllPieces. `in` and `out` have a part for each rank, all of one size: that
// for rank r stands at in_places[r] of `in`, that from rank r goes to out_places[r] of `out`.
struct AllToAllPiece {
  kernels::Tensor in, out;
  std::vector<int> in_places = {}, out_places = {};  // empty: in order

  // Among `size` ranks.
  kernels::Tensor PartFor(int to, int size) const;
  kernels::Tensor PartFrom(int from, int size) const;
};

// What Communicator::Share gives; destroyed before the communicator.
class SharedMemory {
 public:
  virtual ~SharedMemory() = default;
  // The end will not be a collective: this rank has failed, and the others may never come.
  virtual void Abandon() = 0;
};

// All ranks of the group must make the same calls in the same order with the same sizes. Calls are
// enqueued on `stream` and return at once (an eager host stream runs them inside the call); errors
// fail the stream: kUnavailable when a peer vanished, kAborted after Abort(), kDeadlineExceeded,
// each naming the operation, the group and this rank. After an error the communicator is unusable.
// Sums (fp32 accumulation) are made as one binary tree over the ranks in order, ((0 1) (2 3)) ...,
// so all ranks get the same bits on every run, and a sum over 2k ranks those of k ranks that each
// have added a pair before. One thread enqueues at a time.
//
// NCCL differs in what its hardware paths decide: sums are made in NCCL's own order and in the
// data's type, with the same bits on all ranks and on every run of the same group on the same
// machines; the maximum and minimum of a NaN are not defined. Its calls on a host stream, with host
// memory, go through the TCP connections beside it and keep the promises above.
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual const std::string& name() const = 0;  // "world", "dp", ...

  // In place; every dtype.
  virtual void AllReduce(kernels::Stream& stream, kernels::Tensor data, ReduceOp op) = 0;
  // data has size() equal parts; afterwards part rank() holds the sum, the others are undefined.
  virtual void ReduceScatter(kernels::Stream& stream, kernels::Tensor data, ReduceOp op) = 0;
  // The same sum goes to `sum`, of the size of a part, outside of `data`, which is undefined then.
  virtual void ReduceScatterTo(kernels::Stream& stream, kernels::Tensor data, kernels::Tensor sum,
                               ReduceOp op);
  // ReduceScatter that the next call of this communicator ends: until that has been enqueued, the
  // other ranks may be reading this rank's `data` outside of part rank(), which must stay as it is.
  // For a caller who works on the sum and then calls again: the ranks meet once less.
  virtual void ReduceScatterOpen(kernels::Stream& stream, kernels::Tensor data, ReduceOp op);
  // data has size() equal parts; part rank() is the input, afterwards all parts are filled.
  virtual void AllGather(kernels::Stream& stream, kernels::Tensor data) = 0;
  // AllGather of `in`, of the size of a part, outside of `out`, into all parts of that.
  virtual void AllGatherFrom(kernels::Stream& stream, kernels::Tensor in, kernels::Tensor out);
  virtual void Broadcast(kernels::Stream& stream, kernels::Tensor data, int root) = 0;
  // Part i of `in` goes to rank i; part j of `out` comes from rank j.
  virtual void AllToAll(kernels::Stream& stream, kernels::Tensor in, kernels::Tensor out) = 0;
  // An all-to-all of every piece, all as one call. Requires: at least one; the same in_places on
  // all ranks; no `out` overlaps an `in`. Not between GroupBegin and GroupEnd.
  virtual void AllToAllPieces(kernels::Stream& stream, const std::vector<AllToAllPiece>& pieces);
  // AllGather of `in` into the parts of `out`, and AllToAll of `in` into `out`, one part after the
  // other, for a caller who works on parts; this rank's own part is left alone. Step i of size() -
  // 1 is between this rank and those i places away: it sends to rank() + i and receives from rank()
  // - i, around the group. `arrived` is called on the host when what brings the part of rank `from`
  // has been enqueued, `before` before what sends part `to` is: what it enqueues on `stream` comes
  // first. Not between GroupBegin and GroupEnd.
  virtual void AllGatherInSteps(kernels::Stream& stream, kernels::Tensor in, kernels::Tensor out,
                                absl::FunctionRef<void(int from)> arrived);
  virtual void AllToAllInSteps(kernels::Stream& stream, kernels::Tensor in, kernels::Tensor out,
                               absl::FunctionRef<void(int to)> before);
  // Matching pairs; messages between two ranks keep their order.
  virtual void Send(kernels::Stream& stream, kernels::Tensor data, int to) = 0;
  virtual void Receive(kernels::Stream& stream, kernels::Tensor data, int from) = 0;
  // Sends and receives enqueued between the two run together: neither side has to go first.
  virtual void GroupBegin() = 0;
  virtual void GroupEnd(kernels::Stream& stream) = 0;
  // `in` goes to the rank `by` places behind this one, around the group; `out`, of the same size,
  // comes from the one as many places before. Not between GroupBegin and GroupEnd.
  virtual void Rotate(kernels::Stream& stream, kernels::Tensor in, kernels::Tensor out, int by);
  virtual absl::Status Barrier() = 0;  // blocks the host

  // Ranks with the same color form a group, ordered by (key, rank). Every rank of this group calls
  // it, in the same global order.
  virtual absl::StatusOr<std::unique_ptr<Communicator>> Split(int color, int key,
                                                              const std::string& name) = 0;
  // Lets the other ranks of this host read `memory` of this rank until the result is destroyed, so
  // that large calls on data in it, of this communicator and of all split from the same world, go
  // through copy engines and leave the processors of a GPU to the kernels beside them. Such calls
  // sum as the promise above says; they are made on memory that has the same bytes and the same
  // ShareOptions::layouts on all ranks of the group, and require that data stands at the same place
  // of it on all of them. Everything else goes on as before. A collective of the world, of as many
  // pieces on every rank; so is the end of it, before the memory is freed and after all streams
  // that use it have finished. Null where there is nothing to gain: a host, one rank. kUnavailable,
  // on every rank, says why it cannot be done.
  virtual absl::StatusOr<std::unique_ptr<SharedMemory>> Share(
      const std::vector<kernels::Tensor>& memory, const ShareOptions& options);
  // Device memory for parts of sums of shared data, which stay as they are without: the less, the
  // more pieces. Other groups may use it on the same stream alone. It outlives the calls.
  virtual void UseForSums(const kernels::Tensor& memory) {}
  // How calls through copy engines on a stream of high priority wait for the other ranks from now
  // on: in a warp of one multiprocessor, which notices within microseconds, for those whose results
  // the computing stream waits for, or (at first) in the front end of the GPU, which takes no
  // multiprocessor from the kernels beside them but notices late. Calls on other streams wait in a
  // warp. The same on all ranks or not.
  virtual void WaitInWarp(bool in_warp) {}
  // From any thread: ends running and later calls with kAborted, also those that wait for a peer.
  virtual void Abort(absl::Status why) = 0;
  // Bytes this rank has sent so far, by the algorithm's volume, for tests of communication volume.
  virtual int64_t bytes_sent() const = 0;
  // Of these, what went through copy engines (Share).
  virtual int64_t bytes_by_copy_engines() const { return 0; }
};

// Where ranks of one attempt find each other; served by the coordinator, scoped by (job, epoch).
// Thread-safe.
class KeyValueStore {
 public:
  virtual ~KeyValueStore() = default;
  virtual absl::Status Put(const std::string& key, const std::string& value) = 0;
  // Waits for the key; kDeadlineExceeded, or kAborted when the attempt has ended.
  virtual absl::StatusOr<std::string> Get(const std::string& key, absl::Duration timeout) = 0;
};

// `size` communicators for `size` threads of this process. One alone serves streams of any device,
// for calls in place.
std::vector<std::unique_ptr<Communicator>> MakeLocalCommunicators(int size, absl::Duration timeout);

struct TcpOptions {
  // Numeric, of an interface of this host: to listen on, to connect from, and what the other ranks
  // are told. All ranks IPv4 or all IPv6.
  std::string address = "127.0.0.1";
  // Ports to listen on, "20000-20999"; each rank takes one. Empty: the system picks.
  std::string ports;
  // What people call the place of this rank, in messages of all ranks: "worker-2 on host b".
  std::string label;
  // For all ranks to come, and for every two of them to prove that they can talk.
  absl::Duration connect_timeout = absl::Seconds(60);
  // For two ranks that have both come.
  absl::Duration preflight_timeout = absl::Seconds(10);
  // A cut of the network is bridged for so long. Less than the time after which the coordinator
  // gives up a worker, so that the two hosts are named.
  absl::Duration silence_max = absl::Seconds(25);
  absl::Duration operation_timeout = absl::Minutes(5);
  // A connection was lost and is back; for logs. On any thread.
  std::function<void(const std::string&)> on_event;
};
// Ranks as processes, on any hosts, connected by TCP (tcp_mesh.h). Blocks until all `size` ranks
// have come through `store`, which is not used afterwards, and every two of them have proved that
// they reach each other. Status codes: kInvalidArgument (address, ports), kResourceExhausted (every
// port is in use), kUnavailable with a PeerFailure (peer_failure.h: this rank and another do not
// reach each other; the message says where and why), kDeadlineExceeded (a rank has not come), or
// the store's status. Groups from Split share the connections and their fate: an error or Abort in
// one ends them all.
absl::StatusOr<std::unique_ptr<Communicator>> MakeTcpCommunicator(KeyValueStore& store, int rank,
                                                                  int size,
                                                                  const TcpOptions& options);

struct NcclOptions {
  // The host connections beside NCCL's own: for barriers, host streams and the loss of peers. Their
  // operation timeout is at least 30 s.
  TcpOptions host;
  absl::Duration connect_timeout = absl::Minutes(5);
  // From the moment when a call could have begun: enqueued, with the one before it finished.
  absl::Duration operation_timeout = absl::Minutes(10);
  // Most thread blocks of one collective, which it takes from the kernels beside it; 0 = NCCL's
  // choice.
  int thread_blocks_max = 0;
  // Called once, on any thread, when the group has failed and before its running calls are ended.
  std::function<void(const absl::Status&)> on_failure;
};
// Ranks on GPUs: one per device, in one process or several. Blocks until all `size` ranks have met
// through `store`, where the lowest rank publishes NCCL's id; `store` is not used afterwards. A
// dead peer, a call that takes longer than its timeout and a fault of NCCL end all groups from
// Split together: kUnavailable or kDeadlineExceeded, naming the call, within about a second of the
// fault. Calls that had not finished when a peer was lost fail, whatever they have written. A
// stream must outlive the calls on it. Status codes: those of MakeTcpCommunicator;
// kFailedPrecondition when a rank has no NCCL or another version than rank 0, or two ranks have the
// same GPU; kUnimplemented in a build without CUDA.
absl::StatusOr<std::unique_ptr<Communicator>> MakeNcclCommunicator(KeyValueStore& store, int rank,
                                                                   int size,
                                                                   kernels::Device& device,
                                                                   const NcclOptions& options);

struct NcclEnvironment {
  // Fixes NCCL's algorithm and protocol, whose choice may differ between versions, at some cost in
  // speed.
  bool reproducible = false;
  // As TcpOptions::address: NCCL's own connections use the interface that has it. Empty: NCCL
  // chooses.
  std::string address;
  // Ranks of other host ids are on other machines for NCCL and for copy engines, wherever they are.
  // Empty: the machine decides.
  std::string host_id;
};
// Before the first communicator and before the process has threads; also makes NCCL connect when a
// group is made, so that no later call waits for a peer on the host. Variables that are set already
// (NCCL_SOCKET_IFNAME, NCCL_SOCKET_FAMILY, NCCL_HOSTID, ...) stay.
void SetNcclEnvironment(const NcclEnvironment& environment);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_COMM_COMMUNICATOR_H_
