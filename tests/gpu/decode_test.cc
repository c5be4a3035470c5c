// Decoding on a GPU in every dtype: its logits are as close to those of a pass over the whole text
// in fp32 on the host as those of a pass over the whole text on the GPU. The same test runs on the
// host, where it never skips.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/rng.h"
#include "kernels/arena.h"
#include "kernels/device/device.h"
#include "kernels/memory/memory.h"
#include "kernels/tensor.h"
#include "parallel/generate/decoder.h"
#include "parallel/model/model.h"
#include "tests/parallel/parameter_storage.h"
#include "tests/support/seed.h"
#include "tests/support/status_matchers.h"

namespace muster::parallel {
namespace {

using kernels::DType;
using kernels::Tensor;

constexpr int64_t kVocab = 61;
// More keys than one block of AttentionDecode takes, and than a chunk of the scan has.
constexpr int64_t kSequence = 300;
constexpr int64_t kBatch = 2;
constexpr int64_t kPrompt = 133;

// Head widths and states that the kernels for Hopper take.
ModelDescription Describe(const std::string& family) {
  ModelDescription model = {.family = family,
                            .sizes = {{"layers", 2},
                                      {"hidden", 256},
                                      {"heads", 4},
                                      {"vocab", kVocab},
                                      {"sequence_length", kSequence}}};
  if (family == "gpt2") return model;
  model.numbers = {{"norm_epsilon", 1e-5}};
  model.flags = {{"tied", true}};
  if (family == "llama") {
    model.sizes["kv_heads"] = 2;
    model.sizes["ffn"] = 512;
    model.numbers["rope_theta"] = 10000;
  } else if (family == "hybrid") {
    model.sizes["layers"] = 3;
    model.sizes["kv_heads"] = 2;
    model.sizes["head_width"] = 64;
    model.sizes["ffn"] = 512;
    model.sizes["mamba_heads"] = 8;
    model.sizes["mamba_head_width"] = 64;
    model.sizes["mamba_groups"] = 2;
    model.sizes["mamba_state"] = 64;
    model.sizes["mamba_taps"] = 4;
    model.flags["rotary"] = false;
    model.texts = {{"pattern", "M-*M-"}, {"mlp", "relu2"}};
  } else {
    model.sizes["heads"] = 8;
    model.sizes["head_width"] = 64;
    model.sizes["groups"] = 2;
    model.sizes["state"] = 64;
    model.sizes["taps"] = 4;
  }
  return model;
}

// The weights on a device, in `dtype` but for those in full precision. Views of `buffers`.
class Weights {
 public:
  Weights(const Model& model, const ParameterViews& from, DType dtype, kernels::Device& device,
          kernels::Stream& stream) {
    std::vector<Tensor> views;
    for (ParameterId id = 0; id < model.parameters().size(); ++id) {
      const Tensor& source = from[id];
      const DType own = model.parameters().at(id).full_precision ? DType::kF32 : dtype;
      auto whole = device.Allocate(source.elements() * 4);
      auto cast = device.Allocate(source.elements() * SizeOf(own));
      CHECK_OK(whole);
      CHECK_OK(cast);
      const auto at = [&](kernels::Buffer& buffer, DType of) {
        return source.rank() == 1 ? Tensor(buffer.data(), of, {source.dim(0)})
                                  : Tensor(buffer.data(), of, {source.dim(0), source.dim(1)});
      };
      kernels::Copy(stream, source, at(**whole, DType::kF32));
      views.push_back(at(**cast, own));
      if (own == DType::kF32) {
        kernels::Copy(stream, at(**whole, own), views.back());
      } else {
        kernels::Cast(stream, at(**whole, DType::kF32), views.back());
      }
      CHECK_OK(stream.Synchronize());
      buffers_.push_back(*std::move(cast));
    }
    views_ = ParameterViews(std::move(views));
  }
  const ParameterViews& views() const { return views_; }

