// muster-rank: one rank of a job, started by its daemon; and tools over a checkpoint.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <iostream>
#include <map>
#include <string>

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

int Main(int argc, char** argv) {
  CLI::App app(
      "One rank of a Muster job. Started by muster-worker; sample, verify, convert and "
      "plan are for people.",
      "muster-rank");
  std::string assignment;
  bool describe_metrics = false;
  app.add_option("--assignment", assignment, "file with the RankAssignment to carry out");
  app.add_flag("--describe-metrics", describe_metrics, "print the metrics of a rank and end");
  app.set_version_flag("--version", std::string("muster-rank ") + MUSTER_VERSION);
  app.require_subcommand(0, 1);

  const std::map<std::string, bool> formats = {{"text", false}, {"json", true}};
  CLI::App& sample = *app.add_subcommand("sample", "continue a text with a trained checkpoint");
  SampleArguments sampling;
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
  sample.add_option("-o,--output", sampling.json, "text or json")
      ->transform(CLI::CheckedTransformer(formats));

  CLI::App& verify = *app.add_subcommand("verify", "read and check every byte of a checkpoint");
  std::string checkpoint;
  bool json = false;
  verify.add_option("--checkpoint", checkpoint, "directory of the checkpoint")->required();
  verify.add_option("-o,--output", json, "text or json")
      ->transform(CLI::CheckedTransformer(formats));

  CLI::App& convert =
      *app.add_subcommand("convert", "a checkpoint to a Hugging Face model folder, or back");
  ConvertArguments converting;
  const std::map<std::string, kernels::DType> dtypes = {{"fp32", kernels::DType::kF32},
                                                        {"bf16", kernels::DType::kBF16},
                                                        {"fp16", kernels::DType::kF16}};
  convert.add_option("--from", converting.source, "checkpoint or model folder")->required();
  convert.add_option("--to", converting.destination, "directory to make")->required();
  convert.add_option("--dtype", converting.dtype, "of an exported folder")
      ->transform(CLI::CheckedTransformer(dtypes));
  convert.add_option("-o,--output", converting.json, "text or json")
      ->transform(CLI::CheckedTransformer(formats));

  CLI::App& plan = *app.add_subcommand("plan", "what a job spec will take, as JSON");
  PlanArguments planning;
  plan.add_option("--spec", planning.spec, "file with a JobSpec in Protobuf's binary form")
      ->required();
  plan.add_option("--device-memory", planning.device_memory, "bytes for each rank; 0 = not asked")
      ->check(CLI::NonNegativeNumber);

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kExitUsage;
  }
  if (describe_metrics) {
    std::fputs(metrics::DescribeFamilies(RankMetricsCatalogue()).c_str(), stdout);
    return 0;
  }
  if (sample.parsed()) return Report(RunSample(sampling));
  if (convert.parsed()) return Report(RunConvert(converting));
  if (plan.parsed()) return Report(RunPlan(planning));
  if (verify.parsed()) return Report(RunVerify(checkpoint, json));
  if (assignment.empty()) {
    std::cerr << app.help();
    return kExitUsage;
  }
  return RunRank(assignment);
}

}  // namespace
}  // namespace muster::worker

int main(int argc, char** argv) { return muster::worker::Main(argc, argv); }
