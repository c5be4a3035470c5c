#include "proto/spec/topology_file.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "proto/spec/document.h"
#include "proto/spec/names.h"

namespace muster::spec {
namespace {

constexpr size_t kProblemsMax = 50;
constexpr std::array<v1::TopologyLevel, 4> kLevels = {
    v1::TOPOLOGY_LEVEL_ZONE, v1::TOPOLOGY_LEVEL_BLOCK, v1::TOPOLOGY_LEVEL_RACK,
    v1::TOPOLOGY_LEVEL_NVLINK_DOMAIN};

std::string LevelNames() {
  std::vector<std::string> names;
  for (const v1::TopologyLevel level : kLevels) names.push_back(EnumName(level));
  return absl::StrJoin(names, ", ");
}

std::optional<size_t> LevelNamed(const std::string& name) {
  for (size_t i = 0; i < kLevels.size(); ++i) {
    if (EnumName(kLevels[i]) == name) return i;
  }
  return std::nullopt;
}

// Reads nodes and collects what is wrong with them.
class Reader {
 public:
  template <typename... Parts>
  void Add(const Node& node, const std::string& path, const Parts&... parts) {
    if (problems_.size() < kProblemsMax) {
      problems_.push_back(
          absl::StrCat(node.location, ": ", path, path.empty() ? "" : ": ", parts...));
    }
  }

  // The fields of a mapping; null where one is absent. `node` may be null.
  std::map<std::string, const Node*> Fields(const Node& node, const std::string& path,
                                            const std::vector<std::string>& known) {
    std::map<std::string, const Node*> fields;
    for (const std::string& name : known) fields[name] = nullptr;
    if (node.kind != Node::Kind::kMap) {
      Add(node, path, "expected a mapping with ", absl::StrJoin(known, ", "));
      return fields;
    }
    for (const auto& [key, value] : node.entries) {
      const auto field = fields.find(key->text);
      if (key->kind != Node::Kind::kScalar || field == fields.end()) {
        Add(*key, path, "unknown field ", Quoted(key->text), "; expected ",
            absl::StrJoin(known, ", "));
      } else if (field->second != nullptr) {
        Add(*key, path, "field ", key->text, " is given twice");
      } else {
        field->second = value.get();
      }
    }
    return fields;
  }

  // A name of 1 to 253 bytes without control characters; empty after a problem.
  std::string Name(const Node* node, const std::string& path) {
    if (node == nullptr) return "";
    const bool sound = node->kind == Node::Kind::kScalar && !node->text.empty() &&
                       node->text.size() <= kTopologyNameBytesMax &&
                       std::none_of(node->text.begin(), node->text.end(), [](char c) {
                         return static_cast<unsigned char>(c) < 32 || c == 127;
                       });
    if (sound) return node->text;
    Add(*node, path, Quoted(node->text), " is no name: 1-", kTopologyNameBytesMax,
        " bytes without control characters");
    return "";
  }

  std::optional<int> Whole(const Node* node, const std::string& path, int low, int high) {
    if (node == nullptr) return std::nullopt;
    int value = 0;
    if (node->kind == Node::Kind::kScalar && absl::SimpleAtoi(node->text, &value) && value >= low &&
        value <= high) {
      return value;
    }
    Add(*node, path, Quoted(node->text), " is no whole number from ", low, " to ", high);
    return std::nullopt;
  }

  // The items of a list of at most `max`; none after a problem.
  std::vector<const Node*> Items(const Node* node, const std::string& path, size_t max) {
    std::vector<const Node*> items;
    if (node == nullptr) return items;
    if (node->kind != Node::Kind::kList) {
      Add(*node, path, "expected a list");
    } else if (node->items.size() > max) {
      Add(*node, path, node->items.size(), " items; at most ", max);
    } else {
      for (const NodePtr& item : node->items) items.push_back(item.get());
    }
    return items;
  }

  absl::Status status() const {
    if (problems_.empty()) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrJoin(problems_, "\n"));
  }

