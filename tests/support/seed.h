// The seed of random tests. It is fixed unless --seed N is given; the test program prints it.
#ifndef MUSTER_TESTS_SUPPORT_SEED_H_
#define MUSTER_TESTS_SUPPORT_SEED_H_

#include <cstdint>

namespace muster::testing {

uint64_t TestSeed();

}  // namespace muster::testing

#endif  // MUSTER_TESTS_SUPPORT_SEED_H_
