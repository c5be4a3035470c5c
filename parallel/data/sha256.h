// SHA-256 (FIPS 180-4), by which tokenizer files are named.
#ifndef MUSTER_PARALLEL_DATA_SHA256_H_
#define MUSTER_PARALLEL_DATA_SHA256_H_

#include <string>

#include "absl/strings/string_view.h"

namespace muster::parallel {

// 64 hexadecimal digits in lower case.
std::string Sha256(absl::string_view bytes);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_DATA_SHA256_H_
