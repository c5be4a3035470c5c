#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "kernels/device/cuda_status.h"
#include "kernels/gemm/linear_cuda.h"

namespace muster::kernels::cuda {
namespace {

constexpr int kCandidates = 16;
constexpr int kRounds = 7;
constexpr int kRunsPerRound = 2;
// GEMMs that take this long are run fewer times: those of a large vocabulary take 10 ms.
constexpr float kLongMilliseconds = 2;
constexpr int kLongRounds = 3;
constexpr int kLongRunsPerRound = 1;
// Candidates that take this many times as long as the fastest one in a single run are dropped.
constexpr float kHopeless = 1.4f;
constexpr float kHopelessVariant = 1.1f;
constexpr size_t kFinalists = 3;  // candidates whose variants are tried
// Sustained runs are made of at most kSustainedWays ways that are within kSustainedWithin of the
// fastest, where one run takes kSustainedFromMilliseconds or more. On an H200 they made steps of
// llama-1b 0.85 % faster than short turns alone.
constexpr float kSustainedWithin = 1.06f;
constexpr size_t kSustainedWays = 4;
constexpr int kSustainedRounds = 3;
constexpr float kSustainedMilliseconds = 50;
constexpr float kSustainedFromMilliseconds = 0.05f;

cudaDataType_t DataType(DType dtype) {
  if (dtype == DType::kBF16) return CUDA_R_16BF;
  return dtype == DType::kF16 ? CUDA_R_16F : CUDA_R_32F;
}

int AlignmentOf(const void* p) {
  const auto address = reinterpret_cast<uintptr_t>(p);
  return static_cast<int>(std::min<uintptr_t>(256, address & (~address + 1)));
}

cublasLtEpilogue_t EpilogueOf(GemmEpilogue epilogue) {
  switch (epilogue) {
    case GemmEpilogue::kNone:
      return CUBLASLT_EPILOGUE_DEFAULT;
    case GemmEpilogue::kBias:
      return CUBLASLT_EPILOGUE_BIAS;
    case GemmEpilogue::kGelu:
      return CUBLASLT_EPILOGUE_GELU_AUX;
    case GemmEpilogue::kGeluBias:
      return CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
    case GemmEpilogue::kGeluGradient:
      return CUBLASLT_EPILOGUE_DGELU;
  }
  CHECK(false) << "not an epilogue: " << static_cast<int>(epilogue);
  return CUBLASLT_EPILOGUE_DEFAULT;
}

// cuBLASLt's descriptors of a GEMM; plain memory, nothing to free.
struct Descriptors {
  cublasLtMatmulDescOpaque_t operation;
  cublasLtMatrixLayoutOpaque_t a, b, d;
};

template <typename T>
absl::Status Set(Descriptors& descriptors, cublasLtMatmulDescAttributes_t attribute,
                 const T& value) {
  return CublasStatus(
      cublasLtMatmulDescSetAttribute(&descriptors.operation, attribute, &value, sizeof(value)),
      "describing a GEMM");
}

absl::Status Describe(const Gemm& gemm, bool tf32, Descriptors& out) {
  const bool fast = tf32 && gemm.input == DType::kF32;
  RETURN_IF_ERROR(CublasStatus(
      cublasLtMatmulDescInit(&out.operation,
                             fast ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F, CUDA_R_32F),
      "describing a GEMM"));
  const cublasOperation_t a = gemm.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
  const cublasOperation_t b = gemm.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
  RETURN_IF_ERROR(Set(out, CUBLASLT_MATMUL_DESC_TRANSA, a));
  RETURN_IF_ERROR(Set(out, CUBLASLT_MATMUL_DESC_TRANSB, b));
  RETURN_IF_ERROR(Set(out, CUBLASLT_MATMUL_DESC_EPILOGUE, EpilogueOf(gemm.epilogue)));
  if (gemm.bias != nullptr) {
    RETURN_IF_ERROR(Set(out, CUBLASLT_MATMUL_DESC_BIAS_POINTER, gemm.bias));
    const cudaDataType_t type = DataType(gemm.output);
    RETURN_IF_ERROR(Set(out, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, type));
  }
  if (gemm.pre != nullptr) {
    RETURN_IF_ERROR(Set(out, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, gemm.pre));
    RETURN_IF_ERROR(Set(out, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, gemm.m));
  }
  const auto layout = [](cublasLtMatrixLayoutOpaque_t& matrix, DType dtype, int64_t rows,
                         int64_t columns) {
    return CublasStatus(cublasLtMatrixLayoutInit(&matrix, DataType(dtype), rows, columns, rows),
                        "describing a matrix");
  };
  RETURN_IF_ERROR(layout(out.a, gemm.input, gemm.transpose_a ? gemm.k : gemm.m,
                         gemm.transpose_a ? gemm.m : gemm.k));
  RETURN_IF_ERROR(layout(out.b, gemm.input, gemm.transpose_b ? gemm.n : gemm.k,
                         gemm.transpose_b ? gemm.k : gemm.n));
  return layout(out.d, gemm.output, gemm.m, gemm.n);
}

absl::Status Multiply(cublasLtHandle_t handle, CudaStream& stream, const Gemm& gemm,
                      Descriptors& descriptors, const cublasLtMatmulAlgo_t& algorithm,
                      void* workspace) {
  const float alpha = 1;
  return CublasStatus(
      cublasLtMatmul(handle, &descriptors.operation, &alpha, gemm.a, &descriptors.a, gemm.b,
                     &descriptors.b, &gemm.beta, gemm.c == nullptr ? gemm.d : gemm.c,
                     &descriptors.d, gemm.d, &descriptors.d, &algorithm, workspace,
                     LinearPlans::kWorkspaceBytes, stream.handle()),
      "multiplying matrices");
}

// The candidates that cuBLASLt's heuristic ranks first, best first; empty where there are none.
absl::Status Candidates(cublasLtHandle_t handle, const Gemm& gemm, Descriptors& descriptors,
                        std::vector<cublasLtMatmulHeuristicResult_t>& out) {
  cublasLtMatmulPreferenceOpaque_t preference;
  RETURN_IF_ERROR(CublasStatus(cublasLtMatmulPreferenceInit(&preference), "choosing algorithms"));
  const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    return CublasStatus(
        cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof(value)),
        "choosing algorithms");
  };
  const auto workspace = static_cast<uint64_t>(LinearPlans::kWorkspaceBytes);
  RETURN_IF_ERROR(set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace));
  const auto a = static_cast<uint32_t>(AlignmentOf(gemm.a));
  const auto b = static_cast<uint32_t>(AlignmentOf(gemm.b));
  const auto d = static_cast<uint32_t>(AlignmentOf(gemm.d));
  RETURN_IF_ERROR(set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, a));
  RETURN_IF_ERROR(set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, b));
  const auto c = gemm.c == nullptr ? d : static_cast<uint32_t>(AlignmentOf(gemm.c));
  RETURN_IF_ERROR(set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, c));
  RETURN_IF_ERROR(set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, d));
  out.resize(kCandidates);
  int found = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
      handle, &descriptors.operation, &descriptors.a, &descriptors.b, &descriptors.d,
      &descriptors.d, &preference, kCandidates, out.data(), &found);
  out.resize(status == CUBLAS_STATUS_SUCCESS ? found : 0);
  return absl::OkStatus();
}

