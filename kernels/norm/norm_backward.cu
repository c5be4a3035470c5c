// Backward of layer norm and RMS norm: dx = dx + rstd (g - mean(g) - xhat mean(g xhat)) with
// g = dy gamma, xhat = (x - mean) rstd; no mean(g) in an RMS norm. One pass: a thread owns packs of
// columns and walks over rows, so that dgamma and dbeta add up in its registers while dx is
// written; the blocks' results are then added in block order (reduce.cu). Bytes: 3 reads and 1
// write of [T,C].
// On Hopper one block runs on each multiprocessor, so that there are few results of blocks. Teams
// of one to eight warps take a row each, which TMA has brought into the team's ring in shared
// memory. On other devices a thread takes one pack of columns, and copies itself what it will read.
#include <algorithm>
#include <iterator>

#include "kernels/cuda/column_sum.cuh"
#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/overlap.cuh"
#include "kernels/cuda/pack.cuh"
#include "kernels/device/device_cuda.h"
#include "kernels/norm/norm.h"

namespace muster::kernels::cuda {
namespace {

constexpr int kAnyThreads = 256;
constexpr int kTeamThreads = 256;  // of a block, in all its teams
constexpr int kMaxStages = 8;
// Bytes of rows in flight to a multiprocessor. Twice as many are slower.
constexpr int64_t kRingBytes = 112 << 10;

// kLayerAndSums: with the column sums of dx.
enum class Norm { kRms, kLayer, kLayerAndSums };
__host__ __device__ constexpr int SumsOf(Norm norm) {
  return norm == Norm::kRms ? 1 : norm == Norm::kLayer ? 2 : 3;
}

template <typename T>
struct BackwardData {
  const T* dy;
  const T* x;
  FloatVector gamma;
  const float* mean;
  const float* rstd;
  T* dx;
  float* partial;  // [blocks][2 or 3][columns]: dgamma, dbeta, sums of dx
  int64_t rows;
  int columns;
};

// ---- Hopper: a row a team -----------------------------------------------------------------------

__host__ __device__ constexpr int TeamsOf(int warps) { return kTeamThreads / (warps * kWarp); }

// The layout of a block's shared memory.
struct TeamMemory {
  int packs;   // of 16 bytes in a row
  int stages;  // rows of a team's ring
  // First the rings [teams][stages][dy, x, dx][packs]. When all rows have been read, the teams'
  // sums take their place, [teams][sums][columns] floats, for which two stages suffice.
  __host__ __device__ int RingPacks(int teams) const { return teams * stages * 3 * packs; }
  // Then gamma [N / 4][packs] of four floats.
  __host__ __device__ int64_t Bytes(int teams, int columns) const {
    return int64_t{16} * RingPacks(teams) + int64_t{4} * columns;
  }
};

// The rows of one team, which its first lane loads in order.
template <typename T>
struct TeamRing {
  const BackwardData<T>& d;
  const TeamMemory& memory;
  uint4* slots;
  uint64_t* full;  // [stages]
  bool leads;

