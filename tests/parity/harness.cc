#include "tests/parity/harness.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <thread>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "parallel/checkpoint/checkpoint.h"
#include "parallel/comm/communicator.h"
#include "parallel/comm/mesh_groups.h"
#include "parallel/pipeline/stages.h"
#include "parallel/train/checkpoint_names.h"

namespace muster::parallel::parity {
namespace {

class Recorder : public TrainerHooks {
 public:
  Recorder(RankResult& result, int64_t stop_after) : result_(result), stop_after_(stop_after) {}
  void OnStep(const StepReport& report) override {
    result_.losses.push_back(report.loss);
    result_.norms.push_back(report.gradient_norm);
    result_.reports.push_back(report);
    step_ = report.step;
  }
  void OnSaved(const SavedCheckpoint& saved) override {
    result_.saved.insert(result_.saved.begin(),
                         {saved.id, saved.result.directory, saved.result.manifest_checksum});
  }
  bool StopRequested() override { return stop_after_ > 0 && step_ + 1 >= stop_after_; }

 private:
  RankResult& result_;
  const int64_t stop_after_;
  int64_t step_ = 0;
};

}  // namespace

std::string Case::ToString() const {
  return absl::StrCat(model.family, " ", layout.degrees.ToString(), " zero ", layout.zero, "/",
                      layout.EffectiveShards(), " batch ", layout.global_batch, "/",
                      layout.micro_batch, " chunks ", layout.pipeline_chunks,
                      layout.sequence_parallel ? " sequence-parallel" : "",
                      tensor_weights.empty() ? "" : " uneven", overlap ? "" : " no-overlap",
                      reshard_after_forward ? "" : " no-reshard");
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
  const std::string prefix = directory_ + "/text";
  auto writer = *IndexedDatasetWriter::Create(*files_, prefix, TokenType::kU8);
  CHECK_OK(writer->Append(tokens));
  CHECK_OK(writer->EndDocument());
  CHECK_OK(writer->Finish());
  dataset_ = *IndexedDataset::Open(prefix);
  training_ =
      std::make_unique<Sampler>(*Sampler::Training({{dataset_.get(), 1}}, {kSequence, kVocab, 9}));
}

Harness::~Harness() { files_->RemoveTree(directory_).IgnoreError(); }

RankResult Harness::TrainRank(const Case& run, const AdamWConfig& optimizer, Communicator& world) {
  RankResult result;
  const auto device = kernels::MakeCpuDevice(1);
  const Mesh mesh = *Mesh::Make({.degrees = run.layout.degrees}, world.size());
  const PerAxis coordinate = mesh.CoordinateOf(world.rank());
  ModelParallel part = *StageParts(run.model, mesh.degree(Axis::kPipeline),
                                   run.layout.pipeline_chunks, coordinate[Axis::kPipeline]);
  part.tensor_rank = coordinate[Axis::kTensor];
  part.tensor_size = mesh.degree(Axis::kTensor);
  part.sequence_parallel = run.layout.sequence_parallel;
  part.tensor_weights = run.tensor_weights;
  const auto model = *MakeModel(run.model, part);
  const auto groups = *MeshGroups::Make(mesh, world, run.layout.EffectiveShards());
  TrainerOptions options;
  options.steps = run.steps;
  options.global_batch = run.layout.global_batch;
  options.micro_batch = run.layout.micro_batch;
  options.seed = run.seed;
  options.optimizer = optimizer;
  options.schedule = {Decay::kCosine, 5e-3, 5e-4, 5, 50};
  options.bucket_bytes = run.bucket_bytes;
  options.overlap = run.overlap;
  options.zero = run.layout.zero;
  options.reshard_after_forward = run.reshard_after_forward;
  options.resident_elements = run.resident_elements;
  options.pipeline_schedule = run.schedule;
  if (run.save_every > 0) {
    options.checkpoint_root = directory_ + "/checkpoints";
    options.checkpoint_every = run.save_every;
    options.checkpoint_keep = 100;
  }
  options.job = JobId(absl::StrCat("layouts-", runs_));
  options.epoch = Epoch(1);
  if (run.adjust) run.adjust(options);
  Recorder hooks(result, run.stop_after);
  auto trainer =
      Trainer::Make(options, *model, *device, *groups, *training_, nullptr, *files_, hooks);
  result.status = trainer.status();
  if (result.status.ok()) result.status = (*trainer)->Restore(run.restore);
  if (result.status.ok()) result.status = (*trainer)->Run().status();
  if (!result.status.ok()) {
    world.Abort(result.status);
    return result;
  }
  result.state_bytes = (*trainer)->state_bytes();
  result.reduced_bytes = groups->shard().bytes_sent();
  result.gathered_bytes = groups->gather().bytes_sent();
  result.replica_bytes = groups->replicate().bytes_sent();
  return result;
}

std::vector<RankResult> Harness::Train(const Case& run, const AdamWConfig& optimizer) {
  ++runs_;
  const PerAxis& degrees = run.layout.degrees;
  int ranks = 1;
  for (const Axis axis : kAxes) ranks *= degrees[axis];
  auto world = MakeLocalCommunicators(ranks, absl::Seconds(120));
  if (run.wrap) {
    for (auto& communicator : world) communicator = run.wrap(std::move(communicator));
  }
  std::vector<RankResult> results(ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] { results[rank] = TrainRank(run, optimizer, *world[rank]); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const RankResult& result : results) {
    if (run.may_fail) break;
    EXPECT_TRUE(result.status.ok()) << run.ToString() << ": " << result.status;
    EXPECT_EQ(result.losses, results[0].losses) << run.ToString();
    EXPECT_EQ(result.norms, results[0].norms) << run.ToString();
  }
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

ModelDescription SmallGpt2() {
  ModelDescription description;
  description.family = "gpt2";
  description.sizes = {{"layers", 3},
                       {"hidden", 28},
                       {"heads", 4},
                       {"vocab", Harness::kVocab},
                       {"sequence_length", Harness::kSequence}};
  return description;
}

ModelDescription SmallLlama() {
  ModelDescription description;
  description.family = "llama";
  description.sizes = {{"layers", 3},
                       {"hidden", 24},
                       {"heads", 6},
                       {"kv_heads", 2},
                       {"ffn", 44},
                       {"vocab", Harness::kVocab},
                       {"sequence_length", Harness::kSequence}};
  description.numbers = {{"norm_epsilon", 1e-5}, {"rope_theta", 10000}};
  description.flags = {{"tied", false}};
  return description;
}

}  // namespace muster::parallel::parity
