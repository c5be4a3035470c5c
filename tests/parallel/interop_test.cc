#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "base/rng.h"
#include "kernels/arena.h"
#include "kernels/device/device.h"
#include "kernels/tensor.h"
#include "parallel/checkpoint/safetensors.h"
#include "parallel/interop/hugging_face.h"
#include "tests/support/seed.h"
#include "tests/support/status_matchers.h"

namespace muster::parallel {
namespace {

using kernels::DType;
using kernels::Tensor;
using ::muster::testing::IsOk;
using ::muster::testing::StatusIs;
using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr char kData[] = MUSTER_SOURCE_DIR "/tests/interop/data/";

std::string ReadText(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

// Every parameter of a model, in registration order, as stored.
using Values = std::vector<std::vector<float>>;

Values RandomValues(const Model& model, uint64_t seed) {
  Rng rng(seed);
  Values values;
  for (ParameterId id = 0; id < model.parameters().size(); ++id) {
    const Parameter& parameter = model.parameters().at(id);
    values.emplace_back(parameter.storage_elements(), 0.0f);
    for (int64_t i = 0; i < parameter.elements(); ++i) {
      values.back()[i] = static_cast<float>(rng.Uniform() - 0.5);
    }
  }
  return values;
}

absl::StatusOr<Values> ReadValues(HuggingFaceFolder& folder) {
  Values values;
  const ParameterRegistry& registry = folder.model().parameters();
  for (ParameterId id = 0; id < registry.size(); ++id) {
    const Parameter& parameter = registry.at(id);
    values.emplace_back(parameter.storage_elements(), 0.0f);
    absl::Status status = folder.Read(parameter.name, parameter.box, values.back().data());
    if (!status.ok()) return status;
  }
  return values;
}

ParameterReader ReaderOf(
    const Model& model, const Values& values,
    std::function<absl::Status(const std::string&, const Box&, float*)>& keep) {
  keep = [&](const std::string& name, const Box& box, float* out) {
    for (ParameterId id = 0; id < model.parameters().size(); ++id) {
      const Parameter& parameter = model.parameters().at(id);
      if (parameter.name != name) continue;
      CopyBox(box, sizeof(float), parameter.box, reinterpret_cast<const char*>(values[id].data()),
              box, reinterpret_cast<char*>(out));
      return absl::OkStatus();
    }
    return absl::NotFoundError(name);
  };
  return keep;
}

std::vector<std::vector<float>> Logits(const Model& model, Values& values,
                                       const std::vector<int32_t>& tokens) {
  const std::unique_ptr<kernels::Device> device = kernels::MakeCpuDevice(1);
  const std::unique_ptr<kernels::Stream> stream = std::move(device->MakeStream()).value();
  std::vector<Tensor> views;
  for (ParameterId id = 0; id < model.parameters().size(); ++id) {
    const Parameter& parameter = model.parameters().at(id);
    views.push_back(parameter.StorageIn(values[id].data(), DType::kF32));
  }
  const ParameterViews weights(std::move(views));
  const BatchShape shape = {1, static_cast<int64_t>(tokens.size())};
  kernels::Arena arena;
  model.TakeWorkspace(arena, shape);
  EXPECT_THAT(arena.Commit(*device), IsOk());
  Workspace workspace = model.TakeWorkspace(arena, shape);
  std::copy(tokens.begin(), tokens.end(), workspace.batch.tokens.as<int32_t>());
  model.Forward({*stream, weights, HeadMode::kLogits}, workspace);
  EXPECT_THAT(stream->Synchronize(), IsOk());
  std::vector<std::vector<float>> logits;
  const Tensor& out = workspace.forward.logits;
  EXPECT_EQ(out.dim(0), shape.sequence);
  const int64_t width = out.dim(1);
  const float* data = out.f32();
  for (int64_t i = 0; i < shape.sequence; ++i) {
    logits.emplace_back(data + i * width, data + i * width + model.shape().vocab);
  }
  return logits;
}

class Peer : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Families, Peer,
                         ::testing::Values("gpt2", "llama", "llama-tied-scaled", "mamba2",
                                           "nemotron-h"));

// transformers has written the folders and computed the logits.
TEST_P(Peer, ImportedFolder_GivesTheLogitsOfTransformers) {
  const std::unique_ptr<FileSystem> files = PosixFileSystem();
  const std::string directory = absl::StrCat(kData, GetParam());
  ASSERT_OK_AND_ASSIGN(auto folder, HuggingFaceFolder::Open(*files, directory));
  ASSERT_OK_AND_ASSIGN(Values values, ReadValues(*folder));
  const json peer = json::parse(ReadText(directory + "/peer.json"));
  const auto logits = Logits(folder->model(), values, peer["tokens"]);
  const std::vector<std::vector<float>> expected = peer["logits"];
  ASSERT_EQ(logits.size(), expected.size());
  for (size_t i = 0; i < logits.size(); ++i) {
    ASSERT_EQ(logits[i].size(), expected[i].size());
    for (size_t j = 0; j < logits[i].size(); ++j) {
      EXPECT_NEAR(logits[i][j], expected[i][j], 1e-4) << "token " << i << " logit " << j;
    }
  }
}

TEST_P(Peer, ExportOfAnImport_HasTheSameTensorsBitForBit) {
  const std::unique_ptr<FileSystem> disk = PosixFileSystem();
  const std::string source = absl::StrCat(kData, GetParam());
  ASSERT_OK_AND_ASSIGN(auto folder, HuggingFaceFolder::Open(*disk, source));
  const std::unique_ptr<MemoryFileSystem> files = MemoryFileSystem::Make();
  const auto read = [&](const std::string& name, const Box& box, float* out) {
    return folder->Read(name, box, out);
  };
  HuggingFaceExport options;
  options.dtype = DType::kF32;
  ASSERT_OK_AND_ASSIGN(const int64_t bytes,
                       ExportToHuggingFace(*files, folder->model(), read, "out", options));
  ASSERT_OK_AND_ASSIGN(const std::string written, files->Read("out/model.safetensors"));
  EXPECT_EQ(bytes, static_cast<int64_t>(written.size()));
  const std::string original = ReadText(source + "/model.safetensors");
  ASSERT_OK_AND_ASSIGN(const SafetensorsHeader theirs,
                       DecodeSafetensorsHeader(original, original.size(), "theirs"));
  ASSERT_OK_AND_ASSIGN(const SafetensorsHeader ours,
                       DecodeSafetensorsHeader(written, written.size(), "ours"));
  std::map<std::string, std::pair<std::vector<int64_t>, std::string>> a, b;
  for (const SafetensorsEntry& e : theirs.entries) {
    a[e.name] = {e.shape, original.substr(theirs.bytes + e.begin, e.end - e.begin)};
  }
  for (const SafetensorsEntry& e : ours.entries) {
    b[e.name] = {e.shape, written.substr(ours.bytes + e.begin, e.end - e.begin)};
  }
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [name, value] : a) {
    ASSERT_EQ(b.count(name), 1u) << name;
    EXPECT_EQ(b[name].first, value.first) << name;
    EXPECT_TRUE(b[name].second == value.second) << name << " differs";
  }
  // Keys that both config.json have must have equal values.
  ASSERT_OK_AND_ASSIGN(const std::string config, files->Read("out/config.json"));
  const json wanted = json::parse(ReadText(source + "/config.json"));
  const json written_config = json::parse(config);
  for (const auto& [key, value] : written_config.items()) {
    if (wanted.contains(key) && key.find("drop") == std::string::npos) {
      EXPECT_EQ(value, wanted[key]) << key;
    }
  }
}

TEST_P(Peer, Export_InSeveralFiles_ReadsBackInAnyBox) {
  const std::unique_ptr<FileSystem> disk = PosixFileSystem();
  ASSERT_OK_AND_ASSIGN(auto folder,
                       HuggingFaceFolder::Open(*disk, absl::StrCat(kData, GetParam())));
  const Model& model = folder->model();
  const uint64_t seed = testing::TestSeed();
  const Values values = RandomValues(model, seed);
  std::function<absl::Status(const std::string&, const Box&, float*)> keep;
  const std::unique_ptr<MemoryFileSystem> files = MemoryFileSystem::Make();
  HuggingFaceExport options;
  options.dtype = DType::kF32;
  options.file_bytes_max = 8 << 10;
  ASSERT_OK(
      ExportToHuggingFace(*files, model, ReaderOf(model, values, keep), "out", options).status());
  EXPECT_TRUE(files->Exists("out/model.safetensors.index.json"));
  ASSERT_OK_AND_ASSIGN(auto again, HuggingFaceFolder::Open(*files, "out"));
  Rng rng(seed);
  for (ParameterId id = 0; id < model.parameters().size(); ++id) {
    const Parameter& parameter = model.parameters().at(id);
    for (int round = 0; round < 10; ++round) {
      Box box = Box::Whole(parameter.global_shape);
      for (size_t d = 0; d < box.extent.size() && round > 0; ++d) {
        box.offset[d] = static_cast<int64_t>(rng.Below(parameter.global_shape[d]));
        box.extent[d] =
            1 + static_cast<int64_t>(rng.Below(parameter.global_shape[d] - box.offset[d]));
      }
      std::vector<float> got(box.elements()), expected(box.elements());
      ASSERT_OK(again->Read(parameter.name, box, got.data()));
      ASSERT_OK(keep(parameter.name, box, expected.data()));
      EXPECT_EQ(got, expected) << parameter.name << box.ToString();
    }
  }
}

// NemotronHForCausalLM has a head of its own: transformers ties nothing in it.
TEST(Export, TiedHybrid_HasItsTableTwiceAndReadsBackUntied) {
  const std::unique_ptr<FileSystem> disk = PosixFileSystem();
  const std::string source = absl::StrCat(kData, "nemotron-h");
  ASSERT_OK_AND_ASSIGN(auto folder, HuggingFaceFolder::Open(*disk, source));
  ModelDescription description = folder->model().description();
  description.flags["tied"] = true;
  ASSERT_OK_AND_ASSIGN(const auto model, MakeModel(description));
  Values values = RandomValues(*model, testing::TestSeed());
  std::function<absl::Status(const std::string&, const Box&, float*)> keep;
  const std::unique_ptr<MemoryFileSystem> files = MemoryFileSystem::Make();
  HuggingFaceExport options;
  options.dtype = DType::kF32;
  ASSERT_OK(
      ExportToHuggingFace(*files, *model, ReaderOf(*model, values, keep), "out", options).status());
  ASSERT_OK_AND_ASSIGN(const std::string config, files->Read("out/config.json"));
  EXPECT_EQ(json::parse(config)["tie_word_embeddings"], false);
  ASSERT_OK_AND_ASSIGN(auto again, HuggingFaceFolder::Open(*files, "out"));
  EXPECT_FALSE(again->model().description().flags.at("tied"));
  ASSERT_OK_AND_ASSIGN(Values read, ReadValues(*again));
  const std::vector<int32_t> tokens = {3, 1, 4, 1, 5, 9, 2, 6};
  EXPECT_EQ(Logits(again->model(), read, tokens), Logits(*model, values, tokens));

  // Read as transformers reads it, also where the file claims to be tied.
  json claims = json::parse(config);
  claims["tie_word_embeddings"] = true;
  ASSERT_OK(files->WriteAtomically("out/config.json", claims.dump()));
  ASSERT_OK_AND_ASSIGN(auto tied, HuggingFaceFolder::Open(*files, "out"));
  EXPECT_FALSE(tied->model().description().flags.at("tied"));
}

// ---- bad input ---------------------------------------------------------------------------------

class BadFolder : public ::testing::Test {
 protected:
  void SetUp() override {
    config_ = json::parse(ReadText(absl::StrCat(kData, "gpt2/config.json")));
    weights_ = ReadText(absl::StrCat(kData, "gpt2/model.safetensors"));
  }
  absl::Status Open() {
    const std::unique_ptr<MemoryFileSystem> files = MemoryFileSystem::Make();
    EXPECT_THAT(files->MakeDirectory("in"), IsOk());
    EXPECT_THAT(files->WriteAtomically("in/config.json", config_.dump()), IsOk());
    if (!weights_.empty()) {
      EXPECT_THAT(files->WriteAtomically("in/model.safetensors", weights_), IsOk());
    }
    return HuggingFaceFolder::Open(*files, "in").status();
  }
  json config_;
  std::string weights_;
};

TEST_F(BadFolder, ConfigThatWouldChangeTheLogits_IsRefusedByKey) {
  ASSERT_OK(Open());
  const json good = config_;
  for (const auto& [key, value] :
       std::vector<std::pair<std::string, json>>{{"activation_function", "relu"},
                                                 {"n_inner", 17},
                                                 {"layer_norm_epsilon", 1e-6},
                                                 {"scale_attn_by_inverse_layer_idx", true},
                                                 {"n_layer", 0},
                                                 {"n_head", "three"},
                                                 {"n_head", 5},
                                                 {"model_type", "bert"},
                                                 {"model_type", 3}}) {
    config_ = good;
    config_[key] = value;
    EXPECT_THAT(Open(), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("in/config.json")))
        << key << " = " << value;
  }
}

