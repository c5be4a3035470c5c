#include "kernels/tensor.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace muster::kernels {

int64_t SizeOf(DType dtype) {
  switch (dtype) {
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kBF16:
    case DType::kF16:
    case DType::kU16:
      return 2;
    case DType::kI64:
      return 8;
    case DType::kU8:
      return 1;
  }
  CHECK(false) << "dtype " << static_cast<int>(dtype);
  return 0;
}

const char* Name(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "F32";
    case DType::kBF16:
      return "BF16";
    case DType::kF16:
      return "F16";
    case DType::kI32:
      return "I32";
    case DType::kI64:
      return "I64";
    case DType::kU8:
      return "U8";
    case DType::kU16:
      return "U16";
  }
  CHECK(false) << "dtype " << static_cast<int>(dtype);
  return "";
}

Tensor::Tensor(void* data, DType dtype, std::initializer_list<int64_t> shape)
    : data_(data), dtype_(dtype), rank_(static_cast<int>(shape.size())) {
  CHECK_LE(rank_, kRankMax);
  int i = 0;
  for (int64_t extent : shape) {
    CHECK_GE(extent, 0);
    shape_[i++] = extent;
  }
  int64_t stride = 1;
  for (i = rank_ - 1; i >= 0; --i) {
    strides_[i] = stride;
    stride *= shape_[i];
  }
}

Tensor::Tensor(void* data, DType dtype, std::initializer_list<int64_t> shape,
               std::initializer_list<int64_t> strides)
    : Tensor(data, dtype, shape) {
  CHECK_EQ(shape.size(), strides.size());
  int i = 0;
  for (int64_t stride : strides) strides_[i++] = stride;
}

int64_t Tensor::elements() const {
  int64_t count = 1;
  for (int i = 0; i < rank_; ++i) count *= shape_[i];
  return data_ == nullptr && rank_ == 0 ? 0 : count;
}

bool Tensor::contiguous() const {
  int64_t stride = 1;
  for (int i = rank_ - 1; i >= 0; --i) {
    // The stride of a dimension with one element is never used.
    if (shape_[i] != 1 && strides_[i] != stride) return elements() == 0;
    stride *= shape_[i];
  }
  return true;
}

Tensor Tensor::Rows(int64_t begin, int64_t count) const {
  CHECK_GE(rank_, 1);
  CHECK(begin >= 0 && count >= 0 && begin + count <= shape_[0])
      << "rows [" << begin << ", " << begin + count << ") of " << ToString();
  Tensor rows = *this;
  rows.data_ = static_cast<char*>(data_) + begin * strides_[0] * SizeOf(dtype_);
  rows.shape_[0] = count;
  return rows;
}

Tensor Tensor::Reshape(std::initializer_list<int64_t> shape) const {
  CHECK(contiguous()) << ToString() << " has gaps and cannot be reshaped";
  Tensor other(data_, dtype_, shape);
  CHECK_EQ(other.elements(), elements()) << ToString() << " to " << other.ToString();
  return other;
}

std::string Tensor::ToString() const {
  return absl::StrCat(Name(dtype_), "[",
                      absl::StrJoin(shape_.begin(), shape_.begin() + rank_, ", "), "]");
}

}  // namespace muster::kernels
