// Times training steps of the engine's trainer in any layout, with one process per GPU, set up as
// the ranks of a job are. Each workload is a line of overrides of a job spec's `engine` section. A
// row of the table gives the median step, tokens/s, model FLOP utilisation (MFU), communication
// that overlap has not hidden, and allocated memory beside the predicted. With --peer, it also
// gives the ratio to the figures that tests/bench/peers/pytorch.py has written to that file.
//
//   bench_layouts_gpu --work "llama-8b zero 3: model.preset=llama-8b model.sequence_length=4096
//     training.micro_batch=2 training.global_batch=8 parallel.data=4 parallel.zero=3"
//
// MFU = tokens/s x FLOPs per token / GPUs / 989e12 (H200, dense bf16, by its data sheet); FLOPs as
// Model::training_flops_per_token counts them. "exposed" is that of the rank that waits longest.
#include <algorithm>
#include <array>
#include <cstdio>
#include <fstream>
#include <map>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "base/check.h"
#include "base/file_system.h"
#include "nlohmann/json.hpp"
#include "parallel/comm/exposure.h"
#include "tests/gpu/engine_run.h"
#include "tests/gpu/rank_processes.h"
#include "tests/support/temporary_directory.h"

namespace muster {
namespace {

using kernels::DeviceKind;
using testing::EngineResult;
using testing::EngineRun;

constexpr double kPeakFlops = 989e12;
constexpr double kGiB = 1024.0 * 1024 * 1024;
constexpr int64_t kTokens = int64_t{4} << 20;  // of the data set
// The last steps are not timed, because the device has run them before the host asks for them.
constexpr int kLast = 2;
constexpr int64_t kVocab = 50257;  // of the data set; the smallest vocabulary of the presets

struct Options {
  std::string device = "cuda", works, plans, peer, rows;
  std::vector<std::string> work;
  int ranks = 4, steps = 20, warmup = 5;
  double bound = 120, budget = 0;
  int64_t vocab = kVocab;
};

struct Work {
  std::string name;
  EngineRun run;
};

// Parses "NAME: OVERRIDE OVERRIDE ...". Four words are no overrides: `thread_blocks=N` caps the
// thread blocks of collectives, `threads=N` sets the host threads of a rank, `waits=warp` sets
// TrainerOptions::waits_in_warp, and `trace=PREFIX` sets EngineRun::trace, which records a step
// that is not timed (workloads after it in the same command may be slower, since CUPTI stays
// loaded).
Work ParseWork(const Options& options, const std::string& line, const std::string& data) {
  const std::pair<std::string, std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 1));
  Work work;
  work.name = parts.first;
  std::vector<std::string> overrides = {
      absl::StrCat("training.steps=", options.warmup + options.steps + kLast)};
  for (absl::string_view text : absl::StrSplit(parts.second, ' ', absl::SkipWhitespace())) {
    if (absl::ConsumePrefix(&text, "thread_blocks=")) {
      CHECK(absl::SimpleAtoi(text, &work.run.thread_blocks_max)) << line;
    } else if (absl::ConsumePrefix(&text, "threads=")) {
      CHECK(absl::SimpleAtoi(text, &work.run.threads)) << line;
    } else if (absl::ConsumePrefix(&text, "trace=")) {
      work.run.trace = std::string(text);
    } else if (text == "waits=warp") {
      work.run.adjust = [](parallel::TrainerOptions& to) { to.waits_in_warp = true; };
    } else {
      overrides.emplace_back(text);
    }
  }
  const DeviceKind kind = options.device == "cpu" ? DeviceKind::kCpu : DeviceKind::kCuda;
  auto spec = testing::EngineSpec(kind, data, overrides);
  CHECK(spec.ok()) << line << ": " << spec.status();
  work.run.spec = *std::move(spec);
  work.run.cache_directory = options.plans;
  return work;
}

std::vector<std::string> Lines(const Options& options) {
  std::vector<std::string> lines = options.work;
  std::ifstream in(options.works);
  for (std::string line; std::getline(in, line);) {
    if (!line.empty() && line[0] != '#') lines.push_back(line);
  }
  return lines;
}

double Median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

struct Row {
  double median = 0, least = 0, most = 0;  // seconds
  double tokens_per_second = 0, mfu = 0;
  double exposed = 0;  // seconds of the rank that waits longest
  std::array<double, parallel::kExposures> exposed_by_kind{};
  double allocated = 0, predicted = 0;  // GiB of the rank that allocates most
  double groups = 0, libraries = 0;     // GiB
  double all = 0, predicted_all = 0;    // GiB including libraries and the world's communicator
  std::vector<double> exposed_by_rank;  // seconds
  double startup = 0;
};

