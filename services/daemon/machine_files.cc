#include "ballast/services/daemon/machine_files.h"

#include <sched.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <thread>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace ballast::services {
namespace {

constexpr std::streamsize kFileBytesMax = 64 << 10;
// Version 1 writes "no limit" as the largest number of bytes in whole pages.
constexpr double kNoLimitBytes = 0x1p62;

// A hierarchy of control groups, and this process's place there.
struct Hierarchy {
  bool second_version = false;
  std::string mount;  // with `root` in front
  std::string group;  // "/a/b"; "/" is the mount itself
};

// Place of this process in the hierarchy with `controller`, by lines "4:memory:/a/b", or "0::/a/b" of version 2.
std::optional<std::string> GroupOf(const std::string& lines, const std::string& controller) {
  for (const absl::string_view line : absl::StrSplit(lines, '\n')) {
    const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() != 3) continue;
    const std::vector<std::string> names = absl::StrSplit(parts[1], ',');
    const bool has = std::find(names.begin(), names.end(), controller) != names.end();
    if (controller.empty() ? parts[0] == "0" && parts[1].empty() : has) return parts[2];
  }
  return std::nullopt;
}

// Hierarchies that may limit `controller`: a machine may have both versions, each with other controllers.
std::vector<Hierarchy> HierarchiesOf(const std::string& root, const std::string& controller) {
  const std::string groups = ReadMachineFile(root + "/proc/self/cgroup");
  const std::string mounts = ReadMachineFile(root + "/proc/self/mountinfo");
  std::vector<Hierarchy> found;
  for (const absl::string_view line : absl::StrSplit(mounts, '\n')) {
    // "25 20 0:21 /root /mount options ... - type source superoptions"
    const std::vector<std::string> halves = absl::StrSplit(line, absl::MaxSplits(" - ", 1));
    if (halves.size() != 2) continue;
    const std::vector<std::string> left = absl::StrSplit(halves[0], ' '), right = absl::StrSplit(halves[1], ' ');
    if (left.size() < 5 || right.size() < 3) continue;
    const bool second = right[0] == "cgroup2";
    const std::vector<std::string> options = absl::StrSplit(right[2], ',');
    const bool first = right[0] == "cgroup" && std::find(options.begin(), options.end(), controller) != options.end();
    if (!second && !first) continue;
    std::optional<std::string> group = GroupOf(groups, second ? "" : controller);
    if (!group.has_value()) continue;
    // A container sees a part of the hierarchy: the part's own name does not appear below the mount.
    if (left[3] != "/" && absl::StartsWith(*group, left[3])) group = group->substr(left[3].size());
    if (group->empty()) group = "/";
    found.push_back({second, root + left[4], *group});
  }
  return found;
}

using ReadLimit = std::function<std::optional<GroupLimit>(const std::string& folder, bool second_version)>;

std::optional<GroupLimit> Tightest(const std::string& root, const std::string& controller, const ReadLimit& read) {
  std::optional<GroupLimit> tightest;
  for (const Hierarchy& hierarchy : HierarchiesOf(root, controller)) {
    for (std::string group = hierarchy.group;; group.resize(group.rfind('/'))) {
      if (group == "/") group.clear();
      const std::optional<GroupLimit> limit = read(hierarchy.mount + group, hierarchy.second_version);
      if (limit.has_value() && (!tightest.has_value() || limit->amount < tightest->amount)) tightest = limit;
      if (group.empty()) break;
    }
  }
  return tightest;
}

std::optional<double> NumberIn(const std::string& path) {
  double number = 0;
  if (!absl::SimpleAtod(ReadMachineFile(path), &number)) return std::nullopt;
  return number;
}

}  // namespace

std::string ReadMachineFile(const std::string& path) {
  std::ifstream file(path);
  std::string text(kFileBytesMax, '\0');
  file.read(text.data(), kFileBytesMax);
  text.resize(file.gcount() > 0 ? static_cast<size_t>(file.gcount()) : 0);
  absl::StripTrailingAsciiWhitespace(&text);
  return text;
}

