#include "parallel/comm/peer_pulls.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"
#include "kernels/device/cuda_status.h"
#include "parallel/comm/gather_texts.h"

namespace muster::parallel {
namespace {

using kernels::cuda::CudaStatus;

// Calls between two events, and how often they are timed.
constexpr int kTimedCalls = 8;
constexpr int kRounds = 3;
// Reads at once are taken where they are so many times as fast alone. Behind switches they are
// about as fast alone, but cost a step 2 to 6 % beside GEMMs
// (docs/decisions/0005-copy-engines-carry-large-collectives.md); where each pair of GPUs has a link
// of its own, they are as many times as fast as there are peers.
constexpr double kAtOnceGains = 1.3;

// Streams and events of a measurement, and memory to read into.
struct Timing {
  ~Timing() {
    for (const cudaStream_t stream : streams) cudaStreamDestroy(stream);
    for (const cudaEvent_t event : events) cudaEventDestroy(event);
    cudaFree(memory);
    cudaGetLastError();
  }
  absl::Status Make(size_t bytes, int streams_count, int events_count) {
    streams.reserve(streams_count);
    events.reserve(events_count);
    for (int i = 0; i < streams_count; ++i) {
      cudaStream_t stream = nullptr;
      RETURN_IF_ERROR(
          CudaStatus(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "a stream"));
      streams.push_back(stream);
    }
    for (int i = 0; i < events_count; ++i) {
      cudaEvent_t event = nullptr;
      RETURN_IF_ERROR(CudaStatus(cudaEventCreate(&event), "an event"));
      events.push_back(event);
    }
    return CudaStatus(cudaMalloc(&memory, bytes), "memory to time reads of peers");
  }

  std::vector<cudaStream_t> streams;
  std::vector<cudaEvent_t> events;
  void* memory = nullptr;
};

// Milliseconds of kTimedCalls calls that read `bytes` of every one of `peers`, `at_once` at a time.
absl::StatusOr<double> TimePulls(const Timing& timing, const std::vector<const char*>& peers,
                                 size_t bytes, int at_once) {
  const cudaStream_t main = timing.streams[0];
  const cudaEvent_t begin = timing.events[0], end = timing.events[1];
  RETURN_IF_ERROR(CudaStatus(cudaEventRecord(begin, main), "recording an event"));
  for (int call = 0; call < kTimedCalls; ++call) {
    for (int lane = 1; lane < at_once; ++lane) {
      RETURN_IF_ERROR(CudaStatus(cudaEventRecord(timing.events[2], main), "recording an event"));
      RETURN_IF_ERROR(
          CudaStatus(cudaStreamWaitEvent(timing.streams[lane], timing.events[2]), "waiting"));
    }
    for (size_t i = 0; i < peers.size(); ++i) {
      RETURN_IF_ERROR(CudaStatus(
          cudaMemcpyAsync(static_cast<char*>(timing.memory) + i * bytes, peers[i], bytes,
                          cudaMemcpyDefault, timing.streams[i % static_cast<size_t>(at_once)]),
          "copying from a peer"));
    }
    for (int lane = 1; lane < at_once; ++lane) {
      RETURN_IF_ERROR(
          CudaStatus(cudaEventRecord(timing.events[2], timing.streams[lane]), "an event"));
      RETURN_IF_ERROR(CudaStatus(cudaStreamWaitEvent(main, timing.events[2]), "waiting"));
    }
  }
  RETURN_IF_ERROR(CudaStatus(cudaEventRecord(end, main), "recording an event"));
  RETURN_IF_ERROR(CudaStatus(cudaEventSynchronize(end), "reading the memory of peers"));
  float milliseconds = 0;
  RETURN_IF_ERROR(CudaStatus(cudaEventElapsedTime(&milliseconds, begin, end), "timing reads"));
  return milliseconds;
}

}  // namespace

absl::StatusOr<int> FastestPulls(Communicator& host, const std::vector<const char*>& peers,
                                 int64_t bytes) {
  // One at a time, several at once.
  std::array<double, 2> milliseconds = {};
  Timing timing;
  absl::Status status;
  if (peers.size() < 2) {
    status = absl::UnavailableError("nothing to choose");
  } else {
    status = timing.Make(peers.size() * static_cast<size_t>(bytes), kPullsMax, 3);
  }
  // The first calls, which open the way to the peers, do not count. Of the others the fastest does:
  // ranks that have drifted apart read from the same peer, which a collective's barriers prevent.
  for (int round = 0; round <= kRounds; ++round) {
    for (const bool at_once : {false, true}) {
      // A rank that has nothing to time takes part too: the others wait for it.
      RETURN_IF_ERROR(host.Barrier());
      if (!status.ok()) continue;
      const absl::StatusOr<double> time =
          TimePulls(timing, peers, static_cast<size_t>(bytes), at_once ? kPullsMax : 1);
      status = time.status();
      if (!time.ok() || round == 0) continue;
      double& fastest = milliseconds[at_once];
      fastest = round == 1 ? *time : std::min(fastest, *time);
    }
  }
  // Without a choice everything works all the same.
  cudaGetLastError();
  if (!status.ok()) milliseconds = {};
  ASSIGN_OR_RETURN(const std::vector<std::string> texts,
                   GatherTexts(host, absl::StrCat(milliseconds[0], " ", milliseconds[1])));
  // A collective ends when the last rank has.
  std::array<double, 2> longest = {};
  for (const std::string& text : texts) {
    const std::vector<std::string> fields = absl::StrSplit(text, ' ');
    for (size_t i = 0; i < longest.size() && i < fields.size(); ++i) {
      double time = 0;
      if (absl::SimpleAtod(fields[i], &time)) longest[i] = std::max(longest[i], time);
    }
  }
  return longest[1] * kAtOnceGains < longest[0] ? kPullsMax : 1;
}

}  // namespace muster::parallel
