#include "parallel/plan/validate.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace muster::parallel {
namespace {

constexpr int kRanksMax = 65536;
constexpr char kCompressionField[] = "engine.training.gradient_compression";

// "data 2 x tensor 4": degrees above 1, and data's.
std::string Words(const PerAxis& degrees) {
  std::vector<std::string> parts;
  for (const Axis axis : kAxes) {
    if (degrees[axis] > 1 || axis == Axis::kData) {
      parts.push_back(absl::StrCat(Name(axis), " ", degrees[axis]));
    }
  }
  return absl::StrJoin(parts, " x ");
}

// The multiples of `unit` around `value`: "12 or 18", or "6" where there is none below.
std::string Multiples(int64_t value, int64_t unit) {
  const int64_t below = value / unit * unit;
  if (below == 0) return absl::StrCat(unit);
  if (below > std::numeric_limits<int64_t>::max() - unit) return absl::StrCat(below);
  return absl::StrCat(below, " or ", below + unit);
}

// Data parallelism over all ranks beside other degrees is a default, and nobody's wish.
bool DataByDefault(const PerAxis& degrees, int ranks) {
  const bool others =
      degrees[Axis::kPipeline] > 1 || degrees[Axis::kContext] > 1 || degrees[Axis::kTensor] > 1;
  return others && degrees[Axis::kData] == ranks;
}

std::string FieldOf(Axis axis) { return absl::StrCat("engine.parallel.", Name(axis)); }

class Judge {
 public:
  Judge(const Layout& layout, const ModelSize& model, const ClusterSize& cluster)
      : layout_(layout), model_(model), cluster_(cluster) {}

  std::vector<LayoutProblem> Run() {
    for (const Axis axis : kAxes) {
      if (layout_.degrees[axis] >= 1 && layout_.degrees[axis] <= kRanksMax) continue;
      Add(FieldOf(axis), layout_.degrees[axis], " is out of range; 1 to ", kRanksMax);
    }
    if (!problems_.empty()) return std::move(problems_);
    Ranks();
    Batch();
    Tensor();
    TensorShares();
    Context();
    AllToAll();
    ScanAllToAll();
    Pipeline();
    PipelineSchedule();
    Zero();
    Compression();
    return std::move(problems_);
  }

 private:
  template <typename... Parts>
  void Add(std::string field, const Parts&... parts) {
    problems_.push_back({std::move(field), absl::StrCat(parts...)});
  }
  int degree(Axis axis) const { return layout_.degrees[axis]; }

  void Ranks() {
    if (cluster_.ranks < 1) return;  // FindProblems reports it by another rule
    // Four degrees of kRanksMax each pass what 64 bits hold.
    int64_t product = 1;
    for (const Axis axis : kAxes) {
      if (product <= int64_t{kRanksMax} * kRanksMax) product *= degree(axis);
    }
    if (product == cluster_.ranks) return;
    const int64_t others = product / degree(Axis::kData);
    Add("resources.ranks", cluster_.ranks,
        " ranks, but the degrees of engine.parallel multiply to ", product, " (",
        Words(layout_.degrees), ")",
        DataByDefault(layout_.degrees, cluster_.ranks) && others <= kRanksMax
            ? absl::StrCat("; without data they go with ", Multiples(cluster_.ranks, others),
                           " ranks")
            : "");
  }

  void Batch() {
    if (layout_.global_batch < 1 || layout_.micro_batch < 1) return;
    int64_t unit = 0;
    const bool overflow =
        __builtin_mul_overflow(layout_.micro_batch, int64_t{degree(Axis::kData)}, &unit);
    if (!overflow && layout_.global_batch % unit == 0) return;
    Add("engine.training.global_batch", layout_.global_batch,
        " is not a multiple of micro_batch x data (", layout_.micro_batch, " x ",
        degree(Axis::kData), ")",
        overflow ? "" : absl::StrCat("; ", Multiples(layout_.global_batch, unit), " would be"));
  }

