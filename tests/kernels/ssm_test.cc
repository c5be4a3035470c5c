// The ops of Mamba-2 against float64 references and their central differences.
#include "kernels/ssm/ssm.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "tests/kernels/support.h"

namespace muster::kernels {
namespace {

using testing::Doubles;
using testing::ExpectClose;
using testing::Floats;
using testing::Host;
using testing::NumericGradient;
using testing::Random;
using testing::View;
using testing::Wide;

double Silu(double x) { return x / (1 + std::exp(-x)); }

// Dot product of an output with fixed random coefficients: the loss whose gradient is checked.
double Dot(const Doubles& a, const Doubles& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// Positions at which documents begin, for each token; the first may begin in front of the sample.
std::vector<int32_t> Documents(int64_t samples, int64_t positions, int64_t first_position) {
  std::vector<int32_t> documents(samples * positions);
  for (int64_t b = 0; b < samples; ++b) {
    auto begin = static_cast<int32_t>(first_position - 2);
    for (int64_t t = 0; t < positions; ++t) {
      if ((t + 3 * b) % 5 == 4) begin = static_cast<int32_t>(first_position + t);
      documents[b * positions + t] = begin;
    }
  }
  return documents;
}

// ---- convolution ----

struct Conv {
  int64_t b, s, w, k;
  bool halo, documents;
  int64_t first_position = 7;
};

Doubles ConvReference(const Conv& c, const Doubles& x, const Doubles& weight, const Doubles& bias,
                      const Doubles& halo, const std::vector<int32_t>& documents) {
  Doubles y(c.b * c.s * c.w);
  for (int64_t b = 0; b < c.b; ++b) {
    for (int64_t t = 0; t < c.s; ++t) {
      for (int64_t w = 0; w < c.w; ++w) {
        double sum = bias[w];
        for (int64_t k = 0; k < c.k; ++k) {
          const int64_t from = t - (c.k - 1) + k;
          if (c.documents && c.first_position + from < documents[b * c.s + t]) continue;
          double input = 0;
          if (from >= 0) {
            input = x[(b * c.s + from) * c.w + w];
          } else if (c.halo) {
            input = halo[(b * (c.k - 1) + from + c.k - 1) * c.w + w];
          }
          sum += weight[w * c.k + k] * input;
        }
        y[(b * c.s + t) * c.w + w] = Silu(sum);
      }
    }
  }
  return y;
}

TEST(CausalConv, ForwardAndBackward_HaloAndDocuments_MatchFloat64) {
  for (const Conv& c : {Conv{1, 1, 3, 4, false, false}, Conv{2, 9, 5, 4, true, false},
                        Conv{2, 11, 3, 3, true, true}, Conv{1, 8, 70, 2, false, true}}) {
    Host host;
    Floats x = Random(c.b * c.s * c.w, 1), weight = Random(c.w * c.k, 2), bias = Random(c.w, 3);
    Floats halo = Random(c.b * (c.k - 1) * c.w, 4), dy = Random(c.b * c.s * c.w, 5);
    std::vector<int32_t> documents = Documents(c.b, c.s, c.first_position);
    Floats y(x.size()), d_halo(halo.size());
    Floats dweight = Random(weight.size(), 6), dbias = Random(bias.size(), 7);
    const Floats dweight_before = dweight, dbias_before = dbias;
    const CausalConvArgs args = {.x = View(x, {c.b, c.s, c.w}),
                                 .weight = View(weight, {c.w, c.k}),
                                 .bias = View(bias, {c.w}),
                                 .halo = c.halo ? View(halo, {c.b, c.k - 1, c.w}) : Tensor(),
                                 .documents = c.documents ? View(documents, {c.b, c.s}) : Tensor(),
                                 .first_position = c.first_position,
                                 .y = View(y, {c.b, c.s, c.w})};
    CausalConvForward(*host.stream, args);
    Doubles x64 = Wide(x), weight64 = Wide(weight), bias64 = Wide(bias), halo64 = Wide(halo);
    const Doubles coefficients = Wide(dy);
    const auto reference = [&] {
      return ConvReference(c, x64, weight64, bias64, halo64, documents);
    };
    ExpectClose(y, reference(), 1e-5, "y");

    Floats dx = dy;  // in place
    CausalConvBackward(*host.stream,
                       {.forward = args,
                        .dy = View(dx, {c.b, c.s, c.w}),
                        .dx = View(dx, {c.b, c.s, c.w}),
                        .d_halo = c.halo ? View(d_halo, {c.b, c.k - 1, c.w}) : Tensor(),
                        .dweight = View(dweight, {c.w, c.k}),
                        .dbias = View(dbias, {c.w})});
    const auto loss = [&] { return Dot(reference(), coefficients); };
    ExpectClose(dx, NumericGradient(x64, loss), 1e-4, "dx");
    if (c.halo) ExpectClose(d_halo, NumericGradient(halo64, loss), 1e-4, "d_halo");
    ExpectClose(dweight, testing::Plus(dweight_before, NumericGradient(weight64, loss)), 1e-4,
                "dweight");
    ExpectClose(dbias, testing::Plus(dbias_before, NumericGradient(bias64, loss)), 1e-4, "dbias");
  }
}

// ---- scan ----

struct Scan {
  int64_t b, s, h, p, g, n, chunk;
  bool documents = false, state = false;
  float step_min = 0, step_max = 1e30f;
  int64_t first_position = 3;
};

struct ScanInputs {
  Doubles x, dt, b, c, dt_bias, a_log, d, initial;
};

Doubles ScanReference(const Scan& c, const ScanInputs& in, const std::vector<int32_t>& documents,
                      Doubles* final_state) {
  Doubles y(c.b * c.s * c.h * c.p), states = in.initial;
  for (int64_t b = 0; b < c.b; ++b) {
    for (int64_t h = 0; h < c.h; ++h) {
      double* state = states.data() + (b * c.h + h) * c.p * c.n;
      for (int64_t t = 0; t < c.s; ++t) {
        const int64_t token = b * c.s + t;
        const double raw = in.dt[token * c.h + h] + in.dt_bias[h];
        const double step =
            std::min<double>(std::max<double>(std::log1p(std::exp(raw)), c.step_min), c.step_max);
        double decay = std::exp(-step * std::exp(in.a_log[h]));
        if (c.documents && documents[token] == c.first_position + t) decay = 0;
        const double* bt = in.b.data() + (token * c.g + h / (c.h / c.g)) * c.n;
        const double* ct = in.c.data() + (token * c.g + h / (c.h / c.g)) * c.n;
        for (int64_t p = 0; p < c.p; ++p) {
          const double x = in.x[(token * c.h + h) * c.p + p];
          double sum = in.d[h] * x;
          for (int64_t n = 0; n < c.n; ++n) {
            state[p * c.n + n] = decay * state[p * c.n + n] + step * x * bt[n];
            sum += state[p * c.n + n] * ct[n];
          }
          y[(token * c.h + h) * c.p + p] = sum;
        }
      }
    }
  }
  if (final_state != nullptr) *final_state = states;
  return y;
}

class ScanTest {
 public:
  explicit ScanTest(const Scan& c)
      : c_(c),
        x_(Random(c.b * c.s * c.h * c.p, 1)),
        dt_(Random(c.b * c.s * c.h, 2)),
        b_(Random(c.b * c.s * c.g * c.n, 3)),
        cs_(Random(c.b * c.s * c.g * c.n, 4)),
        dt_bias_(Random(c.h, 5)),
        a_log_(Random(c.h, 6)),
        d_(Random(c.h, 7)),
        initial_(c.state ? Random(c.b * c.h * c.p * c.n, 8) : Floats(c.b * c.h * c.p * c.n)),
        documents_(Documents(c.b, c.s, c.first_position)),
        y_(x_.size()),
        states_(c.b * ((c.s + c.chunk - 1) / c.chunk) * c.h * c.p * c.n),
        final_(initial_.size()) {}

  SsdArgs args() {
    return {.x = View(x_, {c_.b, c_.s, c_.h, c_.p}),
            .dt = View(dt_, {c_.b, c_.s, c_.h}),
            .b = View(b_, {c_.b, c_.s, c_.g, c_.n}),
            .c = View(cs_, {c_.b, c_.s, c_.g, c_.n}),
            .dt_bias = View(dt_bias_, {c_.h}),
            .a_log = View(a_log_, {c_.h}),
            .d = View(d_, {c_.h}),
            .initial_state = c_.state ? View(initial_, {c_.b, c_.h, c_.p, c_.n}) : Tensor(),
            .documents = c_.documents ? View(documents_, {c_.b, c_.s}) : Tensor(),
            .first_position = c_.first_position,
            .step_min = c_.step_min,
            .step_max = c_.step_max,
            .chunk = c_.chunk,
            .y = View(y_, {c_.b, c_.s, c_.h, c_.p}),
            .states = View(states_, {c_.b, (c_.s + c_.chunk - 1) / c_.chunk, c_.h, c_.p * c_.n}),
            .final_state = View(final_, {c_.b, c_.h, c_.p, c_.n})};
  }

  void Run() {
    Host host;
    SsdForward(*host.stream, args());
    ScanInputs in = {Wide(x_),       Wide(dt_),    Wide(b_), Wide(cs_),
                     Wide(dt_bias_), Wide(a_log_), Wide(d_), Wide(initial_)};
    Doubles final_state;
    ExpectClose(y_, ScanReference(c_, in, documents_, &final_state), 1e-5, "y");
    ExpectClose(final_, final_state, 1e-5, "final state");

    Floats dy = Random(y_.size(), 9), d_final = Random(final_.size(), 10);
    Floats dx(x_.size()), ddt(dt_.size()), db(b_.size()), dc(cs_.size()), d_initial(final_.size());
    Floats d_dt_bias = Random(c_.h, 11), d_a_log = Random(c_.h, 12), dd = Random(c_.h, 13);
    const Floats d_dt_bias_before = d_dt_bias, d_a_log_before = d_a_log, dd_before = dd;
    SsdBackward(*host.stream, {.forward = args(),
                               .dy = View(dy, {c_.b, c_.s, c_.h, c_.p}),
                               .d_final_state = View(d_final, {c_.b, c_.h, c_.p, c_.n}),
                               .dx = View(dx, {c_.b, c_.s, c_.h, c_.p}),
                               .ddt = View(ddt, {c_.b, c_.s, c_.h}),
                               .db = View(db, {c_.b, c_.s, c_.g, c_.n}),
                               .dc = View(dc, {c_.b, c_.s, c_.g, c_.n}),
                               .d_dt_bias = View(d_dt_bias, {c_.h}),
                               .d_a_log = View(d_a_log, {c_.h}),
                               .dd = View(dd, {c_.h}),
                               .d_initial_state = View(d_initial, {c_.b, c_.h, c_.p, c_.n})});
    const Doubles dy64 = Wide(dy), d_final64 = Wide(d_final);
    const auto loss = [&] {
      Doubles state;
      const Doubles y = ScanReference(c_, in, documents_, &state);
      return Dot(y, dy64) + Dot(state, d_final64);
    };
    ExpectClose(dx, NumericGradient(in.x, loss), 1e-4, "dx");
    ExpectClose(ddt, NumericGradient(in.dt, loss), 1e-4, "ddt");
    ExpectClose(db, NumericGradient(in.b, loss), 1e-4, "db");
    ExpectClose(dc, NumericGradient(in.c, loss), 1e-4, "dc");
    ExpectClose(d_initial, NumericGradient(in.initial, loss), 1e-4, "d_initial_state");
    ExpectClose(d_dt_bias, testing::Plus(d_dt_bias_before, NumericGradient(in.dt_bias, loss)), 1e-4,
                "d_dt_bias");
    ExpectClose(d_a_log, testing::Plus(d_a_log_before, NumericGradient(in.a_log, loss)), 1e-4,
                "d_a_log");
    ExpectClose(dd, testing::Plus(dd_before, NumericGradient(in.d, loss)), 1e-4, "dd");
  }

  // The same with the positions of each sample in 2 `ranks` segments, in the layout of context
  // parallelism: each rank computes its own, and all ranks see what segments leave behind.
  void RunInSegments(int ranks, int threads = 0) {
    struct Rank {
      Floats x, dt, b, c, y, states, final_state, entry, dy, d_states, d_initial, exit;
      Floats dx, ddt, db, dc;
      std::vector<int32_t> documents;
      SsdBackwardArgs args;
    };
    Host host(threads == 0 ? 2 : threads);
    Stream& stream = *host.stream;
    const int64_t segments = 2 * ranks, length = c_.s / segments, samples = 2 * c_.b;
    const int64_t chunks = (length + c_.chunk - 1) / c_.chunk, state = c_.p * c_.n;
    const int64_t row = samples * c_.h;
    // By rank: states, decays.
    Floats left(ranks * row * (state + 1)), d_left = left;
    const auto part = [&](Floats& of, int64_t rank, std::initializer_list<int64_t> shape,
                          int64_t begin) {
      return Tensor(of.data() + rank * row * (state + 1) + begin, DType::kF32, shape);
    };
    const auto pass = [&](Floats& of, int rank, bool reverse, Floats& own) {
      SsdPassStates(stream, {.states = Tensor(of.data(), DType::kF32, {ranks, samples, c_.h, state},
                                              {row * (state + 1), c_.h * state, state, 1}),
                             .decays = Tensor(of.data() + row * state, DType::kF32,
                                              {ranks, samples, c_.h}, {row * (state + 1), c_.h, 1}),
                             .rank = rank,
                             .reverse = reverse,
                             .own = View(own, {samples, c_.h, c_.p, c_.n})});
    };
    // Positions of a rank's segments in the samples: calls f(own row, row) for all.
    const auto for_rows = [&](int rank, auto f) {
      for (int64_t i = 0; i < samples; ++i) {
        const int64_t segment = i % 2 == 0 ? rank : segments - 1 - rank;
        for (int64_t t = 0; t < length; ++t) {
          f(i * length + t, i / 2 * c_.s + segment * length + t);
        }
      }
    };
    const auto own = [&](const Floats& whole, int rank) {
      const int64_t width = static_cast<int64_t>(whole.size()) / (c_.b * c_.s);
      Floats rows(samples * length * width);
      for_rows(rank, [&](int64_t to, int64_t from) {
        std::copy_n(whole.begin() + from * width, width, rows.begin() + to * width);
      });
      return rows;
    };
    const auto back = [&](const Floats& rows, int rank, Floats& whole) {
      const int64_t width = static_cast<int64_t>(whole.size()) / (c_.b * c_.s);
      for_rows(rank, [&](int64_t from, int64_t to) {
        std::copy_n(rows.begin() + from * width, width, whole.begin() + to * width);
      });
    };
    Floats dy = Random(y_.size(), 9);
    Floats d_dt_bias = Random(c_.h, 11), d_a_log = Random(c_.h, 12), dd = Random(c_.h, 13);
    const Floats d_dt_bias_before = d_dt_bias, d_a_log_before = d_a_log, dd_before = dd;
    std::vector<Rank> all(ranks);
    for (int rank = 0; rank < ranks; ++rank) {
      Rank& r = all[rank];
      r.x = r.y = r.dx = own(x_, rank);
      r.dt = r.ddt = own(dt_, rank);
      r.b = r.db = own(b_, rank);
      r.c = r.dc = own(cs_, rank);
      r.dy = own(dy, rank);
      r.states = r.d_states = Floats(samples * chunks * c_.h * state);
      r.entry = r.exit = Floats(row * state);
      SsdArgs& args = r.args.forward;
      args = this->args();
      args.x = View(r.x, {samples, length, c_.h, c_.p});
      args.dt = View(r.dt, {samples, length, c_.h});
      args.b = View(r.b, {samples, length, c_.g, c_.n});
      args.c = View(r.c, {samples, length, c_.g, c_.n});
      args.y = View(r.y, {samples, length, c_.h, c_.p});
      args.states = View(r.states, {samples, chunks, c_.h, state});
      args.initial_state = View(r.entry, {samples, c_.h, c_.p, c_.n});
      args.final_state = part(left, rank, {samples, c_.h, c_.p, c_.n}, 0);
      args.decay = part(left, rank, {samples, c_.h}, row * state);
      args.first_position = 0;
      if (c_.documents) {
        r.documents.resize(samples * length);
        args.documents = View(r.documents, {samples, length});
        SegmentDocuments(stream, {View(documents_, {c_.b, c_.s}), rank, args.documents});
      }
      r.args.dy = View(r.dy, {samples, length, c_.h, c_.p});
      r.args.dx = View(r.dx, {samples, length, c_.h, c_.p});
      r.args.ddt = View(r.ddt, {samples, length, c_.h});
      r.args.db = View(r.db, {samples, length, c_.g, c_.n});
      r.args.dc = View(r.dc, {samples, length, c_.g, c_.n});
      r.args.d_dt_bias = View(d_dt_bias, {c_.h});
      r.args.d_a_log = View(d_a_log, {c_.h});
      r.args.dd = View(dd, {c_.h});
      r.args.d_states = View(r.d_states, {samples, chunks, c_.h, state});
      r.args.d_final_state = View(r.exit, {samples, c_.h, c_.p, c_.n});
      SsdForwardStates(stream, args);
    }
    Floats dx(x_.size()), ddt(dt_.size()), db(b_.size()), dc(cs_.size());
    for (int rank = 0; rank < ranks; ++rank) {
      Rank& r = all[rank];
      pass(left, rank, /*reverse=*/false, r.entry);
      SsdForwardOutputs(stream, r.args.forward);
      r.args.forward.decay = part(d_left, rank, {samples, c_.h}, row * state);
      r.args.d_initial_state = part(d_left, rank, {samples, c_.h, c_.p, c_.n}, 0);
      SsdBackwardStates(stream, r.args);
    }
    for (int rank = 0; rank < ranks; ++rank) {
      Rank& r = all[rank];
      pass(d_left, rank, /*reverse=*/true, r.exit);
      SsdBackwardInputs(stream, r.args);
      back(r.y, rank, y_);
      back(r.dx, rank, dx);
      back(r.ddt, rank, ddt);
      back(r.db, rank, db);
      back(r.dc, rank, dc);
    }
    ScanInputs in = {Wide(x_),       Wide(dt_),    Wide(b_), Wide(cs_),
                     Wide(dt_bias_), Wide(a_log_), Wide(d_), Wide(initial_)};
    ExpectClose(y_, ScanReference(c_, in, documents_, nullptr), 1e-5, "y");
    const Doubles dy64 = Wide(dy);
    const auto loss = [&] { return Dot(ScanReference(c_, in, documents_, nullptr), dy64); };
    ExpectClose(dx, NumericGradient(in.x, loss), 1e-4, "dx");
    ExpectClose(ddt, NumericGradient(in.dt, loss), 1e-4, "ddt");
    ExpectClose(db, NumericGradient(in.b, loss), 1e-4, "db");
    ExpectClose(dc, NumericGradient(in.c, loss), 1e-4, "dc");
    ExpectClose(d_dt_bias, testing::Plus(d_dt_bias_before, NumericGradient(in.dt_bias, loss)), 1e-4,
                "d_dt_bias");
    ExpectClose(d_a_log, testing::Plus(d_a_log_before, NumericGradient(in.a_log, loss)), 1e-4,
                "d_a_log");
    ExpectClose(dd, testing::Plus(dd_before, NumericGradient(in.d, loss)), 1e-4, "dd");
  }

  const Floats& y() const { return y_; }
  const Floats& final_state() const { return final_; }

 private:
  const Scan c_;
  Floats x_, dt_, b_, cs_, dt_bias_, a_log_, d_, initial_;
  std::vector<int32_t> documents_;
  Floats y_, states_, final_;
};

TEST(Ssd, ForwardAndBackward_GroupsTailsStatesAndDocuments_MatchFloat64) {
  ScanTest({.b = 1, .s = 1, .h = 1, .p = 1, .g = 1, .n = 1, .chunk = 4}).Run();
  ScanTest({.b = 2, .s = 7, .h = 4, .p = 3, .g = 2, .n = 5, .chunk = 4}).Run();
  ScanTest({.b = 1, .s = 9, .h = 3, .p = 2, .g = 1, .n = 4, .chunk = 3, .state = true}).Run();
  ScanTest({.b = 2,
            .s = 11,
            .h = 2,
            .p = 2,
            .g = 2,
            .n = 3,
            .chunk = 4,
            .documents = true,
            .state = true})
      .Run();
}

// Two segments of each sample on every rank. Documents begin in some segments and not in others.
TEST(Ssd, SegmentsOnSeveralRanks_MatchFloat64) {
  for (const int ranks : {1, 2, 3}) {
    SCOPED_TRACE(ranks);
    ScanTest({.b = 2, .s = 12, .h = 2, .p = 3, .g = 1, .n = 4, .chunk = 4}).RunInSegments(ranks);
    ScanTest({.b = 2,
              .s = 24,
              .h = 4,
              .p = 2,
              .g = 2,
              .n = 3,
              .chunk = 3,
              .documents = true,
              .step_max = 0.4f,
              .first_position = 0})
        .RunInSegments(ranks);
  }
}

TEST(Ssd, SegmentsOnAnyThreads_GiveTheSameBits) {
  const Scan scan = {.b = 2, .s = 24, .h = 3, .p = 4, .g = 1, .n = 6, .chunk = 4};
  ScanTest one(scan), two(scan);
  one.RunInSegments(2, 1);
  two.RunInSegments(2, 3);
  EXPECT_EQ(one.y(), two.y());
}

TEST(Ssd, StepSizesOutsideOfTheLimits_AreClampedAndHaveNoGradient) {
  ScanTest({.b = 1,
            .s = 8,
            .h = 2,
            .p = 2,
            .g = 1,
            .n = 3,
            .chunk = 4,
            .step_min = 0.5f,
            .step_max = 1.0f})
      .Run();
}

TEST(Ssd, AnyChunkAndThreads_GiveTheSameBits) {
  ScanTest one({.b = 2, .s = 13, .h = 2, .p = 4, .g = 1, .n = 6, .chunk = 13});
  ScanTest two({.b = 2, .s = 13, .h = 2, .p = 4, .g = 1, .n = 6, .chunk = 5});
  Host alone(1), pair(2);
  SsdForward(*alone.stream, one.args());
  SsdForward(*pair.stream, two.args());
  EXPECT_EQ(one.y(), two.y());
  EXPECT_EQ(one.final_state(), two.final_state());
}

// Splitting a sequence and passing the state on is how context parallelism and sampling run it.
TEST(Ssd, StateThatIsPassedOn_ContinuesTheSequenceBitForBit) {
  const int64_t s = 10, h = 2, p = 3, n = 4;
  Floats x = Random(s * h * p, 1), dt = Random(s * h, 2), b = Random(s * n, 3),
         c = Random(s * n, 4);
  Floats dt_bias = Random(h, 5), a_log = Random(h, 6), d = Random(h, 7);
  Floats whole(x.size()), split(x.size()), middle(h * p * n), end(h * p * n), end_split(h * p * n);
  const auto run = [&](int64_t begin, int64_t count, Floats& y, Tensor initial,
                       Tensor final_state) {
    Host host;
    SsdForward(*host.stream, {.x = Tensor(x.data() + begin * h * p, DType::kF32, {1, count, h, p}),
                              .dt = Tensor(dt.data() + begin * h, DType::kF32, {1, count, h}),
                              .b = Tensor(b.data() + begin * n, DType::kF32, {1, count, 1, n}),
                              .c = Tensor(c.data() + begin * n, DType::kF32, {1, count, 1, n}),
                              .dt_bias = View(dt_bias, {h}),
                              .a_log = View(a_log, {h}),
                              .d = View(d, {h}),
                              .initial_state = initial,
                              .y = Tensor(y.data() + begin * h * p, DType::kF32, {1, count, h, p}),
                              .final_state = final_state});
  };
  run(0, s, whole, Tensor(), View(end, {1, h, p, n}));
  run(0, 4, split, Tensor(), View(middle, {1, h, p, n}));
  run(4, 6, split, View(middle, {1, h, p, n}), View(end_split, {1, h, p, n}));
  EXPECT_EQ(whole, split);
  EXPECT_EQ(end, end_split);
}

// exp and softplus must not overflow, however large the projection's output is.
TEST(Ssd, ExtremeStepSizes_StayFinite) {
  const int64_t s = 6;
  Floats x(s, 1), dt = {-1e4f, 1e4f, -100, 100, 0, 30}, b(s, 1), c(s, 1);
  Floats zero(1), log_sixteen(1, std::log(16.0f)), one(1, 1.0f), y(s), states(s);
  Host host;
  const SsdArgs args = {.x = View(x, {1, s, 1, 1}),
                        .dt = View(dt, {1, s, 1}),
                        .b = View(b, {1, s, 1, 1}),
                        .c = View(c, {1, s, 1, 1}),
                        .dt_bias = View(zero, {1}),
                        .a_log = View(log_sixteen, {1}),
                        .d = View(one, {1}),
                        .chunk = 1,
                        .y = View(y, {1, s, 1, 1}),
                        .states = View(states, {1, s, 1, 1})};
  SsdForward(*host.stream, args);
  Floats dy(s, 1), dx(s), ddt(s), db(s), dc(s), d1(1), d2(1), d3(1);
  SsdBackward(*host.stream, {.forward = args,
                             .dy = View(dy, {1, s, 1, 1}),
                             .dx = View(dx, {1, s, 1, 1}),
                             .ddt = View(ddt, {1, s, 1}),
                             .db = View(db, {1, s, 1, 1}),
                             .dc = View(dc, {1, s, 1, 1}),
                             .d_dt_bias = View(d1, {1}),
                             .d_a_log = View(d2, {1}),
                             .dd = View(d3, {1})});
  for (const Floats* values : {&y, &dx, &ddt, &db, &dc, &d1, &d2, &d3}) {
    for (const float value : *values) EXPECT_TRUE(std::isfinite(value));
  }
}

// ---- gated norm ----

Doubles NormReference(int64_t t, int64_t w, int64_t groups, bool before, const Doubles& y,
                      const Doubles& z, const Doubles& gamma) {
  Doubles out(t * w);
  const int64_t width = w / groups;
  for (int64_t row = 0; row < t; ++row) {
    for (int64_t g = 0; g < groups; ++g) {
      double mean = 0;
      for (int64_t i = row * w + g * width; i < row * w + (g + 1) * width; ++i) {
        const double v = before ? y[i] : y[i] * Silu(z[i]);
        mean += v * v / static_cast<double>(width);
      }
      const double rstd = 1 / std::sqrt(mean + 1e-5);
      for (int64_t i = row * w + g * width; i < row * w + (g + 1) * width; ++i) {
        out[i] = y[i] * Silu(z[i]) * rstd * gamma[i - row * w];
      }
    }
  }
  return out;
}

TEST(GatedRmsNorm, ForwardAndBackward_GateOnEitherSideAndGroups_MatchFloat64) {
  for (const bool before : {false, true}) {
    for (auto [t, w, groups] : {std::tuple(1, 1, 1), std::tuple(5, 12, 3), std::tuple(18, 70, 2)}) {
      Host host;
      Floats y = Random(t * w, 1), z = Random(t * w, 2), gamma = Random(w, 3), out(t * w);
      Floats rstd(t * groups), dz(t * w), dgamma = Random(w, 5);
      const Floats dout = Random(t * w, 4), dgamma_before = dgamma;
      const GatedRmsNormArgs args = {.y = View(y, {t, w}),
                                     .z = View(z, {t, w}),
                                     .gamma = View(gamma, {w}),
                                     .out = View(out, {t, w}),
                                     .rstd = View(rstd, {t, groups}),
                                     .groups = groups,
                                     .norm_before_gate = before};
      GatedRmsNormForward(*host.stream, args);
      Doubles y64 = Wide(y), z64 = Wide(z), gamma64 = Wide(gamma);
      const Doubles dout64 = Wide(dout);
      const auto reference = [&, t = t, w = w, groups = groups] {
        return NormReference(t, w, groups, before, y64, z64, gamma64);
      };
      ExpectClose(out, reference(), 1e-5, "out");
      Floats dy = dout;  // in place
      GatedRmsNormBackward(*host.stream, {.forward = args,
                                          .dout = View(dy, {t, w}),
                                          .dy = View(dy, {t, w}),
                                          .dz = View(dz, {t, w}),
                                          .dgamma = View(dgamma, {w})});
      const auto loss = [&] { return Dot(reference(), dout64); };
      ExpectClose(dy, NumericGradient(y64, loss), 1e-4, "dy");
      ExpectClose(dz, NumericGradient(z64, loss), 1e-4, "dz");
      ExpectClose(dgamma, testing::Plus(dgamma_before, NumericGradient(gamma64, loss)), 1e-4,
                  "dgamma");
    }
  }
}

// Two ranks with columns of one group add up their sums.
TEST(GatedRmsNorm, ColumnsOnTwoRanks_GiveWhatOneRankGives) {
  const int64_t t = 7, w = 23, first = 9;
  for (const bool before : {false, true}) {
    Host host;
    Floats y = Random(t * w, 1), z = Random(t * w, 2), gamma = Random(w, 3), out(t * w), rstd(t);
    Floats dout = Random(t * w, 4), dy(t * w), dz(t * w), dgamma(w);
    const auto columns = [&](Floats& of, int64_t begin, int64_t end) {
      return Tensor(of.data() + begin, DType::kF32, {t, end - begin}, {w, 1});
    };
    const auto args = [&](int64_t begin, int64_t end) {
      GatedRmsNormBackwardArgs backward;
      GatedRmsNormArgs& forward = backward.forward;
      forward.y = columns(y, begin, end);
      forward.z = columns(z, begin, end);
      forward.gamma = Tensor(gamma.data() + begin, DType::kF32, {end - begin});
      forward.out = columns(out, begin, end);
      forward.rstd = View(rstd, {t, 1});
      forward.norm_before_gate = before;
      backward.dout = columns(dout, begin, end);
      backward.dy = columns(dy, begin, end);
      backward.dz = columns(dz, begin, end);
      backward.dgamma = Tensor(dgamma.data() + begin, DType::kF32, {end - begin});
      return backward;
    };
    GatedRmsNormForward(*host.stream, args(0, w).forward);
    GatedRmsNormBackward(*host.stream, args(0, w));
    const Doubles whole_out = Wide(out), whole_dy = Wide(dy), whole_dz = Wide(dz);
    const Doubles whole_dgamma = Wide(dgamma), whole_rstd = Wide(rstd);
    out.assign(t * w, 0);
    dgamma.assign(w, 0);
    std::vector<GatedRmsNormBackwardArgs> ranks = {args(0, first), args(first, w)};
    std::vector<Floats> sums(2, Floats(t));
    const auto add_up = [&] {
      for (int64_t i = 0; i < t; ++i) sums[0][i] = sums[1][i] = sums[0][i] + sums[1][i];
    };
    for (int rank = 0; rank < 2; ++rank) {
      ranks[rank].forward.sums = View(sums[rank], {t, 1});
      ranks[rank].forward.group_width = w;
      GatedRmsNormSums(*host.stream, ranks[rank].forward);
    }
    add_up();
    for (const auto& rank : ranks) GatedRmsNormForward(*host.stream, rank.forward);
    for (const auto& rank : ranks) GatedRmsNormBackwardSums(*host.stream, rank);
    add_up();
    for (const auto& rank : ranks) GatedRmsNormBackward(*host.stream, rank);
    ExpectClose(out, whole_out, 1e-6, "out");
    ExpectClose(rstd, whole_rstd, 1e-6, "rstd");
    ExpectClose(dy, whole_dy, 1e-6, "dy");
    ExpectClose(dz, whole_dz, 1e-6, "dz");
    ExpectClose(dgamma, whole_dgamma, 1e-6, "dgamma");
  }
}

// Two ranks with columns of one group: what both have computed is added up, and then the factor of
// each row applied to some of the rows.
TEST(GatedRmsNorm, FactorBehindTheSum_GivesWhatTheNormGives) {
  const int64_t t = 7, w = 23, cut = 9, first = 2, some = 4;
  Host host;
  Floats y = Random(t * w, 1), z = Random(t * w, 2), gamma = Random(w, 3), out(t * w), rstd(t);
  Floats dout = Random(t * w, 4), dy(t * w), dz(t * w), dgamma(w);
  const auto columns = [&](Floats& of, int64_t begin, int64_t end) {
    return Tensor(of.data() + begin, DType::kF32, {t, end - begin}, {w, 1});
  };
  const auto args = [&](int64_t begin, int64_t end) {
    GatedRmsNormBackwardArgs backward;
    GatedRmsNormArgs& forward = backward.forward;
    forward.y = columns(y, begin, end);
    forward.z = columns(z, begin, end);
    forward.gamma = Tensor(gamma.data() + begin, DType::kF32, {end - begin});
    forward.out = columns(out, begin, end);
    forward.rstd = View(rstd, {t, 1});
    backward.dout = columns(dout, begin, end);
    backward.dy = columns(dy, begin, end);
    backward.dz = columns(dz, begin, end);
    backward.dgamma = Tensor(dgamma.data() + begin, DType::kF32, {end - begin});
    return backward;
  };
  GatedRmsNormForward(*host.stream, args(0, w).forward);
  GatedRmsNormBackward(*host.stream, args(0, w));
  const Doubles whole_out = Wide(out), whole_dy = Wide(dy), whole_dz = Wide(dz);
  const Doubles whole_dgamma = Wide(dgamma), whole_rstd = Wide(rstd);
  out.assign(t * w, 0);
  rstd.assign(t, 0);
  dgamma.assign(w, 0);
  std::vector<GatedRmsNormBackwardArgs> ranks = {args(0, cut), args(cut, w)};
  std::vector<Floats> sums(2, Floats(t)), dots(2, Floats(t));
  const auto add_up = [&](std::vector<Floats>& of) {
    for (int64_t i = 0; i < t; ++i) of[0][i] = of[1][i] = of[0][i] + of[1][i];
  };
  for (int rank = 0; rank < 2; ++rank) {
    ranks[rank].forward.sums = View(sums[rank], {t, 1});
    ranks[rank].forward.group_width = w;
    GatedRmsNormUnscaled(*host.stream, ranks[rank].forward);
  }
  add_up(sums);
  Floats branch = out;
  RmsScaleRows(*host.stream, {.sums = View(sums[0], {t}),
                              .rstd = View(rstd, {t}),
                              .width = w,
                              .rows = Tensor(branch.data() + first * w, DType::kF32, {some, w}),
                              .first = first});
  ExpectClose(rstd, whole_rstd, 1e-6, "rstd");
  for (int64_t i = 0; i < t * w; ++i) {
    const bool scaled = i / w >= first && i / w < first + some;
    EXPECT_NEAR(branch[i], scaled ? whole_out[i] : out[i], 1e-5) << i;
  }
  for (int rank = 0; rank < 2; ++rank) {
    ranks[rank].forward.sums = View(dots[rank], {t, 1});
    GatedRmsNormBackwardSums(*host.stream, ranks[rank]);
    const Floats by_inputs = dots[rank];
    ranks[rank].out = ranks[rank].forward.out;
    GatedRmsNormBackwardSums(*host.stream, ranks[rank]);
    ExpectClose(dots[rank], Wide(by_inputs), 1e-5, "sums by the output");
  }
  add_up(dots);
  for (const auto& rank : ranks) GatedRmsNormBackward(*host.stream, rank);
  ExpectClose(out, whole_out, 1e-5, "out");
  ExpectClose(dy, whole_dy, 1e-5, "dy");
  ExpectClose(dz, whole_dz, 1e-5, "dz");
  ExpectClose(dgamma, whole_dgamma, 1e-5, "dgamma");
}

}  // namespace
}  // namespace muster::kernels
