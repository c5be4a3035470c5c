#include "parallel/comm/arguments.h"

#include "absl/strings/str_join.h"
#include "base/check.h"

namespace muster::parallel {
namespace {

using kernels::Tensor;

// CHECKs that each of `size` ranks has a place of its own.
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

int64_t CheckAllToAllBatch(const std::vector<AllToAllItem>& items, int size) {
  CHECK(!items.empty()) << "a batch of no all-to-alls";
  int64_t elements = 0;
  for (const AllToAllItem& item : items) {
    CheckAllToAll(item.in, item.out, size);
    CheckPlaces(item.in_places, size);
    CheckPlaces(item.out_places, size);
    elements += item.in.elements();
  }
  return elements;
}

void CheckPeer(const Tensor& data, int peer, int rank, int size) {
  CHECK(data.contiguous());
  CHECK(peer >= 0 && peer < size && peer != rank) << "peer " << peer << " of " << size;
}

}  // namespace muster::parallel
