#include "parallel/data/tokenizer.h"

#include "absl/strings/str_cat.h"

namespace muster::parallel {
namespace {

class ByteTokenizer : public Tokenizer {
 public:
  absl::string_view name() const override { return "bytes"; }
  int64_t vocab() const override { return 256; }
  void Encode(absl::string_view text, std::vector<int32_t>& out) const override {
    out.reserve(out.size() + text.size());
    for (char byte : text) out.push_back(static_cast<unsigned char>(byte));
  }
  std::unique_ptr<Encoder> NewEncoder() const override {
    class Bytes : public Encoder {
     public:
      explicit Bytes(const ByteTokenizer& tokenizer) : tokenizer_(tokenizer) {}
      void Encode(absl::string_view text, bool, std::vector<int32_t>& out) override {
        tokenizer_.Encode(text, out);
      }

     private:
      const ByteTokenizer& tokenizer_;
    };
    return std::make_unique<Bytes>(*this);
  }
  size_t LastCut(absl::string_view text) const override {
    return text.empty() ? 0 : text.size() - 1;
  }
  std::optional<int32_t> IdOf(absl::string_view token) const override {
    if (token.size() != 1) return std::nullopt;
    return static_cast<unsigned char>(token[0]);
  }
  const BoundaryTokens& boundaries() const override { return none_; }
  absl::StatusOr<std::string> Decode(absl::Span<const int32_t> tokens) const override {
    std::string text;
    text.reserve(tokens.size());
    for (size_t i = 0; i < tokens.size(); ++i) {
      if (tokens[i] < 0 || tokens[i] > 255) {
        return absl::InvalidArgumentError(
            absl::StrCat("token ", tokens[i], " at position ", i, " is not a byte"));
      }
      text.push_back(static_cast<char>(tokens[i]));
    }
    return text;
  }

 private:
  const BoundaryTokens none_ = {};
};

}  // namespace

std::unique_ptr<Tokenizer> MakeByteTokenizer() { return std::make_unique<ByteTokenizer>(); }

absl::StatusOr<std::unique_ptr<Tokenizer>> MakeTokenizer(absl::string_view name) {
  if (name == "bytes") return MakeByteTokenizer();
  return absl::InvalidArgumentError(
      absl::StrCat("no tokenizer is called '", name, "'; there is: bytes"));
}

}  // namespace muster::parallel
