#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tests/support/seed.h"

namespace {
uint64_t g_seed = 20261121;
}

namespace muster::testing {
uint64_t TestSeed() { return g_seed; }
}  // namespace muster::testing

int main(int argc, char** argv) {
  ::testing::InitGoogleMock(&argc, argv);
  for (int i = 1; i + 1 < argc; ++i) {
    if (std::strcmp(argv[i], "--seed") == 0) g_seed = std::strtoull(argv[i + 1], nullptr, 10);
  }
  std::printf("seed %llu (repeat with --seed %llu)\n", static_cast<unsigned long long>(g_seed),
              static_cast<unsigned long long>(g_seed));
  return RUN_ALL_TESTS();
}
