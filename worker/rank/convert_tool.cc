#include "worker/rank/convert_tool.h"

#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/file_system.h"
#include "base/status_macros.h"
#include "parallel/checkpoint/checkpoint.h"
#include "parallel/data/sentence_piece_model.h"
#include "parallel/interop/hugging_face.h"
#include "parallel/train/checkpoint_names.h"

namespace muster::worker {
namespace {

using nlohmann::json;
using parallel::Box;
using parallel::CheckpointReader;
using parallel::HuggingFaceFolder;

struct Converted {
  std::string kind;  // what has been written
  std::string path;
  std::string family;
  int64_t parameters = 0;
  int64_t bytes = 0;
};

// The file unchanged, under the name that AutoTokenizer of transformers looks for, with what it
// asks for beside it.
absl::Status ExportTokenizer(FileSystem& files, const std::string& tokenizer,
                             const std::string& folder) {
  const char* name = nullptr;
  json config;
  if (absl::StartsWith(absl::StripLeadingAsciiWhitespace(tokenizer), "{")) {
    name = "/tokenizer.json";
    config["tokenizer_class"] = "PreTrainedTokenizerFast";
  } else if (parallel::LooksLikeSentencePiece(tokenizer)) {
    ASSIGN_OR_RETURN(const parallel::SentencePieceModel model,
                     parallel::ParseSentencePieceModel(tokenizer));
    const bool bpe = model.algorithm == parallel::SentencePieceModel::Algorithm::kBpe;
    name = "/tokenizer.model";
    config["tokenizer_class"] = bpe ? "LlamaTokenizer" : "T5Tokenizer";
    if (!bpe) config["extra_ids"] = 0;
  } else {
    return absl::OkStatus();  // bytes, or a list of ranks, which transformers does not read alone
  }
  RETURN_IF_ERROR(files.WriteAtomically(folder + name, tokenizer));
  return files.WriteAtomically(folder + "/tokenizer_config.json", config.dump(2) + "\n");
}

absl::StatusOr<Converted> Export(FileSystem& files, const ConvertArguments& arguments) {
  ASSIGN_OR_RETURN(auto reader,
                   CheckpointReader::Open(files, arguments.source, parallel::Verify::kSizes));
  ASSIGN_OR_RETURN(auto model, parallel::MakeModel(parallel::ReadDescription(reader->state())));
  parallel::HuggingFaceExport options;
  options.dtype = arguments.dtype;
  const auto read = [&](const std::string& name, const Box& box, float* out) {
    return reader->Read(name, kernels::DType::kF32, box, out);
  };
  ASSIGN_OR_RETURN(const int64_t bytes, parallel::ExportToHuggingFace(
                                            files, *model, read, arguments.destination, options));
  ASSIGN_OR_RETURN(const std::string tokenizer,
                   parallel::ReadCheckpointFile(files, arguments.source, reader->state(),
                                                parallel::kTokenizerFile));
  RETURN_IF_ERROR(ExportTokenizer(files, tokenizer, arguments.destination));
  return Converted{"huggingface", arguments.destination, model->description().family,
                   model->parameters().elements(), bytes};
}

absl::StatusOr<Converted> Import(FileSystem& files, const ConvertArguments& arguments) {
  ASSIGN_OR_RETURN(auto folder, HuggingFaceFolder::Open(files, arguments.source));
  const parallel::Model& model = folder->model();
  parallel::CheckpointState state;
  state.id = {JobId("imported"), 0, Epoch(0)};
  state.texts["source"] = arguments.source;
  parallel::WriteDescription(model.description(), state);
  for (const char* name : {"/tokenizer.json", "/tokenizer.model"}) {
    std::string& file = state.files[parallel::kTokenizerFile];
    const std::string path = absl::StrCat(arguments.source, name);
    if (file.empty() && files.Exists(path)) {
      ASSIGN_OR_RETURN(file, files.Read(path));
    }
  }
  if (state.files[parallel::kTokenizerFile].empty()) state.files.clear();
  std::vector<parallel::SaveChunk> chunks;
  for (parallel::ParameterId id = 0; id < model.parameters().size(); ++id) {
    const parallel::Parameter& parameter = model.parameters().at(id);
    parallel::SaveChunk chunk;
    chunk.tensor = parameter.name;
    chunk.shape = parameter.global_shape;
    chunk.box = Box::Whole(parameter.global_shape);
    chunk.produce = [&folder, name = chunk.tensor, box = chunk.box](void* out) {
      return folder->Read(name, box, static_cast<float*>(out));
    };
    chunks.push_back(std::move(chunk));
  }
  ASSIGN_OR_RETURN(const parallel::SaveResult saved,
                   parallel::SaveCheckpoint(files, arguments.destination, state, /*rank=*/0, chunks,
                                            parallel::GatherAlone()));
  return Converted{"checkpoint", saved.directory, model.description().family,
                   model.parameters().elements(), saved.bytes};
}

}  // namespace

absl::Status RunConvert(const ConvertArguments& arguments) {
  const std::unique_ptr<FileSystem> files = PosixFileSystem();
  absl::StatusOr<Converted> converted;
  if (files->Exists(arguments.source + "/manifest.json")) {
    converted = Export(*files, arguments);
  } else if (files->Exists(arguments.source + "/config.json")) {
    converted = Import(*files, arguments);
  } else {
    converted = absl::NotFoundError(
        absl::StrCat(arguments.source,
                     " is neither a checkpoint (no manifest.json) nor a Hugging Face model folder "
                     "(no config.json)"));
  }
  if (!converted.ok()) return converted.status();
  if (arguments.json) {
    std::printf("%s\n", json({{"kind", converted->kind},
                              {"path", converted->path},
                              {"family", converted->family},
                              {"parameters", converted->parameters},
                              {"bytes", converted->bytes}})
                            .dump(2)
                            .c_str());
  } else {
    absl::PrintF("%s: %s of %d parameters (%s), %.1f MB\n", converted->path, converted->kind,
                 converted->parameters, converted->family,
                 static_cast<double>(converted->bytes) * 1e-6);
  }
  return absl::OkStatus();
}

}  // namespace muster::worker
