#include "ballast/services/tools/doctor/doctor_command.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "ballast/services/daemon/config_file.h"
#include "ballast/services/monitoring/show.h"

namespace ballast::services {
namespace {

const char* Name(Verdict verdict) {
  switch (verdict) {
    case Verdict::kOk:
      return "ok";
    case Verdict::kNote:
      return "note";
    case Verdict::kBad:
      return "bad";
  }
  return "";
}

int64_t Count(const Checks& checks, Verdict verdict) {
  return std::count_if(checks.begin(), checks.end(), [&](const Check& check) { return check.verdict == verdict; });
}

absl::StatusOr<Config> ReadConfig(const std::string& path, bool* given) {
  std::vector<std::string> variables;
  for (char** variable = environ; *variable != nullptr; ++variable) variables.emplace_back(*variable);
  const absl::StatusOr<ConfigValues> environment = ParseEnvironment(variables);
  *given = !path.empty() || !environment.ok() || !environment->empty();
  if (!environment.ok()) return environment.status();
  const absl::StatusOr<ConfigValues> file = path.empty() ? ConfigValues() : ParseConfigFile(path);
  if (!file.ok()) return file.status();
  return MakeConfig(*file, *environment, {});
}

Check CheckConfig(const DoctorCommand& command, Subject* subject) {
  Check check{Verdict::kOk, "configuration", command.config.empty() ? "BALLAST_* variables" : command.config,
              "--config FILE, as ballastd's"};
  bool given = false;
  absl::StatusOr<Config> config = ReadConfig(command.config, &given);
  if (config.ok()) {
    subject->config = *std::move(config);
  } else if (given) {
    check.verdict = Verdict::kBad;
    check.found = std::string(config.status().message());
    check.mend = "correct that line; ballastd --help lists the keys";
  } else {
    check.verdict = Verdict::kNote;
    check.found = "none: budgets, data directory and ports are not checked";
    check.mend = "ballastctl doctor --config FILE";
  }
  return check;
}

}  // namespace

std::string ShowText(const Checks& checks) {
  size_t width = 0;
  for (const Check& check : checks) width = std::max(width, check.what.size());
  std::string out;
  for (const Check& check : checks) {
    const bool ok = check.verdict == Verdict::kOk;
    absl::StrAppendFormat(&out, "%-4s  %-*s  %s", Name(check.verdict), width, check.what, Printable(check.found));
    const std::string indent = "\n" + std::string(8 + width, ' ');
    absl::StrAppend(&out, ok ? " (" : indent, "wanted: ", check.wanted, ok ? ")" : indent + "fix: " + check.mend, "\n");
  }
  const int64_t bad = Count(checks, Verdict::kBad), notes = Count(checks, Verdict::kNote);
  absl::StrAppend(&out,
                  bad > 0 ? absl::StrCat(bad, " bad: each stops a server, or a job within its budgets")
                          : "nothing here stops a server",
                  "; ", notes, notes == 1 ? " note\n" : " notes\n");
  return out;
}

std::string ShowJson(const Checks& checks) {
  std::string lines;
  for (const Check& check : checks) {
    absl::StrAppend(&lines, lines.empty() ? "" : ",", "{\"verdict\":", Quote(Name(check.verdict)),
                    ",\"what\":", Quote(check.what), ",\"found\":", Quote(check.found),
                    ",\"wanted\":", Quote(check.wanted), ",\"mend\":", Quote(check.mend), "}");
  }
  return absl::StrCat("{\"checks\":[", lines, "],\"bad\":", Count(checks, Verdict::kBad),
                      ",\"notes\":", Count(checks, Verdict::kNote), "}\n");
}

int RunDoctor(const DoctorCommand& command) {
  Subject subject;
  subject.servers = command.servers;
  subject.asking = command.asking;
  Checks checks = {CheckConfig(command, &subject)};
  for (const Checks& more : {CheckMemory(subject), CheckDisk(subject), CheckProcessor(subject, kernels::CpuProcessor()),
                             CheckGpu(subject), CheckNetwork(subject)}) {
    checks.insert(checks.end(), more.begin(), more.end());
  }
  std::fputs((command.json ? ShowJson(checks) : ShowText(checks)).c_str(), stdout);
  return Count(checks, Verdict::kBad) > 0 ? 1 : 0;
}

}  // namespace ballast::services