  void Tensor() {
    const int tensor = degree(Axis::kTensor);
    // Shares need not be equal, and ranks may share a key/value head, but nobody can be left
    // without a query head.
    for (const auto& [size, of] : {std::pair(model_.heads, "attention heads of the model"),
                                   std::pair(model_.ssm_heads, "state-space heads of the model"),
                                   std::pair(model_.ffn, "columns of the MLP"),
                                   std::pair(model_.vocab, "rows of the vocabulary")}) {
      if (tensor > 1 && size > 0 && tensor > size) {
        Add(FieldOf(Axis::kTensor), tensor, " ranks cannot share the ", size, " ", of,
            ": each needs one");
      }
    }
    if (layout_.tensor_chunks && !layout_.sequence_parallel) {
      Add("engine.parallel.tensor_overlap",
          "chunked cuts GEMMs by the rows that ranks have with sequence parallelism, which is "
          "off; ",
          tensor > 1 ? "set sequence true, or use backward" : "use backward, as tensor is 1");
    }
    TensorHalves();
    if (!layout_.sequence_parallel) return;
    if (tensor == 1) {
      Add("engine.parallel.sequence", "needs tensor parallelism, but tensor is 1");
      return;
    }
    const int64_t tokens = TokensOfMicroBatch();
    if (tokens % tensor != 0) {
      const int64_t sample = model_.sequence / degree(Axis::kContext);
      Add("engine.parallel.sequence", "the ", tokens,
          " tokens of a micro-batch do not divide over ", tensor,
          " tensor-parallel ranks; with a micro_batch of ",
          Multiples(layout_.micro_batch, tensor / std::gcd(sample, int64_t{tensor})),
          " they would");
    }
  }

  // On a context rank; 0 where the model does not say, or the number is none.
  int64_t TokensOfMicroBatch() const {
    int64_t tokens = 0;
    if (__builtin_mul_overflow(layout_.micro_batch, model_.sequence, &tokens)) return 0;
    return std::max<int64_t>(0, tokens / degree(Axis::kContext));
  }

  void TensorHalves() {
    if (!layout_.tensor_halves) return;
    const char* const field = "engine.parallel.tensor_overlap";
    const int tensor = degree(Axis::kTensor);
    if (tensor == 1) {
      Add(field,
          "halves run the collectives of one half of the samples under the other, but tensor "
          "is 1; use backward");
      return;
    }
    if (layout_.zero_bubble) {
      Add(field,
          "halves and the zero_bubble schedule, whose second call of backward takes all "
          "samples at once, do not go together; use backward, or another schedule");
    }
    if (layout_.micro_batch % 2 != 0) {
      Add(field, "halves need an even number of samples, but micro_batch is ", layout_.micro_batch,
          "; ", Multiples(layout_.micro_batch, 2), " would do, or use backward");
      return;
    }
    const int64_t tokens = TokensOfMicroBatch();
    if (layout_.sequence_parallel && tokens % tensor == 0 && tokens % (2 * tensor) != 0) {
      Add(field, "halves of the ", tokens, " tokens of a micro-batch do not divide over ", tensor,
          " tensor-parallel ranks; with a micro_batch of ", 2 * layout_.micro_batch,
          " they would, or use backward");
    }
  }

  void TensorShares() {
    if (layout_.tensor_shares == 0 || layout_.tensor_shares == degree(Axis::kTensor)) return;
    Add("engine.parallel.tensor_shares", layout_.tensor_shares, " numbers for ",
        degree(Axis::kTensor), " tensor-parallel ranks; give one for each, or set tensor to ",
        layout_.tensor_shares);
  }

  void Context() {
    const int64_t context = degree(Axis::kContext);
    if (context == 1 || model_.sequence < 1 || model_.sequence % (2 * context) == 0) return;
    int64_t fewer = context;
    while (fewer > 1 && model_.sequence % (2 * fewer) != 0) --fewer;
    Add(FieldOf(Axis::kContext), "a sequence of ", model_.sequence, " tokens does not divide into ",
        2 * context, " chunks, two for each of the ", context, " ranks; one of ",
        Multiples(model_.sequence, 2 * context), " tokens would",
        fewer > 1 ? absl::StrCat(", or context ", fewer) : "");
  }

