// How the ranks of a job wait for each other's work on files, which takes as long as the storage
// does: verifying, loading and writing checkpoints.
#ifndef MUSTER_PARALLEL_TRAIN_CONTROL_CHANNEL_H_
#define MUSTER_PARALLEL_TRAIN_CONTROL_CHANNEL_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/device/device.h"
#include "parallel/comm/communicator.h"

namespace muster::parallel {

// A rank that has finished early must not wait for the others inside one collective: the time limit
// of a collective is there to find dead peers, and reading 840 GB takes longer. So each rank works
// on the calling thread, while a thread of the channel takes part in a short all-reduce of 16 bytes
// every `interval`. It tells all ranks who has finished, who has failed and how much is done.
//
// There is no limit on how long the work takes. A peer that dies ends the wait within the time
// limit of a collective. A rank whose storage blocks for ever keeps the others waiting, but the
// reported progress stops, which is what the coordinator's progress timeout looks at.
//
// Why not the coordinator's KeyValueStore: its keys can be written once per attempt, are limited in
// number and size and cost a synced write each, and no save should need the coordinator.
//
// Calls are collectives of the world and run over host memory (on CUDA devices too, where the
// communicator's TCP connections carry them). Nothing else may use `world` during a call.
class ControlChannel {
 public:
  // `world` must outlive the channel.
  static absl::StatusOr<std::unique_ptr<ControlChannel>> Make(Communicator& world,
                                                              absl::Duration interval);
  ~ControlChannel();

  // This rank's side of a Run(), for its body.
  class Work {
   public:
    virtual ~Work() = default;
    // Adds to what this rank will do in all; before the part of it that Advance() counts.
    virtual void Expect(int64_t bytes) = 0;
    // `bytes` more are done. May call the `report` of Run().
    virtual void Advance(int64_t bytes) = 0;
    // Another rank has failed, or the channel has: the result of this work will not be used.
    virtual bool pointless() const = 0;
  };
  // Runs `body` on the calling thread of every rank and returns when all of them have returned:
  // whether all were OK, the same on every rank. `report` gets the share of the expected bytes that
  // is done, over all ranks, about once per interval, on the calling thread. The status of the
  // communicator, marked FailureDomain::kCommunication, when a peer is lost.
  absl::StatusOr<bool> Run(absl::FunctionRef<absl::Status(Work& work)> body,
                           absl::FunctionRef<void(double fraction)> report);
  // Every rank's text, in rank order. For ranks that come at about the same time: behind a Run().
  // Marked like Run().
  absl::StatusOr<std::vector<std::string>> Gather(const std::string& text);

 private:
  class Running;
  ControlChannel(Communicator& world, absl::Duration interval);
  void Poll(Running& running);

  Communicator& world_;
  const absl::Duration interval_;
  const std::unique_ptr<kernels::Device> host_;
  std::unique_ptr<kernels::Stream> stream_;
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_TRAIN_CONTROL_CHANNEL_H_
