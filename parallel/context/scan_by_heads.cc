#include "parallel/context/scan_by_heads.h"

#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_format.h"
#include "base/check.h"
#include "kernels/memory/memory.h"
#include "parallel/context/methods.h"

namespace muster::parallel {
namespace {

using context::HeadMessages;
using kernels::Arena;
using kernels::Tensor;

HeadMessages MessagesOf(const HeadsShape& shape) {
  return {SequenceLayout::Zigzag(shape.ranks), shape.batch, shape.sequence};
}

// Calls work(own tokens, messages, first) for x, B, C and dt. With `each`, B and C come once for
// each of the ranks that share them, the first time with `first`.
void ForInputs(
    const HeadsShape& shape, const ScanByHeads::Inputs& inputs, const ScanByHeads::Saved& saved,
    bool each,
    absl::FunctionRef<void(const Tensor& mine, const Tensor& message, bool first)> work) {
  const HeadMessages messages = MessagesOf(shape);
  const int64_t heads = shape.own_heads(), groups = shape.own_groups();
  const HeadMessages::Packing parts = {saved.parts, shape.own_channels()};
  const auto whole = [&](const Tensor& mine, const Tensor& message) { work(mine, message, true); };
  messages.ForHeads(inputs.x, {heads, 0, heads}, parts, 0, whole);
  messages.ForHeads(inputs.dt, {heads, 0, heads}, {saved.step_parts, heads}, 0, whole);
  int64_t column = shape.own_columns();
  for (const Tensor* input : {&inputs.b, &inputs.c}) {
    const auto repeats = each ? static_cast<int>(messages.Repeats(shape.groups, groups)) : 1;
    for (int nth = 0; nth < repeats; ++nth) {
      messages.ForHeads(
          *input, {groups, 0, groups}, parts, column,
          [&](const Tensor& mine, const Tensor& message) { work(mine, message, nth == 0); },
          each ? nth : -1);
    }
    column += groups * shape.state;
  }
}

std::vector<AllToAllItem> Joined(std::vector<AllToAllItem> some,
                                 const std::vector<AllToAllItem>& others) {
  some.insert(some.end(), others.begin(), others.end());
  return some;
}

}  // namespace

absl::Status Validate(const HeadsShape& shape) {
  if (shape.ranks < 1 || shape.heads < 1 || shape.groups < 1 || shape.heads % shape.groups != 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%d state-space heads in %d groups over %d context ranks: each must be at "
                        "least 1, and the heads a multiple of the groups",
                        shape.heads, shape.groups, shape.ranks));
  }
  if (shape.heads % shape.ranks == 0 &&
      (shape.groups % shape.ranks == 0 || shape.ranks % shape.groups == 0)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrFormat(
      "scan_method all_to_all spreads %d state-space heads (groups: %d) over %d context ranks: the "
      "heads must be a multiple of the ranks, and of groups and ranks one a multiple of the other; "
      "use state_passing, which takes any heads, or other tensor_shares",
      shape.heads, shape.groups, shape.ranks));
}

int64_t PassBytes(const HeadsShape& shape) {
  const int64_t columns = shape.own_channels() + shape.own_heads() + shape.own_columns();
  return shape.batch * shape.sequence / shape.ranks * (shape.ranks - 1) * columns *
         SizeOf(shape.activation);
}

ScanByHeads::ScanByHeads(const HeadsShape& shape) : shape_(shape) { CHECK_OK(Validate(shape)); }

void ScanByHeads::TakeSaved(Arena& arena, const char* category, Saved& saved) const {
  const int64_t rows = shape_.batch * shape_.sequence;
  saved.channels = arena.Take(category, shape_.activation, {rows, shape_.own_channels()});
  saved.steps = arena.Take(category, shape_.activation, {rows, shape_.own_heads()});
}

