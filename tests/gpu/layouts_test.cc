// Every layout over the GPUs of a machine trains like one GPU. The same tests run over processes on
// the host, where they never skip. MUSTER_TEST_LAYOUTS="tensor 4;all-to-all" restricts them to
// layouts whose names contain one of these texts, MUSTER_TEST_SETTINGS="llama;mamba2" to such
// models and precisions.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "base/check.h"
#include "base/file_system.h"
#include "parallel/checkpoint/checkpoint.h"
#include "parallel/train/checkpoint_names.h"
#include "tests/gpu/engine_run.h"
#include "tests/gpu/rank_processes.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temporary_directory.h"

namespace muster::testing {
namespace {

using kernels::DeviceKind;

constexpr int64_t kVocab = 61;
// The first run on a machine also chooses GEMM algorithms and connects, so it is allowed longer.
constexpr absl::Duration kBound = absl::Seconds(60);

// Overrides separated by blanks, of engine.parallel unless a section's name precedes them.
struct Layout {
  const char* name;
  int ranks;
  const char* split;
};
constexpr Layout kLayouts[] = {
    {"data 2", 2, "data=2"},
    {"data 2, zero 1", 2, "data=2 zero=1"},
    {"data 2, zero 2", 2, "data=2 zero=2"},
    {"data 2, zero 3", 2, "data=2 zero=3"},
    {"tensor 2", 2, "tensor=2"},
    {"tensor 2, sequence", 2, "tensor=2 sequence=true"},
    {"tensor 2, nothing beside", 2, "tensor=2 sequence=true tensor_overlap=none"},
    {"tensor 2, chunked", 2, "tensor=2 sequence=true tensor_overlap=chunked"},
    {"tensor 2, halves", 2, "tensor=2 sequence=true tensor_overlap=halves"},
    {"tensor 2, halves of all rows", 2, "tensor=2 tensor_overlap=halves"},
    {"tensor 2, uneven, halves", 2,
     "tensor=2 sequence=true tensor_overlap=halves tensor_shares=[9,7]"},
    // Of eight heads in two groups the first rank has six.
    {"tensor 2, uneven groups", 2, "tensor=2 sequence=true tensor_shares=[3,1]"},
    {"tensor 2, halves, recompute", 2,
     "tensor=2 sequence=true tensor_overlap=halves training.recompute=full"},
    {"ring 2", 2, "context=2"},
    {"all-gather 2", 2, "context=2 context_method=all_gather"},
    {"all-to-all 2", 2, "context=2 context_method=all_to_all"},
    {"scan by states 2", 2, "context=2 scan_method=state_passing"},
    {"scan by heads 2", 2, "context=2 scan_method=all_to_all"},
    {"pipeline 2", 2, "pipeline=2"},
    {"pipeline 2, interleaved", 2, "pipeline=2 pipeline_schedule=interleaved"},
    {"pipeline 2, zero bubble", 2, "pipeline=2 pipeline_schedule=zero_bubble"},
    {"data 4", 4, "data=4"},
    {"data 4, zero 3", 4, "data=4 zero=3"},
    {"data 4, zero 3 over 2", 4, "data=4 zero=3 zero_shards=2"},
    {"tensor 4, sequence", 4, "tensor=4 sequence=true"},
    {"tensor 4, chunked", 4, "tensor=4 sequence=true tensor_overlap=chunked"},
    {"tensor 4, halves", 4, "tensor=4 sequence=true tensor_overlap=halves"},
    {"tensor 4, uneven, halves", 4,
     "tensor=4 sequence=true tensor_overlap=halves tensor_shares=[9,8,8,7]"},
    {"tensor 4, halves, recompute", 4,
     "tensor=4 sequence=true tensor_overlap=halves training.recompute=selective"},
    {"ring 4", 4, "context=4"},
    {"all-to-all 4", 4, "context=4 context_method=all_to_all"},
    {"scan by heads 4", 4, "context=4 scan_method=all_to_all"},
    {"scan by states 2 x tensor 2", 4, "context=2 tensor=2 sequence=true"},
    {"scan by states 2 x tensor 2, uneven groups", 4,
     "context=2 tensor=2 sequence=true tensor_shares=[3,1]"},
    {"scan by heads 2 x tensor 2", 4, "context=2 tensor=2 sequence=true scan_method=all_to_all"},
    {"pipeline 4", 4, "pipeline=4"},
    {"pipeline 4, zero bubble", 4, "pipeline=4 pipeline_schedule=zero_bubble"},
    {"pipeline 2 x tensor 2", 4, "pipeline=2 tensor=2 sequence=true"},
    {"pipeline 2 x tensor 2, chunked", 4,
     "pipeline=2 tensor=2 sequence=true tensor_overlap=chunked pipeline_schedule=zero_bubble"},
    {"pipeline 2 x tensor 2, halves", 4, "pipeline=2 tensor=2 sequence=true tensor_overlap=halves"},
    {"tensor 2 x data 2, zero 1", 4, "tensor=2 data=2 zero=1"},
    {"tensor 2 x data 2, zero 1, halves", 4,
     "tensor=2 data=2 zero=1 sequence=true tensor_overlap=halves"},
    {"context 2 x data 2, zero 3", 4, "context=2 data=2 zero=3"},
};

using Tensors = std::map<std::string, std::vector<float>>;

// Compares first moments, which equal the gradients where beta1 is 0.
Tensors ReadGradients(const std::string& checkpoint) {
  const std::unique_ptr<FileSystem> files = PosixFileSystem();
  auto reader = parallel::CheckpointReader::Open(*files, checkpoint, parallel::Verify::kFull);
  CHECK_OK(reader);
  Tensors tensors;
  for (const auto& [name, info] : (*reader)->tensors()) {
    if (!absl::StartsWith(name, parallel::kFirstMomentPrefix)) continue;
    const parallel::Box whole = parallel::Box::Whole(info.shape);
    std::vector<float>& values = tensors[name];
    values.resize(whole.elements());
    CHECK_OK((*reader)->Read(name, info.dtype, whole, values.data()));
  }
  return tensors;
}

// Whether `name` contains one of the texts of an environment variable, which may be unset.
bool IsWanted(absl::string_view name, const char* variable) {
  const char* const words = std::getenv(variable);
  if (words == nullptr) return true;
  const std::vector<absl::string_view> some = absl::StrSplit(words, ';', absl::SkipEmpty());
  return std::any_of(some.begin(), some.end(),
                     [&](absl::string_view word) { return absl::StrContains(name, word); });
}

// The largest distance of a tensor from its reference, relative to the norm of the reference.
double WorstDistance(const Tensors& expected, const Tensors& actual, std::string& name) {
  EXPECT_EQ(expected.size(), actual.size());
  double worst = 0;
  for (const auto& [key, values] : actual) {
    const auto found = expected.find(key);
    if (found == expected.end() || found->second.size() != values.size()) {
      ADD_FAILURE() << key << " is not in the reference";
      continue;
    }
    double square = 0, difference = 0;
    for (size_t i = 0; i < values.size(); ++i) {
      const double reference = found->second[i];
      square += reference * reference;
      difference += (values[i] - reference) * (values[i] - reference);
    }
    const double distance = std::sqrt(difference / std::max(square, 1e-30));
    if (distance > worst) {
      worst = distance;
      name = key;
    }
  }
  return worst;
}

struct Setting {
  const char* name;
  const char* family;
  const char* precision;
  int64_t steps;
  // Relative tolerances, of every tensor's gradient in the first step and of every loss.
  double gradient_bound, loss_bound;
  bool documents = false;    // separate_documents, in layouts with context or pipeline ranks
  bool copy_engines = true;  // for every collective they support, of any size; else NCCL alone
  // Of the heads of Mamba-2. With 2, a Mamba-2 is trained in layouts with tensor or context ranks.
  int groups = 1;

