// Ranks on GPUs, through NCCL (https://docs.nvidia.com/deeplearning/nccl) and, on memory that they
// share, through copy engines (peer_group.h). nccl_world.h says how calls are watched and ended.
// Calls on host streams and barriers go through TCP connections of the same ranks.
#include <nccl.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "kernels/device/cuda_status.h"
#include "kernels/device/device_cuda.h"
#include "parallel/comm/arguments.h"
#include "parallel/comm/communicator.h"
#include "parallel/comm/gather_texts.h"
#include "parallel/comm/nccl_library.h"
#include "parallel/comm/nccl_peers.h"
#include "parallel/comm/nccl_world.h"
#include "parallel/comm/peer_group.h"
#include "parallel/comm/peer_memory.h"
#include "parallel/comm/peer_regions.h"
#include "parallel/comm/transport_choice.h"
#include "parallel/comm/transport_timing.h"

namespace muster::parallel {
namespace {

using kernels::DType;
using kernels::Stream;
using kernels::Tensor;

constexpr absl::Duration kHostTimeoutMin = absl::Seconds(30);

ncclDataType_t NcclType(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return ncclFloat32;
    case DType::kBF16:
      return ncclBfloat16;
    case DType::kF16:
      return ncclFloat16;
    case DType::kI32:
      return ncclInt32;
    case DType::kI64:
      return ncclInt64;
    case DType::kU8:
      return ncclUint8;
    case DType::kU16:
      CHECK(false) << "NCCL has no 16-bit integers";
  }
  return ncclUint8;
}

ncclRedOp_t NcclOp(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return ncclSum;
    case ReduceOp::kMax:
      return ncclMax;
    case ReduceOp::kMin:
      return ncclMin;
  }
  return ncclSum;
}

bool OnHost(Stream& stream) { return stream.device().kind() == kernels::DeviceKind::kCpu; }

char* At(const Tensor& tensor, int64_t element) {
  return static_cast<char*>(tensor.data()) + element * SizeOf(tensor.dtype());
}

class NcclCommunicator;

// What the groups of one world share.
struct Shared {
  explicit Shared(kernels::cuda::CudaDevice& device)
      : regions(std::make_shared<PeerRegions>(device)) {}
  const std::shared_ptr<PeerRegions> regions;
  // The groups whose ranks are on one host, in the order in which they were made, which is the same
  // on all ranks.
  std::vector<NcclCommunicator*> groups;
};

class NcclCommunicator : public Communicator, public PeerMemory {
 public:
  NcclCommunicator(std::shared_ptr<NcclWorld> world, std::shared_ptr<Shared> shared,
                   std::unique_ptr<Communicator> host)
      : world_(std::move(world)),
        nccl_(world_->nccl()),
        shared_(std::move(shared)),
        host_(std::move(host)) {
    group_.name = host_->name();
    group_.rank = host_->rank();
    group_.size = host_->size();
    host_bytes_before_ = host_->bytes_sent();
  }
  ~NcclCommunicator() override {
    std::vector<NcclCommunicator*>& groups = shared_->groups;
    groups.erase(std::remove(groups.begin(), groups.end(), this), groups.end());
    world_->Remove(group_);
  }

  // Makes the world's group.
  absl::Status Initialize(const ncclUniqueId& id) {
    RETURN_IF_ERROR(world_->Add(group_, nullptr, absl::StrCat("group ", name(), ", rank ", rank()),
                                [nccl = nccl_, settings = MakeSettings(), size = size(),
                                 rank = rank(), id](ncclComm_t* comm) {
                                  ncclConfig_t config = settings.Config();
                                  return nccl.CommInitRankConfig(comm, size, id, rank, &config);
                                }));
    world_rank_ = rank();
    return ConnectPeers();
  }

  int rank() const override { return group_.rank; }
  int size() const override { return group_.size; }
  const std::string& name() const override { return group_.name; }
  int64_t bytes_sent() const override {
    return bytes_sent_ + host_->bytes_sent() - host_bytes_before_;
  }

