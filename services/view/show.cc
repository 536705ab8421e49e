#include "ballast/services/view/show.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace ballast::services {

std::string ShowBytes(uint64_t bytes) {
  if (bytes >= uint64_t{1} << 30) return absl::StrFormat("%.2f GiB", static_cast<double>(bytes) / (1 << 30));
  if (bytes >= uint64_t{1} << 20) return absl::StrFormat("%.1f MiB", static_cast<double>(bytes) / (1 << 20));
  if (bytes >= uint64_t{1} << 10) return absl::StrFormat("%.1f KiB", static_cast<double>(bytes) / (1 << 10));
  return absl::StrCat(bytes, " B");
}

std::string Quote(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      absl::StrAppend(&out, "\\", std::string(1, c));
    } else if (static_cast<unsigned char>(c) < 0x20) {
      absl::StrAppend(&out, absl::StrFormat("\\u%04x", c));
    } else {
      out.push_back(c);
    }
  }
  return out + "\"";
}

std::string QuoteAll(const std::vector<std::string>& texts) {
  return absl::StrCat("[", absl::StrJoin(texts, ",", [](std::string* out, const std::string& t) { *out += Quote(t); }),
                      "]");
}

std::string Table::Show() const {
  std::vector<size_t> widths(rows_[0].size(), 0);
  for (const auto& row : rows_) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string out;
  for (const auto& row : rows_) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) absl::StrAppend(&line, "  ", absl::StrFormat("%-*s", widths[i], row[i]));
    line.erase(line.find_last_not_of(' ') + 1);
    absl::StrAppend(&out, line, "\n");
  }
  return out;
}

}  // namespace ballast::services