  // Of the heads that tensor ranks hold when shares are equal, as far as they go; of given shares,
  // and of key/value heads in common, the model knows more.
  void AllToAll() {
    const int64_t context = degree(Axis::kContext), tensor = degree(Axis::kTensor);
    if (!layout_.all_to_all || context == 1 || model_.heads < 1) return;
    const std::string field = "engine.parallel.context_method";
    const bool equal = layout_.tensor_shares == 0;
    const int64_t ranks = context * (equal ? tensor : 1);
    if (model_.heads % ranks != 0) {
      Add(field, "all_to_all spreads ", model_.heads, " heads over ", ranks, " ranks",
          ranks > context ? " (context x tensor)" : "",
          ", which does not divide; use ring or all_gather");
      return;
    }
    const int64_t keys = model_.kv_heads > 0 ? model_.kv_heads : model_.heads;
    if (!equal || keys < tensor || model_.heads % keys != 0) return;
    // Some ranks hold one more than others.
    for (int64_t held = keys / tensor; held <= (keys + tensor - 1) / tensor; ++held) {
      const bool heads = model_.heads / keys * held % context == 0;
      if (heads && (held % context == 0 || context % held == 0)) continue;
      Add(field, "all_to_all spreads ", model_.heads / keys * held, " heads and ", held,
          " key/value heads of a tensor rank over ", context,
          " context ranks: the heads must be a multiple of the ranks, and of key/value heads and "
          "ranks one a multiple of the other; use ring or all_gather");
      return;
    }
  }

  // The same for state-space heads and the groups that share B and C.
  void ScanAllToAll() {
    const int64_t context = degree(Axis::kContext), tensor = degree(Axis::kTensor);
    const int64_t heads = model_.ssm_heads, groups = std::max<int64_t>(1, model_.ssm_groups);
    if (!layout_.scan_all_to_all || context == 1 || heads < tensor || heads % groups != 0) return;
    if (tensor > 1 && (layout_.tensor_shares != 0 || tensor % std::min(tensor, groups) != 0)) {
      return;
    }
    // The heads and groups of the tensor ranks: some have one unit more than others.
    std::vector<std::pair<int64_t, int64_t>> shares;
    const bool whole = groups >= tensor;
    const int64_t units = whole ? groups : heads / groups;
    const int64_t sharers = whole ? tensor : tensor / groups;
    for (int64_t held = units / sharers; held <= (units + sharers - 1) / sharers; ++held) {
      shares.push_back(whole ? std::pair(heads / groups * held, held)
                             : std::pair(held, int64_t{1}));
    }
    const auto fits = [&](int64_t ranks) {
      return std::all_of(shares.begin(), shares.end(), [&](const auto& share) {
        return share.first % ranks == 0 && (share.second % ranks == 0 || ranks % share.second == 0);
      });
    };
    if (fits(context)) return;
    std::vector<int64_t> others;
    // No job has more ranks than kRanksMax, whatever heads a spec asks for.
    const int64_t ranks_max = std::min<int64_t>(shares.front().first, kRanksMax);
    for (int64_t fewer = std::min(context, ranks_max + 1); --fewer > 1 && others.empty();) {
      if (fits(fewer)) others.push_back(fewer);
    }
    for (int64_t more = context + 1; more <= ranks_max; ++more) {
      if (!fits(more)) continue;
      others.push_back(more);
      break;
    }
    Add("engine.parallel.scan_method", "all_to_all spreads ", shares.front().first,
        " state-space heads in ", shares.front().second,
        shares.front().second == 1 ? " group" : " groups", tensor > 1 ? " of a tensor rank" : "",
        " over ", context,
        " context ranks: the heads must be a multiple of the ranks, and of groups and ranks one a "
        "multiple of the other; ",
        others.empty() ? "" : absl::StrCat("context ", absl::StrJoin(others, " or "), " fits, or "),
        "use state_passing");
  }

