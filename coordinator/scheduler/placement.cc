#include "coordinator/scheduler/placement.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <map>
#include <set>
#include <unordered_map>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "base/check.h"
#include "coordinator/scheduler/demand.h"
#include "coordinator/scheduler/gang_layout.h"

namespace muster::coordinator {
namespace {

// Cuts `slots` of a domain at `depth`, whose parent is at `parent`, down to whole granules.
int64_t WholeGranules(const Demand& demand, int64_t slots, int depth, int parent) {
  for (const Granule& granule : demand.granules) {
    if (granule.depth <= depth && granule.depth > parent) slots -= slots % granule.size;
  }
  return slots;
}

// Calls visit(slots, workers) with the workers of a domain by their free slots, or by all of them.
template <typename Visit>
void EachSize(const SlotIndex& index, int number, const SlotsFor& slots, bool ever, Visit visit) {
  if (!ever) {
    for (const auto& [free, workers] : index.RoomIn(number, slots).workers_by_free) {
      visit(free, workers);
    }
    return;
  }
  const SlotIndex::Domain& domain = index.domain(number);
  const auto of = domain.slots.find(slots.kind);
  if (of != domain.slots.end()) of->second.Each(slots.share, visit);
}

// How many ranks a domain holds with its free slots, or with all of them.
int64_t HoldIn(const SlotIndex& index, int number, const Demand& demand, bool ever) {
  const SlotIndex::Domain& domain = index.domain(number);
  const int depth = Depth(domain.level);
  const bool cut_inside =
      std::any_of(demand.granules.begin(), demand.granules.end(), [depth](const Granule& granule) {
        return granule.depth > depth && granule.depth < kHostDepth;
      });
  int64_t sum = 0;
  if (!cut_inside) {
    EachSize(index, number, demand.slots, ever, [&](int slots, int workers) {
      sum += WholeGranules(demand, slots, kHostDepth, depth) * workers;
    });
    return sum;
  }
  Counts direct;
  EachSize(index, number, demand.slots, ever, [&direct](int slots, int workers) {
    direct.emplace_hint(direct.end(), slots, workers);
  });
  for (const int child : domain.children) {
    sum += WholeGranules(demand, HoldIn(index, child, demand, ever),
                         Depth(index.domain(child).level), depth);
    EachSize(index, child, demand.slots, ever,
             [&direct](int slots, int workers) { direct[slots] -= workers; });
  }
  for (const auto& [slots, workers] : direct) {
    sum += WholeGranules(demand, slots, kHostDepth, depth) * workers;
  }
  return sum;
}

// Where the gang goes as a whole, and what it may take there.
struct Container {
  int domain = -1;  // -1: one worker
  const WorkerView* worker = nullptr;
  int64_t hold = 0;
};

// The domains of one level that hold the gang, fullest first.
std::vector<Container> ContainersAt(const SlotIndex& index, const Demand& demand, int depth) {
  std::vector<Container> out;
  if (depth == kHostDepth) {
    const SlotIndex::Room& slots = index.RoomOf(demand.slots);
    const auto fullest = slots.workers_by_free.lower_bound(static_cast<int>(demand.ranks));
    if (demand.granules.front().depth == kHostDepth && fullest != slots.workers_by_free.end()) {
      out.push_back({-1, *fullest->second.begin(), fullest->first});
    }
    return out;
  }
  for (const auto& [path, number] : index.domains_of(LevelAt(depth))) {
    const int64_t hold = HoldIn(index, number, demand, /*ever=*/false);
    if (hold >= demand.ranks) out.push_back({number, nullptr, hold});
  }
  std::stable_sort(out.begin(), out.end(),
                   [](const Container& a, const Container& b) { return a.hold < b.hold; });
  return out;
}

// The depths in the order in which they are looked at: from the one that is preferred outwards. A
// worker or domain that is in no domain of the level that is preferred is one of its own.
std::vector<int> DepthsToTry(const Demand& demand, int spread) {
  std::vector<int> depths;
  const int start = spread >= 0 ? std::min(demand.start, spread - 1) : demand.start;
  depths.push_back(start);
  if (spread < 0) {
    for (int depth = kHostDepth; depth > start; --depth) depths.push_back(depth);
  }
  for (int depth = start - 1; depth >= kClusterDepth; --depth) depths.push_back(depth);
  depths.erase(
      std::remove_if(depths.begin(), depths.end(), [&](int depth) { return depth < demand.limit; }),
      depths.end());
  return depths;
}

// False: not even all workers together have whole tensor groups enough, which is far cheaper to
// find out than to ask every domain.
bool WorkersMayHold(const SlotIndex& index, const Demand& demand) {
  if (demand.granules.front().depth != kHostDepth) return true;
  int64_t slots = 0;
  for (const auto& [free, workers] : index.RoomOf(demand.slots).workers_by_free) {
    slots += (free - free % demand.unit()) * static_cast<int64_t>(workers.size());
  }
  return slots >= demand.ranks;
}

// The gang fits in some domain.
bool AnyContainer(const SlotIndex& index, const Demand& demand) {
  if (!WorkersMayHold(index, demand)) return false;
  for (const int depth : DepthsToTry(demand, /*spread=*/-1)) {
    if (!ContainersAt(index, demand, depth).empty()) return true;
  }
  return false;
}

// ---- the domains and workers inside a container -------------------------------------------------

struct Node {
  int depth = kHostDepth;
  int parent = -1;
  int64_t hold = 0;  // whole granules that are left
  std::vector<int> children;
  const WorkerView* worker = nullptr;
  const DomainPath* path = nullptr;
};

class Tree {
 public:
  Tree(const SlotIndex& index, const Container& container, const Demand& demand)
      : index_(index), demand_(demand) {
    if (container.domain < 0) {
      nodes_.push_back(
          {kHostDepth, -1, container.hold, {}, container.worker, &container.worker->path});
    } else {
      Add(container.domain, -1);
    }
  }
  size_t size() const { return nodes_.size(); }
  const Node& operator[](int node) const { return nodes_[static_cast<size_t>(node)]; }

