#include "parallel/interop/hugging_face.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "kernels/low_precision.h"
#include "parallel/checkpoint/json.h"
#include "parallel/checkpoint/safetensors.h"

namespace muster::parallel {
namespace {

using kernels::DType;
using kernels::Tensor;

constexpr char kConfig[] = "config.json";
constexpr char kSingleFile[] = "model.safetensors";
constexpr char kIndex[] = "model.safetensors.index.json";
// Rows are read in runs of about this size.
constexpr int64_t kReadBytes = int64_t{64} << 20;

bool IsFloat(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16;
}

std::string ShapeText(const std::vector<int64_t>& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

int64_t Elements(const std::vector<int64_t>& shape) {
  int64_t elements = 1;
  for (const int64_t size : shape) elements *= size;
  return elements;
}

std::string Join(const std::string& directory, absl::string_view name) {
  return absl::StrCat(directory, "/", name);
}

}  // namespace

absl::StatusOr<std::unique_ptr<HuggingFaceFolder>> HuggingFaceFolder::Open(
    FileSystem& files, const std::string& directory) {
  ASSIGN_OR_RETURN(const std::string config, files.Read(Join(directory, kConfig)));
  auto description = DescriptionFromConfig(config);
  if (!description.ok()) return Annotate(description.status(), Join(directory, kConfig));
  std::unique_ptr<HuggingFaceFolder> folder(new HuggingFaceFolder(files, directory));
  auto model = MakeModel(*description);
  if (!model.ok()) return Annotate(model.status(), Join(directory, kConfig));
  folder->model_ = *std::move(model);
  ASSIGN_OR_RETURN(folder->layout_, LayoutForHuggingFace(*folder->model_));
  for (const HuggingFaceParameter& parameter : folder->layout_.parameters) {
    folder->parameters_[parameter.name] = &parameter;
  }
  RETURN_IF_ERROR(folder->Index());
  RETURN_IF_ERROR(folder->Check());
  return folder;
}

absl::Status HuggingFaceFolder::IndexFile(const std::string& name) {
  // A name from an index that is not ours must not lead out of the folder.
  if (name.empty() || absl::StrContains(name, '/')) {
    return absl::DataLossError(absl::StrFormat("%s: '%s' is not the name of a file in the folder",
                                               Join(directory_, kIndex), name.substr(0, 100)));
  }
  const std::string path = Join(directory_, name);
  ASSIGN_OR_RETURN(const SafetensorsHeader header, ReadSafetensorsHeader(files_, path));
  for (const SafetensorsEntry& entry : header.entries) {
    const Stored stored = {path, entry.dtype, entry.shape, header.bytes + entry.begin};
    const auto [found, added] =
        stored_.emplace(CanonicalTensorName(model_->description(), entry.name), stored);
    if (!added) {
      return absl::DataLossError(
          absl::StrCat(path, ": tensor '", entry.name, "' is also in ", found->second.path));
    }
  }
  return absl::OkStatus();
}

absl::Status HuggingFaceFolder::Index() {
  const std::string index_path = Join(directory_, kIndex);
  if (!files_.Exists(index_path)) {
    for (const char* other : {"pytorch_model.bin", "pytorch_model.bin.index.json"}) {
      if (files_.Exists(Join(directory_, kSingleFile)) || !files_.Exists(Join(directory_, other))) {
        continue;
      }
      return absl::NotFoundError(absl::StrCat(
          directory_, " has ", other, " and no ", kSingleFile,
          ": only safetensors are read. In transformers: model.save_pretrained(DIRECTORY)"));
    }
    return IndexFile(kSingleFile);
  }
  ASSIGN_OR_RETURN(const std::string text, files_.Read(index_path));
  std::set<std::string> names;
  const auto read = [&]() -> absl::Status {
    ASSIGN_OR_RETURN(const Json index, ParseObject(text));
    ASSIGN_OR_RETURN(const Json* map, ObjectAt(index, "weight_map"));
    for (const auto& [tensor, file] : map->items()) {
      if (!file.is_string()) {
        return absl::DataLossError(absl::StrCat("weight_map '", tensor, "' is not a text"));
      }
      names.insert(file.get<std::string>());
    }
    return absl::OkStatus();
  };
  RETURN_IF_ERROR(Annotate(read(), index_path));
  for (const std::string& name : names) RETURN_IF_ERROR(IndexFile(name));
  return absl::OkStatus();
}

absl::Status HuggingFaceFolder::Check() const {
  std::set<std::string> known;
  for (const HuggingFaceTensor& tensor : layout_.tensors) {
    known.insert(tensor.name);
    const auto found = stored_.find(tensor.name);
    if (found == stored_.end()) {
      return absl::InvalidArgumentError(absl::StrCat(directory_, ": tensor '", tensor.name, "' ",
                                                     ShapeText(tensor.shape), " is missing"));
    }
    const Stored& stored = found->second;
    if (stored.shape != tensor.shape) {
      return absl::InvalidArgumentError(
          absl::StrCat(stored.path, ": tensor '", tensor.name, "' is ", ShapeText(stored.shape),
                       ", the config makes it ", ShapeText(tensor.shape)));
    }
    if (!IsFloat(stored.dtype)) {
      return absl::InvalidArgumentError(absl::StrCat(stored.path, ": tensor '", tensor.name,
                                                     "' is ", Name(stored.dtype),
                                                     "; F32, BF16 and F16 are read"));
    }
  }
  for (const auto& [name, stored] : stored_) {
    if (known.count(name) == 0 && !IsDerivedTensor(model_->description(), name)) {
      return absl::InvalidArgumentError(
          absl::StrCat(stored.path, ": tensor '", name, "' ", ShapeText(stored.shape),
                       " is no part of the model that config.json describes"));
    }
  }
  return absl::OkStatus();
}

absl::Status HuggingFaceFolder::ReadSlice(const HuggingFaceSlice& slice, const Box& part,
                                          const Box& box, float* out) {
  const auto found = stored_.find(slice.tensor);
  CHECK(found != stored_.end()) << slice.tensor << " has passed Check()";
  const Stored& stored = found->second;
  const bool vector = part.extent.size() == 1;
  const int64_t columns = vector ? 1 : part.extent[1];
  const int64_t first_column = vector ? 0 : part.offset[1];
  const int64_t box_columns = vector ? 1 : box.extent[1];
  // In the stored tensor: rows x columns of what is needed, before any transposition.
  int64_t stored_row = slice.source_row + part.offset[0] - slice.row;
  int64_t stored_column = first_column;
  int64_t stored_rows = part.extent[0], stored_columns = columns;
  if (slice.transposed) {
    std::swap(stored_row, stored_column);
    std::swap(stored_rows, stored_columns);
  }
  // Of a row; [rows, 1, columns] is stored like [rows, columns].
  const int64_t width = vector ? 1 : stored.shape.back();
  const int64_t size = SizeOf(stored.dtype);
  // Whole rows are read: neighbours in the file are cheaper than seeks.
  const int64_t run = std::max<int64_t>(1, kReadBytes / (width * size));
  for (int64_t first = 0; first < stored_rows; first += run) {
    const int64_t count = std::min(run, stored_rows - first);
    ASSIGN_OR_RETURN(
        std::string bytes,
        files_.ReadRange(stored.path, stored.offset + (stored_row + first) * width * size,
                         count * width * size));
    const Tensor values(bytes.data(), stored.dtype, {count * width});
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t j = 0; j < stored_columns; ++j) {
        const float value = kernels::ReadAsFloat(values, i * width + stored_column + j);
        const int64_t row = slice.transposed ? j : first + i;
        const int64_t column = slice.transposed ? first + i : j;
        out[(part.offset[0] - box.offset[0] + row) * box_columns +
            (vector ? 0 : first_column - box.offset[1]) + column] = value;
      }
    }
  }
  return absl::OkStatus();
}