TEST_F(BadFolder, LlamaConfigThatWouldChangeTheLogits_IsRefusedByKey) {
  const json good = json::parse(ReadText(absl::StrCat(kData, "llama/config.json")));
  weights_ = ReadText(absl::StrCat(kData, "llama/model.safetensors"));
  config_ = good;
  ASSERT_OK(Open());
  struct Change {
    const char* key;
    json value;
    const char* named;
  };
  for (const auto& [key, value, named] : std::vector<Change>{
           {"attention_bias", true, "'attention_bias' is true"},
           {"hidden_act", "gelu", "'hidden_act' is"},
           {"head_dim", 128, "'head_dim' is 128"},
           {"num_attention_heads", 7, "'num_attention_heads' is 7; a divisor of hidden_size (24)"},
           {"rms_norm_eps", 0, "'rms_norm_eps' is 0"},
           {"partial_rotary_factor", 0.5, "'partial_rotary_factor' is 0.5"},
           {"rope_parameters", {{"rope_type", "yarn"}, {"factor", 2.0}}, "'rope_type' is"},
           {"rope_parameters", {{"type", "linear"}, {"factor", 2.0}}, "'type' is \"linear\""},
           {"rope_parameters", {{"partial_rotary_factor", 0.5}}, "'partial_rotary_factor' is 0.5"},
           {"rope_parameters", "x", "'rope_parameters' is \"x\""}}) {
    config_ = good;
    config_[key] = value;
    EXPECT_THAT(Open(), StatusIs(absl::StatusCode::kInvalidArgument,
                                 AllOf(HasSubstr("in/config.json"), HasSubstr(named))))
        << key << " = " << value;
  }
}