// The algorithm with other orders of tiles and shapes of clusters, where cuBLASLt allows them. Its
// heuristic does not try these, and they decide how much of the operands stays in the L2 cache.
std::vector<cublasLtMatmulAlgo_t> Variants(cublasLtHandle_t handle, Descriptors& descriptors,
                                           const cublasLtMatmulAlgo_t& algorithm) {
  std::vector<cublasLtMatmulAlgo_t> out;
  for (const uint32_t swizzle : {0u, 1u}) {
    for (const auto cluster : {CUBLASLT_CLUSTER_SHAPE_1x1x1, CUBLASLT_CLUSTER_SHAPE_2x1x1,
                               CUBLASLT_CLUSTER_SHAPE_1x2x1}) {
      cublasLtMatmulAlgo_t variant = algorithm;
      const auto shape = static_cast<uint16_t>(cluster);
      cublasLtMatmulHeuristicResult_t checked;
      if (cublasLtMatmulAlgoConfigSetAttribute(&variant, CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING,
                                               &swizzle,
                                               sizeof(swizzle)) != CUBLAS_STATUS_SUCCESS ||
          cublasLtMatmulAlgoConfigSetAttribute(&variant, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID,
                                               &shape, sizeof(shape)) != CUBLAS_STATUS_SUCCESS ||
          std::memcmp(&variant, &algorithm, sizeof(variant)) == 0 ||
          cublasLtMatmulAlgoCheck(handle, &descriptors.operation, &descriptors.a, &descriptors.b,
                                  &descriptors.d, &descriptors.d, &variant,
                                  &checked) != CUBLAS_STATUS_SUCCESS ||
          checked.workspaceSize > static_cast<size_t>(LinearPlans::kWorkspaceBytes)) {
        continue;
      }
      out.push_back(variant);
    }
  }
  return out;
}