  v1::TopologyLevel Common(int a, int b) const {
    return a == b ? v1::TOPOLOGY_LEVEL_HOST : CommonLevel(*(*this)[a].path, *(*this)[b].path);
  }

 private:
  // Returns the domain's node; -1 when it holds nothing.
  int Add(int number, int parent) {
    const SlotIndex::Domain& domain = index_.domain(number);
    const int depth = Depth(domain.level);
    const int node = static_cast<int>(nodes_.size());
    nodes_.push_back({depth, parent, 0, {}, nullptr, &domain.path});
    // Numbers of domains depend on the order in which workers joined.
    std::vector<std::pair<const DomainPath*, int>> children;
    for (const int child : domain.children)
      children.emplace_back(&index_.domain(child).path, child);
    std::sort(children.begin(), children.end(),
              [](const auto& a, const auto& b) { return *a.first < *b.first; });
    int64_t sum = 0;
    for (const auto& [path, child] : children) {
      if (index_.RoomIn(child, demand_.slots).workers_by_free.empty()) continue;
      const int added = Add(child, node);
      sum += (*this)[added].hold;
      nodes_[static_cast<size_t>(node)].children.push_back(added);
    }
    for (const auto& [free, workers] : index_.RoomIn(number, demand_.slots).direct) {
      const int64_t hold = WholeGranules(demand_, free, kHostDepth, depth);
      if (hold == 0) continue;
      for (const WorkerView* worker : workers) {
        nodes_[static_cast<size_t>(node)].children.push_back(static_cast<int>(nodes_.size()));
        nodes_.push_back({kHostDepth, node, hold, {}, worker, &worker->path});
        sum += hold;
      }
    }
    nodes_[static_cast<size_t>(node)].hold =
        parent < 0 ? sum : WholeGranules(demand_, sum, depth, (*this)[parent].depth);
    return node;
  }

  const SlotIndex& index_;
  const Demand& demand_;
  std::vector<Node> nodes_;
};

// Positions 0, 1, ... of the gang go to workers in this order.
struct Chunk {
  int node;
  int64_t ranks;
};

// How a gang is cut over as few domains or workers as can hold it, and in which order they take it.
enum class Cut {
  kTightest,      // one by one the least free one with which the others hold the rest; by name
  kLargestFirst,  // the same; the largest chunk first
  kFreest,        // the freest ones, the least free one that holds the rest last
};

// Which children take how much of `ranks`.
std::vector<Chunk> Split(const Tree& tree, int node, int64_t ranks, Cut cut) {
  // Children that hold as many, those with smaller numbers first.
  struct Alike {
    int64_t hold;
    int next, end;  // in `order`
  };
  absl::InlinedVector<Alike, 8> by_hold;  // there are few different numbers
  const std::vector<int>& children = tree[node].children;
  const auto alike = [&by_hold](int64_t hold) {
    return std::lower_bound(by_hold.begin(), by_hold.end(), hold,
                            [](const Alike& a, int64_t number) { return a.hold < number; });
  };
  for (const int child : children) {
    const int64_t hold = tree[child].hold;
    if (hold <= 0) continue;
    auto known = alike(hold);
    if (known == by_hold.end() || known->hold != hold) known = by_hold.insert(known, {hold, 0, 0});
    ++known->end;
  }
  int begin = 0;
  for (Alike& same : by_hold) {
    const int count = same.end;
    same.next = same.end = begin;
    begin += count;
  }
  absl::InlinedVector<int, 32> order(static_cast<size_t>(begin));
  for (const int child : children) {
    if (tree[child].hold > 0) order[static_cast<size_t>(alike(tree[child].hold)->end++)] = child;
  }
  // What the `count` freest hold, without the least free of them.
  const auto others = [&by_hold](int64_t count) {
    int64_t sum = 0, least = 0;
    for (auto at = by_hold.rbegin(); at != by_hold.rend() && count > 0; ++at) {
      const int64_t here = std::min<int64_t>(count, at->end - at->next);
      sum += here * at->hold;
      count -= here;
      least = at->hold;
    }
    return sum - least;
  };
  int64_t fewest = 0;
  int64_t missing = ranks;
  for (auto at = by_hold.rbegin(); at != by_hold.rend() && missing > 0; ++at) {
    const int64_t here = std::min<int64_t>(at->end - at->next, (missing + at->hold - 1) / at->hold);
    fewest += here;
    missing -= here * at->hold;
  }
  CHECK_LE(missing, 0) << "the children hold less than their domain";
  std::vector<Chunk> chunks;
  missing = ranks;
  for (int64_t left = fewest; left > 0; --left) {
    const auto best = cut == Cut::kFreest && left > 1
                          ? std::prev(by_hold.end())
                          : alike(std::max<int64_t>(1, missing - others(left)));
    CHECK(best != by_hold.end()) << "the gang fits, yet nothing can be next";
    const int child = order[static_cast<size_t>(best->next++)];
    chunks.push_back({child, std::min(missing, best->hold)});
    missing -= chunks.back().ranks;
    if (best->next == best->end) by_hold.erase(best);
  }
  return chunks;
}

void FillFewest(const Tree& tree, int node, int64_t ranks, Cut cut, std::vector<Chunk>& out) {
  if (tree[node].worker != nullptr) {
    out.push_back({node, ranks});
    return;
  }
  std::vector<Chunk> chunks = Split(tree, node, ranks, cut);
  if (cut != Cut::kFreest)
    std::sort(chunks.begin(), chunks.end(), [&](const Chunk& a, const Chunk& b) {
      if (cut == Cut::kLargestFirst && a.ranks != b.ranks) return a.ranks > b.ranks;
      const Node& one = tree[a.node];
      const Node& other = tree[b.node];
      if ((one.worker != nullptr) != (other.worker != nullptr)) return one.worker == nullptr;
      return one.worker != nullptr ? ByName()(one.worker, other.worker) : *one.path < *other.path;
    });
  for (const Chunk& chunk : chunks) FillFewest(tree, chunk.node, chunk.ranks, cut, out);
}

// As few workers as possible of all domains, the freest ones, in the order of their domains.
void FillWorkers(const Tree& tree, int64_t ranks, std::vector<Chunk>& out) {
  std::vector<std::pair<int64_t, int>> workers;  // the freest first
  for (int node = 0; node < static_cast<int>(tree.size()); ++node) {
    if (tree[node].worker != nullptr) workers.emplace_back(-tree[node].hold, node);
  }
  std::sort(workers.begin(), workers.end());
  for (auto worker = workers.begin(); ranks > 0; ++worker) {
    // The last one is the least free that holds the rest.
    if (-worker->first >= ranks) {
      worker = std::upper_bound(worker, workers.end(),
                                std::make_pair(-ranks, std::numeric_limits<int>::max())) -
               1;
    }
    out.push_back({worker->second, std::min(ranks, -worker->first)});
    ranks -= out.back().ranks;
  }
  std::sort(out.begin(), out.end(), [](const Chunk& a, const Chunk& b) { return a.node < b.node; });
}

// One granule after the other goes to the domain at `depth` that has the fewest of them so far.
// False: the granules do not fit that way.
bool FillSpread(const Tree& tree, int depth, const Demand& demand, std::vector<Chunk>& out) {
  std::vector<int> domains;  // at `depth`, or deeper where there is none
  std::vector<int> todo = {0};
  while (!todo.empty()) {
    const int node = todo.back();
    todo.pop_back();
    if (tree[node].depth >= depth) {
      domains.push_back(node);
      continue;
    }
    todo.insert(todo.end(), tree[node].children.rbegin(), tree[node].children.rend());
  }
  const int64_t size = demand.granules.back().size;
  // By ranks so far, then slots that are left, most first, then name.
  std::set<std::tuple<int64_t, int64_t, int>> next;
  for (const int node : domains) {
    if (tree[node].hold >= size) next.emplace(0, -tree[node].hold, node);
  }
  std::map<int, int64_t> taken;
  for (int64_t placed = 0; placed < demand.ranks; placed += size) {
    if (next.empty()) return false;
    auto [ranks, left, node] = *next.begin();
    next.erase(next.begin());
    taken[node] += size;
    ranks += size;
    left += size;
    if (-left >= size) next.emplace(ranks, left, node);
  }
  for (const int node : domains) {
    if (taken.contains(node)) FillFewest(tree, node, taken[node], Cut::kTightest, out);
  }
  return true;
}

// Places blocks of the mesh, the largest first, each whole in the narrowest domain that holds it. A
// block that fits nowhere is cut into those of the next axis.
class BlockFill {
 public:
  // `sizes`: of blocks, ascending; the first is the unit, the last the gang.
  BlockFill(const Tree& tree, std::vector<int64_t> sizes, int64_t ranks)
      : tree_(tree), sizes_(std::move(sizes)), leaves_(static_cast<size_t>(ranks)) {
    hold_.reserve(tree.size());
    for (int node = 0; node < static_cast<int>(tree.size()); ++node) {
      hold_.push_back(tree[node].hold);
    }
  }

