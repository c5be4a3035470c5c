// CRC-32C (Castagnoli, IEEE Transactions on Communications 41(6), 1993), as in iSCSI (RFC 3720).
#ifndef MUSTER_PARALLEL_CHECKPOINT_CRC32C_H_
#define MUSTER_PARALLEL_CHECKPOINT_CRC32C_H_

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace muster::parallel {

// Crc32c(b, Crc32c(a)) == Crc32c(a + b). Uses the processor's instruction where there is one.
uint32_t Crc32c(absl::string_view bytes, uint32_t crc = 0);
// The same without that instruction, for other processors and for tests.
uint32_t Crc32cPortable(absl::string_view bytes, uint32_t crc = 0);

// 8 hex digits, the form in manifests and in the coordinator's records.
std::string CrcText(uint32_t crc);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_CHECKPOINT_CRC32C_H_
