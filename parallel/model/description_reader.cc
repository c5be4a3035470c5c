#include "parallel/model/description_reader.h"

#include <limits>
#include <string>

#include "absl/strings/str_cat.h"

namespace muster::parallel {
namespace {

// The limits of a job spec.
constexpr int64_t kLayersMax = 1024;
constexpr int64_t kHiddenMax = 1 << 20;
constexpr int64_t kFfnMax = 1 << 24;

}  // namespace

int64_t DescriptionReader::Size(const char* name) {
  const int64_t size = Take(left_.sizes, "size", name, int64_t{0});
  const absl::string_view what = name;
  const int64_t most = what == "layers"   ? kLayersMax
                       : what == "hidden" ? kHiddenMax
                       : what == "ffn"    ? kFfnMax
                                          : std::numeric_limits<int32_t>::max();
  if (size <= most) return size;
  Refuse(absl::StrCat("size '", name, "' is ", size, "; at most ", most));
  return 1;
}

}  // namespace muster::parallel
