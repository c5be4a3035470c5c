// How much memory a rank's Trainer takes, computed without a device. The Trainer allocates by the
// same functions that a plan predicts with.
#ifndef MUSTER_PARALLEL_TRAIN_MEMORY_H_
#define MUSTER_PARALLEL_TRAIN_MEMORY_H_

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/arena.h"
#include "kernels/device/device.h"
#include "parallel/mesh/mesh.h"
#include "parallel/model/model.h"
#include "parallel/optim/flat_buffers.h"
#include "parallel/optim/flat_layout.h"
#include "parallel/pipeline/schedule.h"
#include "parallel/train/options.h"

namespace muster::parallel {

// Everything that the memory of one rank depends on. A view: what it refers to must outlive it.
struct TrainerPlace {
  const TrainerOptions& options;
  const Model& model;  // this rank's part
  const Mesh& mesh;
  PerAxis coordinate{0, 0, 0, 0};
  int zero_shards = 1;  // ranks of a shard group, see MeshGroups
  int64_t sequence_length = 0;
  int64_t validation_samples = 0;  // of the data set; 0: no validation, or not known
  // Least bytes of each allocation of the workspace (MostOfEach); null: what this rank needs.
  const std::vector<int64_t>* workspace = nullptr;
};

// ---- layout
// --------------------------------------------------------------------------------------

int64_t GlobalMicroBatches(const TrainerPlace& place);  // per step
int64_t MicroBatches(const TrainerPlace& place);        // per step and rank
FlatLayoutOptions LayoutOptionsOf(const TrainerPlace& place);
// Whether gradients are written into the memory of activations: where a step has one micro-batch
// per rank, backward frees activations as it writes gradients.
bool SharesGradients(const TrainerPlace& place);
// Whether the GEMMs that compute gradients also sum their squares for the global norm. That needs
// CUDA, gradients that may be added in any order (Model::Shape::deterministic), and one micro-batch
// on one rank, so that nothing changes a gradient between its GEMM and the norm.
bool SumsInGemms(const TrainerPlace& place, kernels::DeviceKind device);
FlatBuffersOptions StorageOptionsOf(const TrainerPlace& place);  // without seed, shard and threads
std::vector<BlockRange> GradientGroupsOf(const TrainerPlace& place);
PipelineShape PipelineShapeOf(const TrainerPlace& place);
BatchShape BatchShapeOf(const TrainerPlace& place);
// Whether the ranks of a tensor group make each allocation of the workspace equally large
// (MostOfEach), however uneven their shares are: copy engines need a tensor at the same offset on
// all of them.
bool AlignsWorkspaces(const TrainerPlace& place, kernels::DeviceKind device);
// Takes the workspace of this rank from `arena`. Returns the host's bytes for offloaded
// activations.
int64_t PlanWorkspace(const TrainerPlace& place, kernels::Arena& arena);
// Bytes of each allocation of the workspace (kernels::Arena::allocations).
std::vector<int64_t> WorkspaceAllocations(const TrainerPlace& place);
// By allocation, the most bytes of any of the ranks. Empty where the ranks keep their own sizes:
// where they have different numbers of allocations, or where a rank would take a third more than it
// needs.
std::vector<int64_t> MostOfEach(const std::vector<std::vector<int64_t>>& ranks);
// fp32 numbers that ranks exchange in a step: a loss and a token count of every micro-batch, the
// stop vote, a square sum of every rank. And as many as a step or an evaluation needs.
int64_t StepValues(const TrainerPlace& place);
int64_t ValueSlots(const TrainerPlace& place);
// Bytes of the positions of this rank's tokens, with context parallelism; else 0.
int64_t PositionBytes(const TrainerPlace& place);
// Bytes of the gradient that the other end of a pipeline has for a tied table; 0 where this rank
// has no tied table.
int64_t SharedTableBytes(const TrainerPlace& place, const FlatLayout& layout);
// Bytes of buffers for Communicator::UseForSums; 0 without copy engines.
struct SumBytes {
  int64_t gradients = 0;
  int64_t tensor = 0;  // activations of the tensor group
};
SumBytes SumBytesOf(const TrainerPlace& place, const FlatLayout& layout,
                    kernels::DeviceKind device);
// A checkpoint's chunks are written one after the other, through pinned memory.
struct SaveElements {
  int64_t chunk = 0;    // elements of the largest chunk that a rank saves, at most
  int64_t at_once = 0;  // elements that the device copies at once
};
SaveElements SaveElementsOf(const FlatLayout& layout, int replicas, bool compressed);
// Bytes of one step's outcome in host memory, and how many steps are under way at most.
int64_t StepOutcomeBytes();
int64_t StepsUnderWay(kernels::DeviceKind device);

// ---- prediction
// ----------------------------------------------------------------------------------

struct MemoryUse {
  struct Category {
    std::string name;
    int64_t bytes = 0;
  };
  // Device memory, always the same categories in the same order:
  //   parameters     what the model computes with, and 16-bit copies of own parts
  //   gathered       ZeRO-3: whole blocks, while they are in use
  //   master         fp32 weights beside those
  //   optimizer      AdamW's two moments
  //   gradients      where they share the memory of activations: what does not fit in there
  //   communication  buffers of reductions: 16-bit wire, compressed gradients, tied tables
  //   residuals      what gradient compression holds back
  //   inputs, activations, logits, stages, scratch
  //                  the workspace at its largest (kernels::Arena); activations of all
  //                  micro-batches in flight; stages: what a pipeline receives and sends
  //   step           losses, norms and other numbers of a step
  //   attention      CUDA only: the workspace of its backward, AttentionBytes
  //   scan           CUDA only: what the backward of scans takes beyond that, ScanBytes
  //   libraries      CUDA only, an allowance and not a prediction: see LibraryBytes
  std::vector<Category> device;
  // Host memory (pinned on CUDA): batches read ahead, numbers of steps, offloaded optimizer state
  // with its gradients, offloaded activations, the bucket that CheckReplicas is at, the chunk of a
  // checkpoint that is being written.
  std::vector<Category> host;

