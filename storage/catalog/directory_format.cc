#include "ballast/storage/catalog/directory_format.h"

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/storage/io/small_file.h"

namespace ballast::storage {
namespace {

std::string FormatPath(const std::string& directory) { return absl::StrCat(directory, "/", kFormatFile); }

// False unless both numbers are there. Other keys are a later program's.
bool Parse(absl::string_view text, DirectoryFormat* format) {
  std::map<absl::string_view, absl::string_view> values;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    const std::pair<absl::string_view, absl::string_view> pair = absl::StrSplit(line, absl::MaxSplits(": ", 1));
    values.insert(pair);
  }
  return absl::SimpleAtoi(values["version"], &format->version) &&
         absl::SimpleAtoi(values["least_reader"], &format->least_reader) && format->least_reader > 0 &&
         format->least_reader <= format->version;
}

std::string Show(const DirectoryFormat& format) {
  return absl::StrCat(
      "# The format of this data directory. Ballast reads this file before all others: leave it as it is.\n"
      "version: ",
      format.version, "\nleast_reader: ", format.least_reader, "\n");
}

// None of a directory without the file.
absl::StatusOr<std::optional<DirectoryFormat>> Read(const std::string& directory) {
  const absl::StatusOr<std::string> text = ReadSmallFile(FormatPath(directory));
  if (absl::IsNotFound(text.status())) return std::nullopt;
  BALLAST_RETURN_IF_ERROR(text.status());
  DirectoryFormat format;
  if (Parse(*text, &format)) return format;
  return model::Error(
      absl::StatusCode::kDataLoss, model::kIo,
      absl::StrCat(FormatPath(directory), " is damaged: expected `version: N` and `least_reader: N`, got ",
                   text->size(), " bytes without them. Check the disk; to go on, write the file as Ballast ",
                   model::Version(), " does: `version: ", kDirectoryFormat.version, "` and `least_reader: ",
                   kDirectoryFormat.least_reader, "`, but only if no later version has used the directory"));
}

absl::Status Check(const std::string& directory, const DirectoryFormat& format) {
  if (format.least_reader <= kDirectoryFormat.version) return absl::OkStatus();
  return model::Error(
      absl::StatusCode::kFailedPrecondition, model::kLaterVersion,
      absl::StrCat("data directory '", directory, "' has format ", format.version, " and asks for a program of format ",
                   format.least_reader, " or later; this is Ballast ", model::Version(), " of format ",
                   kDirectoryFormat.version,
                   ". Nothing was changed. Run the version that used it last, or a later one"));
}

}  // namespace

absl::Status CheckDirectoryFormat(const std::string& directory) {
  BALLAST_ASSIGN_OR_RETURN(const std::optional<DirectoryFormat> format, Read(directory));
  return Check(directory, format.value_or(DirectoryFormat()));
}

absl::Status SettleDirectoryFormat(const std::string& directory) {
  BALLAST_ASSIGN_OR_RETURN(const std::optional<DirectoryFormat> format, Read(directory));
  const DirectoryFormat old = format.value_or(DirectoryFormat());
  BALLAST_RETURN_IF_ERROR(Check(directory, old));
  if (format.has_value() && old.version >= kDirectoryFormat.version) return absl::OkStatus();
  return WriteSmallFile(FormatPath(directory),
                        Show({kDirectoryFormat.version, std::max(old.least_reader, kDirectoryFormat.least_reader)}));
}

}  // namespace ballast::storage
