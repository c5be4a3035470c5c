// Attention over a sequence spread over ranks, against attention on one rank.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <deque>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/mutex.h"
#include "kernels/attention/attention.h"
#include "kernels/device/device.h"
#include "kernels/memory/memory.h"
#include "kernels/tensor.h"
#include "parallel/comm/communicator.h"
#include "parallel/context/context_attention.h"
#include "parallel/context/sequence_layout.h"
#include "tests/kernels/support.h"
#include "tests/support/forwarding_communicator.h"
#include "tests/support/status_matchers.h"

namespace muster::parallel {
namespace {

using kernels::Arena;
using kernels::DType;
using kernels::Tensor;
using kernels::testing::ExpectClose;
using kernels::testing::Floats;
using kernels::testing::Random;
using ::muster::testing::StatusIs;
using ::testing::HasSubstr;

int64_t Packed(const ContextShape& s) { return (s.heads + 2 * s.key_heads) * s.width; }

// Heads [first, first + heads) of packed [B,tokens,(H + 2G) D].
Tensor Slice(Floats& packed, const ContextShape& s, int64_t tokens, int64_t first, int64_t heads) {
  const int64_t row = static_cast<int64_t>(packed.size()) / (s.batch * tokens);
  return Tensor(packed.data() + first * s.width, DType::kF32, {s.batch, tokens, heads, s.width},
                {tokens * row, row, s.width, 1});
}

struct Result {
  Floats out;    // [B,tokens,H,D]
  Floats d_qkv;  // packed
};

using Documents = std::vector<int32_t>;  // see ContextAttention::Inputs; empty: one

Tensor View(Documents& documents, const ContextShape& s) {
  if (documents.empty()) return Tensor();
  return Tensor(documents.data(), DType::kI32, {s.batch, s.sequence});
}

Result OneRank(const ContextShape& s, Floats qkv, Floats dout, Documents documents = {}) {
  kernels::testing::Host host;
  Result result = {Floats(dout.size()), Floats(qkv.size())};
  Floats lse(s.batch * s.heads * s.sequence), delta(lse.size());
  const int64_t n = s.sequence;
  kernels::AttentionBackwardArgs args;
  args.forward.q = Slice(qkv, s, n, 0, s.heads);
  args.forward.k = Slice(qkv, s, n, s.heads, s.key_heads);
  args.forward.v = Slice(qkv, s, n, s.heads + s.key_heads, s.key_heads);
  args.forward.out = Slice(result.out, s, n, 0, s.heads);
  args.forward.lse = kernels::testing::View(lse, {s.batch, s.heads, n});
  args.forward.documents = View(documents, s);
  args.dout = Slice(dout, s, n, 0, s.heads);
  args.dq = Slice(result.d_qkv, s, n, 0, s.heads);
  args.dk = Slice(result.d_qkv, s, n, s.heads, s.key_heads);
  args.dv = Slice(result.d_qkv, s, n, s.heads + s.key_heads, s.key_heads);
  args.delta = kernels::testing::View(delta, {s.batch, s.heads, n});
  kernels::AttentionForward(*host.stream, args.forward);
  kernels::AttentionBackward(*host.stream, args);
  return result;
}

// Between the whole of a tensor [B,S,row] and a rank's tokens of it.
Floats Take(const ContextShape& s, int rank, const Floats& whole) {
  const int64_t row = static_cast<int64_t>(whole.size()) / (s.batch * s.sequence);
  Floats local;
  for (int64_t b = 0; b < s.batch; ++b) {
    for (const int32_t position : ContextPositions(s.sequence, rank, s.ranks)) {
      const auto begin = whole.begin() + (b * s.sequence + position) * row;
      local.insert(local.end(), begin, begin + row);
    }
  }
  return local;
}
void Put(const ContextShape& s, int rank, const Floats& local, Floats& whole) {
  const int64_t row = static_cast<int64_t>(whole.size()) / (s.batch * s.sequence);
  auto from = local.begin();
  for (int64_t b = 0; b < s.batch; ++b) {
    for (const int32_t position : ContextPositions(s.sequence, rank, s.ranks)) {
      std::copy(from, from + row, whole.begin() + (b * s.sequence + position) * row);
      from += row;
    }
  }
}

struct RankResult {
  Result result;
  int64_t forward_bytes = 0, backward_bytes = 0;
  absl::Status status;
  // Of the last Backward: exchanges and the caller's work, in the order that they were enqueued.
  std::vector<std::string> log;
  // How often the caller's work has run on the stream.
  float works = 0;
  bool late = false;  // an exchange was awaited before its work was there
};

// How attention is called.
struct How {
  bool overlapped = false;
  bool threaded = overlapped;  // the computing stream; else it runs within the calls
  int calls = 1;
  Documents documents = {};
  bool work = false;  // with some of the caller's
};

// Logs exchanges. All-to-alls beside the computing stream begin when the caller's next work has
// been enqueued.
class LoggedGroup : public muster::testing::ForwardingCommunicator {
 public:
  LoggedGroup(std::unique_ptr<Communicator> inner, const kernels::Stream* beside)
      : ForwardingCommunicator(std::move(inner)), beside_(beside) {}