  void AllReduce(Stream& stream, Tensor data, ReduceOp op) override {
    if (OnHost(stream)) return host_->AllReduce(stream, data, op);
    CHECK(data.contiguous());
    const int64_t sent = Sent(2 * data.bytes() * (size() - 1) / size());
    if (SumsByPeers(data, op)) {
      return ByPeers(stream, "all-reduce", data, sent,
                     [&] { return peers_->AllReduce(stream, data); });
    }
    Enqueue(stream, "all-reduce", data, [&](ncclComm_t comm, cudaStream_t handle) {
      return nccl_.AllReduce(data.data(), data.data(), Count(data), NcclType(data.dtype()),
                             NcclOp(op), comm, handle);
    });
  }
  void ReduceScatter(Stream& stream, Tensor data, ReduceOp op) override {
    if (OnHost(stream)) return host_->ReduceScatter(stream, data, op);
    const int64_t part = EqualPart(data, size());
    SumParts(stream, data, Tensor(At(data, part * rank()), data.dtype(), {part}), op);
  }
  void ReduceScatterBeforeGather(Stream& stream, Tensor data, ReduceOp op) override {
    if (OnHost(stream) || !SumsByPeers(data, op)) {
      return ReduceScatter(stream, data, op);
    }
    const int64_t part = EqualPart(data, size());
    const int64_t sent = Sent(data.bytes() * (size() - 1) / size());
    ByPeers(stream, "reduce-scatter", data, sent, [&] {
      return peers_->ReduceScatter(
          stream, data, Tensor(At(data, part * rank()), data.dtype(), {part}), /*open=*/true);
    });
  }
  void ReduceScatterTo(Stream& stream, Tensor data, Tensor sum, ReduceOp op) override {
    if (OnHost(stream)) return host_->ReduceScatterTo(stream, data, sum, op);
    CHECK(sum.contiguous() && sum.elements() == EqualPart(data, size()));
    SumParts(stream, data, sum, op);
  }
  void AllGather(Stream& stream, Tensor data) override {
    if (OnHost(stream)) return host_->AllGather(stream, data);
    const int64_t part = EqualPart(data, size());
    const int64_t sent = Sent(data.bytes() * (size() - 1) / size());
    if (GathersByPeers(data.bytes()) && peers_->Covers(data)) {
      return ByPeers(stream, "all-gather", data, sent,
                     [&] { return peers_->AllGather(stream, data); });
    }
    Enqueue(stream, "all-gather", data, [&](ncclComm_t comm, cudaStream_t handle) {
      return nccl_.AllGather(At(data, part * rank()), data.data(), static_cast<size_t>(part),
                             NcclType(data.dtype()), comm, handle);
    });
  }
  void AllGatherFrom(Stream& stream, Tensor in, Tensor out) override {
    if (OnHost(stream)) return host_->AllGatherFrom(stream, in, out);
    CHECK(in.contiguous() && in.dtype() == out.dtype() && EqualPart(out, size()) == in.elements());
    if (size() == 1) return Communicator::AllGatherFrom(stream, in, out);
    const int64_t sent = Sent(in.bytes() * (size() - 1));
    if (GathersByPeers(out.bytes()) && peers_->CoversPart(in)) {
      return ByPeers(stream, "all-gather", out, sent,
                     [&] { return peers_->AllGatherFrom(stream, in, out); });
    }
    Enqueue(stream, "all-gather", out, [&](ncclComm_t comm, cudaStream_t handle) {
      return nccl_.AllGather(in.data(), out.data(), Count(in), NcclType(in.dtype()), comm, handle);
    });
  }
  void Broadcast(Stream& stream, Tensor data, int root) override {
    if (OnHost(stream)) return host_->Broadcast(stream, data, root);
    CheckBroadcast(data, root, size());
    // A chain that starts at the root: all but its last rank pass everything on.
    if ((rank() - root + size()) % size() != size() - 1) Sent(data.bytes());
    Enqueue(stream, "broadcast", data, [&](ncclComm_t comm, cudaStream_t handle) {
      return nccl_.Broadcast(data.data(), data.data(), Count(data), NcclType(data.dtype()), root,
                             comm, handle);
    });
  }
  void AllToAll(Stream& stream, Tensor in, Tensor out) override {
    if (OnHost(stream)) return host_->AllToAll(stream, in, out);
    const int64_t part = CheckAllToAll(in, out, size());
    const int64_t sent = Sent(in.bytes() * (size() - 1) / size());
    if (peers_ != nullptr && peers_->Covers(in)) {
      return ByPeers(stream, "all-to-all", in, sent,
                     [&] { return peers_->AllToAll(stream, in, out); });
    }
    std::vector<Transfer> transfers;
    for (int peer = 0; peer < size(); ++peer) {
      transfers.push_back({At(in, part * peer), in.dtype(), part, peer, /*sends=*/true});
      transfers.push_back({At(out, part * peer), out.dtype(), part, peer, /*sends=*/false});
    }
    Exchange(stream, "all-to-all", in.dtype(), in.elements(), transfers);
  }
  void AllToAllBatch(Stream& stream, const std::vector<AllToAllItem>& items) override {
    if (OnHost(stream)) return host_->AllToAllBatch(stream, items);
    if (size() == 1) return Communicator::AllToAllBatch(stream, items);
    const int64_t elements = CheckAllToAllBatch(items, size());
    CHECK(!grouping_);
    int64_t sent = 0;
    for (const AllToAllItem& item : items) {
      sent += Sent(item.in.bytes() * (size() - 1) / size());
    }
    constexpr char kOperation[] = "batch of all-to-alls";
    const Tensor& first = items[0].in;
    if (peers_ != nullptr && peers_->Covers(items)) {
      return ByPeers(stream, kOperation, Tensor(first.data(), first.dtype(), {elements}), sent,
                     [&] { return peers_->AllToAllBatch(stream, items); });
    }
    std::vector<Transfer> transfers;
    for (const AllToAllItem& item : items) {
      for (int peer = 0; peer < size(); ++peer) {
        const Tensor sent = item.PartFor(peer, size()), received = item.PartFrom(peer, size());
        transfers.push_back({sent.data(), sent.dtype(), sent.elements(), peer, /*sends=*/true});
        transfers.push_back(
            {received.data(), received.dtype(), received.elements(), peer, /*sends=*/false});
      }
    }
    Exchange(stream, kOperation, first.dtype(), elements, transfers);
  }

