#include "parallel/checkpoint/json.h"

#include <limits>
#include <set>

#include "absl/strings/str_cat.h"

namespace muster::parallel {
namespace {

constexpr int kDepthMax = 16;
constexpr size_t kDimensionsMax = 16;

absl::Status Wrong(const char* key, absl::string_view expected) {
  return absl::DataLossError(absl::StrCat("field '", key, "' is missing or is not ", expected));
}
const Json* Find(const Json& object, const char* key) {
  if (!object.is_object()) return nullptr;
  const auto found = object.find(key);
  return found == object.end() ? nullptr : &*found;
}
bool IsCount(const Json& value) {
  return value.is_number_unsigned() &&
         value.get<uint64_t>() <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
}

}  // namespace

absl::StatusOr<Json> ParseObject(absl::string_view text) {
  std::vector<std::set<std::string>> keys;
  std::string problem;
  const auto watch = [&](int depth, Json::parse_event_t event, Json& value) {
    if (depth > kDepthMax) problem = "is nested too deeply";
    if (event == Json::parse_event_t::object_start) keys.emplace_back();
    if (event == Json::parse_event_t::object_end && !keys.empty()) keys.pop_back();
    if (event == Json::parse_event_t::key && !keys.empty() &&
        !keys.back().insert(value.get<std::string>()).second) {
      problem = absl::StrCat("has the key '", value.get<std::string>(), "' twice");
    }
    return problem.empty();
  };
  // Without exceptions a parse error gives a discarded value.
  Json object = Json::parse(text.begin(), text.end(), watch, /*allow_exceptions=*/false);
  if (!problem.empty()) return absl::DataLossError(absl::StrCat("the JSON ", problem));
  if (!object.is_object()) return absl::DataLossError("it is not a JSON object");
  return object;
}

absl::StatusOr<int64_t> IntegerAt(const Json& object, const char* key) {
  const Json* value = Find(object, key);
  if (value == nullptr || !IsCount(*value)) return Wrong(key, "a whole number from 0");
  return value->get<int64_t>();
}

absl::StatusOr<uint64_t> UnsignedAt(const Json& object, const char* key) {
  const Json* value = Find(object, key);
  if (value == nullptr || !value->is_number_unsigned()) return Wrong(key, "a whole number from 0");
  return value->get<uint64_t>();
}

absl::StatusOr<std::string> StringAt(const Json& object, const char* key) {
  const Json* value = Find(object, key);
  if (value == nullptr || !value->is_string()) return Wrong(key, "a text");
  return value->get<std::string>();
}

absl::StatusOr<std::vector<int64_t>> NumbersAt(const Json& object, const char* key) {
  const Json* value = Find(object, key);
  if (value == nullptr || !value->is_array() || value->size() > kDimensionsMax) {
    return Wrong(key, "a list of at most 16 numbers");
  }
  std::vector<int64_t> numbers;
  for (const Json& number : *value) {
    if (!IsCount(number)) return Wrong(key, "a list of whole numbers from 0");
    numbers.push_back(number.get<int64_t>());
  }
  return numbers;
}

absl::StatusOr<const Json*> ObjectAt(const Json& object, const char* key) {
  const Json* value = Find(object, key);
  if (value == nullptr || !value->is_object()) return Wrong(key, "an object");
  return value;
}

absl::StatusOr<const Json*> ArrayAt(const Json& object, const char* key) {
  const Json* value = Find(object, key);
  if (value == nullptr || !value->is_array()) return Wrong(key, "a list");
  return value;
}

absl::StatusOr<int64_t> BytesOf(const std::vector<int64_t>& shape, int64_t element_bytes) {
  int64_t bytes = element_bytes;
  for (int64_t extent : shape) {
    if (extent < 0 || __builtin_mul_overflow(bytes, extent, &bytes)) {
      return absl::DataLossError("the shape has more elements than any file");
    }
  }
  return bytes;
}

}  // namespace muster::parallel
