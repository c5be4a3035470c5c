#include "parallel/data/tokenize_state.h"

#include <utility>

#include "nlohmann/json.hpp"

namespace muster::parallel {
namespace {

using Json = nlohmann::json;

// Numbers of a list, as many as there are places; false: the list is another.
bool Take(const Json& list, const std::vector<int64_t*>& places) {
  if (!list.is_array() || list.size() != places.size()) return false;
  for (size_t i = 0; i < places.size(); ++i) {
    if (!list[i].is_number_integer() || list[i].get<int64_t>() < 0) return false;
    *places[i] = list[i].get<int64_t>();
  }
  return true;
}

}  // namespace

absl::Status SaveState(FileSystem& files, const std::string& path, const TokenizeState& state) {
  Json splits = Json::array();
  for (const TokenizedSplit& split : state.splits) {
    splits.push_back(
        {{"prefix", split.prefix},
         {"counts", {split.documents, split.tokens, split.text_bytes, split.largest_id}}});
  }
  const TextPosition& next = state.next;
  Json json = {{"request", state.request},
               {"next",
                {next.file, next.offset, next.line, int64_t{next.begins}, next.split,
                 next.text_before, next.read_before}},
               {"splits", std::move(splits)},
               {"bytesRead", {state.bytes_read}}};
  if (state.writer.has_value()) {
    json["writer"] = {state.writer->tokens, state.writer->documents, state.writer->sequences,
                      state.writer->open_tokens};
  }
  return files.WriteAtomically(path, json.dump(-1, ' ', false, Json::error_handler_t::replace));
}

std::optional<TokenizeState> LoadState(FileSystem& files, const std::string& path) {
  if (!files.Exists(path)) return std::nullopt;
  const absl::StatusOr<std::string> text = files.Read(path);
  if (!text.ok()) return std::nullopt;
  const Json json = Json::parse(*text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return std::nullopt;
  const Json none;
  const auto member = [&](const Json& object, const char* name) -> const Json& {
    return object.is_object() && object.contains(name) ? object[name] : none;
  };
  TokenizeState state;
  int64_t begins = 0;
  TextPosition& next = state.next;
  if (!member(json, "request").is_string() || !member(json, "splits").is_array() ||
      !Take(member(json, "next"), {&next.file, &next.offset, &next.line, &begins, &next.split,
                                   &next.text_before, &next.read_before}) ||
      !Take(member(json, "bytesRead"), {&state.bytes_read})) {
    return std::nullopt;
  }
  state.request = json["request"].get<std::string>();
  next.begins = begins != 0;
  for (const Json& each : json["splits"]) {
    TokenizedSplit split;
    if (!member(each, "prefix").is_string() ||
        !Take(member(each, "counts"),
              {&split.documents, &split.tokens, &split.text_bytes, &split.largest_id})) {
      return std::nullopt;
    }
    split.prefix = each["prefix"].get<std::string>();
    state.splits.push_back(std::move(split));
  }
  if (json.contains("writer")) {
    IndexedDatasetWriter::Progress& writer = state.writer.emplace();
    if (!Take(json["writer"],
              {&writer.tokens, &writer.documents, &writer.sequences, &writer.open_tokens})) {
      return std::nullopt;
    }
    if (state.splits.empty()) return std::nullopt;
  }
  return state;
}

}  // namespace muster::parallel