// Times work on a stream.
class Timer {
 public:
  explicit Timer(CudaStream& stream) : stream_(stream) {
    made_ = cudaEventCreate(&begin_) == cudaSuccess && cudaEventCreate(&end_) == cudaSuccess;
  }
  ~Timer() {
    if (begin_ != nullptr) cudaEventDestroy(begin_);
    if (end_ != nullptr) cudaEventDestroy(end_);
  }
  // Milliseconds of one run, the mean of `runs`; infinity when a run returns an error.
  float Time(const std::function<absl::Status()>& run, int runs) {
    if (!made_) return kNever;
    cudaEventRecord(begin_, stream_.handle());
    for (int i = 0; i < runs; ++i) {
      if (!run().ok()) return kNever;
    }
    cudaEventRecord(end_, stream_.handle());
    if (cudaEventSynchronize(end_) != cudaSuccess) return kNever;
    float milliseconds = kNever;
    cudaEventElapsedTime(&milliseconds, begin_, end_);
    return milliseconds / static_cast<float>(runs);
  }
  static constexpr float kNever = std::numeric_limits<float>::infinity();

 private:
  CudaStream& stream_;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
  bool made_ = false;
};

float MedianOf(std::vector<float> times) {
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  return times[times.size() / 2];
}

std::vector<size_t> FastestFirst(const std::vector<float>& times) {
  std::vector<size_t> order(times.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t i, size_t j) { return times[i] < times[j]; });
  return order;
}

// Milliseconds of one run of each way, infinity for one that returns an error. The ways take turns,
// because a chip near its power limit slows down as it heats up, which would favour the first one.
std::vector<float> TimesOf(CudaStream& stream,
                           const std::vector<std::function<absl::Status()>>& ways,
                           float hopeless = kHopeless) {
  Timer timer(stream);
  std::vector<float> once(ways.size(), Timer::kNever);
  for (size_t i = 0; i < ways.size(); ++i) {
    // The first run loads the kernel.
    if (timer.Time(ways[i], 1) < Timer::kNever) once[i] = timer.Time(ways[i], 1);
  }
  const float fastest = *std::min_element(once.begin(), once.end());
  const bool takes_long = fastest >= kLongMilliseconds;
  const int rounds = takes_long ? kLongRounds : kRounds;
  const int runs = takes_long ? kLongRunsPerRound : kRunsPerRound;
  std::vector<std::vector<float>> times(ways.size());
  for (int r = 0; r < rounds; ++r) {
    for (size_t i = 0; i < ways.size(); ++i) {
      if (once[i] <= hopeless * fastest) times[i].push_back(timer.Time(ways[i], runs));
    }
  }
  std::vector<float> best(ways.size(), Timer::kNever);
  for (size_t i = 0; i < ways.size(); ++i) {
    if (!times[i].empty()) best[i] = MedianOf(times[i]);
  }
  return best;
}

std::string Encode(const cublasLtMatmulAlgo_t& algorithm) {
  return absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(&algorithm), sizeof(algorithm)));
}

bool Decode(const std::string& text, cublasLtMatmulAlgo_t& algorithm) {
  if (text.size() != 2 * sizeof(algorithm)) return false;
  const std::string bytes = absl::HexStringToBytes(text);
  std::memcpy(&algorithm, bytes.data(), sizeof(algorithm));
  return true;
}

}  // namespace

absl::StatusOr<std::unique_ptr<LinearPlans>> LinearPlans::Make(const std::string& device_model,
                                                               const CudaOptions& options) {
  cublasLtHandle_t handle = nullptr;
  RETURN_IF_ERROR(CublasStatus(cublasLtCreate(&handle), "starting cuBLASLt"));
  std::string file;
  if (!options.plan_cache.empty()) {
    std::string model = device_model;
    for (char& c : model) {
      if (!absl::ascii_isalnum(static_cast<unsigned char>(c))) c = '-';
    }
    file = absl::StrCat(options.plan_cache, "/cublaslt-", cublasLtGetVersion(), "-", model, ".txt");
  }
  auto plans = std::unique_ptr<LinearPlans>(new LinearPlans(handle, options, std::move(file)));
  return plans;
}

LinearPlans::LinearPlans(cublasLtHandle_t handle, const CudaOptions& options, std::string file)
    : handle_(handle),
      tf32_(options.tf32),
      file_(std::move(file)),
      on_measuring_(options.on_measuring) {}

LinearPlans::~LinearPlans() { cublasLtDestroy(handle_); }

