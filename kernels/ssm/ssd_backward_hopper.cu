// The backward of the state-space scan on Hopper: the gradients of states behind chunks
// (ssd_states_hopper.cuh), those of the scores and C (ssd_scores_hopper.cuh), those of x and B
// (ssd_inputs_hopper.cuh), and here what is left: the gradient of the step from the terms that they
// leave, and sums over shares of heads and over chunks.
//
// With the terms of Term, and k a position of a chunk:
//   d(step_k A) = sum over t >= k of kPairs_t + sum over s < k of kBehind_s + e^(a_end) <G, H>
//   d(step_k)   = kInner_k + A d(step_k A)
#include "kernels/cuda/column_sum.cuh"
#include "kernels/ssm/ssd_hopper.h"
#include "kernels/ssm/ssd_hopper_launch.cuh"
#include "kernels/ssm/ssd_inputs_hopper.cuh"

namespace muster::kernels::cuda {
namespace ssd {
namespace {

constexpr int kSlots = kChunk / 32;  // positions of a lane
constexpr int kHeadsOfBlock = 8;

// A warp takes a chunk of a head; a block neighbouring heads, whose gradients of dt it writes side
// by side. `all_terms` [passes, B * chunks * H * slices, kTerms].
template <typename T>
__global__ void __launch_bounds__(kHeadsOfBlock * 32)
    StepGradientKernel(const __grid_constant__ SsdProblem<T> p, int slices, int passes,
                       const float* factors, const float* all_terms, float* partials) {
  __shared__ float gradients[kChunk][kHeadsOfBlock + 1];
  const int64_t head_blocks = (p.heads + kHeadsOfBlock - 1) / kHeadsOfBlock;
  const int64_t first_head = blockIdx.x % head_blocks * kHeadsOfBlock;
  const int64_t chunk = blockIdx.x / head_blocks;  // over samples
  const int64_t b = chunk / p.chunks, begin = chunk % p.chunks * kChunk;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t h = first_head + warp;
  if (h < p.heads) {
    const float* const own = factors + ChunkOfHead(p, chunk, h) * (kFactors * kChunk);
    float pairs[kSlots] = {}, behind[kSlots] = {}, inner[kSlots] = {}, steps[kSlots];
    LoadFloats<kSlots>(own + kStep * kChunk + lane * kSlots, steps);
    float exit_dot = 0, skip = 0;
    for (int pass = 0; pass < passes; ++pass) {
      for (int slice = 0; slice < slices; ++slice) {
        const int64_t chunks = p.samples * p.chunks;
        const float* const terms =
            all_terms + (((pass * chunks + chunk) * p.heads + h) * slices + slice) * kTerms;
        const auto add = [&](int term, float(&to)[kSlots]) {
          float more[kSlots];
          LoadFloats<kSlots>(terms + term * kChunk + lane * kSlots, more);
#pragma unroll
          for (int i = 0; i < kSlots; ++i) to[i] += more[i];
        };
        add(kPairs, pairs);
        add(kBehind, behind);
        add(kInner, inner);
        for (int w = 0; w < kWarpsOfBlock; ++w) {
          exit_dot += terms[kExitDot + w];
          if (pass == 0) skip += terms[kSkipDot + w];
        }
      }
    }
    exit_dot *= own[kEntry * kChunk + kChunk - 1];
    // Sums within the lane, then over the lanes behind and in front of it.
#pragma unroll
    for (int i = kSlots - 2; i >= 0; --i) pairs[i] += pairs[i + 1];
#pragma unroll
    for (int i = 1; i < kSlots; ++i) behind[i] += behind[i - 1];
    float later = pairs[0], earlier = behind[kSlots - 1];
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const float after = __shfl_down_sync(0xffffffffu, later, offset);
      const float before = __shfl_up_sync(0xffffffffu, earlier, offset);
      if (lane + offset < 32) later += after;
      if (lane >= offset) earlier += before;
    }
    later = __shfl_down_sync(0xffffffffu, later, 1);
    earlier = __shfl_up_sync(0xffffffffu, earlier, 1);
    if (lane == 31) later = 0;
    if (lane == 0) earlier = 0;
    const float a = -expf(p.a_log[h]);
    float a_sum = 0, bias_sum = 0;
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      const int64_t t = begin + lane * kSlots + i;
      if (t >= p.positions) continue;
      float d = pairs[i] + later + earlier + (i > 0 ? behind[i - 1] : 0) + exit_dot;
      if (p.BeginsDocument(b, t)) d = 0;
      const float ddt = (inner[i] + a * d) * SsdStep(p, b, t, h).slope;
      a_sum += steps[i] * d;
      bias_sum += ddt;
      gradients[lane * kSlots + i][warp] = ddt;
    }
    a_sum = WarpSum(a_sum);
    bias_sum = WarpSum(bias_sum);
    if (lane == 0) {
      float* const to = partials + chunk * 3 * p.heads + h;
      to[0] = bias_sum;
      to[p.heads] = a_sum * a;  // dA / da_log = A
      to[2 * p.heads] = skip;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kChunk * kHeadsOfBlock; i += blockDim.x) {
    const int64_t t = begin + i / kHeadsOfBlock, head = first_head + i % kHeadsOfBlock;
    if (t >= p.positions || head >= p.heads) continue;
    *p.ddt.At(b, t, head) = FromFloat<T>(gradients[i / kHeadsOfBlock][i % kHeadsOfBlock]);
  }
}

// Columns [first, first + tile) of dB and dC, as far as there are any, from the sums of the shares,
// four columns a thread. blockIdx.y: which of the two.
template <typename T>
__global__ void __launch_bounds__(256)
    AddSharesKernel(const __grid_constant__ SsdProblem<T> p, const float* dc, const float* db,
                    int shares, int first, int tile) {
  const int64_t size = p.samples * p.positions * p.groups * tile;
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x) * 4;
  if (i >= size) return;
  const int64_t column = first + i % tile;
  if (column >= p.columns) return;
  const float* const from = (blockIdx.y == 0 ? dc : db) + i;
  float sum[4];
  LoadFloats<4>(from, sum);
  for (int share = 1; share < shares; ++share) {
    float more[4];
    LoadFloats<4>(from + share * size, more);
#pragma unroll
    for (int j = 0; j < 4; ++j) sum[j] += more[j];
  }
  const int64_t row = i / tile, group = row % p.groups, token = row / p.groups;
  T* const to =
      (blockIdx.y == 0 ? p.dc : p.db).At(token / p.positions, token % p.positions, group) + column;
  StorePack<4>(to, FromFloats<T>(sum));
}

// Hands out the stream's scratch memory.
class Parts {
 public:
  int64_t Add(int64_t bytes) {
    const int64_t at = bytes_;
    bytes_ += CeilDiv(bytes, 256) * 256;
    return at;
  }
  int64_t bytes() const { return bytes_; }

