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

class PeerMemory;

// One all-to-all of Communicator::AllToAllBatch. `in` and `out` have one part per rank, all parts
// of one size: the part for rank r is number in_places[r] of `in`, the part from rank r becomes
// number out_places[r] of `out`.
struct AllToAllItem {
  kernels::Tensor in, out;
  std::vector<int> in_places = {}, out_places = {};  // empty: rank r's part is number r

  // Among `size` ranks.
  kernels::Tensor PartFor(int to, int size) const;
  kernels::Tensor PartFrom(int from, int size) const;
};

// The collectives of a group of ranks, which every implementation has. What only GPUs of one host
// can do is an interface of its own that an implementation may offer (peer_memory).
//
// All ranks of the group make the same calls in the same order with the same sizes. Tensors are
// contiguous. A call is enqueued on `stream` and returns at once (an eager host stream runs it
// inside the call). Errors fail the stream: kUnavailable when a peer is gone, kAborted after
// Abort(), kDeadlineExceeded, each naming the operation, the group and this rank. After an error
// the communicator is unusable. One thread enqueues at a time.
//
// Sums accumulate in fp32 as one binary tree over the ranks in order, ((0 1) (2 3)) ..., so all
// ranks get the same bits on every run, and a sum over 2k ranks has the bits of a sum over k ranks
// that each have added a pair before.
//
// NCCL differs in what its hardware paths decide: it sums in its own order and in the data's type,
// with the same bits on all ranks and on every run of the same group on the same machines; the
// maximum and minimum of a NaN are not defined. Which sums are NCCL's is fixed by sizes and by what
// memory is shared (peer_memory.h), never by a measurement: docs/decisions/0004-*.md. Its calls on
// a host stream, with host memory, go through the TCP connections beside it and keep the promises
// above.
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
  // Writes the same sum to `sum`, which has the size of a part and lies outside of `data`. `data`
  // is undefined afterwards.
  virtual void ReduceScatterTo(kernels::Stream& stream, kernels::Tensor data, kernels::Tensor sum,
                               ReduceOp op);
  // ReduceScatter of `data` whose other parts the caller does not write until it has enqueued the
  // next call of this communicator, typically an AllGatherFrom into `data`. Peers may read those
  // parts until then, which saves a barrier. Part rank() may be used at once.
  virtual void ReduceScatterBeforeGather(kernels::Stream& stream, kernels::Tensor data,
                                         ReduceOp op);
  // data has size() equal parts; part rank() is the input, afterwards all parts are filled.
  virtual void AllGather(kernels::Stream& stream, kernels::Tensor data) = 0;
  // AllGather of `in`, which has the size of a part and lies outside of `out`, into all parts of
  // `out`.
  virtual void AllGatherFrom(kernels::Stream& stream, kernels::Tensor in, kernels::Tensor out);
  virtual void Broadcast(kernels::Stream& stream, kernels::Tensor data, int root) = 0;
  // Part i of `in` goes to rank i; part j of `out` comes from rank j.
  virtual void AllToAll(kernels::Stream& stream, kernels::Tensor in, kernels::Tensor out) = 0;
  // Several all-to-alls as one call. Requires: at least one; the same in_places on all ranks; no
  // `out` overlaps an `in`. Not between GroupBegin and GroupEnd.
  virtual void AllToAllBatch(kernels::Stream& stream, const std::vector<AllToAllItem>& items);
  // AllGather of `in` into the parts of `out`, and AllToAll of `in` into `out`, one part after the
  // other, for a caller that works on parts as they come. This rank's own part is left alone. In
  // step i, from 1 to size() - 1, this rank sends to rank() + i and receives from rank() - i,
  // around the group. The host calls `arrived` when the receive of the part of rank `from` has been
  // enqueued, and `before` ahead of enqueueing the send of part `to`: what `before` enqueues on
  // `stream` comes first. Not between GroupBegin and GroupEnd.
  virtual void AllGatherInSteps(kernels::Stream& stream, kernels::Tensor in, kernels::Tensor out,
                                absl::FunctionRef<void(int from)> arrived);
  virtual void AllToAllInSteps(kernels::Stream& stream, kernels::Tensor in, kernels::Tensor out,
                               absl::FunctionRef<void(int to)> before);
  // Matching pairs; messages between two ranks keep their order.
  virtual void Send(kernels::Stream& stream, kernels::Tensor data, int to) = 0;
  virtual void Receive(kernels::Stream& stream, kernels::Tensor data, int from) = 0;
  // Sends and receives enqueued between the two run at the same time: neither side has to go first.
  virtual void GroupBegin() = 0;
  virtual void GroupEnd(kernels::Stream& stream) = 0;
  // `in` goes to rank() + by, `out`, of the same size, comes from rank() - by, around the group.
  // Not between GroupBegin and GroupEnd.
  virtual void Rotate(kernels::Stream& stream, kernels::Tensor in, kernels::Tensor out, int by);
  virtual absl::Status Barrier() = 0;  // blocks the host

  // Ranks with the same color form a group, ordered by (key, rank). Every rank of this group calls
  // it, in the same global order.
  virtual absl::StatusOr<std::unique_ptr<Communicator>> Split(int color, int key,
                                                              const std::string& name) = 0;
  // From any thread: ends running and later calls with kAborted, also those that wait for a peer.
  virtual void Abort(absl::Status why) = 0;
  // Bytes this rank has sent so far, by the algorithm's volume, for tests of communication volume.
  virtual int64_t bytes_sent() const = 0;

  // Null where no rank can read another's device memory: on hosts, and in a group of one rank.
  // Lives as long as this object.
  virtual PeerMemory* peer_memory() { return nullptr; }
};