// Sizes whose products overflow 64 bits, or that no machine could hold.
TEST_F(BadFolder, SizesOutOfAllBounds_AreRefusedByName) {
  const json gpt2 = config_,
             llama = json::parse(ReadText(absl::StrCat(kData, "llama/config.json")));
  struct Case {
    const json& config;
    const char* key;
    int64_t value;
  };
  for (const auto& [config, key, value] :
       std::vector<Case>{{gpt2, "n_layer", 1'000'000'000'000},
                         {gpt2, "n_embd", int64_t{3} << 60},
                         {gpt2, "vocab_size", int64_t{1} << 62},
                         {gpt2, "n_inner", int64_t{1} << 62},
                         {llama, "num_hidden_layers", int64_t{1} << 31},
                         {llama, "intermediate_size", int64_t{1} << 62},
                         {llama, "hidden_size", int64_t{24} << 40}}) {
    config_ = config;
    config_[key] = value;
    if (config_.contains("head_dim")) config_["head_dim"] = nullptr;
    EXPECT_THAT(Open(), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("in/config.json")))
        << key;
  }
}

TEST_F(BadFolder, TensorsThatDoNotFit_AreNamedWithBothShapes) {
  config_["vocab_size"] = 62;
  EXPECT_THAT(Open(), StatusIs(absl::StatusCode::kInvalidArgument,
                               AllOf(HasSubstr("transformer.wte.weight"), HasSubstr("[61, 24]"),
                                     HasSubstr("[62, 24]"))));
  config_["vocab_size"] = 61;
  config_["n_layer"] = 3;
  EXPECT_THAT(Open(), StatusIs(absl::StatusCode::kInvalidArgument,
                               AllOf(HasSubstr("transformer.h.2"), HasSubstr("missing"))));
  config_["n_layer"] = 1;
  EXPECT_THAT(Open(), StatusIs(absl::StatusCode::kInvalidArgument,
                               AllOf(HasSubstr("transformer.h.1"), HasSubstr("no part"))));
}

