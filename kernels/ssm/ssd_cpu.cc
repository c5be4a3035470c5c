// The state-space scan on the host, as its recurrence: one position after the other, with the state
// in fp32. Forward has a task per (sample, head). Backward has one per (sample, group), whose heads
// add to the group's gradients of B and C in their order; it computes the states inside a chunk
// again from the one stored in front of it.
//
// With G_t the gradient of state_t: G_t = dy_t (outer) C_t + exp(step_{t+1} A) G_{t+1}, and
// d(step_t A) = exp(step_t A) <G_t, state_{t-1}>.
//
// Of a segment, the first call of either direction runs the recurrence of the state (of its
// gradient) alone, and the second the whole one.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/device/host_device.h"
#include "kernels/simd/loops.h"
#include "kernels/ssm/ssm.h"

namespace muster::kernels::cpu {
namespace {

// log(1 + e^x) without overflow; the identity where they agree in fp32.
float Softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

struct Step {
  float size;   // clamped
  float decay;  // exp(size A); 0 where a document begins
  float slope;  // of the size by dt
};

// One head of one sample: its rows and the recurrence's coefficients.
class Head {
 public:
  Head(const SsdArgs& args, int64_t sample, int64_t head)
      : args_(args),
        sample_(sample),
        head_(head),
        group_(head / (args.x.dim(2) / args.b.dim(2))),
        a_(-std::exp(args.a_log.f32()[head])) {}

  float a() const { return a_; }
  float d() const { return args_.d.f32()[head_]; }
  const float* X(int64_t t) const { return Row(args_.x, t, head_); }
  const float* B(int64_t t) const { return Row(args_.b, t, group_); }
  const float* C(int64_t t) const { return Row(args_.c, t, group_); }
  float* Row(const Tensor& of, int64_t t, int64_t which) const {
    return of.f32() + sample_ * of.stride(0) + t * of.stride(1) + which * of.stride(2);
  }
  Step At(int64_t t) const {
    const Tensor& dt = args_.dt;
    const float raw = dt.f32()[sample_ * dt.stride(0) + t * dt.stride(1) + head_ * dt.stride(2)] +
                      args_.dt_bias.f32()[head_];
    const float soft = Softplus(raw);
    const float size = std::min(std::max(soft, args_.step_min), args_.step_max);
    Step step = {.size = size, .decay = std::exp(size * a_), .slope = 0};
    if (soft == size) step.slope = 1 / (1 + std::exp(-raw));
    if (!args_.documents.empty()) {
      const int32_t begin = args_.documents.as<int32_t>()[sample_ * args_.documents.stride(0) + t];
      if (begin == args_.first_position + t) step.decay = 0;
    }
    return step;
  }
  // A [B,H,P,N] tensor's state of this head.
  float* State(const Tensor& of) const {
    const int64_t size = args_.x.dim(3) * args_.b.dim(3);
    return of.f32() + (sample_ * args_.x.dim(2) + head_) * size;
  }
  // The stored state in front of a chunk.
  float* Entry(int64_t chunk) const {
    return args_.states.f32() + sample_ * args_.states.stride(0) + chunk * args_.states.stride(1) +
           head_ * args_.states.stride(2);
  }

 private:
  const SsdArgs& args_;
  const int64_t sample_, head_, group_;
  const float a_;
};

// next = decay state + step x (outer) b; may be in place.
void Advance(const Step& step, const float* x, const float* b, int64_t p, int64_t n,
             const float* state, float* next) {
  for (int64_t i = 0; i < p; ++i) {
    const float input = step.size * x[i];
    for (int64_t j = 0; j < n; ++j) next[i * n + j] = step.decay * state[i * n + j] + input * b[j];
  }
}

void CopyOrZero(const float* from, int64_t count, float* to) {
  if (from == nullptr) {
    std::fill(to, to + count, 0.0f);
  } else {
    std::copy(from, from + count, to);
  }
}

struct ParameterSums {
  double dt_bias = 0, a = 0, d = 0;
};

// Backward of one head; db and dc of its group are added to.
class BackwardHead {
 public:
  BackwardHead(const SsdBackwardArgs& args, int64_t sample, int64_t head)
      : args_(args),
        forward_(args.forward),
        head_(forward_, sample, head),
        which_(head),
        group_(head / (forward_.x.dim(2) / forward_.b.dim(2))),
        p_(forward_.x.dim(3)),
        n_(forward_.b.dim(3)) {}

  // `scratch`: (chunk + 2) P N floats.
  ParameterSums Run(float* scratch) {
    const int64_t positions = forward_.x.dim(1), chunk = forward_.chunk;
    gradient_ = scratch;
    states_ = scratch + p_ * n_;
    CopyOrZero(args_.d_final_state.empty() ? nullptr : head_.State(args_.d_final_state), p_ * n_,
               gradient_);
    for (int64_t at = (positions - 1) / chunk; at >= 0; --at) {
      const int64_t begin = at * chunk, end = std::min(positions, begin + chunk);
      std::copy(head_.Entry(at), head_.Entry(at) + p_ * n_, states_);
      for (int64_t t = begin; t < end; ++t) {
        Advance(head_.At(t), head_.X(t), head_.B(t), p_, n_, State(t - begin),
                State(t - begin + 1));
      }
      for (int64_t t = end - 1; t >= begin; --t)
        Position(t, State(t - begin), State(t - begin + 1));
    }
    if (!args_.d_initial_state.empty()) {
      std::copy(gradient_, gradient_ + p_ * n_, head_.State(args_.d_initial_state));
    }
    return sums_;
  }

