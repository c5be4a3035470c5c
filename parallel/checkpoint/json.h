// Private to parallel/checkpoint: reads JSON from files that may hold anything. Missing and
// mistyped fields are errors, not exceptions.
#ifndef MUSTER_PARALLEL_CHECKPOINT_JSON_H_
#define MUSTER_PARALLEL_CHECKPOINT_JSON_H_

#include <cstdint>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace muster::parallel {

using Json = nlohmann::json;

// kDataLoss for anything but one JSON object, for nesting beyond 16 and for a key given twice.
absl::StatusOr<Json> ParseObject(absl::string_view text);

// Fields of an object; kDataLoss names the missing or mistyped key.
absl::StatusOr<int64_t> IntegerAt(const Json& object, const char* key);  // >= 0
absl::StatusOr<uint64_t> UnsignedAt(const Json& object, const char* key);
absl::StatusOr<std::string> StringAt(const Json& object, const char* key);
// Numbers >= 0, at most 16 of them: a shape, an offset or an extent.
absl::StatusOr<std::vector<int64_t>> NumbersAt(const Json& object, const char* key);
absl::StatusOr<const Json*> ObjectAt(const Json& object, const char* key);
absl::StatusOr<const Json*> ArrayAt(const Json& object, const char* key);

// The product of a shape times `element_bytes`; kDataLoss when it does not fit 63 bits.
absl::StatusOr<int64_t> BytesOf(const std::vector<int64_t>& shape, int64_t element_bytes);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_CHECKPOINT_JSON_H_
