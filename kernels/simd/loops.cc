// Compiled once per instruction set; see loops.h. Nothing of the standard library may be
// instantiated here: an inline function compiled for AVX-512 could be the copy that the linker
// keeps for the whole program.
#include "kernels/simd/loops.h"

#include "kernels/simd/optimizer_loops.h"
#include "kernels/simd/vector.h"

namespace muster::kernels {
namespace {

// The sum over [0, n) of term(load, i): four accumulators hide the latency of the additions.
template <typename Term>
MUSTER_INLINE float SumTerms(int64_t n, Term term) {
  Vec a{}, b{}, c{}, d{};
  int64_t i = 0;
  for (; i + 4 * kWidth <= n; i += 4 * kWidth) {
    a += term(WholeLoad{}, i);
    b += term(WholeLoad{}, i + kWidth);
    c += term(WholeLoad{}, i + 2 * kWidth);
    d += term(WholeLoad{}, i + 3 * kWidth);
  }
  for (; i + kWidth <= n; i += kWidth) a += term(WholeLoad{}, i);
  if (i < n) b += term(TailLoad{n - i}, i);
  return SumOf((a + b) + (c + d));
}

// store(i, value(load, i)) over [0, n).
template <typename Value>
MUSTER_INLINE void Map(int64_t n, float* out, Value value) {
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) Store(out + i, value(WholeLoad{}, i));
  if (i < n) StoreTail(out + i, value(TailLoad{n - i}, i), n - i);
}

void ExpArray(int64_t n, const float* x, float* y) {
  Map(n, y, [=](auto load, int64_t i) MUSTER_LAMBDA { return Exp(load(x + i)); });
}

void Add(int64_t n, const float* a, const float* b, float* out) {
  Map(n, out, [=](auto load, int64_t i) MUSTER_LAMBDA { return load(a + i) + load(b + i); });
}

void Axpy(int64_t n, float alpha, const float* x, float* y) {
  Map(n, y, [=](auto load, int64_t i) MUSTER_LAMBDA { return load(y + i) + alpha * load(x + i); });
}

void Scale(int64_t n, float alpha, float* x) {
  Map(n, x, [=](auto load, int64_t i) MUSTER_LAMBDA { return alpha * load(x + i); });
}

// Blocks are summed in fp32, the blocks in double.
constexpr int64_t kSumBlock = 4096;

double SumArray(int64_t n, const float* x) {
  double sum = 0;
  for (int64_t begin = 0; begin < n; begin += kSumBlock) {
    const float* block = x + begin;
    const int64_t count = n - begin < kSumBlock ? n - begin : kSumBlock;
    sum += SumTerms(count, [=](auto load, int64_t i) MUSTER_LAMBDA { return load(block + i); });
  }
  return sum;
}

typedef double DoubleVec __attribute__((vector_size(MUSTER_SIMD_WIDTH * 4)));
typedef float HalfVec __attribute__((vector_size(MUSTER_SIMD_WIDTH * 2)));

// Squares of fp32 overflow and underflow early, so they are formed in double.
double SumSquares(int64_t n, const float* x) {
  constexpr int64_t kHalf = kWidth / 2;
  DoubleVec accumulators[4] = {};
  int64_t i = 0;
  for (; i + 4 * kHalf <= n; i += 4 * kHalf) {
    for (int64_t j = 0; j < 4; ++j) {
      HalfVec half;
      __builtin_memcpy(&half, x + i + j * kHalf, sizeof(half));
      const DoubleVec wide = __builtin_convertvector(half, DoubleVec);
      accumulators[j] += wide * wide;
    }
  }
  const DoubleVec total = (accumulators[0] + accumulators[1]) + (accumulators[2] + accumulators[3]);
  double sum = 0;
  for (int64_t j = 0; j < kHalf; ++j) sum += total[j];
  for (; i < n; ++i) sum += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  return sum;
}

float Dot(int64_t n, const float* a, const float* b) {
  return SumTerms(n, [=](auto load, int64_t i) MUSTER_LAMBDA { return load(a + i) * load(b + i); });
}

void LayerNormForward(int64_t c, const float* residual, const float* branch, float* sum,
                      const float* gamma, const float* beta, float epsilon, float* y, float* mean,
                      float* rstd) {
  const float* x = residual;
  if (branch != nullptr) {
    Add(c, residual, branch, sum);
    x = sum;
  } else if (sum != nullptr && sum != residual) {
    Map(c, sum, [=](auto load, int64_t i) MUSTER_LAMBDA { return load(residual + i); });
  }
  const float count = static_cast<float>(c);
  const float average =
      SumTerms(c, [=](auto load, int64_t i) MUSTER_LAMBDA { return load(x + i); }) / count;
  // A second pass over the row in L1 instead of E[x^2] - E[x]^2, which cancels. The tail is loaded
  // as 0 and must not count, so it is added apart.
  const int64_t whole = c / kWidth * kWidth;
  float squares = SumTerms(whole, [=](auto load, int64_t i) MUSTER_LAMBDA {
    const Vec difference = load(x + i) - average;
    return difference * difference;
  });
  for (int64_t i = whole; i < c; ++i) squares += (x[i] - average) * (x[i] - average);
  const float inverse = 1.0f / __builtin_sqrtf(squares / count + epsilon);
  Map(c, y, [=](auto load, int64_t i) MUSTER_LAMBDA {
    return (load(x + i) - average) * inverse * load(gamma + i) + load(beta + i);
  });
  *mean = average;
  *rstd = inverse;
}

// With n = (x - mean) rstd and g = dy gamma: dx += rstd (g - mean(g) - n mean(g n)).
void LayerNormBackwardRow(int64_t c, const float* dy, const float* x, const float* gamma,
                          float mean, float rstd, float* dx) {
  const float count = static_cast<float>(c);
  const float g_mean = SumTerms(c, [=](auto load, int64_t i)
                                       MUSTER_LAMBDA { return load(dy + i) * load(gamma + i); }) /
                       count;
  // The tail is 0 here too, because dy is.
  const float gn_mean =
      SumTerms(c,
               [=](auto load, int64_t i) MUSTER_LAMBDA {
                 return load(dy + i) * load(gamma + i) * ((load(x + i) - mean) * rstd);
               }) /
      count;
  Map(c, dx, [=](auto load, int64_t i) MUSTER_LAMBDA {
    const Vec n = (load(x + i) - mean) * rstd;
    return load(dx + i) + rstd * (load(dy + i) * load(gamma + i) - g_mean - n * gn_mean);
  });
}

void LayerNormBackwardColumns(int64_t t, int64_t n, int64_t stride, const float* dy, const float* x,
                              const float* mean, const float* rstd, float* dgamma, float* dbeta) {
  auto column = [=](auto load, auto store, int64_t i) MUSTER_LAMBDA {
    Vec gamma_sum{}, beta_sum{};
    for (int64_t row = 0; row < t; ++row) {
      const Vec d = load(dy + row * stride + i);
      gamma_sum += d * ((load(x + row * stride + i) - mean[row]) * rstd[row]);
      beta_sum += d;
    }
    store(dgamma + i, load(dgamma + i) + gamma_sum);
    store(dbeta + i, load(dbeta + i) + beta_sum);
  };
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) {
    column(
        WholeLoad{}, [](float* p, Vec v) MUSTER_LAMBDA { Store(p, v); }, i);
  }
  if (i < n) {
    const int64_t rest = n - i;
    column(
        TailLoad{rest}, [=](float* p, Vec v) MUSTER_LAMBDA { StoreTail(p, v, rest); }, i);
  }
}

