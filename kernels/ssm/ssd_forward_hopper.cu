// Launches of ssd_forward_hopper.cuh, and the factors that forward and backward share.
#include "kernels/ssm/ssd_forward_hopper.cuh"

#include "kernels/ssm/ssd_hopper.h"
#include "kernels/ssm/ssd_hopper_launch.cuh"

namespace muster::kernels::cuda {
namespace ssd {

// Thread t of a block finds the borders of position t; then a warp takes one head after the other,
// a lane four positions of it. Step sizes are read along heads and reach their positions through
// shared memory.
template <typename T>
__global__ void __launch_bounds__(kChunk)
    PrepareKernel(const __grid_constant__ SsdProblem<T> p, float* factors, int32_t* borders) {
  constexpr int kOwn = kChunk / 32;  // positions of a lane
  __shared__ float steps[kChunk][kHeadsOfPrepare + 1];
  __shared__ int first[kChunk];
  const int64_t head_blocks = (p.heads + kHeadsOfPrepare - 1) / kHeadsOfPrepare;
  const int64_t head = blockIdx.x % head_blocks * kHeadsOfPrepare;
  const int64_t chunk = blockIdx.x / head_blocks;  // over samples
  const int64_t b = chunk / p.chunks, begin = chunk % p.chunks * kChunk;
  const int t = threadIdx.x, lane = t % 32, warp = t / 32;
#pragma unroll 8
  for (int i = t; i < kChunk * kHeadsOfPrepare; i += kChunk) {
    const int position = i / kHeadsOfPrepare, h = i % kHeadsOfPrepare;
    steps[position][h] = begin + position < p.positions && head + h < p.heads
                             ? SsdStep(p, b, begin + position, head + h).size
                             : 0;
  }
  first[t] = begin + t < p.positions && p.BeginsDocument(b, begin + t) ? t : -1;
  __syncthreads();
  if (borders != nullptr) {
    int own_first = first[t], next = kChunk;
    for (int i = t; i >= 0 && own_first < 0; --i) own_first = first[i];
    for (int i = kChunk - 1; i > t; --i) next = first[i] >= 0 ? i : next;
    __syncthreads();
    first[t] = own_first;
    if (head == 0) {
      borders[chunk * 2 * kChunk + t] = own_first;
      borders[(chunk * 2 + 1) * kChunk + t] = next;
    }
    __syncthreads();
  }
  const int last_first = first[kChunk - 1];
  for (int h = warp; h < kHeadsOfPrepare && head + h < p.heads; h += kChunk / 32) {
    const float a = -expf(p.a_log[head + h]) * kLog2E;
    float step[kOwn], sum[kOwn], shifted[kOwn], entry[kOwn], exit[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      step[i] = steps[lane * kOwn + i][h];
      // Below the floor a step's decay is 0 in fp32; sums keep more digits with it.
      sum[i] = fmaxf(step[i] * a, kExponentMin) + (i > 0 ? sum[i - 1] : 0);
    }
    float before = sum[kOwn - 1];
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const float more = __shfl_up_sync(0xffffffffu, before, offset);
      if (lane >= offset) before += more;
    }
    const float total = __shfl_sync(0xffffffffu, before, 31);
    before = __shfl_up_sync(0xffffffffu, before, 1);
    if (lane == 0) before = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int position = lane * kOwn + i;
      sum[i] += before;
      shifted[i] = sum[i] - log2f(step[i]);
      entry[i] = first[position] < 0 ? exp2f(sum[i]) : 0;
      // Rounding may leave a position's sum below the total.
      exit[i] = position >= last_first ? exp2f(fminf(total - sum[i], 0)) : 0;
    }
    float* const to = factors + ChunkOfHead(p, chunk, head + h) * (kFactors * kChunk) + lane * kOwn;
    StorePack<kOwn>(to + kSum * kChunk, FromFloats<float>(sum));
    StorePack<kOwn>(to + kShifted * kChunk, FromFloats<float>(shifted));
    StorePack<kOwn>(to + kEntry * kChunk, FromFloats<float>(entry));
    StorePack<kOwn>(to + kExit * kChunk, FromFloats<float>(exit));
    StorePack<kOwn>(to + kStep * kChunk, FromFloats<float>(step));
  }
}

