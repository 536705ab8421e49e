#include "ballast/services/tools/verify/verify_command.h"

#include <cstdio>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/monitoring/show.h"

namespace ballast::services {
namespace {

enum Exit { kClean = 0, kDamaged = 1, kUsage = 2, kInUse = 3 };

const char* NameOf(Harm harm) {
  switch (harm) {
    case Harm::kNone:
      return "harmless";
    case Harm::kRepaired:
      return "repaired";
    case Harm::kJobRefused:
      return "job_refused";
    case Harm::kServerRefused:
      return "server_refused";
    case Harm::kUnnoticed:
      return "unnoticed";
  }
  return "";
}

std::string VerdictOf(const ScrubReport& report) {
  if (report.findings.empty()) return "CLEAN: a server recovers from what is there";
  const std::string damaged = absl::StrCat("DAMAGED: ", report.findings.size(), " finding(s); ");
  std::set<std::string> jobs;
  for (const Finding& finding : report.findings) {
    if (finding.harm >= Harm::kJobRefused && !finding.job.empty()) jobs.insert(finding.job);
  }
  switch (report.worst()) {
    case Harm::kNone:
      return damaged + "recovery would succeed, because it does not need the damaged parts";
    case Harm::kRepaired:
      return damaged + "recovery would succeed: it repairs this from the log or from copies";
    case Harm::kJobRefused:
      return absl::StrCat(damaged, "a server would start and refuse job(s) '", absl::StrJoin(jobs, "', '"), "'");
    case Harm::kServerRefused:
      return damaged + "a server would refuse to start";
    case Harm::kUnnoticed:
      return damaged + "a server would start and not notice the damage; do not start one before you have repaired this";
  }
  return damaged;
}

std::string ShowFinding(const Finding& finding) {
  return absl::StrCat(NameOf(finding.harm), ": ", finding.job.empty() ? "" : absl::StrCat("job '", finding.job, "': "),
                      finding.what, " (", finding.file,
                      finding.offset > 0 ? absl::StrCat(" at offset ", finding.offset) : "", "): expected ",
                      finding.expected, "; found ", finding.found, "; to do: ", finding.advice, "\n");
}

std::string ShowFindingJson(const Finding& finding) {
  return absl::StrCat("{\"harm\":", Quote(NameOf(finding.harm)), ",\"job\":", Quote(finding.job),
                      ",\"what\":", Quote(finding.what), ",\"file\":", Quote(finding.file),
                      ",\"offset\":", finding.offset, ",\"expected\":", Quote(finding.expected),
                      ",\"found\":", Quote(finding.found), ",\"advice\":", Quote(finding.advice), "}");
}

int ExitCodeOf(const absl::Status& status) {
  std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  if (model::ReasonOf(status) == model::kLaterVersion) return kUsage;
  if (absl::IsFailedPrecondition(status)) {
    std::fprintf(stderr, "a server runs on this directory; stop the server first\n");
    return kInUse;
  }
  return absl::IsInvalidArgument(status) ? kUsage : kDamaged;
}

}  // namespace

std::string ShowText(const ScrubReport& report) {
  const ScrubCounts& n = report.counts;
  std::string out;
  for (const Finding& finding : report.findings) absl::StrAppend(&out, ShowFinding(finding));
  return absl::StrCat(out, VerdictOf(report), "\n", n.jobs, " job(s), ", n.durable_jobs, " durable; ", n.extents,
                      " extents of ", ShowBytes(n.extent_bytes), "; ", n.log_records, " log records, ",
                      n.payloads_needed, " payloads of ", ShowBytes(n.payload_bytes), " needed, ",
                      n.payloads_not_needed, " not needed; ", n.torn_batches, " void batches behind ends of logs\n");
}

std::string ShowJson(const ScrubReport& report, const RebuildResult* rebuilt) {
  const ScrubCounts& n = report.counts;
  std::vector<std::string> findings;
  for (const Finding& finding : report.findings) findings.push_back(ShowFindingJson(finding));
  const std::string rebuild =
      rebuilt == nullptr
          ? ""
          : absl::StrCat(",\"rebuild\":{\"written\":", rebuilt->written ? "true" : "false",
                         ",\"done\":", QuoteAll(rebuilt->done), ",\"refused\":", QuoteAll(rebuilt->refused), "}");
  return absl::StrCat(
      "{\"verdict\":", report.findings.empty() ? "\"clean\"" : "\"damaged\"",
      ",\"recovery\":", Quote(report.findings.empty() ? "succeeds" : NameOf(report.worst())),
      ",\"message\":", Quote(VerdictOf(report)), ",\"directory\":", Quote(report.directory), ",\"findings\":[",
      absl::StrJoin(findings, ","), "],\"counts\":{",
      absl::StrFormat("\"jobs\":%d,\"durable_jobs\":%d,\"extents\":%d,\"extent_bytes\":%d,\"log_records\":%d,"
                      "\"payloads_needed\":%d,\"payload_bytes\":%d,\"payloads_not_needed\":%d,\"torn_batches\":%d",
                      n.jobs, n.durable_jobs, n.extents, n.extent_bytes, n.log_records, n.payloads_needed,
                      n.payload_bytes, n.payloads_not_needed, n.torn_batches),
      "}", rebuild, "}\n");
}

int RunVerify(const VerifyCommand& command) {
  const SayProgress say = [](const std::string& line) { std::fprintf(stderr, "%s\n", line.c_str()); };
  if (!command.rebuild) {
    const auto report = Verify(command.directory, say, command.nvme);
    if (!report.ok()) return ExitCodeOf(report.status());
    std::fputs((command.json ? ShowJson(*report, nullptr) : ShowText(*report)).c_str(), stdout);
    return report->findings.empty() ? kClean : kDamaged;
  }
  const auto rebuilt = Rebuild(command.directory, say, command.nvme);
  if (!rebuilt.ok()) return ExitCodeOf(rebuilt.status());
  if (command.json) {
    std::fputs(ShowJson(rebuilt->after, &*rebuilt).c_str(), stdout);
  } else {
    if (rebuilt->written) {
      for (const Finding& finding : rebuilt->before.findings)
        std::fputs(("was " + ShowFinding(finding)).c_str(), stdout);
    }
    for (const std::string& line : rebuilt->done) std::printf("rebuild: %s\n", line.c_str());
    for (const std::string& line : rebuilt->refused) std::printf("rebuild refused: %s\n", line.c_str());
    std::fputs(ShowText(rebuilt->after).c_str(), stdout);
  }
  return rebuilt->after.findings.empty() ? kClean : kDamaged;
}

}  // namespace ballast::services