void AddColumnSums(int64_t t, int64_t n, int64_t stride, const float* x, float* out) {
  int64_t i = 0;
  for (; i + 4 * kWidth <= n; i += 4 * kWidth) {
    Vec a{}, b{}, c{}, d{};
    for (int64_t row = 0; row < t; ++row) {
      const float* p = x + row * stride + i;
      a += Load(p);
      b += Load(p + kWidth);
      c += Load(p + 2 * kWidth);
      d += Load(p + 3 * kWidth);
    }
    Store(out + i, Load(out + i) + a);
    Store(out + i + kWidth, Load(out + i + kWidth) + b);
    Store(out + i + 2 * kWidth, Load(out + i + 2 * kWidth) + c);
    Store(out + i + 3 * kWidth, Load(out + i + 3 * kWidth) + d);
  }
  for (; i < n; ++i) {
    float sum = 0;
    for (int64_t row = 0; row < t; ++row) sum += x[row * stride + i];
    out[i] += sum;
  }
}

// gelu(x) = x / (1 + exp(-2u)), u = sqrt(2/pi) (x + 0.044715 x^3): the tanh form without a tanh,
// and without its cancellation for large negative x.
constexpr float kTwoRootTwoOverPi = 1.5957691216057308f;
constexpr float kCubic = 0.044715f;

MUSTER_INLINE Vec GeluSigmoid(Vec x) {
  const Vec two_u = kTwoRootTwoOverPi * x * (1.0f + kCubic * x * x);
  return 1.0f / (1.0f + Exp(-two_u));
}

MUSTER_INLINE Vec Gelu(Vec x) { return x * GeluSigmoid(x); }

MUSTER_INLINE Vec GeluDerivative(Vec x) {
  const Vec s = GeluSigmoid(x);
  return s + x * (s * (1.0f - s)) * (kTwoRootTwoOverPi * (1.0f + 3 * kCubic * x * x));
}

void GeluForward(int64_t n, const float* x, float* y) {
  Map(n, y, [=](auto load, int64_t i) MUSTER_LAMBDA { return Gelu(load(x + i)); });
}

void GeluBackward(int64_t n, const float* x, const float* dy, float* dx) {
  Map(n, dx, [=](auto load, int64_t i) MUSTER_LAMBDA {
    return load(dy + i) * GeluDerivative(load(x + i));
  });
}