std::string LinearPlans::KeyOf(const Gemm& gemm) const {
  const bool tf32 = tf32_ && gemm.input == DType::kF32;
  return absl::StrCat(gemm.m, "x", gemm.n, "x", gemm.k, gemm.transpose_a ? " T" : " N",
                      gemm.transpose_b ? "T " : "N ", tf32 ? "TF32" : Name(gemm.input), " ",
                      Name(gemm.output), " e", static_cast<int>(gemm.epilogue), " beta", gemm.beta,
                      " align", AlignmentOf(gemm.a), ",", AlignmentOf(gemm.b), ",",
                      AlignmentOf(gemm.d),
                      gemm.c == nullptr ? "" : absl::StrCat(" c", AlignmentOf(gemm.c)));
}

absl::Status LinearPlans::Run(CudaStream& stream, const Gemm& gemm, void* workspace) {
  Descriptors descriptors;
  RETURN_IF_ERROR(Describe(gemm, tf32_, descriptors));
  const std::string key = KeyOf(gemm), plan = Find(key);
  cublasLtMatmulAlgo_t algorithm;
  if (Decode(plan, algorithm)) {
    // A plan of a damaged file may not fit the problem; then it is measured again.
    const absl::Status status = Multiply(handle_, stream, gemm, descriptors, algorithm, workspace);
    if (status.ok()) return status;
  }
  if (stream.recording()) return absl::FailedPreconditionError("measuring while recording");
  if (on_measuring_) on_measuring_();
  ASSIGN_OR_RETURN(algorithm, Measure(stream, gemm, workspace));
  cublasLtMatmulAlgo_t kept;
  if (Decode(Keep(key, Encode(algorithm), /*unfit=*/plan), kept)) algorithm = kept;
  return Multiply(handle_, stream, gemm, descriptors, algorithm, workspace);
}

absl::StatusOr<cublasLtMatmulAlgo_t> LinearPlans::Measure(CudaStream& stream, const Gemm& gemm,
                                                          void* workspace) {
  MutexLock lock(&measuring_);
  Descriptors descriptors;
  RETURN_IF_ERROR(Describe(gemm, tf32_, descriptors));
  std::vector<cublasLtMatmulHeuristicResult_t> candidates;
  RETURN_IF_ERROR(Candidates(handle_, gemm, descriptors, candidates));
  if (candidates.empty()) {
    return absl::UnimplementedError(absl::StrCat("cuBLASLt has no algorithm for ", KeyOf(gemm)));
  }
  // Repeated runs must not add up in the caller's output.
  Gemm trial = gemm;
  std::unique_ptr<Buffer> output;
  if (gemm.beta != 0 && gemm.c == nullptr) {
    absl::StatusOr<std::unique_ptr<Buffer>> made =
        stream.cuda_device().Allocate(gemm.m * gemm.n * SizeOf(gemm.output));
    if (!made.ok()) return candidates.front().algo;  // no memory to measure with
    output = std::move(*made);
    trial.d = output->data();
  }
  // `algorithms` must outlive the result.
  const auto ways_of = [&](const std::vector<cublasLtMatmulAlgo_t>& algorithms) {
    std::vector<std::function<absl::Status()>> ways;
    for (const cublasLtMatmulAlgo_t& algorithm : algorithms) {
      ways.push_back(
          [&] { return Multiply(handle_, stream, trial, descriptors, algorithm, workspace); });
    }
    return ways;
  };
  std::vector<cublasLtMatmulAlgo_t> algorithms;
  for (const auto& candidate : candidates) algorithms.push_back(candidate.algo);
  const std::vector<size_t> order = FastestFirst(TimesOf(stream, ways_of(algorithms)));
  // The best candidates are measured again, with their variants.
  std::vector<cublasLtMatmulAlgo_t> finalists;
  for (size_t i = 0; i < std::min(kFinalists, order.size()); ++i) {
    const cublasLtMatmulAlgo_t& algorithm = algorithms[order[i]];
    finalists.push_back(algorithm);
    for (const auto& variant : Variants(handle_, descriptors, algorithm)) {
      finalists.push_back(variant);
    }
  }
  const auto ways = ways_of(finalists);
  const std::vector<float> last = Sustained(stream, ways, TimesOf(stream, ways, kHopelessVariant));
  return finalists[std::min_element(last.begin(), last.end()) - last.begin()];
}

