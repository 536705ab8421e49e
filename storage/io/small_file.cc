#include "ballast/storage/io/small_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/descriptor.h"
#include "ballast/proto/base/status.h"
#include "ballast/storage/io/block_file.h"

namespace ballast::storage {
namespace {

absl::Status WriteAndSync(const std::string& path, absl::string_view text) {
  const model::Descriptor file(open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (file.get() < 0) return IoError(errno, "open", path, 0, 0);
  while (!text.empty()) {
    const ssize_t written = write(file.get(), text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return IoError(errno, "write", path, 0, text.size());
    text.remove_prefix(static_cast<size_t>(written));
  }
  return fsync(file.get()) == 0 ? absl::OkStatus() : IoError(errno, "sync", path, 0, 0);
}

absl::Status SyncFolder(const std::string& path) {
  const std::string parent = std::filesystem::path(path).parent_path(), folder = parent.empty() ? "." : parent;
  const model::Descriptor file(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (file.get() < 0) return IoError(errno, "open", folder, 0, 0);
  return fsync(file.get()) == 0 ? absl::OkStatus() : IoError(errno, "sync", folder, 0, 0);
}

}  // namespace

absl::StatusOr<std::string> ReadSmallFile(const std::string& path) {
  const model::Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.get() < 0 && (errno == ENOENT || errno == ENOTDIR))
    return absl::NotFoundError(absl::StrCat("there is no ", path));
  if (file.get() < 0) return IoError(errno, "open", path, 0, 0);
  std::string text;
  for (;;) {
    char part[4096];
    const ssize_t count = read(file.get(), part, sizeof(part));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return IoError(errno, "read", path, text.size(), sizeof(part));
    if (count == 0) return text;
    text.append(part, static_cast<size_t>(count));
  }
}

absl::Status WriteSmallFile(const std::string& path, absl::string_view text) {
  const std::string fresh = path + ".new";
  absl::Status status = WriteAndSync(fresh, text);
  if (status.ok() && std::rename(fresh.c_str(), path.c_str()) != 0) status = IoError(errno, "rename", path, 0, 0);
  if (status.ok()) return SyncFolder(path);
  unlink(fresh.c_str());
  return status;
}

}  // namespace ballast::storage
