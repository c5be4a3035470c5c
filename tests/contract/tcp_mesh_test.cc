// What the TCP mesh promises beyond a communicator: links outlive their connections, and an error
// names two ranks that do not reach each other. Silence, loss, delay and hosts that are gone need a
// real network: tests/e2e/hosts.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/mutex.h"
#include "base/rng.h"
#include "base/status_macros.h"
#include "kernels/device/device.h"
#include "parallel/comm/communicator.h"
#include "parallel/comm/peer_failure.h"
#include "parallel/comm/tcp_mesh.h"
#include "parallel/comm/tcp_socket.h"
#include "tests/support/key_value_store.h"
#include "tests/support/seed.h"
#include "tests/support/status_matchers.h"

namespace muster::parallel {
namespace {

using ::muster::testing::MemoryKeyValueStore;
using ::muster::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

using Meshes = std::vector<std::unique_ptr<TcpMesh>>;

Meshes Connect(MemoryKeyValueStore& store, int size, const TcpOptions& options) {
  Meshes meshes(static_cast<size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      auto mesh = TcpMesh::Connect(store, rank, size, options);
      EXPECT_OK(mesh);
      if (mesh.ok()) meshes[static_cast<size_t>(rank)] = *std::move(mesh);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return meshes;
}

// Where a rank listens, from its record in the store: "address\nport\n...".
SocketAddress ListenerOf(MemoryKeyValueStore& store, int rank) {
  const auto text = store.Get(absl::StrCat("comm/world/", rank), absl::Seconds(10));
  CHECK_OK(text);
  const std::vector<std::string> lines = absl::StrSplit(*text, '\n');
  const auto address = SocketAddress::Parse(lines.at(0), std::stoi(lines.at(1)));
  CHECK_OK(address);
  return *address;
}

// A loopback port that this process listens on until the result is destroyed.
Socket TakenPort() {
  auto socket = Listen("127.0.0.1", {}, 0);
  CHECK_OK(socket);
  return *std::move(socket);
}

// Breaks one connection of this process, chosen by `rng`.
void BreakAConnection(Rng& rng) {
  std::vector<int> connections;
  rlimit limit = {};
  getrlimit(RLIMIT_NOFILE, &limit);
  for (int fd = 3; fd < static_cast<int>(std::min<rlim_t>(limit.rlim_cur, 4096)); ++fd) {
    sockaddr_storage peer;
    socklen_t size = sizeof(peer);
    if (getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &size) == 0 &&
        peer.ss_family == AF_INET) {
      connections.push_back(fd);
    }
  }
  if (connections.empty()) return;
  shutdown(connections[rng.Below(connections.size())], SHUT_RDWR);
}

TEST(TcpMesh, ConnectionsThatBreak_LoseAndRepeatNoMessage) {
  constexpr int kRanks = 3;
  constexpr int kRounds = 200;
  Rng rng(testing::TestSeed());
  MemoryKeyValueStore store;
  std::atomic<int> resumed = 0;
  TcpOptions options;
  options.on_event = [&resumed](const std::string&) { ++resumed; };
  Meshes meshes = Connect(store, kRanks, options);
  std::atomic<int> running = kRanks;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      TcpMesh& mesh = *meshes[static_cast<size_t>(rank)];
      // Small messages, which are sent before they are asked for, and large ones, in one round.
      const std::vector<size_t> sizes = {1, 700, 16 << 10, 300'000, 2'000'000};
      for (int round = 0; round < kRounds; ++round) {
        const auto value = [round](int from, size_t i) {
          return static_cast<char>(from * 31 + round * 7 + static_cast<int>(i % 101));
        };
        std::deque<std::vector<char>> memory;
        std::deque<TcpMesh::Transfer> transfers;
        std::vector<std::pair<const std::vector<char>*, int>> received;
        const size_t bytes = sizes[static_cast<size_t>(round) % sizes.size()];
        for (int peer = 0; peer < kRanks; ++peer) {
          if (peer == rank) continue;
          for (const bool sends : {true, false}) {
            std::vector<char>& data = memory.emplace_back(bytes);
            if (sends) {
              for (size_t i = 0; i < bytes; ++i) data[i] = value(rank, i);
            } else {
              received.emplace_back(&data, peer);
            }
            mesh.Post(transfers.emplace_back(peer, sends, 5, data.data(), bytes));
          }
        }
        for (TcpMesh::Transfer& transfer : transfers) {
          ASSERT_OK(mesh.Wait(transfer, absl::Now() + absl::Seconds(60)));
          mesh.Withdraw(transfer);
        }
        for (const auto& [data, from] : received) {
          for (size_t i = 0; i < bytes; i += 997) ASSERT_EQ((*data)[i], value(from, i)) << round;
          ASSERT_EQ(data->back(), value(from, bytes - 1)) << round;
        }
      }
      --running;
    });
  }
  while (running > 0) {
    BreakAConnection(rng);
    const int before = resumed;
    while (running > 0 && resumed == before) std::this_thread::yield();
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(resumed, 0);
}

// An acknowledgement may arrive before the system call that sent the message's last byte has
// returned. If it were dropped then, only the next ping would repeat it, a second later.
TEST(TcpMesh, Acknowledgements_AreNotForgotten) {
  MemoryKeyValueStore store;
  Meshes meshes = Connect(store, 2, {});
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      TcpMesh& mesh = *meshes[static_cast<size_t>(rank)];
      std::vector<char> out(40'000), in(40'000);
      for (int round = 0; round < 3000; ++round) {
        TcpMesh::Transfer receive(1 - rank, false, 1, in.data(), in.size());
        TcpMesh::Transfer send(1 - rank, true, 1, out.data(), out.size());
        mesh.Post(receive);
        mesh.Post(send);
        for (TcpMesh::Transfer* transfer : {&receive, &send}) {
          const absl::Status status = mesh.Wait(*transfer, absl::Now() + absl::Milliseconds(900));
          EXPECT_OK(status) << "round " << round;
          if (!status.ok()) (void)mesh.End(status);
          mesh.Withdraw(*transfer);
          if (!status.ok()) return;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(TcpMesh, ConnectionsOfUnknownPeers_AreClosedAndDisturbNobody) {
  MemoryKeyValueStore store;
  Meshes meshes = Connect(store, 2, {});
  std::vector<Socket> unknown;
  for (const std::string& text : {std::string("GET / HTTP/1.1\r\n\r\n"), std::string(5000, '\xff'),
                                  std::string("MUSTER01") + std::string(60, '\0')}) {
    auto socket = Dial("127.0.0.1", ListenerOf(store, 0));
    ASSERT_OK(socket);
    // Blocking, so that a read waits for the connection to be closed.
    fcntl(socket->fd(), F_SETFL, 0);
    ASSERT_GT(send(socket->fd(), text.data(), text.size(), MSG_NOSIGNAL), 0);
    char byte = 0;
    if (text.size() >= 64) {
      EXPECT_LE(recv(socket->fd(), &byte, 1, 0), 0);
    }
    unknown.push_back(*std::move(socket));
  }
  char data = 'x', got = 0;
  TcpMesh::Transfer send(1, true, 1, &data, 1), receive(0, false, 1, &got, 1);
  meshes[0]->Post(send);
  meshes[1]->Post(receive);
  EXPECT_OK(meshes[1]->Wait(receive, absl::Now() + absl::Seconds(10)));
  EXPECT_OK(meshes[0]->Wait(send, absl::Now() + absl::Seconds(10)));
  EXPECT_EQ(got, 'x');
}

TEST(TcpMesh, PeerThatRefuses_IsNamedWithBothAddressesAndTheCause) {
  MemoryKeyValueStore store;
  TcpOptions options;
  options.label = "worker-1 on host a";
  int port = 0;
  {
    const Socket taken = TakenPort();
    port = SocketAddress::OfLocal(taken).port();
  }
  ASSERT_OK(store.Put("comm/world/1", absl::StrCat("127.0.0.1\n", port, "\n", std::string(32, '0'),
                                                   "\nworker-2 on host b")));
  const absl::Status status = TcpMesh::Connect(store, 0, 2, options).status();
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kUnavailable,
                               AllOf(HasSubstr("worker-1 on host a, 127.0.0.1"),
                                     HasSubstr(absl::StrCat("rank 1 (worker-2 on host b, "
                                                            "127.0.0.1:",
                                                            port, ")")),
                                     HasSubstr("refused"), HasSubstr("firewall"))));
  const auto failure = PeerFailureOf(status);
  ASSERT_TRUE(failure.has_value());
  EXPECT_EQ(failure->rank, 1);
  EXPECT_EQ(failure->kind, PeerFailure::Kind::kUnreachable);
}

TEST(TcpMesh, PeerThatAcceptsAndNeverAnswers_IsNamed) {
  MemoryKeyValueStore store;
  const Socket silent = TakenPort();
  TcpOptions options;
  options.preflight_timeout = absl::Milliseconds(1);
  ASSERT_OK(
      store.Put("comm/world/0", absl::StrCat("127.0.0.1\n", SocketAddress::OfLocal(silent).port(),
                                             "\n", std::string(32, '0'), "\nworker-1 on host a")));
  const absl::Status status = TcpMesh::Connect(store, 1, 2, options).status();
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kUnavailable, HasSubstr("MTU")));
  EXPECT_TRUE(PeerFailureOf(status).has_value());
}

