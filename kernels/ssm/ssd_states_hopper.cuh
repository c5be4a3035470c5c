// The states in front of chunks, from the first chunk on, or the gradients of the states behind
// them, from the last (ssd_hopper.cuh). A block scans a slice of a head of one sample with N
// columns; where there are few, with 64, or a segment of a long sequence: a first pass then leaves
// what each segment makes of a state of zero, ChainKernel makes of it the states in front of
// segments, and a second pass starts from those. Each warpgroup keeps 64 rows of the state in its
// registers, in fp32; a producer thread loads half chunks ahead. Bytes: x or dy and the states,
// once; B or C once for every head, out of the L2 cache.
#ifndef MUSTER_KERNELS_SSM_SSD_STATES_HOPPER_CUH_
#define MUSTER_KERNELS_SSM_SSD_STATES_HOPPER_CUH_

#include "kernels/ssm/ssd_hopper.cuh"

namespace muster::kernels::cuda::ssd {

constexpr int kHalf = 64;  // positions of a stage
constexpr int kStateStages = 2;

// P rows, N of the state's columns.
template <int P, int N>
struct StatesLayout {
  static constexpr int kGroups = P / 64;
  static constexpr int kThreads = kGroups * kWarpgroup + 32;
  static constexpr int kLeftBytes = kHalf * P * 2;
  static constexpr int kRightBytes = kHalf * N * 2;
  static constexpr int kStageBytes = kLeftBytes + kRightBytes;
  static constexpr int kOutBytes = P * N * 2;
  // Of a stage: two rows of factors of a half chunk, and the last 16 bytes of kEntry.
  static constexpr int kScaleBytes = 2 * kHalf * 4 + 16;
  static constexpr int kSharedBytes =
      kAlignment + kStateStages * (kStageBytes + kScaleBytes) + kOutBytes + 2 * kStateStages * 8;
};

struct StatesParams {
  const float* factors;
  const float* first;  // [B,H,segments,width,columns] fp32 or null: what segments start from
  float* last;         // [B,H,width,columns] or null: what the last segment ends with
  float* ends;         // [B,H,segments,width,columns] in the first pass, which stores no states
  HeadSlices all;
  int width, heads_of_group, chunks, columns, column_slices;
  int segments, segment;  // how many, and chunks of one
};

// What a block scans. Chunks count in the order of the scan.
struct StatesPlace {
  int b, h, row, column, segment, begin, end;  // the first row and column

  template <int P, int N>
  __device__ StatesPlace(const StatesParams& p, std::integral_constant<int, P>,
                         std::integral_constant<int, N>) {
    column = blockIdx.x % p.column_slices * N;
    segment = blockIdx.x / p.column_slices % p.segments;
    const int slices = p.all.heads * p.all.slices;
    const int slice = blockIdx.x / p.column_slices / p.segments % slices;
    h = p.all.Head(slice);
    row = p.all.template Row<P>(slice);
    b = blockIdx.x / p.column_slices / p.segments / slices;
    begin = segment * p.segment;
    end = min(p.chunks, begin + p.segment);
  }
};

constexpr int kChainThreads = 256;
constexpr int kSegmentsMax = 64;
// Turns the ends of segments into what the segments start from; a block takes kChainThreads
// elements of a state of a head. `first` [B,H,size] or null.
template <bool kReverse>
__global__ void __launch_bounds__(kChainThreads)
    ChainKernel(const StatesParams p, const float* first, int size) {
  __shared__ float decays[kSegmentsMax];
  const int slices = (size + kChainThreads - 1) / kChainThreads, heads = p.all.heads;
  const int64_t head = blockIdx.x / slices;  // over samples
  const int64_t b = head / heads, h = head % heads;
  const int lane = threadIdx.x % 32;
  for (int i = threadIdx.x / 32; i + 1 < p.segments; i += kChainThreads / 32) {
    float decay = 1;
    for (int at = i * p.segment + lane; at < (i + 1) * p.segment; at += 32) {
      const int64_t chunk = b * p.chunks + (kReverse ? p.chunks - 1 - at : at);
      decay *= p.factors[((chunk * heads + h) * kFactors + kEntry + 1) * kChunk - 1];
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      decay *= __shfl_xor_sync(0xffffffffu, decay, offset);
    }
    if (lane == 0) decays[i] = decay;
  }
  __syncthreads();
  const int64_t i = blockIdx.x % slices * kChainThreads + threadIdx.x;
  if (i >= size) return;
  float state = first == nullptr ? 0 : first[head * size + i];
  float* at = p.ends + head * p.segments * size + i;
  for (int segment = 0; segment < p.segments; ++segment, at += size) {
    const float end = segment + 1 < p.segments ? *at : 0;
    *at = state;
    if (segment + 1 < p.segments) state = decays[segment] * state + end;
  }
}

#if MUSTER_WARPGROUP

template <int P, int N>
struct StatesShared {
  using Layout = StatesLayout<P, N>;
  uint32_t start;

