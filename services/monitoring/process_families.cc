#include <dirent.h>
#include <sys/resource.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>

#include "ballast/proto/base/threads.h"
#include "ballast/services/counters/process_counters.h"
#include "ballast/services/monitoring/server_families.h"

namespace ballast::services {
namespace {

// Fields of /proc/self/stat from the third on (proc(5) counts from 1); the second, in parentheses, may hold spaces.
struct ProcStat {
  std::array<uint64_t, 50> fields = {};
  uint64_t at(size_t number) const { return fields.at(number - 3); }
};

// nullopt where the file cannot be read, as when all descriptors are in use.
std::optional<ProcStat> ReadStat() {
  std::ifstream file("/proc/self/stat");
  std::string line;
  std::getline(file, line);
  ProcStat stat;
  const size_t end = line.rfind(')');
  if (end == std::string::npos) return std::nullopt;
  std::istringstream rest(line.substr(end + 1));
  std::string word;
  for (size_t i = 0; i < stat.fields.size() && rest >> word; ++i) {
    stat.fields.at(i) = std::strtoull(word.c_str(), nullptr, 10);
  }
  return stat;
}

double BootSeconds() {
  std::ifstream file("/proc/stat");
  std::string word;
  while (file >> word) {
    double seconds = 0;
    if (word == "btime" && file >> seconds) return seconds;
  }
  return 0;
}

// `max`: the limit, which is reached if the folder cannot be opened for want of a descriptor.
uint64_t OpenDescriptors(uint64_t max) {
  DIR* const directory = ::opendir("/proc/self/fd");
  if (directory == nullptr) return errno == EMFILE ? max : 0;
  uint64_t count = 0;
  while (const dirent* entry = ::readdir(directory)) count += entry->d_name[0] != '.';
  ::closedir(directory);
  return count - 1;  // its own
}

}  // namespace

void AddProcess(Families* out) {
  rlimit descriptors{};
  (void)::getrlimit(RLIMIT_NOFILE, &descriptors);
  Gauge(out, "process_open_fds", "Open descriptors.").Add({}, OpenDescriptors(descriptors.rlim_cur));
  Gauge(out, "process_max_fds", "Limit of open descriptors.").Add({}, descriptors.rlim_cur);
  const ProcessCounters& counters = OfProcess();
  Gauge(out, "ballast_connections", "Open connections of the rpc port.").Add({}, counters.connections.load());
  Gauge(out, "ballast_connections_limit", "Connections that the rpc port may have.")
      .Add({}, counters.connections_max.load());
  Counter(out, "ballast_connections_ended_total",
          "Connections without a call that was let in, which ended because of their age or for others' sake.")
      .Add({}, counters.ended_strangers.load());
  Gauge(out, "ballast_threads_limit",
        "Threads that the system lets the process have, with others that share the limit.")
      .Add({}, model::ThreadsAllowed().max);
  Counter lines(out, "ballast_log_lines_dropped_total", "Lines of logs that were dropped because nobody read them.");
  for (const LogKind kind : {LogKind::kProgram, LogKind::kAudit}) {
    lines.Add({{"log", kLogNames[static_cast<size_t>(kind)]}}, counters.DroppedLines(kind));
  }
  const std::optional<ProcStat> read = ReadStat();
  if (!read.has_value()) return;  // a counter that is 0 for a moment would look like a restart
  const ProcStat& stat = *read;
  const auto ticks = static_cast<double>(::sysconf(_SC_CLK_TCK));
  Counter(out, "process_cpu_seconds_total", "User and system time.")
      .Add({}, static_cast<double>(stat.at(14) + stat.at(15)) / ticks);
  Gauge(out, "process_resident_memory_bytes", "Memory of the process that is in RAM.")
      .Add({}, stat.at(24) * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE)));
  Gauge(out, "process_virtual_memory_bytes", "Addresses that the process has mapped.").Add({}, stat.at(23));
  Gauge(out, "process_threads", "Threads of the process.").Add({}, stat.at(20));
  Gauge(out, "process_start_time_seconds", "Start of the process, in seconds since 1970.")
      .Add({}, BootSeconds() + static_cast<double>(stat.at(22)) / ticks);
}

}  // namespace ballast::services
