#include "proto/spec/families/layers.h"

#include <algorithm>
#include <limits>
#include <string>

#include "absl/strings/str_cat.h"

namespace muster::spec {
namespace {

constexpr double kNormEpsilon = 1e-5;
constexpr int32_t kMambaHeadWidth = 64;
constexpr int32_t kMambaState = 128;
constexpr int32_t kMambaTaps = 4;

// The limits of the scan's kernels (kernels/ssm/ssm.h).
constexpr int64_t kMambaWidthMax = 256;
constexpr int64_t kMambaGroupMax = 16384;
// Steps are near 0.001 to 0.1; with much larger ones states overflow.
constexpr double kMambaStepMinMax = 100;

// The least number of groups that divides the heads and whose heads are narrow enough together.
int64_t GroupsFor(int64_t heads, int64_t head_width) {
  for (int64_t of_group = std::min(heads, kMambaGroupMax / head_width); of_group > 0; --of_group) {
    if (heads % of_group == 0) return heads / of_group;
  }
  return heads;
}

}  // namespace

std::string DivisorsAround(int64_t value, int64_t of) {
  int64_t below = 1, above = of;
  const auto consider = [&](int64_t divisor) {
    if (divisor < value) below = std::max(below, divisor);
    if (divisor > value) above = std::min(above, divisor);
  };
  for (int64_t divisor = 1; divisor <= of / divisor; ++divisor) {
    if (of % divisor != 0) continue;
    consider(divisor);
    consider(of / divisor);
  }
  return value > of ? absl::StrCat(of) : absl::StrCat(below, " or ", above);
}

void DefaultTable(v1::ModelSpec& model, bool tied) {
  if (!model.has_tied()) model.set_tied(tied);
  if (!model.has_norm_epsilon()) model.set_norm_epsilon(kNormEpsilon);
}

void DefaultMamba(v1::ModelSpec& model) {
  v1::MambaSpec& mamba = *model.mutable_mamba();
  if (mamba.head_width() == 0) mamba.set_head_width(kMambaHeadWidth);
  if (mamba.heads() == 0 && mamba.head_width() > 0) {
    mamba.set_heads(static_cast<int32_t>(std::clamp<int64_t>(
        2 * int64_t{model.hidden()} / mamba.head_width(), 0, std::numeric_limits<int32_t>::max())));
  }
  if (mamba.groups() == 0) mamba.set_groups(1);
  if (mamba.state() == 0) mamba.set_state(kMambaState);
  if (mamba.taps() == 0) mamba.set_taps(kMambaTaps);
}

bool CheckHeads(const v1::ModelSpec& model, Checker& check) {
  const bool heads = check.InRange("engine.model.heads", model.heads(), 1);
  if (!heads || model.hidden() < 1 || model.hidden() > kHiddenMax) return false;
  if (model.hidden() % model.heads() == 0) return true;
  check.Add("engine.model.heads", model.heads(), " does not divide hidden (", model.hidden(), "); ",
            DivisorsAround(model.heads(), model.hidden()), " would");
  return false;
}

void CheckKeyHeads(const v1::ModelSpec& model, bool heads, Checker& check) {
  const bool kv_heads = check.InRange("engine.model.kv_heads", model.kv_heads(), 1);
  if (heads && kv_heads && model.heads() % model.kv_heads() != 0) {
    check.Add("engine.model.kv_heads", model.kv_heads(), " does not divide heads (", model.heads(),
              "); ", DivisorsAround(model.kv_heads(), model.heads()), " would");
  }
}

void CheckRope(const v1::ModelSpec& model, Checker& check) {
  check.Positive("engine.model.rope_theta", model.rope_theta());
  if (!model.has_rope_scaling()) return;
  const v1::RopeScalingSpec& scaling = model.rope_scaling();
  const std::string path = "engine.model.rope_scaling.";
  if (check.Finite(path + "factor", scaling.factor()) && scaling.factor() < 1) {
    check.Add(path + "factor", scaling.factor(), " is less than 1");
  }
  check.Positive(path + "low_frequency_factor", scaling.low_frequency_factor());
  check.Positive(path + "high_frequency_factor", scaling.high_frequency_factor());
  if (scaling.high_frequency_factor() <= scaling.low_frequency_factor()) {
    check.Add(path + "high_frequency_factor", scaling.high_frequency_factor(),
              " is not above low_frequency_factor (", scaling.low_frequency_factor(), ")");
  }
  check.InRange(path + "original_context", scaling.original_context(), 1);
}

void PresetMamba(int32_t groups, v1::ModelSpec& model) {
  v1::MambaSpec& mamba = *model.mutable_mamba();
  mamba.set_head_width(64);
  mamba.set_groups(groups);
  mamba.set_state(128);
  mamba.set_taps(4);
}

void CheckMamba(const v1::ModelSpec& model, Checker& check) {
  const v1::MambaSpec& mamba = model.mamba();
  const std::string path = "engine.model.mamba.";
  const bool width = check.InRange(path + "head_width", mamba.head_width(), 1, kMambaWidthMax);
  if (mamba.heads() == 0 && (!width || model.hidden() <= 0)) {
    // What its default is made of is out of range.
  } else if (mamba.heads() == 0) {
    check.Add(path + "head_width", mamba.head_width(), " is wider than 2 x hidden (",
              2 * int64_t{model.hidden()}, "), which leaves no head; give mamba.heads, or at most ",
              2 * int64_t{model.hidden()});
  } else {
    const bool heads = check.InRange(path + "heads", mamba.heads(), 1, kFfnMax);
    const bool groups = check.InRange(path + "groups", mamba.groups(), 1);
    if (heads && groups && mamba.heads() % mamba.groups() != 0) {
      check.Add(path + "groups", mamba.groups(), " does not divide heads (", mamba.heads(), "); ",
                DivisorsAround(mamba.groups(), mamba.heads()), " would");
    } else if (heads && groups && width) {
      const int64_t columns = int64_t{mamba.heads()} / mamba.groups() * int64_t{mamba.head_width()};
      if (columns > kMambaGroupMax) {
        check.Add(path + "groups", "the heads of a group are ", columns,
                  " columns wide together; at most ", kMambaGroupMax, ", which ",
                  GroupsFor(mamba.heads(), mamba.head_width()), " groups have");
      }
    }
  }
  check.InRange(path + "state", mamba.state(), 1, kMambaWidthMax);
  check.InRange(path + "taps", mamba.taps(), 2, 4);
  if (check.Finite(path + "step_min", mamba.step_min()) &&
      (mamba.step_min() < 0 || mamba.step_min() > kMambaStepMinMax)) {
    check.Add(path + "step_min", mamba.step_min(), " is out of range; 0 to ", kMambaStepMinMax);
  }
}

}  // namespace muster::spec
