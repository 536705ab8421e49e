// A file system of a few MiB for a test to fill. Needs the right to mount.
#pragma once

#include <fcntl.h>
#include <sys/mount.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <vector>

#include "ballast/tests/scratch_directory.h"

namespace ballast {

class SmallDisk {
 public:
  explicit SmallDisk(size_t bytes) {
    const std::string options = "size=" + std::to_string(bytes);
    if (::mount("tmpfs", path().c_str(), "tmpfs", 0, options.c_str()) != 0) why_not_ = std::strerror(errno);
  }
  ~SmallDisk() {
    // Lazily: the test may have failed with files open.
    if (mounted()) ::umount2(path().c_str(), MNT_DETACH);
  }
  SmallDisk(const SmallDisk&) = delete;
  SmallDisk& operator=(const SmallDisk&) = delete;
  bool mounted() const { return why_not_.empty(); }
  const std::string& why_not() const { return why_not_; }
  const std::string& path() const { return directory_.path(); }

  // Takes all free space.
  void Fill() const {
    const int fd = ::open((path() + "/filler").c_str(), O_CREAT | O_WRONLY | O_APPEND | O_CLOEXEC, 0600);
    const std::vector<char> page(4096);
    while (::write(fd, page.data(), page.size()) > 0) {
    }
    ::close(fd);
  }
  void Empty() const { ::unlink((path() + "/filler").c_str()); }

 private:
  ScratchDirectory directory_;
  std::string why_not_;
};

}  // namespace ballast
