#include "proto/spec/document.h"

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/parser.h>

#include <algorithm>
#include <map>
#include <sstream>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace muster::spec {
namespace {

// Length of the UTF-8 character at `at`; 0 when there is no valid one. Overlong forms and
// surrogates are not valid.
size_t Utf8Length(const std::string& text, size_t at) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(at);
  if (lead < 0x80) return 1;
  const size_t length = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
  if (lead < 0xC2 || lead > 0xF4 || at + length > text.size()) return 0;
  for (size_t i = 1; i < length; ++i) {
    if ((byte(at + i) & 0xC0) != 0x80) return 0;
  }
  const unsigned char second = byte(at + 1);
  const bool bad_second = (lead == 0xE0 && second < 0xA0) || (lead == 0xED && second > 0x9F) ||
                          (lead == 0xF0 && second < 0x90) || (lead == 0xF4 && second > 0x8F);
  return bad_second ? 0 : length;
}

bool IsUtf8(const std::string& text) {
  for (size_t at = 0, length = 0; at < text.size(); at += length) {
    length = Utf8Length(text, at);
    if (length == 0) return false;
  }
  return true;
}

// Builds the tree from yaml-cpp's events. A handler can stop yaml-cpp's parser only by an
// exception, so that refusals throw yaml-cpp's own; ParseDocument catches them.
class TreeBuilder : public YAML::EventHandler {
 public:
  TreeBuilder(std::string file, std::string whole_location)
      : file_(std::move(file)), whole_location_(std::move(whole_location)) {}

  void OnDocumentStart(const YAML::Mark&) override {}
  void OnDocumentEnd() override {}

  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    Finish(Make(mark, Node::Kind::kNull), anchor, mark);
  }

  void OnAlias(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    const auto found = anchors_.find(anchor);
    if (found == anchors_.end()) Refuse(mark, "an alias cannot be inside its own anchor");
    Add(found->second, mark);
  }

  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                const std::string& value) override {
    if (tag != "?" && tag != "!") RefuseTag(mark, tag);
    // yaml-cpp makes single bytes of \N and \_.
    if (!IsUtf8(value)) {
      Refuse(mark, "an escape makes no UTF-8 text; write \\u0085 for \\N and \\u00a0 for \\_");
    }
    auto node = Make(mark, Node::Kind::kScalar);
    node->text = value;
    node->plain = tag == "?";
    Finish(std::move(node), anchor, mark);
  }

  void OnSequenceStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                       YAML::EmitterStyle::value) override {
    Open(mark, tag, anchor, Node::Kind::kList);
  }
  void OnSequenceEnd() override { Close(); }
  void OnMapStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                  YAML::EmitterStyle::value) override {
    Open(mark, tag, anchor, Node::Kind::kMap);
  }
  void OnMapEnd() override { Close(); }

  NodePtr TakeRoot() { return std::move(root_); }

  std::string Location(const YAML::Mark& mark) const {
    if (!whole_location_.empty()) return whole_location_;
    return absl::StrCat(file_, ":", mark.line + 1, ":", mark.column + 1);
  }

 private:
  struct OpenNode {
    std::shared_ptr<Node> node;
    YAML::anchor_t anchor;
    YAML::Mark mark;
    NodePtr key;  // of the map entry whose value comes next
  };

  [[noreturn]] static void Refuse(const YAML::Mark& mark, const std::string& why) {
    throw YAML::ParserException(mark, why);
  }
  [[noreturn]] static void RefuseTag(const YAML::Mark& mark, const std::string& tag) {
    Refuse(mark, absl::StrCat("tags such as ", tag.substr(0, 40), " are not supported"));
  }

  std::shared_ptr<Node> Make(const YAML::Mark& mark, Node::Kind kind) const {
    auto node = std::make_shared<Node>();
    node->kind = kind;
    node->location = Location(mark);
    return node;
  }

  void Open(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
            Node::Kind kind) {
    if (!tag.empty() && tag != "?" && tag != "!") RefuseTag(mark, tag);
    if (open_.size() >= static_cast<size_t>(kNestingMax)) {
      Refuse(mark, absl::StrCat("nested deeper than ", kNestingMax, " levels"));
    }
    open_.push_back({Make(mark, kind), anchor, mark, nullptr});
  }

  void Close() {
    OpenNode done = std::move(open_.back());
    open_.pop_back();
    Finish(std::move(done.node), done.anchor, done.mark);
  }

  void Finish(std::shared_ptr<Node> node, YAML::anchor_t anchor, const YAML::Mark& mark) {
    NodePtr finished = std::move(node);
    if (anchor != 0) anchors_[anchor] = finished;
    Add(finished, mark);
  }

  void Add(const NodePtr& node, const YAML::Mark& mark) {
    if (open_.empty()) {
      root_ = node;
      return;
    }
    OpenNode& parent = open_.back();
    parent.node->values += node->values;
    if (parent.node->values > kValuesMax) {
      Refuse(mark, absl::StrCat("more than ", kValuesMax, " values once aliases are expanded"));
    }
    if (parent.node->kind == Node::Kind::kList) {
      parent.node->items.push_back(node);
    } else if (parent.key == nullptr) {
      parent.key = node;
    } else {
      parent.node->entries.emplace_back(std::move(parent.key), node);
      parent.key = nullptr;
    }
  }

  const std::string file_;
  const std::string whole_location_;
  std::vector<OpenNode> open_;
  std::map<YAML::anchor_t, NodePtr> anchors_;
  NodePtr root_;
};

