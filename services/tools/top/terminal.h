// The terminal in full-screen use: alternate screen, no echo, keys at once. When the process ends, the terminal is as
// it was before, also after a crash or another signal that ends the process, except SIGKILL.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

namespace ballast::services {

struct TerminalSize {
  size_t columns = 80;
  size_t rows = 24;
};

// One at a time. Threads: the thread that made it, but signals may come on any.
class Terminal {
 public:
  // Null if standard input and output are not both a terminal that knows escape sequences (TERM=dumb does not).
  static std::optional<Terminal> Enter();
  Terminal(Terminal&& other) noexcept;
  Terminal& operator=(Terminal&&) = delete;
  ~Terminal();

  TerminalSize size() const;
  // Waits at most `milliseconds`, for a key or until `descriptor` can be read. Returns the key, 0 for none; nullopt if
  // the terminal is gone.
  std::optional<char> WaitForKey(int milliseconds, int descriptor);
  // Shows lines from the top. Cuts what is longer than the screen, and leaves the rest of the screen empty.
  void Draw(const std::vector<std::string>& lines);

 private:
  Terminal() = default;
  bool entered_ = true;
};

}  // namespace ballast::services
