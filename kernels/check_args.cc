#include "kernels/check_args.h"

#include "base/check.h"

namespace muster::kernels {

bool IsActivation(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16;
}

void CheckIs(const char* name, const Tensor& x, DType dtype, std::initializer_list<int64_t> shape) {
  const Tensor expected(nullptr, dtype, shape);
  bool same = x.dtype() == dtype && x.rank() == expected.rank() && x.contiguous();
  for (int i = 0; same && i < x.rank(); ++i) same = x.dim(i) == expected.dim(i);
  CHECK(same) << name << " is " << x.ToString() << (x.contiguous() ? "" : " with gaps")
              << ", expected " << expected.ToString();
}

void CheckIsOrEmpty(const char* name, const Tensor& x, DType dtype,
                    std::initializer_list<int64_t> shape) {
  if (!x.empty()) CheckIs(name, x, dtype, shape);
}

void CheckHeads(const char* name, const Tensor& x, DType dtype, int64_t batch, int64_t sequence,
                int64_t heads, int64_t width) {
  CHECK(x.rank() == 4 && x.dtype() == dtype && x.dim(0) == batch && x.dim(1) == sequence &&
        x.dim(2) == heads && x.dim(3) == width && (x.stride(3) == 1 || width == 1))
      << name << " is " << x.ToString() << ", expected "
      << Tensor(nullptr, dtype, {batch, sequence, heads, width}).ToString()
      << " with a dense last dimension";
}

void CheckFp32(const Tensor& x) {
  CHECK(x.dtype() == DType::kF32 && x.contiguous()) << x.ToString();
}

void CheckSameFp32(const Tensor& x, const Tensor& y) {
  CheckFp32(x);
  CheckFp32(y);
  CHECK_EQ(x.elements(), y.elements());
}

void CheckRotary(const Tensor& x, const Tensor& table) {
  CHECK(x.rank() == 4 && IsActivation(x.dtype())) << x.ToString();
  CheckHeads("x", x, x.dtype(), x.dim(0), x.dim(1), x.dim(2), x.dim(3));
  CHECK_EQ(x.dim(3) % 2, 0);
  CheckIs("table", table, DType::kF32, {x.dim(1), x.dim(3)});
}

}  // namespace muster::kernels
