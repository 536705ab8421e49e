// The doctor, with each thing taken away: on this machine where that can be done, else in a copy of /proc and /sys.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <sys/socket.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "ballast/proto/model/protocol.h"
#include "ballast/services/daemon/machine_files.h"
#include "ballast/services/daemon/memory_room.h"
#include "ballast/services/tools/doctor/doctor_command.h"
#include "ballast/tests/scratch_directory.h"
#include "ballast/tests/services/daemon.h"
#include "ballast/tests/services/gateway/security/authority.h"
#include "ballast/tests/small_disk.h"

namespace ballast::services {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr uint64_t kMiB = 1 << 20;

Check Find(const Checks& checks, const std::string& what) {
  for (const Check& check : checks) {
    if (check.what == what) return check;
  }
  ADD_FAILURE() << "no line '" << what << "' in\n" << ShowText(checks);
  return {};
}

// The value of `key` in the line of `what` of the JSON: each line is flat.
std::string InJson(const std::string& json, const std::string& what, const std::string& key) {
  const size_t at = json.find("\"what\":\"" + what + "\"");
  if (at == std::string::npos) return "no line '" + what + "' in " + json;
  const size_t begin = json.rfind('{', at), end = json.find('}', at);
  const std::string line = json.substr(begin, end - begin);
  const size_t value = line.find("\"" + key + "\":\"") + key.size() + 4;
  return line.substr(value, line.find('"', value) - value);
}

class DoctorTest : public ::testing::Test {
 protected:
  std::string Write(const std::string& path, const std::string& text) {
    const fs::path file = directory_.path() + path;
    fs::create_directories(file.parent_path());
    std::ofstream(file) << text;
    return file;
  }
  // A server that fits: 64 MiB of DRAM, free ports.
  std::string ConfigFile(const std::string& more = "") {
    return Write("/ballastd.yaml", "listen: 127.0.0.1:0\nmetrics_listen: 127.0.0.1:0\ndata_directory: " +
                                       directory_.path() + "/data\nbudget:\n  dram: 64MiB\n" + more);
  }
  Subject SubjectWith(uint64_t dram, uint64_t nvme = 0) {
    Subject subject;
    subject.config.emplace();
    subject.config->server.data_directory = directory_.path() + "/data";
    subject.config->server.budget = {.hbm = 0, .dram = dram, .nvme = nvme};
    subject.config->listen = subject.config->metrics_listen = "127.0.0.1:0";
    return subject;
  }
  // Runs the real program behind `wrapper`; its JSON.
  Finished Doctor(std::vector<std::string> wrapper, const std::vector<std::string>& arguments = {}) {
    wrapper.insert(wrapper.end(), {CtlPath(), "doctor", "--json", "--config", ConfigFile()});
    wrapper.insert(wrapper.end(), arguments.begin(), arguments.end());
    return RunProcess(wrapper);
  }