absl::Status HuggingFaceFolder::Read(const std::string& name, const Box& box, float* out) {
  const auto found = parameters_.find(name);
  if (found == parameters_.end()) {
    return absl::NotFoundError(absl::StrCat(directory_, ": no parameter '", name, "'"));
  }
  const HuggingFaceParameter& parameter = *found->second;
  if (!Inside(box, parameter.shape)) {
    return absl::InvalidArgumentError(absl::StrCat(
        name, ": box ", box.ToString(), " does not lie in ", ShapeText(parameter.shape)));
  }
  for (const HuggingFaceSlice& slice : parameter.slices) {
    Box rows = Box::Whole(parameter.shape);
    rows.offset[0] = slice.row;
    rows.extent[0] = slice.rows;
    const std::optional<Box> part = Intersect(rows, box);
    if (part.has_value()) RETURN_IF_ERROR(ReadSlice(slice, *part, box, out));
  }
  return absl::OkStatus();
}

namespace {

// What one of their tensors is made of: slices of our parameters, by source row.
using Sources =
    std::map<std::string,
             std::vector<std::pair<const HuggingFaceParameter*, const HuggingFaceSlice*>>>;

// One tensor of the export, in fp32, as stored there.
absl::StatusOr<std::vector<float>> Assemble(const HuggingFaceTensor& tensor, const Sources& sources,
                                            ParameterReader read) {
  std::vector<float> values(Elements(tensor.shape));
  const auto slices = sources.find(tensor.name);
  CHECK(slices != sources.end()) << tensor.name;
  int64_t filled = 0;
  for (const auto& [parameter, slice] : slices->second) {
    Box box = Box::Whole(parameter->shape);
    box.offset[0] = slice->row;
    box.extent[0] = slice->rows;
    const int64_t rows = slice->rows, columns = box.elements() / rows;
    std::vector<float> part(box.elements());
    RETURN_IF_ERROR(read(parameter->name, box, part.data()));
    if (slice->transposed) {
      const int64_t width = tensor.shape[1];
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t j = 0; j < columns; ++j) {
          values[j * width + slice->source_row + i] = part[i * columns + j];
        }
      }
    } else {
      std::copy(part.begin(), part.end(), values.begin() + slice->source_row * columns);
    }
    filled += box.elements();
  }
  CHECK_EQ(filled, static_cast<int64_t>(values.size())) << tensor.name;
  return values;
}

