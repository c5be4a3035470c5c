// Random text for the parser: the result is always a spec or an error with a location.
#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>

#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "base/rng.h"
#include "proto/spec/spec.h"
#include "tests/proto/example_spec.h"
#include "tests/support/seed.h"
#include "tests/support/status_matchers.h"

namespace muster::spec {
namespace {

using ::google::protobuf::util::MessageDifferencer;

constexpr int kRounds = 3000;

std::string Mutated(std::string text, Rng& rng) {
  static constexpr absl::string_view kFragments[] = {
      "{",        "}",           "[",
      "]",        ": ",          "- ",
      "\n",       "  ",          "\t",
      "&a ",      "*a",          "!!int ",
      "\"",       "'",           "#",
      "|\n",      ">\n",         "---",
      "? ",       ",",           "\\",
      "\xff",     "é",           "-1",
      "0",        "1e99",        "~",
      "true",     "%",           "@",
      "`",        "<<",          "null",
      "name: ",   "\"\\u0000\"", "9223372036854775807",
      "engine: ", "\r\n",        absl::string_view("\0", 1)};
  const int edits = 1 + static_cast<int>(rng.Below(6));
  for (int i = 0; i < edits; ++i) {
    const size_t at = rng.Below(text.size() + 1);
    switch (rng.Below(4)) {
      case 0:
        text.insert(at, std::string(kFragments[rng.Below(std::size(kFragments))]));
        break;
      case 1:
        text.erase(at, rng.Below(20));
        break;
      case 2:
        if (at < text.size()) text[at] = static_cast<char>(rng.Below(256));
        break;
      default: {
        const std::string range = text.substr(at, rng.Below(40));
        text.insert(rng.Below(text.size() + 1), range);
      }
    }
  }
  return text;
}

TEST(SpecFuzz, MutatedText_GivesASpecOrALocatedRefusal) {
  Rng rng(testing::TestSeed());
  int accepted = 0;
  for (int round = 0; round < kRounds; ++round) {
    const std::string text = Mutated(kExample, rng);
    const absl::StatusOr<v1::JobSpec> spec = Load(text, "fuzz", {}, "/w");
    if (!spec.ok()) {
      ASSERT_EQ(spec.status().code(), absl::StatusCode::kInvalidArgument) << text;
      ASSERT_TRUE(absl::StartsWith(spec.status().message(), "fuzz:")) << spec.status() << text;
      continue;
    }
    ++accepted;
    v1::JobSpec complete = *spec;
    ApplyDefaults(complete);
    ASSERT_OK(Validate(complete)) << text;
    // An accepted spec is the same after it was written and read.
    ASSERT_OK_AND_ASSIGN(const v1::JobSpec again, Parse(ToYaml(complete), "yaml", {}));
    ASSERT_TRUE(MessageDifferencer::Equals(complete, again)) << text << ToYaml(complete);
  }
  EXPECT_GT(accepted, kRounds / 100) << "hardly any mutation leaves a valid spec";
  EXPECT_LT(accepted, kRounds);
}

TEST(SpecFuzz, MutatedOverrides_GiveASpecOrARefusal) {
  Rng rng(testing::TestSeed() + 1);
  const std::string text = "engine.data.train[0].path=data/kjv";
  for (int round = 0; round < kRounds / 3; ++round) {
    const absl::StatusOr<v1::JobSpec> spec = Parse(kExample, "f", {Mutated(text, rng)});
    if (!spec.ok()) {
      ASSERT_EQ(spec.status().code(), absl::StatusCode::kInvalidArgument);
    }
  }
}

// Sets the fields of a message at random.
void Randomize(google::protobuf::Message& message, Rng& rng, int depth) {
  using google::protobuf::FieldDescriptor;
  const auto& reflection = *message.GetReflection();
  const auto& type = *message.GetDescriptor();
  static const int64_t kWhole[] = {0, 1, 2, 3, 8, -1, INT32_MAX, INT32_MIN, 65536, 1000};
  static const double kNumber[] = {0, 1, 0.5, -1, 1e308, -1e308, NAN, INFINITY, 1e-9};
  for (int i = 0; i < type.field_count(); ++i) {
    const FieldDescriptor* field = type.field(i);
    if (field->is_map() || rng.Chance(0.3)) continue;
    const int64_t whole = kWhole[rng.Below(std::size(kWhole))];
    switch (field->cpp_type()) {
      case FieldDescriptor::CPPTYPE_INT32:
        if (field->is_repeated()) {
          reflection.AddInt32(&message, field, static_cast<int32_t>(whole));
        } else {
          reflection.SetInt32(&message, field, static_cast<int32_t>(whole));
        }
        break;
      case FieldDescriptor::CPPTYPE_BOOL:
        reflection.SetBool(&message, field, rng.Chance(0.5));
        break;
      case FieldDescriptor::CPPTYPE_INT64:
        reflection.SetInt64(&message, field, rng.Chance(0.1) ? INT64_MAX : whole);
        break;
      case FieldDescriptor::CPPTYPE_UINT64:
        reflection.SetUInt64(&message, field, rng.Next());
        break;
      case FieldDescriptor::CPPTYPE_DOUBLE:
        if (field->is_repeated()) {
          reflection.AddDouble(&message, field, kNumber[rng.Below(std::size(kNumber))]);
        } else {
          reflection.SetDouble(&message, field, kNumber[rng.Below(std::size(kNumber))]);
        }
        break;
      case FieldDescriptor::CPPTYPE_ENUM:
        if (field->is_repeated()) {
          reflection.AddEnumValue(&message, field, static_cast<int>(rng.Below(4)));
        } else {
          reflection.SetEnumValue(&message, field, static_cast<int>(rng.Below(4)));
        }
        break;
      case FieldDescriptor::CPPTYPE_STRING: {
        const std::string text = rng.Letters(static_cast<int>(rng.Below(70)));
        if (field->is_repeated()) {
          reflection.AddString(&message, field, text);
        } else {
          reflection.SetString(&message, field, text);
        }
        break;
      }
      case FieldDescriptor::CPPTYPE_MESSAGE:
        Randomize(field->is_repeated() ? *reflection.AddMessage(&message, field)
                                       : *reflection.MutableMessage(&message, field),
                  rng, depth + 1);
        break;
      default:
        FAIL() << "a field type that this test does not make: " << field->full_name();
    }
  }
}

TEST(SpecFuzz, RandomMessages_AreJudgedTheSameTwice) {
  Rng rng(testing::TestSeed() + 2);
  for (int round = 0; round < kRounds; ++round) {
    v1::JobSpec spec;
    Randomize(spec, rng, 0);
    ApplyDefaults(spec);
    v1::JobSpec again = spec;
    ApplyDefaults(again);
    ASSERT_EQ(spec.SerializeAsString(), again.SerializeAsString()) << "defaults are not idempotent";
    ASSERT_EQ(Validate(spec).message(), Validate(again).message());
  }
}

}  // namespace
}  // namespace muster::spec
