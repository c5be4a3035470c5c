#include "proto/spec/topology_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "tests/support/status_matchers.h"

namespace muster::spec {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string WhyNot(const std::string& text) {
  const auto parsed = ParseClusterTopology(text, "t.yaml");
  EXPECT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument) << text;
  return std::string(parsed.status().message());
}

TEST(ClusterTopologyFile, SaysWhereWorkersAre) {
  const auto parsed = ParseClusterTopology(R"(
labels: {rack: topology.kubernetes.io/rack}
domains:
  - {level: zone, name: a}
  - {level: block, name: b1, in: a}
  - {level: rack, name: r7, in: b1, workers: ["gpu-[08-10]", w]}
  - {level: nvlink_domain, name: n1, in: a, workers: [x]}
)",
                                           "t.yaml");
  ASSERT_OK(parsed.status());
  EXPECT_EQ(parsed->labels, (DomainNames{"", "", "topology.kubernetes.io/rack", ""}));
  ASSERT_EQ(parsed->workers.size(), 5u);
  EXPECT_EQ(parsed->workers.at("gpu-08"), (DomainNames{"a", "b1", "r7", ""}));
  EXPECT_EQ(parsed->workers.at("gpu-10"), (DomainNames{"a", "b1", "r7", ""}));
  EXPECT_EQ(parsed->workers.at("x"), (DomainNames{"a", "", "", "n1"}));
  EXPECT_OK(ParseClusterTopology("{}", "t.yaml").status());
}

TEST(ClusterTopologyFile, Mistakes_NameTheFieldAndTheFix) {
  EXPECT_THAT(WhyNot("domains:\n  - {level: rack, name: a, in: b}\n"
                     "  - {level: rack, name: b, in: a}\n"),
              AllOf(HasSubstr("t.yaml:2:32: domains[0].in: a cycle: a in b in a"),
                    HasSubstr("domains[1].in: a cycle: b in a in b")));
  EXPECT_THAT(WhyNot("domains: [{level: rack, name: a, in: a}]"), HasSubstr("a cycle: a in a"));
  EXPECT_THAT(WhyNot("domains:\n  - {level: rack, name: a, workers: [w]}\n"
                     "  - {level: rack, name: b, workers: [w]}\n"),
              HasSubstr("domains[1].workers[0]: worker 'w' is in rack 'a' already"));
  EXPECT_THAT(WhyNot("domains: [{level: row, name: a}]"),
              HasSubstr("domains[0].level: unknown level 'row'; expected one of zone, block, rack, "
                        "nvlink_domain"));
  EXPECT_THAT(WhyNot("domains: [{level: zone, name: a, in: r}, {level: rack, name: r}]"),
              HasSubstr("'r' is a rack, which is not broader than a zone"));
  EXPECT_THAT(WhyNot("domains: [{level: rack, name: r1, in: zone-a}, {level: zone, name: zone-b}]"),
              HasSubstr("there is no domain 'zone-a'; is 'zone-b' meant?"));
  EXPECT_THAT(WhyNot("domains: [{level: rack, name: r}, {level: zone, name: r}]"),
              HasSubstr("'r' is the name of domains[0] already"));
  EXPECT_THAT(WhyNot("domains: [{level: rack, name: r, workers: [\"w[0-99999999]\"]}]"),
              HasSubstr("stands for 100000000 workers; at most 16384"));
  EXPECT_THAT(WhyNot("domains: [{level: rack, name: r, workers: [\"w[5-2]\"]}]"),
              HasSubstr("no range of names"));
  EXPECT_THAT(WhyNot("domains: [{name: r}]"), HasSubstr("domains[0].level: required"));
  EXPECT_THAT(WhyNot("racks: []"), HasSubstr("unknown field 'racks'; expected labels, domains"));
  EXPECT_THAT(WhyNot("domains: {a: b}"), HasSubstr("domains: expected a list"));
  EXPECT_THAT(WhyNot("domains: [{level: rack, name: \"" + std::string(300, 'x') + "\"}]"),
              HasSubstr("1-253 bytes"));
  EXPECT_THAT(WhyNot("labels: {row: x}"), HasSubstr("labels: unknown field 'row'"));
  EXPECT_THAT(WhyNot("a: &a [*a]"), HasSubstr("alias"));
}

TEST(ClusterTopologyFile, AsManyWorkersAsAClusterHas_AndNoMore) {
  std::string text = "domains:\n";
  for (int rack = 0; rack < 2; ++rack) {
    text += "  - {level: rack, name: r" + std::to_string(rack) + ", workers: [\"w" +
            std::to_string(rack) + "-[1-8192]\"]}\n";
  }
  EXPECT_OK(ParseClusterTopology(text, "t.yaml").status());
  EXPECT_THAT(WhyNot(text + "  - {level: rack, name: r9, workers: [one]}\n"),
              HasSubstr("more than 16384 workers"));
}