TEST_F(BadFolder, DamagedOrMissingFiles_AreNamed) {
  weights_.resize(weights_.size() - 1);
  EXPECT_THAT(Open(), StatusIs(absl::StatusCode::kDataLoss, HasSubstr("in/model.safetensors")));
  weights_.clear();
  EXPECT_THAT(Open(), StatusIs(absl::StatusCode::kNotFound, HasSubstr("in/model.safetensors")));
}

TEST(HuggingFaceFolder, WithPickledWeightsAlone_SaysWhatToDo) {
  const std::unique_ptr<MemoryFileSystem> files = MemoryFileSystem::Make();
  ASSERT_OK(files->MakeDirectory("in"));
  ASSERT_OK(
      files->WriteAtomically("in/config.json", ReadText(absl::StrCat(kData, "gpt2/config.json"))));
  ASSERT_OK(files->WriteAtomically("in/pytorch_model.bin", "x"));
  EXPECT_THAT(HuggingFaceFolder::Open(*files, "in").status(),
              StatusIs(absl::StatusCode::kNotFound,
                       AllOf(HasSubstr("pytorch_model.bin"), HasSubstr("only safetensors"))));
}

TEST(Export, ExistingFolder_IsNotTouched) {
  const std::unique_ptr<FileSystem> disk = PosixFileSystem();
  const std::string source = absl::StrCat(kData, "gpt2");
  ASSERT_OK_AND_ASSIGN(auto folder, HuggingFaceFolder::Open(*disk, source));
  const auto read = [&](const std::string& name, const Box& box, float* out) {
    return folder->Read(name, box, out);
  };
  const std::unique_ptr<MemoryFileSystem> files = MemoryFileSystem::Make();
  ASSERT_OK(files->MakeDirectory("out"));
  ASSERT_OK(files->WriteAtomically("out/config.json", "mine"));
  EXPECT_THAT(ExportToHuggingFace(*files, folder->model(), read, "out", {}).status(),
              StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("out/config.json")));
  EXPECT_THAT(files->Read("out/config.json").value(), "mine");
}

}  // namespace
}  // namespace muster::parallel