  void AllGatherInSteps(Stream& stream, Tensor in, Tensor out,
                        absl::FunctionRef<void(int from)> arrived) override {
    if (OnHost(stream) || peers_ == nullptr || !peers_->Covers(in)) {
      return Communicator::AllGatherInSteps(stream, in, out, arrived);
    }
    CHECK(!grouping_ && in.contiguous() && EqualPart(out, size()) == in.elements());
    const int64_t sent = Sent(in.bytes() * (size() - 1));
    ByPeers(stream, "all-gather in steps", out, sent,
            [&] { return peers_->AllGatherInSteps(stream, in, out, arrived); });
  }
  void AllToAllInSteps(Stream& stream, Tensor in, Tensor out,
                       absl::FunctionRef<void(int to)> before) override {
    if (OnHost(stream) || peers_ == nullptr || !peers_->Covers(in)) {
      return Communicator::AllToAllInSteps(stream, in, out, before);
    }
    CheckAllToAll(in, out, size());
    CHECK(!grouping_);
    const int64_t sent = Sent(in.bytes() * (size() - 1) / size());
    ByPeers(stream, "all-to-all in steps", in, sent,
            [&] { return peers_->AllToAllInSteps(stream, in, out, before); });
  }

  void Send(Stream& stream, Tensor data, int to) override {
    if (OnHost(stream)) return host_->Send(stream, data, to);
    CheckPeer(data, to, rank(), size());
    Sent(data.bytes());
    transfers_.push_back({data.data(), data.dtype(), data.elements(), to, /*sends=*/true});
    if (!grouping_) FlushTransfers(stream);
  }
  void Receive(Stream& stream, Tensor data, int from) override {
    if (OnHost(stream)) return host_->Receive(stream, data, from);
    CheckPeer(data, from, rank(), size());
    transfers_.push_back({data.data(), data.dtype(), data.elements(), from, /*sends=*/false});
    if (!grouping_) FlushTransfers(stream);
  }
  void GroupBegin() override {
    CHECK(!grouping_) << "GroupBegin twice";
    grouping_ = true;
    host_->GroupBegin();
  }
  void GroupEnd(Stream& stream) override {
    CHECK(grouping_) << "GroupEnd without GroupBegin";
    grouping_ = false;
    if (OnHost(stream)) {
      CHECK(transfers_.empty()) << "a group of transfers on two kinds of streams";
      return host_->GroupEnd(stream);
    }
    host_->GroupEnd(*host_stream());
    FlushTransfers(stream);
  }

