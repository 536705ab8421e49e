#include "ballast/services/tools/top/top.h"

#include <langinfo.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <clocale>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "ballast/services/tools/top/terminal.h"
#include "ballast/services/tools/top/top_frame.h"

namespace ballast::services {
namespace {

struct Seen {
  ClusterView cluster;
  absl::Time time;
};

// Looks once per interval on a thread of its own, so that a server that does not answer holds up no key.
class Watch {
 public:
  explicit Watch(const TopOptions& options) : options_(options), ready_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    thread_ = std::thread([this] { Run(); });
  }
  ~Watch() {
    {
      absl::MutexLock lock(&mu_);
      ended_ = true;
    }
    thread_.join();
    ::close(ready_);
  }

  // Can be read once there is something to Take.
  int descriptor() const { return ready_; }
  std::optional<Seen> Take() {
    uint64_t ignored = 0;
    (void)!::read(ready_, &ignored, sizeof ignored);
    absl::MutexLock lock(&mu_);
    return std::exchange(seen_, std::nullopt);
  }

 private:
  void Run() {
    while (true) {
      const absl::Time began = absl::Now();
      Seen seen{Judge(options_.look()), absl::Now()};
      absl::MutexLock lock(&mu_);
      seen_ = std::move(seen);
      const uint64_t one = 1;
      (void)!::write(ready_, &one, sizeof one);
      if (mu_.AwaitWithDeadline(absl::Condition(&ended_), began + options_.interval)) return;
    }
  }

  const TopOptions& options_;
  const int ready_;
  absl::Mutex mu_;
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
  std::optional<Seen> seen_ ABSL_GUARDED_BY(mu_);
  std::thread thread_;
};

int CodeOf(const ClusterView& cluster) { return cluster.problems.empty() ? 0 : 1; }

// https://no-color.org: set and not empty.
bool WantsColours() {
  const char* const no_color = std::getenv("NO_COLOR");
  return no_color == nullptr || *no_color == '\0';
}

// Acts on a key: false for the end.
bool Take(char key, TopLook* look) {
  if (key == 's') look->order = static_cast<JobOrder>((static_cast<int>(look->order) + 1) % kJobOrders);
  if (key == '1') look->per_server = !look->per_server;
  return key != 'q';
}

// A frame is drawn this often, for a terminal whose size has changed or that shows the program again after a stop.
constexpr int kFrameMilliseconds = 250;

void RunOnTerminal(const TopOptions& options, std::optional<Terminal> terminal, TopLook look) {
  look.keys = true;
  const bool colours = WantsColours();
  VersionHistory history;
  std::optional<Seen> newest;
  Watch watch(options);
  while (true) {
    if (std::optional<Seen> seen = watch.Take(); seen.has_value()) {
      newest = std::move(seen);
      history.Add(newest->cluster, newest->time);
    }
    if (newest.has_value()) {
      const TerminalSize size = terminal->size();
      look.columns = size.columns;
      look.rows = size.rows;
      std::vector<std::string> lines;
      for (const StyledLine& line : DrawTop(newest->cluster, history, newest->time, look)) {
        lines.push_back(line.Show(size.columns, colours));
      }
      terminal->Draw(lines);
    }
    const std::optional<char> key = terminal->WaitForKey(kFrameMilliseconds, watch.descriptor());
    if (!key.has_value() || !Take(*key, &look)) break;
  }
  terminal.reset();  // before the wait for servers that are being asked
}

int PrintFrames(const TopOptions& options, const TopLook& look) {
  VersionHistory history;
  while (true) {
    const absl::Time began = absl::Now();
    const ClusterView cluster = Judge(options.look());
    history.Add(cluster, absl::Now());
    if (options.json) {
      std::fputs(ShowJson(cluster).c_str(), stdout);
    } else {
      for (const StyledLine& line : DrawTop(cluster, history, absl::Now(), look)) {
        std::printf("%s\n", line.Show(look.columns, /*colours=*/false).c_str());
      }
      if (!options.once) std::printf("\n");
    }
    std::fflush(stdout);
    if (options.once) return CodeOf(cluster);
    absl::SleepFor(began + options.interval - absl::Now());
  }
}

}  // namespace

int RunTop(const TopOptions& options) {
  std::setlocale(LC_CTYPE, "");
  TopLook look;
  look.unicode = absl::string_view(::nl_langinfo(CODESET)) == "UTF-8";
  if (!options.once && !options.json) {
    if (std::optional<Terminal> terminal = Terminal::Enter(); terminal.has_value()) {
      RunOnTerminal(options, *std::move(terminal), look);
      return 0;
    }
  }
  return PrintFrames(options, look);
}

}  // namespace ballast::services