  bool scans() const { return family == std::string("mamba2") || hybrid(); }
  bool hybrid() const { return family == std::string("hybrid"); }
};
const std::vector<Setting>& SettingsOf(DeviceKind kind) {
  static const auto& host = *new std::vector<Setting>{
      {"gpt2 in fp32", "gpt2", "fp32", 5, 1e-5, 1e-4},
      {"llama in fp32", "llama", "fp32", 5, 1e-5, 1e-4},
      {"documents in fp32", "llama", "fp32", 5, 1e-5, 1e-4, true},
      {"mamba2 in fp32", "mamba2", "fp32", 5, 1e-5, 1e-4},
      {"mamba2 with 2 groups", "mamba2", "fp32", 5, 1e-5, 1e-4, false, true, 2},
      {"hybrid in fp32", "hybrid", "fp32", 5, 1e-5, 1e-4, false, true, 2},
      {"hybrid, documents in fp32", "hybrid", "fp32", 5, 1e-5, 1e-4, true, true, 2}};
  static const auto& cuda = *new std::vector<Setting>{
      {"gpt2 in bf16", "gpt2", "bf16", 50, 2e-2, 5e-3},
      {"llama in bf16", "llama", "bf16", 50, 2e-2, 5e-3},
      {"documents in bf16", "llama", "bf16", 50, 2e-2, 5e-3, true},
      // Gradients of a_log are sums of many small numbers of both signs.
      {"mamba2 in bf16", "mamba2", "bf16", 50, 4e-2, 5e-3},
      {"mamba2 in fp32", "mamba2", "fp32", 10, 1e-4, 1e-3},
      {"mamba2 with 2 groups", "mamba2", "bf16", 30, 4e-2, 5e-3, false, true, 2},
      {"hybrid in bf16", "hybrid", "bf16", 30, 4e-2, 5e-3, false, true, 2},
      {"hybrid in fp32", "hybrid", "fp32", 10, 1e-4, 1e-3, false, true, 2},
      {"hybrid, documents in bf16", "hybrid", "bf16", 30, 4e-2, 5e-3, true, true, 2},
      {"gpt2 in fp32", "gpt2", "fp32", 10, 1e-4, 1e-3},
      {"gpt2 in fp32, NCCL", "gpt2", "fp32", 10, 1e-4, 1e-3, false, false}};
  return kind == DeviceKind::kCuda ? cuda : host;
}

constexpr Layout kOne = {"one", 1, ""};

// Identifies a run: a setting and a layout (-1 = one rank).
struct RunOf {
  int setting = 0;
  int layout = -1;
  bool first_step = false;  // compares gradients of one step; else losses of all steps
  int ToIndex() const { return setting * 1000 + (layout + 1) * 2 + (first_step ? 1 : 0); }
  static RunOf FromIndex(int index) { return {index / 1000, index % 1000 / 2 - 1, index % 2 == 1}; }
  const Layout& split() const { return layout < 0 ? kOne : kLayouts[layout]; }
};

struct Trained {
  Tensors gradients;
  std::vector<double> losses;
};

class LayoutsGpuTest : public ::testing::TestWithParam<DeviceKind> {
 protected:
  bool cuda() const { return GetParam() == DeviceKind::kCuda; }