  void Rotate(Stream& stream, Tensor in, Tensor out, int by) override {
    if (OnHost(stream) || peers_ == nullptr || !peers_->Covers(in)) {
      return Communicator::Rotate(stream, in, out, by);
    }
    CHECK(!grouping_ && in.contiguous() && out.contiguous() && in.bytes() == out.bytes());
    const int64_t sent = Sent(in.bytes());
    ByPeers(stream, "rotation", in, sent, [&] { return peers_->Rotate(stream, in, out, by); });
  }

  absl::Status Barrier() override {
    RETURN_IF_ERROR(world_->ended());
    return host_->Barrier();
  }
  absl::StatusOr<std::unique_ptr<Communicator>> Split(int color, int key,
                                                      const std::string& name) override;
  void Abort(absl::Status why) override {
    world_->End(absl::AbortedError(absl::StrCat("aborted: ", why.message())));
  }

  // ---- PeerMemory
  PeerMemory* peer_memory() override { return size() > 1 ? this : nullptr; }
  absl::StatusOr<std::unique_ptr<SharedMemory>> Share(const std::vector<Tensor>& memory,
                                                      const ShareOptions& options) override;
  void UseForSums(const Tensor& memory) override {
    if (peers_ != nullptr) peers_->UseForSums(memory);
  }
  void WaitInWarp(bool in_warp) override {
    if (peers_ != nullptr) peers_->WaitInWarp(in_warp);
  }
  int64_t bytes_by_copy_engines() const override { return bytes_by_peers_; }

 private:
  struct Transfer {
    void* data = nullptr;
    DType dtype = DType::kU8;
    int64_t elements = 0;
    int peer = 0;
    bool sends = false;
  };

  struct Settings {
    std::string name;
    int thread_blocks_max = 0;

    ncclConfig_t Config() const {
      ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
      config.blocking = 1;
      config.commName = name.c_str();
      if (thread_blocks_max > 0) config.maxCTAs = thread_blocks_max;
      return config;
    }
  };

  Settings MakeSettings() const { return {group_.name, world_->options().thread_blocks_max}; }
  static size_t Count(const Tensor& data) { return static_cast<size_t>(data.elements()); }
  int64_t Sent(int64_t bytes) {
    bytes_sent_.fetch_add(bytes, std::memory_order_relaxed);
    return bytes;
  }

  bool SumsByPeers(const Tensor& data, ReduceOp op) const {
    return peers_ != nullptr && forced_ != Transport::kNccl && peers_->CoversSum(data, op);
  }
  bool GathersByPeers(int64_t bytes) const {
    if (peers_ == nullptr) return false;
    return forced_.value_or(choice_.AllGather(bytes)) == Transport::kCopyEngines;
  }

