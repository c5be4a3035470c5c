// muster-rank: one rank of a job, started by its daemon; and tools over a checkpoint.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <iostream>
#include <map>
#include <string>

#include "base/log.h"
#include "base/metrics.h"
#include "worker/rank/checkpoint_tools.h"
#include "worker/rank/convert_tool.h"
#include "worker/rank/plan_tool.h"
#include "worker/rank/rank_metrics.h"
#include "worker/rank/rank_run.h"

namespace muster::worker {
namespace {

int Report(const absl::Status& status) {
  if (status.ok()) return 0;
  std::cerr << "muster-rank: " << status.message() << std::endl;
  return 1;
}

// What the command line asks for. A subcommand that was not given is not parsed().
struct Flags {
  std::string assignment;
  std::string log_format = "json";
  bool describe_metrics = false;
  CLI::App* sample = nullptr;
  SampleArguments sampling;
  CLI::App* verify = nullptr;
  std::string checkpoint;  // to verify
  bool json = false;       // what verify prints
  CLI::App* convert = nullptr;
  ConvertArguments converting;
  CLI::App* plan = nullptr;
  PlanArguments planning;
};

void AddOutput(CLI::App& command, bool& json) {
  const std::map<std::string, bool> formats = {{"text", false}, {"json", true}};
  command.add_option("-o,--output", json, "text or json")
      ->transform(CLI::CheckedTransformer(formats));
}

void DeclareSample(CLI::App& app, Flags& flags) {
  flags.sample = app.add_subcommand("sample", "continue a text with a trained checkpoint");
  CLI::App& sample = *flags.sample;
  SampleArguments& sampling = flags.sampling;
  sampling.sampling.tokens = 200;
  sample.add_option("--checkpoint", sampling.checkpoint, "directory of the checkpoint")->required();
  sample.add_option("--prompt", sampling.prompt, "text to continue")->required();
  sample.add_option("--tokens", sampling.sampling.tokens, "tokens to generate")
      ->check(CLI::Range(0, 1'000'000))
      ->capture_default_str();
  sample.add_option("--temperature", sampling.sampling.temperature, "0 = most likely token")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  sample.add_option("--top-k", sampling.sampling.top_k, "draw from the k most likely; 0 = all")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  sample.add_option("--seed", sampling.sampling.seed, "same seed, same text")
      ->capture_default_str();
  sample.add_option("--threads", sampling.threads, "CPU threads")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  sample.add_flag("-v,--verbose", sampling.verbose,
                  "say on stderr how long it took, also where that is no terminal");
  AddOutput(sample, sampling.json);
}

void DeclareTools(CLI::App& app, Flags& flags) {
  flags.verify = app.add_subcommand("verify", "read and check every byte of a checkpoint");
  flags.verify->add_option("--checkpoint", flags.checkpoint, "directory of the checkpoint")
      ->required();
  AddOutput(*flags.verify, flags.json);

  flags.convert =
      app.add_subcommand("convert", "a checkpoint to a Hugging Face model folder, or back");
  const std::map<std::string, kernels::DType> dtypes = {{"fp32", kernels::DType::kF32},
                                                        {"bf16", kernels::DType::kBF16},
                                                        {"fp16", kernels::DType::kF16}};
  ConvertArguments& converting = flags.converting;
  flags.convert->add_option("--from", converting.source, "checkpoint or model folder")->required();
  flags.convert->add_option("--to", converting.destination, "directory to make")->required();
  flags.convert->add_option("--dtype", converting.dtype, "of an exported folder")
      ->transform(CLI::CheckedTransformer(dtypes));
  AddOutput(*flags.convert, converting.json);

  flags.plan = app.add_subcommand("plan", "what a job spec will take, as JSON");
  flags.plan
      ->add_option("--spec", flags.planning.spec, "file with a JobSpec in Protobuf's binary form")
      ->required();
  flags.plan
      ->add_option("--device-memory", flags.planning.device_memory,
                   "bytes for each rank; 0 = not asked")
      ->check(CLI::NonNegativeNumber);
}

int Main(int argc, char** argv) {
  CLI::App app(
      "One rank of a Muster job. Started by muster-worker; sample, verify, convert and "
      "plan are for people.",
      "muster-rank");
  Flags flags;
  app.add_option("--assignment", flags.assignment, "file with the RankAssignment to carry out");
  app.add_option("--log-format", flags.log_format, "of --assignment: json (docs/logs.md) or text")
      ->check(CLI::IsMember({"json", "text"}))
      ->capture_default_str();
  app.add_flag("--describe-metrics", flags.describe_metrics, "print the metrics of a rank and end");
  app.set_version_flag("--version", std::string("muster-rank ") + MUSTER_VERSION);
  app.require_subcommand(0, 1);
  DeclareSample(app, flags);
  DeclareTools(app, flags);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kExitUsage;
  }
  if (flags.describe_metrics) {
    std::fputs(metrics::DescribeFamilies(RankMetricsCatalogue()).c_str(), stdout);
    return 0;
  }
  if (flags.sample->parsed()) return Report(RunSample(flags.sampling));
  if (flags.convert->parsed()) return Report(RunConvert(flags.converting));
  if (flags.plan->parsed()) return Report(RunPlan(flags.planning));
  if (flags.verify->parsed()) return Report(RunVerify(flags.checkpoint, flags.json));
  if (flags.assignment.empty()) {
    std::cerr << app.help();
    return kExitUsage;
  }
  return RunRank(flags.assignment, ParseLogFormat(flags.log_format).value_or(LogFormat::kJson));
}

}  // namespace
}  // namespace muster::worker

int main(int argc, char** argv) { return muster::worker::Main(argc, argv); }
