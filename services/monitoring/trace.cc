#include "ballast/services/monitoring/trace.h"

#include <cmath>
#include <cstdint>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "ballast/services/monitoring/show.h"

namespace ballast::services {
namespace {

enum Row { kSteps = 1, kIntake = 2, kWorker = 3, kStages = 4, kTrainers = 5 };
constexpr std::pair<Row, const char*> kRows[] = {{kSteps, "steps"},
                                                 {kIntake, "step in flight"},
                                                 {kWorker, "worker"},
                                                 {kStages, "stages (lengths; order unknown)"},
                                                 {kTrainers, "slowest trainers (lengths; order unknown)"}};

class Trace {
 public:
  void Name(int process, const std::string& name) {
    events_.push_back(
        absl::StrFormat(R"({"ph":"M","name":"process_name","pid":%d,"args":{"name":%s}})", process, Quote(name)));
    for (const auto& [row, row_name] : kRows) {
      events_.push_back(absl::StrFormat(R"({"ph":"M","name":"thread_name","pid":%d,"tid":%d,"args":{"name":%s}})",
                                        process, row, Quote(row_name)));
    }
  }
  // Nothing, if either end did not come. `args`: JSON members.
  void Span(int process, Row row, const std::string& name, double begin, double end, const std::string& args = "") {
    if (begin == 0 || end == 0 || !(end >= begin) || !std::isfinite(begin) || !std::isfinite(end)) return;
    events_.push_back(absl::StrFormat(R"({"ph":"X","name":%s,"pid":%d,"tid":%d,"ts":%.1f,"dur":%.1f,"args":{%s}})",
                                      Quote(name), process, row, begin * 1e6, (end - begin) * 1e6, args));
  }
  std::string Show() const {
    return absl::StrCat("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n", absl::StrJoin(events_, ",\n"), "\n]}\n");
  }

 private:
  std::vector<std::string> events_;
};

std::string SecondsOf(const v1::StepTimes& step) {
  std::vector<std::string> members;
  for (const v1::StageTime& stage : step.stages()) {
    if (!std::isfinite(stage.seconds())) continue;  // JSON has no such numbers
    members.push_back(absl::StrFormat("%s:%.6f", Quote(stage.stage()), stage.seconds()));
  }
  members.push_back(absl::StrCat("\"ranks\":", step.ranks()));
  members.push_back(absl::StrCat("\"slowest_rank\":", step.slowest_rank()));
  return absl::StrJoin(members, ",");
}

void Add(int process, const v1::StepTimes& step, Trace* trace) {
  trace->Span(process, kSteps, absl::StrCat("step ", step.step()), step.began_seconds(), step.decided_seconds(),
              SecondsOf(step));
  const double first = step.first_push_seconds() > 0 ? step.first_push_seconds() : step.first_seal_seconds();
  trace->Span(process, kIntake, "nothing yet", step.began_seconds(), first);
  trace->Span(process, kIntake, "push", step.first_push_seconds(), step.first_seal_seconds());
  trace->Span(process, kIntake, "seals", step.first_seal_seconds(), step.last_seal_seconds());
  trace->Span(process, kIntake, "prepare", step.last_seal_seconds(), step.prepared_seconds());
  trace->Span(process, kIntake, "decision", step.prepared_seconds(), step.decided_seconds());
  trace->Span(process, kWorker, absl::StrCat("update ", step.step()), step.update_began_seconds(),
              step.updated_seconds());
  trace->Span(process, kWorker, absl::StrCat("flush ", step.step()), step.updated_seconds(), step.flushed_seconds());
  double at = step.began_seconds();
  for (const v1::StageTime& stage : step.stages()) {
    if (stage.seconds() > 0) trace->Span(process, kStages, stage.stage(), at, at + stage.seconds());
    at += stage.seconds();
  }
  at = step.last_seal_seconds();
  for (const v1::TrainerTime& time : step.trainers()) at -= time.max_seconds();
  for (const v1::TrainerTime& time : step.trainers()) {
    if (time.max_seconds() > 0) trace->Span(process, kTrainers, time.what(), at, at + time.max_seconds());
    at += time.max_seconds();
  }
}

}  // namespace

std::string ShowTrace(const std::vector<ServerSteps>& servers) {
  Trace trace;
  int process = 0;
  for (const auto& [address, job] : servers) {
    trace.Name(++process, absl::StrCat(address, " ", job.job()));
    for (const v1::StepTimes& step : job.steps()) Add(process, step, &trace);
  }
  return trace.Show();
}

}  // namespace ballast::services