 private:
  std::vector<std::string> problems_;
};

std::string At(const std::string& path, size_t index) {
  return absl::StrCat(path, "[", index, "]");
}

// "gpu-[01-32]" stands for gpu-01 to gpu-32.
std::vector<std::string> Expand(const Node& node, const std::string& path, Reader& reader) {
  const std::string text = reader.Name(&node, path);
  if (text.empty()) return {};
  const size_t open = text.find('['), close = text.find(']');
  if (open == std::string::npos && close == std::string::npos) return {text};
  const size_t dash = text.find('-', open == std::string::npos ? 0 : open);
  uint32_t first = 0, last = 0;
  if (open == std::string::npos || close == std::string::npos || dash == std::string::npos ||
      dash > close || text.find('[', open + 1) != std::string::npos || dash - open > 9 ||
      close - dash > 9 || !absl::SimpleAtoi(text.substr(open + 1, dash - open - 1), &first) ||
      !absl::SimpleAtoi(text.substr(dash + 1, close - dash - 1), &last) || first > last) {
    reader.Add(node, path, Quoted(text), " is no range of names such as gpu-[01-32]");
    return {};
  }
  if (last - first >= kTopologyWorkersMax) {
    reader.Add(node, path, Quoted(text), " stands for ", last - first + 1, " workers; at most ",
               kTopologyWorkersMax);
    return {};
  }
  const size_t width = dash - open - 1;
  std::vector<std::string> names;
  for (uint32_t number = first; number <= last; ++number) {
    std::string digits = absl::StrCat(number);
    if (digits.size() < width) digits.insert(0, width - digits.size(), '0');
    names.push_back(absl::StrCat(text.substr(0, open), digits, text.substr(close + 1)));
  }
  return names;
}

struct DomainEntry {
  size_t level = 0;
  std::string name;
  std::string in;
  const Node* node = nullptr;
  const Node* in_node = nullptr;
  const Node* workers = nullptr;
  std::string path;
};

using Domains = std::map<std::string, DomainEntry>;

// Reports where `in` leads to nothing, in a circle or to a domain that is not broader.
void CheckParents(const Domains& domains, Reader& reader) {
  std::vector<std::string> names;
  for (const auto& [name, domain] : domains) names.push_back(name);
  for (const auto& [name, domain] : domains) {
    if (domain.in.empty()) continue;
    const std::string path = domain.path + ".in";
    const auto parent = domains.find(domain.in);
    if (parent == domains.end()) {
      const std::string nearest = NearestName(domain.in, names);
      reader.Add(*domain.in_node, path, "there is no domain ", Quoted(domain.in),
                 nearest.empty() ? "" : absl::StrCat("; is ", Quoted(nearest), " meant?"));
      continue;
    }
    std::vector<std::string> chain = {name};
    std::set<std::string> seen;
    const DomainEntry* at = &domain;
    while (at != nullptr && seen.insert(at->name).second && chain.size() < 16) {
      const auto next = domains.find(at->in);
      at = next == domains.end() ? nullptr : &next->second;
      if (at != nullptr) chain.push_back(at->name);
    }
    if (at != nullptr && at->name == name) {
      reader.Add(*domain.in_node, path, "a cycle: ", absl::StrJoin(chain, " in "));
    } else if (parent->second.level >= domain.level) {
      reader.Add(*domain.in_node, path, Quoted(domain.in), " is a ",
                 EnumName(kLevels[parent->second.level]), ", which is not broader than a ",
                 EnumName(kLevels[domain.level]));
    }
  }
}

DomainNames NamesOf(const Domains& domains, const DomainEntry& leaf) {
  DomainNames names;
  const DomainEntry* at = &leaf;
  for (size_t steps = 0; at != nullptr && steps <= kLevels.size(); ++steps) {
    names[at->level] = at->name;
    const auto next = domains.find(at->in);
    at = next == domains.end() ? nullptr : &next->second;
  }
  return names;
}

}  // namespace