  __device__ void Init() const {
    if (!leads) return;
    for (int s = 0; s < memory.stages; ++s) hopper::InitBarrier(Barrier(s), 1);
    hopper::FenceBarrierInit();
  }
  __device__ uint32_t Barrier(int stage) const { return hopper::SharedAddress(full + stage); }
  __device__ const uint4* Slot(int stage) const { return slots + stage * 3 * memory.packs; }
  // Requires: the team has read what was in this stage.
  __device__ void Fetch(int64_t row, int stage) const {
    if (!leads || row >= d.rows) return;
    const int64_t at = row * d.columns;
    const uint32_t bytes = memory.packs * 16, slot = hopper::SharedAddress(Slot(stage));
    hopper::ArriveExpecting(Barrier(stage), 3 * bytes);
    hopper::LoadBytes(d.dy + at, bytes, slot, Barrier(stage));
    hopper::LoadBytes(d.x + at, bytes, slot + bytes, Barrier(stage));
    hopper::LoadBytes(d.dx + at, bytes, slot + 2 * bytes, Barrier(stage));
  }
};

// The sum over all lanes of a team, through `shared` (one per warp), which must not be reused in
// the next call.
template <int kWarps>
__device__ inline float2 TeamSum(float2 x, int team, bool both, float2* shared) {
  if (both) x.x = WarpSum(x.x);
  x.y = WarpSum(x.y);
  if constexpr (kWarps == 1) {
    __syncwarp();
    return x;
  }
  const int lane = threadIdx.x % (kWarps * kWarp);
  if (lane % kWarp == 0) shared[lane / kWarp] = x;
  hopper::NamedBarrier(1 + team, kWarps * kWarp);
  float2 sum = {0, 0};
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    sum.x += shared[w].x;
    sum.y += shared[w].y;
  }
  return sum;
}

// Team t of block b takes rows b + t * blocks, and every (blocks * teams)-th from there, kPacks
// packs a lane.
template <typename T, int kPacks, int kWarps, Norm kNorm>
__global__ void __launch_bounds__(kTeamThreads, 1)
    NormBackwardTeamKernel(const BackwardData<T> d, const TeamMemory memory) {
#if __CUDA_ARCH__ >= 900
  constexpr int N = kPackSize<T>;
  constexpr int kLanes = kWarps * kWarp, kTeams = TeamsOf(kWarps), kSums = SumsOf(kNorm);
  constexpr bool kRms = kNorm == Norm::kRms, kSumsDx = kNorm == Norm::kLayerAndSums;
  extern __shared__ uint4 dynamic[];
  __shared__ uint64_t full[kTeams][kMaxStages];
  __shared__ float2 shared[2][kTeams][kWarps];
  const int packs = memory.packs;
  const int team = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const TeamRing<T> ring{d, memory, dynamic + team * memory.RingPacks(1), full[team], lane == 0};
  float4* const gamma = reinterpret_cast<float4*>(dynamic + memory.RingPacks(kTeams));
  float* const team_sums = reinterpret_cast<float*>(dynamic);
  ring.Init();
  WaitForPreviousKernel();
  LetNextKernelBegin();
  const int64_t first = blockIdx.x + static_cast<int64_t>(team) * gridDim.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kTeams;
  for (int s = 0; s < memory.stages; ++s) ring.Fetch(first + s * step, s);
  for (int p = threadIdx.x; p < packs; p += kTeamThreads) {
    float g[N];
    d.gamma.template Load<N>(p * N, g);
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      gamma[i / 4 * packs + p] = float4{g[i], g[i + 1], g[i + 2], g[i + 3]};
    }
  }
  const auto load_gamma = [&](int k, float(&g)[N]) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const float4 v = gamma[i / 4 * packs + k * kLanes + lane];
      g[i] = v.x, g[i + 1] = v.y, g[i + 2] = v.z, g[i + 3] = v.w;
    }
  };
  float next_rstd = 0, next_mean = 0;
  const auto fetch_statistics = [&](int64_t row) {
    if (row >= d.rows) return;
    next_rstd = d.rstd[row];
    if constexpr (!kRms) next_mean = d.mean[row];
  };
  fetch_statistics(first);
  __syncthreads();  // the barriers, gamma

  const float inverse_columns = 1.f / d.columns;
  const bool last_is_active = (kPacks - 1) * kLanes + lane < packs;
  const auto active = [&](int k) { return k < kPacks - 1 || last_is_active; };
  float dgamma[kPacks][N] = {};
  float dbeta[kPacks][kRms ? 1 : N] = {};
  float dx_sums[kPacks][kSumsDx ? N : 1] = {};
  int stage = 0, set = 0;
  uint32_t parity = 0;
  for (int64_t row = first; row < d.rows; row += step, set ^= 1) {
    const float rstd = next_rstd;
    const float shift = kRms ? 0.f : -next_mean * next_rstd;  // xhat = x rstd + shift
    fetch_statistics(row + step);
    hopper::WaitBarrier(ring.Barrier(stage), parity);
    const uint4* const slot = ring.Slot(stage) + lane;
    const auto read = [&](int which, int k) {
      return *reinterpret_cast<const Pack<T, N>*>(slot + which * packs + k * kLanes);
    };
    Pack<T, N> dy[kPacks] = {}, x[kPacks] = {}, dx[kPacks] = {};
    float2 sums = {0, 0};  // of g and of g xhat
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if (!active(k)) continue;
      dy[k] = read(0, k);
      x[k] = read(1, k);
      dx[k] = read(2, k);
      float weight[N];
      load_gamma(k, weight);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float gradient = dy[k][i], g = gradient * weight[i];
        const float xhat = x[k][i] * rstd + shift;
        dgamma[k][i] += gradient * xhat;
        if constexpr (!kRms) {
          dbeta[k][i] += gradient;
          sums.x += g;
        }
        sums.y += g * xhat;
      }
    }
    sums = TeamSum<kWarps>(sums, team, !kRms, shared[set][team]);
    ring.Fetch(row + memory.stages * step, stage);  // the team has read it
    const float mean_g = sums.x * inverse_columns, mean_gx = sums.y * inverse_columns;
    T* const to = d.dx + row * d.columns + lane * N;
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if (!active(k)) continue;
      float weight[N], out[N];
      load_gamma(k, weight);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float xhat = x[k][i] * rstd + shift, g = dy[k][i] * weight[i];
        out[i] = dx[k][i] + rstd * (g - mean_g - xhat * mean_gx);
      }
      const Pack<T, N> rounded = FromFloats<T>(out);
      StorePack<N>(to + k * kLanes * N, rounded);
      if constexpr (kSumsDx) {
#pragma unroll
        for (int i = 0; i < N; ++i) dx_sums[k][i] += rounded[i];
      }
    }
    if (++stage == memory.stages) {
      stage = 0;
      parity ^= 1;
    }
  }

  // The sums of the teams are added in their order.
  __syncthreads();  // every team has read its ring
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    if (!active(k)) continue;
    float* const mine = team_sums + team * kSums * d.columns + (k * kLanes + lane) * N;
    StorePack<N>(mine, FromFloats<float>(dgamma[k]));
    if constexpr (!kRms) StorePack<N>(mine + d.columns, FromFloats<float>(dbeta[k]));
    if constexpr (kSumsDx) StorePack<N>(mine + 2 * d.columns, FromFloats<float>(dx_sums[k]));
  }
  __syncthreads();
  const int width = kSums * d.columns;
  for (int c = threadIdx.x * 4; c < width; c += kTeamThreads * 4) {
    float total[4] = {};
#pragma unroll
    for (int t = 0; t < kTeams; ++t) {
      float of_team[4];
      LoadFloats<4>(team_sums + t * width + c, of_team);
#pragma unroll
      for (int i = 0; i < 4; ++i) total[i] += of_team[i];
    }
    StorePack<4>(d.partial + static_cast<int64_t>(blockIdx.x) * width + c,
                 FromFloats<float>(total));
  }