std::optional<uint64_t> NumberAfter(const std::string& text, const std::string& key) {
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    if (!absl::ConsumePrefix(&line, key)) continue;
    const std::vector<absl::string_view> words = absl::StrSplit(line, absl::ByAnyChar(" \t"), absl::SkipEmpty());
    uint64_t number = 0;
    if (!words.empty() && absl::SimpleAtoi(words[0], &number)) return number;
  }
  return std::nullopt;
}

bool IsWsl(const std::string& root) {
  return absl::StrContains(absl::AsciiStrToLower(ReadMachineFile(root + "/proc/sys/kernel/osrelease")), "microsoft");
}

std::optional<GroupLimit> MemoryLimit(const std::string& root) {
  return Tightest(root, "memory", [](const std::string& folder, bool second_version) -> std::optional<GroupLimit> {
    const std::string file = folder + (second_version ? "/memory.max" : "/memory.limit_in_bytes");
    const std::optional<double> bytes = NumberIn(file);  // "max" is no number
    if (!bytes.has_value() || *bytes >= kNoLimitBytes) return std::nullopt;
    return GroupLimit{*bytes, file};
  });
}

std::optional<GroupLimit> ProcessorLimit(const std::string& root) {
  return Tightest(root, "cpu", [](const std::string& folder, bool second_version) -> std::optional<GroupLimit> {
    double quota = 0, period = 0;
    std::string file = folder + (second_version ? "/cpu.max" : "/cpu.cfs_quota_us");
    if (second_version) {
      const std::vector<std::string> words = absl::StrSplit(ReadMachineFile(file), ' ');
      if (words.size() != 2 || !absl::SimpleAtod(words[0], &quota) || !absl::SimpleAtod(words[1], &period)) {
        return std::nullopt;
      }
    } else {
      quota = NumberIn(file).value_or(-1);  // -1: no limit
      period = NumberIn(folder + "/cpu.cfs_period_us").value_or(0);
    }
    if (quota <= 0 || period <= 0) return std::nullopt;
    return GroupLimit{quota / period, file};
  });
}

std::optional<uint64_t> MemoryFileSystemBytes(const std::string& root, const std::string& folder) {
  const std::string mounts = ReadMachineFile(root + "/proc/self/mountinfo");
  std::optional<uint64_t> bytes;
  for (const absl::string_view line : absl::StrSplit(mounts, '\n')) {
    // As in HierarchiesOf. The last of several mounts on one folder hides the others.
    const std::vector<std::string> halves = absl::StrSplit(line, absl::MaxSplits(" - ", 1));
    const std::vector<std::string> left = absl::StrSplit(halves[0], ' ');
    if (halves.size() != 2 || left.size() < 5 || left[4] != folder) continue;
    bytes.reset();
    const std::vector<std::string> right = absl::StrSplit(halves[1], ' ');
    if (right.size() < 3 || right[0] != "tmpfs") continue;
    for (absl::string_view option : absl::StrSplit(right[2], ',')) {
      uint64_t kib = 0;
      if (absl::ConsumePrefix(&option, "size=") && absl::ConsumeSuffix(&option, "k") &&
          absl::SimpleAtoi(option, &kib)) {
        bytes = kib << 10;
      }
    }
  }
  return bytes;
}

int ScheduledProcessors() {
  cpu_set_t mine;
  CPU_ZERO(&mine);
  // It fails on a machine with more processors than the set has places.
  if (sched_getaffinity(0, sizeof(mine), &mine) == 0) return CPU_COUNT(&mine);
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

int UsableProcessors(const std::string& root) {
  const int scheduled = ScheduledProcessors();
  const std::optional<GroupLimit> limit = ProcessorLimit(root);
  return limit.has_value() ? std::clamp(static_cast<int>(std::min(limit->amount, 1e9)), 1, scheduled) : scheduled;
}

}  // namespace ballast::services
