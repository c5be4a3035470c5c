// Computes what tests/interop/gradients_peer.py and curve_peer.py compare with PyTorch.
//
//   interop_model_peer gradients FOLDER BATCH.json OUT   writes, of the Hugging Face model FOLDER,
//       OUT/logits.f32 (tokens x vocabulary), and OUT itself, a model folder that holds the
//       gradient of the mean loss in the place of every weight, and OUT/loss.json. BATCH.json has
//       batch, sequence, tokens and targets (batch x sequence each; a target < 0 is masked)
//   interop_model_peer batches DATASET OUT   writes what a job would train on, in its order: i32,
//       tokens and then targets (steps x batch x sequence each)
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/file_system.h"
#include "base/status_macros.h"
#include "kernels/arena.h"
#include "kernels/device/device.h"
#include "kernels/low_precision.h"
#include "kernels/memory/memory.h"
#include "kernels/tensor.h"
#include "parallel/data/sampler.h"
#include "parallel/interop/hugging_face.h"
#include "parallel/optim/flat_buffers.h"
#include "parallel/optim/flat_layout.h"

namespace muster {
namespace {

using kernels::DType;
using kernels::Tensor;
using nlohmann::json;
using parallel::Box;

struct Arguments {
  std::string folder, batch, out, dataset;
  std::string device = "cpu", dtype = "fp32";
  int64_t sequence = 0, vocab = 0, samples = 0, steps = 0;
  uint64_t seed = 0;
};

class Model {
 public:
  static absl::StatusOr<std::unique_ptr<Model>> Make(const Arguments& arguments, FileSystem& files,
                                                     int64_t batch, int64_t sequence) {
    auto model = std::make_unique<Model>();
    if (arguments.device == "cuda") {
      ASSIGN_OR_RETURN(model->device_, kernels::MakeCudaDevice(0));
    } else {
      model->device_ = kernels::MakeCpuDevice(2);
    }
    ASSIGN_OR_RETURN(model->stream_, model->device_->MakeStream());
    ASSIGN_OR_RETURN(model->folder_, parallel::HuggingFaceFolder::Open(files, arguments.folder));
    const parallel::ParameterRegistry& parameters = model->folder_->model().parameters();
    model->layout_ = std::make_unique<parallel::FlatLayout>(parameters, int64_t{4} << 20, 1);
    const DType dtype = arguments.dtype == "bf16" ? DType::kBF16 : DType::kF32;
    ASSIGN_OR_RETURN(model->buffers_,
                     parallel::FlatBuffers::Make(*model->device_, *model->stream_, parameters,
                                                 *model->layout_, {.compute = dtype}));
    model->shape_ = {
        .batch = batch, .sequence = sequence, .activation = dtype, .head_tokens = batch * sequence};
    RETURN_IF_ERROR(model->Load());
    model->model().TakeWorkspace(model->arena_, model->shape_);
    RETURN_IF_ERROR(model->arena_.Commit(*model->device_));
    model->workspace_ = model->model().TakeWorkspace(model->arena_, model->shape_);
    return model;
  }

  const parallel::Model& model() const { return folder_->model(); }

  // Returns logits [tokens, vocabulary], row-major.
  absl::StatusOr<std::vector<float>> Logits(std::vector<int32_t>& tokens) {
    kernels::Copy(*stream_, Whole(tokens), workspace_.batch.tokens);
    model().Forward({.stream = *stream_,
                     .weights = buffers_->parameter_views(),
                     .head = parallel::HeadMode::kLogits},
                    workspace_);
    const Tensor& logits = workspace_.forward.logits;
    ASSIGN_OR_RETURN(const std::vector<float> all, Download(logits));
    const int64_t width = logits.dim(1), vocab = model().shape().vocab;
    std::vector<float> out;
    for (int64_t t = 0; t < shape_.tokens(); ++t) {
      out.insert(out.end(), all.begin() + t * width, all.begin() + t * width + vocab);
    }
    return out;
  }

