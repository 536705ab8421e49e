// Child processes for tests: the real binaries, their output and exit codes.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace ballast::services {

struct Finished {
  int code = -1;  // -1: ended by a signal
  std::string out;
  std::string err;
};

// A child process whose output goes to files. The destructor kills a running child.
class Process {
 public:
  explicit Process(const std::vector<std::string>& command);
  ~Process();
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;
  bool running() const { return pid_ > 0; }
  void Signal(int signal);
  // True if the child has ended, by itself or by a signal.
  bool ended() const;
  // Output written and flushed to stdout so far.
  std::string OutputSoFar() const;
  // Waits for the end. Call at most once.
  Finished Wait();

 private:
  pid_t pid_ = -1;
  std::string out_, err_;
};

// Runs `command` to its end.
Finished RunProcess(const std::vector<std::string>& command);

// A running ballastd. The destructor kills the process.
class Daemon {
 public:
  // Writes `config`, the text of the YAML file, into `directory`. Waits for the ready line or the end of the process.
  Daemon(const std::string& directory, const std::string& config);
  ~Daemon();
  bool ready() const { return !listen_.empty(); }
  bool ended() const;
  const std::string& ready_line() const { return line_; }
  const std::string& listen() const { return listen_; }
  const std::string& metrics() const { return metrics_; }
  void Signal(int signal);
  // Sends `signal` and waits. Returns the exit code, or -1 if a signal killed the process.
  int End(int signal);

 private:
  pid_t pid_ = -1;
  std::string line_, listen_, metrics_;
};

// A loopback address of this process alone. A port there is still free when a killed server starts again; one of
// 127.0.0.1 may be anybody's by then.
std::string OwnLoopback();
std::string DaemonPath();
std::string CtlPath();
std::string DaemonConfig(const std::string& data_directory, const std::string& id);

}  // namespace ballast::services
