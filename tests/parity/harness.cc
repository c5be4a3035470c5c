#include "tests/parity/harness.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <thread>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "parallel/checkpoint/checkpoint.h"
#include "parallel/comm/communicator.h"
#include "parallel/comm/mesh_groups.h"
#include "parallel/optim/flat_layout.h"
#include "parallel/pipeline/stages.h"
#include "parallel/train/checkpoint_names.h"
#include "parallel/train/memory.h"
#include "tests/support/key_value_store.h"

namespace muster::parallel::parity {
namespace {

// Also records the most host memory that the rank had while it saved a checkpoint.
class SaveWatcher : public Recorder {
 public:
  SaveWatcher(Recorded& recorded, const kernels::Device& device)
      : Recorder(recorded), device_(device) {}

  void OnSaved(const SavedCheckpoint& saved) override {
    host_bytes_ = std::max(host_bytes_, device_.host_allocated_bytes());
    Recorder::OnSaved(saved);
  }
  int64_t host_bytes() const { return host_bytes_; }

 private:
  const kernels::Device& device_;
  int64_t host_bytes_ = 0;
};

}  // namespace

int Case::ranks() const {
  int ranks = 1;
  for (const Axis axis : kAxes) ranks *= layout.degrees[axis];
  return ranks;
}

std::string Case::ToString() const {
  const PerAxis& degrees = layout.degrees;
  std::string name = model.family;
  for (const char* size : {"groups", "kv_heads", "mamba_groups"}) {
    const auto shared = model.sizes.find(size);
    if (shared != model.sizes.end()) absl::StrAppend(&name, " ", size, " ", shared->second);
  }
  for (const auto& [key, text] : model.texts) absl::StrAppend(&name, " ", text);
  return absl::StrCat(
      name, " ", degrees.ToString(), " zero ", layout.zero, "/", layout.EffectiveShards(),
      " batch ", layout.global_batch, "/", layout.micro_batch,
      degrees[Axis::kPipeline] > 1
          ? absl::StrCat(" ", Name(schedule), " chunks ", layout.pipeline_chunks)
          : "",
      degrees[Axis::kContext] > 1 ? absl::StrCat(" by ", Name(context_method)) : "",
      scan_method == ScanMethod::kAllToAll ? " scans by heads" : "",
      layout.sequence_parallel ? " sequence-parallel" : "", tensor_weights.empty() ? "" : " uneven",
      degrees[Axis::kTensor] > 1 ? absl::StrCat(" tensor-overlap ", Name(tensor_overlap)) : "",
      recompute == Recompute::kNone
          ? ""
          : (recompute == Recompute::kFull ? " recompute" : " recompute-selective"),
      recompute_blocks > 0 ? absl::StrCat(" of ", recompute_blocks, " blocks") : "",
      recompute_rest == Recompute::kSelective ? " the rest selective" : "",
      pipeline_blocks.empty() ? "" : absl::StrCat(" blocks ", absl::StrJoin(pipeline_blocks, ",")),
      order == MeshOptions().order
          ? ""
          : absl::StrCat(" order ", absl::StrJoin(order, "-",
                                                  [](std::string* out, Axis axis) {
                                                    absl::StrAppend(out, ShortName(axis));
                                                  })),
      documents ? " documents" : "", dropout > 0 ? absl::StrCat(" dropout ", dropout) : "",
      offload_activations ? " offload" : "",
      offload_optimizer > 0 ? absl::StrCat(" optimizer-offload ", offload_optimizer) : "",
      any_order ? " any-order" : "", overlap ? "" : " no-overlap",
      reshard_after_forward ? "" : " no-reshard", " seed ", seed);
}

absl::StatusOr<ModelParallel> PartOf(const Case& run, const PerAxis& coordinate) {
  const PerAxis& degrees = run.layout.degrees;
  ASSIGN_OR_RETURN(ModelParallel part,
                   StageParts(run.model, degrees[Axis::kPipeline], run.layout.pipeline_chunks,
                              coordinate[Axis::kPipeline]));
  if (!run.pipeline_blocks.empty()) {
    // The embedding and the head count as blocks.
    part.parts.clear();
    const auto parts = static_cast<int>(run.pipeline_blocks.size());
    for (int i = 0, begin = 0, end = 0; i < parts; ++i, begin = end) {
      end = begin + run.pipeline_blocks[i] + (i == 0 ? 1 : 0) + (i + 1 == parts ? 1 : 0);
      if (i % degrees[Axis::kPipeline] == coordinate[Axis::kPipeline]) {
        part.parts.push_back({begin, end});
      }
    }
  }
  part.tensor_rank = coordinate[Axis::kTensor];
  part.tensor_size = degrees[Axis::kTensor];
  part.sequence_parallel = run.layout.sequence_parallel;
  part.tensor_weights = run.tensor_weights;
  part.tensor_overlap = run.tensor_overlap;
  part.recompute = run.recompute;
  part.recompute_blocks = run.recompute_blocks;
  part.recompute_rest = run.recompute_rest;
  part.split_backward =
      run.schedule == PipelineSchedule::kZeroBubble && degrees[Axis::kPipeline] > 1;
  part.context_size = degrees[Axis::kContext];
  part.context_method = run.context_method;
  part.scan_method = run.scan_method;
  part.context_head_groups = run.context_head_groups;
  part.documents = run.documents;
  part.dropout = run.dropout;
  part.offload_activations = run.offload_activations;
  return part;
}

Harness::Harness(const std::vector<std::string>& files)
    : files_(PosixFileSystem()),
      directory_(absl::StrCat(::testing::TempDir(), "/muster-layouts-", getpid())) {
  CHECK_OK(files_->RemoveTree(directory_));
  CHECK_OK(files_->MakeDirectory(directory_));
  std::string text;
  for (const std::string& file : files) text += *files_->Read(file);
  if (files.empty()) text = *files_->Read(MUSTER_PARITY_TEXT);
  std::vector<int32_t> tokens;
  for (const char c : text) tokens.push_back(static_cast<unsigned char>(c) % kVocab);
  constexpr size_t kValidation = 900;
  const auto write = [&](const char* name, absl::Span<const int32_t> part) {
    const std::string prefix = absl::StrCat(directory_, "/", name);
    auto writer = *IndexedDatasetWriter::Create(*files_, prefix, TokenType::kU8);
    // Documents of 1 to 23 tokens.
    for (size_t begin = 0, size = 1; begin < part.size(); begin += size, size = size * 7 % 23 + 1) {
      CHECK_OK(writer->Append(part.subspan(begin, size)));
      CHECK_OK(writer->EndDocument());
    }
    CHECK_OK(writer->Finish());
    datasets_.push_back(*IndexedDataset::Open(prefix));
  };
  CHECK_GT(tokens.size(), 10 * kValidation);
  write("train", absl::MakeSpan(tokens).subspan(kValidation));
  write("validation", absl::MakeSpan(tokens).first(kValidation));
  const SamplerOptions sampling = {kSequence, kVocab, 9};
  training_ = std::make_unique<Sampler>(*Sampler::Training({{datasets_[0].get(), 1}}, sampling));
  validation_ =
      std::make_unique<Sampler>(*Sampler::Evaluation({{datasets_[1].get(), 1}}, sampling));
}

Harness::~Harness() { files_->RemoveTree(directory_).IgnoreError(); }

void Harness::LoseDisk(int host) {
  CHECK_OK(files_->RemoveTree(absl::StrCat(directory_, "/host-", host)));
}

TrainerOptions Harness::OptionsOf(const Case& run, const AdamWConfig& optimizer) const {
  TrainerOptions options;
  options.steps = run.steps;
  options.global_batch = run.layout.global_batch;
  options.micro_batch = run.layout.micro_batch;
  options.seed = run.seed;
  options.optimizer = optimizer;
  options.schedule = {Decay::kCosine, run.learning_rate, run.learning_rate / 10, 5, 50};
  options.bucket_bytes = run.bucket_bytes;
  options.overlap = run.overlap;
  options.chain_micro_batches = run.any_order;
  options.zero = run.layout.zero;
  options.reshard_after_forward = run.reshard_after_forward;
  options.resident_elements = run.resident_elements;
  options.pipeline_schedule = run.schedule;
  options.evaluate_every = run.evaluate_every;
  options.offload_optimizer = run.offload_optimizer;
  if (run.save_every > 0) {
    options.checkpoint_root = directory_ + "/checkpoints";
    options.checkpoint_every = run.save_every;
    options.checkpoint_keep = 100;
  }
  options.job = JobId(absl::StrCat("layouts-", runs_));
  options.epoch = Epoch(1);
  return options;
}

void Harness::UseHostOf(int rank, const std::vector<int>& hosts, TrainerOptions& options,
                        std::vector<RestoreCandidate>& restore) const {
  // All hosts use the same path, which is another directory on each of them.
  const std::string shared = directory_ + "/checkpoints";
  const std::string own = absl::StrCat(directory_, "/host-", hosts[rank]);
  if (!options.checkpoint_root.empty()) options.checkpoint_root = own;
  for (RestoreCandidate& candidate : restore) {
    const size_t end = candidate.directory.find('/', directory_.size() + 1);
    candidate.directory = own + candidate.directory.substr(end);
  }
  for (const int host : hosts) {
    options.checkpoint_groups.push_back(
        static_cast<int>(std::find(hosts.begin(), hosts.end(), host) - hosts.begin()));
  }
}

namespace {

// Training has allocated nothing on the device, and on the host keeps only what was predicted.
void ExpectPredictedMemory(const Trainer& trainer, const kernels::Device& device,
                           int64_t host_bytes_while_saving) {
  const MemoryUse predicted = trainer.PredictedMemory();
  EXPECT_EQ(predicted.device_bytes(), device.allocated_bytes());
  int64_t host = 0, saving = 0;
  for (const auto& [name, bytes] : predicted.host) {
    if (name == "checkpoint") saving = bytes;
    if (name != "verify" && name != "checkpoint") host += bytes;  // both are temporary
  }
  EXPECT_EQ(host, device.host_allocated_bytes());
  EXPECT_LE(host_bytes_while_saving, host + saving);
}

// What `trainer` holds, and what its rank has sent.
void CountBytes(const Trainer& trainer, MeshGroups& groups, RankResult& result) {
  result.state_bytes = trainer.state_bytes();
  result.host_state_bytes = trainer.host_state_bytes();
  result.reduced_bytes = groups.shard().bytes_sent();
  if (Communicator& all = groups.Along({Axis::kData, Axis::kContext});
      &all != &groups.shard() && &all != &groups.replicate()) {
    result.reduced_bytes += all.bytes_sent();
  }
  result.gathered_bytes = groups.gather().bytes_sent();
  result.replica_bytes = groups.replicate().bytes_sent();
  result.pipeline_bytes = groups.Along({Axis::kPipeline}).bytes_sent();
  result.context_bytes = groups.Along({Axis::kContext}).bytes_sent();
  result.tensor_bytes = groups.Along({Axis::kTensor}).bytes_sent();
  result.key_bytes = trainer.key_bytes_sent();
  result.world_bytes = groups.world().bytes_sent();
}

}  // namespace

RankResult Harness::TrainRank(const Case& run, const AdamWConfig& optimizer, Communicator& world) {
  SCOPED_TRACE(absl::StrCat(run.ToString(), ", rank ", world.rank()));
  RankResult result;
  const auto device = kernels::MakeCpuDevice(1);
  const Mesh mesh = *Mesh::Make({.degrees = run.layout.degrees, .order = run.order}, world.size());
  const auto part = PartOf(run, mesh.CoordinateOf(world.rank()));
  const auto model = part.ok() ? MakeModel(run.model, *part) : part.status();
  const auto groups = *MeshGroups::Make(mesh, world, run.layout.EffectiveShards());
  result.status = model.status();
  if (!result.status.ok()) {
    world.Abort(result.status);
    return result;
  }
  TrainerOptions options = OptionsOf(run, optimizer);
  std::vector<RestoreCandidate> restore = run.restore;
  if (!run.hosts.empty()) UseHostOf(world.rank(), run.hosts, options, restore);
  if (run.adjust) run.adjust(options);
  SaveWatcher hooks(result, *device);
  hooks.stop_after = run.stop_after;
  if (run.on_progress) {
    hooks.on_progress = [&](absl::string_view phase) { run.on_progress(world.rank(), phase); };
  }
  std::unique_ptr<FileSystem> wrapped;
  if (run.wrap_files) wrapped = run.wrap_files(world.rank(), *files_);
  auto trainer = Trainer::Make(options, **model, *device, *groups, *training_,
                               run.evaluate_every > 0 ? validation_.get() : nullptr,
                               wrapped == nullptr ? *files_ : *wrapped, hooks);
  result.status = trainer.status();
  if (trainer.ok()) {
    const MemoryUse predicted = (*trainer)->PredictedMemory();
    EXPECT_EQ(predicted.device_bytes(), device->allocated_bytes()) << predicted.ToString();
  }
  if (result.status.ok()) result.status = (*trainer)->Restore(restore);
  if (result.status.ok()) result.status = (*trainer)->Run().status();
  if (!result.status.ok()) {
    world.Abort(result.status);
    return result;
  }
  ExpectPredictedMemory(**trainer, *device, hooks.host_bytes());
  CountBytes(**trainer, *groups, result);
  result.predicted = PredictVolume({.options = options,
                                    .model = **model,
                                    .mesh = mesh,
                                    .coordinate = mesh.CoordinateOf(world.rank()),
                                    .zero_shards = run.layout.EffectiveShards(),
                                    .sequence_length = kSequence},
                                   *part, device->kind());
  return result;
}

std::vector<RankResult> Harness::Train(const Case& run, const AdamWConfig& optimizer) {
  ++runs_;
  testing::MemoryKeyValueStore store;
  auto world = MakeLocalCommunicators(run.ranks(), run.collective_timeout);
  std::vector<RankResult> results(run.ranks());
  std::vector<std::thread> threads;
  for (int rank = 0; rank < run.ranks(); ++rank) {
    threads.emplace_back([&, rank] {
      std::unique_ptr<Communicator>& communicator = world[rank];
      if (run.tcp) communicator = *MakeTcpCommunicator(store, rank, run.ranks(), TcpOptions());
      if (run.wrap) communicator = run.wrap(std::move(communicator));
      results[rank] = TrainRank(run, optimizer, *communicator);
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (!run.may_fail) ExpectAgreement(run, results);
  return results;
}

void Harness::ExpectAgreement(const Case& run, const std::vector<RankResult>& results) {
  for (const RankResult& result : results) {
    EXPECT_TRUE(result.status.ok()) << run.ToString() << ": " << result.status;
    EXPECT_EQ(result.losses, results[0].losses) << run.ToString();
    EXPECT_EQ(result.norms, results[0].norms) << run.ToString();
  }
}

std::vector<std::vector<RankResult>> Harness::TrainOnOnePool(const std::vector<Case>& runs) {
  ++runs_;
  std::vector<std::vector<RankResult>> results;
  std::vector<int> model_of_rank;
  for (const Case& run : runs) {
    model_of_rank.insert(model_of_rank.end(), run.ranks(), static_cast<int>(results.size()));
    results.emplace_back(run.ranks());
  }
  const auto ranks = static_cast<int>(model_of_rank.size());
  const auto pool = MakeLocalCommunicators(ranks, absl::Seconds(120));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      const int model = model_of_rank[rank];
      const auto world = *pool[rank]->Split(model, rank, "model");
      results[model][world->rank()] = TrainRank(runs[model], AdamWConfig(), *world);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t i = 0; i < runs.size(); ++i) ExpectAgreement(runs[i], results[i]);
  return results;
}

std::vector<RankResult> Harness::Train(const Case& run) { return Train(run, AdamWConfig()); }

Tensors Harness::Read(const std::vector<RankResult>& results, const std::string& prefix) {
  Tensors tensors;
  if (results[0].saved.empty()) {
    ADD_FAILURE() << "nothing was saved";
    return tensors;
  }
  auto reader = CheckpointReader::Open(*files_, results[0].saved[0].directory, Verify::kFull);
  CHECK_OK(reader);
  for (const auto& [name, info] : (*reader)->tensors()) {
    const bool state = absl::StartsWith(name, "optimizer.");
    if (prefix.empty() ? state : !absl::StartsWith(name, prefix)) continue;
    const Box whole = Box::Whole(info.shape);
    std::vector<float>& values = tensors[name.substr(prefix.size())];
    values.resize(whole.elements());
    CHECK_OK((*reader)->Read(name, info.dtype, whole, values.data()));
  }
  return tensors;
}

Tensors Harness::Weights(Case run) {
  run.save_every = run.steps;
  return Read(Train(run), "");
}

Tensors Harness::FirstGradients(Case run) {
  run.steps = run.save_every = 1;
  AdamWConfig optimizer;
  optimizer.beta1 = 0;
  optimizer.clip_norm = 0;
  return Read(Train(run, optimizer), kFirstMomentPrefix);
}

ModelDescription SmallGpt2(int layers) {
  ModelDescription description;
  description.family = "gpt2";
  description.sizes = {{"layers", layers},
                       {"hidden", 44},
                       {"heads", 4},
                       {"vocab", Harness::kVocab},
                       {"sequence_length", Harness::kSequence}};
  return description;
}

ModelDescription SmallLlama(int layers) {
  ModelDescription description;
  description.family = "llama";
  description.sizes = {{"layers", layers},
                       {"hidden", 48},
                       {"heads", 12},
                       {"kv_heads", 4},
                       {"ffn", 84},
                       {"vocab", Harness::kVocab},
                       {"sequence_length", Harness::kSequence}};
  description.numbers = {{"norm_epsilon", 1e-5}, {"rope_theta", 10000}};
  description.flags = {{"tied", false}};
  return description;
}

ModelDescription SmallMamba2(int layers) {
  ModelDescription description;
  description.family = "mamba2";
  description.sizes = {{"layers", layers},
                       {"hidden", 44},
                       {"heads", 6},
                       {"head_width", 10},
                       {"groups", 2},
                       {"state", 12},
                       {"taps", 4},
                       {"vocab", Harness::kVocab},
                       {"sequence_length", Harness::kSequence}};
  description.numbers = {{"norm_epsilon", 1e-5}};
  description.flags = {{"tied", true}};
  return description;
}

ModelDescription SmallHybrid(int layers, bool llama) {
  constexpr std::array<const char*, 5> kBlocks = {"M-", "*-", "M", "*", "M-"};
  std::string pattern;
  for (int i = 0; i < layers; ++i) pattern += kBlocks[i % kBlocks.size()];
  ModelDescription description;
  description.family = "hybrid";
  description.texts = {{"pattern", pattern}, {"mlp", llama ? "swiglu" : "relu2"}};
  description.sizes = {{"layers", layers},         {"hidden", 48},
                       {"mamba_heads", 6},         {"mamba_head_width", 10},
                       {"mamba_groups", 2},        {"mamba_state", 12},
                       {"mamba_taps", 4},          {"ffn", 84},
                       {"vocab", Harness::kVocab}, {"sequence_length", Harness::kSequence}};
  description.numbers = {{"norm_epsilon", 1e-5}, {"mamba_step_min", 0.002}};
  description.flags = {{"tied", false}};
  if (layers == 1) return description;
  description.sizes["heads"] = 6;
  description.sizes["kv_heads"] = 2;
  description.sizes["head_width"] = 12;
  description.flags["rotary"] = llama;
  if (llama) description.numbers["rope_theta"] = 10000;
  return description;
}

Case Data(int ranks, int zero, int shards) {
  Case run;
  run.model = SmallGpt2();
  run.layout.degrees = PerAxis(1, ranks, 1, 1);
  run.layout.zero = zero;
  run.layout.zero_shards = shards;
  run.layout.global_batch = 16;
  run.layout.micro_batch = 2;
  run.steps = 20;
  return run;
}

Elements Count(const Case& run) {
  const auto model = *MakeModel(run.model);
  const int shards = run.layout.EffectiveShards();
  const FlatLayout layout(model->parameters(),
                          {.bucket_bytes = run.bucket_bytes,
                           .shards = shards,
                           .replicas = run.layout.degrees[Axis::kData] / shards,
                           .by_block = run.layout.zero >= 2,
                           .resident_elements = run.resident_elements});
  Elements elements;
  elements.all = layout.elements();
  for (const FlatLayout::Bucket& bucket : layout.buckets()) {
    if (bucket.block < 0) continue;
    ++elements.units;
    elements.blocks += bucket.range.size();
    elements.largest = std::max(elements.largest, bucket.range.size());
  }
  return elements;
}

void ExpectClose(const Tensors& expected, const Tensors& actual, double tolerance) {
  ASSERT_EQ(actual.size(), expected.size());
  for (const auto& [name, values] : actual) {
    ASSERT_EQ(expected.count(name), 1u) << name;
    const std::vector<float>& reference = expected.at(name);
    ASSERT_EQ(values.size(), reference.size()) << name;
    double square = 0, difference = 0;
    for (size_t i = 0; i < values.size(); ++i) {
      square += static_cast<double>(reference[i]) * reference[i];
      difference += std::pow(static_cast<double>(values[i]) - reference[i], 2);
    }
    EXPECT_LE(std::sqrt(difference), tolerance * std::sqrt(square) + 1e-8) << name;
  }
}

}  // namespace muster::parallel::parity
