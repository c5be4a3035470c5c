// A view of device memory: pointer, dtype, shape, strides. Owns nothing, allocates nothing.
#ifndef MUSTER_KERNELS_TENSOR_H_
#define MUSTER_KERNELS_TENSOR_H_

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "base/check.h"

namespace muster::kernels {

enum class DType : uint8_t { kF32, kBF16, kF16, kI32, kI64, kU8, kU16 };

int64_t SizeOf(DType dtype);
// "F32", "BF16", "F16", "I32", "I64", "U8", "U16": the names of safetensors.
const char* Name(DType dtype);

// At most four dimensions. Strides are in elements.
class Tensor {
 public:
  static constexpr int kRankMax = 4;

  Tensor() = default;
  // Contiguous, row-major.
  Tensor(void* data, DType dtype, std::initializer_list<int64_t> shape);
  Tensor(void* data, DType dtype, std::initializer_list<int64_t> shape,
         std::initializer_list<int64_t> strides);

  bool empty() const { return data_ == nullptr; }
  void* data() const { return data_; }
  // Requires: T has the dtype's size; checked.
  template <typename T>
  T* as() const {
    CHECK_EQ(static_cast<int64_t>(sizeof(T)), SizeOf(dtype_));
    return static_cast<T*>(data_);
  }
  float* f32() const {
    CHECK(dtype_ == DType::kF32);
    return static_cast<float*>(data_);
  }
  DType dtype() const { return dtype_; }
  int rank() const { return rank_; }
  int64_t dim(int i) const {
    CHECK(i >= 0 && i < rank_);
    return shape_[i];
  }
  int64_t stride(int i) const {
    CHECK(i >= 0 && i < rank_);
    return strides_[i];
  }
  int64_t elements() const;
  int64_t bytes() const { return elements() * SizeOf(dtype_); }
  bool contiguous() const;
  // Rows [begin, begin + count) of dimension 0.
  Tensor Rows(int64_t begin, int64_t count) const;
  // Same memory, another shape. Requires: contiguous, same number of elements.
  Tensor Reshape(std::initializer_list<int64_t> shape) const;
  std::string ToString() const;  // "F32[64, 768]"

 private:
  void* data_ = nullptr;
  DType dtype_ = DType::kF32;
  int rank_ = 0;
  std::array<int64_t, kRankMax> shape_{};
  std::array<int64_t, kRankMax> strides_{};
};

}  // namespace muster::kernels

#endif  // MUSTER_KERNELS_TENSOR_H_