  void PipelineSchedule() {
    const int stages = degree(Axis::kPipeline), chunks = layout_.pipeline_chunks;
    const std::string field = "engine.parallel.pipeline_schedule";
    if (chunks > 1 && !layout_.interleaved) {
      Add("engine.parallel.pipeline_chunks", chunks,
          " chunks per stage need pipeline_schedule: interleaved");
    } else if (layout_.interleaved && chunks == 1) {
      Add("engine.parallel.pipeline_chunks", "interleaved needs 2 chunks per stage or more");
    } else if (layout_.interleaved && stages == 1) {
      Add(field, "interleaved needs 2 pipeline stages or more, but pipeline is 1");
    } else if (layout_.zero_bubble && stages == 1) {
      Add(field, "zero_bubble needs 2 pipeline stages or more, but pipeline is 1; use 1f1b");
    }
    const int64_t parts = int64_t{stages} * chunks;
    if (layout_.pipeline_parts != 0 && layout_.pipeline_parts != parts) {
      Add("engine.parallel.pipeline_blocks", layout_.pipeline_parts, " numbers for ", parts,
          " parts (pipeline ", stages, " x pipeline_chunks ", chunks, ")");
    }
  }

  void Pipeline() {
    const int64_t stages = int64_t{degree(Axis::kPipeline)} * layout_.pipeline_chunks;
    if (layout_.pipeline_chunks < 1) {
      Add("engine.parallel.pipeline_chunks", layout_.pipeline_chunks, " is less than 1");
    } else if (degree(Axis::kPipeline) > 1 && model_.layers > 0 && stages > model_.layers) {
      Add(FieldOf(Axis::kPipeline), stages, " stages (", degree(Axis::kPipeline), " ranks x ",
          layout_.pipeline_chunks, " chunks) for ", model_.layers, " blocks");
    }
  }

  void Zero() {
    if (layout_.zero < 0 || layout_.zero > 3) {
      Add("engine.parallel.zero", layout_.zero, " is out of range; stages 0 to 3");
      return;
    }
    const int64_t group = int64_t{degree(Axis::kData)} * degree(Axis::kContext);
    if (layout_.zero_shards < 0) {
      Add("engine.parallel.zero_shards", layout_.zero_shards, " is negative");
    } else if (layout_.zero == 0 && layout_.zero_shards > 1) {
      Add("engine.parallel.zero_shards", "stage 0 of ZeRO shards nothing, but zero_shards is ",
          layout_.zero_shards);
    } else if (layout_.zero_shards > 0 && group % layout_.zero_shards != 0) {
      int64_t nearest = std::min<int64_t>(layout_.zero_shards, group);
      while (group % nearest != 0) --nearest;
      Add("engine.parallel.zero_shards", layout_.zero_shards, " does not divide the ", group,
          " data-parallel ranks; the nearest that does is ", nearest);
    }
  }

  void Compression() {
    const bool top_k = layout_.top_k_density > 0;
    if (!top_k && !layout_.sign_compression) return;
    const std::string field = kCompressionField;
    if (layout_.zero >= 2) {
      Add(field, "keeps what it does not send, for whole gradients, which stage ", layout_.zero,
          " of ZeRO does not have; use zero 0 or 1");
      return;
    }
    const int64_t ranks = layout_.GradientRanks();
    if (ranks <= 1) return;  // nothing travels
    const double most = TopKDensityMax(ranks, layout_.zero);
    if (top_k && layout_.top_k_density > most) {
      Add(field + ".top_k.density", "sending ", layout_.top_k_density,
          " of the elements as pairs to ", ranks - 1,
          " other ranks takes longer than reducing all ", "of them; with ", ranks,
          " ranks and zero ", layout_.zero, " use at most ", most);
    }
    if (layout_.sign_compression && ranks > SignRanksMax(layout_.zero)) {
      Add(field + ".sign", "sending a bit per element to ", ranks - 1,
          " other ranks takes longer than reducing whole gradients; with zero ", layout_.zero,
          " use it for at most ", SignRanksMax(layout_.zero), " ranks");
    }
  }

