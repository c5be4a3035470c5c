// Causal attention over sequences whose tokens are spread over the ranks of a context-parallel
// group: written over Communicator and ops, so one code runs on CPU ranks and on GPUs.
//
// Layout (zigzag, for all methods): a sequence of S tokens is cut into 2c chunks; rank r holds
// chunk r, then chunk 2c - 1 - r, so that causal work is the same on every rank. ContextPositions
// gives the positions of a rank's tokens; inputs, targets and rotary or learned positions follow
// them. Documents packed into one sequence see each other, as they do on one rank, unless
// Inputs::documents says where they begin.
//
//   kRing (Liu et al., Ring Attention, arXiv 2310.01889): keys and values pass around the ring in
//     c - 1 steps, and the partial result of each step is merged by its log-sum-exp. Backward sends
//     keys and values the other way round, and the gradients of keys and values one step behind
//     them, until these are back at the rank that owns them.
//   kAllGather (as Llama 3, arXiv 2407.21783): every rank gathers all keys and values, and sums
//   their
//     gradients by reduce-scatter. Needs memory for the keys and values of the whole sequence.
//   kAllToAll (Jacobs et al., DeepSpeed-Ulysses, arXiv 2309.14509): all-to-alls turn a rank's
//   chunks
//     of the sequence with all heads into the whole sequence with some of the heads, and back.
//     Where there are fewer key/value heads than ranks, each is sent to every rank that needs it.
//
// Bytes that a rank sends per call, e = bytes of an activation, KV = B (S/c) G D e of keys alone,
// Q = B (S/c) H D e, KV4 and so on the same in fp32, n = max(G, c) / G:
//   kRing       forward (c-1) 2 KV                 backward (c-1) (2 KV + 2 KV4)
//   kAllGather  forward (c-1) 2 KV                 backward (c-1) (2 KV + 2 KV4)
//   kAllToAll   forward (c-1)/c (2 Q + 2 n KV)     backward (c-1)/c (2 Q + 2 n KV)
#ifndef MUSTER_PARALLEL_CONTEXT_CONTEXT_ATTENTION_H_
#define MUSTER_PARALLEL_CONTEXT_CONTEXT_ATTENTION_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/arena.h"
#include "kernels/device/device.h"
#include "kernels/tensor.h"
#include "parallel/comm/communicator.h"
#include "parallel/comm/exposure.h"

namespace muster::parallel {

enum class ContextMethod : uint8_t { kRing, kAllGather, kAllToAll };
// "ring", "all_gather", "all_to_all": the names of the job spec.
const char* Name(ContextMethod method);

// How the scans of state-space mixers share a sequence: state_passing.h, scan_by_heads.h.
enum class ScanMethod : uint8_t { kStatePassing, kAllToAll };
const char* Name(ScanMethod method);  // "state_passing", "all_to_all"

struct ContextShape {
  ContextMethod method = ContextMethod::kRing;
  int ranks = 1;  // c
  int64_t batch = 0;
  int64_t sequence = 0;   // S, the whole sequence
  int64_t heads = 0;      // H
  int64_t key_heads = 0;  // G
  int64_t width = 0;      // D
  kernels::DType activation = kernels::DType::kF32;
  bool deterministic = true;  // kernels::AttentionBackwardArgs
  int head_groups = 0;        // the most that HeadGroups returns; 0: it decides by size

  int64_t local() const { return sequence / ranks; }
  int64_t chunk() const { return sequence / (2 * ranks); }
};
// kInvalidArgument with the numbers: S no multiple of 2c; H no multiple of G; kAllToAll with H no
// multiple of c, or with G and c of which neither divides the other.
absl::Status Validate(const ContextShape& shape);

// The number of groups of heads that kAllToAll handles one after the other, so that the all-to-alls
// of one overlap with the attention of the other: 2 where a rank has an even number of key/value
// heads and the attention of a group keeps a GPU busy for long enough, else 1. 1 for the other
// methods.
int HeadGroups(const ContextShape& shape);

// The positions in the whole sequence of the tokens of rank `rank`, in the order it holds them.
// Requires: sequence % (2 * ranks) == 0.
std::vector<int32_t> ContextPositions(int64_t sequence, int rank, int ranks);

// A stream for exchanges that overlap with computation: attention (over the other keys of a ring,
// or of the other group of heads of an all-to-all) or work of the caller (Call::beside_first).
// Serves all layers of a model; used by the thread that enqueues on the compute stream. An exchange
// starts behind everything that is enqueued on the compute stream, and every call awaits its own,
// so the exchanges of a group have the same order on all ranks, whichever stream each runs on.
struct ContextOverlap {
  std::unique_ptr<kernels::Stream> stream;
  std::unique_ptr<kernels::Event> ready;        // on compute: the data to send is written
  std::unique_ptr<kernels::Event> arrived[2];   // by buffer of keys and values, or group of heads
  std::unique_ptr<kernels::Event> returned[2];  // by buffer, or group, of their gradients
  ExposureMeter* meter = nullptr;               // counts waits for the exchanges; may be null

  static absl::StatusOr<std::unique_ptr<ContextOverlap>> Make(kernels::Device& device);
};

// Attention of one layer. Const; the caller provides the memory, planned in an Arena.
class ContextAttention {
 public:
  // What Forward keeps for Backward, and views of the scratch memory.
  struct Saved {
    virtual ~Saved() = default;
  };
  // Views of the caller's tensors: q, out [B,S/c,H,D], k, v [B,S/c,G,D], any strides but a dense
  // last dimension (packed QKV needs no copy).
  struct Inputs {
    kernels::Tensor q, k, v, out;
    // [B,S] i32, the same on every rank: for each token of the whole sequence, the position at
    // which its document begins. Empty: the sequence is one document.
    kernels::Tensor documents = kernels::Tensor();
  };
  struct Gradients {
    kernels::Tensor dout;        // as out
    kernels::Tensor dq, dk, dv;  // as q, k, v; written
  };
  struct Call {
    kernels::Stream& stream;
    Communicator& group;                // of shape.ranks ranks
    ContextOverlap* overlap = nullptr;  // null: exchanges run on `stream`
    // Work of the caller that overlaps with exchanges of Backward. It enqueues on `stream`, reads
    // nothing that Backward writes, and does not touch what Backward reads or writes. Every method
    // calls each of them once, `beside_first` first, with or without an overlap: all-to-all during
    // its first exchange (gradients of out) and its last (gradients of q, k and v), a ring both
    // during its first exchange, all-gather before and after its work. Forward calls neither. May
    // be null.
    std::function<void()> beside_first = nullptr;
    std::function<void()> beside_last = nullptr;
  };

  virtual ~ContextAttention() = default;
  const ContextShape& shape() const { return shape_; }

  virtual std::unique_ptr<Saved> TakeSaved(kernels::Arena& arena) const = 0;
  // Memory of one call of Forward or Backward; all layers may share it.
  virtual void TakeScratch(kernels::Arena& arena, Saved& saved) const = 0;

  // All ranks of the group make these calls in the same order.
  virtual void Forward(const Call& call, const Inputs& inputs, Saved& saved) const = 0;
  // Requires: `inputs` and `saved` as Forward left them.
  virtual void Backward(const Call& call, const Inputs& inputs, const Gradients& gradients,
                        Saved& saved) const = 0;

 protected:
  explicit ContextAttention(const ContextShape& shape) : shape_(shape) {}
  const ContextShape shape_;
};

// The status of Validate.
absl::StatusOr<std::unique_ptr<ContextAttention>> MakeContextAttention(const ContextShape& shape);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_CONTEXT_CONTEXT_ATTENTION_H_
