#include "parallel/data/json_field.h"

#include <cstdint>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "parallel/data/unicode.h"

namespace muster::parallel {
namespace {

constexpr size_t kDepthMax = 1000;

class Scanner {
 public:
  explicit Scanner(absl::string_view json) : json_(json) {}

  absl::Status Read(absl::string_view field, std::string& text) {
    if (json_.substr(0, 3) == "\xef\xbb\xbf") at_ = 3;  // the byte order mark of some files
    SkipSpaces();
    if (!Take('{')) return Wrong("expected an object");
    bool found = false;
    SkipSpaces();
    if (!Take('}')) {
      std::string key;
      while (true) {
        RETURN_IF_ERROR(Key(key));
        const bool wanted = key == field;
        if (wanted && Peek() != '"') {
          RETURN_IF_ERROR(Value());
          return absl::InvalidArgumentError(absl::StrCat("the field \"", field, "\" is no string"));
        }
        if (wanted) {
          text.clear();
          RETURN_IF_ERROR(String(&text));
          found = true;
        } else {
          RETURN_IF_ERROR(Value());
        }
        SkipSpaces();
        if (Take('}')) break;
        if (!Take(',')) return Wrong("expected ',' or '}'");
        SkipSpaces();
      }
    }
    SkipSpaces();
    if (at_ != json_.size()) return Wrong("expected the end of the line");
    if (!found) {
      return absl::InvalidArgumentError(absl::StrCat("there is no field \"", field, "\""));
    }
    return absl::OkStatus();
  }

 private:
  absl::Status Wrong(absl::string_view what) const {
    return absl::InvalidArgumentError(absl::StrCat("invalid JSON at byte ", at_ + 1, ": ", what));
  }
  char Peek() const { return at_ < json_.size() ? json_[at_] : '\0'; }
  bool Take(char c) {
    if (Peek() != c || at_ >= json_.size()) return false;
    ++at_;
    return true;
  }
  void SkipSpaces() {
    while (at_ < json_.size() &&
           (json_[at_] == ' ' || json_[at_] == '\t' || json_[at_] == '\r' || json_[at_] == '\n')) {
      ++at_;
    }
  }

  // A key and the colon, up to the value.
  absl::Status Key(std::string& key) {
    if (Peek() != '"') return Wrong("expected a key in quotes");
    key.clear();
    RETURN_IF_ERROR(String(&key));
    SkipSpaces();
    if (!Take(':')) return Wrong("expected ':'");
    SkipSpaces();
    return absl::OkStatus();
  }

  // Any value. Open objects and arrays are in a list, so that depth costs no stack.
  absl::Status Value() {
    std::vector<char> open;
    std::string key;
    while (true) {
      bool opened = false;
      switch (Peek()) {
        case '"':
          RETURN_IF_ERROR(String(nullptr));
          break;
        case '{':
        case '[':
          if (open.size() >= kDepthMax) return Wrong("it is nested too deeply");
          open.push_back(json_[at_++] == '{' ? '}' : ']');
          SkipSpaces();
          if (Take(open.back())) {
            open.pop_back();
          } else {
            opened = true;
            if (open.back() == '}') RETURN_IF_ERROR(Key(key));
          }
          break;
        default:
          RETURN_IF_ERROR(NumberOrWord());
      }
      if (opened) continue;
      while (!open.empty()) {
        SkipSpaces();
        if (Take(open.back())) {
          open.pop_back();
          continue;
        }
        if (!Take(',')) return Wrong("expected ',' or the end of an object or array");
        SkipSpaces();
        if (open.back() == '}') RETURN_IF_ERROR(Key(key));
        break;
      }
      if (open.empty()) return absl::OkStatus();
    }
  }

  absl::Status NumberOrWord() {
    for (absl::string_view word : {"true", "false", "null"}) {
      if (json_.substr(at_, word.size()) == word) {
        at_ += word.size();
        return absl::OkStatus();
      }
    }
    Take('-');
    if (!Take('0') && !Digits()) return Wrong("expected a value");
    if (Take('.') && !Digits()) return Wrong("expected a digit");
    if (Peek() == 'e' || Peek() == 'E') {
      ++at_;
      if (!Take('+')) Take('-');
      if (!Digits()) return Wrong("expected a digit");
    }
    return absl::OkStatus();
  }
  bool Digits() {
    const size_t begin = at_;
    while (Peek() >= '0' && Peek() <= '9') ++at_;
    return at_ > begin;
  }

  // From the opening quote to behind the closing one. `out` may be null.
  absl::Status String(std::string* out) {
    ++at_;
    while (true) {
      const size_t begin = at_;
      while (at_ < json_.size() && json_[at_] != '"' && json_[at_] != '\\' &&
             static_cast<uint8_t>(json_[at_]) >= 0x20) {
        ++at_;
      }
      if (out != nullptr) out->append(json_.data() + begin, at_ - begin);
      if (at_ >= json_.size()) return Wrong("the string does not end");
      if (Take('"')) return absl::OkStatus();
      if (json_[at_] != '\\') return Wrong("a control character in a string");
      ++at_;
      RETURN_IF_ERROR(Escape(out));
    }
  }

  absl::Status Escape(std::string* out) {
    constexpr absl::string_view kLetters = "\"\\/bfnrt", kMeant = "\"\\/\b\f\n\r\t";
    const size_t which = at_ < json_.size() ? kLetters.find(json_[at_]) : absl::string_view::npos;
    if (which != absl::string_view::npos) {
      ++at_;
      if (out != nullptr) out->push_back(kMeant[which]);
      return absl::OkStatus();
    }
    if (!Take('u')) return Wrong("an unknown escape");
    uint32_t c = 0;
    if (!Hex(c)) return Wrong("expected four hexadecimal digits");
    if (c >= 0xd800 && c < 0xdc00 && json_.substr(at_, 2) == "\\u") {
      const size_t before = at_;
      uint32_t low = 0;
      at_ += 2;
      if (!Hex(low)) return Wrong("expected four hexadecimal digits");
      if (low >= 0xdc00 && low < 0xe000) {
        c = 0x10000 + ((c - 0xd800) << 10) + (low - 0xdc00);
      } else {
        at_ = before;
      }
    }
    if (out != nullptr) AppendUtf8(c >= 0xd800 && c < 0xe000 ? 0xfffd : c, *out);
    return absl::OkStatus();
  }
  bool Hex(uint32_t& value) {
    value = 0;
    for (int i = 0; i < 4; ++i, ++at_) {
      const char c = Peek();
      uint32_t digit = 0;
      if (c >= '0' && c <= '9') {
        digit = static_cast<uint32_t>(c - '0');
      } else if ((c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F')) {
        digit = static_cast<uint32_t>((c | 32) - 'a' + 10);
      } else {
        return false;
      }
      value = value << 4 | digit;
    }
    return true;
  }

  const absl::string_view json_;
  size_t at_ = 0;
};

}  // namespace

absl::Status ReadStringField(absl::string_view json, absl::string_view field, std::string& text) {
  return Scanner(json).Read(field, text);
}

}  // namespace muster::parallel