  const Layout& layout_;
  const ModelSize& model_;
  const ClusterSize& cluster_;
  std::vector<LayoutProblem> problems_;
};

// How far a set of degrees is from the wanted one: the sum of the ratios' logarithms.
double Distance(const PerAxis& degrees, const PerAxis& wanted, int ranks) {
  double distance = 0;
  for (const Axis axis : kAxes) {
    if (axis == Axis::kData && DataByDefault(wanted, ranks)) continue;
    distance += std::abs(std::log2(degrees[axis]) - std::log2(wanted[axis]));
  }
  return distance;
}

// The degrees nearest to the wanted ones with which nothing is wrong; among equals, those with
// fewer pipeline stages and more data parallelism.
std::optional<PerAxis> Nearest(const Layout& wanted, const ModelSize& model,
                               const ClusterSize& cluster) {
  std::vector<int> divisors;
  for (int i = 1; i <= cluster.ranks; ++i) {
    if (cluster.ranks % i == 0) divisors.push_back(i);
  }
  const auto choices = [&](Axis axis) -> std::vector<int> {
    const bool negotiable =
        std::count(wanted.negotiable.begin(), wanted.negotiable.end(), axis) != 0;
    return negotiable ? divisors : std::vector<int>{wanted.degrees[axis]};
  };
  std::vector<int> data = choices(Axis::kData);
  std::reverse(data.begin(), data.end());
  const std::vector<int> context = choices(Axis::kContext), tensor = choices(Axis::kTensor);
  std::optional<PerAxis> nearest;
  Layout layout = wanted;
  for (const int pp : choices(Axis::kPipeline)) {
    for (const int dp : data) {
      if (int64_t{pp} * dp > cluster.ranks) continue;
      for (const int cp : context) {
        const int64_t product = int64_t{pp} * dp * cp;
        if (product > cluster.ranks || cluster.ranks % product != 0) continue;
        const auto tp = static_cast<int>(cluster.ranks / product);
        if (std::count(tensor.begin(), tensor.end(), tp) == 0) continue;
        layout.degrees = PerAxis(pp, dp, cp, tp);
        const auto distance = [&](const PerAxis& degrees) {
          return Distance(degrees, wanted.degrees, cluster.ranks);
        };
        const bool closer = !nearest.has_value() || distance(layout.degrees) < distance(*nearest);
        if (closer && Judge(layout, model, cluster).Run().empty()) nearest = layout.degrees;
      }
    }
  }
  return nearest;
}

}  // namespace

double TopKDensityMax(int64_t ranks, int zero) {
  const auto n = static_cast<double>(ranks);
  return zero == 0 ? 2 / (3 * n) : 1 / (3 * n);
}

int64_t SignRanksMax(int zero) {
  // A bit costs an eighth of a byte, a pair eight: 1/64 of the density of pairs.
  int64_t ranks = 1;
  while (TopKDensityMax(ranks + 1, zero) >= 1.0 / 64) ++ranks;
  return ranks;
}

int Layout::EffectiveShards() const {
  if (zero == 0) return 1;
  return zero_shards > 0 ? zero_shards : degrees[Axis::kData] * degrees[Axis::kContext];
}

std::vector<LayoutProblem> FindProblems(const Layout& layout, const ModelSize& model,
                                        const ClusterSize& cluster) {
  std::vector<LayoutProblem> problems = Judge(layout, model, cluster).Run();
  if (problems.empty() || cluster.ranks < 1 || cluster.ranks > kRanksMax) return problems;
  for (const Axis axis : kAxes) {
    if (layout.degrees[axis] < 1) return problems;
  }
  const std::optional<PerAxis> nearest = Nearest(layout, model, cluster);
  if (!nearest.has_value() || *nearest == layout.degrees) return problems;
  for (LayoutProblem& problem : problems) {
    // To compress is to want many ranks: fewer of them are no remedy.
    if (absl::StrContains(problem.field, kCompressionField)) continue;
    absl::StrAppend(&problem.message, "; the nearest layout of ", cluster.ranks,
                    cluster.ranks == 1 ? " rank" : " ranks", " that works is ", Words(*nearest));
  }
  return problems;
}

absl::Status Validate(const Layout& layout, const ModelSize& model, const ClusterSize& cluster) {
  const std::vector<LayoutProblem> problems = FindProblems(layout, model, cluster);
  if (problems.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrJoin(problems, "\n", [](std::string* out, const LayoutProblem& problem) {
        absl::StrAppend(out, problem.field, ": ", problem.message);
      }));
}

}  // namespace muster::parallel
