// A file descriptor that a forked child does not keep.
#pragma once

#include <sys/types.h>

#include <utility>

namespace ballast::storage {

// Owns `fd`. A forked child inherits every descriptor, and so keeps the parent's locks and transfers alive after the
// parent's death: a data loader's worker would keep a dead trainer's directory locked. Therefore a child closes its
// copies as it is forked, and destroying a copy of a Descriptor in the child does nothing. Threads: any.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd);
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)), owner_(other.owner_) {}
  Descriptor& operator=(Descriptor&& other) noexcept;
  ~Descriptor() { Close(); }

  int get() const { return fd_; }
  // True in the process that made the Descriptor, false in a forked child.
  bool own() const;
  // Gives the descriptor up without closing it: the caller closes it.
  void Release();

 private:
  void Close();
  int fd_ = -1;
  pid_t owner_ = 0;
};

}  // namespace ballast::storage