TEST(TcpMesh, AddressesOfTwoFamilies_AreToldApart) {
  MemoryKeyValueStore store;
  TcpOptions options;
  options.preflight_timeout = absl::Milliseconds(1);
  ASSERT_OK(store.Put("comm/world/1", absl::StrCat("fd00::7\n9\n", std::string(32, '0'), "\n")));
  EXPECT_THAT(TcpMesh::Connect(store, 0, 2, options).status(),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("IPv4 and the other IPv6")));
}

TEST(TcpMesh, RecordThatIsGarbage_IsAnError) {
  MemoryKeyValueStore store;
  ASSERT_OK(store.Put("comm/world/1", "garbage"));
  EXPECT_THAT(TcpMesh::Connect(store, 0, 2, {}).status(),
              StatusIs(absl::StatusCode::kInternal, HasSubstr("cannot be read")));
}

TEST(TcpMesh, Ports_AreTakenFromTheRangeAndNoOther) {
  // Two adjacent ports that are free now.
  std::optional<PortRange> range;
  while (!range.has_value()) {
    const Socket first = TakenPort();
    const int port = SocketAddress::OfLocal(first).port();
    if (port < 65535 && Listen("127.0.0.1", {port + 1, port + 1}, 0).ok()) range = {port, port + 1};
  }
  MemoryKeyValueStore store;
  TcpOptions options;
  options.ports = range->ToString();
  {
    const Meshes meshes = Connect(store, 2, options);
    for (int rank = 0; rank < 2; ++rank) {
      const int port = ListenerOf(store, rank).port();
      EXPECT_TRUE(port == range->first || port == range->last) << port;
    }
  }
  const auto taken = Listen("127.0.0.1", {range->first, range->first}, 0);
  ASSERT_OK(taken);
  options.ports = absl::StrCat(range->first);
  EXPECT_THAT(TcpMesh::Connect(store, 0, 2, options).status(),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("in use on 127.0.0.1")));
}