std::vector<float> LinearPlans::Sustained(CudaStream& stream,
                                          const std::vector<std::function<absl::Status()>>& ways,
                                          std::vector<float> times) {
  std::vector<size_t> order = FastestFirst(times);
  const float fastest = times[order.front()];
  const auto close = [&](size_t i) { return times[i] <= kSustainedWithin * fastest; };
  size_t count = 1;
  while (count < std::min(kSustainedWays, order.size()) && close(order[count])) ++count;
  if (count == 1 || !std::isfinite(fastest) || fastest < kSustainedFromMilliseconds) return times;
  order.resize(count);
  const auto slice = [&](size_t i) { return std::max(kSustainedMilliseconds, times[i]); };
  float cost = slice(order.front());
  for (const size_t i : order) cost += kSustainedRounds * slice(i);
  const auto milliseconds = static_cast<int64_t>(std::ceil(cost));
  if (sustained_milliseconds_left_.fetch_sub(milliseconds) < milliseconds) {
    sustained_milliseconds_left_.fetch_add(milliseconds);
    return times;
  }
  Timer timer(stream);
  const auto run = [&](size_t i) {
    return timer.Time(ways[i], static_cast<int>(slice(i) / times[i]));
  };
  run(order.front());  // brings the device to its power limit
  std::vector<std::vector<float>> sustained(count);
  for (int round = 0; round < kSustainedRounds; ++round) {
    for (size_t turn = 0; turn < count; ++turn) {
      const size_t next = (turn + round) % count;
      sustained[next].push_back(run(order[next]));
    }
  }
  std::fill(times.begin(), times.end(), Timer::kNever);
  for (size_t i = 0; i < count; ++i) times[order[i]] = MedianOf(sustained[i]);
  return times;
}

absl::Status LinearPlans::RunFastest(CudaStream& stream, const std::string& key,
                                     const std::vector<Way>& ways) {
  if (ways.size() == 1) return ways.front()(/*trial=*/false);
  const std::string name = absl::StrCat("way of ", ways.size(), " ", key);
  const std::string plan = Find(name);
  uint64_t fastest = 0;
  if (absl::SimpleAtoi(plan, &fastest) && fastest < ways.size()) {
    return ways[fastest](/*trial=*/false);
  }
  // While recording nothing can be measured; a GEMM without a plan then fails the recording.
  if (stream.recording()) return ways.front()(/*trial=*/false);
  if (on_measuring_) on_measuring_();
  std::vector<std::function<absl::Status()>> trials;
  for (const Way& way : ways) {
    trials.push_back([&way] { return way(/*trial=*/true); });
  }
  // Each way measures its own algorithms in its first run.
  const std::vector<float> times = Sustained(stream, trials, TimesOf(stream, trials));
  fastest = std::min_element(times.begin(), times.end()) - times.begin();
  if (std::isfinite(times[fastest])) {
    uint64_t kept = 0;
    if (absl::SimpleAtoi(Keep(name, absl::StrCat(fastest), /*unfit=*/plan), &kept) &&
        kept < ways.size()) {
      fastest = kept;
    }
  } else {  // no memory for trials; the next process may have it
    MutexLock lock(&mutex_);
    plans_[name] = absl::StrCat(fastest);
  }
  return ways[fastest](/*trial=*/false);
}

std::string LinearPlans::Find(const std::string& key) {
  MutexLock lock(&mutex_);
  auto found = plans_.find(key);
  if (found == plans_.end()) {
    Load();
    found = plans_.find(key);
  }
  return found == plans_.end() ? "" : found->second;
}

void LinearPlans::Load() {
  if (file_.empty()) return;
  std::ifstream in(file_, std::ios::binary);
  in.seekg(loaded_bytes_);
  // A last line without an end is still being written.
  for (std::string line; std::getline(in, line) && !in.eof();) {
    loaded_bytes_ += static_cast<int64_t>(line.size()) + 1;
    const size_t split = line.rfind(" = ");
    if (split != std::string::npos) plans_.emplace(line.substr(0, split), line.substr(split + 3));
  }
}

std::string LinearPlans::Keep(const std::string& key, const std::string& value,
                              const std::string& unfit) {
  if (!file_.empty()) {
    // One write in append mode, so that lines of several processes do not mix. If it fails, the
    // next process measures again.
    if (std::FILE* out = std::fopen(file_.c_str(), "ae"); out != nullptr) {
      const std::string line = absl::StrCat(key, " = ", value, "\n");
      std::fwrite(line.data(), 1, line.size(), out);
      std::fclose(out);
    }
  }
  MutexLock lock(&mutex_);
  Load();
  std::string& plan = plans_.emplace(key, value).first->second;
  if (plan == unfit) plan = value;
  return plan;
}

}  // namespace muster::kernels::cuda