  std::vector<int> Run() {
    Place(0, static_cast<int>(sizes_.size()) - 1, 0);
    return std::move(leaves_);
  }

 private:
  void Place(int64_t first, int block, int node) {
    const int64_t size = sizes_[static_cast<size_t>(block)];
    if (tree_[node].worker != nullptr) {
      std::fill_n(leaves_.begin() + first, size, node);
      for (int at = node; at >= 0; at = tree_[at].parent) HoldOf(at) -= size;
      return;
    }
    const int best = Narrowest(node, size);
    if (best != node) return Place(first, block, best);
    CHECK_GT(block, 0) << "a unit fits, yet no worker holds it";
    const int64_t part = sizes_[static_cast<size_t>(block) - 1];
    for (int64_t at = 0; at < size; at += part) Place(first + at, block - 1, node);
  }

  // The narrowest domain or worker below `node` that holds so many ranks, the fullest of several;
  // else `node`.
  int Narrowest(int node, int64_t size) {
    int best = node;
    for (const int child : tree_[node].children) {
      if (HoldOf(child) < size) continue;
      const int below = Narrowest(child, size);
      const bool better = best == node || (tree_[below].depth != tree_[best].depth
                                               ? tree_[below].depth > tree_[best].depth
                                               : HoldOf(below) < HoldOf(best));
      if (better) best = below;
    }
    return best;
  }

  int64_t& HoldOf(int node) { return hold_[static_cast<size_t>(node)]; }