TEST(TcpMesh, Ipv6_Connects) {
  TcpOptions options;
  options.address = "::1";
  if (!Listen(options.address, {}, 0).ok()) GTEST_SKIP() << "THIS MACHINE HAS NO IPv6 LOOPBACK";
  MemoryKeyValueStore store;
  const Meshes meshes = Connect(store, 2, options);
  EXPECT_EQ(ListenerOf(store, 1).address(), "::1");
}

TEST(PortRange, Parse_TakesOnePortOrARangeAndNothingElse) {
  const auto range = PortRange::Parse("20000-20999");
  ASSERT_OK(range);
  EXPECT_EQ(range->first, 20000);
  EXPECT_EQ(range->last, 20999);
  EXPECT_EQ(PortRange::Parse("7000")->last, 7000);
  EXPECT_EQ(PortRange::Parse("")->first, 0);
  for (const char* bad : {"a", "5-4", "0-3", "1-70000", "1-2-3", "-", "1-"}) {
    EXPECT_THAT(PortRange::Parse(bad), StatusIs(absl::StatusCode::kInvalidArgument)) << bad;
  }
}

TEST(Annotate, KeepsWhoCouldNotBeReached) {
  const absl::Status status =
      Annotate(MarkPeer(absl::UnavailableError("x"), {PeerFailure::Kind::kLost, 7}), "where");
  ASSERT_TRUE(PeerFailureOf(status).has_value());
  EXPECT_EQ(PeerFailureOf(status)->rank, 7);
  EXPECT_FALSE(PeerFailureOf(absl::UnavailableError("x")).has_value());
}

}  // namespace
}  // namespace muster::parallel
