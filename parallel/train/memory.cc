#include "parallel/train/memory.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/check.h"
#include "kernels/attention/attention_workspace.h"
#include "kernels/optimizer/optimizer.h"
#include "kernels/optimizer/step_math.h"
#include "kernels/ssm/ssd_workspace.h"
#include "parallel/comm/mesh_groups.h"
#include "parallel/model/families/family.h"
#include "parallel/model/mamba2_mixer.h"
#include "parallel/optim/gradient_compressor.h"
#include "parallel/optim/gradient_reducer.h"
#include "parallel/optim/optimizer.h"
#include "parallel/optim/optimizer_offload.h"
#include "parallel/pipeline/executor.h"
#include "parallel/train/batch_loader.h"

namespace muster::parallel {
namespace {

using kernels::DeviceKind;
using kernels::DType;

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kFloat = sizeof(float);
// Steps that the host may enqueue before it has read the outcome of the oldest one.
constexpr int64_t kStepsAhead = 2;
// 64 MiB: larger copies are no faster per byte, and take longer to pin.
constexpr int64_t kSaveElementsAtOnce = int64_t{16} << 20;

int GradientRanks(const TrainerPlace& place) {
  return place.mesh.degree(Axis::kData) * place.mesh.degree(Axis::kContext);
}

DType ComputeDtype(Precision precision) {
  switch (precision) {
    case Precision::kFp32:
    case Precision::kTf32:
      return DType::kF32;
    case Precision::kBf16:
      return DType::kBF16;
    case Precision::kFp16:
      return DType::kF16;
  }
  CHECK(false) << "precision " << static_cast<int>(precision);
  return DType::kF32;
}

std::string Amount(int64_t bytes) {
  const auto amount = static_cast<double>(bytes);
  if (bytes >= 1024 * kMiB) return absl::StrFormat("%.2f GiB", amount / (1024.0 * kMiB));
  return absl::StrFormat("%.1f MiB", amount / kMiB);
}

int64_t Sum(const std::vector<MemoryUse::Category>& categories) {
  int64_t bytes = 0;
  for (const MemoryUse::Category& category : categories) bytes += category.bytes;
  return bytes;
}

// Largest first, without categories below a thousandth of all.
std::string ToText(std::vector<MemoryUse::Category> categories) {
  std::stable_sort(categories.begin(), categories.end(),
                   [](const auto& a, const auto& b) { return a.bytes > b.bytes; });
  std::vector<std::string> texts;
  for (const MemoryUse::Category& category : categories) {
    if (category.bytes > 0 && category.bytes >= Sum(categories) / 1000) {
      texts.push_back(category.name + " " + Amount(category.bytes));
    }
  }
  return absl::StrJoin(texts, ", ");
}

int64_t CommunicationBytes(const TrainerPlace& place, const FlatLayout& layout, DeviceKind device) {
  const GradientReducerOptions reducing = {.wire = place.options.gradient_wire};
  const SumBytes sums = SumBytesOf(place, layout, device);
  int64_t bytes = sums.gradients + sums.tensor +
                  static_cast<int64_t>(GradientGroupsOf(place).size()) *
                      GradientReducer::Bytes(layout, reducing) +
                  SharedTableBytes(place, layout);
  if (place.options.compression.method != CompressionMethod::kNone) {
    bytes += GradientCompressor::ExchangeBytes(place.options.compression, place.model.parameters(),
                                               layout, GradientRanks(place));
  }
  return bytes;
}

}  // namespace

int64_t GlobalMicroBatches(const TrainerPlace& place) {
  return place.options.global_batch / place.options.micro_batch;
}

int64_t MicroBatches(const TrainerPlace& place) {
  return GlobalMicroBatches(place) / place.mesh.degree(Axis::kData);
}

FlatLayoutOptions LayoutOptionsOf(const TrainerPlace& place) {
  const TrainerOptions& options = place.options;
  FlatLayoutOptions layout;
  layout.bucket_bytes = options.bucket_bytes;
  layout.shards = place.zero_shards;
  layout.replicas = GradientRanks(place) / place.zero_shards;
  layout.by_block = options.zero >= 2;
  layout.resident_elements = options.resident_elements;
  for (const BlockRange& group : GradientGroupsOf(place)) {
    layout.part_begins.push_back(group.begin);
  }
  if (options.compression.method != CompressionMethod::kNone) {
    layout.compressed = [compression = options.compression](const Parameter& parameter) {
      return Compresses(compression, parameter);
    };
  }
  return layout;
}

std::vector<BlockRange> GradientGroupsOf(const TrainerPlace& place) {
  return GradientGroups(PipelineShapeOf(place), place.model, place.coordinate[Axis::kPipeline]);
}

bool SharesGradients(const TrainerPlace& place) {
  return MicroBatches(place) == 1 && place.mesh.degree(Axis::kPipeline) == 1 &&
         place.model.parts().size() == 1 &&
         place.options.compression.method == CompressionMethod::kNone &&
         !place.model.shape().split_backward && !place.model.offloads();
}

bool SumsInGemms(const TrainerPlace& place, DeviceKind device) {
  const TrainerOptions& options = place.options;
  return device == DeviceKind::kCuda && !place.model.shape().deterministic &&
         !place.model.shape().split_backward && place.mesh.world_size() == 1 &&
         MicroBatches(place) == 1 && options.zero < 2 && options.offload_optimizer == 0 &&
         options.gradient_wire == DType::kF32 &&
         options.compression.method == CompressionMethod::kNone;
}

FlatBuffersOptions StorageOptionsOf(const TrainerPlace& place) {
  FlatBuffersOptions storage;
  storage.share_gradients = SharesGradients(place);
  storage.gradient_levels = GradientReducer::Levels(MicroBatches(place), place.options.zero,
                                                    place.options.chain_micro_batches);
  storage.compute = ComputeDtype(place.options.precision);
  storage.zero = place.options.zero;
  storage.reshard_after_forward = place.options.reshard_after_forward;
  if (place.options.offload_optimizer > 0) {
    const FlatLayout layout(place.model.parameters(), LayoutOptionsOf(place));
    storage.host_buckets = HostBuckets(layout, place.options.offload_optimizer);
  }
  return storage;
}

PipelineShape PipelineShapeOf(const TrainerPlace& place) {
  PipelineShape shape;
  shape.schedule = place.options.pipeline_schedule;
  shape.stages = place.mesh.degree(Axis::kPipeline);
  shape.micro_batches = static_cast<int>(MicroBatches(place));
  shape.chunks = static_cast<int>(place.model.parts().size());
  return shape;
}

BatchShape BatchShapeOf(const TrainerPlace& place) {
  return {.batch = place.options.micro_batch,
          .sequence = place.sequence_length / place.mesh.degree(Axis::kContext),
          .activation = ComputeDtype(place.options.precision)};
}

bool AlignsWorkspaces(const TrainerPlace& place, DeviceKind device) {
  return device == DeviceKind::kCuda && place.options.copy_engines &&
         place.mesh.degree(Axis::kTensor) > 1;
}

int64_t PlanWorkspace(const TrainerPlace& place, kernels::Arena& arena) {
  GradientOverlay overlay;
  const bool shares = SharesGradients(place);
  if (shares) {
    const FlatLayout layout(place.model.parameters(), LayoutOptionsOf(place));
    overlay = FlatBuffers::OverlayOf(layout, place.model.parameters(), StorageOptionsOf(place));
  }
  return PipelineExecutor::PlanMemory(MakePipelinePlan(PipelineShapeOf(place)), place.model,
                                      place.coordinate[Axis::kPipeline], arena, BatchShapeOf(place),
                                      shares ? &overlay : nullptr);
}

std::vector<int64_t> WorkspaceAllocations(const TrainerPlace& place) {
  kernels::Arena arena;
  PlanWorkspace(place, arena);
  return arena.allocations();
}

std::vector<int64_t> MostOfEach(const std::vector<std::vector<int64_t>>& ranks) {
  // The least share that a rank must need of what it would take.
  constexpr double kNeeded = 0.75;
  std::vector<int64_t> most;
  for (const std::vector<int64_t>& sizes : ranks) {
    if (most.empty()) most = sizes;
    if (sizes.size() != most.size()) return {};
    for (size_t i = 0; i < most.size(); ++i) most[i] = std::max(most[i], sizes[i]);
  }
  const double all = std::accumulate(most.begin(), most.end(), 0.0);
  for (const std::vector<int64_t>& sizes : ranks) {
    if (std::accumulate(sizes.begin(), sizes.end(), 0.0) < kNeeded * all) return {};
  }
  return most;
}

int64_t StepValues(const TrainerPlace& place) {
  return 2 * GlobalMicroBatches(place) + 1 + 2 * place.mesh.world_size();
}

int64_t ValueSlots(const TrainerPlace& place) {
  if (place.validation_samples == 0) return StepValues(place);
  return std::max(StepValues(place),
                  2 * (place.validation_samples / place.options.micro_batch + 1));
}

int64_t PositionBytes(const TrainerPlace& place) {
  const int context = place.mesh.degree(Axis::kContext);
  if (context == 1) return 0;
  return place.sequence_length / context * static_cast<int64_t>(sizeof(int32_t));
}

int64_t SharedTableBytes(const TrainerPlace& place, const FlatLayout& layout) {
  const ParameterRegistry& parameters = place.model.parameters();
  for (ParameterId id = 0; id < parameters.size(); ++id) {
    if (!parameters.at(id).on_two_stages) continue;
    return layout.buckets()[layout.bucket_of(id)].range.size() / layout.shards() * kFloat;
  }
  return 0;
}

// One buffer holds a whole sum where it can: a sum in several slices would wait for the GEMMs
// beside it once per slice.
SumBytes SumBytesOf(const TrainerPlace& place, const FlatLayout& layout, DeviceKind device) {
  constexpr int64_t kMost = 1024 * kMiB;
  SumBytes bytes;
  if (device != DeviceKind::kCuda || !place.options.copy_engines || place.mesh.world_size() == 1) {
    return bytes;
  }
  // Parts of a sum are rounded up to whole lines of memory, hence the extra MiB.
  const auto buffer = [kMost](int64_t largest) {
    return largest == 0 ? 0 : std::min(largest, kMost) + kMiB;
  };
  if (GradientRanks(place) > 1 && place.options.gradient_wire == DType::kF32) {
    int64_t largest = 0;
    for (const FlatLayout::Bucket& bucket : layout.buckets()) {
      largest = std::max(largest, bucket.range.size() * kFloat);
    }
    bytes.gradients = buffer(largest);
  }
  const std::map<std::string, int64_t>& sizes = place.model.description().sizes;
  if (const auto hidden = sizes.find("hidden");
      place.mesh.degree(Axis::kTensor) > 1 && hidden != sizes.end()) {
    const BatchShape shape = BatchShapeOf(place);
    bytes.tensor = buffer(shape.batch * shape.sequence * hidden->second * SizeOf(shape.activation));
  }
  return bytes;
}

SaveElements SaveElementsOf(const FlatLayout& layout, int replicas, bool compressed) {
  SaveElements elements;
  for (int i = 0; i < static_cast<int>(layout.buckets().size()); ++i) {
    const FlatLayout::Bucket& bucket = layout.buckets()[i];
    // Compression holds back elements of the whole bucket, not only of the own part.
    const int64_t whole = compressed && bucket.compressed ? bucket.range.size() : 0;
    elements.chunk = std::max({elements.chunk, layout.Part(i, 0).size() / replicas, whole});
  }
  elements.at_once = std::min(elements.chunk, kSaveElementsAtOnce);
  return elements;
}

int64_t StepOutcomeBytes() { return sizeof(kernels::StepOutcome) + 2 * kFloat; }

// On the host device a step has run when it has been enqueued, so there is nothing to be ahead of.
int64_t StepsUnderWay(DeviceKind device) {
  return device == DeviceKind::kCuda ? kStepsAhead + 1 : 1;
}

int64_t MemoryUse::device_bytes() const { return Sum(device); }
int64_t MemoryUse::host_bytes() const { return Sum(host); }

std::string MemoryUse::ToString() const { return ToText(device); }
std::string MemoryUse::HostText() const { return ToText(host); }

int64_t AttentionBytes(const TrainerPlace& place) {
  const Model::Shape& shape = place.model.shape();
  if (ComputeDtype(place.options.precision) == DType::kF32 || shape.documents) return 0;
  const AttentionSizes& attention = shape.attention;
  if (attention.heads == 0) return 0;
  int64_t heads = shape.own_heads, key_heads = shape.own_kv_heads;
  // Tokens of one call of the kernel.
  int64_t queries = BatchShapeOf(place).sequence, keys = queries;
  if (const int64_t context = place.mesh.degree(Axis::kContext); context > 1) {
    switch (shape.context_method) {
      case ContextMethod::kAllToAll: {
        const int groups = HeadGroups({.method = shape.context_method,
                                       .ranks = static_cast<int>(context),
                                       .batch = place.options.micro_batch,
                                       .sequence = place.sequence_length,
                                       .heads = heads,
                                       .key_heads = key_heads});
        heads = std::max<int64_t>(1, heads / context / groups);
        key_heads = std::max<int64_t>(1, key_heads / context / groups);
        queries = keys = place.sequence_length;
        break;
      }
      case ContextMethod::kRing:  // the largest call: one chunk of queries, the keys of one rank
        queries /= 2;
        break;
      case ContextMethod::kAllGather:  // the last chunk of a sequence sees all keys before its end
        queries /= 2;
        keys = place.sequence_length - queries;
        break;
    }
  }
  return kernels::AttentionWorkspaceBytes(place.options.micro_batch, heads, key_heads, queries,
                                          keys, attention.depth, shape.deterministic);
}

int64_t ScanBytes(const TrainerPlace& place) {
  const Model::Shape& shape = place.model.shape();
  if (shape.scan.heads == 0) return 0;
  const BatchShape batch = BatchShapeOf(place);
  const int64_t context = place.mesh.degree(Axis::kContext);
  const bool by_heads = context > 1 && shape.scan_method == ScanMethod::kAllToAll;
  const bool passes = context > 1 && !by_heads;
  const int64_t segments = passes ? 2 : 1;
  kernels::SsdShape scan;
  scan.samples = batch.batch * segments;
  scan.positions = batch.sequence / segments;
  if (by_heads) scan.positions *= context;
  scan.width = shape.scan.head_width;
  scan.columns = shape.scan.state;
  scan.chunk = kMamba2Chunk;
  scan.in_16_bits = ComputeDtype(place.options.precision) != DType::kF32;
  scan.states_given = passes;
  int64_t most = 0;
  for (const ScanPart& part : shape.own_scans) {
    const int64_t ranks = by_heads ? context : 1;  // that have a part of it
    scan.heads = std::max<int64_t>(1, part.heads / ranks);
    scan.groups = std::max<int64_t>(1, part.groups / ranks);
    most = std::max(most, kernels::SsdWorkspaceBytes(scan));
  }
  return most;
}

// Measured on four H200s (docs/benchmarks/method.md) with NCCL 2.28: a communicator takes
// 0.77 GiB when it is made and up to 0.2 GiB more with its first collectives. The first send or
// receive allocates buffers for 32 channels to that peer: 4 MiB per channel at the sender and 5.2
// at the receiver, 6 MiB each with headers and pages of 2 MiB. All of this is per channel, and a
// channel is a thread block: with 8 of them a communicator took 0.2 GiB.
int64_t CommunicatorBytes(const Mesh& mesh, int zero_shards, ContextMethod context,
                          bool copy_engines, int thread_blocks) {
  constexpr int64_t kChannels = 32;
  if (mesh.world_size() == 1) return 0;
  const int64_t channels =
      thread_blocks == 0 ? kChannels : std::min<int64_t>(thread_blocks, kChannels);
  const int64_t communicator = channels * 30 * kMiB, peer = channels * 12 * kMiB;
  // A rank of a ring or a pipeline has two neighbours; with two ranks they are the same rank.
  const auto neighbours = [](int ranks) { return std::min(ranks - 1, 2); };
  int peers = neighbours(mesh.degree(Axis::kPipeline));
  const int ranks = copy_engines ? 1 : mesh.degree(Axis::kContext);
  if (context == ContextMethod::kRing) peers += neighbours(ranks);
  if (context == ContextMethod::kAllToAll) peers += ranks - 1;
  const int communicators = 1 + MeshGroups::Count(mesh, zero_shards);  // with the world's
  return communicators * communicator + peers * peer;
}

int64_t LibraryBytes(const TrainerPlace& place, DeviceKind device) {
  if (device != DeviceKind::kCuda) return 0;
  constexpr int64_t kWorkspaces = 128 * kMiB;
  // State-space mixers that pass states only gather; an all-to-all has every rank as a peer.
  const Model::Shape& shape = place.model.shape();
  ContextMethod method =
      shape.attention.heads > 0 ? shape.context_method : ContextMethod::kAllGather;
  if (shape.scan.heads > 0 && shape.scan_method == ScanMethod::kAllToAll) {
    method = ContextMethod::kAllToAll;
  }
  return kCudaContextBytes + kWorkspaces +
         CommunicatorBytes(place.mesh, place.zero_shards, method, place.options.copy_engines,
                           place.options.nccl_thread_blocks);
}

MemoryUse PredictMemory(const TrainerPlace& place, DeviceKind device) {
  const TrainerOptions& options = place.options;
  const FlatLayout layout(place.model.parameters(), LayoutOptionsOf(place));
  const FlatBuffersOptions storage = StorageOptionsOf(place);
  const FlatBuffersBytes flat = FlatBuffers::Sizes(layout, storage);
  const bool compressed = options.compression.method != CompressionMethod::kNone;
  const int64_t residuals =
      compressed ? GradientCompressor::StateBytes(options.compression, layout) : 0;
  kernels::Arena arena;
  if (place.workspace != nullptr) arena.PadTo(*place.workspace);
  const int64_t offloaded = PlanWorkspace(place, arena);
  const auto workspace = [&](const char* category) {
    const auto found = arena.peak_by_category().find(category);
    return found == arena.peak_by_category().end() ? 0 : found->second;
  };
  const int64_t numbers = ValueSlots(place) * kFloat;
  const int64_t squares =
      SumsInGemms(place, device) ? GradientNorm::Bytes(place.model.parameters()) : 0;

  MemoryUse use;
  use.device = {{"parameters", flat.parameters},
                {"gathered", flat.gathered},
                {"master", flat.master},
                {"optimizer", flat.moments},
                {"gradients", flat.gradients + workspace("gradients")},
                {"communication", CommunicationBytes(place, layout, device)},
                {"residuals", residuals},
                {"inputs", workspace("inputs")},
                {"activations", workspace("activations")},
                {"logits", workspace("logits")},
                {"stages", workspace("stages")},
                {"scratch", workspace("scratch")},
                {"step", numbers + Optimizer::kBytes + squares + PositionBytes(place) +
                             (compressed ? kFloat : 0)},
                {"attention", device == DeviceKind::kCuda ? AttentionBytes(place) : 0},
                {"scan", device == DeviceKind::kCuda
                             ? std::max<int64_t>(0, ScanBytes(place) - AttentionBytes(place))
                             : 0},
                {"libraries", LibraryBytes(place, device)}};
  int64_t planned = 0;
  for (const auto& [category, bytes] : arena.peak_by_category()) planned += bytes;
  CHECK_EQ(planned, workspace("inputs") + workspace("activations") + workspace("logits") +
                        workspace("stages") + workspace("scratch") + workspace("gradients"))
      << "a category of the workspace is not listed";

  int64_t largest = 0;  // elements of a bucket
  for (const FlatLayout::Bucket& bucket : layout.buckets()) {
    largest = std::max(largest, bucket.range.size());
  }
  const SaveElements save = SaveElementsOf(layout, LayoutOptionsOf(place).replicas, compressed);
  use.host = {
      {"batches", BatchLoader::Bytes(options.micro_batch, place.sequence_length,
                                     place.model.shape().documents)},
      {"step", numbers + StepsUnderWay(device) * StepOutcomeBytes() +
                   static_cast<int64_t>(sizeof(kernels::StepState))},
      {"optimizer",
       FlatBuffers::HostBytes(layout, storage) + OptimizerOffload::HostBytes(layout, storage)},
      {"activations", offloaded},
      {"verify", options.verify_every > 0 ? largest * kFloat : 0},
      {"checkpoint", options.checkpoint_root.empty() ? 0 : kFloat * (save.chunk + save.at_once)}};
  return use;
}

}  // namespace muster::parallel
