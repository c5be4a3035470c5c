#include "kernels/attention/attention_cudnn.h"

#ifndef MUSTER_HAVE_CUDNN

namespace muster::kernels::cuda {

struct AttentionPlans::State {};
AttentionPlans::AttentionPlans(cudaStream_t) {}
AttentionPlans::~AttentionPlans() = default;
bool AttentionPlans::Forward(CudaStream&, const AttentionArgs&) { return false; }
bool AttentionPlans::Backward(CudaStream&, const AttentionBackwardArgs&) { return false; }

}  // namespace muster::kernels::cuda

#else

#include <cudnn_frontend.h>

#include <array>
#include <cmath>
#include <exception>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/attention/attention_samples.h"
#include "kernels/attention/attention_workspace.h"

namespace muster::kernels::cuda {
namespace {

namespace fe = cudnn_frontend;
using fe::graph::Tensor_attributes;

// Names of a graph's tensors, under which it is given their addresses.
enum Uid : int64_t { kQ = 1, kK, kV, kOut, kLse, kDout, kDq, kDk, kDv };

// Everything a graph depends on: dtype, flags, shapes and strides.
using Key = std::vector<int64_t>;

struct Graph {
  std::unique_ptr<fe::graph::Graph> graph;
  int64_t workspace_bytes = 0;
};

void Append(const Tensor& tensor, Key& key) {
  for (int i = 0; i < tensor.rank(); ++i) {
    key.push_back(tensor.dim(i));
    key.push_back(tensor.stride(i));
  }
}

float ScaleOf(const AttentionArgs& args) {
  return args.scale != 0 ? args.scale : 1.f / std::sqrt(static_cast<float>(args.q.dim(3)));
}

Key KeyOf(const AttentionArgs& args) {
  Key key{static_cast<int64_t>(args.q.dtype()), args.causal,
          static_cast<int64_t>(std::llround(ScaleOf(args) * 1e9))};
  for (const Tensor* tensor : {&args.q, &args.k, &args.v, &args.out}) Append(*tensor, key);
  return key;
}

// Our tensors are [B,S,H,D]. cuDNN calls the dimensions [B,H,S,D] and takes the order in memory
// from the strides.
Tensor_attributes Describe(const Tensor& t, Uid uid) {
  return Tensor_attributes()
      .set_uid(uid)
      .set_dim({t.dim(0), t.dim(2), t.dim(1), t.dim(3)})
      .set_stride({t.stride(0), t.stride(2), t.stride(1), t.stride(3)});
}

void DescribeOutput(const std::shared_ptr<Tensor_attributes>& attributes, const Tensor& t,
                    Uid uid) {
  attributes->set_output(true)
      .set_uid(uid)
      .set_dim({t.dim(0), t.dim(2), t.dim(1), t.dim(3)})
      .set_stride({t.stride(0), t.stride(2), t.stride(1), t.stride(3)});
}

std::unique_ptr<fe::graph::Graph> NewGraph(DType dtype) {
  auto graph = std::make_unique<fe::graph::Graph>();
  graph->set_io_data_type(dtype == DType::kBF16 ? fe::DataType_t::BFLOAT16 : fe::DataType_t::HALF)
      .set_intermediate_data_type(fe::DataType_t::FLOAT)
      .set_compute_data_type(fe::DataType_t::FLOAT);
  return graph;
}

std::vector<int64_t> StatisticsShape(const AttentionArgs& args) {
  return {args.q.dim(0), args.q.dim(2), args.q.dim(1), 1};
}
std::vector<int64_t> StatisticsStride(const AttentionArgs& args) {
  return {args.q.dim(2) * args.q.dim(1), args.q.dim(1), 1, 1};
}

Tensor SliceDim(const Tensor& t, int dim, int64_t begin, int64_t count) {
  auto* data = static_cast<char*>(t.data()) + begin * t.stride(dim) * SizeOf(t.dtype());
  if (t.rank() == 3) {
    return Tensor(data, t.dtype(), {t.dim(0), count, t.dim(2)});
  }
  return Tensor(data, t.dtype(), {t.dim(0), t.dim(1), count, t.dim(3)},
                {t.stride(0), t.stride(1), t.stride(2), t.stride(3)});
}

// The problem of key heads [begin, begin + count) and their query heads. Requires: one sample.
AttentionBackwardArgs KeyHeads(AttentionBackwardArgs args, int64_t begin, int64_t count) {
  AttentionArgs& forward = args.forward;
  const int64_t group = forward.q.dim(2) / forward.k.dim(2);
  for (Tensor* t : {&forward.lse, &args.delta}) *t = SliceDim(*t, 1, begin * group, count * group);
  for (Tensor* t : {&forward.q, &forward.out, &args.dout, &args.dq}) {
    *t = SliceDim(*t, 2, begin * group, count * group);
  }
  for (Tensor* t : {&forward.k, &forward.v, &args.dk, &args.dv}) *t = SliceDim(*t, 2, begin, count);
  return args;
}

// An empty Graph where cuDNN has no engine for it.
Graph Build(cudnnHandle_t handle, std::unique_ptr<fe::graph::Graph> graph) {
  if (graph->validate().is_bad() || graph->build_operation_graph(handle).is_bad() ||
      graph->create_execution_plans({fe::HeurMode_t::A}).is_bad() ||
      graph->check_support().is_bad() || graph->build_plans().is_bad()) {
    return {};
  }
  Graph built;
  if (graph->get_workspace_size(built.workspace_bytes).is_bad()) return {};
  built.graph = std::move(graph);
  return built;
}

Graph BuildForward(cudnnHandle_t handle, const AttentionArgs& args) {
  auto graph = NewGraph(args.q.dtype());
  auto q = graph->tensor(Describe(args.q, kQ));
  auto k = graph->tensor(Describe(args.k, kK));
  auto v = graph->tensor(Describe(args.v, kV));
  auto options = fe::graph::SDPA_attributes()
                     .set_name("attention")
                     .set_generate_stats(true)
                     .set_causal_mask(args.causal)
                     .set_attn_scale(ScaleOf(args));
  auto [out, statistics] = graph->sdpa(q, k, v, options);
  DescribeOutput(out, args.out, kOut);
  statistics->set_output(true)
      .set_data_type(fe::DataType_t::FLOAT)
      .set_uid(kLse)
      .set_dim(StatisticsShape(args))
      .set_stride(StatisticsStride(args));
  return Build(handle, std::move(graph));
}

Graph BuildBackward(cudnnHandle_t handle, const AttentionBackwardArgs& args) {
  const AttentionArgs& forward = args.forward;
  auto graph = NewGraph(forward.q.dtype());
  auto q = graph->tensor(Describe(forward.q, kQ));
  auto k = graph->tensor(Describe(forward.k, kK));
  auto v = graph->tensor(Describe(forward.v, kV));
  auto out = graph->tensor(Describe(forward.out, kOut));
  auto dout = graph->tensor(Describe(args.dout, kDout));
  auto statistics = graph->tensor(Tensor_attributes()
                                      .set_uid(kLse)
                                      .set_data_type(fe::DataType_t::FLOAT)
                                      .set_dim(StatisticsShape(forward))
                                      .set_stride(StatisticsStride(forward)));
  auto options = fe::graph::SDPA_backward_attributes()
                     .set_name("attention_backward")
                     .set_causal_mask(forward.causal)
                     .set_attn_scale(ScaleOf(forward))
                     .set_deterministic_algorithm(args.deterministic);
  auto [dq, dk, dv] = graph->sdpa_backward(q, k, v, out, dout, statistics, options);
  DescribeOutput(dq, args.dq, kDq);
  DescribeOutput(dk, args.dk, kDk);
  DescribeOutput(dv, args.dv, kDv);
  return Build(handle, std::move(graph));
}

bool Supported(const AttentionArgs& args) {
  // 16 bits, rows of whole 16-byte words, and no documents. Building the graph finds out the rest.
  return args.q.dtype() != DType::kF32 && args.q.dim(3) % 8 == 0 && args.documents.empty();
}

}  // namespace

struct AttentionPlans::State {
  cudnnHandle_t handle = nullptr;
  std::map<Key, Graph> graphs;

