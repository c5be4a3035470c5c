#include "parallel/comm/arguments.h"

#include "base/check.h"

namespace muster::parallel {

using kernels::Tensor;

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

void CheckPeer(const Tensor& data, int peer, int rank, int size) {
  CHECK(data.contiguous());
  CHECK(peer >= 0 && peer < size && peer != rank) << "peer " << peer << " of " << size;
}

}  // namespace muster::parallel