#endif
}

// ---- any device: a row a block ------------------------------------------------------------------

// A thread takes one pack of columns. The block walks over rows, R at a time, whose sums are
// reduced in one step, while the next S - 1 times R rows are in flight. kThreads bounds the block,
// and kBlocks the registers: that many blocks fit a multiprocessor.
template <typename T, int kThreads, int kBlocks, int R, int S, bool kRms>
__global__ void __launch_bounds__(kThreads, kBlocks) NormBackwardKernel(const BackwardData<T> d) {
  constexpr int N = kPackSize<T>;
  extern __shared__ uint4 ring[];  // [S][R][dy, x, dx][threads]
  // Two sets take turns, so that one barrier a step is enough.
  __shared__ alignas(16) float2 shared[2][kWarp][R];
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const int warps = blockDim.x / kWarp;
  const int column = threadIdx.x * N;
  const bool active = column < d.columns;
  const float inverse_columns = 1.f / d.columns;
  const int64_t step = static_cast<int64_t>(gridDim.x) * R;
  float gamma[N] = {};
  float dgamma[N] = {};
  float dbeta[kRms ? 1 : N] = {};
  if (active) d.gamma.template Load<N>(column, gamma);
  const auto slot = [&](int stage, int r, int which) {
    return ring + ((stage * R + r) * 3 + which) * blockDim.x + threadIdx.x;
  };
  const auto fetch = [&](int64_t row0, int stage) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (!active || row0 + r >= d.rows) continue;
      const int64_t at = (row0 + r) * d.columns + column;
      CopyAsync16(slot(stage, r, 0), d.dy + at);
      CopyAsync16(slot(stage, r, 1), d.x + at);
      CopyAsync16(slot(stage, r, 2), d.dx + at);
    }
    CommitCopies();  // an empty group too: they are counted
  };
  float next_rstd[R] = {}, next_shift[R] = {};  // xhat = x rstd + shift
  const auto fetch_statistics = [&](int64_t row0) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (row0 + r >= d.rows) continue;
      next_rstd[r] = d.rstd[row0 + r];
      if constexpr (!kRms) next_shift[r] = d.mean[row0 + r];
    }
  };
  const int64_t first = static_cast<int64_t>(blockIdx.x) * R;
  fetch_statistics(first);