 private:
  float* State(int64_t i) { return states_ + i * p_ * n_; }

  void Position(int64_t t, const float* before, const float* after) {
    const Loops& loops = ChooseLoops();
    const Step step = head_.At(t);
    const float* x = head_.X(t);
    const float* b = head_.B(t);
    const float* c = head_.C(t);
    const float* dy = head_.Row(args_.dy, t, which_);
    float* dx = head_.Row(args_.dx, t, which_);
    float* db = head_.Row(args_.db, t, group_);
    float* dc = head_.Row(args_.dc, t, group_);
    float d_step = 0, d_decay = 0;
    for (int64_t i = 0; i < p_; ++i) {
      float* g = gradient_ + i * n_;
      loops.axpy(n_, dy[i], c, g);
      loops.axpy(n_, dy[i], after + i * n_, dc);
      loops.axpy(n_, step.size * x[i], g, db);
      const float gb = loops.dot(n_, g, b);
      dx[i] = step.size * gb + head_.d() * dy[i];
      d_step += x[i] * gb;
      d_decay += loops.dot(n_, g, before + i * n_);
      sums_.d += static_cast<double>(dy[i] * x[i]);
      loops.scale(n_, step.decay, g);
    }
    const float d_exponent = step.decay * d_decay;  // of step A
    sums_.a += static_cast<double>(step.size * d_exponent);
    const float ddt = (d_step + head_.a() * d_exponent) * step.slope;
    sums_.dt_bias += static_cast<double>(ddt);
    *head_.Row(args_.ddt, t, which_) = ddt;
  }