  void SetUp() override {
    // Documents are longer than the chunk of a sequence that one of four ranks has.
    ASSERT_OK(WriteTokens(directory_ / "text", 40000, kVocab, /*learnable=*/true,
                          /*document=*/cuda() ? 37 : 5));
    const std::unique_ptr<FileSystem> files = PosixFileSystem();
    for (const char* name : {"rendezvous", "plans"})
      ASSERT_OK(files->MakeDirectory(directory_ / name));
  }

  // Heads of 64 columns on GPUs, where cuDNN has its graphs. Four micro-batches for four stages.
  std::vector<std::string> Overrides(const Setting& setting, const Layout& layout) const {
    std::vector<std::string> out = {absl::StrCat("model.family=", setting.family),
                                    setting.hybrid() ? "model.pattern=M-*-M-*-" : "model.layers=4",
                                    absl::StrCat("model.hidden=", cuda() ? 256 : 32),
                                    absl::StrCat("model.vocab=", kVocab),
                                    absl::StrCat("model.sequence_length=", cuda() ? 128 : 16),
                                    absl::StrCat("training.precision=", setting.precision),
                                    absl::StrCat("training.steps=", setting.steps),
                                    "training.global_batch=8",
                                    "training.micro_batch=2",
                                    "training.optimizer.adamw.lr=0.0003",
                                    "training.schedule.cosine.warmup_steps=10",
                                    "parallel.bucket_bytes=262144",
                                    "parallel.resident_elements=1000"};
    if (setting.scans()) {
      // Eight heads. All tensor ranks share B and C of one group, and pairs of them those of two.
      out.push_back(absl::StrCat("model.mamba.head_width=", cuda() ? 64 : 8));
      out.push_back(absl::StrCat("model.mamba.groups=", setting.groups));
      if (!cuda()) out.push_back("model.mamba.state=16");
    }
    const bool llama = setting.family == std::string("llama");
    if (setting.hybrid()) {
      // Two heads share their keys; together they are wider than the hidden state.
      out.push_back("model.heads=8");
      out.push_back(absl::StrCat("model.head_width=", cuda() ? 64 : 8));
    } else if (!setting.scans()) {
      out.push_back("model.heads=4");
    }
    if (llama || setting.hybrid()) {
      out.push_back("model.kv_heads=4");
      out.push_back(absl::StrCat("model.ffn=", cuda() ? 512 : 48));
    }
    if (setting.documents) out.push_back("data.separate_documents=true");
    for (const absl::string_view text : absl::StrSplit(layout.split, ' ', absl::SkipEmpty())) {
      out.push_back(absl::StrCat(absl::StrContains(text, '.') ? "" : "parallel.", text));
    }
    return out;
  }

