// docs/job-spec.md has every field of spec.proto and every default of the code.
#include <gmock/gmock.h>
#include <google/protobuf/descriptor.h>
#include <gtest/gtest.h>

#include <fstream>
#include <set>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "proto/spec/names.h"
#include "proto/spec/spec.h"
#include "tests/proto/example_spec.h"

namespace muster::spec {
namespace {

using ::google::protobuf::Descriptor;
using ::google::protobuf::FieldDescriptor;

std::string Reference() {
  std::ifstream file(MUSTER_JOB_SPEC_REFERENCE);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

// The lines below "## NAME".
std::string Section(const std::string& text, const std::string& name) {
  const size_t begin = text.find(absl::StrCat("## ", name, "\n"));
  if (begin == std::string::npos) return "";
  return text.substr(begin, text.find("\n## ", begin) - begin);
}

// Checks `type` and every message and enum below it, each once.
void Check(const std::string& text, const Descriptor& type, std::set<std::string>& seen) {
  if (!seen.insert(type.name()).second) return;
  const std::string section = Section(text, type.name());
  for (int i = 0; i < type.field_count(); ++i) {
    const FieldDescriptor& field = *type.field(i);
    // A range of ranks is written as the value of `ranks`.
    const std::string name = field.name() == "rank_range" ? "ranks" : field.name();
    EXPECT_NE(section.find(absl::StrCat("| `", name, "` |")), std::string::npos)
        << field.full_name() << " is not in docs/job-spec.md";
    if (field.enum_type() != nullptr) {
      for (const std::string& name : EnumNames(*field.enum_type())) {
        EXPECT_NE(Section(text, field.enum_type()->name()).find(absl::StrCat("| `", name, "` |")),
                  std::string::npos)
            << field.enum_type()->name() << " " << name;
      }
    }
    const Descriptor* below = field.message_type();
    if (below != nullptr && !field.is_map() && below->file() == type.file()) {
      Check(text, *below, seen);
    }
  }
}

TEST(JobSpecReference, EveryFieldAndEnumValue_IsDocumented) {
  std::set<std::string> seen;
  Check(Reference(), *v1::JobSpec::descriptor(), seen);
  EXPECT_GT(seen.size(), 10u);
}

TEST(JobSpecReference, EveryDefault_IsTheOneOfTheCode) {
  v1::JobSpec spec = *Parse(R"(
engine: {data: {train: [{}]}, training: {optimizer: {adamw: {}}}}
checkpoint: {}
)",
                            "f", {});
  ApplyDefaults(spec);
  const std::string text = Reference();
  std::istringstream lines(ToYaml(spec));
  int checked = 0;
  for (std::string line; std::getline(lines, line);) {
    const size_t start = line.find_first_not_of(" -");
    const size_t colon = line.find(": ", start);
    if (colon == std::string::npos || line.substr(colon + 2) == "{}") continue;
    ++checked;
    const std::string row = absl::StrCat("| `", line.substr(start, colon - start), "` |");
    const std::string value = absl::StrCat("| `", line.substr(colon + 2), "` |");
    bool found = false;
    std::istringstream rows(text);
    for (std::string candidate; std::getline(rows, candidate);) {
      found = found || (candidate.find(row) == 0 && candidate.find(value) != std::string::npos);
    }
    EXPECT_TRUE(found) << row << " with " << value;
  }
  EXPECT_GE(checked, 12);
}

}  // namespace
}  // namespace muster::spec
