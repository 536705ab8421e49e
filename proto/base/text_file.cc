#include "ballast/proto/base/text_file.h"

#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"

namespace ballast::model {
namespace {

constexpr size_t kBytesMax = 1 << 20;

void AddStamp(const std::string& path, std::string* to) {
  struct stat info = {};
  if (::stat(path.c_str(), &info) != 0) {
    absl::StrAppend(to, "none;");
    return;
  }
  absl::StrAppend(to, info.st_dev, ":", info.st_ino, ":", info.st_size, ":", info.st_mtim.tv_sec, ":",
                  info.st_mtim.tv_nsec, ";");
  if (!S_ISDIR(info.st_mode)) return;
  std::vector<std::string> entries;
  std::error_code error;
  for (std::filesystem::directory_iterator entry(path, error), end; !error && entry != end; entry.increment(error)) {
    entries.push_back(entry->path().string());
  }
  std::sort(entries.begin(), entries.end());
  for (const std::string& entry : entries) {
    if (!std::filesystem::is_directory(entry, error)) AddStamp(entry, to);
  }
}

}  // namespace

absl::StatusOr<std::string> ReadTextFile(const std::string& path) {
  const auto bad = [&path](absl::string_view why) {
    return Error(absl::StatusCode::kInvalidArgument, kBadConfig,
                 absl::StrCat(path, ": expected a file of 1 byte to 1 MiB; ", why));
  };
  std::ifstream file(path, std::ios::binary);
  if (!file.is_open()) return bad("it cannot be opened");
  std::string text(kBytesMax + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(file.gcount()));
  if (file.bad()) return bad("it cannot be read");
  if (text.empty()) return bad("it is empty, or a directory");
  if (text.size() > kBytesMax) return bad("it is longer");
  return text;
}

std::string StampOf(const std::vector<std::string>& paths) {
  std::string stamp;
  for (const std::string& path : paths) {
    if (!path.empty()) AddStamp(path, &stamp);
  }
  return stamp;
}

}  // namespace ballast::model