  int64_t device_bytes() const;
  int64_t host_bytes() const;
  // "activations 3.2 GiB, optimizer 1.1 GiB, ...": device memory, largest first, without categories
  // below a thousandth of all.
  std::string ToString() const;
  std::string HostText() const;  // the same of host memory
};

// The library bytes that are taken as soon as the device is opened.
constexpr int64_t kCudaContextBytes = int64_t{512} << 20;

// The workspace of cuDNN's attention backward, for the order of additions and the context
// parallelism of the model. 0 in fp32 and with documents, where our own kernels run.
int64_t AttentionBytes(const TrainerPlace& place);
// The workspace of the backward of state-space scans; 0 in models without. Ops take turns in the
// same memory.
int64_t ScanBytes(const TrainerPlace& place);
// The library bytes of NCCL: its communicators, the world's included, and its buffers between ranks
// that send to each other (with copy engines, the ranks of a context group do not). 0 with one
// rank. Proportional to `thread_blocks`, where 0 means NCCL's 32.
int64_t CommunicatorBytes(const Mesh& mesh, int zero_shards, ContextMethod context,
                          bool copy_engines, int thread_blocks = 0);

// What CUDA's context, cuBLASLt, cuDNN and, with several ranks, NCCL take for themselves; 0 on the
// host. Measured on H200s (docs/benchmarks/method.md): 0.5 GiB of context
// and kernels, workspaces of GEMMs, and CommunicatorBytes.
int64_t LibraryBytes(const TrainerPlace& place, kernels::DeviceKind device);

// Exactly what Trainer::Make with the same arguments allocates on the device, and within some KiB
// what training allocates on the host. Allocates nothing. Requires: options that Trainer::Make
// accepts.
MemoryUse PredictMemory(const TrainerPlace& place, kernels::DeviceKind device);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_TRAIN_MEMORY_H_