  const SsdBackwardArgs& args_;
  const SsdArgs& forward_;
  const Head head_;
  const int64_t which_, group_, p_, n_;
  float* gradient_ = nullptr;  // [P,N]: of the state behind the position at hand
  float* states_ = nullptr;    // [chunk + 1, P, N]
  ParameterSums sums_;
};

}  // namespace

void SsdForward(Stream& stream, const SsdArgs& args) {
  EnqueueOnHost(stream, [args](ThreadPool& pool) {
    const int64_t samples = args.x.dim(0), positions = args.x.dim(1), heads = args.x.dim(2);
    const int64_t p = args.x.dim(3), n = args.b.dim(3);
    pool.Run(samples * heads, [&](int64_t task) {
      const Loops& loops = ChooseLoops();
      const Head head(args, task / heads, task % heads);
      float* state = ThreadScratch(p * n);
      CopyOrZero(args.initial_state.empty() ? nullptr : head.State(args.initial_state), p * n,
                 state);
      for (int64_t t = 0; t < positions; ++t) {
        if (t % args.chunk == 0 && !args.states.empty()) {
          std::copy(state, state + p * n, head.Entry(t / args.chunk));
        }
        const float* x = head.X(t);
        Advance(head.At(t), x, head.B(t), p, n, state, state);
        float* y = head.Row(args.y, t, task % heads);
        for (int64_t i = 0; i < p; ++i) {
          y[i] = loops.dot(n, state + i * n, head.C(t)) + head.d() * x[i];
        }
      }
      if (!args.final_state.empty()) std::copy(state, state + p * n, head.State(args.final_state));
    });
  });
}

void SsdBackward(Stream& stream, const SsdBackwardArgs& args) {
  EnqueueOnHost(stream, [args](ThreadPool& pool) {
    const SsdArgs& forward = args.forward;
    const int64_t samples = forward.x.dim(0), positions = forward.x.dim(1);
    const int64_t heads = forward.x.dim(2), groups = forward.b.dim(2), n = forward.b.dim(3);
    std::vector<ParameterSums> sums(static_cast<size_t>(samples * heads));
    pool.Run(samples * groups, [&](int64_t task) {
      const int64_t sample = task / groups, group = task % groups;
      for (const Tensor& zeroed : {args.db, args.dc}) {
        for (int64_t t = 0; t < positions; ++t) {
          float* row = zeroed.f32() + sample * zeroed.stride(0) + t * zeroed.stride(1) +
                       group * zeroed.stride(2);
          std::fill(row, row + n, 0.0f);
        }
      }
      for (int64_t head = group * (heads / groups); head < (group + 1) * (heads / groups); ++head) {
        float* scratch = ThreadScratch((forward.chunk + 2) * forward.x.dim(3) * n);
        sums[static_cast<size_t>(sample * heads + head)] =
            BackwardHead(args, sample, head).Run(scratch);
      }
    });
    for (int64_t head = 0; head < heads; ++head) {
      ParameterSums total;
      for (int64_t sample = 0; sample < samples; ++sample) {
        const ParameterSums& own = sums[static_cast<size_t>(sample * heads + head)];
        total.dt_bias += own.dt_bias;
        total.a += own.a;
        total.d += own.d;
      }
      const double a = -std::exp(static_cast<double>(forward.a_log.f32()[head]));
      args.d_dt_bias.f32()[head] += static_cast<float>(total.dt_bias);
      args.d_a_log.f32()[head] += static_cast<float>(total.a * a);  // dA / da_log = A
      args.dd.f32()[head] += static_cast<float>(total.d);
    }
  });
}

void SsdForwardStates(Stream& stream, const SsdArgs& args) {
  EnqueueOnHost(stream, [args](ThreadPool& pool) {
    const int64_t samples = args.x.dim(0), positions = args.x.dim(1), heads = args.x.dim(2);
    const int64_t p = args.x.dim(3), n = args.b.dim(3);
    pool.Run(samples * heads, [&](int64_t task) {
      const Head head(args, task / heads, task % heads);
      float* const state = head.State(args.final_state);
      std::fill(state, state + p * n, 0.0f);
      double decay = 1;
      for (int64_t t = 0; t < positions; ++t) {
        const Step step = head.At(t);
        Advance(step, head.X(t), head.B(t), p, n, state, state);
        decay *= static_cast<double>(step.decay);
      }
      args.decay.f32()[task] = static_cast<float>(decay);
    });
  });
}

void SsdForwardOutputs(Stream& stream, const SsdArgs& args) {
  SsdArgs whole = args;
  whole.final_state = Tensor();
  cpu::SsdForward(stream, whole);
}

void SsdBackwardStates(Stream& stream, const SsdBackwardArgs& args) {
  EnqueueOnHost(stream, [args](ThreadPool& pool) {
    const SsdArgs& forward = args.forward;
    const int64_t positions = forward.x.dim(1), heads = forward.x.dim(2);
    const int64_t p = forward.x.dim(3), n = forward.b.dim(3);
    pool.Run(forward.x.dim(0) * heads, [&](int64_t task) {
      const Loops& loops = ChooseLoops();
      const Head head(forward, task / heads, task % heads);
      float* const gradient = head.State(args.d_initial_state);
      std::fill(gradient, gradient + p * n, 0.0f);
      double decay = 1;
      for (int64_t t = positions; t-- > 0;) {
        const Step step = head.At(t);
        const float* dy = head.Row(args.dy, t, task % heads);
        for (int64_t i = 0; i < p; ++i) loops.axpy(n, dy[i], head.C(t), gradient + i * n);
        loops.scale(p * n, step.decay, gradient);
        decay *= static_cast<double>(step.decay);
      }
      forward.decay.f32()[task] = static_cast<float>(decay);
    });
  });
}

void SsdBackwardInputs(Stream& stream, const SsdBackwardArgs& args) {
  SsdBackwardArgs whole = args;
  whole.d_initial_state = Tensor();
  cpu::SsdBackward(stream, whole);
}

void SsdPassStates(Stream& stream, const SsdPassArgs& args) {
  EnqueueOnHost(stream, [args](ThreadPool& pool) {
    const int64_t ranks = args.states.dim(0), segments = 2 * ranks;
    const int64_t heads = args.own.dim(1), size = args.own.dim(2) * args.own.dim(3);
    pool.Run(args.own.dim(0) / 2 * heads, [&](int64_t task) {
      const Loops& loops = ChooseLoops();
      const int64_t sequence = task / heads, head = task % heads;
      float* const sum = ThreadScratch(size);
      std::fill(sum, sum + size, 0.0f);
      for (int64_t i = 0; i < segments; ++i) {
        const int64_t segment = args.reverse ? segments - 1 - i : i;
        const int64_t late = segment < ranks ? 0 : 1;
        const int64_t rank = late == 0 ? segment : segments - 1 - segment;
        const int64_t row = (2 * sequence + late) * heads + head;
        if (rank == args.rank) std::copy(sum, sum + size, args.own.f32() + row * size);
        loops.scale(size, args.decays.f32()[rank * args.decays.stride(0) + row], sum);
        loops.axpy(size, 1.0f, args.states.f32() + rank * args.states.stride(0) + row * size, sum);
      }
    });
  });
}

void SegmentDocuments(Stream& stream, const SegmentDocumentsArgs& args) {
  EnqueueOnHost(stream, [args](ThreadPool& /*pool*/) {
    const int64_t length = args.own.dim(1), segments = args.documents.dim(1) / length;
    for (int64_t row = 0; row < args.own.dim(0); ++row) {
      const int64_t segment = row % 2 == 0 ? args.rank : segments - 1 - args.rank;
      const int32_t* from = args.documents.as<int32_t>() + row / 2 * args.documents.stride(0);
      int32_t* to = args.own.as<int32_t>() + row * args.own.stride(0);
      for (int64_t t = 0; t < length; ++t) {
        to[t] = from[segment * length + t] - static_cast<int32_t>(segment * length);
      }
    }
  });
}

}  // namespace muster::kernels::cpu
