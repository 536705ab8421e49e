#include "ballast/services/monitoring/show.h"

#include <algorithm>
#include <array>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace ballast::services {
namespace {

// The length of the UTF-8 character that `text` begins with, and its number; a length of 0: there is none.
std::pair<size_t, uint32_t> FirstCharacter(absl::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<uint32_t>(static_cast<unsigned char>(text[i])); };
  if (byte(0) < 0x80) return {1, byte(0)};
  const size_t length = byte(0) >= 0xf0 ? 4 : byte(0) >= 0xe0 ? 3 : 2;
  if (byte(0) < 0xc2 || byte(0) > 0xf4 || text.size() < length) return {0, 0};
  uint32_t number = byte(0) & (0x7fu >> length);
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return {0, 0};
    number = number << 6 | (byte(i) & 0x3f);
  }
  constexpr std::array<uint32_t, 5> kLeast = {0, 0, 0x80, 0x800, 0x10000};
  const bool surrogate = number >= 0xd800 && number < 0xe000;
  if (number < kLeast[length] || number > 0x10ffff || surrogate) return {0, 0};
  return {length, number};
}

constexpr uint32_t kInvalid = 0xffffffff;

// Calls `f` with each character's bytes and number; a byte that begins none comes alone, as kInvalid.
void ForEachCharacter(absl::string_view text, absl::FunctionRef<void(absl::string_view, uint32_t)> f) {
  while (!text.empty()) {
    const auto [length, number] = FirstCharacter(text);
    const size_t taken = std::max<size_t>(length, 1);
    f(text.substr(0, taken), length == 0 ? kInvalid : number);
    text.remove_prefix(taken);
  }
}

// A control character, a separator of lines, or a mark that turns the direction of text.
bool Steers(uint32_t number) {
  return number < 0x20 || (number >= 0x7f && number < 0xa0) || number == 0x200e || number == 0x200f ||
         (number >= 0x2028 && number <= 0x202e) || (number >= 0x2066 && number <= 0x2069);
}

}  // namespace

std::string Printable(absl::string_view text) {
  std::string out;
  ForEachCharacter(text, [&](absl::string_view character, uint32_t number) {
    absl::StrAppend(&out, number == kInvalid || Steers(number) ? "?" : character);
  });
  return out;
}

std::string ShowBytes(uint64_t bytes) {
  if (bytes >= uint64_t{1} << 30) return absl::StrFormat("%.2f GiB", static_cast<double>(bytes) / (1 << 30));
  if (bytes >= uint64_t{1} << 20) return absl::StrFormat("%.1f MiB", static_cast<double>(bytes) / (1 << 20));
  if (bytes >= uint64_t{1} << 10) return absl::StrFormat("%.1f KiB", static_cast<double>(bytes) / (1 << 10));
  return absl::StrCat(bytes, " B");
}

std::string ShowDurability(const v1::JobStatus& job, const std::string& unknown) {
  switch (job.durability()) {
    case v1::DURABILITY_NONE:
      return "none";
    case v1::DURABILITY_STEP:
      return "step";
    case v1::DURABILITY_EVERY_K:
      return absl::StrCat("every-", job.pin_interval());
    default:
      return unknown;
  }
}

std::string Quote(const std::string& text) {
  std::string out = "\"";
  ForEachCharacter(text, [&](absl::string_view character, uint32_t number) {
    if (number == '"' || number == '\\') out += '\\';
    if (number < 0x20) {
      absl::StrAppendFormat(&out, "\\u%04x", number);
    } else {
      absl::StrAppend(&out, number == kInvalid ? "\\ufffd" : character);
    }
  });
  return out + "\"";
}

std::string QuoteAll(const std::vector<std::string>& texts) {
  return absl::StrCat("[", absl::StrJoin(texts, ",", [](std::string* out, const std::string& t) { *out += Quote(t); }),
                      "]");
}

void Table::Add(std::vector<std::string> row) {
  for (std::string& cell : row) cell = Printable(cell);
  rows_.push_back(std::move(row));
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