  // Runs in the process of a rank.
  absl::StatusOr<std::string> Work(RankProcess& self, int index) const {
    const RunOf which = RunOf::FromIndex(index);
    const Setting& setting = SettingsOf(GetParam())[which.setting];
    EngineRun run;
    run.cache_directory = directory_ / "plans";
    run.keep_groups = true;
    auto spec = EngineSpec(GetParam(), directory_ / "text", Overrides(setting, which.split()));
    if (!spec.ok()) return spec.status();
    run.spec = *std::move(spec);
    run.adjust = [&](parallel::TrainerOptions& options) {
      options.copy_engines = setting.copy_engines;
      options.copy_engines_least_bytes = 1;
      if (which.first_step) {
        options.steps = options.checkpoint_every = 1;
        options.checkpoint_root = directory_ / absl::StrCat("saved-", index);
        options.optimizer.beta1 = 0;
        options.optimizer.clip_norm = 0;
      }
    };
    const auto result = RunEngine(self, run);
    if (!result.ok()) return result.status();
    return result->ToText();
  }

  // NCCL keeps the maxima, and half of what the all-gather method of context parallelism sends,
  // because its sums have no memory for their parts.
  static void ExpectCopyEngines(const EngineResult& result, absl::string_view split) {
    const double least = absl::StrContains(split, "all_gather") ? 0.45 : 0.8;
    for (size_t i = 0; i < result.sent.size(); ++i) {
      EXPECT_GE(result.by_copy_engines[i], least * static_cast<double>(result.sent[i]))
          << EngineResult::kSenders[i] << ": " << result.by_copy_engines[i] << " of "
          << result.sent[i] << " bytes";
    }
  }