  const Tree& tree_;
  const std::vector<int64_t> sizes_;
  std::vector<int64_t> hold_;  // by node: what is left
  std::vector<int> leaves_;
};

std::vector<int> Expand(const std::vector<Chunk>& chunks) {
  std::vector<int> leaves;
  for (const Chunk& chunk : chunks) {
    leaves.insert(leaves.end(), static_cast<size_t>(chunk.ranks), chunk.node);
  }
  return leaves;
}

// ---- cost ---------------------------------------------------------------------------------------

// Bounds of the work of one placement.
constexpr size_t kContainersMax = 8;           // that are compared
constexpr int64_t kRanksComparedMax = 16'384;  // ranks of the gang x containers
constexpr int64_t kBlockStepsMax = 400'000;    // children looked at for blocks of the mesh
constexpr int kExchangedMax = 48;              // units of a gang whose exchanges are tried
constexpr size_t kExchangeWorkersMax = 64;
constexpr int kExchangePassesMax = 8;
constexpr size_t kFlatWorkersMax = 2048;  // domains and workers of which the freest are looked for

double Distance(const Tree& tree, int a, int b) { return DistanceOf(tree.Common(a, b)); }

// The distances between the workers of a tree: where these are few, each is looked up once.
class Distances {
 public:
  explicit Distances(const Tree& tree) : tree_(tree) {
    for (int node = 0; node < static_cast<int>(tree.size()); ++node) {
      if (tree[node].worker != nullptr) workers_.push_back(node);
    }
    if (!few()) return;
    number_.resize(tree.size());
    for (size_t i = 0; i < workers_.size(); ++i) number_[static_cast<size_t>(workers_[i])] = i;
    between_.assign(workers_.size() * workers_.size(), kUnknown);
  }
  // Between two nodes that are workers.
  double operator()(int a, int b) {
    if (a == b) return DistanceOf(v1::TOPOLOGY_LEVEL_HOST);
    if (few()) return Between(NumberOf(a), NumberOf(b));
    if (a == last_a_ && b == last_b_) return last_;
    last_a_ = a;
    last_b_ = b;
    return last_ = Distance(tree_, a, b);
  }
  bool few() const { return workers_.size() <= kExchangeWorkersMax; }
  // Looks up all of them. Requires: they are few.
  void Complete() {
    for (size_t a = 0; a < workers_.size(); ++a) {
      for (size_t b = 0; b <= a; ++b) Between(a, b);
    }
  }
  // The nodes that are workers. The numbers of workers are indices of these.
  const std::vector<int>& workers() const { return workers_; }
  // Requires: they are few.
  size_t NumberOf(int node) const { return number_[static_cast<size_t>(node)]; }
  // By number of the other worker. Requires: Complete().
  const double* From(size_t worker) const { return &between_[worker * workers_.size()]; }

 private:
  static constexpr double kUnknown = -1;

  double Between(size_t a, size_t b) {
    double& distance = between_[a * workers_.size() + b];
    if (distance == kUnknown) {
      distance = between_[b * workers_.size() + a] = Distance(tree_, workers_[a], workers_[b]);
    }
    return distance;
  }

  const Tree& tree_;
  std::vector<int> workers_;
  std::vector<size_t> number_;   // by node
  std::vector<double> between_;  // by number and number
  int last_a_ = -1, last_b_ = -1;
  double last_ = 0;
};

double TotalCost(const GangLayout& layout, Distances& distances, const std::vector<int>& leaves) {
  double total = 0;
  for (const AxisTraffic& axis : layout.axes()) {
    double hops = 0;
    layout.EachHop(axis, [&](int32_t from, int32_t to) {
      hops += distances(leaves[static_cast<size_t>(from)], leaves[static_cast<size_t>(to)]);
    });
    total += axis.bytes * hops;
  }
  return total / static_cast<double>(leaves.size());
}

// Exchanges of two units, and moves of one to free slots, as long as they lower the cost. Requires:
// the distances are complete.
class Exchange {
 public:
  Exchange(const GangLayout& layout, const Tree& tree, const Distances& distances, int64_t unit,
           int64_t ranks)
      : unit_(unit), distances_(distances) {
    for (const int worker : distances.workers()) left_.push_back(tree[worker].hold / unit);
    const auto units = static_cast<size_t>(ranks / unit);
    std::vector<double> bytes(units * units);
    size_t communicating = 0;  // up to the last unit that does
    for (const AxisTraffic& axis : layout.axes()) {
      layout.EachHop(axis, [&](int32_t from, int32_t to) {
        const auto a = static_cast<size_t>(from / unit), b = static_cast<size_t>(to / unit);
        if (a == b) return;
        communicating = std::max(communicating, std::max(a, b) + 1);
        bytes[a * units + b] += axis.bytes;
        bytes[b * units + a] += axis.bytes;
      });
    }
    for (size_t a = 0; a < communicating; ++a) {
      begins_.push_back(peers_.size());
      for (size_t b = 0; b < units; ++b) {
        if (bytes[a * units + b] != 0) peers_.push_back({b, bytes[a * units + b]});
      }
    }
    begins_.push_back(peers_.size());
  }

  std::vector<int> Improve(std::vector<int> leaves) const {
    std::vector<int64_t> left = left_;
    std::vector<size_t> at;  // by unit: which of workers_
    for (size_t position = 0; position < leaves.size(); position += static_cast<size_t>(unit_)) {
      at.push_back(distances_.NumberOf(leaves[position]));
      --left[at.back()];
    }
    const size_t communicating = begins_.size() - 1;
    for (int pass = 0, changed = 1; changed != 0 && pass < kExchangePassesMax; ++pass) {
      changed = 0;
      for (size_t u = 0; u < communicating; ++u) {
        changed |= Move(u, at, left) ? 1 : 0;
        for (size_t v = u + 1; v < communicating; ++v) changed |= Swap(u, v, at) ? 1 : 0;
      }
    }
    for (size_t u = 0; u < at.size(); ++u) {
      std::fill_n(leaves.begin() + static_cast<int64_t>(u) * unit_, unit_,
                  distances_.workers()[at[u]]);
    }
    return leaves;
  }

 private:
  static constexpr size_t kNone = std::numeric_limits<size_t>::max();
  static bool Better(double then, double now) { return then < now * (1 - 1e-9); }

  double CostAt(size_t unit, size_t worker, const std::vector<size_t>& at, size_t except) const {
    const double* const distance = distances_.From(worker);
    double sum = 0;
    for (size_t i = begins_[unit]; i < begins_[unit + 1]; ++i) {
      if (peers_[i].unit != except) sum += peers_[i].bytes * distance[at[peers_[i].unit]];
    }
    return sum;
  }
  bool Move(size_t u, std::vector<size_t>& at, std::vector<int64_t>& left) const {
    bool moved = false;
    double now = CostAt(u, at[u], at, kNone);
    for (size_t worker = 0; worker < left.size(); ++worker) {
      if (left[worker] <= 0 || worker == at[u]) continue;
      const double then = CostAt(u, worker, at, kNone);
      if (!Better(then, now)) continue;
      ++left[at[u]];
      --left[worker];
      at[u] = worker;
      now = then;
      moved = true;
    }
    return moved;
  }
  bool Swap(size_t u, size_t v, std::vector<size_t>& at) const {
    if (at[u] == at[v]) return false;
    const double now = CostAt(u, at[u], at, v) + CostAt(v, at[v], at, u);
    const double then = CostAt(u, at[v], at, v) + CostAt(v, at[u], at, u);
    if (!Better(then, now)) return false;
    std::swap(at[u], at[v]);
    return true;
  }

