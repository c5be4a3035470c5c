// Device memory that the backward of the state-space scan takes besides its arguments, more than
// any other op of kernels/ssm. Pure, for planning.
#ifndef MUSTER_KERNELS_SSM_SSD_WORKSPACE_H_
#define MUSTER_KERNELS_SSM_SSD_WORKSPACE_H_

#include <algorithm>
#include <cstdint>
#include <limits>

namespace muster::kernels {

// What a backward is called with: B samples of S positions; H heads of width P; groups; N columns
// of the state; positions of a chunk.
struct SsdShape {
  int64_t samples = 0, positions = 0;
  int64_t heads = 0, groups = 1, width = 0, columns = 0;
  int64_t chunk = 128;
  bool in_16_bits = false;    // the tensors: bf16 or fp16
  bool states_given = false;  // the caller has memory for the gradients of states (context ranks)
  int64_t multiprocessors = 132;  // of an H100 or H200
};

// How many blocks share the heads of a group in a chunk, so that blocks fill the device: the number
// with the shortest time, where a block takes as long for its start and end as for `fixed` heads.
inline int SsdShares(int64_t multiprocessors, int64_t chunks_of_groups, int64_t heads_of_group,
                     double fixed) {
  int best = 1;
  double best_time = std::numeric_limits<double>::infinity();
  for (int64_t shares = 1; shares <= heads_of_group; ++shares) {
    const int64_t rounds = (chunks_of_groups * shares + multiprocessors - 1) / multiprocessors;
    const double time = static_cast<double>(rounds) *
                        (static_cast<double>((heads_of_group + shares - 1) / shares) + fixed);
    if (time < best_time) {
      best_time = time;
      best = static_cast<int>(shares);
    }
  }
  return best;
}
// Of the fused backward on Hopper.
constexpr double kSsdBackwardFixedHeads = 3.0;

// TMA counts in 16 bytes.
constexpr int64_t kSsdColumnsStep = 8;
// Whether the fused kernels for Hopper take heads of this width with states of so many columns.
constexpr bool SsdIsFused(int64_t width, int64_t columns) {
  return width % kSsdColumnsStep == 0 && columns % kSsdColumnsStep == 0 && width > 0 &&
         columns > 0 && width <= 256 && columns <= 256;
}

// How the fused kernels cut the state of a head into tiles: of 64 x 64, 64 x 128 or 128 x 64.
struct SsdTiles {
  int64_t width = 0, columns = 0;  // of a tile
  int64_t slices = 0;              // of a head's width
  int64_t passes = 0;              // over the columns
};
constexpr SsdTiles SsdTilesOf(int64_t width, int64_t columns) {
  SsdTiles tiles;
  tiles.columns = columns > 64 ? 128 : 64;
  tiles.width = width > 64 && columns <= 64 ? 128 : 64;
  tiles.slices = (width + tiles.width - 1) / tiles.width;
  tiles.passes = (columns + tiles.columns - 1) / tiles.columns;
  return tiles;
}

// Within a hundredth; exact but for the ends of the segments of a few long sequences.
inline int64_t SsdWorkspaceBytes(const SsdShape& shape) {
  constexpr int64_t kFusedChunk = 128;
  const bool fused =
      shape.in_16_bits && shape.chunk == kFusedChunk && SsdIsFused(shape.width, shape.columns);
  const int64_t chunks = shape.samples * ((shape.positions + shape.chunk - 1) / shape.chunk);
  const int64_t states =
      shape.states_given ? 0 : chunks * shape.heads * shape.width * shape.columns;
  const int64_t partials = chunks * 3 * shape.heads * 4;
  if (!fused) return 2 * shape.samples * shape.positions * shape.heads * 4 + states * 4 + partials;
  const SsdTiles tiles = SsdTilesOf(shape.width, shape.columns);
  const int64_t shares =
      SsdShares(shape.multiprocessors, chunks * shape.groups,
                shape.heads / shape.groups * tiles.slices, kSsdBackwardFixedHeads);
  constexpr int64_t kFactors = 5;                   // rows of fp32 per chunk of a head
  constexpr int64_t kTerms = 3 * kFusedChunk + 16;  // fp32 per chunk of a slice, of each pass
  const int64_t heads =
      chunks * shape.heads * (kFactors * kFusedChunk + tiles.slices * tiles.passes * kTerms) * 4;
  const int64_t scores = shares * chunks * shape.groups * kFusedChunk * kFusedChunk * 2;
  const int64_t sums =
      2 * shares * shape.samples * shape.positions * shape.groups * tiles.columns * 4;
  return heads + states * 2 + scores + sums + partials;
}

}  // namespace muster::kernels

#endif  // MUSTER_KERNELS_SSM_SSD_WORKSPACE_H_