  // Sums every rank's part rank() of `data`.
  void SumParts(Stream& stream, const Tensor& data, const Tensor& sum, ReduceOp op) {
    const int64_t sent = Sent(data.bytes() * (size() - 1) / size());
    if (SumsByPeers(data, op)) {
      return ByPeers(stream, "reduce-scatter", data, sent,
                     [&] { return peers_->ReduceScatter(stream, data, sum); });
    }
    Enqueue(stream, "reduce-scatter", data, [&](ncclComm_t comm, cudaStream_t handle) {
      return nccl_.ReduceScatter(data.data(), sum.data(), static_cast<size_t>(sum.elements()),
                                 NcclType(data.dtype()), NcclOp(op), comm, handle);
    });
  }
  template <typename Issue>
  void Enqueue(Stream& stream, const char* operation, const Tensor& data, const Issue& issue) {
    if (size() == 1 || data.elements() == 0) return;
    world_->Call(group_, stream, {operation, data.dtype(), data.elements(), calls_++},
                 [&](ncclComm_t comm, cudaStream_t handle) -> absl::Status {
                   if (peers_ != nullptr) RETURN_IF_ERROR(peers_->Close(stream));
                   return nccl_.Check(issue(comm, handle), nullptr, "starting the call");
                 });
  }
  template <typename Issue>
  void ByPeers(Stream& stream, const char* operation, const Tensor& data, int64_t sent,
               const Issue& issue) {
    bytes_by_peers_.fetch_add(sent, std::memory_order_relaxed);
    world_->Call(group_, stream, {operation, data.dtype(), data.elements(), calls_++},
                 [&](ncclComm_t, cudaStream_t) -> absl::Status { return issue(); });
  }
  // Makes what calls by copy engines need; where ranks are on several hosts, all calls go through
  // NCCL. A collective.
  absl::Status ConnectPeers();
  // Times both transports of this group and chooses. A collective.
  absl::Status ChooseTransport(const ShareOptions& options);

  void Exchange(Stream& stream, const char* operation, DType dtype, int64_t elements,
                const std::vector<Transfer>& transfers) {
    if (elements == 0) return;
    const auto issue = [&](ncclComm_t comm, cudaStream_t handle) -> absl::Status {
      if (peers_ != nullptr) RETURN_IF_ERROR(peers_->Close(stream));
      ncclResult_t result = nccl_.GroupStart();
      for (const Transfer& transfer : transfers) {
        if (result != ncclSuccess && result != ncclInProgress) break;
        const auto count = static_cast<size_t>(transfer.elements);
        const ncclDataType_t type = NcclType(transfer.dtype);
        result = transfer.sends
                     ? nccl_.Send(transfer.data, count, type, transfer.peer, comm, handle)
                     : nccl_.Recv(transfer.data, count, type, transfer.peer, comm, handle);
      }
      const ncclResult_t ended = nccl_.GroupEnd();
      return nccl_.Check(result == ncclSuccess || result == ncclInProgress ? ended : result,
                         nullptr, "starting the call");
    };
    world_->Call(group_, stream, {operation, dtype, elements, calls_++}, issue);
  }
  void FlushTransfers(Stream& stream) {
    const std::vector<Transfer> transfers = std::exchange(transfers_, {});
    if (transfers.empty()) return;
    int64_t elements = 0;
    for (const Transfer& transfer : transfers) elements += transfer.elements;
    Exchange(stream,
             transfers.size() > 1 ? "group of sends and receives"
             : transfers[0].sends ? "send"
                                  : "receive",
             transfers[0].dtype, elements, transfers);
  }
  // For ending the host side of an empty group.
  Stream* host_stream() {
    if (host_stream_ == nullptr) {
      host_device_ = kernels::MakeCpuDevice(1);
      absl::StatusOr<std::unique_ptr<Stream>> made = host_device_->MakeStream();
      CHECK_OK(made);
      host_stream_ = *std::move(made);
    }
    return host_stream_.get();
  }