absl::StatusOr<ClusterTopology> ParseClusterTopology(const std::string& text,
                                                     const std::string& file) {
  ASSIGN_OR_RETURN(const NodePtr root, ParseDocument(text, file));
  Reader reader;
  ClusterTopology out;
  const auto fields = reader.Fields(*root, "", {"labels", "domains"});
  if (const Node* labels = fields.at("labels"); labels != nullptr) {
    std::vector<std::string> known;
    for (const v1::TopologyLevel level : kLevels) known.push_back(EnumName(level));
    for (const auto& [level, label] : reader.Fields(*labels, "labels", known)) {
      out.labels[*LevelNamed(level)] = reader.Name(label, "labels." + level);
    }
  }
  Domains domains;
  const std::vector<const Node*> items =
      reader.Items(fields.at("domains"), "domains", kTopologyDomainsMax);
  for (size_t i = 0; i < items.size(); ++i) {
    const std::string path = At("domains", i);
    const auto parts = reader.Fields(*items[i], path, {"level", "name", "in", "workers"});
    DomainEntry domain;
    domain.node = items[i];
    domain.path = path;
    domain.in_node = parts.at("in");
    domain.workers = parts.at("workers");
    for (const char* required : {"level", "name"}) {
      if (items[i]->kind == Node::Kind::kMap && parts.at(required) == nullptr) {
        reader.Add(*items[i], absl::StrCat(path, ".", required), "required");
      }
    }
    if (parts.at("level") != nullptr) {
      const std::optional<size_t> level = LevelNamed(parts.at("level")->text);
      if (level.has_value()) {
        domain.level = *level;
      } else {
        reader.Add(*parts.at("level"), path + ".level", "unknown level ",
                   Quoted(parts.at("level")->text), "; expected one of ", LevelNames());
      }
    }
    domain.name = reader.Name(parts.at("name"), path + ".name");
    domain.in = reader.Name(parts.at("in"), path + ".in");
    if (domain.name.empty()) continue;
    const auto [known, is_new] = domains.emplace(domain.name, domain);
    if (!is_new) {
      reader.Add(*parts.at("name"), path + ".name", Quoted(domain.name), " is the name of ",
                 known->second.path, " already; names of domains are unique");
    }
  }
  CheckParents(domains, reader);
  std::map<std::string, std::string> listed_in;  // by worker: the path of its domain
  for (const auto& [name, domain] : domains) {
    const std::vector<const Node*> workers =
        reader.Items(domain.workers, domain.path + ".workers", kTopologyWorkersMax);
    for (size_t i = 0; i < workers.size(); ++i) {
      const std::string path = At(domain.path + ".workers", i);
      for (const std::string& worker : Expand(*workers[i], path, reader)) {
        const auto [known, is_new] = listed_in.emplace(worker, name);
        if (!is_new) {
          reader.Add(*workers[i], path, "worker ", Quoted(worker), " is in ",
                     EnumName(kLevels[domains.at(known->second).level]), " ", Quoted(known->second),
                     " already; list it once, in the narrowest domain that it is in");
        } else if (listed_in.size() > kTopologyWorkersMax) {
          reader.Add(*workers[i], path, "more than ", kTopologyWorkersMax, " workers");
          return reader.status();
        } else {
          out.workers[worker] = NamesOf(domains, domain);
        }
      }
    }
  }
  RETURN_IF_ERROR(reader.status());
  return out;
}

absl::StatusOr<MachineTopology> ParseMachineTopology(const std::string& text,
                                                     const std::string& file) {
  ASSIGN_OR_RETURN(const NodePtr root, ParseDocument(text, file));
  Reader reader;
  MachineTopology out;
  const auto fields = reader.Fields(*root, "", {"labels", "devices"});
  if (const Node* labels = fields.at("labels"); labels != nullptr) {
    if (labels->kind != Node::Kind::kMap) {
      reader.Add(*labels, "labels", "expected a mapping of names to values");
    }
    for (const auto& [key, value] : labels->entries) {
      const std::string name = reader.Name(key.get(), "labels");
      const std::string label = reader.Name(value.get(), "labels." + name);
      if (!name.empty() && !out.labels.emplace(name, label).second) {
        reader.Add(*key, "labels", Quoted(name), " is given twice");
      }
    }
  }
  std::set<std::string> names;
  const std::vector<const Node*> items =
      reader.Items(fields.at("devices"), "devices", kTopologyDevicesMax);
  for (size_t i = 0; i < items.size(); ++i) {
    const std::string path = At("devices", i);
    const auto parts = reader.Fields(*items[i], path, {"name", "numa", "pci", "switch", "nvlinks"});
    v1::Device device;
    if (parts.at("name") == nullptr && items[i]->kind == Node::Kind::kMap) {
      reader.Add(*items[i], path + ".name", "required");
    }
    device.set_name(reader.Name(parts.at("name"), path + ".name"));
    if (!device.name().empty() && !names.insert(device.name()).second) {
      reader.Add(*parts.at("name"), path + ".name", Quoted(device.name()), " is listed twice");
    }
    device.set_numa_node(reader.Whole(parts.at("numa"), path + ".numa", 0, 1023).value_or(-1));
    device.set_pci_address(reader.Name(parts.at("pci"), path + ".pci"));
    device.set_pcie_switch(reader.Name(parts.at("switch"), path + ".switch"));
    if (const Node* links = parts.at("nvlinks"); links != nullptr) {
      if (links->kind != Node::Kind::kMap) {
        reader.Add(*links, path + ".nvlinks", "expected a mapping of devices to numbers of links");
      }
      for (const auto& [peer, count] : links->entries) {
        const std::string name = reader.Name(peer.get(), path + ".nvlinks");
        const std::optional<int> number =
            reader.Whole(count.get(), absl::StrCat(path, ".nvlinks.", name), 1, 64);
        if (name.empty() || !number.has_value()) continue;
        if (name == device.name()) {
          reader.Add(*peer, path + ".nvlinks", Quoted(name), " is the device itself");
        }
        (*device.mutable_nvlinks())[name] = *number;
      }
    }
    out.devices.push_back(std::move(device));
  }
  std::map<std::string, const v1::Device*> by_name;
  for (const v1::Device& device : out.devices) by_name.emplace(device.name(), &device);
  for (size_t i = 0; i < out.devices.size(); ++i) {
    for (const auto& [peer, links] : out.devices[i].nvlinks()) {
      const auto other = by_name.find(peer);
      const std::string path = absl::StrCat(At("devices", i), ".nvlinks");
      if (other == by_name.end()) {
        reader.Add(*items[i], path, "no device ", Quoted(peer), " is listed");
        continue;
      }
      const auto back = other->second->nvlinks().find(out.devices[i].name());
      if (back == other->second->nvlinks().end() || back->second != links) {
        reader.Add(*items[i], path, links, " to ", peer, ", which has ",
                   back == other->second->nvlinks().end() ? 0 : back->second, " to ",
                   out.devices[i].name(), "; links have two ends");
      }
    }
  }
  RETURN_IF_ERROR(reader.status());
  return out;
}