  // What a unit sends to and gets from another one.
  struct Peer {
    size_t unit;
    double bytes;
  };

  const int64_t unit_;
  const Distances& distances_;
  std::vector<int64_t> left_;   // by worker: units that it holds
  std::vector<Peer> peers_;     // of one unit after the other
  std::vector<size_t> begins_;  // by unit: where its peers begin; then where the last one's end
};

// ---- the choice ---------------------------------------------------------------------------------

struct Way {
  std::vector<int> leaves;  // by position: nodes of the container's tree
  double cost = 0;
};

Way FillContainer(const Tree& tree, const Demand& demand, const GangLayout& layout, int spread) {
  std::vector<std::vector<int>> ways;
  const auto add = [&ways](std::vector<int> way) {
    if (std::find(ways.begin(), ways.end(), way) == ways.end()) ways.push_back(std::move(way));
  };
  std::vector<Chunk> chunks;
  Distances distances(tree);
  if (spread >= 0 && FillSpread(tree, spread, demand, chunks)) {
    add(Expand(chunks));
  } else {
    chunks.clear();
    FillFewest(tree, 0, demand.ranks, Cut::kTightest, chunks);
    add(Expand(chunks));
    const bool one_worker = chunks.size() == 1;
    // Segments stay whole.
    if (!one_worker && demand.granules.size() == 1) {
      for (const Cut cut : {Cut::kLargestFirst, Cut::kFreest}) {
        chunks.clear();
        FillFewest(tree, 0, demand.ranks, cut, chunks);
        add(Expand(chunks));
      }
      const bool whole_groups = demand.granules.front().depth == kHostDepth;
      if (whole_groups && tree.size() <= kFlatWorkersMax) {
        chunks.clear();
        FillWorkers(tree, demand.ranks, chunks);
        add(Expand(chunks));
      }
      if (static_cast<int64_t>(tree.size()) * (demand.ranks / demand.unit()) <= kBlockStepsMax) {
        BlockFill blocks(tree, layout.Blocks(whole_groups ? demand.unit() : 1), demand.ranks);
        add(blocks.Run());
      }
      if (whole_groups && demand.ranks / demand.unit() <= kExchangedMax && distances.few()) {
        distances.Complete();
        const Exchange exchange(layout, tree, distances, demand.unit(), demand.ranks);
        for (size_t way = 0, cut = ways.size(); way < cut; ++way) add(exchange.Improve(ways[way]));
      }
    }
  }
  Way best;
  for (std::vector<int>& leaves : ways) {
    const double cost = TotalCost(layout, distances, leaves);
    if (best.leaves.empty() || cost < best.cost * (1 - 1e-9)) best = {std::move(leaves), cost};
  }
  return best;
}

// A layout that is made once it is asked for: most gangs that are tried do not fit.
class LazyLayout {
 public:
  LazyLayout(const WaitingJob& job, bool by_group) : job_(job), by_group_(by_group) {}
  const GangLayout& get() {
    if (!layout_.has_value()) layout_.emplace(job_, by_group_);
    return *layout_;
  }

