// The constants of Philox4x32-10 (philox.h).
#ifndef MUSTER_KERNELS_RANDOM_PHILOX_CONSTANTS_H_
#define MUSTER_KERNELS_RANDOM_PHILOX_CONSTANTS_H_

#include <cstdint>

namespace muster::kernels {

constexpr int kPhiloxRounds = 10;
constexpr uint32_t kPhiloxMultiplier0 = 0xD2511F53u;
constexpr uint32_t kPhiloxMultiplier1 = 0xCD9E8D57u;
constexpr uint32_t kPhiloxWeyl0 = 0x9E3779B9u;  // added to the key after every round
constexpr uint32_t kPhiloxWeyl1 = 0xBB67AE85u;

}  // namespace muster::kernels

#endif  // MUSTER_KERNELS_RANDOM_PHILOX_CONSTANTS_H_
