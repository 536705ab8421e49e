// A file descriptor that a forked child does not keep.
#pragma once

#include <sys/types.h>

#include <utility>

namespace ballast::model {

// Owns `fd`. A forked child inherits every descriptor, and so keeps the parent's locks and transfers alive after the
// parent's death: a data loader's worker would keep a dead trainer's directory locked. Therefore a child closes its
// copies as it is forked, and destroying a copy of a Descriptor in the child does nothing. Threads: any.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd);
  // For a descriptor that another process made. Its close may take as long as that process likes (SO_LINGER, FUSE), so
  // it must not delay other descriptors. A forked child keeps its copy.
  static Descriptor Foreign(int fd);
  // For a socket through which another process may have sent descriptors, which close with the socket. If a child is
  // forked during the close, it keeps a copy that cannot send or receive.
  static Descriptor Socket(int fd);
  Descriptor(Descriptor&& other) noexcept
      : fd_(std::exchange(other.fd_, -1)), owner_(other.owner_), kind_(other.kind_) {}
  Descriptor& operator=(Descriptor&& other) noexcept;
  ~Descriptor() { Close(); }

  int get() const { return fd_; }
  // True in the process that made the Descriptor, false in a forked child.
  bool own() const;
  // Gives the descriptor up without closing it: the caller closes it.
  void Release();

 private:
  enum class Kind { kOwn, kForeign, kSocket };
  void Close();
  int fd_ = -1;
  pid_t owner_ = 0;
  Kind kind_ = Kind::kOwn;
};

}  // namespace ballast::model
