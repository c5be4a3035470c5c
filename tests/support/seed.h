// The seed of a random test: fixed unless --seed N was given; printed by the test binary at start.
#ifndef MUSTER_TESTS_SUPPORT_SEED_H_
#define MUSTER_TESTS_SUPPORT_SEED_H_

#include <cstdint>

namespace muster::testing {

uint64_t TestSeed();

}  // namespace muster::testing

#endif  // MUSTER_TESTS_SUPPORT_SEED_H_
