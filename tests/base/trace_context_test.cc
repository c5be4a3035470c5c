#include "base/trace_context.h"

#include <gtest/gtest.h>

#include <string>

namespace muster {
namespace {

constexpr char kTrace[] = "4bf92f3577b34da6a3ce929d0e0e4736";
constexpr char kParent[] = "00f067aa0ba902b7";

TEST(Traceparent, NamesTheTraceAndTheCallersSpan) {
  const std::string given = std::string("00-") + kTrace + "-" + kParent + "-01";
  for (const std::string& text :
       {given, "cc" + given.substr(2), "cc" + given.substr(2) + "-more"}) {
    const auto context = ParseTraceparent(text);
    ASSERT_TRUE(context.has_value()) << text;
    EXPECT_EQ(context->trace_id, kTrace);
    EXPECT_EQ(context->parent_id, kParent);
  }
}

TEST(Traceparent, WhatIsNoneCountsAsNone) {
  const std::string trace = kTrace, parent = kParent;
  for (const std::string& text :
       {std::string(), std::string("00"), "00-" + trace + "-" + parent,
        "00-" + trace + "-" + parent + "-0", "00-" + trace + "-" + parent + "-01-more",
        "cc-" + trace + "-" + parent + "-01more", "ff-" + trace + "-" + parent + "-01",
        "00-" + std::string(32, '0') + "-" + parent + "-01",
        "00-" + trace + "-" + std::string(16, '0') + "-01", "00_" + trace + "-" + parent + "-01",
        "00-" + trace + "_" + parent + "-01", "00-" + trace + "-" + parent + "_01",
        "00-4BF92F3577B34DA6A3CE929D0E0E4736-" + parent + "-01",
        "00-" + trace.substr(1) + "g-" + parent + "-01"}) {
    EXPECT_FALSE(ParseTraceparent(text).has_value()) << text;
  }
}

}  // namespace
}  // namespace muster