  __device__ uint32_t Left(int stage) const { return start + stage * Layout::kStageBytes; }
  __device__ uint32_t Right(int stage) const { return Left(stage) + Layout::kLeftBytes; }
  __device__ uint32_t Out() const { return Left(kStateStages); }
  __device__ uint32_t Scale(int stage) const {
    return Out() + Layout::kOutBytes + stage * Layout::kScaleBytes;
  }
  __device__ uint32_t Full(int stage) const { return Scale(kStateStages) + stage * 8; }
  __device__ uint32_t Empty(int stage) const { return Full(kStateStages + stage); }
};

template <bool kReverse, int P, int N>
__device__ inline void ProduceStates(const CUtensorMap& left, const CUtensorMap& right,
                                     const StatesParams& p, const StatesShared<P, N>& shared,
                                     const StatesPlace& place) {
  using Layout = StatesLayout<P, N>;
  hopper::Turn<kStateStages> turn;
  const int b = place.b, h = place.h, group = h / p.heads_of_group;
  for (int i = place.begin; i < place.end; ++i) {
    const int chunk = kReverse ? p.chunks - 1 - i : i;
    const float* const factors =
        p.factors +
        ((static_cast<int64_t>(b) * p.chunks + chunk) * p.all.heads + h) * (kFactors * kChunk);
    for (int half = 0; half < 2; ++half, turn.Next()) {
      const int row = chunk * kChunk + half * kHalf;
      const uint32_t full = shared.Full(turn.stage), scale = shared.Scale(turn.stage);
      hopper::WaitBarrier(shared.Empty(turn.stage), turn.parity ^ 1);
      hopper::ArriveExpecting(full, Layout::kStageBytes + Layout::kScaleBytes);
      for (int slab = 0; slab < P / kSlab; ++slab) {
        hopper::LoadHeadBox(&left, place.row + slab * kSlab, h, row, b,
                            shared.Left(turn.stage) + slab * kHalf * kRowBytes, full);
      }
      for (int slab = 0; slab < N / kSlab; ++slab) {
        hopper::LoadHeadBox(&right, place.column + slab * kSlab, group, row, b,
                            shared.Right(turn.stage) + slab * kHalf * kRowBytes, full);
      }
      const float* const one = factors + (kReverse ? kEntry : kExit) * kChunk + half * kHalf;
      const float* const other = factors + kStep * kChunk + half * kHalf;
      hopper::LoadBytes(one, kHalf * 4, scale, full);
      hopper::LoadBytes(other, kHalf * 4, scale + kHalf * 4, full);
      hopper::LoadBytes(factors + kEntry * kChunk + kChunk - 4, 16, scale + 2 * kHalf * 4, full);
    }
  }
}

// Starts state += the scaled rows of a half chunk (outer) its columns. `operand` is in use until
// the MMAs are done.
template <bool kReverse, typename T, int P, int N>
__device__ inline void AddHalf(float (&state)[N / 8][4], uint32_t (&operand)[4][4], int stage,
                               const StatesShared<P, N>& shared) {
  const int group = threadIdx.x / kWarpgroup, warp = threadIdx.x / 32 % 4;
  const uint32_t slab = shared.Left(stage) + group * kHalf * kRowBytes;
  const uint32_t scale = shared.Scale(stage) + threadIdx.x % 4 * 8;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    LoadTransposed(slab, i * 16, warp * 16, operand[i]);
#pragma unroll
    for (int k = 0; k < 2; ++k) {  // columns 0 and 8 of 16
      float2 by = LoadFloatPair(scale + (i * 16 + k * 8) * 4);
      if constexpr (!kReverse) {
        const float2 step = LoadFloatPair(scale + (kHalf + i * 16 + k * 8) * 4);
        by = {by.x * step.x, by.y * step.y};
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float2 x = Unpack<T>(operand[i][2 * k + j]);
        operand[i][2 * k + j] = PackPair<T>(x.x * by.x, x.y * by.y);
      }
    }
  }
  hopper::FenceWgmma();
  MultiplyColumns<T, 4>(state, operand, shared.Right(stage), kHalf, true);
  hopper::CommitWgmma();
}

