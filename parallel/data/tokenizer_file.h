// Tokenizers that other tools have written: tokenizer.json of Hugging Face's tokenizers, GPT-2's
// vocab.json with merges.txt, SentencePiece's models, and tiktoken's lists of ranks. What a file
// asks for and this reader does not have is refused by its name, never approximated.
#ifndef MUSTER_PARALLEL_DATA_TOKENIZER_FILE_H_
#define MUSTER_PARALLEL_DATA_TOKENIZER_FILE_H_

#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/file_system.h"
#include "parallel/data/pre_tokenizer.h"
#include "parallel/data/tokenizer.h"

namespace muster::parallel {

// By what the file is: JSON with a "model" (tokenizer.json), JSON without (vocab.json, which needs
// merges.txt beside it), a SentencePiece model, lines of base64 and a rank (tiktoken). Errors name
// the file and the field or line. kNotFound, kInvalidArgument (broken), kUnimplemented (a part that
// is not supported).
absl::StatusOr<std::unique_ptr<Tokenizer>> LoadTokenizer(FileSystem& files,
                                                         const std::string& path);

// One file that says all of the tokenizer at `path`: its own bytes, unchanged, or of a vocab.json
// and its merges.txt the tokenizer.json that both make. Codes as above.
absl::StatusOr<std::string> ReadTokenizerFile(FileSystem& files, const std::string& path);
// The tokenizer of such a file; `name` is what errors call it.
absl::StatusOr<std::unique_ptr<Tokenizer>> ParseTokenizer(absl::string_view text,
                                                          const std::string& name);

// The same from the text of a tokenizer.json; `name` is what errors call it.
absl::StatusOr<std::unique_ptr<Tokenizer>> ParseTokenizerJson(absl::string_view text,
                                                              const std::string& name);

// The same from the bytes of a SentencePiece model.
absl::StatusOr<std::unique_ptr<Tokenizer>> ParseSentencePiece(absl::string_view text,
                                                              const std::string& name);

// The same from the text of a tiktoken file, which does not say how text is split. Without a
// `pattern` the published lists are told by their size (kUnimplemented for others) and have their
// special tokens, which are no part of a text.
absl::StatusOr<std::unique_ptr<Tokenizer>> ParseRanks(
    absl::string_view text, const std::string& name,
    std::optional<SplitPattern> pattern = std::nullopt);

// "bytes", or the path of a file for LoadTokenizer.
absl::StatusOr<std::unique_ptr<Tokenizer>> OpenTokenizer(FileSystem& files,
                                                         const std::string& name);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_DATA_TOKENIZER_FILE_H_