#pragma unroll
  for (int s = 0; s < S - 1; ++s) fetch(first + s * step, s);
  int set = 0;
  int stage = 0;
  for (int64_t row0 = first; row0 < d.rows; row0 += step, set ^= 1) {
    // Into the stage that was read in the last step.
    fetch(row0 + (S - 1) * step, stage == 0 ? S - 1 : stage - 1);
    float rstd[R], shift[R];
#pragma unroll
    for (int r = 0; r < R; ++r) {
      rstd[r] = next_rstd[r];
      shift[r] = kRms ? 0.f : -next_shift[r] * next_rstd[r];
    }
    fetch_statistics(row0 + step);
    WaitCopies<S - 1>();
    const auto read = [&](int r, int which) {
      return *reinterpret_cast<const Pack<T, N>*>(slot(stage, r, which));
    };
    Pack<T, N> dy[R] = {}, x[R] = {};
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (active && row0 + r < d.rows) {
        dy[r] = read(r, 0);
        x[r] = read(r, 1);
      }
      float2 sums = {0, 0};  // of g and of g xhat
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float gradient = dy[r][i];
        const float xhat = x[r][i] * rstd[r] + shift[r];
        dgamma[i] += gradient * xhat;
        if constexpr (!kRms) {
          dbeta[i] += gradient;
          sums.x += gradient * gamma[i];
        }
        sums.y += gradient * gamma[i] * xhat;
      }
      if constexpr (!kRms) sums.x = WarpSum(sums.x);
      sums.y = WarpSum(sums.y);
      if (lane == 0) shared[set][warp][r] = sums;
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < R; ++r) {
      float2 totals = {0, 0};
      for (int w = 0; w < warps; ++w) {
        totals.x += shared[set][w][r].x;
        totals.y += shared[set][w][r].y;
      }
      if (!active || row0 + r >= d.rows) continue;
      const Pack<T, N> dx = read(r, 2);
      const float mean_g = totals.x * inverse_columns;
      const float mean_gx = totals.y * inverse_columns;
      float out[N];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float xhat = x[r][i] * rstd[r] + shift[r];
        const float g = dy[r][i] * gamma[i];
        out[i] = dx[i] + rstd[r] * (g - mean_g - xhat * mean_gx);
      }
      StorePack<N>(d.dx + (row0 + r) * d.columns + column, FromFloats<T>(out));
    }
    stage = stage + 1 == S ? 0 : stage + 1;
  }
  if (!active) return;
  float* const partial = d.partial + blockIdx.x * (kRms ? int64_t{1} : 2) * d.columns + column;
  StorePack<N>(partial, FromFloats<float>(dgamma));
  if constexpr (!kRms) StorePack<N>(partial + d.columns, FromFloats<float>(dbeta));
}