std::string Encode(const std::vector<float>& values, DType dtype) {
  std::string bytes(values.size() * SizeOf(dtype), '\0');
  const Tensor out(bytes.data(), dtype, {static_cast<int64_t>(values.size())});
  for (size_t i = 0; i < values.size(); ++i) {
    kernels::WriteFloat(out, static_cast<int64_t>(i), values[i]);
  }
  return bytes;
}

struct ExportFile {
  std::string name;
  SafetensorsHeader header;
  std::vector<const HuggingFaceTensor*> tensors;
};

std::vector<ExportFile> PlanFiles(const HuggingFaceLayout& layout,
                                  const HuggingFaceExport& options) {
  std::vector<ExportFile> plan(1);
  for (const HuggingFaceTensor& tensor : layout.tensors) {
    const int64_t bytes = Elements(tensor.shape) * SizeOf(options.dtype);
    int64_t begin = plan.back().header.entries.empty() ? 0 : plan.back().header.entries.back().end;
    if (begin > 0 && begin + bytes > options.file_bytes_max) {
      plan.emplace_back();
      begin = 0;
    }
    plan.back().header.entries.push_back(
        {tensor.name, options.dtype, tensor.shape, begin, begin + bytes});
    plan.back().tensors.push_back(&tensor);
  }
  for (size_t i = 0; i < plan.size(); ++i) {
    plan[i].header.metadata["format"] = "pt";  // transformers refuses files without it
    plan[i].name = plan.size() == 1
                       ? kSingleFile
                       : absl::StrFormat("model-%05d-of-%05d.safetensors", i + 1, plan.size());
  }
  return plan;
}

absl::StatusOr<int64_t> WriteFile(FileSystem& files, const std::string& path,
                                  const ExportFile& file, const Sources& sources,
                                  ParameterReader read, DType dtype) {
  ASSIGN_OR_RETURN(std::unique_ptr<WritableFile> out, files.Create(path));
  const std::string header = EncodeSafetensorsHeader(file.header);
  auto bytes = static_cast<int64_t>(header.size());
  RETURN_IF_ERROR(out->Append(header));
  for (const HuggingFaceTensor* tensor : file.tensors) {
    ASSIGN_OR_RETURN(const std::vector<float> values, Assemble(*tensor, sources, read));
    const std::string encoded = Encode(values, dtype);
    RETURN_IF_ERROR(out->Append(encoded));
    bytes += static_cast<int64_t>(encoded.size());
  }
  RETURN_IF_ERROR(out->Sync());
  RETURN_IF_ERROR(out->Close());
  return bytes;
}

std::string EncodeIndex(const std::vector<ExportFile>& plan) {
  Json map = Json::object();
  int64_t total = 0;
  for (const ExportFile& file : plan) {
    for (const HuggingFaceTensor* tensor : file.tensors) map[tensor->name] = file.name;
    total += file.header.entries.back().end;
  }
  return Json{{"metadata", {{"total_size", total}}}, {"weight_map", map}}.dump(2) + "\n";
}

}  // namespace

absl::StatusOr<int64_t> ExportToHuggingFace(FileSystem& files, const Model& model,
                                            ParameterReader read, const std::string& directory,
                                            const HuggingFaceExport& options) {
  CHECK(IsFloat(options.dtype));
  const std::string config_path = Join(directory, kConfig);
  if (files.Exists(config_path)) {
    return absl::AlreadyExistsError(
        absl::StrCat(config_path, " exists; choose another directory or remove it"));
  }
  ASSIGN_OR_RETURN(const std::string config,
                   ConfigForHuggingFace(model.description(), options.dtype));
  ASSIGN_OR_RETURN(const HuggingFaceLayout layout, LayoutForHuggingFace(model));
  Sources sources;
  for (const HuggingFaceParameter& parameter : layout.parameters) {
    for (const HuggingFaceSlice& slice : parameter.slices) {
      sources[slice.tensor].emplace_back(&parameter, &slice);
    }
  }
  RETURN_IF_ERROR(files.MakeDirectory(directory));
  const std::vector<ExportFile> plan = PlanFiles(layout, options);
  int64_t bytes = 0;
  for (const ExportFile& file : plan) {
    ASSIGN_OR_RETURN(const int64_t written, WriteFile(files, Join(directory, file.name), file,
                                                      sources, read, options.dtype));
    bytes += written;
  }
  if (plan.size() > 1) {
    RETURN_IF_ERROR(files.WriteAtomically(Join(directory, kIndex), EncodeIndex(plan)));
  }
  RETURN_IF_ERROR(files.WriteAtomically(config_path, config));
  return bytes;
}

}  // namespace muster::parallel