 private:
  int64_t bytes_ = 0;
};

// What the kernels of a call leave for each other.
template <typename T>
struct Sums {
  GradientParams<T> params{};
  Tensor gradients, scores;  // for TMA
};

// A pass over N columns: the gradients of x, B and C, and the terms of that of the step.
template <typename T, int P, int N>
absl::Status LaunchGradients(CudaStream& stream, const SsdBackwardArgs& args,
                             const SsdProblem<T>& p, const Sums<T>& sums) {
  const SsdArgs& forward = args.forward;
  const GradientParams<T>& params = sums.params;
  CUtensorMap x, dy, b, c, states, gradients, scores, dx;
  RETURN_IF_ERROR(DescribeHeads(forward.x, kChunk, x));
  RETURN_IF_ERROR(DescribeHeads(args.dy, kChunk, dy));
  RETURN_IF_ERROR(DescribeHeads(forward.b, kChunk, b));
  RETURN_IF_ERROR(DescribeHeads(forward.c, kChunk, c));
  RETURN_IF_ERROR(DescribeHeads(args.dx, kWarpRows, dx));
  RETURN_IF_ERROR(DescribeHeads(StatesOf(p, forward.states.data(), forward.x.dtype()), P, states));
  RETURN_IF_ERROR(DescribeHeads(sums.gradients, P, gradients));
  RETURN_IF_ERROR(DescribeBoxes(sums.scores, kChunk, scores));
  const int64_t blocks = int64_t{params.samples} * params.chunks * params.groups * params.shares;
  RETURN_IF_ERROR(Launch(stream, "SsdBackward: scores", ScoresKernel<T, P, N>, blocks,
                         ScoresLayout<P, N>::kThreads, ScoresLayout<P, N>::kSharedBytes, x, dy, b,
                         c, states, params));
  RETURN_IF_ERROR(Launch(stream, "SsdBackward: inputs", InputsKernel<T, P, N>, blocks,
                         InputsLayout<P, N>::kThreads, InputsLayout<P, N>::kSharedBytes, x, dy, b,
                         c, gradients, states, scores, dx, params));
  const int64_t packs = p.samples * p.positions * p.groups * N / 4;
  AddSharesKernel<T>
      <<<dim3(static_cast<unsigned>(CeilDiv(packs, 256)), 2), 256, 0, stream.handle()>>>(
          p, params.dc, params.db, params.shares, params.column, N);
  return CudaStatus(cudaGetLastError(), "SsdBackward: sums");
}

template <typename T, int P, int N>
absl::Status Backward(CudaStream& stream, const SsdBackwardArgs& args, SsdPart part) {
  const SsdProblem<T> p = DescribeSsd<T>(args);
  const DType dtype = args.forward.x.dtype();
  const SsdTiles tiles = SsdTilesOf(p.width, p.columns);
  const int64_t chunks = p.samples * p.chunks, slices = chunks * p.heads * tiles.slices;
  const int shares = Shares(stream.cuda_device(), p, tiles.slices, kSsdBackwardFixedHeads);
  const int64_t score_rows = shares * chunks * p.groups * kChunk;
  const int64_t sum_bytes = shares * p.samples * p.positions * p.groups * N * 4;
  Parts parts;
  const StatesPlan plan(stream.cuda_device(), p, tiles);
  parts.Add(FactorBytes(p) + BorderBytes(p));
  const int64_t ends_at = parts.Add(plan.Bytes(p));
  const int64_t gradients_at =
      parts.Add(part == SsdPart::kWhole ? chunks * p.heads * p.width * p.columns * 2 : 0);
  const int64_t terms_at = parts.Add(tiles.passes * slices * kTerms * 4);
  const int64_t scores_at = parts.Add(score_rows * kChunk * 2);
  const int64_t dc_at = parts.Add(sum_bytes), db_at = parts.Add(sum_bytes);
  const int64_t partials_at = parts.Add(chunks * 3 * p.heads * 4);
  auto* const scratch = static_cast<char*>(stream.Scratch(parts.bytes()));
  if (scratch == nullptr) return absl::OkStatus();  // the stream has failed and says why
  const Prepared prepared = Prepare(stream, p, scratch);
  Sums<T> sums;
  sums.gradients =
      StatesOf(p, part == SsdPart::kWhole ? scratch + gradients_at : args.d_states.data(), dtype);
  sums.scores = Tensor(scratch + scores_at, dtype, {score_rows, kChunk});
  auto* const terms = reinterpret_cast<float*>(scratch + terms_at);
  sums.params = {.factors = prepared.factors,
                 .borders = {prepared.borders},
                 .d = p.d,
                 .dx = p.dx,
                 .all = SlicesOf(p, tiles),
                 .width = static_cast<int>(p.width),
                 .groups = static_cast<int>(p.groups),
                 .chunks = static_cast<int>(p.chunks),
                 .shares = shares,
                 .samples = static_cast<int>(p.samples),
                 .column = 0,
                 .positions = p.positions,
                 .terms = terms,
                 .scores = reinterpret_cast<T*>(scratch + scores_at),
                 .dc = reinterpret_cast<float*>(scratch + dc_at),
                 .db = reinterpret_cast<float*>(scratch + db_at)};
  auto* const partials = reinterpret_cast<float*>(scratch + partials_at);
  if (part != SsdPart::kRest) {
    const absl::Status scanned = LaunchStates<true, T, P, N>(
        stream, p, plan, SlicesOf(p, tiles), args.dy, args.forward.c, sums.gradients,
        prepared.factors, p.d_final, p.d_initial, scratch + ends_at);
    RETURN_IF_ERROR(scanned);
  }
  if (part == SsdPart::kStates) return absl::OkStatus();
  for (; sums.params.column < p.columns; sums.params.column += N) {
    const absl::Status launched = LaunchGradients<T, P, N>(stream, args, p, sums);
    RETURN_IF_ERROR(launched);
    sums.params.terms += slices * kTerms;
  }
  StepGradientKernel<T>
      <<<static_cast<unsigned>(chunks * CeilDiv(p.heads, kHeadsOfBlock)), kHeadsOfBlock * 32, 0,
         stream.handle()>>>(p, static_cast<int>(tiles.slices), static_cast<int>(tiles.passes),
                            prepared.factors, terms, partials);
  RETURN_IF_ERROR(CudaStatus(cudaGetLastError(), "SsdBackward: steps"));
  AddPartials(stream, partials, chunks, p.heads, true, args.d_dt_bias.f32(), args.d_a_log.f32(),
              args.dd.f32(), true);
  return absl::OkStatus();
}

}  // namespace
}  // namespace ssd

bool HopperSsdBackward(CudaStream& stream, const SsdBackwardArgs& args, SsdPart part) {
  const SsdArgs& forward = args.forward;
  if (!ssd::Serves(stream.cuda_device(), forward,
                   {&forward.x, &forward.b, &forward.c, &args.dy, &args.dx, &args.db, &args.dc})) {
    return false;
  }
  absl::Status launched =
      ssd::ForTiles(forward.x.dtype(), SsdTilesOf(forward.x.dim(3), forward.b.dim(3)),
                    [&](auto type, auto width, auto columns) {
                      return ssd::Backward<decltype(type), width(), columns()>(stream, args, part);
                    });
  if (!launched.ok()) stream.Fail(std::move(launched));
  return true;
}

}  // namespace muster::kernels::cuda
