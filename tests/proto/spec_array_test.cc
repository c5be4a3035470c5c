// Arrays: `array` and `max_running` of a file become the specs of its tasks.
#include <gmock/gmock.h>
#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/spec/array.h"
#include "proto/spec/spec.h"
#include "tests/support/status_matchers.h"

namespace muster::spec {
namespace {

using ::muster::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr char kEngine[] = R"(
name: sweep
engine:
  model: {family: gpt2, layers: 1, hidden: 8, heads: 2, vocab: 256, sequence_length: 16}
  data: {train: [{path: data/x}]}
  training:
    steps: 10
    global_batch: 4
    micro_batch: 2
    seed: ${array.seed}
    optimizer: {adamw: {lr: "${array.lr}"}}
resources: {ranks: 2}
)";
constexpr char kCommand[] = R"(
name: sweep
command: [train, --seed, "${array.seed}", "--out=run-${array.index}-${array.seed}"]
resources: {ranks: 1}
)";

absl::StatusOr<std::vector<v1::JobSpec>> Tasks(const std::string& text) {
  return LoadTasks(text, "f", {}, "/work");
}

TEST(SpecArray, MappingOfLists_IsTheirProduct_LastKeyFastest) {
  ASSERT_OK_AND_ASSIGN(
      const auto tasks,
      Tasks(absl::StrCat(kEngine, "array: {lr: [0.1, 2e-3], seed: [1, 2, 3]}\nmax_running: 2\n")));
  ASSERT_EQ(tasks.size(), 6u);
  const v1::JobSpec& task = tasks[4];
  EXPECT_EQ(task.name(), "sweep-4");
  EXPECT_EQ(task.engine().training().optimizer().adamw().lr(), 2e-3);
  EXPECT_EQ(task.engine().training().seed(), 2u);
  EXPECT_EQ(task.labels().at("array"), "sweep");
  EXPECT_EQ(task.labels().at("array-index"), "4");
  EXPECT_EQ(task.array_task().array(), "sweep");
  EXPECT_EQ(task.array_task().tasks(), 6);
  EXPECT_EQ(task.array_task().max_running(), 2);
  EXPECT_EQ(task.array_task().values(0).key(), "lr");
  EXPECT_EQ(task.array_task().values(0).value(), "2e-3");
  google::protobuf::RepeatedPtrField<v1::JobSpec> all(tasks.begin(), tasks.end());
  EXPECT_OK(ValidateArray(all));
  v1::JobSpec complete = task;
  ApplyDefaults(complete);
  EXPECT_OK(Validate(complete));
  ASSERT_OK_AND_ASSIGN(const v1::JobSpec again, Parse(ToYaml(complete), "f", {}));
  EXPECT_TRUE(google::protobuf::util::MessageDifferencer::Equals(again, complete));
}

TEST(SpecArray, ListOfMappings_IsATaskEach_WhateverTheOrderOfItsKeys) {
  ASSERT_OK_AND_ASSIGN(const auto tasks,
                       Tasks(absl::StrCat(kCommand, "array: [{seed: 7}, {seed: eight}]\n")));
  ASSERT_EQ(tasks.size(), 2u);
  EXPECT_THAT(tasks[1].command(), ElementsAre("train", "--seed", "eight", "--out=run-1-eight"));
  ASSERT_OK_AND_ASSIGN(const auto two,
                       Tasks(absl::StrCat(kEngine, "array: [{lr: 1, seed: 2}, {seed: 3, lr: 4}]")));
  EXPECT_EQ(two[1].engine().training().seed(), 3u);
  EXPECT_EQ(two[1].array_task().values(0).key(), "lr");
}

TEST(SpecArray, ValueOfATextField_MayLookLikeANumber) {
  ASSERT_OK_AND_ASSIGN(const auto tasks,
                       Tasks(absl::StrCat(kCommand,
                                          "labels: {size: \"${array.seed}\", k: \"${array.index}\"}"
                                          "\nnotes: ${array.seed}\narray: {seed: [7]}\n")));
  EXPECT_EQ(tasks[0].labels().at("size"), "7");
  EXPECT_EQ(tasks[0].labels().at("k"), "0");
  EXPECT_EQ(tasks[0].notes(), "7");
}

TEST(SpecArray, FileWithoutArray_IsOneJob) {
  ASSERT_OK_AND_ASSIGN(const auto tasks,
                       Tasks("name: one\ncommand: [x, \"${array.y}\"]\nresources: {ranks: 1}\n"));
  ASSERT_EQ(tasks.size(), 1u);
  EXPECT_EQ(tasks[0].command(1), "${array.y}");
  EXPECT_FALSE(tasks[0].has_array_task());
}

