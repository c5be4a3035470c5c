#include "parallel/data/sentence_piece_model.h"

#include <cmath>
#include <cstdint>
#include <cstring>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace muster::parallel {
namespace {

// One field of a message on the wire.
struct WireField {
  uint64_t number = 0;
  int type = 0;             // 0: varint, 1: 8 bytes, 2: with a length, 5: 4 bytes
  uint64_t value = 0;       // of types 0, 1 and 5
  absl::string_view bytes;  // of type 2

  bool Is(uint64_t wanted, int wanted_type) const {
    return number == wanted && type == wanted_type;
  }
};

// Calls on_field(field), which returns a Status, for every field of a message.
template <typename OnField>
absl::Status ForEachField(absl::string_view message, OnField on_field) {
  const absl::string_view whole = message;
  const auto damaged = [&] {
    return absl::InvalidArgumentError(absl::StrCat("the model is damaged or cut off at byte ",
                                                   whole.size() - message.size(), " of ",
                                                   whole.size(), " of a message"));
  };
  const auto varint = [&message](uint64_t& value) {
    value = 0;
    for (int shift = 0; shift < 64 && !message.empty(); shift += 7) {
      const auto byte = static_cast<uint8_t>(message[0]);
      message.remove_prefix(1);
      value |= static_cast<uint64_t>(byte & 0x7f) << shift;
      if (byte < 0x80) return true;
    }
    return false;
  };
  while (!message.empty()) {
    WireField field;
    uint64_t tag = 0;
    if (!varint(tag)) return damaged();
    field.number = tag >> 3;
    field.type = static_cast<int>(tag & 7);
    size_t length = 0;
    if (field.type == 0) {
      if (!varint(field.value)) return damaged();
    } else if (field.type == 1 || field.type == 5) {
      length = field.type == 1 ? 8 : 4;
      if (message.size() < length) return damaged();
      for (size_t i = length; i-- > 0;) {
        field.value = field.value << 8 | static_cast<uint8_t>(message[i]);
      }
    } else if (field.type == 2) {
      uint64_t bytes = 0;
      if (!varint(bytes) || bytes > message.size()) return damaged();
      length = static_cast<size_t>(bytes);
      field.bytes = message.substr(0, length);
    } else {
      return damaged();
    }
    message.remove_prefix(length);
    RETURN_IF_ERROR(on_field(field));
  }
  return absl::OkStatus();
}

// Reads a field that every message has once, or not at all.
void Read(const WireField& field, uint64_t number, bool& into) {
  if (field.Is(number, 0)) into = field.value != 0;
}
void Read(const WireField& field, uint64_t number, std::string& into) {
  if (field.Is(number, 2)) into = std::string(field.bytes);
}

absl::Status ReadPiece(absl::string_view message, SentencePieceModel& model) {
  SentencePieceModel::Piece piece;
  const size_t id = model.pieces.size();
  RETURN_IF_ERROR(ForEachField(message, [&](const WireField& field) {
    Read(field, 1, piece.text);
    if (field.Is(2, 5)) {
      const auto bits = static_cast<uint32_t>(field.value);
      std::memcpy(&piece.score, &bits, sizeof(bits));
    }
    if (field.Is(3, 0)) {
      if (field.value < 1 || field.value > 6) {
        return absl::InvalidArgumentError(
            absl::StrCat("piece ", id, " has type ", field.value, ", must be 1 to 6"));
      }
      piece.type = static_cast<SentencePieceModel::PieceType>(field.value);
    }
    return absl::OkStatus();
  }));
  if (piece.text.empty() || !std::isfinite(piece.score)) {
    return absl::InvalidArgumentError(
        absl::StrCat("piece ", id, " has no text, or a score that is no number"));
  }
  model.pieces.push_back(std::move(piece));
  return absl::OkStatus();
}

absl::Status ReadTrainerSpec(absl::string_view message, SentencePieceModel& model) {
  return ForEachField(message, [&](const WireField& field) {
    if (field.Is(3, 0)) {
      if (field.value < 1 || field.value > 4) {
        return absl::InvalidArgumentError(
            absl::StrCat("trainer_spec.model_type is ", field.value, ", must be 1 to 4"));
      }
      model.algorithm = static_cast<SentencePieceModel::Algorithm>(field.value);
    }
    Read(field, 24, model.space_behind_words);
    Read(field, 35, model.byte_fallback);
    Read(field, 44, model.unknown_surface);
    return absl::OkStatus();
  });
}

absl::Status ReadNormalizerSpec(absl::string_view message, SentencePieceModel& model) {
  return ForEachField(message, [&](const WireField& field) {
    Read(field, 2, model.character_map);
    Read(field, 3, model.add_dummy_prefix);
    Read(field, 4, model.remove_extra_whitespaces);
    Read(field, 5, model.escape_whitespaces);
    return absl::OkStatus();
  });
}

absl::Status ReadSelfTests(absl::string_view message, SentencePieceModel& model) {
  return ForEachField(message, [&](const WireField& sample) {
    if (!sample.Is(1, 2)) return absl::OkStatus();
    std::pair<std::string, std::string> test;
    RETURN_IF_ERROR(ForEachField(sample.bytes, [&](const WireField& field) {
      Read(field, 1, test.first);
      Read(field, 2, test.second);
      return absl::OkStatus();
    }));
    model.self_tests.push_back(std::move(test));
    return absl::OkStatus();
  });
}

}  // namespace

bool LooksLikeSentencePiece(absl::string_view file) {
  // The tags of ModelProto.pieces and of SentencePiece.piece, with lengths of a byte between. Text
  // does not have a control character, or a line end, there.
  return file.size() > 4 && file[0] == '\n' && file[2] == '\n' &&
         static_cast<size_t>(file[1]) >= static_cast<size_t>(file[3]) + 2;
}

absl::StatusOr<SentencePieceModel> ParseSentencePieceModel(absl::string_view file) {
  SentencePieceModel model;
  bool trainer_spec = false, normalizer_spec = false;
  RETURN_IF_ERROR(ForEachField(file, [&](const WireField& field) {
    if (field.type != 2) return absl::OkStatus();
    trainer_spec = trainer_spec || field.number == 2;
    normalizer_spec = normalizer_spec || field.number == 3;
    switch (field.number) {
      case 1:
        return ReadPiece(field.bytes, model);
      case 2:
        return ReadTrainerSpec(field.bytes, model);
      case 3:
        return ReadNormalizerSpec(field.bytes, model);
      case 4:
        return ReadSelfTests(field.bytes, model);
      default:
        return absl::OkStatus();
    }
  }));
  // Trainers write all of these, in this order.
  if (model.pieces.empty() || !trainer_spec || !normalizer_spec) {
    return absl::InvalidArgumentError(
        absl::StrCat("the model is cut off, or none: it has ", model.pieces.size(), " pieces, ",
                     trainer_spec ? "a" : "no", " trainer_spec and ", normalizer_spec ? "a" : "no",
                     " normalizer_spec"));
  }
  return model;
}

}  // namespace muster::parallel