void ScanByHeads::TakeScratch(Arena& arena, Saved& saved) const {
  const int64_t rows = shape_.batch * shape_.sequence;
  const auto take = [&](int64_t columns) {
    return arena.Take("scratch", shape_.activation, {rows, columns});
  };
  saved.outputs = take(shape_.own_columns());
  saved.d_channels = take(shape_.own_channels());
  saved.d_steps = take(shape_.own_heads());
  saved.parts = take(shape_.own_channels());
  saved.step_parts = take(shape_.own_heads());
}

// The beginning of the memory of messages.
Tensor ScanByHeads::OutputParts(const Saved& saved) const {
  return Tensor(saved.parts.data(), shape_.activation,
                {shape_.batch * shape_.sequence, shape_.own_columns()});
}

void ScanByHeads::SendInputs(const Call& call, const Inputs& inputs, const Saved& saved) const {
  CHECK_EQ(call.group.size(), shape_.ranks);
  ForInputs(shape_, inputs, saved, /*each=*/false,
            [&](const Tensor& mine, const Tensor& message, bool /*first*/) {
              kernels::CopyStrided(call.stream, mine, message);
            });
  const HeadMessages messages = MessagesOf(shape_);
  call.group.AllToAllBatch(call.stream, Joined(messages.FromParts(saved.parts, saved.channels),
                                               messages.FromParts(saved.step_parts, saved.steps)));
}

void ScanByHeads::ReturnOutputs(const Call& call, const Tensor& y, const Saved& saved) const {
  const HeadMessages messages = MessagesOf(shape_);
  const Tensor parts = OutputParts(saved);
  call.group.AllToAllBatch(call.stream, messages.ToParts(saved.outputs, parts));
  const int64_t heads = shape_.own_heads();
  messages.ForHeads(y, {heads, 0, heads}, {parts, shape_.own_columns()}, 0,
                    [&](const Tensor& mine, const Tensor& message) {
                      kernels::CopyStrided(call.stream, message, mine);
                    });
}

// The work of the caller that comes first overlaps with this exchange.
void ScanByHeads::SendOutputGradients(const Call& call, const Tensor& dy,
                                      const Saved& saved) const {
  const HeadMessages messages = MessagesOf(shape_);
  const Tensor parts = OutputParts(saved);
  const int64_t heads = shape_.own_heads();
  messages.ForHeads(dy, {heads, 0, heads}, {parts, shape_.own_columns()}, 0,
                    [&](const Tensor& mine, const Tensor& message) {
                      kernels::CopyStrided(call.stream, mine, message);
                    });
  kernels::Event* const arrived =
      call.overlap != nullptr && call.beside_first ? call.overlap->arrived[0].get() : nullptr;
  context::StartExchange(call, arrived, [&](kernels::Stream& stream) {
    call.group.AllToAllBatch(stream, messages.FromParts(parts, saved.outputs));
  });
  if (call.beside_first) call.beside_first();
  context::AwaitExchange(call, arrived, Collective::kAllToAll);
}

// The work of the caller that comes last overlaps with this one.
void ScanByHeads::ReturnInputGradients(const Call& call, const Inputs& gradients,
                                       const Saved& saved) const {
  const HeadMessages messages = MessagesOf(shape_);
  kernels::Event* const returned =
      call.overlap != nullptr && call.beside_last ? call.overlap->returned[0].get() : nullptr;
  context::StartExchange(call, returned, [&](kernels::Stream& stream) {
    call.group.AllToAllBatch(stream, Joined(messages.ToParts(saved.d_channels, saved.parts),
                                            messages.ToParts(saved.d_steps, saved.step_parts)));
  });
  if (call.beside_last) call.beside_last();
  context::AwaitExchange(call, returned, Collective::kAllToAll);
  ForInputs(shape_, gradients, saved, /*each=*/true,
            [&](const Tensor& mine, const Tensor& message, bool first) {
              kernels::CopyStrided(call.stream, message, mine, /*accumulate=*/!first);
            });
}

}  // namespace muster::parallel
