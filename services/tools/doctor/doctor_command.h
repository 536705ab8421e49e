// `ballastctl doctor`: says what on this machine, or at its peers, would stop a server or slow it down.
#pragma once

#include <string>
#include <vector>

#include "absl/time/time.h"
#include "ballast/services/tools/doctor/checks.h"

namespace ballast::services {

struct DoctorCommand {
  std::string config;                // the server's YAML file; empty: none
  std::vector<std::string> servers;  // peers, host:port
  Asking asking = {absl::Seconds(5), {}};
  bool json = false;
};
// Reads the configuration as ballastd does, BALLAST_* variables included, and prints a line per check, then the
// verdict. Returns the exit code: 1 if a check found what stops a server or a job, else 0.
int RunDoctor(const DoctorCommand& command);

// A line per check; the last line is the verdict.
std::string ShowText(const Checks& checks);
// {"checks":[...],"bad":N,"notes":N}.
std::string ShowJson(const Checks& checks);

}  // namespace ballast::services