  ScratchDirectory directory_;
};

TEST_F(DoctorTest, NothingStopsThisMachine) {
  const Finished done = Doctor({});
  EXPECT_EQ(done.code, 0) << done.out << done.err;
  EXPECT_THAT(done.out, HasSubstr("\"bad\":0"));
  EXPECT_EQ(InJson(done.out, "kernels", "verdict"), "ok");
  EXPECT_FALSE(fs::exists(directory_.path() + "/data")) << "the doctor makes no data directory";
  for (const auto& file : fs::directory_iterator(directory_.path())) {
    EXPECT_EQ(file.path().filename(), "ballastd.yaml") << "the doctor leaves nothing behind";
  }
  const Finished text = RunProcess({CtlPath(), "doctor", "--config", ConfigFile()});
  EXPECT_THAT(text.out, HasSubstr("nothing here stops a server"));
}

TEST_F(DoctorTest, BadConfigurationStopsAServerAndNoneIsANote) {
  const Finished bad = RunProcess({CtlPath(), "doctor", "--config", ConfigFile("log_level: loud\n")});
  EXPECT_EQ(bad.code, 1);
  EXPECT_THAT(bad.out, HasSubstr("ballastd.yaml:6: log_level: expected trace"));
  const Finished none = RunProcess({CtlPath(), "doctor", "--json"});
  EXPECT_EQ(InJson(none.out, "configuration", "verdict"), "note");
  EXPECT_THAT(none.out, Not(HasSubstr("\"what\":\"free space\"")));
}

TEST_F(DoctorTest, LockedMemoryTakenAway) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "AddressSanitizer makes mlock do nothing";
#endif
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to run as another user";
  fs::permissions(directory_.path(), fs::perms::all);
  // `nobody` has not the right that lifts the limit.
  const std::vector<std::string> wrapper = {"/usr/bin/prlimit", "--memlock=65536", "--", "/usr/bin/setpriv",
                                            "--reuid=65534",    "--clear-groups",  "--"};
  const Finished done = Doctor(wrapper);
  EXPECT_EQ(InJson(done.out, "locked memory", "verdict"), "note") << done.err;
  EXPECT_THAT(InJson(done.out, "locked memory", "found"), HasSubstr("64.0 KiB"));
  EXPECT_THAT(InJson(done.out, "locked memory", "mend"), HasSubstr("LimitMEMLOCK=infinity"));
  EXPECT_EQ(done.code, 0) << "a server runs without";
}

TEST_F(DoctorTest, IoUringTakenAway) {
  const Finished done = Doctor({std::getenv("WITHOUT_URING")});
  if (done.code == 77) GTEST_SKIP() << done.err;
  EXPECT_EQ(InJson(done.out, "io_uring", "verdict"), "note") << done.out;
  EXPECT_THAT(InJson(done.out, "io_uring", "found"), HasSubstr("Operation not permitted"));
  EXPECT_THAT(InJson(done.out, "io_uring", "found"), HasSubstr("a seccomp filter is on"));
  EXPECT_THAT(InJson(done.out, "io_uring", "mend"), HasSubstr("seccomp="));
  EXPECT_EQ(done.code, 0);
}