// Any width and alignment; dgamma and dbeta of the block add up in `partial`.
template <typename T, bool kRms>
__global__ void __launch_bounds__(kAnyThreads) NormBackwardAnyKernel(const BackwardData<T> d) {
  __shared__ float shared[2][kWarp];
  constexpr int64_t kSums = kRms ? 1 : 2;
  float* const partial = d.partial + blockIdx.x * kSums * d.columns;
  for (int c = threadIdx.x; c < kSums * d.columns; c += kAnyThreads) partial[c] = 0;
  __syncthreads();
  for (int64_t row = blockIdx.x; row < d.rows; row += gridDim.x) {
    const int64_t start = row * d.columns;
    const float mean = kRms ? 0.f : d.mean[row];
    const float rstd = d.rstd[row];
    float sum_g = 0;
    float sum_gx = 0;
    for (int c = threadIdx.x; c < d.columns; c += kAnyThreads) {
      const float gradient = ToFloat(d.dy[start + c]);
      const float xhat = (ToFloat(d.x[start + c]) - mean) * rstd;
      partial[c] += gradient * xhat;
      if constexpr (!kRms) partial[d.columns + c] += gradient;
      sum_g += gradient * d.gamma[c];
      sum_gx += gradient * d.gamma[c] * xhat;
    }
    const float mean_g = kRms ? 0.f : BlockSum(sum_g, shared[0]) / d.columns;
    const float mean_gx = BlockSum(sum_gx, shared[1]) / d.columns;
    for (int c = threadIdx.x; c < d.columns; c += kAnyThreads) {
      const float xhat = (ToFloat(d.x[start + c]) - mean) * rstd;
      const float g = ToFloat(d.dy[start + c]) * d.gamma[c];
      d.dx[start + c] =
          FromFloat<T>(ToFloat(d.dx[start + c]) + rstd * (g - mean_g - xhat * mean_gx));
    }
    __syncthreads();  // `shared` is written again in the next row
  }
}

// ---- configurations, as measured on an H200 ----------------------------------------------------

template <typename T>
struct TeamConfig {
  int warps;  // of a row
  int packs;  // of a lane
  void (*kernel)(BackwardData<T>, TeamMemory);
};
// Ascending in the length of the rows that they hold; the first one that holds a row is taken.
template <typename T, Norm kNorm>
constexpr TeamConfig<T> kTeamConfigs[] = {
    {1, 1, NormBackwardTeamKernel<T, 1, 1, kNorm>}, {1, 2, NormBackwardTeamKernel<T, 2, 1, kNorm>},
    {1, 3, NormBackwardTeamKernel<T, 3, 1, kNorm>}, {1, 4, NormBackwardTeamKernel<T, 4, 1, kNorm>},
    {1, 5, NormBackwardTeamKernel<T, 5, 1, kNorm>}, {2, 3, NormBackwardTeamKernel<T, 3, 2, kNorm>},
    {2, 4, NormBackwardTeamKernel<T, 4, 2, kNorm>}, {4, 3, NormBackwardTeamKernel<T, 3, 4, kNorm>},
    {4, 4, NormBackwardTeamKernel<T, 4, 4, kNorm>}, {8, 3, NormBackwardTeamKernel<T, 3, 8, kNorm>},
    {8, 4, NormBackwardTeamKernel<T, 4, 8, kNorm>},
};

template <typename T>
struct BlockConfig {
  int threads;  // at most
  int rows;     // of a step
  int stages;
  void (*kernel)(BackwardData<T>);
};
template <typename T, bool kRms, int kThreads, int kBlocks, int R, int S>
constexpr BlockConfig<T> kBlockConfig = {kThreads, R, S,
                                         NormBackwardKernel<T, kThreads, kBlocks, R, S, kRms>};