template <typename T>
Prepared Prepare(CudaStream& stream, const SsdProblem<T>& p, char* scratch) {
  Prepared prepared = {.factors = reinterpret_cast<float*>(scratch), .borders = nullptr};
  if (p.documents.data != nullptr) {
    prepared.borders = reinterpret_cast<int32_t*>(scratch + FactorBytes(p));
  }
  const int64_t blocks = p.samples * p.chunks * CeilDiv(p.heads, kHeadsOfPrepare);
  PrepareKernel<T><<<static_cast<unsigned>(blocks), kChunk, 0, stream.handle()>>>(
      p, prepared.factors, prepared.borders);
  return prepared;
}
template Prepared Prepare(CudaStream&, const SsdProblem<__nv_bfloat16>&, char*);
template Prepared Prepare(CudaStream&, const SsdProblem<__half>&, char*);

namespace {

template <typename T, int P, int N>
absl::Status Forward(CudaStream& stream, const SsdArgs& args, SsdPart part) {
  using Layout = OutputLayout<P, N>;
  const SsdProblem<T> p = DescribeSsd<T>(args);
  const SsdTiles tiles = SsdTilesOf(p.width, p.columns);
  const int64_t state_bytes = p.samples * p.chunks * p.heads * p.width * p.columns * 2;
  const StatesPlan plan(stream.cuda_device(), p, tiles);
  const int64_t ends = FactorBytes(p) + CeilDiv(BorderBytes(p), 256) * 256;
  const int64_t front = ends + CeilDiv(plan.Bytes(p), 256) * 256;
  auto* const scratch =
      static_cast<char*>(stream.Scratch(front + (args.states.empty() ? state_bytes : 0)));
  if (scratch == nullptr) return absl::OkStatus();  // the stream has failed and says why
  const Prepared prepared = Prepare(stream, p, scratch);
  const Tensor states =
      StatesOf(p, args.states.empty() ? scratch + front : args.states.data(), args.x.dtype());
  if (part != SsdPart::kRest) {
    absl::Status launched =
        LaunchStates<false, T, P, N>(stream, p, plan, SlicesOf(p, tiles), args.x, args.b, states,
                                     prepared.factors, p.initial, p.final_state, scratch + ends);
    RETURN_IF_ERROR(launched);
  }
  if (part == SsdPart::kStates) return absl::OkStatus();
  CUtensorMap x, b, c, states_map, y;
  RETURN_IF_ERROR(DescribeHeads(args.x, kChunk, x));
  RETURN_IF_ERROR(DescribeHeads(args.b, kChunk, b));
  RETURN_IF_ERROR(DescribeHeads(args.c, kChunk, c));
  RETURN_IF_ERROR(DescribeHeads(args.y, kWarpRows, y));
  RETURN_IF_ERROR(DescribeHeads(states, P, states_map));
  OutputParams<T> params = {.factors = prepared.factors,
                            .borders = {prepared.borders},
                            .d = p.d,
                            .y = p.y,
                            .positions = p.positions,
                            .all = SlicesOf(p, tiles),
                            .width = static_cast<int>(p.width),
                            .groups = static_cast<int>(p.groups),
                            .chunks = static_cast<int>(p.chunks),
                            .shares = Shares(stream.cuda_device(), p, tiles.slices, 2.0),
                            .column = 0};
  const int64_t blocks = p.samples * p.chunks * p.groups * params.shares;
  for (; params.column < p.columns; params.column += N) {
    RETURN_IF_ERROR(Launch(stream, "SsdForward: outputs", OutputKernel<T, P, N>, blocks,
                           Layout::kThreads, Layout::kSharedBytes, x, b, c, states_map, y, params));
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace ssd

bool HopperSsdForward(CudaStream& stream, const SsdArgs& args, SsdPart part) {
  if (!ssd::Serves(stream.cuda_device(), args, {&args.x, &args.b, &args.c, &args.y})) return false;
  absl::Status launched =
      ssd::ForTiles(args.x.dtype(), SsdTilesOf(args.x.dim(3), args.b.dim(3)),
                    [&](auto type, auto width, auto columns) {
                      return ssd::Forward<decltype(type), width(), columns()>(stream, args, part);
                    });
  if (!launched.ok()) stream.Fail(std::move(launched));
  return true;
}

}  // namespace muster::kernels::cuda