  // The graph of `key`, which `build` makes at first use; nullptr where cuDNN has no engine for it.
  template <typename F>
  const Graph* Find(const Key& key, const F& build) {
    auto found = graphs.find(key);
    if (found == graphs.end()) found = graphs.emplace(key, build()).first;
    return found->second.graph == nullptr ? nullptr : &found->second;
  }

  // 0 where there is no graph, which Run reports.
  template <typename F>
  int64_t WorkspaceBytes(const Key& key, const F& build) {
    if (handle == nullptr) return 0;
    try {
      const Graph* const found = Find(key, build);
      return found == nullptr ? 0 : found->workspace_bytes;
    } catch (const std::exception&) {
      return 0;
    }
  }

  // False where there is no graph.
  template <typename F>
  bool Run(CudaStream& stream, const char* op, const Key& key, const F& build,
           std::unordered_map<int64_t, void*> pointers) {
    if (handle == nullptr) return false;
    try {
      const Graph* const found = Find(key, build);
      if (found == nullptr) return false;
      const Graph& built = *found;
      void* workspace = stream.Scratch(built.workspace_bytes);
      if (workspace == nullptr) return true;  // the stream has failed and says why
      fe::error_t error = built.graph->execute(handle, pointers, workspace);
      if (error.is_bad()) {
        stream.Fail(absl::InternalError(absl::StrCat(op, ": cuDNN: ", error.get_message())));
      }
    } catch (const std::exception& error) {
      stream.Fail(absl::InternalError(absl::StrCat(op, ": cuDNN: ", error.what())));
    }
    return true;
  }
};

AttentionPlans::AttentionPlans(cudaStream_t stream) : state_(std::make_unique<State>()) {
  if (cudnnCreate(&state_->handle) != CUDNN_STATUS_SUCCESS ||
      cudnnSetStream(state_->handle, stream) != CUDNN_STATUS_SUCCESS) {
    state_->handle = nullptr;  // our own kernels serve
  }
}

AttentionPlans::~AttentionPlans() {
  state_->graphs.clear();
  if (state_->handle != nullptr) cudnnDestroy(state_->handle);
}

bool AttentionPlans::Forward(CudaStream& stream, const AttentionArgs& args) {
  if (!Supported(args)) return false;
  return state_->Run(stream, "AttentionForward", KeyOf(args),
                     [&] { return BuildForward(state_->handle, args); },
                     {{kQ, args.q.data()},
                      {kK, args.k.data()},
                      {kV, args.v.data()},
                      {kOut, args.out.data()},
                      {kLse, args.lse.data()}});
}

bool AttentionPlans::Backward(CudaStream& stream, const AttentionBackwardArgs& args) {
  const AttentionArgs& forward = args.forward;
  if (!Supported(forward)) return false;
  Key key = KeyOf(forward);
  for (const Tensor* tensor : {&args.dout, &args.dq, &args.dk, &args.dv}) Append(*tensor, key);
  key.push_back(args.deterministic);
  const auto build = [&] { return BuildBackward(state_->handle, args); };
  const int64_t workspace = state_->WorkspaceBytes(key, build);
  if (workspace > kAttentionWorkspaceBytesMax) {
    if (args.deterministic && forward.q.dim(3) <= kAttentionOwnWidthMax) return false;
    // Slices differ by at most one head or sample, so either all of them have a graph or none has.
    const int64_t batch = forward.q.dim(0), key_heads = forward.k.dim(2);
    if (batch > 1) {
      return Backward(stream, SamplesOf(args, 0, batch / 2)) &&
             Backward(stream, SamplesOf(args, batch / 2, batch - batch / 2));
    }
    if (args.deterministic && key_heads > 1) {
      return Backward(stream, KeyHeads(args, 0, key_heads / 2)) &&
             Backward(stream, KeyHeads(args, key_heads / 2, key_heads - key_heads / 2));
    }
    if (args.deterministic && workspace > kAttentionWorkspaceBytesOfOneMax) return false;
  }
  return state_->Run(stream, "AttentionBackward", key, build,
                     {{kQ, forward.q.data()},
                      {kK, forward.k.data()},
                      {kV, forward.v.data()},
                      {kOut, forward.out.data()},
                      {kLse, forward.lse.data()},
                      {kDout, args.dout.data()},
                      {kDq, args.dq.data()},
                      {kDk, args.dk.data()},
                      {kDv, args.dv.data()}});
}

}  // namespace muster::kernels::cuda

#endif  // MUSTER_HAVE_CUDNN