 private:
  const WaitingJob& job_;
  const bool by_group_;
  std::optional<GangLayout> layout_;
};

// Where positions 0, 1, ... of the gang go; no workers when it does not fit.
struct Choice {
  std::vector<const WorkerView*> workers;
  double cost = 0;
  bool shared = false;  // on devices that other jobs share already, alone
};

Choice ChooseWorkers(const SlotIndex& index, const WaitingJob& job, const Demand& demand,
                     LazyLayout& layout, int spread) {
  if (!WorkersMayHold(index, demand)) return {};
  for (const int depth : DepthsToTry(demand, spread)) {
    const std::vector<Container> containers = ContainersAt(index, demand, depth);
    if (containers.empty()) continue;
    // Where the level is preferred, what is inside does not matter: the fullest one is taken.
    const bool indifferent =
        depth == demand.start && job.placement.preferred != v1::TOPOLOGY_LEVEL_UNSPECIFIED;
    size_t compared = indifferent ? 1 : std::min(kContainersMax, containers.size());
    compared = std::min<size_t>(
        compared, static_cast<size_t>(std::max<int64_t>(1, kRanksComparedMax / demand.ranks)));
    Way best;
    std::optional<Tree> best_tree;
    for (size_t i = 0; i < compared; ++i) {
      Tree tree(index, containers[i], demand);
      Way way = FillContainer(tree, demand, layout.get(), spread);
      if (!best.leaves.empty() && way.cost >= best.cost * (1 - 1e-9)) continue;
      best = std::move(way);
      best_tree.emplace(std::move(tree));
    }
    Choice choice{{}, best.cost, /*shared=*/false};
    choice.workers.reserve(best.leaves.size());
    for (const int leaf : best.leaves) choice.workers.push_back((*best_tree)[leaf].worker);
    return choice;
  }
  return {};
}

Choice ChooseWorkers(const SlotIndex& index, const WaitingJob& job, const Demand& strict,
                     LazyLayout& layout) {
  const PlacementRule& rule = job.placement;
  const int spread = rule.spread == v1::TOPOLOGY_LEVEL_UNSPECIFIED ? -1 : Depth(rule.spread);
  if (index.RoomOf(strict.slots).free < job.ranks) return {};
  Choice choice = ChooseWorkers(index, job, strict, layout, spread);
  if (choice.workers.empty() && spread >= 0) choice = ChooseWorkers(index, job, strict, layout, -1);
  if (choice.workers.empty() && rule.preferred != v1::TOPOLOGY_LEVEL_UNSPECIFIED &&
      rule.segment > 0) {
    Demand demand = DemandOf(job, index, /*strict=*/false);
    demand.slots = strict.slots;
    choice = ChooseWorkers(index, job, demand, layout, -1);
  }
  return choice;
}

v1::TopologyLevel LevelOf(const std::vector<const WorkerView*>& workers) {
  v1::TopologyLevel level = v1::TOPOLOGY_LEVEL_HOST;  // narrow levels have small numbers
  for (const WorkerView* worker : workers) {
    if (worker == workers[0]) continue;
    level = std::max(level, CommonLevel(workers[0]->path, worker->path));
  }
  return level;
}

// The same, on devices that other jobs share already where the job may share its own: for one rank
// the one with the least room, for a gang those that are as close together as if it took other
// devices too.
Choice ChooseSlots(const SlotIndex& index, const WaitingJob& job, const Demand& demand,
                   LazyLayout& layout) {
  if (job.share == kWholeDevice) return ChooseWorkers(index, job, demand, layout);
  if (job.ranks == 1) {
    const auto& by_room = index.Of(job.device).workers_by_room;
    const auto least = by_room.lower_bound(job.share);
    if (least != by_room.end()) return {{*least->second.begin()}, 0, /*shared=*/true};
    return ChooseWorkers(index, job, demand, layout);
  }
  Demand of_shared = demand;
  of_shared.slots.shared = true;
  Choice shared = ChooseWorkers(index, job, of_shared, layout);
  if (shared.workers.empty()) return ChooseWorkers(index, job, demand, layout);
  Choice others = ChooseWorkers(index, job, demand, layout);
  if (LevelOf(shared.workers) > LevelOf(others.workers)) return others;
  shared.shared = true;
  return shared;
}

// The fewest slots of jobs in the domain that is open to the gang or segment, whose end would make
// it hold that if they were in whole groups: of the smallest job that suffices, else of the
// largest. `hold`: what it holds now.
void AddJobsThatEnd(const SlotIndex& index, const WaitingJob& job, int64_t hold,
                    DomainShortage& shortage) {
  std::unordered_map<const Holding*, int64_t> slots_of;
  for (const auto& [id, worker] : index.workers()) {
    if (!worker.ready || !OpensOn(index, shortage, worker)) continue;
    for (const SlotView& slot : worker.slots) {
      if (slot.kind != job.device) continue;
      if (job.share < kWholeDevice && slot.undivided) continue;
      int32_t left = kWholeDevice;  // by those that take parts
      for (const DevicePart& part : slot.parts) left -= part.share;
      if (slot.holder != nullptr) {
        slots_of[slot.holder] += left >= job.share ? 1 : 0;
        continue;
      }
      for (const DevicePart& part : slot.parts) {
        slots_of[part.holder] += left + part.share >= job.share ? 1 : 0;
      }
    }
  }
  std::map<JobId, int64_t> held;
  for (const auto& [holder, slots] : slots_of) {
    if (slots > 0 && IsJob(holder->id)) held.emplace(holder->id, slots);
  }
  for (int64_t missing = shortage.segment - hold; missing > 0 && !held.empty();) {
    auto take = held.begin();
    for (auto at = held.begin(); at != held.end(); ++at) {
      const bool suffices = at->second >= missing;
      const bool so_far = take->second >= missing;
      if (suffices ? !so_far || at->second < take->second : !so_far && at->second > take->second) {
        take = at;
      }
    }
    shortage.jobs.emplace_back(take->first, take->second);
    missing -= take->second;
    held.erase(take);
  }
}

bool Holds(const SlotIndex& index, const Demand& demand, bool ever) {
  for (int depth = kHostDepth; depth >= std::max(kClusterDepth, demand.limit); --depth) {
    if (depth == kHostDepth) {
      const auto last = [](const auto& by_slots) {
        return by_slots.empty() ? 0 : by_slots.rbegin()->first;
      };
      const int most = ever ? index.Of(demand.slots.kind).Largest(demand.slots.share)
                            : last(index.RoomOf(demand.slots).workers_by_free);
      if (demand.granules.front().depth == kHostDepth && most >= demand.ranks) return true;
      continue;
    }
    for (const auto& [path, number] : index.domains_of(LevelAt(depth))) {
      if (HoldIn(index, number, demand, ever) >= demand.ranks) return true;
    }
  }
  return false;
}

// Holds the free slots of workers that a gang is not to take, if it can do without.
const JobId& HiddenHolder() {
  static const auto* const id = new JobId("(hidden)");  // no job has such an id
  return *id;
}

// Of the workers that are avoided, some without any of which the gang does not fit on these and all
// others. Requires: it fits with all of them.
std::set<const WorkerView*> NeededOf(SlotIndex::Trial& trial, const WaitingJob& job,
                                     const std::vector<const WorkerView*>& avoided) {
  const SlotIndex& index = trial.index();
  const Demand demand = DemandOf(job, index, /*strict=*/false);
  const auto fits_with = [&](const std::set<const WorkerView*>& some) {
    SlotIndex::Trial hidden(trial);
    for (const WorkerView* worker : avoided) {
      if (!some.contains(worker)) hidden.TakeAll(*worker, demand.slots, HiddenHolder());
    }
    return index.RoomOf(demand.slots).free >= job.ranks && Holds(index, demand, /*ever=*/false);
  };
  const auto first = [&](size_t count) {
    return std::set<const WorkerView*>(avoided.begin(),
                                       avoided.begin() + static_cast<int64_t>(count));
  };
  // The more there are, the sooner it fits.
  size_t least = 1, most = avoided.size();
  while (least < most) {
    const size_t middle = least + (most - least) / 2;
    if (fits_with(first(middle))) {
      most = middle;
    } else {
      least = middle + 1;
    }
  }
  std::set<const WorkerView*> needed = first(most);
  for (size_t i = most; i-- > 0;) {
    needed.erase(avoided[i]);
    if (!fits_with(needed)) needed.insert(avoided[i]);
  }
  return needed;
}

// The same with records of workers in mind: suspects only where that makes the gang cheaper, or
// possible; of those that are avoided only such without which it does not fit.
Choice ChooseByStanding(SlotIndex::Trial& trial, const WaitingJob& job, const Demand& demand,
                        LazyLayout& layout, bool last_resort) {
  const SlotIndex& index = trial.index();
  if (index.RoomOf(demand.slots).free < job.ranks) return {};
  std::vector<const WorkerView*> suspects, avoided;
  for (const WorkerView* worker : index.marked()) {
    if (FreeSlots(*worker, demand.slots) == 0) continue;
    const bool avoid = worker->standing == v1::WORKER_STANDING_AVOIDED;
    (avoid ? avoided : suspects).push_back(worker);
  }
  const auto choose = [&](bool with_suspects, const std::set<const WorkerView*>& with) {
    SlotIndex::Trial hidden(trial);
    for (const WorkerView* worker : avoided) {
      if (!with.contains(worker)) hidden.TakeAll(*worker, demand.slots, HiddenHolder());
    }
    for (const WorkerView* worker : suspects) {
      if (!with_suspects) hidden.TakeAll(*worker, demand.slots, HiddenHolder());
    }
    return ChooseSlots(index, job, demand, layout);
  };
  Choice choice = choose(false, {});
  if (!suspects.empty()) {
    Choice cheaper = choose(true, {});
    if (choice.workers.empty() || cheaper.cost < choice.cost * (1 - 1e-9)) {
      choice = std::move(cheaper);
    }
  }
  if (!choice.workers.empty() || avoided.empty() || !last_resort) return choice;
  if (choose(true, {avoided.begin(), avoided.end()}).workers.empty()) return {};
  return choose(true, NeededOf(trial, job, avoided));
}

}  // namespace

int64_t GroupsIn(const SlotIndex::Kind& slots, int group, int32_t share) {
  int64_t groups = 0;
  slots.Each(share, [&groups, group](int size, int workers) {
    groups += static_cast<int64_t>(size / group) * workers;
  });
  return groups;
}

int UnitOf(const WaitingJob& job, const SlotIndex::Kind& slots) {
  if (job.group == 1) return 1;
  return job.group <= slots.Largest(job.share) && job.ranks % job.group == 0 ? job.group : 1;
}

int64_t TotalFor(const WaitingJob& job, const SlotIndex::Kind& slots) {
  return job.share == kWholeDevice ? slots.total : slots.Sum(job.share);
}

bool CouldFit(const WaitingJob& job, const SlotIndex& index) {
  const SlotIndex::Kind& slots = index.Of(job.device);
  if (TotalFor(job, slots) < job.ranks) return false;
  const int unit = UnitOf(job, slots);
  if (job.placement == PlacementRule() && (unit > 1 || job.group == 1)) {
    return unit * GroupsIn(slots, unit, job.share) >= job.ranks;
  }
  return Holds(index, DemandOf(job, index, /*strict=*/false), /*ever=*/true);
}

std::optional<std::vector<SlotIndex::SlotRef>> TakeSlots(SlotIndex::Trial& trial,
                                                         const WaitingJob& job, bool last_resort) {
  const SlotIndex& index = trial.index();
  if (!job.reservations.empty()) trial.Open(job.reservations);
  const Demand demand = DemandOf(job, index, /*strict=*/true);
  const int unit =
      demand.granules.front().depth == kHostDepth ? static_cast<int>(demand.unit()) : 1;
  // Where groups cannot be kept whole, ranks take slots in the order of their numbers.
  LazyLayout layout(job, /*by_group=*/demand.unit() > 1);
  const Choice choice = index.marked().empty()
                            ? ChooseSlots(index, job, demand, layout)
                            : ChooseByStanding(trial, job, demand, layout, last_resort);
  const std::vector<const WorkerView*>& workers = choice.workers;
  std::optional<std::vector<SlotIndex::SlotRef>> taken;
  if (!workers.empty()) {
    CHECK_EQ(workers.size(), static_cast<size_t>(job.ranks)) << job.id;
    taken.emplace(workers.size());
    SlotsFor slots = demand.slots;
    slots.shared = choice.shared;
    std::map<const WorkerView*, std::vector<int32_t>, ByName> ranks;  // in the order of positions
    for (size_t position = 0; position < workers.size(); ++position) {
      ranks[workers[position]].push_back(layout.get().RankAt(static_cast<int32_t>(position)));
    }
    for (const auto& [worker, here] : ranks) {
      const std::vector<const SlotView*> devices =
          trial.TakeSlots(*worker, slots, static_cast<int>(here.size()), job.id, unit);
      CHECK_EQ(devices.size(), here.size()) << job.id << " on " << worker->id;
      for (size_t i = 0; i < here.size(); ++i) {
        (*taken)[static_cast<size_t>(here[i])] = {worker, devices[i]};
      }
    }
  }
  if (!job.reservations.empty()) trial.Close();
  return taken;
}

std::optional<std::vector<v1::Placement>> PlaceGang(SlotIndex::Trial& trial, const WaitingJob& job,
                                                    bool last_resort) {
  const auto taken = TakeSlots(trial, job, last_resort);
  if (!taken.has_value()) return std::nullopt;
  std::vector<v1::Placement> placements(taken->size());
  for (size_t rank = 0; rank < placements.size(); ++rank) {
    placements[rank].set_rank(static_cast<int32_t>(rank));
    placements[rank].set_worker((*taken)[rank].worker->id.value());
    placements[rank].set_device((*taken)[rank].slot->device);
  }
  return placements;
}

bool FitsNow(SlotIndex::Trial& trial, const WaitingJob& job) {
  const SlotIndex& index = trial.index();
  if (!job.reservations.empty()) trial.Open(job.reservations);
  // Whatever is preferred or spread, it is placed in some way where this holds it.
  const bool fits = index.RoomOf(SlotsWantedBy(job)).free >= job.ranks &&
                    AnyContainer(index, DemandOf(job, index, /*strict=*/false));
  if (!job.reservations.empty()) trial.Close();
  return fits;
}

v1::PlacementCost CostOf(const SlotIndex& index, const WaitingJob& job,
                         const std::vector<v1::Placement>& placements) {
  v1::PlacementCost cost;
  cost.set_traffic_known(job.traffic_known);
  // Narrow levels have small numbers.
  v1::TopologyLevel level = v1::TOPOLOGY_LEVEL_HOST;
  static const auto* const nowhere = new DomainPath();
  std::vector<const DomainPath*> paths;
  for (const v1::Placement& placement : placements) {
    const WorkerView* worker = index.Find(WorkerId(placement.worker()));
    paths.push_back(worker == nullptr ? nowhere : &worker->path);
  }
  const auto between = [&](size_t a, size_t b) {
    return placements[a].worker() == placements[b].worker() ? v1::TOPOLOGY_LEVEL_HOST
                                                            : CommonLevel(*paths[a], *paths[b]);
  };
  for (size_t rank = 1; rank < placements.size(); ++rank) level = std::max(level, between(0, rank));
  cost.set_level(level);
  if (!placements.empty()) {
    cost.set_domain(level == v1::TOPOLOGY_LEVEL_HOST      ? placements[0].worker()
                    : level == v1::TOPOLOGY_LEVEL_CLUSTER ? "cluster"
                                                          : paths[0]->name(level));
  }
  const GangLayout layout(job, /*by_group=*/false);
  for (const AxisTraffic& traffic : layout.axes()) {
    if (traffic.degree <= 1) continue;
    double hops = 0;
    v1::TopologyLevel farthest = v1::TOPOLOGY_LEVEL_HOST;
    layout.EachHop(traffic, [&](int32_t from, int32_t to) {
      const v1::TopologyLevel hop = between(static_cast<size_t>(from), static_cast<size_t>(to));
      farthest = std::max(farthest, hop);
      hops += DistanceOf(hop);
    });
    v1::AxisCost& axis = *cost.add_axes();
    axis.set_axis(traffic.axis);
    axis.set_degree(traffic.degree);
    axis.set_bytes(traffic.bytes);
    axis.set_distance(hops / static_cast<double>(placements.size()));
    axis.set_farthest(farthest);
    axis.set_cost(axis.bytes() * axis.distance());
    cost.set_total(cost.total() + axis.cost());
  }
  return cost;
}

bool OpensOn(const SlotIndex& index, const DomainShortage& shortage, const WorkerView& worker) {
  if (shortage.opens < 0) return &worker == shortage.opens_worker;
  int domain = worker.home;
  while (domain >= 0 && domain != shortage.opens) domain = index.domain(domain).parent;
  return domain >= 0;
}

std::optional<DomainShortage> FindDomainShortage(const WaitingJob& job, const SlotIndex& index,
                                                 bool ever) {
  const Demand demand = DemandOf(job, index, /*strict=*/false);
  DomainShortage shortage;
  if (demand.limit > kClusterDepth) {
    shortage.level = LevelAt(demand.limit);
    shortage.segment = job.ranks;
  } else {
    const auto bound =
        std::find_if(demand.granules.rbegin(), demand.granules.rend(),
                     [](const Granule& granule) { return granule.depth < kHostDepth; });
    if (bound == demand.granules.rend()) {
      if (job.placement.required != v1::TOPOLOGY_LEVEL_HOST || demand.granules.size() < 2) {
        return std::nullopt;
      }
      shortage.level = v1::TOPOLOGY_LEVEL_HOST;
      shortage.segment = job.placement.segment;
    } else {
      shortage.level = LevelAt(bound->depth);
      shortage.segment = static_cast<int32_t>(bound->size);
    }
  }
  if (Holds(index, demand, ever)) return std::nullopt;
  // Without the rule it fits; else its domains are not why it waits.
  WaitingJob free_job = job;
  free_job.placement = {};
  if (!Holds(index, DemandOf(free_job, index, /*strict=*/false), ever) &&
      job.placement.required != v1::TOPOLOGY_LEVEL_UNSPECIFIED) {
    return std::nullopt;
  }
  const int depth = Depth(shortage.level);
  int64_t opens_hold = -1;  // what the domain holds that is open to it
  Demand inside = demand;
  inside.granules.resize(1);
  if (depth == kHostDepth) {
    const auto& by_free = index.RoomOf(demand.slots).workers_by_free;
    if (ever) {
      shortage.slots = index.Of(job.device).Largest(job.share);
    } else if (!by_free.empty()) {
      shortage.slots = by_free.rbegin()->first;
      shortage.domain = (*by_free.rbegin()->second.begin())->id.value();
    }
    shortage.slots -= shortage.slots % demand.unit();
    for (const auto& [id, worker] : index.workers()) {
      const int64_t free = FreeSlots(worker, demand.slots);
      const auto could =
          std::count_if(worker.slots.begin(), worker.slots.end(), [&job](const SlotView& slot) {
            return slot.kind == job.device && slot.MayHold(job.share) && slot.reserved.empty();
          });
      if (ever || !worker.ready || could < shortage.segment || free <= opens_hold) continue;
      opens_hold = free;
      shortage.opens_worker = &worker;
    }
  } else {
    for (const auto& [path, number] : index.domains_of(shortage.level)) {
      const int64_t hold = HoldIn(index, number, inside, ever);
      if (shortage.domain.empty() || hold > shortage.slots) {
        shortage.slots = hold;
        shortage.domain = index.domain(number).name();
      }
      if (ever || hold <= opens_hold ||
          HoldIn(index, number, inside, /*ever=*/true) < shortage.segment) {
        continue;
      }
      opens_hold = hold;
      shortage.opens = number;
    }
  }
  if (opens_hold >= 0) AddJobsThatEnd(index, job, opens_hold, shortage);
  for (int wider = depth - 1; wider >= kClusterDepth; --wider) {
    WaitingJob other = job;
    other.placement.required = LevelAt(wider);
    if (!Holds(index, DemandOf(other, index, /*strict=*/false), ever)) continue;
    shortage.level_at_least = LevelAt(wider);
    break;
  }
  return shortage;
}

}  // namespace muster::coordinator