TEST_F(DoctorTest, MemoryLimitOfARealControlGroup) {
  const std::string mount = fs::exists("/sys/fs/cgroup/memory") ? "/sys/fs/cgroup/memory" : "/sys/fs/cgroup";
  const std::string group = mount + "/ballast-doctor-" + std::to_string(getpid());
  const std::string limit = group + (mount == "/sys/fs/cgroup" ? "/memory.max" : "/memory.limit_in_bytes");
  std::error_code error;
  fs::create_directory(group, error);
  if (error || !fs::exists(limit)) {
    fs::remove(group, error);
    GTEST_SKIP() << "no control group of memory can be made here: " << group;
  }
  std::ofstream(limit) << 60 * kMiB;
  std::vector<std::string> wrapper = {"/bin/sh", "-c", "echo $$ > " + group + "/cgroup.procs && exec \"$@\"", "sh"};
  const Finished done = Doctor(wrapper);
  wrapper.insert(wrapper.end(), {DaemonPath(), "--config", ConfigFile()});
  const Finished server = RunProcess(wrapper);
  for (int tries = 0; tries < 50 && rmdir(group.c_str()) != 0; ++tries) usleep(20'000);
  EXPECT_EQ(InJson(done.out, "memory limit", "verdict"), "bad") << done.out << done.err;
  EXPECT_THAT(InJson(done.out, "memory limit", "found"), HasSubstr("60.0 MiB by " + limit));
  EXPECT_EQ(done.code, 1);
  // The server that the doctor warns of does not start.
  EXPECT_EQ(server.code, 2) << server.err;
  EXPECT_THAT(server.err, HasSubstr("ballastd: memory limit 60.0 MiB by " + limit + ", wanted 64.0 MiB (budget.dram)"));
}

TEST_F(DoctorTest, ControlGroupsOfBothVersions) {
  Subject subject = SubjectWith(/*dram=*/100 * kMiB);
  subject.root = directory_.path();
  Write("/proc/meminfo", "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n");
  // As in a container: the own group is the mount's root; a group above has no limit.
  Write("/proc/self/cgroup", "0::/a/b\n");
  Write("/proc/self/mountinfo", "30 23 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate\n");
  Write("/sys/fs/cgroup/a/b/memory.max", "max\n");
  Write("/sys/fs/cgroup/a/b/cpu.max", "150000 100000\n");
  EXPECT_EQ(UsableProcessors(subject.root), 1);
  EXPECT_EQ(Find(CheckMemory(subject), "memory limit").verdict, Verdict::kOk);
  Write("/sys/fs/cgroup/a/memory.max", "99000000\n");
  const Check above = Find(CheckMemory(subject), "memory limit");
  EXPECT_EQ(above.verdict, Verdict::kBad);
  EXPECT_THAT(above.found, HasSubstr("/sys/fs/cgroup/a/memory.max"));
  Write("/sys/fs/cgroup/a/memory.max", "200000000\n");
  EXPECT_EQ(Find(CheckMemory(subject), "memory limit").verdict, Verdict::kNote) << "room for budgets, none for peaks";

  subject.config->server.compute_threads = 2;
  const Check processors = Find(CheckProcessor(subject, kernels::CpuProcessor()), "processors");
  EXPECT_EQ(processors.verdict, Verdict::kNote);
  EXPECT_THAT(processors.found, HasSubstr("1.5 by "));
  subject.config->server.compute_threads = 1;
  EXPECT_EQ(Find(CheckProcessor(subject, kernels::CpuProcessor()), "processors").verdict, Verdict::kOk);

  // Version 1, seen from within a container: the path names the host's group, which is mounted as the root.
  Write("/proc/self/cgroup", "5:memory:/kubepods/pod1\n2:cpu,cpuacct:/kubepods/pod1\n");
  Write("/proc/self/mountinfo",
        "31 23 0:27 /kubepods/pod1 /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        "32 23 0:28 /kubepods/pod1 /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n");
  Write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  Write("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n");
  EXPECT_FALSE(MemoryLimit(subject.root).has_value());
  EXPECT_FALSE(ProcessorLimit(subject.root).has_value());
  EXPECT_EQ(UsableProcessors(subject.root), ScheduledProcessors());
  Write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "52428800\n");
  EXPECT_EQ(Find(CheckMemory(subject), "memory limit").verdict, Verdict::kBad);
}

TEST_F(DoctorTest, MemoryHugePagesAndClockOfOtherMachines) {
  Subject subject = SubjectWith(/*dram=*/1024 * kMiB);
  subject.root = directory_.path();
  Write("/proc/meminfo", "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n");
  Write("/sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n");
  Write("/sys/devices/system/clocksource/clocksource0/current_clocksource", "hpet\n");
  const Check pages = Find(CheckMemory(subject), "huge pages");
  EXPECT_EQ(pages.verdict, Verdict::kNote);
  EXPECT_THAT(pages.mend, HasSubstr("echo madvise"));
  EXPECT_EQ(Find(CheckMemory(subject), "memory").verdict, Verdict::kOk);
  Write("/proc/meminfo", "MemTotal: 16777216 kB\nMemAvailable: 1048576 kB\n");
  EXPECT_EQ(Find(CheckMemory(subject), "memory").verdict, Verdict::kNote);
  Write("/proc/meminfo", "MemTotal: 524288 kB\nMemAvailable: 262144 kB\n");
  EXPECT_EQ(Find(CheckMemory(subject), "memory").verdict, Verdict::kBad);
  const Check clock = Find(CheckProcessor(subject, kernels::CpuProcessor()), "clock");
  EXPECT_EQ(clock.verdict, Verdict::kNote);
  EXPECT_THAT(clock.found, HasSubstr("hpet"));
  Write("/sys/devices/system/node/has_memory", "0-1\n");
  EXPECT_EQ(Find(CheckMemory(subject), "NUMA").verdict, Verdict::kNote) << "this machine's one node is all it may use";
}

TEST_F(DoctorTest, LimitOfAControlGroupWithoutAConfiguration) {
  Subject subject;
  subject.root = directory_.path();
  Write("/proc/self/cgroup", "0::/\n");
  Write("/proc/self/mountinfo", "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n");
  EXPECT_EQ(Find(CheckMemory(subject), "memory limit").verdict, Verdict::kOk);
  // As a healthy container has it.
  Write("/sys/fs/cgroup/memory.max", "4294967296\n");
  const Check healthy = Find(CheckMemory(subject), "memory limit");
  EXPECT_EQ(healthy.verdict, Verdict::kOk);
  EXPECT_THAT(healthy.found, HasSubstr("4.00 GiB by "));
  EXPECT_THAT(healthy.wanted, HasSubstr("1.38 GiB"));
  EXPECT_EQ(healthy.mend, "");
  Write("/sys/fs/cgroup/memory.max", std::to_string(kBesideBudgetBytes) + "\n");
  EXPECT_EQ(Find(CheckMemory(subject), "memory limit").verdict, Verdict::kOk);
  Write("/sys/fs/cgroup/memory.max", std::to_string(kBesideBudgetBytes - 1) + "\n");
  const Check limit = Find(CheckMemory(subject), "memory limit");
  EXPECT_EQ(limit.verdict, Verdict::kNote);
  EXPECT_THAT(limit.mend, HasSubstr("docker: --memory"));
}

TEST_F(DoctorTest, MappingsBesideAGpu) {
  Subject subject = SubjectWith(/*dram=*/1024 * 1024 * kMiB);
  subject.root = directory_.path();
  Write("/proc/sys/vm/max_map_count", "65530\n");
  for (const Check& check : CheckMemory(subject))
    EXPECT_NE(check.what, "mappings") << "one for all chunks without a GPU";
  subject.config->server.budget.hbm = kMiB;
  // 2^40 / (12 x 2^20) and 2^40 / (12 x 2^16) chunks, and what a server maps beside them.
  const Check usual = Find(CheckMemory(subject), "mappings");
  EXPECT_EQ(usual.verdict, Verdict::kBad);
  EXPECT_THAT(usual.wanted, HasSubstr("91477 for budget.dram"));
  EXPECT_THAT(usual.wanted, HasSubstr("1402197 in chunks of 65536"));
  EXPECT_EQ(usual.mend, "sysctl -w vm.max_map_count=1402197, also in /etc/sysctl.d");
  Write("/proc/sys/vm/max_map_count", "91477\n");
  const Check small = Find(CheckMemory(subject), "mappings");
  EXPECT_EQ(small.verdict, Verdict::kNote);
  EXPECT_THAT(small.found, HasSubstr("vm.max_map_count 91477; the system refuses memory to a job of smaller chunks"));
  Write("/proc/sys/vm/max_map_count", "1402197\n");
  EXPECT_EQ(Find(CheckMemory(subject), "mappings").verdict, Verdict::kOk);
}

TEST_F(DoctorTest, SharedFolderOfAContainer) {
  Subject subject;
  subject.root = directory_.path();
  const std::string docker = "62 61 0:58 / /dev/shm rw,nosuid,nodev - tmpfs shm rw,size=65536k,inode64\n";
  Write("/proc/self/mountinfo", docker);
  const Check small = Find(CheckMemory(subject), "/dev/shm");
  EXPECT_EQ(small.verdict, Verdict::kNote);
  EXPECT_THAT(small.found, HasSubstr("64.0 MiB"));
  EXPECT_THAT(small.mend, HasSubstr("--shm-size="));
  // Remounted, or mounted over.
  Write("/proc/self/mountinfo", docker + "70 61 0:60 / /dev/shm rw - tmpfs tmpfs rw,size=2097152k\n");
  EXPECT_EQ(Find(CheckMemory(subject), "/dev/shm").verdict, Verdict::kOk);
  EXPECT_THAT(Find(CheckMemory(subject), "/dev/shm").found, HasSubstr("2.00 GiB"));
  Write("/proc/self/mountinfo", "62 61 0:58 / /dev/shm rw,nosuid,nodev shared:4 - tmpfs tmpfs rw,inode64\n");
  EXPECT_EQ(Find(CheckMemory(subject), "/dev/shm").verdict, Verdict::kOk) << "half of the memory, as on most machines";
}

TEST_F(DoctorTest, WindowsAroundLinux) {
  Subject subject = SubjectWith(/*dram=*/7 * 1024 * kMiB);
  subject.root = directory_.path();
  Write("/proc/meminfo", "MemTotal: 16777216 kB\nMemAvailable: 16777216 kB\n");
  Write("/proc/sys/kernel/osrelease", "6.8.0-45-generic\n");
  for (const Check& check : CheckMemory(subject)) EXPECT_NE(check.what, "page-locked memory");
  Write("/proc/sys/kernel/osrelease", "5.15.153.1-microsoft-standard-WSL2\n");
  EXPECT_EQ(Find(CheckMemory(subject), "page-locked memory").verdict, Verdict::kOk);
  subject.config->server.budget.dram = 9 * 1024 * kMiB;
  const Check locked = Find(CheckMemory(subject), "page-locked memory");
  EXPECT_EQ(locked.verdict, Verdict::kNote);
  EXPECT_THAT(locked.found, HasSubstr("at most 8.00 GiB"));
  EXPECT_THAT(locked.mend, HasSubstr("budget.dram: at most 8.00 GiB; or memory=BYTES under [wsl2]"));
  subject.config->server.budget.dram = 17 * 1024 * kMiB;
  EXPECT_THAT(Find(CheckMemory(subject), "memory").mend, HasSubstr(".wslconfig"));
}

TEST_F(DoctorTest, NoIoUringInTheKernelOfWsl) {
  Write("/proc/sys/kernel/osrelease", "5.15.153.1-microsoft-standard-WSL2\n");
  Subject subject;
  subject.root = directory_.path();
  const Check found = Find(CheckDisk(subject), "io_uring");
  if (found.verdict != Verdict::kOk) {
    EXPECT_THAT(found.mend, HasSubstr("wsl --update"));
    return;
  }
  // This kernel has it: the same test once more, without.
  const char* const wrapper = std::getenv("WITHOUT_URING");
  ASSERT_NE(wrapper, nullptr) << "found without a right to it";
  const std::string without = wrapper;
  unsetenv("WITHOUT_URING");
  const Finished done =
      RunProcess({without, fs::read_symlink("/proc/self/exe"), "--gtest_filter=DoctorTest.NoIoUringInTheKernelOfWsl"});
  setenv("WITHOUT_URING", without.c_str(), 1);
  if (done.code == 77) GTEST_SKIP() << done.err;
  EXPECT_EQ(done.code, 0) << done.out << done.err;
}

TEST_F(DoctorTest, KernelsWithOtherBits) {
  kernels::Processor processor = kernels::CpuProcessor();
  const auto right = processor.squared_norm;
  processor.squared_norm = [right](kernels::Dtype dtype, const std::byte* gradient, uint64_t n) {
    kernels::NormResult result = right(dtype, gradient, n);
    result.squared_norm *= 1 + 0x1p-52;
    return result;
  };
  const Check kernels = Find(CheckProcessor(Subject(), processor), "kernels");
  EXPECT_EQ(kernels.verdict, Verdict::kBad);
  EXPECT_THAT(kernels.found, HasSubstr("norm"));
}

TEST_F(DoctorTest, SmallDiskInMemory) {
  const SmallDisk disk(8 * kMiB);
  if (!disk.mounted()) GTEST_SKIP() << "no mount: " << disk.why_not();
  Subject subject = SubjectWith(64 * kMiB, /*nvme=*/512 * kMiB);
  subject.config->server.data_directory = disk.path();
  const Checks checks = CheckDisk(subject);
  EXPECT_EQ(Find(checks, "free space").verdict, Verdict::kBad);
  EXPECT_THAT(Find(checks, "free space").mend, HasSubstr("free 760.0 MiB"));
  EXPECT_EQ(Find(checks, "file system").verdict, Verdict::kNote);
  EXPECT_THAT(Find(checks, "file system").found, HasSubstr("tmpfs"));
  disk.Fill();
  EXPECT_EQ(Find(CheckDisk(subject), "direct transfers").verdict, Verdict::kBad) << "no block can be written";
}

TEST_F(DoctorTest, SmallDiskOnALoopDevice) {
  const std::string image = Write("/image", ""), mount = directory_.path() + "/mount";
  fs::resize_file(image, 24 * kMiB);
  fs::create_directory(mount);
  if (!fs::exists("/sbin/mkfs.ext4") || RunProcess({"/sbin/mkfs.ext4", "-q", "-b", "4096", image}).code != 0 ||
      RunProcess({"/bin/mount", "-o", "loop", image, mount}).code != 0) {
    GTEST_SKIP() << "no ext4 can be made and mounted here";
  }
  Subject subject = SubjectWith(64 * kMiB, /*nvme=*/16 * kMiB);
  subject.config->server.data_directory = mount;
  const Checks checks = CheckDisk(subject);
  // Remounted read-only, as the kernel does after errors of the disk.
  const bool remounted = RunProcess({"/bin/mount", "-o", "remount,ro", mount}).code == 0;
  const Check data = Find(CheckDisk(subject), "data directory");
  RunProcess({"/bin/umount", mount});
  EXPECT_EQ(Find(checks, "file system").found, "ext4");
  EXPECT_EQ(Find(checks, "file system").verdict, Verdict::kOk);
  EXPECT_EQ(Find(checks, "direct transfers").verdict, Verdict::kOk);
  EXPECT_EQ(Find(checks, "free space").verdict, Verdict::kBad);
  EXPECT_TRUE(remounted);
  EXPECT_EQ(data.verdict, Verdict::kBad) << data.found;
}

TEST_F(DoctorTest, DataDirectoryThatIsNone) {
  Subject subject = SubjectWith(64 * kMiB);
  subject.config->server.data_directory = Write("/file", "no folder");
  const Check data = Find(CheckDisk(subject), "data directory");
  EXPECT_EQ(data.verdict, Verdict::kBad);
  EXPECT_THAT(data.found, HasSubstr("no folder"));
}

TEST_F(DoctorTest, SpaceThatTheServerHasAlreadyCounts) {
  Subject subject = SubjectWith(64 * kMiB);
  Write("/data/nvme.tier", std::string(3 * kMiB, 'x'));
  EXPECT_THAT(Find(CheckDisk(subject), "free space").found, HasSubstr("3.0 MiB are the server's already"));
}

TEST_F(DoctorTest, PortsFreeTakenAndOfAnotherMachine) {
  const int taken = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {.sin_family = AF_INET, .sin_port = 0, .sin_addr = {htonl(INADDR_LOOPBACK)}};
  socklen_t length = sizeof(address);
  ASSERT_EQ(bind(taken, reinterpret_cast<sockaddr*>(&address), length), 0);
  ASSERT_EQ(listen(taken, 1), 0);
  getsockname(taken, reinterpret_cast<sockaddr*>(&address), &length);
  Subject subject = SubjectWith(64 * kMiB);
  subject.asking.timeout = absl::Milliseconds(300);
  subject.config->listen = subject.config->metrics_listen = "127.0.0.1:" + std::to_string(ntohs(address.sin_port));
  Checks checks = CheckNetwork(subject);
  close(taken);
  for (const char* key : {"listen", "metrics_listen"}) {
    EXPECT_EQ(Find(checks, key).verdict, Verdict::kBad);
    EXPECT_THAT(Find(checks, key).mend, HasSubstr("ss -ltnp"));
  }
  subject.config->listen = "192.0.2.1:7070";  // TEST-NET-1
  checks = CheckNetwork(subject);
  EXPECT_EQ(Find(checks, "listen").verdict, Verdict::kBad);
  EXPECT_EQ(Find(checks, "metrics_listen").verdict, Verdict::kOk) << "free again";
}

TEST_F(DoctorTest, AServerThatOthersReach) {
  Subject subject = SubjectWith(64 * kMiB);
  EXPECT_EQ(Find(CheckNetwork(subject), "reach").verdict, Verdict::kOk);
  for (const char* listen : {"0.0.0.0:0", "[::]:0"}) {
    subject.config->listen = listen;
    EXPECT_EQ(Find(CheckNetwork(subject), "reach").verdict, Verdict::kNote) << listen;
  }
  EXPECT_EQ(Find(CheckNetwork(subject), "HTTP reach").verdict, Verdict::kOk);
  subject.config->metrics_listen = "0.0.0.0:0";
  EXPECT_THAT(Find(CheckNetwork(subject), "HTTP reach").found, HasSubstr("sees all jobs and metrics, without TLS"));
  subject.config->metrics_tls = true;
  EXPECT_EQ(Find(CheckNetwork(subject), "HTTP reach").verdict, Verdict::kNote) << "by TLS, and to anybody";
  subject.config->guard.tls.client_ca = "ca.pem";
  EXPECT_EQ(Find(CheckNetwork(subject), "HTTP reach").verdict, Verdict::kOk);
}

TEST_F(DoctorTest, CertificatesAndTheirDates) {
  Subject subject = SubjectWith(64 * kMiB);
  Authority authority("Doctor's CA", absl::Now() + absl::Hours(1000));
  const auto found = [&](absl::Time not_after) {
    IssueOptions options;
    options.alternative_names = "DNS:localhost";
    options.not_before = absl::Now() - absl::Hours(2);
    options.not_after = not_after;
    const IssuedPair pair = authority.Issue("server", options);
    subject.config->guard.tls.certificate = Write("/server.pem", pair.certificate);
    subject.config->guard.tls.key = Write("/server.key", pair.key);
    return Find(CheckNetwork(subject), "certificates");
  };
  EXPECT_EQ(found(absl::Now() + absl::Hours(24 * 30)).verdict, Verdict::kOk);
  const Check soon = found(absl::Now() + absl::Hours(24 * 5));
  EXPECT_EQ(soon.verdict, Verdict::kNote);
  EXPECT_THAT(soon.mend, HasSubstr("renew tls.certificate"));
  EXPECT_EQ(found(absl::Now() - absl::Hours(1)).verdict, Verdict::kBad) << "it has ended";
  found(absl::Now() + absl::Hours(24 * 30));
  subject.config->guard.tls.key = Write("/other.key", authority.Issue("other", {}).key);
  EXPECT_EQ(Find(CheckNetwork(subject), "certificates").verdict, Verdict::kBad) << "another certificate's key";
}

TEST_F(DoctorTest, PeersAndThisServer) {
  Daemon server(directory_.path(), DaemonConfig(directory_.path() + "/data", "a"));
  ASSERT_TRUE(server.ready());
  Subject subject = SubjectWith(64 * kMiB);
  subject.config->listen = server.listen();
  subject.servers = {server.listen(), "127.0.0.1:1"};
  subject.asking.timeout = absl::Seconds(30);
  const Checks checks = CheckNetwork(subject);
  EXPECT_EQ(Find(checks, "listen").verdict, Verdict::kNote);
  EXPECT_THAT(Find(checks, "listen").found, HasSubstr("the Ballast server 'a'"));
  const Check peer = Find(checks, "peer " + server.listen());
  EXPECT_EQ(peer.verdict, Verdict::kOk);
  EXPECT_THAT(peer.found, HasSubstr(std::string("version ") + model::Version()));
  EXPECT_EQ(Find(checks, "peer 127.0.0.1:1").verdict, Verdict::kNote);
}

TEST_F(DoctorTest, GpuThatIsNotThere) {
  Subject subject = SubjectWith(64 * kMiB);
  const Check without = Find(CheckGpu(subject), "GPU");
  EXPECT_EQ(without.verdict, Verdict::kOk);
  subject.config->server.budget.hbm = 64 * kMiB;
  subject.config->server.hbm_device = 255;
  const Check wanted = Find(CheckGpu(subject), "GPU");
  EXPECT_EQ(wanted.verdict, Verdict::kBad);
  EXPECT_THAT(wanted.found, HasSubstr("no GPU"));
}

}  // namespace
}  // namespace ballast::services
