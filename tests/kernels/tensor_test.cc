#include "kernels/tensor.h"

#include "gtest/gtest.h"

namespace muster::kernels {
namespace {

TEST(Tensor, Contiguous_RowMajor_HasStridesAndBytes) {
  float data[24] = {};
  const Tensor x(data, DType::kF32, {2, 3, 4});
  EXPECT_EQ(x.stride(0), 12);
  EXPECT_EQ(x.stride(2), 1);
  EXPECT_EQ(x.elements(), 24);
  EXPECT_EQ(x.bytes(), 96);
  EXPECT_TRUE(x.contiguous());
  EXPECT_EQ(x.ToString(), "F32[2, 3, 4]");
  EXPECT_EQ(x.Rows(1, 1).f32(), data + 12);
  EXPECT_EQ(x.Reshape({6, 4}).ToString(), "F32[6, 4]");
}

TEST(Tensor, Contiguous_StridesWithGapsOrOfOneElement_AreToldApart) {
  float data[24] = {};
  EXPECT_FALSE(Tensor(data, DType::kF32, {2, 3}, {12, 1}).contiguous());
  EXPECT_TRUE(Tensor(data, DType::kF32, {1, 3}, {12, 1}).contiguous());
  EXPECT_TRUE(Tensor(data, DType::kF32, {0, 3}, {12, 1}).contiguous());
}

TEST(Tensor, Default_IsEmptyWithoutElements) {
  EXPECT_TRUE(Tensor().empty());
  EXPECT_EQ(Tensor().elements(), 0);
}

TEST(TensorDeathTest, WrongUse_EndsTheProcessWithTheShape) {
  float data[6] = {};
  const Tensor x(data, DType::kF32, {2, 3});
  EXPECT_DEATH(x.Rows(1, 2), "rows \\[1, 3\\) of F32\\[2, 3\\]");
  EXPECT_DEATH(x.Reshape({4, 2}), "F32\\[2, 3\\] to F32\\[4, 2\\]");
  EXPECT_DEATH(x.as<double>(), "8 vs 4");
}

}  // namespace
}  // namespace muster::kernels
