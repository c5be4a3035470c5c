// The problem that all attention kernels work on, for any view of its tensors. Device code only.
#ifndef MUSTER_KERNELS_ATTENTION_ATTENTION_PROBLEM_CUH_
#define MUSTER_KERNELS_ATTENTION_ATTENTION_PROBLEM_CUH_

#include <cmath>
#include <cstdint>

#include "kernels/attention/attention.h"
#include "kernels/cuda/pack.cuh"
#include "kernels/tensor.h"

namespace muster::kernels::cuda {

constexpr float kLog2E = 1.4426950408889634f;

// [B,S,heads,D] with strides.
template <typename T>
struct HeadsView {
  T* data;
  int64_t batch_stride, row_stride, head_stride;

  __device__ T* Head(int b, int head) const { return data + b * batch_stride + head * head_stride; }
};
template <typename T>
HeadsView<T> ViewHeads(const Tensor& t) {
  return {t.as<T>(), t.stride(0), t.stride(1), t.stride(2)};
}
// Whether every row of every head starts at a multiple of 16 bytes, of 16-bit elements.
inline bool WholePacks(const Tensor& t) {
  return Aligned16(t) && t.stride(0) % 8 == 0 && t.stride(1) % 8 == 0 && t.stride(2) % 8 == 0;
}

// View: a tensor [B,S,heads,D] with strides. dout, dq, dk and dv are set in backward only.
template <typename View>
struct AttentionProblem {
  View q, k, v, out, dout, dq, dk, dv;
  float *lse, *delta;        // [B,H,S]
  const int32_t* documents;  // or null; see AttentionArgs
  int64_t documents_stride, key_position;
  int batch, heads, key_heads, queries, keys, width;
  float scale;
  bool causal;

  __device__ int64_t Statistic(int b, int head, int row) const {
    return (static_cast<int64_t>(b) * heads + head) * queries + row;
  }
  // The first key that a query sees. A row past the end is treated as the last one.
  __device__ int FirstKey(int b, int row) const {
    if (documents == nullptr) return 0;
    const int64_t begin = documents[b * documents_stride + min(row, queries - 1)];
    return static_cast<int>(begin > key_position ? begin - key_position : 0);
  }
};

inline float ScaleOf(const AttentionArgs& args) {
  return args.scale != 0 ? args.scale : 1.f / std::sqrt(static_cast<float>(args.q.dim(3)));
}

// `view` makes a View of a tensor.
template <typename View, typename MakeView>
AttentionProblem<View> ProblemOf(const AttentionArgs& args, MakeView view) {
  AttentionProblem<View> p{};
  p.q = view(args.q);
  p.k = view(args.k);
  p.v = view(args.v);
  p.out = view(args.out);
  p.lse = args.lse.f32();
  if (!args.documents.empty()) {
    p.documents = args.documents.as<int32_t>();
    p.documents_stride = args.documents.stride(0);
    p.key_position = args.key_position;
  }
  p.batch = static_cast<int>(args.q.dim(0));
  p.heads = static_cast<int>(args.q.dim(2));
  p.key_heads = static_cast<int>(args.k.dim(2));
  p.queries = static_cast<int>(args.q.dim(1));
  p.keys = static_cast<int>(args.k.dim(1));
  p.width = static_cast<int>(args.q.dim(3));
  p.scale = ScaleOf(args);
  p.causal = args.causal;
  return p;
}
template <typename View, typename MakeView>
AttentionProblem<View> ProblemOf(const AttentionBackwardArgs& args, MakeView view) {
  AttentionProblem<View> p = ProblemOf<View>(args.forward, view);
  p.dout = view(args.dout);
  p.dq = view(args.dq);
  p.dk = view(args.dk);
  p.dv = view(args.dv);
  p.delta = args.delta.f32();
  return p;
}

}  // namespace muster::kernels::cuda

#endif  // MUSTER_KERNELS_ATTENTION_ATTENTION_PROBLEM_CUH_