TEST(MachineTopologyFile, FillsInWhatTheDriverDoesNotTell) {
  const auto parsed = ParseMachineTopology(R"(
labels: {zone: a, rack: r7}
devices:
  - {name: "cuda:0", numa: 1, pci: "00000000:1b:00.0", switch: a, nvlinks: {"cuda:1": 18}}
  - {name: "cuda:1", nvlinks: {"cuda:0": 18}}
)",
                                           "m.yaml");
  ASSERT_OK(parsed.status());
  EXPECT_EQ(parsed->labels.at("rack"), "r7");
  google::protobuf::RepeatedPtrField<v1::Device> devices;
  for (const char* name : {"cuda:0", "cuda:1"}) {
    v1::Device& device = *devices.Add();
    device.set_name(name);
    device.set_kind(v1::DEVICE_KIND_CUDA);
    device.set_numa_node(-1);
  }
  ASSERT_OK(ApplyTopology(*parsed, "m.yaml", devices));
  EXPECT_EQ(devices[0].numa_node(), 1);
  EXPECT_EQ(devices[1].numa_node(), -1);
  EXPECT_EQ(devices[0].nvlinks().at("cuda:1"), 18);
  EXPECT_EQ(devices[0].pcie_switch(), "a");
  EXPECT_EQ(devices[1].pcie_switch(), "");
  // A driver that says the same is fine, one that differs is not.
  devices[0].set_uuid("GPU-1");
  ASSERT_OK(ApplyTopology(*parsed, "m.yaml", devices));
  devices[0].set_pci_address("00000000:43:00.0");
  EXPECT_THAT(std::string(ApplyTopology(*parsed, "m.yaml", devices).message()),
              AllOf(HasSubstr("m.yaml: devices[0].pci"), HasSubstr("00000000:1b:00.0"),
                    HasSubstr("the driver 00000000:43:00.0")));
  devices[0].clear_pci_address();
  devices[0].set_pcie_switch("0000:17:01.0");
  EXPECT_THAT(std::string(ApplyTopology(*parsed, "m.yaml", devices).message()),
              HasSubstr("devices[0].switch: the file says a for cuda:0, the driver 0000:17:01.0"));
  devices[0].set_pcie_switch("a");
  (*devices[0].mutable_nvlinks())["cuda:1"] = 4;
  EXPECT_THAT(std::string(ApplyTopology(*parsed, "m.yaml", devices).message()),
              HasSubstr("devices[0].nvlinks: the file says 18 to cuda:1 for cuda:0, the driver 4"));
  (*devices[0].mutable_nvlinks())["cuda:1"] = 18;
  devices[0].set_numa_node(0);
  EXPECT_THAT(std::string(ApplyTopology(*parsed, "m.yaml", devices).message()),
              HasSubstr("devices[0].numa: the file says 1 for cuda:0, the driver 0"));
  devices.RemoveLast();
  devices[0].set_numa_node(-1);
  EXPECT_THAT(std::string(ApplyTopology(*parsed, "m.yaml", devices).message()),
              HasSubstr("offers no device 'cuda:1'; it offers cuda:0"));
}

TEST(MachineTopologyFile, Mistakes_NameTheFieldAndTheFix) {
  const auto why_not = [](const std::string& text) {
    const auto parsed = ParseMachineTopology(text, "m.yaml");
    EXPECT_FALSE(parsed.ok()) << text;
    return std::string(parsed.status().message());
  };
  EXPECT_THAT(why_not("devices: [{name: a, nvlinks: {b: 1}}, {name: b}]"),
              HasSubstr("devices[0].nvlinks: 1 to b, which has 0 to a; links have two ends"));
  EXPECT_THAT(why_not("devices: [{name: a, nvlinks: {a: 1}}]"), HasSubstr("the device itself"));
  EXPECT_THAT(why_not("devices: [{name: a, nvlinks: {c: 1}}]"), HasSubstr("no device 'c'"));
  EXPECT_THAT(why_not("devices: [{name: a, numa: 5000}]"),
              HasSubstr("devices[0].numa: '5000' is no whole number from 0 to 1023"));
  EXPECT_THAT(why_not("devices: [{name: a}, {name: a}]"), HasSubstr("'a' is listed twice"));
  EXPECT_THAT(why_not("devices: [{numa: 0}]"), HasSubstr("devices[0].name: required"));
  EXPECT_THAT(why_not("[]"), HasSubstr("expected a mapping with labels, devices"));
}

}  // namespace
}  // namespace muster::spec
