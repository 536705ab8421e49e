#include "ballast/proto/base/byte_sizes.h"

#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"

namespace ballast::model {

absl::StatusOr<uint64_t> ParseBytes(const std::string& text) {
  static const std::vector<std::pair<std::string, int>> kSuffixes = {
      {"KiB", 10}, {"MiB", 20}, {"GiB", 30}, {"TiB", 40}, {"B", 0}};
  std::string digits(absl::StripAsciiWhitespace(text));
  int shift = 0;
  for (const auto& [suffix, bits] : kSuffixes) {
    if (!absl::EndsWith(digits, suffix)) continue;
    digits.resize(digits.size() - suffix.size());
    digits = std::string(absl::StripAsciiWhitespace(digits));
    shift = bits;
    break;
  }
  uint64_t number = 0;
  const bool plain = !digits.empty() && absl::ascii_isdigit(digits[0]);
  if (!plain || !absl::SimpleAtoi(digits, &number) || number > std::numeric_limits<uint64_t>::max() >> shift) {
    return Error(absl::StatusCode::kInvalidArgument, kBadConfig,
                 absl::StrCat("expected bytes, such as 512MiB, got '", text, "'"));
  }
  return number << shift;
}

}  // namespace ballast::model