  const std::shared_ptr<NcclWorld> world_;
  const NcclLibrary& nccl_;
  const std::shared_ptr<Shared> shared_;
  const std::unique_ptr<Communicator> host_;  // the same ranks on their hosts
  int world_rank_ = 0;
  std::unique_ptr<PeerGroup> peers_;  // null: the ranks are on several hosts
  TransportChoice choice_;
  std::optional<Transport> forced_;  // while transports are timed
  NcclGroup group_;
  int64_t host_bytes_before_ = 0;  // what making the group has sent
  uint64_t calls_ = 0;
  std::atomic<int64_t> bytes_sent_{0}, bytes_by_peers_{0};
  bool grouping_ = false;
  std::vector<Transfer> transfers_;
  std::unique_ptr<kernels::Device> host_device_;
  std::unique_ptr<Stream> host_stream_;
};

absl::StatusOr<std::unique_ptr<Communicator>> NcclCommunicator::Split(int color, int key,
                                                                      const std::string& name) {
  CHECK_GE(color, 0);
  RETURN_IF_ERROR(world_->ended());
  // The hosts agree first: who is in which group, and that everyone has come.
  ASSIGN_OR_RETURN(std::unique_ptr<Communicator> host, host_->Split(color, key, name));
  auto child = std::make_unique<NcclCommunicator>(world_, shared_, std::move(host));
  RETURN_IF_ERROR(world_->Add(child->group_, &group_,
                              absl::StrCat("split of ", group_.name, " into ", name),
                              [nccl = nccl_, settings = child->MakeSettings(), parent = group_.comm,
                               color, rank = child->rank()](ncclComm_t* comm) {
                                ncclConfig_t config = settings.Config();
                                return nccl.CommSplit(parent, color, rank, comm, &config);
                              }));
  child->world_rank_ = world_rank_;
  RETURN_IF_ERROR(child->ConnectPeers());
  return child;
}

absl::Status NcclCommunicator::ConnectPeers() {
  if (size() == 1) return absl::OkStatus();
  ASSIGN_OR_RETURN(const std::vector<std::string> texts,
                   GatherTexts(*host_, absl::StrCat(world_rank_)));
  std::vector<int> world_ranks;
  for (const std::string& text : texts) {
    int world_rank = 0;
    CHECK(absl::SimpleAtoi(text, &world_rank)) << text;
    world_ranks.push_back(world_rank);
  }
  absl::StatusOr<std::unique_ptr<PeerCounters>> counters =
      PeerCounters::Make(*host_, world_->device());
  host_bytes_before_ = host_->bytes_sent();
  // Ranks on several hosts are no error.
  if (absl::IsUnavailable(counters.status())) return world_->ended();
  RETURN_IF_ERROR(counters.status());
  peers_ = std::make_unique<PeerGroup>(shared_->regions, *std::move(counters),
                                       std::move(world_ranks), rank());
  world_->SetPeers(group_, peers_.get());
  shared_->groups.push_back(this);
  return absl::OkStatus();
}

