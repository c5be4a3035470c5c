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
// The limits of the CUDA kernels (kernels/ssm/ssm.h).
constexpr int64_t kMambaWidthMax = 256;
constexpr int64_t kMambaGroupMax = 16384;

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

LanguageModelConfig::Mamba2 DescriptionReader::Mamba2(const std::string& prefix) {
  LanguageModelConfig::Mamba2 mamba;
  const auto size = [&](const char* name) { return Size((prefix + name).c_str()); };
  mamba.heads = size("heads");
  mamba.head_width = size("head_width");
  mamba.groups = size("groups");
  mamba.state = size("state");
  mamba.taps = size("taps");
  mamba.step_min = Number((prefix + "step_min").c_str(), 0);
  Require(mamba.head_width <= kMambaWidthMax && mamba.state <= kMambaWidthMax,
          absl::StrCat(prefix, "head_width (", mamba.head_width, ") and ", prefix, "state (",
                       mamba.state, ") are at most ", kMambaWidthMax));
  Require(mamba.taps >= 2 && mamba.taps <= 4,
          absl::StrCat(prefix, "taps of the convolution are 2, 3 or 4, not ", mamba.taps));
  Require(mamba.heads % mamba.groups == 0,
          absl::StrCat(prefix, "groups (", mamba.groups, ") does not divide ", prefix, "heads (",
                       mamba.heads, ")"));
  Require(mamba.heads / mamba.groups * mamba.head_width <= kMambaGroupMax,
          absl::StrCat("a group has ", mamba.heads / mamba.groups, " heads of width ",
                       mamba.head_width, "; together they are at most ", kMambaGroupMax, " wide"));
  return mamba;
}

kernels::RotaryScaling DescriptionReader::RopeScaling() {
  kernels::RotaryScaling scaling;
  scaling.factor = static_cast<float>(Number("rope_factor", 1));
  scaling.low_frequency_factor = static_cast<float>(Number("rope_low_frequency_factor", 1));
  scaling.high_frequency_factor = static_cast<float>(Number("rope_high_frequency_factor", 4));
  scaling.original_context = Size("rope_original_context", 8192);
  Require(scaling.factor >= 1 && scaling.high_frequency_factor > scaling.low_frequency_factor,
          "rope_factor is below 1, or rope_high_frequency_factor not above the low one");
  return scaling;
}

void DescribeRopeScaling(const kernels::RotaryScaling& scaling, ModelDescription& description) {
  if (scaling.factor == 1) return;
  description.sizes["rope_original_context"] = scaling.original_context;
  description.numbers["rope_factor"] = static_cast<double>(scaling.factor);
  description.numbers["rope_low_frequency_factor"] =
      static_cast<double>(scaling.low_frequency_factor);
  description.numbers["rope_high_frequency_factor"] =
      static_cast<double>(scaling.high_frequency_factor);
}

}  // namespace muster::parallel
