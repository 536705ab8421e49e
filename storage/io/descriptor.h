// A file descriptor that a forked child does not keep.
#pragma once

#include <sys/types.h>

#include <utility>

namespace ballast::storage {

// Owns `fd`. A forked child inherits every descriptor, and with it locks and transfers that would outlive the process
// that they belong to: a data loader's worker would keep a dead trainer's directory locked. So a child closes its
// copies as it is forked, and destroying a copy of a Descriptor there does nothing. Threads: any.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd);
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)), owner_(other.owner_) {}
  Descriptor& operator=(Descriptor&& other) noexcept;
  ~Descriptor() { Close(); }

  int get() const { return fd_; }
  // Whether this process made it, rather than one that it was forked from.
  bool own() const;
  // Leaves the descriptor to whoever else closes it.
  void Release();

 private:
  void Close();
  int fd_ = -1;
  pid_t owner_ = 0;
};

}  // namespace ballast::storage