// Where ranks of one attempt find each other; served by the coordinator, scoped by (job, epoch,
// membership). Thread-safe.
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
  // A numeric address of an interface of this host: the rank listens on it, connects from it and
  // tells it to the other ranks. All ranks have IPv4 addresses, or all IPv6.
  std::string address = "127.0.0.1";
  // Ports to listen on, "20000-20999"; each rank takes one. Empty: the system picks.
  std::string ports;
  // How messages of all ranks name the place of this one: "worker-2 on host b".
  std::string label;
  // The time within which all ranks come and every two of them prove that they can talk.
  absl::Duration connect_timeout = absl::Seconds(60);
  // The time within which two ranks that have both come prove it.
  absl::Duration preflight_timeout = absl::Seconds(10);
  // A cut of the network is bridged for so long. It is less than the time after which the
  // coordinator gives up a worker, so that the error names the two hosts.
  absl::Duration silence_max = absl::Seconds(25);
  absl::Duration operation_timeout = absl::Minutes(5);
  // Called on any thread when a connection that was lost is back; for logs.
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
  // The host connections beside NCCL's own, for barriers, host streams and the loss of peers. Their
  // operation timeout is at least 30 s.
  TcpOptions host;
  absl::Duration connect_timeout = absl::Minutes(5);
  // Counted from the moment when a call could have begun: enqueued, with the one before it
  // finished.
  absl::Duration operation_timeout = absl::Minutes(10);
  // The most thread blocks that one collective takes from the kernels beside it; 0 = NCCL's choice.
  int thread_blocks_max = 0;
  // Called once, on any thread, when the group has failed and before its running calls are ended.
  std::function<void(const absl::Status&)> on_failure;
  // Called on the thread that shares memory, once per group: which transport carries which of the
  // group's calls, with the times that decided it (transport_choice.h); for logs.
  std::function<void(const std::string&)> on_transports;
};
// Ranks on GPUs: one per device, in one process or several. Blocks until all `size` ranks have come
// through `store`, where the lowest rank publishes NCCL's id; `store` is not used afterwards. A
// dead peer, a call that takes longer than its timeout and a fault of NCCL end this group and all
// that were split from it: kUnavailable or kDeadlineExceeded, naming the call, within about a
// second of the fault. Calls that had not finished when a peer was lost fail, whatever they have
// written. A stream must outlive the calls on it. Status codes: those of MakeTcpCommunicator;
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
