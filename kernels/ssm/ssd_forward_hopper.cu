// Launches of ssd_forward_hopper.cuh, and the factors that forward and backward share.
#include "kernels/ssm/ssd_forward_hopper.cuh"

#include "kernels/ssm/ssd_hopper.h"
#include "kernels/ssm/ssd_hopper_launch.cuh"

namespace muster::kernels::cuda {
namespace ssd {

// Thread t of a block finds the borders of position t; then a warp takes one head after the other,
// a lane four positions of it. Step sizes are read along heads and reach their positions through
// shared memory.
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

Prepared Prepare(CudaStream& stream, const SsdProblem<T>& p, char* scratch) {
  Prepared prepared = {.factors = reinterpret_cast<float*>(scratch), .borders = nullptr};
  if (p.documents.data != nullptr) {
    prepared.borders = reinterpret_cast<int32_t*>(scratch + FactorBytes(p));
  }
  const int64_t blocks = p.samples * p.chunks * CeilDiv(p.heads, kHeadsOfPrepare);
  PrepareKernel<<<static_cast<unsigned>(blocks), kChunk, 0, stream.handle()>>>(p, prepared.factors,
                                                                               prepared.borders);
  return prepared;
}

namespace {

template <int P, int N>
absl::Status Forward(CudaStream& stream, const SsdArgs& args, SsdPart part) {
  using Layout = OutputLayout<P, N>;
  const SsdProblem<T> p = DescribeSsd<T>(args);
  const int64_t state_rows = p.samples * p.chunks * p.heads * P;
  const StatesPlan plan(stream.cuda_device(), p);
  const int64_t ends = FactorBytes(p) + CeilDiv(BorderBytes(p), 256) * 256;
  const int64_t front = ends + CeilDiv(plan.Bytes(p), 256) * 256;
  auto* const scratch =
      static_cast<char*>(stream.Scratch(front + (args.states.empty() ? state_rows * N * 2 : 0)));
  if (scratch == nullptr) return absl::OkStatus();  // the stream has failed and says why
  const Prepared prepared = Prepare(stream, p, scratch);
  const Tensor states(args.states.empty() ? scratch + front : args.states.data(), DType::kBF16,
                      {state_rows, N});
  if (part != SsdPart::kRest) {
    absl::Status launched =
        LaunchStates<false, P, N>(stream, p, plan, args.x, args.b, states, prepared.factors,
                                  p.initial, p.final_state, scratch + ends);
    RETURN_IF_ERROR(launched);
  }
  if (part == SsdPart::kStates) return absl::OkStatus();
  CUtensorMap x, b, c, states_map, y;
  RETURN_IF_ERROR(DescribeHeads(InSlabs(args.x), kChunk, x));
  RETURN_IF_ERROR(DescribeHeads(InSlabs(args.b), kChunk, b));
  RETURN_IF_ERROR(DescribeHeads(InSlabs(args.c), kChunk, c));
  RETURN_IF_ERROR(DescribeHeads(InSlabs(args.y), kWarpRows, y));
  RETURN_IF_ERROR(DescribeBoxes(states, P, states_map));
  const int64_t chunks_of_groups = p.samples * p.chunks * p.groups;
  const OutputParams params = {
      .factors = prepared.factors,
      .borders = {prepared.borders},
      .d = p.d,
      .heads = static_cast<int>(p.heads),
      .groups = static_cast<int>(p.groups),
      .chunks = static_cast<int>(p.chunks),
      .shares = Shares(stream.cuda_device(), chunks_of_groups, p.heads / p.groups, 2.0)};
  return Launch(stream, "SsdForward: outputs", OutputKernel<P, N>, chunks_of_groups * params.shares,
                Layout::kThreads, Layout::kSharedBytes, x, b, c, states_map, y, params);
}

absl::Status ForwardOf(CudaStream& stream, const SsdArgs& args, SsdPart part) {
  if (args.x.dim(3) == 128) return Forward<128, 64>(stream, args, part);
  if (args.b.dim(3) == 64) return Forward<64, 64>(stream, args, part);
  return Forward<64, 128>(stream, args, part);
}

}  // namespace
}  // namespace ssd

bool HopperSsdForward(CudaStream& stream, const SsdArgs& args, SsdPart part) {
  const int64_t p = args.x.dim(3), n = args.b.dim(3);
  if (!((p == 64 && (n == 64 || n == 128)) || (p == 128 && n == 64)) ||
      !ssd::Serves(stream.cuda_device(), args, {&args.x, &args.b, &args.c, &args.y})) {
    return false;
  }
  absl::Status launched = ssd::ForwardOf(stream, args, part);
  if (!launched.ok()) stream.Fail(std::move(launched));
  return true;
}

}  // namespace muster::kernels::cuda
