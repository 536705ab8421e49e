// A line of text for a terminal: pieces with styles, cut to a width. A style never carries meaning of its own: without
// colours the text says the same.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "ballast/services/monitoring/show.h"

namespace ballast::services {

// Characters of UTF-8 text, each taken as one column.
size_t WidthOf(absl::string_view text);
// The first `width` characters.
std::string CutTo(absl::string_view text, size_t width);

// The kinds of a stacked bar have styles kKinds, kKinds + 1, ...
enum Style : int { kPlain, kBold, kQuiet, kGood, kBad, kWarn, kReversed, kKinds };

class StyledLine {
 public:
  // `text` is made Printable.
  StyledLine& Add(absl::string_view text, int style = kPlain);
  StyledLine& Append(const StyledLine& line);
  StyledLine& PadTo(size_t width);
  size_t width() const { return width_; }
  // At most `width` columns. Without `colours` no escape sequences.
  std::string Show(size_t width, bool colours) const;

 private:
  struct Piece {
    std::string text;
    int style;
  };
  std::vector<Piece> pieces_;
  size_t width_ = 0;
};

}  // namespace ballast::services
