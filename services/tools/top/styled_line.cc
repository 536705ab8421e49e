#include "ballast/services/tools/top/styled_line.h"

#include <algorithm>
#include <array>

#include "absl/strings/str_cat.h"

namespace ballast::services {
namespace {

bool IsContinuation(char c) { return (static_cast<unsigned char>(c) & 0xc0) == 0x80; }

// Parameters of the escape sequence: black on light grounds, white on dark ones.
const char* CodeOf(int style) {
  constexpr std::array<const char*, kKinds> kTexts = {"", "1", "2", "1;32", "1;31", "1;33", "7"};
  constexpr std::array<const char*, 8> kGrounds = {"97;44", "30;46", "30;43", "30;42",
                                                   "97;45", "97;41", "30;47", "97;100"};
  return style < kKinds ? kTexts[style] : kGrounds[(style - kKinds) % kGrounds.size()];
}

}  // namespace

size_t WidthOf(absl::string_view text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char c) { return !IsContinuation(c); }));
}

std::string CutTo(absl::string_view text, size_t width) {
  size_t end = 0;
  for (size_t seen = 0; end < text.size(); ++end) {
    if (!IsContinuation(text[end]) && seen++ == width) break;
  }
  return std::string(text.substr(0, end));
}

StyledLine& StyledLine::Add(absl::string_view text, int style) {
  pieces_.push_back({Printable(text), style});
  width_ += WidthOf(pieces_.back().text);
  return *this;
}

StyledLine& StyledLine::Append(const StyledLine& line) {
  pieces_.insert(pieces_.end(), line.pieces_.begin(), line.pieces_.end());
  width_ += line.width_;
  return *this;
}

StyledLine& StyledLine::PadTo(size_t width) {
  if (width_ < width) Add(std::string(width - width_, ' '));
  return *this;
}

std::string StyledLine::Show(size_t width, bool colours) const {
  std::string out;
  size_t left = width;
  for (const Piece& piece : pieces_) {
    const std::string text = CutTo(piece.text, left);
    left -= WidthOf(text);
    if (text.empty()) continue;
    if (colours && piece.style != kPlain) {
      absl::StrAppend(&out, "\x1b[", CodeOf(piece.style), "m", text, "\x1b[0m");
    } else {
      absl::StrAppend(&out, text);
    }
  }
  if (!colours) out.erase(out.find_last_not_of(' ') + 1);
  return out;
}

}  // namespace ballast::services
