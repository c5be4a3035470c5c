// What the CUDA kernels of the state-space scan share: views of the arguments of ssm.h, and the
// step sizes.
#ifndef MUSTER_KERNELS_SSM_SSD_PROBLEM_CUH_
#define MUSTER_KERNELS_SSM_SSD_PROBLEM_CUH_

#include <cstdint>

#include "kernels/cuda/pack.cuh"
#include "kernels/ssm/ssm.h"

namespace muster::kernels::cuda {

// [B,S,slots,columns] with dense columns: heads, groups, or dt's heads as columns of width 1.
template <typename T>
struct SsdView {
  T* data;
  int64_t sample, row, slot;  // strides

  __device__ T* At(int64_t b, int64_t t, int64_t i) const {
    return data + b * sample + t * row + i * slot;
  }
};
template <typename T>
SsdView<T> ViewOf(const Tensor& tensor) {
  if (tensor.empty()) return {nullptr, 0, 0, 0};
  return {tensor.as<T>(), tensor.stride(0), tensor.stride(1),
          tensor.rank() > 2 ? tensor.stride(2) : 0};
}

template <typename T>
struct SsdProblem {
  SsdView<T> x, dt, b, c, y;
  SsdView<int32_t> documents;  // data is null where there are none
  const float* dt_bias;
  const float* a_log;
  const float* d;
  const float* initial;                                       // [B,H,P,N] or null
  float* final_state;                                         // likewise
  int64_t samples, positions, heads, width, groups, columns;  // width P, columns N
  int64_t chunk, chunks;
  int64_t first_position;
  float step_min, step_max;

  // Backward.
  SsdView<T> dy, dx, ddt, db, dc;
  const float* d_final;
  float* d_initial;

  __device__ int64_t heads_of_group() const { return heads / groups; }
  __device__ bool BeginsDocument(int64_t b, int64_t t) const {
    return documents.data != nullptr && *documents.At(b, t, 0) == first_position + t;
  }
};

template <typename T>
SsdProblem<T> DescribeSsd(const SsdArgs& args) {
  SsdProblem<T> p{};
  p.x = ViewOf<T>(args.x);
  p.dt = ViewOf<T>(args.dt);
  p.b = ViewOf<T>(args.b);
  p.c = ViewOf<T>(args.c);
  p.y = ViewOf<T>(args.y);
  p.documents = ViewOf<int32_t>(args.documents);
  p.dt_bias = args.dt_bias.f32();
  p.a_log = args.a_log.f32();
  p.d = args.d.f32();
  p.initial = args.initial_state.empty() ? nullptr : args.initial_state.f32();
  p.final_state = args.final_state.empty() ? nullptr : args.final_state.f32();
  p.samples = args.x.dim(0);
  p.positions = args.x.dim(1);
  p.heads = args.x.dim(2);
  p.width = args.x.dim(3);
  p.groups = args.b.dim(2);
  p.columns = args.b.dim(3);
  p.chunk = args.chunk;
  p.chunks = CeilDiv(p.positions, p.chunk);
  p.first_position = args.first_position;
  p.step_min = args.step_min;
  p.step_max = args.step_max;
  return p;
}
template <typename T>
SsdProblem<T> DescribeSsd(const SsdBackwardArgs& args) {
  SsdProblem<T> p = DescribeSsd<T>(args.forward);
  p.dy = ViewOf<T>(args.dy);
  p.dx = ViewOf<T>(args.dx);
  p.ddt = ViewOf<T>(args.ddt);
  p.db = ViewOf<T>(args.db);
  p.dc = ViewOf<T>(args.dc);
  p.d_final = args.d_final_state.empty() ? nullptr : args.d_final_state.f32();
  p.d_initial = args.d_initial_state.empty() ? nullptr : args.d_initial_state.f32();
  return p;
}

// The size of a step, and its derivative by dt: 0 where it is clamped.
struct SsdStep {
  float size, slope;

  template <typename T>
  __device__ SsdStep(const SsdProblem<T>& p, int64_t b, int64_t t, int64_t h) {
    const float raw = ToFloat(*p.dt.At(b, t, h)) + p.dt_bias[h];
    // log(1 + e^x) without overflow; the identity where they agree in fp32.
    const float soft = raw > 20 ? raw : log1pf(expf(raw));
    size = fminf(fmaxf(soft, p.step_min), p.step_max);
    slope = soft == size ? 1 / (1 + expf(-raw)) : 0;
  }
};

}  // namespace muster::kernels::cuda

#endif  // MUSTER_KERNELS_SSM_SSD_PROBLEM_CUH_