  // Returns the mean loss of unmasked tokens, and keeps its gradient for ReadGradient().
  absl::StatusOr<double> Differentiate(std::vector<int32_t>& tokens,
                                       std::vector<int32_t>& targets) {
    const auto unmasked =
        std::count_if(targets.begin(), targets.end(), [](int32_t t) { return t >= 0; });
    if (unmasked == 0) return absl::InvalidArgumentError("every target is masked");
    kernels::Copy(*stream_, Whole(tokens), workspace_.batch.tokens);
    kernels::Copy(*stream_, Whole(targets), workspace_.batch.targets);
    kernels::Zero(*stream_, buffers_->all_gradients(0));
    const parallel::Pass pass = {.stream = *stream_,
                                 .weights = buffers_->parameter_views(),
                                 .loss_scale = 1.0f / static_cast<float>(unmasked),
                                 .gradients = &buffers_->gradient_views(0)};
    model().Forward(pass, workspace_);
    model().Backward(pass, workspace_);
    ASSIGN_OR_RETURN(const std::vector<float> losses, Download(workspace_.forward.losses));
    ASSIGN_OR_RETURN(gradients_, Download(buffers_->all_gradients(0)));
    return std::accumulate(losses.begin(), losses.end(), 0.0) / static_cast<double>(unmasked);
  }

  absl::Status ReadGradient(const std::string& name, const Box& box, float* out) const {
    const parallel::ParameterRegistry& parameters = model().parameters();
    for (parallel::ParameterId id = 0; id < parameters.size(); ++id) {
      const parallel::Parameter& parameter = parameters.at(id);
      if (parameter.name != name) continue;
      parallel::CopyBox(box, sizeof(float), parameter.box,
                        reinterpret_cast<const char*>(gradients_.data() + layout_->offset(id)), box,
                        reinterpret_cast<char*>(out));
      return absl::OkStatus();
    }
    return absl::NotFoundError(name);
  }

 private:
  static Tensor Whole(std::vector<int32_t>& values) {
    return Tensor(values.data(), DType::kI32, {static_cast<int64_t>(values.size())});
  }

  absl::Status Load() {
    std::vector<float> values(layout_->elements(), 0.0f);
    for (parallel::ParameterId id = 0; id < model().parameters().size(); ++id) {
      const parallel::Parameter& parameter = model().parameters().at(id);
      RETURN_IF_ERROR(
          folder_->Read(parameter.name, parameter.box, values.data() + layout_->offset(id)));
    }
    for (int i = 0; i < static_cast<int>(layout_->buckets().size()); ++i) {
      const parallel::FlatRange& range = layout_->buckets()[i].range;
      RETURN_IF_ERROR(buffers_->WriteMaster(*stream_, i, /*first=*/0, values.data() + range.begin,
                                            range.size()));
    }
    buffers_->RefreshCopies(*stream_);
    return stream_->Synchronize();
  }

  absl::StatusOr<std::vector<float>> Download(const Tensor& from) {
    std::string bytes(from.bytes(), '\0');
    kernels::Copy(*stream_, Tensor(from.data(), DType::kU8, {from.bytes()}),
                  Tensor(bytes.data(), DType::kU8, {from.bytes()}));
    RETURN_IF_ERROR(stream_->Synchronize());
    std::vector<float> values(from.elements());
    const Tensor host(bytes.data(), from.dtype(), {from.elements()});
    for (int64_t i = 0; i < from.elements(); ++i) values[i] = kernels::ReadAsFloat(host, i);
    return values;
  }