template <typename T, bool kRms>
constexpr BlockConfig<T> kBlockConfigs[] = {
    kBlockConfig<T, kRms, 128, 5, 2, 3>, kBlockConfig<T, kRms, 160, 4, 2, 3>,
    kBlockConfig<T, kRms, 192, 3, 2, 3>, kBlockConfig<T, kRms, 256, 2, 2, 2>,
    kBlockConfig<T, kRms, 320, 2, 2, 3>, kBlockConfig<T, kRms, 512, 1, 2, 3>,
    kBlockConfig<T, kRms, 640, 1, 1, 4>, kBlockConfig<T, kRms, 1024, 1, 1, 3>,
};

// The number of blocks whose sums are in d->partial; 0 where rows are too long or the device is too
// old, and then nothing was launched.
template <typename T, Norm kNorm>
int64_t LaunchTeams(CudaStream& stream, const char* op, BackwardData<T>* d) {
  constexpr int kSums = SumsOf(kNorm);
  const CudaDevice& device = stream.cuda_device();
  TeamMemory memory{.packs = d->columns / kPackSize<T>};
  const auto* const end = std::end(kTeamConfigs<T, kNorm>);
  const auto* const config = std::find_if(
      std::begin(kTeamConfigs<T, kNorm>), end,
      [&](const TeamConfig<T>& c) { return memory.packs <= c.packs * c.warps * kWarp; });
  if (config == end || !IsBuiltForHopper(config->kernel)) return 0;
  const auto kernel = config->kernel;
  const int teams = TeamsOf(config->warps);
  memory.stages = static_cast<int>(
      std::clamp<int64_t>(kRingBytes / (int64_t{teams} * 3 * memory.packs * 16), 2, kMaxStages));
  static_assert(kSums * sizeof(float) <= 2 * 3 * sizeof(T), "two stages hold the sums");
  const int64_t shared = memory.Bytes(teams, d->columns);
  if (shared > device.shared_bytes_per_block()) return 0;
  if (!stream.Check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         static_cast<int>(shared)),
                    op)) {
    return 0;
  }
  const int64_t blocks = std::min<int64_t>(CeilDiv(d->rows, teams), device.multiprocessors());
  d->partial = static_cast<float*>(
      stream.Scratch(blocks * kSums * d->columns * static_cast<int64_t>(sizeof(float))));
  if (d->partial == nullptr) return 0;
  LaunchOverlapped(stream, kernel, blocks, kTeamThreads, shared, *d, memory);
  return stream.CheckLaunch(op) ? blocks : 0;
}

struct Sums {
  float* dgamma;
  float* dbeta = nullptr;  // layer norm only
  bool accumulate;
};

template <typename T, bool kRms>
void LaunchBackward(CudaStream& stream, const char* op, BackwardData<T> d, bool packs,
                    const Sums& sums) {
  const int64_t threads = CeilDiv(CeilDiv(d.columns, kPackSize<T>), kWarp) * kWarp;
  const auto launch = [&](auto kernel, int64_t block, int64_t rows, int64_t slots) {
    const auto shared = static_cast<int>(slots * block * static_cast<int64_t>(sizeof(uint4)));
    // As many blocks as run at once, so that all get the same share of the rows.
    int resident = 0;
    if (!stream.Check(
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared),
            op) ||
        !stream.Check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
                          &resident, kernel, static_cast<int>(block), shared),
                      op)) {
      return;
    }
    const int64_t blocks =
        std::min<int64_t>(CeilDiv(d.rows, rows),
                          int64_t{std::max(resident, 1)} * stream.cuda_device().multiprocessors());
    d.partial = static_cast<float*>(
        stream.Scratch(blocks * (kRms ? 1 : 2) * d.columns * static_cast<int64_t>(sizeof(float))));
    if (d.partial == nullptr) return;
    kernel<<<static_cast<unsigned>(blocks), static_cast<unsigned>(block), shared,
             stream.handle()>>>(d);
    stream.CheckLaunch(op);
    AddPartials(stream, d.partial, blocks, d.columns, sums.accumulate, sums.dgamma, sums.dbeta);
  };
  if (!packs) return launch(NormBackwardAnyKernel<T, kRms>, kAnyThreads, 1, 0);
  const auto* const config =
      std::find_if(std::begin(kBlockConfigs<T, kRms>), std::end(kBlockConfigs<T, kRms>),
                   [&](const BlockConfig<T>& c) { return threads <= c.threads; });
  launch(config->kernel, threads, config->rows, config->rows * config->stages * 3);
}

