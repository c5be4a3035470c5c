// The memory of a rank's Trainer, known before there is a device: the same functions say how much
// a Trainer allocates and how much a plan says that it will.
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
#include "parallel/train/trainer.h"

namespace muster::parallel {

// All that the memory of one rank depends on. A view: what it refers to must outlive it.
struct TrainerPlace {
  const TrainerOptions& options;
  const Model& model;  // this rank's part of it
  const Mesh& mesh;
  PerAxis coordinate{0, 0, 0, 0};
  int zero_shards = 1;  // ranks of a shard group, see MeshGroups
  int64_t sequence_length = 0;
  int64_t validation_samples = 0;  // of the data set; 0: no validation, or not known
  // At least, of each piece of the workspace (MostOfEach); null: what this rank needs.
  const std::vector<int64_t>* workspace = nullptr;
};

// ---- what a Trainer is laid out by
// ---------------------------------------------------------------

int64_t GlobalMicroBatches(const TrainerPlace& place);  // of a step
int64_t MicroBatches(const TrainerPlace& place);        // of a step and this rank
FlatLayoutOptions LayoutOptionsOf(const TrainerPlace& place);
// Whether gradients share the memory of activations: where a step has one micro-batch per rank,
// whose backward writes the gradients while it frees the activations.
bool SharesGradients(const TrainerPlace& place);
// Whether the sums of squares of the global norm come with the products that compute gradients: on
// CUDA, where gradients may be added up in any order (Model::Shape::deterministic) and are those of
// one micro-batch on one rank that nothing changes before the norm.
bool SumsWithProducts(const TrainerPlace& place, kernels::DeviceKind device);
FlatBuffersOptions StorageOptionsOf(const TrainerPlace& place);  // but for seed and shard
std::vector<BlockRange> GradientGroupsOf(const TrainerPlace& place);
PipelineShape PipelineShapeOf(const TrainerPlace& place);
BatchShape BatchShapeOf(const TrainerPlace& place);
// Whether the ranks of a tensor group take pieces of one size, MostOfEach, however uneven their
// shares are: copy engines find a tensor at the same place on all of them.
bool AlignsWorkspaces(const TrainerPlace& place, kernels::DeviceKind device);
// Takes the workspace of this rank. Returns bytes of the host for activations that stand there.
int64_t PlanWorkspace(const TrainerPlace& place, kernels::Arena& arena);
// Bytes of it, piece by piece (kernels::Arena::pieces).
std::vector<int64_t> WorkspacePieces(const TrainerPlace& place);
// Of pieces of several ranks the largest each; empty, and they stay as they are, where they are not
// as many, or where one rank's add up to less than three quarters of those.
std::vector<int64_t> MostOfEach(const std::vector<std::vector<int64_t>>& ranks);
// Floats that a step exchanges, and those of a step or an evaluation, whichever are more.
int64_t StepValues(const TrainerPlace& place);
int64_t ValueSlots(const TrainerPlace& place);
// Of the positions of this rank's tokens, where ranks share sequences; else 0.
int64_t PositionBytes(const TrainerPlace& place);
// Of what the other end of a pipeline finds of a tied table; 0 where this rank has none.
int64_t SharedTableBytes(const TrainerPlace& place, const FlatLayout& layout);
// Of parts of sums that copy engines bring together; 0 where none do (parallel.copy_engines).
struct SumBytes {
  int64_t gradients = 0;
  int64_t tensor = 0;  // of the tensor group's activations
};
SumBytes SumBytesOf(const TrainerPlace& place, const FlatLayout& layout,
                    kernels::DeviceKind device);
// Of a checkpoint's pieces, which are written one after the other: the largest that a rank saves,
// at most, and what the device copies of one at once, to pinned memory.
struct SaveElements {
  int64_t piece = 0;
  int64_t at_once = 0;
};
SaveElements SaveElementsOf(const FlatLayout& layout, int replicas, bool compressed);
// Of the outcomes of steps under way, in host memory: one step, and how many there are.
int64_t StepOutcomeBytes();
int64_t StepsUnderWay(kernels::DeviceKind device);

// ---- what it will take
// -----------------------------------------------------------------------------

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
  //   gradients      where they share the memory of activations, what that is not enough for
  //   communication  buffers of reductions: 16-bit wire, compressed gradients, tied tables
  //   residuals      what gradient compression has not sent
  //   inputs, activations, logits, stages, scratch
  //                  the workspace when it is largest (kernels::Arena); activations are those of
  //                  all micro-batches in flight, stages what a pipeline receives and sends
  //   step           losses, norms and other numbers of a step
  //   attention      CUDA only: what its backward works in, AttentionBytes
  //   libraries      CUDA only, an allowance and not a prediction: see LibraryBytes
  std::vector<Category> device;
  // Host memory (pinned on CUDA): batches read ahead, numbers of steps, offloaded optimizer state
  // with its gradients, offloaded activations, what is compared between ranks, a checkpoint while
  // it is staged.
  std::vector<Category> host;

  int64_t device_bytes() const;
  int64_t host_bytes() const;
  // "activations 3.2 GiB, optimizer 1.1 GiB, ...": the device's, largest first, but for crumbs.
  std::string ToString() const;
  std::string HostText() const;  // the same of the host's
};

// Of the library bytes, those that are taken as soon as there is a device.
constexpr int64_t kCudaContextBytes = int64_t{512} << 20;

// Of the library bytes: the workspace of attention's backward in the order of additions, and over
// the ranks that share a sequence, as the model takes it. 0 in fp32 and with documents, where our
// own kernels run.
int64_t AttentionBytes(const TrainerPlace& place);
// Of the library bytes: NCCL's communicators, the world's too, and its buffers between ranks that
// send to each other, which those of a context group do not through copy engines; 0 with one rank.
// Fewer thread blocks than NCCL's 32 (`thread_blocks`; 0 = those) take as much less.
int64_t CommunicatorBytes(const Mesh& mesh, int zero_shards, ContextMethod context,
                          bool copy_engines, int thread_blocks = 0);

// What CUDA's context, cuBLASLt, cuDNN and, with several ranks, NCCL take for themselves; 0 on the
// host. Measured on H200s (docs/benchmarks/h200-one-gpu.md, h200-layouts.md): 0.5 GiB of context
// and kernels, workspaces of products and those above.
int64_t LibraryBytes(const TrainerPlace& place, kernels::DeviceKind device);

// Exactly what Trainer::Make, with the same arguments, asks the device for, and what training asks
// the host for, within some KiB; makes neither. Requires: options that Trainer::Make accepts.
MemoryUse PredictMemory(const TrainerPlace& place, kernels::DeviceKind device);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_TRAIN_MEMORY_H_