  std::unique_ptr<kernels::Device> device_;
  std::unique_ptr<kernels::Stream> stream_;
  std::unique_ptr<parallel::HuggingFaceFolder> folder_;
  std::unique_ptr<parallel::FlatLayout> layout_;
  std::unique_ptr<parallel::FlatBuffers> buffers_;
  kernels::Arena arena_;
  parallel::BatchShape shape_;
  parallel::Workspace workspace_;
  std::vector<float> gradients_;
};

template <typename Value>
std::string BytesOf(const std::vector<Value>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(Value));
}

absl::Status Gradients(const Arguments& arguments, FileSystem& files) {
  ASSIGN_OR_RETURN(const std::string text, files.Read(arguments.batch));
  const json batch = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!batch.is_object()) return absl::InvalidArgumentError(arguments.batch + " is not an object");
  std::vector<int32_t> tokens = batch["tokens"], targets = batch["targets"];
  const int64_t samples = batch["batch"], sequence = batch["sequence"];
  ASSIGN_OR_RETURN(const auto model, Model::Make(arguments, files, samples, sequence));
  ASSIGN_OR_RETURN(const std::vector<float> logits, model->Logits(tokens));
  ASSIGN_OR_RETURN(const double loss, model->Differentiate(tokens, targets));
  const auto read = [&](const std::string& name, const Box& box, float* out) {
    return model->ReadGradient(name, box, out);
  };
  RETURN_IF_ERROR(parallel::ExportToHuggingFace(files, model->model(), read, arguments.out,
                                                {.dtype = DType::kF32})
                      .status());
  RETURN_IF_ERROR(files.WriteAtomically(arguments.out + "/logits.f32", BytesOf(logits)));
  return files.WriteAtomically(arguments.out + "/loss.json", json({{"loss", loss}}).dump() + "\n");
}

absl::Status Batches(const Arguments& arguments, FileSystem& files) {
  ASSIGN_OR_RETURN(const auto dataset, parallel::IndexedDataset::Open(arguments.dataset));
  ASSIGN_OR_RETURN(
      const parallel::Sampler sampler,
      parallel::Sampler::Training({{dataset.get(), 1}}, {.sequence_length = arguments.sequence,
                                                         .vocab = arguments.vocab,
                                                         .seed = arguments.seed}));
  std::vector<int64_t> samples(arguments.steps * arguments.samples);
  std::iota(samples.begin(), samples.end(), 0);
  std::vector<int32_t> tokens(samples.size() * arguments.sequence), targets(tokens.size());
  RETURN_IF_ERROR(sampler.Fill(samples, absl::MakeSpan(tokens), absl::MakeSpan(targets)));
  return files.WriteAtomically(arguments.out, BytesOf(tokens) + BytesOf(targets));
}

int Run(int argc, char** argv) {
  Arguments arguments;
  CLI::App app("Muster's side of comparisons with PyTorch");
  app.require_subcommand(1);
  CLI::App* gradients = app.add_subcommand("gradients", "logits, loss and every gradient");
  gradients->add_option("folder", arguments.folder)->required();
  gradients->add_option("batch", arguments.batch)->required();
  gradients->add_option("out", arguments.out)->required();
  gradients->add_option("--device", arguments.device)->check(CLI::IsMember({"cpu", "cuda"}));
  gradients->add_option("--dtype", arguments.dtype)->check(CLI::IsMember({"fp32", "bf16"}));
  CLI::App* batches = app.add_subcommand("batches", "the training data in its order");
  batches->add_option("dataset", arguments.dataset)->required();
  batches->add_option("out", arguments.out)->required();
  batches->add_option("--sequence", arguments.sequence)->required();
  batches->add_option("--vocab", arguments.vocab)->required();
  batches->add_option("--batch", arguments.samples)->required();
  batches->add_option("--steps", arguments.steps)->required();
  batches->add_option("--seed", arguments.seed)->required();
  CLI11_PARSE(app, argc, argv);
  const std::unique_ptr<FileSystem> files = PosixFileSystem();
  const absl::Status status =
      gradients->parsed() ? Gradients(arguments, *files) : Batches(arguments, *files);
  if (!status.ok()) std::cerr << "interop_model_peer: " << status << std::endl;
  return status.ok() ? 0 : 1;
}

}  // namespace
}  // namespace muster

int main(int argc, char** argv) { return muster::Run(argc, argv); }