  void ReduceScatter(kernels::Stream& stream, Tensor data, ReduceOp op) override {
    Log(stream, "reduce-scatter");
    inner_->ReduceScatter(stream, data, op);
  }
  void AllGather(kernels::Stream& stream, Tensor data) override {
    Log(stream, "all-gather");
    inner_->AllGather(stream, data);
  }
  void AllToAllBatch(kernels::Stream& stream, const std::vector<AllToAllItem>& items) override {
    Log(stream, "all-to-all");
    if (&stream == beside_ && waits) {
      stream.Enqueue([this, &work = works_.emplace_back()] {
        if (!late && !work.WaitForNotificationWithTimeout(absl::Seconds(20))) late = true;
      });
    }
    inner_->AllToAllBatch(stream, items);
  }
  void GroupEnd(kernels::Stream& stream) override {
    Log(stream, "rotation");
    inner_->GroupEnd(stream);
  }
  void OnWork(const std::string& name) {
    log.push_back(name);
    for (Notification& work : works_) {
      if (!work.HasBeenNotified()) work.Notify();
    }
  }

  std::vector<std::string> log;
  bool waits = false;  // there is work of the caller's
  std::atomic<bool> late = false;

 private:
  void Log(const kernels::Stream& stream, const std::string& what) {
    log.push_back(what + (&stream == beside_ ? " beside" : ""));
  }

