#include "parallel/data/dataset_description.h"

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "nlohmann/json.hpp"
#include "parallel/data/sha256.h"

namespace muster::parallel {
namespace {

using Json = nlohmann::json;

// Reads fields of a JSON object and remembers whether all of them were there.
class Fields {
 public:
  explicit Fields(const Json& object) : object_(object), good_(object.is_object()) {}
  void Get(const char* name, std::string& value) {
    if (const Json* field = Find(name); field != nullptr && field->is_string()) {
      value = field->get<std::string>();
    } else {
      good_ = false;
    }
  }
  void Get(const char* name, int64_t& value) {
    const Json* field = Find(name);
    if (field != nullptr && field->is_number_integer() && field->get<int64_t>() >= 0) {
      value = field->get<int64_t>();
    } else {
      good_ = false;
    }
  }
  void Get(const char* name, std::vector<int32_t>& values) {
    const Json* field = Find(name);
    good_ = good_ && field != nullptr && field->is_array();
    if (!good_) return;
    for (const Json& each : *field) {
      good_ = good_ && each.is_number_integer();
      if (good_) values.push_back(each.get<int32_t>());
    }
  }
  bool good() const { return good_; }

 private:
  const Json* Find(const char* name) const {
    if (!object_.is_object()) return nullptr;
    const auto found = object_.find(name);
    return found == object_.end() ? nullptr : &*found;
  }
  const Json& object_;
  bool good_;
};

}  // namespace

absl::Status WriteDescription(FileSystem& files, const std::string& prefix,
                              const DatasetDescription& description) {
  const Json json = {{"tokenizer", description.tokenizer},
                     {"tokenizerSha256", description.tokenizer_sha256},
                     {"vocabulary", description.vocabulary},
                     {"largestId", description.largest_id},
                     {"bos", description.bos},
                     {"eos", description.eos},
                     {"documents", description.documents},
                     {"tokens", description.tokens},
                     {"textBytes", description.text_bytes}};
  const std::string text = json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
  return files.WriteAtomically(prefix + ".dataset.json", text);
}

absl::StatusOr<std::optional<DatasetDescription>> ReadDescription(FileSystem& files,
                                                                  const std::string& prefix) {
  const std::string path = prefix + ".dataset.json";
  if (!files.Exists(path)) return std::nullopt;
  ASSIGN_OR_RETURN(const std::string text, files.Read(path));
  const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  DatasetDescription description;
  Fields fields(json);
  fields.Get("tokenizer", description.tokenizer);
  fields.Get("tokenizerSha256", description.tokenizer_sha256);
  fields.Get("vocabulary", description.vocabulary);
  fields.Get("largestId", description.largest_id);
  fields.Get("bos", description.bos);
  fields.Get("eos", description.eos);
  fields.Get("documents", description.documents);
  fields.Get("tokens", description.tokens);
  fields.Get("textBytes", description.text_bytes);
  if (!fields.good()) {
    return absl::DataLossError(absl::StrCat(path, " is no description of a dataset"));
  }
  return std::optional<DatasetDescription>(std::move(description));
}

absl::Status CheckUse(const DatasetDescription& description, const std::string& field,
                      const std::string& prefix, int64_t vocab, const std::string& tokenizer) {
  const std::string& made_with =
      description.tokenizer_sha256.empty() ? description.tokenizer : description.tokenizer_sha256;
  if (!tokenizer.empty() && made_with != tokenizer) {
    return absl::InvalidArgumentError(
        absl::StrCat(field, " (", prefix, ") was made with the tokenizer ", description.tokenizer,
                     " (", made_with, "), but engine.data.tokenizer asks for ", tokenizer));
  }
  if (description.largest_id < vocab) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "engine.model.vocab: ", vocab, ", but the ids of ", field, " (", prefix, ") go up to ",
      description.largest_id, ": it must be at least ", description.largest_id + 1, ", and ",
      description.vocabulary, " holds all tokens of its tokenizer ", description.tokenizer));
}

absl::Status WriteDatasetTokenizer(FileSystem& files, const std::string& prefix,
                                   absl::string_view file) {
  const std::string path = prefix + ".tokenizer";
  if (!file.empty()) return files.WriteAtomically(path, file);
  return files.Exists(path) ? files.RemoveFile(path) : absl::OkStatus();
}

absl::StatusOr<std::string> ReadDatasetTokenizer(FileSystem& files, const std::string& prefix,
                                                 const DatasetDescription& description) {
  if (description.tokenizer_sha256.empty()) return std::string();
  const std::string path = prefix + ".tokenizer";
  ASSIGN_OR_RETURN(std::string file, files.Read(path));
  const std::string digest = Sha256(file);
  if (digest != description.tokenizer_sha256) {
    return absl::DataLossError(absl::StrCat(path, " has the SHA-256 ", digest, ", but ", prefix,
                                            ".dataset.json names ", description.tokenizer_sha256));
  }
  return file;
}

}  // namespace muster::parallel