template <bool kReverse, typename T, int P, int N>
__device__ inline void ScanStates(const CUtensorMap& states, const StatesParams& p,
                                  const StatesShared<P, N>& shared, const StatesPlace& place) {
  const int b = place.b, h = place.h, heads = p.all.heads;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = place.row + warp * kWarpRows + lane / 4;  // and that + 8
  const int column = place.column + lane % 4 * 2;
  const int64_t head = static_cast<int64_t>(b) * heads + h;
  // In a state [width, columns].
  const int own = row * p.columns + column, size = p.width * p.columns;
  const auto is_inside = [&](int j, int i) {
    return row + i / 2 * 8 < p.width && column + j * 8 < p.columns;
  };
  float state[N / 8][4];
  Clear(state);
  if (p.first != nullptr) {
    const float* const from = p.first + (head * p.segments + place.segment) * size + own;
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (is_inside(j, i)) state[j][i] = from[i / 2 * 8 * p.columns + j * 8 + i % 2];
      }
    }
  }
  // A warp's rows of the tile that is written out.
  const uint32_t out = shared.Out() + warp * kWarpRows * kRowBytes;
  hopper::Turn<kStateStages> turn;
  uint32_t operands[2][4][4];
  const auto store = [&](int chunk) {
    if (lane == 0) AwaitStores();
    __syncwarp();
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      const uint32_t slab = out + j / 8 * P * kRowBytes;
      StoreWord(PairAt(slab, lane / 4, j % 8, lane % 4), PackPair<T>(state[j][0], state[j][1]));
      StoreWord(PairAt(slab, lane / 4 + 8, j % 8, lane % 4), PackPair<T>(state[j][2], state[j][3]));
    }
    hopper::FenceAsyncProxy();
    __syncwarp();
    if (lane == 0) {
      const int to = (b * p.chunks + chunk) * heads + h;
      for (int slab = 0; slab < N / kSlab; ++slab) {
        StoreHeadBox(&states, place.column + slab * kSlab, 0, place.row + warp * kWarpRows, to,
                     out + slab * P * kRowBytes);
      }
    }
  };
  for (int i = place.begin; i < place.end; ++i) {
    if (p.ends == nullptr) store(kReverse ? p.chunks - 1 - i : i);
    const int first = turn.stage;
    hopper::WaitBarrier(shared.Full(turn.stage), turn.parity);
    const float decay = LoadFloat(shared.Scale(turn.stage) + 2 * kHalf * 4 + 12);
    ScaleRows(state, decay, decay);
    AddHalf<kReverse, T>(state, operands[0], turn.stage, shared);
    turn.Next();
    hopper::WaitBarrier(shared.Full(turn.stage), turn.parity);
    AddHalf<kReverse, T>(state, operands[1], turn.stage, shared);
    hopper::WaitWgmma<1>();
    FenceRegisters(operands[0]);
    if (lane == 0) hopper::Arrive(shared.Empty(first));
    hopper::WaitWgmma<0>();
    FenceRegisters(operands[1]);
    FenceRegisters(state);
    if (lane == 0) hopper::Arrive(shared.Empty(turn.stage));
    turn.Next();
  }
  float* to = p.ends != nullptr ? p.ends + (head * p.segments + place.segment) * size : nullptr;
  if (p.last != nullptr && place.segment == p.segments - 1) to = p.last + head * size;
  if (to != nullptr) {
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (is_inside(j, i)) to[own + i / 2 * 8 * p.columns + j * 8 + i % 2] = state[j][i];
      }
    }
  }
  if (lane == 0) AwaitStoresDone();
}

#endif  // MUSTER_WARPGROUP

// `left` is x or dy, `right` B or C; boxes of kHalf rows. Boxes of `states` have kWarpRows rows.
template <bool kReverse, typename T, int P, int N>
__global__ void __launch_bounds__((StatesLayout<P, N>::kThreads), (P == 64 ? 3 : 2))
    StatesKernel(const __grid_constant__ CUtensorMap left,
                 const __grid_constant__ CUtensorMap right,
                 const __grid_constant__ CUtensorMap states,
                 const __grid_constant__ StatesParams p) {
#if MUSTER_WARPGROUP
  using Layout = StatesLayout<P, N>;
  extern __shared__ char unaligned[];
  const StatesShared<P, N> shared{(hopper::SharedAddress(unaligned) + kAlignment - 1) &
                                  ~(kAlignment - 1u)};
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStateStages; ++stage) {
      hopper::InitBarrier(shared.Full(stage), 1);
      hopper::InitBarrier(shared.Empty(stage), Layout::kGroups * 4);
    }
    hopper::FenceBarrierInit();
  }
  __syncthreads();
  const StatesPlace place(p, std::integral_constant<int, P>(), std::integral_constant<int, N>());
  // Nothing starts from what the last segment ends with.
  if (p.ends != nullptr && place.segment == p.segments - 1) return;
  if (threadIdx.x >= Layout::kGroups * kWarpgroup) {
    if (threadIdx.x % 32 == 0) ProduceStates<kReverse>(left, right, p, shared, place);
  } else {
    ScanStates<kReverse, T>(states, p, shared, place);
  }
#endif
}

}  // namespace muster::kernels::cuda::ssd

#endif  // MUSTER_KERNELS_SSM_SSD_STATES_HOPPER_CUH_