// Refuses control characters and malformed UTF-8 before yaml-cpp sees the text: it takes NUL bytes
// for another encoding, and accepts malformed UTF-8.
absl::Status CheckCharacters(const std::string& text, const TreeBuilder& builder) {
  YAML::Mark mark;
  for (size_t at = 0; at < text.size();) {
    const size_t length = Utf8Length(text, at);
    const unsigned char byte = static_cast<unsigned char>(text[at]);
    if (length == 0) {
      return absl::InvalidArgumentError(
          absl::StrCat(builder.Location(mark), ": not valid UTF-8 text"));
    }
    if ((byte < 0x20 && byte != '\n' && byte != '\t' && byte != '\r') || byte == 0x7F) {
      return absl::InvalidArgumentError(absl::StrCat(
          builder.Location(mark), ": a control character (", static_cast<int>(byte), ")"));
    }
    ++mark.column;
    if (byte == '\n') {
      ++mark.line;
      mark.column = 0;
    }
    at += length;
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<NodePtr> ParseDocument(const std::string& text, const std::string& file,
                                      const std::string& whole_location) {
  TreeBuilder builder(file, whole_location);
  const YAML::Mark start;
  if (static_cast<int64_t>(text.size()) > kTextBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat(builder.Location(start), ": ", text.size(),
                                                   " bytes; at most ", kTextBytesMax));
  }
  if (absl::Status status = CheckCharacters(text, builder); !status.ok()) return status;
  try {
    std::istringstream stream(text);
    YAML::Parser parser(stream);
    if (!parser.HandleNextDocument(builder)) {
      return absl::InvalidArgumentError(absl::StrCat(builder.Location(start), ": empty"));
    }
    NodePtr root = builder.TakeRoot();
    if (parser.HandleNextDocument(builder)) {
      return absl::InvalidArgumentError(absl::StrCat(
          builder.TakeRoot()->location, ": a second document; one file holds one spec"));
    }
    return root;
  } catch (const YAML::Exception& error) {
    const bool reference = error.msg == YAML::ErrorMsg::UNKNOWN_ANCHOR;
    return absl::InvalidArgumentError(
        absl::StrCat(builder.Location(error.mark), ": ", error.msg,
                     reference ? "; a text that begins with * needs quotes" : ""));
  } catch (const std::exception& error) {
    return absl::InvalidArgumentError(
        absl::StrCat(builder.Location(start), ": cannot be read as YAML: ", error.what()));
  }
}

}  // namespace muster::spec