  static absl::StatusOr<Trained> Train(RankProcesses& ranks, int setting, int layout) {
    Trained trained;
    for (const bool first_step : {true, false}) {
      const RunOf run = {setting, layout, first_step};
      const auto texts = ranks.Run(run.ToIndex(), run.split().ranks, kBound);
      if (!texts.ok()) return texts.status();
      std::vector<EngineResult> results;
      for (const std::string& text : *texts) results.push_back(*EngineResult::FromText(text));
      for (const EngineResult& result : results) EXPECT_EQ(result.losses, results[0].losses);
      // Five and three of eight heads are too uneven for memory at the same offsets.
      const bool alike = !SettingsOf(GetParam())[setting].scans() ||
                         !absl::StrContains(run.split().split, "tensor_shares");
      if (SettingsOf(GetParam())[setting].copy_engines && alike &&
          GetParam() == DeviceKind::kCuda) {
        for (const EngineResult& result : results) ExpectCopyEngines(result, run.split().split);
      }
      if (first_step) {
        trained.gradients = ReadGradients(results[0].last_checkpoint);
      } else {
        trained.losses = results[0].losses;
      }
    }
    return trained;
  }

  // Whether the split makes a difference to what the setting is for.
  static bool Concerns(const Setting& setting, absl::string_view split) {
    const auto has = [&](absl::string_view text) { return absl::StrContains(split, text); };
    if (setting.documents && !has("context") && !has("pipeline=2")) return false;
    if (setting.groups > 1 && !setting.hybrid() && !has("context") && !has("tensor")) return false;
    if (has("scan_method")) return setting.scans();
    // How attention exchanges makes no difference to a scan.
    return !has("context_method") || setting.family != std::string("mamba2");
  }

  // A child process counts the devices, because a CUDA context must not be forked.
  static int CountGpus() {
    const TemporaryDirectory rendezvous;
    RankProcesses probe(1, DeviceKind::kCuda, rendezvous.path(),
                        [](RankProcess&, int) -> absl::StatusOr<std::string> {
                          int count = 0;
                          while (count < 4 && kernels::MakeCudaDevice(count).ok()) ++count;
                          return absl::StrCat(count);
                        });
    const auto texts = probe.Run(0, 1, kBound);
    return texts.ok() ? std::stoi(texts->front()) : 0;
  }

  void ExpectLikeOneRank(RankProcesses& ranks, int ranks_max, int index) {
    const Setting& setting = SettingsOf(GetParam())[index];
    if (!IsWanted(setting.name, "MUSTER_TEST_SETTINGS")) return;
    const auto alone = Train(ranks, index, -1);
    ASSERT_OK(alone);
    ASSERT_EQ(alone->losses.size(), static_cast<size_t>(setting.steps));
    EXPECT_LT(alone->losses.back(), alone->losses.front());
    std::cout << setting.name << std::endl;
    for (int i = 0; i < static_cast<int>(std::size(kLayouts)); ++i) {
      const Layout& layout = kLayouts[i];
      if (layout.ranks > ranks_max || !IsWanted(layout.name, "MUSTER_TEST_LAYOUTS")) continue;
      if (!Concerns(setting, layout.split)) continue;
      SCOPED_TRACE(absl::StrCat(setting.name, ", ", layout.name));
      const absl::Time start = absl::Now();
      const auto trained = Train(ranks, index, i);
      if (!trained.ok()) {
        ADD_FAILURE() << trained.status();
        continue;
      }
      std::string name;
      const double distance = WorstDistance(alone->gradients, trained->gradients, name);
      EXPECT_LE(distance, setting.gradient_bound) << name;
      ASSERT_EQ(trained->losses.size(), alone->losses.size());
      double worst = 0;
      for (size_t step = 0; step < alone->losses.size(); ++step) {
        worst = std::max(worst, std::abs(trained->losses[step] / alone->losses[step] - 1));
      }
      EXPECT_LE(worst, setting.loss_bound);
      std::cout << absl::StrFormat(
                       "  %-28s gradients within %.1e (%s), %d losses within %.1e, %.1f s",
                       layout.name, distance, name, setting.steps, worst,
                       absl::ToDoubleSeconds(absl::Now() - start))
                << std::endl;
    }
  }