absl::Status ApplyTopology(const MachineTopology& topology, const std::string& file,
                           google::protobuf::RepeatedPtrField<v1::Device>& devices) {
  std::vector<std::string> names;
  for (const v1::Device& device : devices) names.push_back(device.name());
  for (size_t i = 0; i < topology.devices.size(); ++i) {
    const v1::Device& said = topology.devices[i];
    const auto differs = [&](const char* field, const auto& file_says, const auto& driver_says) {
      return absl::InvalidArgumentError(absl::StrCat(
          file, ": ", At("devices", i), ".", field, ": the file says ", file_says, " for ",
          said.name(), ", the driver ", driver_says, "; correct the file, or leave the field out"));
    };
    const auto found = std::find_if(devices.begin(), devices.end(), [&](const v1::Device& device) {
      return device.name() == said.name();
    });
    if (found == devices.end()) {
      return absl::InvalidArgumentError(absl::StrCat(
          file, ": ", At("devices", i), ".name: this worker offers no device ", Quoted(said.name()),
          "; it offers ",
          absl::StrJoin(
              names.begin(),
              names.begin() + std::min<ptrdiff_t>(16, static_cast<ptrdiff_t>(names.size())),
              ", ")));
    }
    v1::Device& device = *found;
    // CPU slots are on no NUMA node of their own: 0 says nothing there.
    const bool gpu = device.kind() == v1::DEVICE_KIND_CUDA;
    if (said.numa_node() >= 0) {
      if (gpu && device.numa_node() >= 0 && device.numa_node() != said.numa_node()) {
        return differs("numa", said.numa_node(), device.numa_node());
      }
      device.set_numa_node(said.numa_node());
    }
    if (!said.pci_address().empty()) {
      if (!device.pci_address().empty() && device.pci_address() != said.pci_address()) {
        return differs("pci", said.pci_address(), device.pci_address());
      }
      device.set_pci_address(said.pci_address());
    }
    if (!said.pcie_switch().empty()) {
      if (!device.pcie_switch().empty() && device.pcie_switch() != said.pcie_switch()) {
        return differs("switch", said.pcie_switch(), device.pcie_switch());
      }
      device.set_pcie_switch(said.pcie_switch());
    }
    for (const auto& [peer, links] : said.nvlinks()) {
      const auto known = device.nvlinks().find(peer);
      if (!device.uuid().empty() && !device.nvlinks().empty() &&
          (known == device.nvlinks().end() || known->second != links)) {
        return differs(
            "nvlinks", absl::StrCat(links, " to ", peer),
            known == device.nvlinks().end() ? std::string("none") : absl::StrCat(known->second));
      }
    }
    if (!said.nvlinks().empty()) *device.mutable_nvlinks() = said.nvlinks();
  }
  return absl::OkStatus();
}

}  // namespace muster::spec
