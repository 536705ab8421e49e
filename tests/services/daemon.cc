#include "ballast/tests/services/daemon.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <sstream>

extern char** environ;

namespace ballast::services {
namespace {

std::string Slurp(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

pid_t Spawn(const std::vector<std::string>& command, posix_spawn_file_actions_t* actions) {
  std::vector<char*> arguments;
  for (const std::string& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  pid_t pid = -1;
  // Shells ignore SIGINT in what they run in the background, and so would what is started here.
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t interrupts;
  sigemptyset(&interrupts);
  sigaddset(&interrupts, SIGINT);
  posix_spawnattr_setsigdefault(&attributes, &interrupts);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGDEF);
  EXPECT_EQ(::posix_spawn(&pid, arguments[0], actions, &attributes, arguments.data(), environ), 0) << command[0];
  posix_spawnattr_destroy(&attributes);
  return pid;
}

// Leaves it to be waited for.
bool HasEnded(pid_t pid) {
  if (pid < 0) return true;
  siginfo_t info = {};
  return ::waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == pid;
}

int CodeOf(int status) { return WIFEXITED(status) ? WEXITSTATUS(status) : -1; }

std::string FieldOf(const std::string& line, const std::string& name) {
  const size_t at = line.find(name + "=");
  if (at == std::string::npos) return "";
  const size_t begin = at + name.size() + 1;
  return line.substr(begin, line.find_first_of(" \n", begin) - begin);
}

std::string PathFrom(const char* variable) {
  const char* path = std::getenv(variable);
  EXPECT_NE(path, nullptr) << variable << " must name the binary; ctest sets it";
  return path == nullptr ? "" : path;
}

}  // namespace

std::string OwnLoopback() {
  const auto pid = static_cast<unsigned>(::getpid());
  return "127." + std::to_string(1 + (pid >> 16) % 128) + "." + std::to_string((pid >> 8) % 256) + "." +
         std::to_string(pid % 256);
}

std::string DaemonPath() { return PathFrom("DAEMON"); }
std::string CtlPath() { return PathFrom("CTL"); }

std::string DaemonConfig(const std::string& data_directory, const std::string& id) {
  return "listen: 127.0.0.1:0\nmetrics_listen: 127.0.0.1:0\ndata_directory: " + data_directory + "\nserver_id: " + id +
         "\nbudget:\n  dram: 64MiB\n";
}

Process::Process(const std::vector<std::string>& command)
    : out_(::testing::TempDir() + "ballast-out-XXXXXX"), err_(::testing::TempDir() + "ballast-err-XXXXXX") {
  const int out_fd = ::mkstemp(out_.data());
  const int err_fd = ::mkstemp(err_.data());
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, out_fd, 1);
  posix_spawn_file_actions_adddup2(&actions, err_fd, 2);
  pid_ = Spawn(command, &actions);
  posix_spawn_file_actions_destroy(&actions);
  ::close(out_fd);
  ::close(err_fd);
}

Process::~Process() {
  if (running()) {
    Signal(SIGKILL);
    Wait();
  }
  ::unlink(out_.c_str());
  ::unlink(err_.c_str());
}

void Process::Signal(int signal) {
  if (running()) ::kill(pid_, signal);
}

bool Process::ended() const { return HasEnded(pid_); }

std::string Process::OutputSoFar() const { return Slurp(out_); }

Finished Process::Wait() {
  int status = -1;
  ::waitpid(pid_, &status, 0);
  pid_ = -1;
  return {CodeOf(status), Slurp(out_), Slurp(err_)};
}

Finished RunProcess(const std::vector<std::string>& command) { return Process(command).Wait(); }

Daemon::Daemon(const std::string& directory, const std::string& config) {
  const std::string path = directory + "/ballastd.yaml";
  std::ofstream(path) << config;
  int pipe_fds[2];
  EXPECT_EQ(::pipe2(pipe_fds, O_CLOEXEC), 0);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, pipe_fds[1], 1);
  pid_ = Spawn({DaemonPath(), "--config", path}, &actions);
  posix_spawn_file_actions_destroy(&actions);
  ::close(pipe_fds[1]);
  // Ends at the line's end, or when the child is gone.
  for (char c = 0; c != '\n' && ::read(pipe_fds[0], &c, 1) == 1;) line_.push_back(c);
  ::close(pipe_fds[0]);
  listen_ = FieldOf(line_, "listen");
  metrics_ = FieldOf(line_, "metrics");
}

Daemon::~Daemon() { End(SIGKILL); }

bool Daemon::ended() const { return HasEnded(pid_); }

void Daemon::Signal(int signal) {
  if (pid_ > 0) ::kill(pid_, signal);
}

int Daemon::End(int signal) {
  if (pid_ < 0) return -1;
  ::kill(pid_, signal);
  int status = 0;
  ::waitpid(pid_, &status, 0);
  pid_ = -1;
  return CodeOf(status);
}

}  // namespace ballast::services