  TemporaryDirectory directory_;
};

TEST_P(LayoutsGpuTest, EveryLayout_TrainsLikeOneRank) {
  const int ranks_max = cuda() ? CountGpus() : 4;
  if (ranks_max < 2) GTEST_SKIP() << "NO TWO GPUS, NOT TESTED";
  if (ranks_max < 4) std::cout << "NO FOUR GPUS: LAYOUTS OF FOUR NOT TESTED" << std::endl;
  RankProcesses ranks(ranks_max, GetParam(), directory_ / "rendezvous",
                      [this](RankProcess& self, int index) { return Work(self, index); });
  for (int i = 0; i < static_cast<int>(SettingsOf(GetParam()).size()); ++i) {
    ExpectLikeOneRank(ranks, ranks_max, i);
  }
}

// Compression changes gradients with the number of ranks, so the reference is the same run on
// hosts.
TEST_P(LayoutsGpuTest, CompressedGradients_TrainLikeThoseOfTheHost) {
  const int count = cuda() ? std::min(CountGpus(), 2) : 2;
  if (count < 1) GTEST_SKIP() << "NO GPU, NOT TESTED";
  const std::vector<std::string> methods = {"training.gradient_compression.top_k.density=0.1",
                                            "training.gradient_compression.top_k.momentum=0.5",
                                            "training.gradient_compression.sign={}"};
  std::vector<std::vector<double>> losses;
  for (const DeviceKind kind : {DeviceKind::kCpu, GetParam()}) {
    const std::string rendezvous = directory_ / absl::StrCat("rendezvous-", losses.size());
    ASSERT_OK(PosixFileSystem()->MakeDirectory(rendezvous));
    const auto work = [&](RankProcess& self, int index) -> absl::StatusOr<std::string> {
      std::vector<std::string> overrides = {"model.family=gpt2",
                                            "model.layers=2",
                                            "model.hidden=128",
                                            "model.heads=2",
                                            absl::StrCat("model.vocab=", kVocab),
                                            "model.sequence_length=64",
                                            "training.precision=fp32",
                                            "training.steps=10",
                                            "training.global_batch=8",
                                            "training.micro_batch=2",
                                            "training.optimizer.adamw.lr=0.0003",
                                            absl::StrCat("parallel.data=", count),
                                            methods[index]};
      if (index == 1) overrides.push_back(methods[0]);
      EngineRun run;
      run.cache_directory = directory_ / "plans";
      auto spec = EngineSpec(kind, directory_ / "text", overrides);
      if (!spec.ok()) return spec.status();
      run.spec = *std::move(spec);
      const auto result = RunEngine(self, run);
      if (!result.ok()) return result.status();
      return result->ToText();
    };
    RankProcesses ranks(count, kind, rendezvous, work);
    for (int i = 0; i < static_cast<int>(methods.size()); ++i) {
      const auto texts = ranks.Run(i, count, kBound);
      ASSERT_OK(texts) << methods[i];
      losses.push_back(EngineResult::FromText(texts->front())->losses);
    }
  }
  for (size_t i = 0; i < methods.size(); ++i) {
    const std::vector<double>& host = losses[i];
    const std::vector<double>& other = losses[methods.size() + i];
    ASSERT_EQ(host.size(), 10u);
    ASSERT_EQ(other.size(), 10u);
    EXPECT_LT(host.back(), host.front());
    double worst = 0;
    for (size_t step = 0; step < host.size(); ++step) {
      worst = std::max(worst, std::abs(other[step] / host[step] - 1));
    }
    EXPECT_LE(worst, cuda() ? 1e-3 : 0) << methods[i];
    std::cout << absl::StrFormat("  %s over %d: losses within %.1e", methods[i], count, worst)
              << std::endl;
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, LayoutsGpuTest,
                         ::testing::Values(DeviceKind::kCpu, DeviceKind::kCuda),
                         [](const auto& info) {
                           return info.param == DeviceKind::kCuda ? "Cuda" : "Host";
                         });

}  // namespace
}  // namespace muster::testing