 private:
  std::vector<std::unique_ptr<kernels::Buffer>> buffers_;
  ParameterViews views_;
};

// Rows of logits in any dtype as fp32 on the host, without padding columns.
std::vector<float> Download(kernels::Device& device, kernels::Stream& stream, const Tensor& x) {
  auto buffer = device.Allocate(x.elements() * 4);
  CHECK_OK(buffer);
  const Tensor whole((*buffer)->data(), DType::kF32, {x.elements()});
  const Tensor flat(x.data(), x.dtype(), {x.elements()});
  if (x.dtype() == DType::kF32) {
    kernels::Copy(stream, flat, whole);
  } else {
    kernels::Cast(stream, flat, whole);
  }
  std::vector<float> all(x.elements()), rows;
  kernels::Copy(stream, whole, Tensor(all.data(), DType::kF32, {x.elements()}));
  CHECK_OK(stream.Synchronize());
  for (int64_t i = 0; i < x.dim(0); ++i) {
    rows.insert(rows.end(), all.begin() + i * x.dim(1), all.begin() + i * x.dim(1) + kVocab);
  }
  return rows;
}

double Distance(const std::vector<float>& a, const std::vector<float>& b) {
  CHECK_EQ(a.size(), b.size());
  double error = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double d = static_cast<double>(a[i]) - b[i];
    error += d * d;
    norm += static_cast<double>(b[i]) * b[i];
  }
  return std::sqrt(error / norm);
}

class DecodeTest : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    device_ = kernels::MakeCpuDevice(2);
    if (GetParam()) {
      auto device = kernels::MakeCudaDevice(0);
      if (!device.ok()) GTEST_SKIP() << "NO GPU, NOT TESTED: " << device.status();
      device_ = *std::move(device);
    }
  }

  // The logits of all tokens in one pass.
  static std::vector<float> Whole(kernels::Device& device, kernels::Stream& stream,
                                  const Model& model, const ParameterViews& weights, DType dtype,
                                  std::vector<int32_t> tokens) {
    const auto count = static_cast<int64_t>(tokens.size());
    const BatchShape shape = {
        .batch = kBatch, .sequence = kSequence, .activation = dtype, .head_tokens = count};
    kernels::Arena arena;
    model.TakeWorkspace(arena, shape);
    CHECK_OK(arena.Commit(device));
    Workspace workspace = model.TakeWorkspace(arena, shape);
    kernels::Copy(stream, Tensor(tokens.data(), DType::kI32, {count}), workspace.batch.tokens);
    model.Forward({stream, weights, HeadMode::kLogits}, workspace);
    return Download(device, stream, workspace.forward.logits);
  }

  std::unique_ptr<kernels::Device> device_;
};
INSTANTIATE_TEST_SUITE_P(Devices, DecodeTest, ::testing::Values(false, true),
                         [](const auto& info) { return info.param ? "gpu" : "host"; });

TEST_P(DecodeTest, Logits_AreThoseOfAWholePass) {
  const auto host = kernels::MakeCpuDevice(2);
  const auto host_stream = *host->MakeStream();
  const auto stream = *device_->MakeStream();
  for (const std::string family : {"gpt2", "llama", "mamba2", "hybrid"}) {
    ASSERT_OK_AND_ASSIGN(const auto model, MakeModel(Describe(family)));
    ParameterStorage storage(model->parameters());
    Rng rng(testing::TestSeed());
    for (ParameterId id = 0; id < model->parameters().size(); ++id) {
      const Parameter& parameter = model->parameters().at(id);
      Initialize(parameter, /*seed=*/5, 0, parameter.elements(), storage[id].data());
      for (float& value : storage[id]) value += static_cast<float>(0.04 * (rng.Uniform() - 0.5));
    }
    std::vector<int32_t> tokens;
    for (int64_t i = 0; i < kBatch * kSequence; ++i) {
      tokens.push_back(static_cast<int32_t>(rng.Below(kVocab)));
    }
    const std::vector<float> expected =
        Whole(*host, *host_stream, *model, storage.views(), DType::kF32, tokens);
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      if (!GetParam() && dtype != DType::kF32) continue;
      SCOPED_TRACE(absl::StrCat(family, " ", Name(dtype)));
      const Weights weights(*model, storage.views(), dtype, *device_, *stream);
      const std::vector<float> whole =
          Whole(*device_, *stream, *model, weights.views(), dtype, tokens);
      ASSERT_OK_AND_ASSIGN(const auto decoder,
                           Decoder::Make(*device_, *stream, *model, weights.views(),
                                         {.batch = kBatch,
                                          .context = kSequence,
                                          .tokens_per_pass = kPrompt,
                                          .activation = dtype}));
      // A prompt, several tokens behind it, then one by one; behind each the logits of a token.
      std::vector<float> decoded, by_host, by_device;
      for (int64_t end = kPrompt; end <= kSequence; end += end == kPrompt ? 10 : 1) {
        std::vector<int32_t> next;
        for (int64_t text = 0; text < kBatch; ++text) {
          next.insert(next.end(), tokens.begin() + text * kSequence + decoder->length(),
                      tokens.begin() + text * kSequence + end);
        }
        ASSERT_OK_AND_ASSIGN(const Tensor logits, decoder->Append(next));
        const std::vector<float> rows = Download(*device_, *stream, logits);
        decoded.insert(decoded.end(), rows.begin(), rows.end());
        for (int64_t text = 0; text < kBatch; ++text) {
          const int64_t row = (text * kSequence + end - 1) * kVocab;
          by_host.insert(by_host.end(), expected.begin() + row, expected.begin() + row + kVocab);
          by_device.insert(by_device.end(), whole.begin() + row, whole.begin() + row + kVocab);
        }
      }
      EXPECT_LE(Distance(decoded, by_host), 2 * Distance(by_device, by_host) + 2e-6);
    }
  }
}

}  // namespace
}  // namespace muster::parallel
