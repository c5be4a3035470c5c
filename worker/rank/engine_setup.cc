#include "worker/rank/engine_setup.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "parallel/data/dataset_description.h"
#include "parallel/train/checkpoint_names.h"
#include "parallel/train/failure.h"
#include "proto/spec/spec.h"
#include "worker/rank/engine_spec.h"
#include "worker/rank/memory_check.h"

namespace muster::worker {
namespace {

using parallel::FailureDomain;
using parallel::Mark;

absl::Status Misconfigured(const std::string& message) {
  return Mark(absl::InvalidArgumentError(message), FailureDomain::kConfiguration);
}

// Refuses a data set with ids that the model has no row for, or of another tokenizer than the data
// sets before or `wanted`. Nothing is known of data sets without a description, nor where the files
// under its prefix were replaced by others. `field` names the data set in errors.
absl::Status CheckTokens(FileSystem& files, const parallel::IndexedDataset& dataset,
                         const std::string& field, int64_t vocab, const std::string& wanted,
                         EngineSetup& setup) {
  auto description = parallel::ReadDescription(files, dataset.prefix());
  if (!description.ok()) return Mark(description.status(), FailureDomain::kData);
  if (!description->has_value() || (*description)->tokens != dataset.tokens() ||
      (*description)->documents != dataset.documents()) {
    if (wanted.empty()) return absl::OkStatus();
    return Misconfigured(absl::StrFormat(
        "%s (%s) does not say with which tokenizer it was made, but engine.data.tokenizer asks for "
        "%s",
        field, dataset.prefix(), wanted));
  }
  const parallel::DatasetDescription& found = **description;
  if (absl::Status use = CheckUse(found, field, dataset.prefix(), vocab, wanted); !use.ok()) {
    return Mark(std::move(use), FailureDomain::kConfiguration);
  }
  auto file = parallel::ReadDatasetTokenizer(files, dataset.prefix(), found);
  if (!file.ok()) return Mark(Annotate(file.status(), field), FailureDomain::kData);
  std::optional<DataTokenizer>& first = setup.tokenizer;
  if (!first.has_value()) {
    first = {found.tokenizer, found.tokenizer_sha256, *std::move(file), field};
  } else if (first->sha256 != found.tokenizer_sha256) {
    return Misconfigured(
        absl::StrFormat("%s (%s) has ids of the tokenizer %s (SHA-256 '%s'), but %s of %s ('%s')",
                        field, dataset.prefix(), found.tokenizer, found.tokenizer_sha256,
                        first->field, first->name, first->sha256));
  }
  return absl::OkStatus();
}

// Opens the data sets of one list of the spec, whose name there is `field`.
absl::StatusOr<std::vector<parallel::SampleSource>> OpenSources(
    FileSystem& files, const v1::JobSpec& spec,
    const google::protobuf::RepeatedPtrField<v1::DataSource>& list, const std::string& field,
    EngineSetup& setup) {
  std::vector<parallel::SampleSource> sources;
  for (int i = 0; i < list.size(); ++i) {
    auto dataset = parallel::IndexedDataset::Open(ResolvePath(spec, list[i].path()));
    if (!dataset.ok()) {
      return Mark(Annotate(dataset.status(), absl::StrFormat("%s[%d].path", field, i)),
                  FailureDomain::kData);
    }
    RETURN_IF_ERROR(CheckTokens(files, **dataset, absl::StrFormat("%s[%d].path", field, i),
                                spec.engine().model().vocab(), spec.engine().data().tokenizer(),
                                setup));
    sources.push_back({dataset->get(), list[i].weight()});
    setup.datasets.push_back(*std::move(dataset));
  }
  return sources;
}

absl::Status OpenData(FileSystem& files, const v1::JobSpec& spec, EngineSetup& setup) {
  const v1::DataSpec& data = spec.engine().data();
  parallel::SamplerOptions options;
  options.sequence_length = spec.engine().model().sequence_length();
  options.vocab = spec.engine().model().vocab();
  options.seed = spec.engine().training().seed();
  ASSIGN_OR_RETURN(auto training,
                   OpenSources(files, spec, data.train(), "engine.data.train", setup));
  auto sampler = parallel::Sampler::Training(std::move(training), options);
  if (!sampler.ok()) {
    return Mark(Annotate(sampler.status(), "engine.data.train"), FailureDomain::kData);
  }
  setup.training = std::make_unique<parallel::Sampler>(*std::move(sampler));
  if (data.validation().empty()) return absl::OkStatus();
  ASSIGN_OR_RETURN(auto validation,
                   OpenSources(files, spec, data.validation(), "engine.data.validation", setup));
  sampler = parallel::Sampler::Evaluation(std::move(validation), options);
  if (!sampler.ok()) {
    return Mark(Annotate(sampler.status(), "engine.data.validation"), FailureDomain::kData);
  }
  setup.validation = std::make_unique<parallel::Sampler>(*std::move(sampler));
  return absl::OkStatus();
}

// Writes a file and removes it: permissions alone do not prove that a network file system accepts
// it.
absl::Status CheckCheckpointPath(const v1::RankAssignment& assignment, FileSystem& files) {
  const std::string root = ResolvePath(assignment.spec(), assignment.spec().checkpoint().path());
  const std::string directory = absl::StrCat(root, "/", assignment.job_id());
  const std::string probe =
      absl::StrFormat("%s/.writable.e%d.rank-%d", directory, assignment.epoch(), assignment.rank());
  absl::Status status = files.MakeDirectory(directory);
  if (status.ok()) status = files.WriteAtomically(probe, "");
  if (status.ok()) status = files.RemoveFile(probe);
  return Mark(Annotate(status, absl::StrCat("checkpoint.path: ", root, " is not writable")),
              FailureDomain::kStorage);
}

}  // namespace

absl::StatusOr<std::unique_ptr<kernels::Device>> MakeDevice(const v1::RankAssignment& assignment,
                                                            std::function<void()> on_measuring) {
  if (assignment.spec().resources().device() != v1::DEVICE_KIND_CUDA) {
    return kernels::MakeCpuDevice(std::max(1, assignment.threads()));
  }
  int ordinal = 0;
  const std::string& name = assignment.device();
  if (!absl::StartsWith(name, "cuda:") || !absl::SimpleAtoi(name.substr(5), &ordinal)) {
    return Misconfigured(absl::StrCat(
        "resources.device: the job wants cuda, but the rank was given the device '", name, "'"));
  }
  kernels::CudaOptions options;
  options.tf32 = assignment.spec().engine().training().precision() == v1::PRECISION_TF32;
  options.plan_cache = assignment.cache_directory();
  options.on_measuring = std::move(on_measuring);
  auto device = kernels::MakeCudaDevice(ordinal, options);
  if (!device.ok()) {
    return Mark(Annotate(device.status(), absl::StrCat("resources.device: ", name)),
                absl::IsResourceExhausted(device.status()) ? FailureDomain::kMemory
                                                           : FailureDomain::kDevice);
  }
  return device;
}

absl::StatusOr<EngineSetup> SetUpEngine(const v1::RankAssignment& given, FileSystem& files,
                                        std::optional<kernels::DeviceMemory> memory,
                                        std::function<void()> on_measuring) {
  // The coordinator has applied the defaults; specs of tests may lack them. Twice is once.
  v1::RankAssignment assignment = given;
  spec::ApplyDefaults(*assignment.mutable_spec());
  if (absl::Status status = spec::Validate(assignment.spec()); !status.ok()) {
    return Mark(std::move(status), FailureDomain::kConfiguration);
  }
  if (assignment.world_size() != assignment.spec().resources().ranks()) {
    return Misconfigured(absl::StrFormat("resources.ranks: %d, but the rank was told of %d",
                                         assignment.spec().resources().ranks(),
                                         assignment.world_size()));
  }
  EngineSetup setup;
  ASSIGN_OR_RETURN(const SplitRun split, SplitOf(assignment.spec()));
  setup.mesh = split.mesh;
  setup.zero_shards = split.zero_shards;
  const parallel::PerAxis coordinate = setup.mesh->CoordinateOf(assignment.rank());
  ASSIGN_OR_RETURN(setup.device, MakeDevice(assignment, std::move(on_measuring)));
  ASSIGN_OR_RETURN(setup.model, BuildModel(assignment.spec(), coordinate));
  const v1::ModelSpec& model = assignment.spec().engine().model();
  if (!model.initialize_from().empty()) {
    ASSIGN_OR_RETURN(
        setup.initial_weights,
        InitialWeights::Open(files, ResolvePath(assignment.spec(), model.initialize_from()),
                             Describe(model)));
  }
  RETURN_IF_ERROR(OpenData(files, assignment.spec(), setup));
  if (assignment.spec().has_checkpoint()) {
    RETURN_IF_ERROR(CheckCheckpointPath(assignment, files));
  }
  setup.options = OptionsOf(assignment.spec());
  setup.options.job = JobId(assignment.job_id());
  setup.options.epoch = Epoch(assignment.epoch());
  setup.options.membership = std::max<uint32_t>(1, assignment.membership());
  setup.options.host_threads = std::max(1, assignment.threads());
  if (setup.tokenizer.has_value() && !setup.tokenizer->file.empty()) {
    setup.options.checkpoint_files[parallel::kTokenizerFile] = setup.tokenizer->file;
  }
  setup.memory = parallel::PredictMemory(
      {.options = setup.options,
       .model = *setup.model,
       .mesh = *setup.mesh,
       .coordinate = coordinate,
       .zero_shards = setup.zero_shards,
       .sequence_length = setup.training->sequence_length(),
       .validation_samples =
           setup.validation == nullptr ? 0 : setup.validation->samples_per_epoch()},
      setup.device->kind());
  RETURN_IF_ERROR(CheckMemory(assignment, setup.memory, coordinate, *setup.device, memory));
  return setup;
}

}  // namespace muster::worker