Row MakeRow(const Options& options, const v1::JobSpec& spec,
            const std::vector<EngineResult>& results) {
  const auto timed = [&](const auto& by_step) {
    return std::vector(by_step.begin() + options.warmup, by_step.end() - kLast);
  };
  Row row;
  std::vector<double> seconds = timed(results[0].seconds);
  row.median = Median(seconds);
  row.least = *std::min_element(seconds.begin(), seconds.end());
  row.most = *std::max_element(seconds.begin(), seconds.end());
  const v1::EngineSpec& engine = spec.engine();
  row.tokens_per_second =
      static_cast<double>(engine.training().global_batch() * engine.model().sequence_length()) /
      row.median;
  row.mfu = row.tokens_per_second * results[0].flops_per_token /
            static_cast<double>(results.size()) / kPeakFlops;
  for (const EngineResult& result : results) {
    std::array<double, parallel::kExposures> by_kind{};
    for (int kind = 0; kind < parallel::kExposures; ++kind) {
      std::vector<double> values;
      for (const auto& step : timed(result.exposed)) values.push_back(step[kind]);
      by_kind[kind] = Median(values);
    }
    const double exposed = std::accumulate(by_kind.begin(), by_kind.end(), 0.0);
    row.exposed_by_rank.push_back(exposed);
    if (exposed >= row.exposed) {
      row.exposed = exposed;
      row.exposed_by_kind = by_kind;
    }
    if (static_cast<double>(result.allocated) / kGiB >= row.allocated) {
      row.allocated = static_cast<double>(result.allocated) / kGiB;
      row.predicted = static_cast<double>(result.predicted) / kGiB;
      row.groups = static_cast<double>(result.used_by_groups) / kGiB;
      row.all = static_cast<double>(result.used) / kGiB;
      row.predicted_all = static_cast<double>(result.predicted + result.predicted_libraries) / kGiB;
      row.libraries = static_cast<double>(result.used - result.used_before - result.used_by_groups -
                                          result.allocated) /
                      kGiB;
    }
    row.startup = std::max(row.startup, result.startup_seconds);
  }
  return row;
}

struct Peer {
  double tokens_per_second = 0, gib = 0;
};
// The last line of the file that is about the same model, GPUs, batch and sequence.
Peer FindPeer(const Options& options, const v1::JobSpec& spec) {
  const v1::EngineSpec& engine = spec.engine();
  std::ifstream in(options.peer);
  Peer peer;
  for (std::string line; std::getline(in, line);) {
    const nlohmann::json json = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!json.is_object()) continue;
    const int64_t gpus = json.value("gpus", int64_t{0});
    if (json.value("model", "") != engine.model().preset() || gpus != spec.resources().ranks() ||
        json.value("seq", int64_t{0}) != engine.model().sequence_length() ||
        json.value("batch", int64_t{0}) * json.value("accum", int64_t{1}) * gpus !=
            engine.training().global_batch()) {
      continue;
    }
    peer = {json.value("tokens_per_s", 0.0), json.value("peak_mem_gib", 0.0)};
  }
  return peer;
}

std::string Text(const Work& work, const Row& row, double of_one, const Peer& peer) {
  std::string text = absl::StrFormat(
      "| %s | %.1f ms (%.1f to %.1f) | %.0f | %.1f %% | %s | %.2f ms, %.1f %% | %.2f | %.2f | "
      "%+.1f %% |",
      work.name, row.median * 1e3, row.least * 1e3, row.most * 1e3, row.tokens_per_second,
      100 * row.mfu, of_one > 0 ? absl::StrFormat("%.1f %%", 100 * of_one) : "", row.exposed * 1e3,
      100 * row.exposed / row.median, row.allocated, row.predicted,
      100 * (row.allocated / row.predicted - 1));
  if (peer.tokens_per_second > 0) {
    absl::StrAppendFormat(&text, " %.0f, %.1f GiB | **%.3f**, %.2f |", peer.tokens_per_second,
                          peer.gib, row.tokens_per_second / peer.tokens_per_second,
                          row.allocated / peer.gib);
  } else {
    absl::StrAppend(&text, " | |");
  }
  return text;
}

std::string Details(const Row& row, const std::vector<EngineResult>& results) {
  std::string text = "    exposed:";
  for (int kind = 0; kind < parallel::kExposures; ++kind) {
    const absl::string_view name = Name(static_cast<parallel::Exposure>(kind));
    absl::StrAppendFormat(&text, " %s %.2f ms,", std::string(name),
                          row.exposed_by_kind[kind] * 1e3);
  }
  absl::StrAppendFormat(&text,
                        " groups take %.2f GiB, libraries %.2f GiB, all %.2f GiB (predicted %.2f); "
                        "ready after %.1f s; loss %.9g to %.9g; GiB by rank:",
                        row.groups, row.libraries, row.all, row.predicted_all, row.startup,
                        results[0].losses.front(), results[0].losses.back());
  for (const EngineResult& result : results) {
    absl::StrAppendFormat(&text, " %.2f", static_cast<double>(result.allocated) / kGiB);
  }
  for (size_t i = 0; i < results[0].sent.size(); ++i) {
    if (results[0].sent[i] == 0) continue;
    absl::StrAppendFormat(&text, "; %s by copy engines %.1f %%", EngineResult::kSenders[i],
                          100.0 * static_cast<double>(results[0].by_copy_engines[i]) /
                              static_cast<double>(results[0].sent[i]));
  }
  absl::StrAppend(&text, "; ms exposed by rank:");
  for (const double exposed : row.exposed_by_rank) {
    absl::StrAppendFormat(&text, " %.2f", exposed * 1e3);
  }
  return text;
}

