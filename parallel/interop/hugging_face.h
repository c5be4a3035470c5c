// Reading and writing Hugging Face model folders: config.json and model.safetensors, or several
// files with model.safetensors.index.json.
#ifndef MUSTER_PARALLEL_INTEROP_HUGGING_FACE_H_
#define MUSTER_PARALLEL_INTEROP_HUGGING_FACE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/file_system.h"
#include "kernels/tensor.h"
#include "parallel/checkpoint/box.h"
#include "parallel/interop/hugging_face_names.h"

namespace muster::parallel {

// A folder that is open for reading. Owns the model that its config describes (no memory for
// weights) and an index of its tensors. Not thread-safe.
class HuggingFaceFolder {
 public:
  // Reads config.json and the headers, no weights. kNotFound for missing files; kDataLoss for
  // garbled ones; kInvalidArgument for a config without a model of ours (see
  // DescriptionFromConfig), a tensor that is missing, has another shape or a dtype other than fp32,
  // bf16 and fp16, and for tensors that belong to no parameter of the model.
  static absl::StatusOr<std::unique_ptr<HuggingFaceFolder>> Open(FileSystem& files,
                                                                 const std::string& directory);

  const Model& model() const { return *model_; }
  // Fills `out` (row-major, box.elements() floats) with the box of our parameter `name`.
  absl::Status Read(const std::string& name, const Box& box, float* out);

 private:
  struct Stored {
    std::string path;
    kernels::DType dtype = kernels::DType::kF32;
    std::vector<int64_t> shape;
    int64_t offset = 0;  // in the file
  };

  HuggingFaceFolder(FileSystem& files, std::string directory)
      : files_(files), directory_(std::move(directory)) {}
  absl::Status Index();
  absl::Status IndexFile(const std::string& name);
  absl::Status Check() const;
  absl::Status ReadSlice(const HuggingFaceSlice& slice, const Box& part, const Box& box,
                         float* out);

  FileSystem& files_;
  const std::string directory_;
  std::unique_ptr<Model> model_;
  HuggingFaceLayout layout_;
  std::map<std::string, const HuggingFaceParameter*> parameters_;
  std::map<std::string, Stored> stored_;
};

struct HuggingFaceExport {
  kernels::DType dtype = kernels::DType::kBF16;  // fp32, bf16 or fp16; rounded to nearest
  int64_t file_bytes_max = int64_t{5} << 30;     // per safetensors file; at least one tensor each
};

// Provides a box of one of our parameters as floats, row-major.
using ParameterReader =
    absl::FunctionRef<absl::Status(const std::string& name, const Box& box, float* out)>;

// Writes the folder; the directory is made. config.json is written last, so that a folder with one
// is whole. One tensor is in memory at a time. kAlreadyExists when there is a config.json. Returns
// the bytes written.
absl::StatusOr<int64_t> ExportToHuggingFace(FileSystem& files, const Model& model,
                                            ParameterReader read, const std::string& directory,
                                            const HuggingFaceExport& options);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_INTEROP_HUGGING_FACE_H_
