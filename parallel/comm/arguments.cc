#include "parallel/comm/arguments.h"

#include "absl/strings/str_join.h"
#include "base/check.h"

namespace muster::parallel {
namespace {

using kernels::Tensor;

// Of the parts of `size` ranks, each another.
void CheckPlaces(const std::vector<int>& places, int size) {
  if (places.empty()) return;
  std::vector<bool> taken(static_cast<size_t>(size), false);
  bool right = places.size() == taken.size();
  for (const int place : places) {
    right = right && place >= 0 && place < size && !taken[static_cast<size_t>(place)];
    if (right) taken[static_cast<size_t>(place)] = true;
  }
  CHECK(right) << "places " << absl::StrJoin(places, ", ") << " of " << size << " parts";
}

}  // namespace

int64_t EqualPart(const Tensor& data, int size) {
  CHECK(data.contiguous());
  CHECK_EQ(data.elements() % size, 0) << data.ToString() << " in " << size << " equal parts";
  return data.elements() / size;
}

void CheckBroadcast(const Tensor& data, int root, int size) {
  CHECK(data.contiguous());
  CHECK(root >= 0 && root < size) << "root " << root << " of " << size;
}

int64_t CheckAllToAll(const Tensor& in, const Tensor& out, int size) {
  CHECK(out.contiguous());
  CHECK_EQ(in.bytes(), out.bytes());
  CHECK(in.data() != out.data()) << "an all-to-all in place";
  return EqualPart(in, size);
}

int64_t CheckAllToAllPieces(const std::vector<AllToAllPiece>& pieces, int size) {
  CHECK(!pieces.empty()) << "an all-to-all of no pieces";
  int64_t elements = 0;
  for (const AllToAllPiece& piece : pieces) {
    CheckAllToAll(piece.in, piece.out, size);
    CheckPlaces(piece.in_places, size);
    CheckPlaces(piece.out_places, size);
    elements += piece.in.elements();
  }
  return elements;
}

void CheckPeer(const Tensor& data, int peer, int rank, int size) {
  CHECK(data.contiguous());
  CHECK(peer >= 0 && peer < size && peer != rank) << "peer " << peer << " of " << size;
}

}  // namespace muster::parallel
