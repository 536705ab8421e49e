#include "ballast/proto/base/threads.h"

#include <sys/resource.h>
#include <unistd.h>

#include <fstream>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/notification.h"
#include "ballast/proto/base/status.h"

namespace ballast::model {
namespace {

// The number in a file; `max` and whatever is no number: none.
uint64_t NumberIn(const std::string& path) {
  std::ifstream file(path);
  std::string text;
  uint64_t number = 0;
  return file >> text && absl::SimpleAtoi(text, &number) ? number : UINT64_MAX;
}

void Lower(uint64_t max, const char* name, ThreadLimit* limit) {
  if (max < limit->max) *limit = {max, name};
}

}  // namespace

ThreadLimit ThreadsAllowed() {
  ThreadLimit limit{NumberIn("/proc/sys/kernel/threads-max"), "kernel.threads-max"};
  rlimit own = {};
  // The superuser may go beyond it.
  if (getrlimit(RLIMIT_NPROC, &own) == 0 && own.rlim_cur != RLIM_INFINITY && geteuid() != 0) {
    Lower(own.rlim_cur, "ulimit -u", &limit);
  }
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    // "0::/path" of version 2, "11:pids:/path" of version 1. Each group above bounds it as well.
    const bool unified = absl::StartsWith(line, "0::");
    if (!unified && !absl::StrContains(line, ":pids:")) continue;
    const std::string root = unified ? "/sys/fs/cgroup" : "/sys/fs/cgroup/pids";
    for (std::string path = line.substr(line.find(":/") + 1); !path.empty(); path.resize(path.rfind('/'))) {
      Lower(NumberIn(absl::StrCat(root, path, "/pids.max")), "pids.max", &limit);
    }
    Lower(NumberIn(root + "/pids.max"), "pids.max", &limit);  // where a container sees its own group as the root
  }
  return limit;
}

absl::Status NoThread(const std::system_error& error) {
  if (error.code() != std::errc::resource_unavailable_try_again) {
    return Error(absl::StatusCode::kResourceExhausted, kLimit, error.what());
  }
  const ThreadLimit limit = ThreadsAllowed();
  return Error(absl::StatusCode::kResourceExhausted, kLimit,
               absl::StrCat("the system makes no further thread (", error.what(), "); the lowest limit is ", limit.name,
                            " = ", limit.max,
                            "; raise it (TasksMax= of a unit, --pids-limit of a container, "
                            "podPidsLimit of a kubelet), or run fewer jobs on this server"));
}

absl::StatusOr<std::thread> MakeThread(std::function<void()> body) {
  try {
    return std::thread(std::move(body));
  } catch (const std::system_error& error) {
    return NoThread(error);
  }
}

absl::Status CheckThreads(int count) {
  absl::Notification tried;
  std::vector<std::thread> threads;
  absl::Status status;
  for (int i = 0; i < count && status.ok(); ++i) {
    absl::StatusOr<std::thread> thread = MakeThread([&tried] { tried.WaitForNotification(); });
    status = thread.status();
    if (thread.ok()) threads.push_back(*std::move(thread));
  }
  tried.Notify();
  for (std::thread& thread : threads) thread.join();
  return status;
}

}  // namespace ballast::model
