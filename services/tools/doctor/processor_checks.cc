// Processor and clock.
#include <sys/timex.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "ballast/kernels/kernels.h"
#include "ballast/proto/base/threads.h"
#include "ballast/services/daemon/machine_files.h"
#include "ballast/services/tools/doctor/checks.h"

namespace ballast::services {
namespace {

Check CheckVectors() {
  Check check{Verdict::kOk, "vectors", kernels::ActiveIsa(), "AVX3 (AVX-512), AVX2 or NEON"};
  if (!absl::StartsWith(check.found, "EMU") && !absl::StartsWith(check.found, "SSE")) return check;
  check.verdict = Verdict::kNote;
  absl::StrAppend(&check.found, ": the same bits, several times slower");
  check.mend = "a virtual machine: pass the host's processor through (QEMU: -cpu host)";
  return check;
}

Check CheckKernels(const kernels::Processor& processor) {
  Check check{Verdict::kOk, "kernels", "the bits of this release", "the bits of this release"};
  const std::string mismatch = kernels::DigestMismatch(kernels::DigestsOf(processor));
  if (mismatch.empty()) return check;
  check.verdict = Verdict::kBad;
  check.found = mismatch;
  check.mend = "replace the processor, or its microcode: the server refuses to start (WRONG_BITS)";
  return check;
}

Check CheckThreads(const Subject& subject) {
  const int usable = UsableProcessors(subject.root);
  Check check{Verdict::kOk, "processors", absl::StrCat(ScheduledProcessors()), "as many as compute_threads"};
  if (const std::optional<GroupLimit> limit = ProcessorLimit(subject.root); limit.has_value()) {
    absl::StrAppendFormat(&check.found, "; %.3g by %s", limit->amount, limit->file);
  }
  const int threads = subject.config->server.compute_threads;
  check.wanted = absl::StrCat("at least ", threads, " (compute_threads)");
  if (threads <= usable) return check;
  check.verdict = Verdict::kNote;
  absl::StrAppend(&check.found, ": the kernel stops the threads in turn");
  check.mend = absl::StrCat("compute_threads: ", usable, ", or a higher limit");
  return check;
}

// A job takes some 6 threads, a server without jobs some 25 and twice as many as there are processors.
Check CheckThreadLimit() {
  constexpr uint64_t kWanted = 512;
  const model::ThreadLimit limit = model::ThreadsAllowed();
  Check check{Verdict::kOk, "thread limit", absl::StrCat(limit.max, " (", limit.name, ")"),
              absl::StrCat("at least ", kWanted)};
  if (limit.max >= kWanted) return check;
  check.verdict = Verdict::kNote;
  absl::StrAppend(&check.found, "; at the limit new jobs are refused");
  check.mend = "systemd: TasksMax=4096; podman, docker: --pids-limit 4096; Kubernetes: podPidsLimit of the kubelet";
  return check;
}

Check CheckClock(const Subject& subject) {
  Check check{Verdict::kOk, "clock", "", "synchronised; tsc, kvm-clock or arch_sys_counter"};
  const std::string file = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
  const std::string source = ReadMachineFile(subject.root + file);
  timex state = {};
  const bool synchronised = adjtimex(&state) != TIME_ERROR && (state.status & STA_UNSYNC) == 0;
  check.found =
      absl::StrCat(source.empty() ? "unknown" : source, synchronised ? ", synchronised" : ", not synchronised");
  if (source == "hpet" || source == "acpi_pm" || source == "jiffies" || source == "refined-jiffies") {
    check.verdict = Verdict::kNote;
    absl::StrAppend(&check.found, ": each read of the clock is slow");
    check.mend = absl::StrCat("echo tsc >", file, ", or tsc=reliable on the kernel's command line");
  } else if (!synchronised) {
    check.verdict = Verdict::kNote;
    absl::StrAppend(&check.found, "; steps need no clock, but logs and certificates do");
    check.mend = "systemctl enable --now chrony";
  }
  return check;
}

}  // namespace

Checks CheckProcessor(const Subject& subject, const kernels::Processor& kernels) {
  Checks checks = {CheckVectors(), CheckKernels(kernels)};
  if (subject.config.has_value()) checks.push_back(CheckThreads(subject));
  checks.push_back(CheckThreadLimit());
  checks.push_back(CheckClock(subject));
  return checks;
}

}  // namespace ballast::services