  const kernels::Stream* const beside_;
  std::deque<Notification> works_;  // that all-to-alls wait for
};

RankResult RunRank(const ContextShape& s, std::unique_ptr<Communicator> world, Floats qkv,
                   Floats dout, How how) {
  RankResult result;
  const auto device = kernels::MakeCpuDevice(1);
  const auto stream = *device->MakeStream({.threaded = how.threaded});
  std::unique_ptr<ContextOverlap> overlap;
  if (how.overlapped) overlap = *ContextOverlap::Make(*device);
  LoggedGroup group(std::move(world), overlap != nullptr ? overlap->stream.get() : nullptr);
  const auto attention = *MakeContextAttention(s);
  Arena arena;
  auto saved = attention->TakeSaved(arena);
  attention->TakeScratch(arena, *saved);
  CHECK_OK(arena.Commit(*device));
  saved = attention->TakeSaved(arena);
  attention->TakeScratch(arena, *saved);

  result.result = {Floats(dout.size()), Floats(qkv.size(), NAN)};
  const int64_t n = s.local();
  ContextAttention::Inputs inputs = {
      Slice(qkv, s, n, 0, s.heads), Slice(qkv, s, n, s.heads, s.key_heads),
      Slice(qkv, s, n, s.heads + s.key_heads, s.key_heads),
      Slice(result.result.out, s, n, 0, s.heads), View(how.documents, s)};
  Floats& d = result.result.d_qkv;
  ContextAttention::Gradients gradients = {
      Slice(dout, s, n, 0, s.heads), Slice(d, s, n, 0, s.heads),
      Slice(d, s, n, s.heads, s.key_heads), Slice(d, s, n, s.heads + s.key_heads, s.key_heads)};
  float one = 1;
  const auto work = [&](const std::string& name) {
    kernels::Axpy(*stream, 1, Tensor(&one, DType::kF32, {1}),
                  Tensor(&result.works, DType::kF32, {1}));
    group.OnWork(name);
  };
  ContextAttention::Call call = {*stream, group, overlap.get()};
  if (how.work) {
    call.beside_first = [&] { work("first"); };
    call.beside_last = [&] { work("last"); };
  }
  for (int i = 0; i < how.calls; ++i) {
    const int64_t before = group.bytes_sent();
    attention->Forward(call, inputs, *saved);
    const int64_t between = group.bytes_sent();
    group.log.clear();
    group.waits = how.work;
    attention->Backward(call, inputs, gradients, *saved);
    group.waits = false;
    result.forward_bytes = between - before;
    result.backward_bytes = group.bytes_sent() - between;
  }
  result.status = stream->Synchronize();
  if (overlap != nullptr) result.status.Update(overlap->stream->Synchronize());
  result.log = group.log;
  result.late = group.late;
  return result;
}

std::vector<RankResult> RunRanks(const ContextShape& s, const Floats& qkv, const Floats& dout,
                                 const How& how = {}) {
  auto groups = MakeLocalCommunicators(s.ranks, absl::Seconds(60));
  std::vector<RankResult> results(s.ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < s.ranks; ++rank) {
    threads.emplace_back([&, rank] {
      results[rank] =
          RunRank(s, std::move(groups[rank]), Take(s, rank, qkv), Take(s, rank, dout), how);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

Result Together(const ContextShape& s, const std::vector<RankResult>& ranks) {
  Result whole = {Floats(s.batch * s.sequence * s.heads * s.width),
                  Floats(s.batch * s.sequence * Packed(s))};
  for (int rank = 0; rank < s.ranks; ++rank) {
    EXPECT_OK(ranks[rank].status);
    Put(s, rank, ranks[rank].result.out, whole.out);
    Put(s, rank, ranks[rank].result.d_qkv, whole.d_qkv);
  }
  return whole;
}

std::vector<ContextShape> Shapes() {
  std::vector<ContextShape> shapes;
  for (const ContextMethod method :
       {ContextMethod::kRing, ContextMethod::kAllGather, ContextMethod::kAllToAll}) {
    for (const int ranks : {1, 2, 3, 4}) {
      for (const auto& [heads, key_heads] :
           {std::pair{1, 1}, {3, 3}, {5, 1}, {6, 2}, {12, 4}, {4, 4}, {12, 2}}) {
        const ContextShape shape = {method, ranks, 2, 24, heads, key_heads, 5};
        if (Validate(shape).ok()) shapes.push_back(shape);
      }
      // A rank's heads in two groups.
      for (const int64_t keys : {2, 4}) {
        ContextShape grouped = {method, ranks, 2, 24, 12 * ranks, keys * ranks, 5};
        grouped.head_groups = 2;
        if (method == ContextMethod::kAllToAll) shapes.push_back(grouped);
      }
      // Several tiles per chunk.
      const ContextShape large = {method, ranks, 1, 2 * ranks * 140, 12, ranks, 8};
      if (Validate(large).ok()) shapes.push_back(large);
    }
  }
  return shapes;
}

std::string Describe(const ContextShape& s) {
  return absl::StrCat(Name(s.method), " over ", s.ranks, " ranks, S ", s.sequence, " H ", s.heads,
                      " G ", s.key_heads, " in ", HeadGroups(s), " groups");
}

TEST(HeadGroups, AreTwoWhereKeyHeadsAreEvenAndAttentionIsLong) {
  const auto groups = [](int64_t batch, int64_t sequence, int64_t heads, int64_t key_heads,
                         int at_most = 0) {
    ContextShape shape = {ContextMethod::kAllToAll, 4, batch, sequence, heads, key_heads, 64};
    shape.head_groups = at_most;
    EXPECT_OK(Validate(shape));
    return HeadGroups(shape);
  };
  EXPECT_EQ(groups(1, 32768, 32, 8), 2);
  EXPECT_EQ(groups(1, 32768, 32, 8, 1), 1);
  EXPECT_EQ(groups(1, 32768 - 8, 32, 8), 1);
  EXPECT_EQ(groups(2, 16384, 32, 8), 2);
  EXPECT_EQ(groups(1, 131072, 32, 4), 1);  // one key/value head each
  EXPECT_EQ(groups(1, 131072, 36, 12), 1);
  EXPECT_EQ(groups(1, 64, 32, 8, 2), 2);
  EXPECT_EQ(HeadGroups({ContextMethod::kRing, 4, 1, 131072, 32, 8, 64}), 1);
}

TEST(ContextAttention, ForwardAndGradients_AreThoseOfOneRank) {
  std::set<ContextMethod> with_groups;
  for (const ContextShape& s : Shapes()) {
    SCOPED_TRACE(Describe(s));
    const Floats qkv = Random(s.batch * s.sequence * Packed(s), 1);
    const Floats dout = Random(s.batch * s.sequence * s.heads * s.width, 2);
    const Result expected = OneRank(s, qkv, dout);
    const Result actual = Together(s, RunRanks(s, qkv, dout));
    ExpectClose(actual.out, expected.out, 1e-5, "out");
    ExpectClose(actual.d_qkv, expected.d_qkv, 1e-5, "d_qkv");
    if (s.ranks > s.key_heads) with_groups.insert(s.method);
  }
  EXPECT_EQ(with_groups.size(), 3u);  // also fewer key/value heads than ranks
}

TEST(ContextAttention, Documents_AreKeptApartAsOnOneRank) {
  for (const ContextShape& s : Shapes()) {
    SCOPED_TRACE(Describe(s));
    const Floats qkv = Random(s.batch * s.sequence * Packed(s), 1);
    const Floats dout = Random(s.batch * s.sequence * s.heads * s.width, 2);
    // Of lengths that fit no chunk: some end in a chunk, some are longer than one.
    Documents documents;
    for (int64_t b = 0; b < s.batch; ++b) {
      int64_t begin = 0;
      for (int64_t i = 0; i < s.sequence; ++i) {
        if (i - begin == 1 + s.sequence / 5 + b || i == s.sequence - 2) begin = i;
        documents.push_back(static_cast<int32_t>(begin));
      }
    }
    const Result expected = OneRank(s, qkv, dout, documents);
    const Result actual =
        Together(s, RunRanks(s, qkv, dout, {.overlapped = true, .documents = documents}));
    ExpectClose(actual.out, expected.out, 1e-5, "out");
    ExpectClose(actual.d_qkv, expected.d_qkv, 1e-5, "gradients");
    EXPECT_NE(expected.out, OneRank(s, qkv, dout).out);
  }
}

TEST(ContextAttention, OverlappedExchanges_GiveTheSameBits) {
  for (const ContextShape& s : Shapes()) {
    SCOPED_TRACE(Describe(s));
    const Floats qkv = Random(s.batch * s.sequence * Packed(s), 1);
    const Floats dout = Random(s.batch * s.sequence * s.heads * s.width, 2);
    const Result inline_ = Together(s, RunRanks(s, qkv, dout));
    // Several calls in a row, as the layers of a model make them, on the same scratch memory.
    const How how = {.overlapped = true, .calls = 5, .work = true};
    const Result overlapped = Together(s, RunRanks(s, qkv, dout, how));
    EXPECT_EQ(inline_.out, overlapped.out);
    EXPECT_EQ(inline_.d_qkv, overlapped.d_qkv);
  }
}

TEST(ContextAttention, WorkOfTheCaller_RunsOnceAndBesideTheExchangesOfAllToAll) {
  ContextShape grouped = {ContextMethod::kAllToAll, 2, 2, 24, 12, 4, 5};
  grouped.head_groups = 2;
  for (const ContextShape& s :
       {ContextShape{ContextMethod::kRing, 2, 2, 24, 6, 2, 5},
        ContextShape{ContextMethod::kAllGather, 2, 2, 24, 6, 2, 5},
        ContextShape{ContextMethod::kAllToAll, 2, 2, 24, 6, 2, 5}, grouped}) {
    const bool groups = HeadGroups(s) > 1;
    const Floats qkv = Random(s.batch * s.sequence * Packed(s), 1);
    const Floats dout = Random(s.batch * s.sequence * s.heads * s.width, 2);
    for (const bool overlapped : {false, true}) {
      // A computing stream that runs within the calls waits there, too: an exchange that was
      // awaited before its work came would be seen.
      for (const bool threaded : {false, true}) {
        for (const bool work : {false, true}) {
          SCOPED_TRACE(absl::StrCat(Describe(s), overlapped ? " overlapped" : "",
                                    threaded ? " threaded" : "", work ? " with work" : ""));
          const std::string beside = overlapped ? " beside" : "";
          std::vector<std::string> log;
          switch (s.method) {
            case ContextMethod::kRing:
              log = {"rotation" + beside, "first", "last", "rotation" + beside};
              break;
            case ContextMethod::kAllGather:
              log = {"first", "all-gather", "reduce-scatter", "last"};
              break;
            case ContextMethod::kAllToAll:
              log = {"all-to-all" + beside, "first", "all-to-all" + beside, "last"};
              if (groups) log.insert(log.begin() + 2, 1, log[0]);
              if (groups) log.insert(log.begin(), 1, log[0]);
              break;
          }
          if (!work) {
            std::erase(log, "first");
            std::erase(log, "last");
            if (s.method == ContextMethod::kAllToAll) log.front() = log.back() = "all-to-all";
          }
          const How how = {
              .overlapped = overlapped, .threaded = threaded, .calls = 3, .work = work};
          for (const RankResult& rank : RunRanks(s, qkv, dout, how)) {
            EXPECT_OK(rank.status);
            EXPECT_EQ(rank.log, log);
            EXPECT_EQ(rank.works, work ? 6 : 0);
            EXPECT_FALSE(rank.late);
          }
        }
      }
    }
  }
}

TEST(ContextAttention, BytesSent_AreThoseOfTheFormula) {
  for (const ContextShape& s : Shapes()) {
    SCOPED_TRACE(Describe(s));
    const Floats qkv = Random(s.batch * s.sequence * Packed(s), 1);
    const Floats dout = Random(s.batch * s.sequence * s.heads * s.width, 2);
    const int64_t c = s.ranks, e = 4;
    const int64_t kv = s.batch * s.local() * s.key_heads * s.width * e;
    const int64_t q = s.batch * s.local() * s.heads * s.width * e;
    int64_t forward = (c - 1) * 2 * kv, backward = 2 * forward;
    if (s.method == ContextMethod::kAllToAll) {
      const int64_t copies = std::max<int64_t>(s.key_heads, c) / s.key_heads;
      forward = backward = (c - 1) * (2 * q + 2 * copies * kv) / c;
    }
    for (const RankResult& rank : RunRanks(s, qkv, dout)) {
      EXPECT_EQ(rank.forward_bytes, forward);
      EXPECT_EQ(rank.backward_bytes, backward);
    }
  }
}

TEST(ContextPositions, OfAllRanks_CoverTheSequenceOnceInBalance) {
  for (const int ranks : {1, 2, 3, 8}) {
    const int64_t sequence = 2 * ranks * 5;
    std::vector<int32_t> all;
    for (int rank = 0; rank < ranks; ++rank) {
      const std::vector<int32_t> positions = ContextPositions(sequence, rank, ranks);
      all.insert(all.end(), positions.begin(), positions.end());
      // The keys that a rank's queries see: the same number everywhere.
      const int64_t keys = std::accumulate(positions.begin(), positions.end(), int64_t{0}) +
                           static_cast<int64_t>(positions.size());
      EXPECT_EQ(keys, sequence * (sequence + 1) / 2 / ranks);
    }
    std::sort(all.begin(), all.end());
    std::vector<int32_t> expected(sequence);
    std::iota(expected.begin(), expected.end(), 0);
    EXPECT_EQ(all, expected);
  }
}

TEST(SequenceLayout, SegmentsAndPlaces_AreInverseAndInTheOrderOfTheSequence) {
  for (const int ranks : {1, 2, 3, 4}) {
    for (const SequenceLayout& layout :
         {SequenceLayout::Contiguous(ranks), SequenceLayout::Zigzag(ranks)}) {
      for (int segment = 0; segment < layout.segments(); ++segment) {
        EXPECT_EQ(layout.SegmentAt(layout.PlaceOf(segment)), segment);
      }
      for (int rank = 0; rank < ranks; ++rank) {
        const std::vector<int32_t> positions = layout.Positions(24, rank);
        EXPECT_EQ(positions.size(), 24u / ranks);
        EXPECT_TRUE(std::is_sorted(positions.begin(), positions.end()));
      }
    }
  }
  EXPECT_EQ(SequenceLayout::Contiguous(2).Positions(8, 1), (std::vector<int32_t>{4, 5, 6, 7}));
  EXPECT_EQ(SequenceLayout::Zigzag(2).Positions(8, 1), (std::vector<int32_t>{2, 3, 4, 5}));
  EXPECT_EQ(SequenceLayout::Zigzag(2).Positions(8, 0), (std::vector<int32_t>{0, 1, 6, 7}));
}

TEST(ContextAttention, ImpossibleShapes_AreRefusedWithTheNumbers) {
  EXPECT_THAT(MakeContextAttention({ContextMethod::kRing, 4, 1, 20, 2, 2, 4}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("20 tokens cannot be cut into two equal chunks for each of 4 "
                                 "ranks; it must be a multiple of 8")));
  EXPECT_THAT(MakeContextAttention({ContextMethod::kRing, 2, 1, 8, 4, 3, 4}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("3 key/value heads")));
  EXPECT_THAT(MakeContextAttention({ContextMethod::kAllToAll, 2, 1, 8, 3, 3, 4}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("3 heads")));
  EXPECT_THAT(MakeContextAttention({ContextMethod::kAllToAll, 4, 1, 8, 12, 3, 4}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("ring and all_gather")));
}

}  // namespace
}  // namespace muster::parallel
