#include "ballast/services/tools/top/terminal.h"

#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace ballast::services {
namespace {

// Alternate screen and no cursor; back again, with all styles off.
constexpr absl::string_view kEnter = "\x1b[?1049h\x1b[?25l\x1b[2J";
constexpr absl::string_view kLeave = "\x1b[0m\x1b[?25h\x1b[?1049l";

constexpr std::array kFatal = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGPIPE};

// Written before the handlers are set; afterwards only read.
termios before;
termios raw;

void Write(absl::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(STDOUT_FILENO, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return;
    bytes.remove_prefix(static_cast<size_t>(n));
  }
}

// Both run in signal handlers: calls of the system alone.
void Begin() {
  (void)::tcsetattr(STDIN_FILENO, TCSAFLUSH, &raw);
  Write(kEnter);
}
void End() {
  Write(kLeave);
  (void)::tcsetattr(STDIN_FILENO, TCSAFLUSH, &before);
}

// SA_RESETHAND: the second time the signal does what it does by default.
void Die(int signal_number) {
  End();
  (void)::raise(signal_number);
}
void Pause(int) {
  const int error = errno;
  End();
  (void)::raise(SIGSTOP);
  Begin();  // continued; the next frame fills the screen
  errno = error;
}

void Handle(int signal_number, void (*handler)(int), int flags) {
  struct sigaction action = {};
  action.sa_handler = handler;
  action.sa_flags = flags;
  sigemptyset(&action.sa_mask);
  (void)::sigaction(signal_number, &action, nullptr);
}

}  // namespace

std::optional<Terminal> Terminal::Enter() {
  const char* const kind = std::getenv("TERM");
  if (kind == nullptr || absl::string_view(kind) == "dumb" || ::isatty(STDOUT_FILENO) == 0 ||
      ::tcgetattr(STDIN_FILENO, &before) != 0) {
    return std::nullopt;
  }
  raw = before;
  raw.c_lflag &= ~static_cast<tcflag_t>(ICANON | ECHO);  // signals of keys stay
  raw.c_cc[VMIN] = 1;
  raw.c_cc[VTIME] = 0;
  for (const int number : kFatal) Handle(number, Die, static_cast<int>(SA_RESETHAND | SA_NODEFER));
  Handle(SIGTSTP, Pause, 0);
  Begin();
  return Terminal();
}

Terminal::Terminal(Terminal&& other) noexcept : entered_(std::exchange(other.entered_, false)) {}

Terminal::~Terminal() {
  if (!entered_) return;
  for (const int number : kFatal) Handle(number, SIG_DFL, 0);
  Handle(SIGTSTP, SIG_DFL, 0);
  End();
}

TerminalSize Terminal::size() const {
  winsize size{};
  if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0 || size.ws_row == 0) return {};
  return {size.ws_col, size.ws_row};
}

std::optional<char> Terminal::WaitForKey(int milliseconds, int descriptor) {
  std::array<pollfd, 2> wanted = {{{STDIN_FILENO, POLLIN, 0}, {descriptor, POLLIN, 0}}};
  if (::poll(wanted.data(), wanted.size(), milliseconds) <= 0) return 0;
  if (wanted[0].revents == 0) return 0;
  char key = 0;
  const ssize_t n = ::read(STDIN_FILENO, &key, 1);
  if (n == 1) return key;
  if (n < 0 && errno == EINTR) return 0;
  return std::nullopt;
}

void Terminal::Draw(const std::vector<std::string>& lines) {
  // Each line is cleared alone, within one write: a cleared screen would flicker.
  std::string out = "\x1b[H";
  const size_t rows = size().rows;
  for (size_t i = 0; i < std::min(lines.size(), rows); ++i) {
    absl::StrAppend(&out, i == 0 ? "" : "\r\n", "\x1b[2K", lines[i]);
  }
  if (lines.size() < rows) absl::StrAppend(&out, "\r\n\x1b[J");
  Write(out);
}

}  // namespace ballast::services