absl::Status NcclCommunicator::ChooseTransport(const ShareOptions& options) {
  choice_ = {};
  if (options.least_bytes < kCopyEnginesLeastBytes) return absl::OkStatus();
  const int64_t sent = bytes_sent(), by_peers = bytes_by_peers_;
  const Tensor sums = peers_->sums();
  const absl::StatusOr<TransportTimes> times = TimeTransports(
      {.group = *this,
       .host = *host_,
       .device = world_->device(),
       .shared = shared_->regions->Largest(peers_->world_ranks()),
       .least_bytes = options.least_bytes,
       .force = [this](Transport transport) { forced_ = transport; },
       .use_for_sums = [this](const Tensor& memory) { peers_->UseForSums(memory); }});
  forced_.reset();
  peers_->UseForSums(sums);
  bytes_sent_ -= bytes_sent() - sent;
  bytes_by_peers_ = by_peers;
  RETURN_IF_ERROR(
      Annotate(times.status(), absl::StrCat("timing the transports of group ", name())));
  choice_ = ChooseTransports(*times);
  if (world_->options().on_transports) {
    world_->options().on_transports(absl::StrCat("transports of group ", name(), ", ", size(),
                                                 " ranks: ", Describe(choice_, *times)));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<SharedMemory>> NcclCommunicator::Share(
    const std::vector<Tensor>& memory, const ShareOptions& options) {
  if (size() == 1) return nullptr;
  RETURN_IF_ERROR(shared_->regions->Share(*host_, memory, options));
  for (NcclCommunicator* group : shared_->groups) {
    if (absl::Status chosen = group->ChooseTransport(options); !chosen.ok()) {
      shared_->regions->Close();
      return chosen;
    }
  }

  class SharedRegions : public SharedMemory {
   public:
    explicit SharedRegions(NcclCommunicator& world) : world_(world) {}
    ~SharedRegions() override {
      world_.shared_->regions->Close();
      // A peer must have closed what it frees. One that is gone does not matter any more.
      if (!abandoned_) world_.Barrier().IgnoreError();
    }
    void Abandon() override { abandoned_ = true; }

   private:
    NcclCommunicator& world_;
    bool abandoned_ = false;
  };
  return std::make_unique<SharedRegions>(*this);
}

// The same on every rank: OK, or why the ranks cannot make NCCL communicators with each other.
absl::Status Agree(Communicator& host, const kernels::cuda::CudaDevice& device,
                   const absl::StatusOr<NcclLibrary>& nccl) {
  NcclPeer self;
  self.device = device.name();
  self.uuid = device.uuid();
  if (nccl.ok()) {
    self.version = nccl->VersionText();
  } else {
    self.error = std::string(nccl.status().message());
  }
  ASSIGN_OR_RETURN(const std::vector<std::string> texts, GatherTexts(host, self.ToText()));
  std::vector<NcclPeer> peers;
  for (const std::string& text : texts) peers.push_back(NcclPeer::FromText(text));
  return CheckNcclPeers(peers);
}

absl::StatusOr<ncclUniqueId> ShareUniqueId(KeyValueStore& store, const NcclLibrary& nccl, int rank,
                                           absl::Duration timeout) {
  constexpr char kKey[] = "comm/world/nccl";
  ncclUniqueId id;
  if (rank == 0) {
    RETURN_IF_ERROR(nccl.Check(nccl.GetUniqueId(&id), nullptr, "making the unique id"));
    RETURN_IF_ERROR(store.Put(kKey, std::string(id.internal, sizeof(id.internal))));
    return id;
  }
  ASSIGN_OR_RETURN(const std::string bytes, store.Get(kKey, timeout));
  if (bytes.size() != sizeof(id.internal)) {
    return absl::InternalError(absl::StrCat(kKey, " has ", bytes.size(), " bytes"));
  }
  bytes.copy(id.internal, sizeof(id.internal));
  return id;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Communicator>> MakeNcclCommunicator(KeyValueStore& store, int rank,
                                                                   int size,
                                                                   kernels::Device& device,
                                                                   const NcclOptions& options) {
  CHECK(device.kind() == kernels::DeviceKind::kCuda) << device.name();
  auto& cuda = static_cast<kernels::cuda::CudaDevice&>(device);
  TcpOptions host_options = options.host;
  host_options.operation_timeout = std::max(options.operation_timeout, kHostTimeoutMin);
  ASSIGN_OR_RETURN(std::unique_ptr<Communicator> host,
                   MakeTcpCommunicator(store, rank, size, host_options));
  const absl::StatusOr<NcclLibrary> nccl = NcclLibrary::Load();
  RETURN_IF_ERROR(Agree(*host, cuda, nccl));
  ASSIGN_OR_RETURN(const ncclUniqueId id,
                   ShareUniqueId(store, *nccl, rank, options.connect_timeout));
  ASSIGN_OR_RETURN(std::unique_ptr<Communicator> liveness, host->Split(0, rank, "liveness"));
  auto world = std::make_shared<NcclWorld>(*nccl, cuda, options, std::move(liveness));
  auto communicator = std::make_unique<NcclCommunicator>(
      std::move(world), std::make_shared<Shared>(cuda), std::move(host));
  RETURN_IF_ERROR(communicator->Initialize(id));
  return communicator;
}

}  // namespace muster::parallel