// Tokens/s of the latest run on one rank, by model and sequence length.
using Alone = std::map<std::pair<std::string, int64_t>, double>;

void Report(const Options& options, const Work& work, const std::vector<std::string>& texts,
            Alone& alone) {
  std::vector<EngineResult> results;
  for (const std::string& text : texts) results.push_back(*EngineResult::FromText(text));
  const Row row = MakeRow(options, work.run.spec, results);
  const v1::ModelSpec& model = work.run.spec.engine().model();
  const auto ranks = static_cast<double>(results.size());
  double& one = alone[{model.preset(), model.sequence_length()}];
  if (results.size() == 1) one = row.tokens_per_second;
  const double of_one = one > 0 ? row.tokens_per_second / (ranks * one) : 0;
  const std::string text = Text(work, row, of_one, FindPeer(options, work.run.spec));
  std::printf("%s\n%s\n", text.c_str(), Details(row, results).c_str());
  std::fflush(stdout);
  if (options.rows.empty()) return;
  std::FILE* out = std::fopen(options.rows.c_str(), "ae");
  CHECK(out != nullptr) << options.rows;
  std::fprintf(out, "%s\n%s\n", text.c_str(), Details(row, results).c_str());
  std::fclose(out);
}

int RunWorks(const Options& options) {
  const testing::TemporaryDirectory directory;
  CHECK_OK(testing::WriteTokens(directory / "text", kTokens, options.vocab, /*learnable=*/false));
  CHECK_OK(PosixFileSystem()->MakeDirectory(directory / "rendezvous"));
  std::vector<Work> works;
  for (const std::string& line : Lines(options)) {
    works.push_back(ParseWork(options, line, directory / "text"));
  }
  testing::RankProcesses processes(
      options.ranks, options.device == "cpu" ? DeviceKind::kCpu : DeviceKind::kCuda,
      directory / "rendezvous",
      [&works](testing::RankProcess& self, int index) -> absl::StatusOr<std::string> {
        const absl::StatusOr<EngineResult> result = testing::RunEngine(self, works[index].run);
        if (!result.ok()) return result.status();
        return result->ToText();
      });
  std::printf(
      "| work | step | tokens/s | MFU | of n x one | exposed | GiB | predicted | off | peer | "
      "ratio, memory |\n|---|---|---|---|---|---|---|---|---|---|---|\n");
  const absl::Time start = absl::Now();
  Alone alone;
  int failed = 0;
  for (int i = 0; i < static_cast<int>(works.size()); ++i) {
    const int ranks = works[i].run.spec.resources().ranks();
    const double spent = absl::ToDoubleSeconds(absl::Now() - start);
    if (ranks > options.ranks || (options.budget > 0 && spent > options.budget)) {
      std::printf("| %s | not measured: %s |\n", works[i].name.c_str(),
                  ranks > options.ranks ? "too few devices" : "no time left");
      continue;
    }
    const auto texts = processes.Run(i, ranks, absl::Seconds(options.bound));
    if (texts.ok()) {
      Report(options, works[i], *texts, alone);
    } else {
      ++failed;
      std::printf("| %s | failed: %s |\n", works[i].name.c_str(),
                  std::string(texts.status().message()).c_str());
    }
    std::printf("    after %.1f s\n", absl::ToDoubleSeconds(absl::Now() - start));
    std::fflush(stdout);
  }
  return failed == 0 ? 0 : 1;
}

int Main(int argc, char** argv) {
  Options options;
  CLI::App app("Training steps in any layout, a process per device");
  app.add_option("--device", options.device, "cuda or cpu")->check(CLI::IsMember({"cuda", "cpu"}));
  app.add_option("--ranks", options.ranks, "devices there are")->check(CLI::Range(1, 64));
  app.add_option("--work", options.work, "\"NAME: OVERRIDE ...\", below engine:")
      ->allow_extra_args(false);
  app.add_option("--works", options.works, "file with a work per line");
  app.add_option("--steps", options.steps, "timed steps")->check(CLI::PositiveNumber);
  app.add_option("--warmup", options.warmup, "steps before them")->check(CLI::NonNegativeNumber);
  app.add_option("--vocab", options.vocab, "of the random tokens")->check(CLI::PositiveNumber);
  app.add_option("--bound", options.bound, "seconds after which a work has failed");
  app.add_option("--budget", options.budget, "seconds after which no work begins; 0: none");
  app.add_option("--plans", options.plans, "folder of measured algorithms");
  app.add_option("--peer", options.peer, "file of torch_peer.py's output");
  app.add_option("--rows", options.rows, "file that the table is appended to");
  CLI11_PARSE(app, argc, argv);
  return RunWorks(options);
}

}  // namespace
}  // namespace muster

int main(int argc, char** argv) { return muster::Main(argc, argv); }