void AddBias(int64_t n, const float* bias, float* y) { Add(n, y, bias, y); }

void AddBiasGelu(int64_t n, const float* bias, float* y, float* pre) {
  if (bias != nullptr) {
    Add(n, y, bias, pre);
  } else {
    Map(n, pre, [=](auto load, int64_t i) MUSTER_LAMBDA { return load(y + i); });
  }
  GeluForward(n, pre, y);
}

float MaxArray(int64_t n, const float* z) {
  if (n < kWidth) {
    return MaxOf(LoadTail(z, n, z[0]));
  }
  Vec a = Load(z), b = a;
  int64_t i = 0;
  for (; i + 2 * kWidth <= n; i += 2 * kWidth) {
    a = Max(Load(z + i), a);
    b = Max(Load(z + i + kWidth), b);
  }
  for (; i + kWidth <= n; i += kWidth) a = Max(Load(z + i), a);
  if (i < n) b = Max(LoadTail(z + i, n - i, z[0]), b);
  return MaxOf(Max(a, b));
}

float SoftmaxBlock(int64_t n, int64_t valid, float scale, float* s, float* m, float* l) {
  const float block_max = scale * MaxArray(valid, s);
  const float shift = block_max > *m ? block_max : *m;
  float sum = 0;
  Vec sums{};
  int64_t i = 0;
  for (; i + kWidth <= valid; i += kWidth) {
    const Vec e = Exp(scale * Load(s + i) - shift);
    Store(s + i, e);
    sums += e;
  }
  if (i < valid) {
    const Vec e = Exp(scale * LoadTail(s + i, valid - i) - shift);
    StoreTail(s + i, e, valid - i);
    for (int64_t j = 0; j < valid - i; ++j) sum += e[j];
  }
  for (i = valid; i < n; ++i) s[i] = 0;
  const float factor = Exp(Broadcast(*m - shift))[0];
  *l = *l * factor + (SumOf(sums) + sum);
  *m = shift;
  return factor;
}

void SoftmaxProbabilities(int64_t n, int64_t valid, float scale, float lse, const float* s,
                          float* p) {
  Map(valid, p, [=](auto load, int64_t i) MUSTER_LAMBDA { return Exp(scale * load(s + i) - lse); });
  for (int64_t i = valid; i < n; ++i) p[i] = 0;
}

void SoftmaxBackward(int64_t n, float scale, float delta, const float* p, const float* dp,
                     float* ds) {
  Map(n, ds, [=](auto load, int64_t i) MUSTER_LAMBDA {
    return scale * load(p + i) * (load(dp + i) - delta);
  });
}

double SumExp(int64_t n, float shift, bool store, float* z) {
  double sum = 0;
  for (int64_t begin = 0; begin < n; begin += kSumBlock) {
    const int64_t end = n - begin < kSumBlock ? n : begin + kSumBlock;
    Vec a{}, b{};
    int64_t i = begin;
    for (; i + 2 * kWidth <= end; i += 2 * kWidth) {
      const Vec e = Exp(Load(z + i) - shift), f = Exp(Load(z + i + kWidth) - shift);
      if (store) {
        Store(z + i, e);
        Store(z + i + kWidth, f);
      }
      a += e;
      b += f;
    }
    sum += SumOf(a + b);
    for (; i < end; i += kWidth) {
      const int64_t count = end - i < kWidth ? end - i : kWidth;
      const Vec e = Exp(LoadTail(z + i, count) - shift);
      if (store) StoreTail(z + i, e, count);
      for (int64_t j = 0; j < count; ++j) sum += e[j];
    }
  }
  return sum;
}

}  // namespace

extern const Loops MUSTER_SIMD_SYMBOL(kLoops);
const Loops MUSTER_SIMD_SYMBOL(kLoops) = {
    .name = MUSTER_STRING(MUSTER_SIMD_NAME),
    .exp = ExpArray,
    .add = Add,
    .axpy = Axpy,
    .scale = Scale,
    .sum = SumArray,
    .sum_squares = SumSquares,
    .dot = Dot,
    .layer_norm_forward = LayerNormForward,
    .layer_norm_backward_row = LayerNormBackwardRow,
    .layer_norm_backward_columns = LayerNormBackwardColumns,
    .add_column_sums = AddColumnSums,
    .gelu_forward = GeluForward,
    .gelu_backward = GeluBackward,
    .add_bias = AddBias,
    .add_bias_gelu = AddBiasGelu,
    .softmax_block = SoftmaxBlock,
    .softmax_probabilities = SoftmaxProbabilities,
    .softmax_backward = SoftmaxBackward,
    .max = MaxArray,
    .sum_exp = SumExp,
    .adamw = MUSTER_SIMD_SYMBOL(AdamW),
    .split_master = MUSTER_SIMD_SYMBOL(SplitMaster),
    .join_master = MUSTER_SIMD_SYMBOL(JoinMaster),
    .normals = MUSTER_SIMD_SYMBOL(Normals),
};

}  // namespace muster::kernels