template <typename T>
bool InPacks(const BackwardData<T>& d) {
  return Aligned16(d.dy) && Aligned16(d.x) && Aligned16(d.dx) && Aligned16(d.gamma.data) &&
         d.columns % kPackSize<T> == 0 && d.columns <= 1024 * kPackSize<T>;
}

template <typename T>
void Backward(CudaStream& stream, const LayerNormBackwardArgs& args) {
  constexpr char kOp[] = "LayerNormBackward";
  BackwardData<T> d{args.dy.as<T>(),     args.x.as<T>(),  AsFloatVector(args.gamma),
                    args.mean.f32(),     args.rstd.f32(), args.dx.as<T>(),
                    /*partial=*/nullptr, args.dy.dim(0),  static_cast<int>(args.dy.dim(1))};
  const bool packs = InPacks(d), sums_dx = !args.dx_sums.empty();
  int64_t blocks = 0;
  if (packs) {
    blocks = sums_dx ? LaunchTeams<T, Norm::kLayerAndSums>(stream, kOp, &d)
                     : LaunchTeams<T, Norm::kLayer>(stream, kOp, &d);
  }
  if (blocks > 0) {
    AddPartials(stream, d.partial, blocks, d.columns, args.accumulate, args.dgamma.f32(),
                args.dbeta.f32(), sums_dx ? args.dx_sums.f32() : nullptr, args.accumulate_dx_sums);
    return;
  }
  LaunchBackward<T, false>(stream, kOp, d, packs,
                           {args.dgamma.f32(), args.dbeta.f32(), args.accumulate});
  if (!sums_dx) return;
  void* const scratch =
      stream.Scratch(ColumnSumScratchBytes(stream.cuda_device(), d.rows, d.columns));
  if (scratch != nullptr) {
    ColumnSum(stream, args.dx, args.dx_sums, args.accumulate_dx_sums, scratch);
  }
}

template <typename T>
void Backward(CudaStream& stream, const RmsNormBackwardArgs& args) {
  constexpr char kOp[] = "RmsNormBackward";
  BackwardData<T> d{args.dy.as<T>(),     args.x.as<T>(),  AsFloatVector(args.gamma),
                    /*mean=*/nullptr,    args.rstd.f32(), args.dx.as<T>(),
                    /*partial=*/nullptr, args.dy.dim(0),  static_cast<int>(args.dy.dim(1))};
  const bool packs = InPacks(d);
  const int64_t blocks = packs ? LaunchTeams<T, Norm::kRms>(stream, kOp, &d) : 0;
  if (blocks > 0) {
    AddPartials(stream, d.partial, blocks, d.columns, args.accumulate, args.dgamma.f32(), nullptr);
  } else {
    LaunchBackward<T, true>(stream, kOp, d, packs,
                            {args.dgamma.f32(), /*dbeta=*/nullptr, args.accumulate});
  }
}

}  // namespace

void LayerNormBackward(Stream& stream, const LayerNormBackwardArgs& args) {
  if (args.dy.dim(0) == 0) return;
  DispatchFloat(args.dy.dtype(),
                [&](auto tag) { Backward<decltype(tag)>(CudaStream::Of(stream), args); });
}

void RmsNormBackward(Stream& stream, const RmsNormBackwardArgs& args) {
  if (args.dy.dim(0) == 0) return;
  DispatchFloat(args.dy.dtype(),
                [&](auto tag) { Backward<decltype(tag)>(CudaStream::Of(stream), args); });
}

}  // namespace muster::kernels::cuda