TEST(SpecArray, BadInput_NamesTheFieldAndTheFix) {
  const auto refused = [](const std::string& text) {
    const absl::Status status = Tasks(text).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    return std::string(status.message());
  };
  const auto command = [&](const std::string& rest) { return refused(kCommand + rest); };
  EXPECT_THAT(command("array: {seed: 7}"), HasSubstr("f:5:15: array.'seed': expected a list"));
  EXPECT_THAT(command("array: {seed: [[7]]}"), HasSubstr("expected a number or text, got a list"));
  EXPECT_THAT(command("array: {seed: [null]}"), HasSubstr("got nothing"));
  EXPECT_THAT(command("array: {}"), HasSubstr("array: expected a mapping of keys to lists"));
  EXPECT_THAT(command("array: 3"), HasSubstr("array: expected a mapping of keys to lists"));
  EXPECT_THAT(command("array: {Seed: [7]}"), HasSubstr("'Seed' is not a key"));
  EXPECT_THAT(command("array: {index: [7], seed: [1]}"), HasSubstr("choose another key"));
  EXPECT_THAT(command("array: {other: [7]}"),
              HasSubstr("${array.seed}: no such key; there are other and index"));
  EXPECT_THAT(command("array: [{seed: 7}, {seed: 8, lr: 1}]"),
              HasSubstr("array[1].lr: the first task has no such key"));
  EXPECT_THAT(command("array: [{seed: 7, lr: 1}, {seed: 8}]"), HasSubstr("array[1]: has no lr"));
  EXPECT_THAT(command("max_running: 3"), HasSubstr("max_running: is for `array`"));
  EXPECT_THAT(command("array: {seed: [7]}\nmax_running: 0"), HasSubstr("of at least 1, got '0'"));
  EXPECT_THAT(command("array: {seed: [7]}\nlabels: {array: x}"), HasSubstr("labels.array: tasks"));
  EXPECT_THAT(command("array_task: {array: x}"), HasSubstr("array_task: is set for the tasks"));
  EXPECT_THAT(refused(absl::StrCat(kEngine, "array: {lr: [1], seed: [1], unused: [1, 2]}")),
              HasSubstr("array.unused: no field says ${array.unused}"));
  EXPECT_THAT(refused(absl::StrCat(kEngine, "array: {lr: [1, x], seed: [5]}")),
              HasSubstr("task 1 (lr: x, seed: 5)\nf:11:29: engine.training.optimizer.adamw.lr: "
                        "expected a number, got 'x'"));
  EXPECT_THAT(refused("name: a-${array.x}\ncommand: [x]\nresources: {ranks: 1}\narray: {x: [1]}"),
              HasSubstr("leave ${array...} out"));
  EXPECT_THAT(refused(absl::StrCat("name: ", std::string(62, 'a'), "\ncommand: [x]\n",
                                   "resources: {ranks: 1}\narray: {x: [1]}")),
              HasSubstr("is longer than the 61 characters"));
}

TEST(SpecArray, MoreThanTenThousandTasks_AreRefusedBeforeTheyAreMade) {
  std::string values = "0";
  for (int i = 1; i < 200; ++i) absl::StrAppend(&values, ", ", i);
  const std::string text = absl::StrCat(kCommand, "array: {seed: [", values, "], b: [", values,
                                        "], c: [", values, "], d: [", values, "]}");
  EXPECT_THAT(Tasks(text),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("more than 10000 tasks")));
}

TEST(SpecArray, TasksThatAreNotOneArray_AreRefused) {
  ASSERT_OK_AND_ASSIGN(const auto tasks, Tasks(absl::StrCat(kCommand, "array: {seed: [7, 8]}")));
  google::protobuf::RepeatedPtrField<v1::JobSpec> all(tasks.begin(), tasks.end());
  all.Mutable(1)->mutable_array_task()->set_index(0);
  EXPECT_THAT(ValidateArray(all), StatusIs(absl::StatusCode::kInvalidArgument,
                                           HasSubstr("task 1: array_task.index: 0 is not 1")));
  all.RemoveLast();
  EXPECT_THAT(ValidateArray(all), StatusIs(absl::StatusCode::kInvalidArgument,
                                           HasSubstr("task 0: array_task.tasks: 2 is not")));
  v1::JobSpec renamed = tasks[0];
  renamed.set_name("other");
  ApplyDefaults(renamed);
  EXPECT_THAT(Validate(renamed), StatusIs(absl::StatusCode::kInvalidArgument,
                                          HasSubstr("'other' is not that of task 0 of array")));
}

TEST(SpecArray, Example_IsReadAsItsCommentSays) {
  std::ifstream file(MUSTER_EXAMPLES "/sweep.yaml");
  std::stringstream text;
  text << file.rdbuf();
  ASSERT_OK_AND_ASSIGN(const auto tasks, Tasks(text.str()));
  ASSERT_EQ(tasks.size(), 6u);
  EXPECT_EQ(tasks[5].notes(), "lr 4.0e-3, seed 2");
  EXPECT_EQ(tasks[5].array_task().max_running(), 2);
}

}  // namespace
}  // namespace muster::spec
