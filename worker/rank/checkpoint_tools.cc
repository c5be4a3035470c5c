#include "worker/rank/checkpoint_tools.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/file_system.h"
#include "base/status_macros.h"
#include "kernels/device/device.h"
#include "parallel/checkpoint/checkpoint.h"
#include "parallel/data/tokenizer.h"
#include "parallel/data/tokenizer_file.h"
#include "parallel/train/checkpoint_names.h"

namespace muster::worker {
namespace {

using nlohmann::json;
using parallel::CheckpointReader;
using parallel::CheckpointState;

// JSON must be UTF-8; sampled bytes need not be.
void PrintJson(const json& value) {
  std::printf("%s\n", value.dump(2, ' ', false, json::error_handler_t::replace).c_str());
}

// The first token is drawn behind the pass that reads the prompt, the others take a pass each.
std::string SpeedText(size_t prompt, absl::Duration to_first, size_t tokens, absl::Duration rest) {
  std::string text =
      absl::StrFormat("prompt of %d tokens in %.3f s", prompt, absl::ToDoubleSeconds(to_first));
  if (tokens > 1) {
    const double seconds = absl::ToDoubleSeconds(rest);
    absl::StrAppendFormat(&text, ", %d more in %.3f s: %.1f tokens/s", tokens - 1, seconds,
                          static_cast<double>(tokens - 1) / std::max(seconds, 1e-9));
  }
  return text + "\n";
}

}  // namespace

absl::Status RunSample(const SampleArguments& arguments) {
  const std::unique_ptr<FileSystem> files = PosixFileSystem();
  ASSIGN_OR_RETURN(auto reader,
                   CheckpointReader::Open(*files, arguments.checkpoint, parallel::Verify::kSizes));
  const std::unique_ptr<kernels::Device> device = kernels::MakeCpuDevice(arguments.threads);
  ASSIGN_OR_RETURN(auto generator, parallel::Generator::Make(*device, *reader));
  ASSIGN_OR_RETURN(const std::string file,
                   parallel::ReadCheckpointFile(*files, arguments.checkpoint, reader->state(),
                                                parallel::kTokenizerFile));
  std::unique_ptr<parallel::Tokenizer> tokenizer = parallel::MakeByteTokenizer();
  if (!file.empty()) {
    ASSIGN_OR_RETURN(tokenizer, parallel::ParseTokenizer(file, parallel::kTokenizerFile));
  }
  if (file.empty() && generator->model().shape().vocab > tokenizer->vocab()) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: the model has a vocabulary of %d tokens, and was saved without a tokenizer, so "
        "that its tokens can only be read as bytes",
        arguments.checkpoint, generator->model().shape().vocab));
  }
  std::vector<int32_t> prompt;
  const parallel::BoundaryTokens& boundaries = tokenizer->boundaries();
  prompt.insert(prompt.end(), boundaries.bos.begin(), boundaries.bos.end());
  tokenizer->Encode(arguments.prompt, prompt);
  const auto print = [&](const std::string& text) {
    if (arguments.json) return;
    std::fwrite(text.data(), 1, text.size(), stdout);
    std::fflush(stdout);
  };
  bool started = false;
  std::string text;
  // A token may have a space in front that only the first of a text loses, so that text behind the
  // prompt is what all tokens give more than the prompt.
  ASSIGN_OR_RETURN(const std::string prompt_text, tokenizer->Decode(prompt));
  const RealClock clock;
  const absl::Duration begun = clock.Monotonic();
  absl::Duration first;  // when the first token was drawn
  std::vector<int32_t> all = prompt;
  ASSIGN_OR_RETURN(const std::vector<int32_t> tokens,
                   generator->Generate(prompt, arguments.sampling, [&](int32_t token) {
                     // The prompt is printed with the first token, so not for bad arguments.
                     if (!started) {
                       first = clock.Monotonic();
                       print(arguments.prompt);
                     }
                     started = true;
                     // A model may have more rows than the tokenizer has tokens.
                     if (token >= tokenizer->vocab()) return;
                     all.push_back(token);
                     const absl::StatusOr<std::string> decoded = tokenizer->Decode(all);
                     CHECK_OK(decoded);
                     const std::string more = decoded->substr(prompt_text.size() + text.size());
                     text += more;
                     print(more);
                   }));
  const absl::Duration end = clock.Monotonic();
  if (!started) print(arguments.prompt);
  print("\n");
  if (started && (arguments.verbose || ::isatty(STDERR_FILENO) == 1)) {
    std::fputs(SpeedText(prompt.size(), first - begun, tokens.size(), end - first).c_str(), stderr);
  }
  if (!arguments.json) return absl::OkStatus();
  PrintJson({{"checkpoint", arguments.checkpoint},
             {"step", reader->state().id.step},
             {"prompt", arguments.prompt},
             {"text", text},
             {"tokens", tokens.size()},
             {"seed", arguments.sampling.seed}});
  return absl::OkStatus();
}

absl::Status RunVerify(const std::string& checkpoint, bool as_json) {
  const std::unique_ptr<FileSystem> files = PosixFileSystem();
  ASSIGN_OR_RETURN(auto reader,
                   CheckpointReader::Open(*files, checkpoint, parallel::Verify::kFull));
  const CheckpointState& state = reader->state();
  int64_t elements = 0;
  for (const auto& [name, info] : reader->tensors()) {
    int64_t count = 1;
    for (const int64_t size : info.shape) count *= size;
    elements += count;
  }
  if (as_json) {
    PrintJson({{"checkpoint", checkpoint},
               {"sound", true},
               {"job", state.id.job.value()},
               {"step", state.id.step},
               {"epoch", state.id.epoch.value()},
               {"consumedSamples", state.consumed_samples},
               {"tensors", reader->tensors().size()},
               {"elements", elements}});
  } else {
    absl::PrintF("%s is sound: job %s, step %d, epoch %d, %d tensors, %d elements\n", checkpoint,
                 state.id.job.value(), state.id.step, state.id.epoch.value(),
                 reader->tensors().size(), elements);
  }
  return absl::OkStatus();
}

}  // namespace muster::worker
