#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <prometheus/text_serializer.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "ballast/services/monitoring/families.h"
#include "ballast/services/monitoring/server_families.h"
#include "ballast/tests/services/gateway/rpc_fixture.h"
#include "ballast/tests/services/hung_disk.h"

namespace ballast::services {
namespace {

// Series of a scrape, by name with labels.
std::map<std::string, double> Series(const std::string& scrape) {
  std::map<std::string, double> series;
  for (const auto line : absl::StrSplit(scrape, '\n')) {
    const size_t space = line.rfind(' ');
    double value = 0;
    if (line.empty() || line[0] == '#' || !absl::SimpleAtod(line.substr(space + 1), &value)) continue;
    series[std::string(line.substr(0, space))] = value;
  }
  return series;
}

std::set<std::string> FamiliesOf(const std::string& scrape) {
  std::set<std::string> names;
  for (const auto line : absl::StrSplit(scrape, '\n')) {
    const std::vector<std::string> words = absl::StrSplit(line, ' ');
    if (words.size() == 4 && words[0] == "#" && words[1] == "TYPE") names.insert(words[2]);
  }
  return names;
}

double SumOf(const std::map<std::string, double>& series, const std::string& prefix) {
  double sum = 0;
  for (const auto& [name, value] : series) sum += name.rfind(prefix, 0) == 0 ? value : 0;
  return sum;
}

std::string Promtool(const std::string& file) {
  std::FILE* promtool = ::popen(("promtool check metrics < '" + file + "' 2>&1").c_str(), "r");
  if (promtool == nullptr) return "promtool cannot be started";
  std::string complaint;
  for (int c = 0; (c = std::fgetc(promtool)) != EOF;) complaint.push_back(static_cast<char>(c));
  return ::pclose(promtool) == 0 ? complaint : "promtool failed: " + complaint;
}

class MetricsTest : public ::testing::Test {
 protected:
  static std::string Scrape(StateServer* server) {
    static SecurityCounters security;
    security.certificate_not_after = 4'000'000'000;
    return ShowMetrics(server, ServerState::kReady, RecoveryProgress(), &security);
  }
  std::string Scrape() { return Scrape(server_.get()); }
  TestServer server_{"s"};
};

TEST_F(MetricsTest, ScrapeTellsTheStoryAndPassesPromtool) {
  TrainerGroup group({server_.get()}, MakeSpec("job", SmallModel()), 1);
  ASSERT_EQ(group.Start(), absl::OkStatus());
  ASSERT_EQ(group.Initialise(Ones), absl::OkStatus());
  ASSERT_TRUE(group.Read(0, v1::CONTENT_WORKING, 0).ok());
  ASSERT_FALSE(group.Read(0, v1::CONTENT_WORKING, -1).ok());
  // A read of the result does not wait for the end of the update.
  std::string scrape = Scrape();
  for (int i = 0; i < 6000 && scrape.find("ballast_queued_steps{training_job=\"job\"} 0\n") == std::string::npos; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    scrape = Scrape();
  }
  uint64_t elements = 0, state_bytes = 0;
  for (const model::Chunk& chunk : group.plan().layout().chunks()) {
    elements += chunk.range.size();
    state_bytes += storage::StateLayout().StateBytes(chunk.range.size());
  }
  for (const std::string& line : {
           std::string("ballast_tier_capacity_bytes{tier=\"dram\"} 67108864"),
           absl::StrCat("ballast_tier_part_bytes{tier=\"dram\",part=\"state\"} ", state_bytes),
           std::string("ballast_job_committed_version{training_job=\"job\"} 0"),
           std::string("ballast_job_skipped_steps_total{training_job=\"job\"} 0"),
           std::string("ballast_job_info{training_job=\"job\",durability=\"none\"} 1"),
           std::string("ballast_job_world_size{training_job=\"job\"} 1"),
           std::string("ballast_job_newest_durable_pin_version{training_job=\"job\"} -1"),
           std::string("ballast_fences_total{training_job=\"job\"} 1"),
           std::string("ballast_slowest_rank{training_job=\"job\"} 0"),
           std::string("ballast_rpc_errors_total{method=\"Pull\",reason=\"BAD_REQUEST\"} 1"),
           std::string("ballast_rpc_errors_total{method=\"Push\",reason=\"CHECKSUM\"} 0"),
           absl::StrCat("ballast_received_bytes_total{training_job=\"job\"} ", 4 * elements),
           std::string("ballast_sent_bytes_total{training_job=\"job\"} 140000"),
           std::string("ballast_waiting_requests 0"),
           std::string("ballast_waiting_requests_limit 65536"),
           std::string("ballast_jobs 1"),
           std::string("ballast_rpc_duration_seconds_count{method=\"Identify\"} 0"),
           std::string("ballast_rpc_duration_seconds_count{method=\"Fence\"} 1"),
           std::string("ballast_rpc_duration_seconds_count{method=\"SetBudget\"} 0"),
       }) {
    EXPECT_NE(scrape.find(line + "\n"), std::string::npos) << line << " in\n" << scrape;
  }
  const std::string file = server_.directory() + "/scrape";
  std::ofstream(file) << scrape;
  EXPECT_EQ(Promtool(file), "");
}

TEST_F(MetricsTest, ProcessFiguresAreOfThisProcess) {
  const auto series = Series(Scrape());
  EXPECT_GT(series.at("process_resident_memory_bytes"), 1e6);
  EXPECT_LT(series.at("process_resident_memory_bytes"), series.at("process_virtual_memory_bytes"));
  EXPECT_GE(series.at("process_open_fds"), 3);
  EXPECT_LT(series.at("process_open_fds"), series.at("process_max_fds"));
  const double now = absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch());
  EXPECT_LE(series.at("process_start_time_seconds"), now + 2);
  EXPECT_GT(series.at("process_start_time_seconds"), now - 600);
}

// The moment at which somebody looks for the descriptors.
TEST(ProcessFamilies, WithoutADescriptorNothingFallsToZero) {
  const int next = ::dup(0);
  ASSERT_GE(next, 0);
  ::close(next);
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit none = before;
  none.rlim_cur = static_cast<rlim_t>(next);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  Families families;
  AddProcess(&families);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  const auto series = Series(prometheus::TextSerializer().Serialize(families));
  EXPECT_EQ(series.at("process_open_fds"), next);
  EXPECT_EQ(series.at("process_max_fds"), next);
  EXPECT_EQ(series.count("process_cpu_seconds_total"), 0u);
}

// A durable job whose state is too large for DRAM, so that each stage and most parts come.
class LoadedMetricsTest : public MetricsTest {
 protected:
  static constexpr uint64_t kDram = 14 * kMiB;
  LoadedMetricsTest() : loaded_("loaded", {0, kDram, 512 * kMiB}) {}

  v1::JobSpec Model() {
    std::vector<TestTensor> tensors;
    for (int i = 0; i < 16; ++i) tensors.push_back({absl::StrCat("t", i), absl::StrCat("u", i), 60'000, 0});
    v1::JobSpec spec = MakeSpec("job", tensors);
    spec.set_durability(v1::DURABILITY_STEP);
    return spec;
  }
  void Start() {
    loaded_.options().staging_bytes = 4 * kMiB;
    loaded_.Restart();
    group_ = std::make_unique<TrainerGroup>(std::vector<StateServer*>{loaded_.get()}, Model(), 1);
    ASSERT_EQ(group_->Start(), absl::OkStatus());
    ASSERT_EQ(group_->Initialise(Ones), absl::OkStatus());
  }
  absl::Status Step() {
    BALLAST_RETURN_IF_ERROR(group_->PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(16), Ones));
    BALLAST_RETURN_IF_ERROR(group_->Finish(UpdateHeader(16)).status());
    return group_->Read(0, v1::CONTENT_WORKING, group_->step() - 1).status();
  }

  TestServer loaded_;
  std::unique_ptr<TrainerGroup> group_;
};

TEST_F(LoadedMetricsTest, StagesSumToTheWallTimeAndPartsToWhatIsUsed) {
  ASSERT_NO_FATAL_FAILURE(Start());
  const std::string stages = "ballast_step_stage_seconds_total{training_job=\"job\"";
  // Between these two, the first scrape looked at the stages.
  const absl::Time before_first = absl::Now();
  const auto before = Series(Scrape(loaded_.get()));
  const absl::Time after_first = absl::Now();
  std::atomic<bool> training = true;
  std::atomic<int> scrapes = 0;
  std::thread trainer([&] {
    for (int i = 0; i < 30; ++i) {
      while (i == 29 && scrapes <= 10) absl::SleepFor(absl::Milliseconds(1));
      EXPECT_EQ(Step(), absl::OkStatus());
    }
    training = false;
  });
  for (bool last = false; !last; ++scrapes) {
    last = !training;
    const auto series = Series(Scrape(loaded_.get()));
    for (const std::string tier : {"hbm", "dram", "nvme"}) {
      ASSERT_EQ(SumOf(series, "ballast_tier_part_bytes{tier=\"" + tier + "\""),
                series.at("ballast_tier_used_bytes{tier=\"" + tier + "\"}"))
          << tier;
    }
  }
  trainer.join();
  // The end of the last update, and a pause of the thread that writes segments of the log ahead of their use.
  absl::Time before_last = absl::Now();
  auto after = Series(Scrape(loaded_.get()));
  const auto busy = [&] {
    return after.at("ballast_queued_steps{training_job=\"job\"}") > 0 || after.at("ballast_disk_inflight") > 0;
  };
  for (int i = 0; i < 6000 && busy(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    before_last = absl::Now();
    after = Series(Scrape(loaded_.get()));
  }
  const absl::Time after_last = absl::Now();
  const double staged = SumOf(after, stages) - SumOf(before, stages);
  EXPECT_GE(staged, 0.95 * absl::ToDoubleSeconds(before_last - after_first));
  EXPECT_LE(staged, 1.05 * absl::ToDoubleSeconds(after_last - before_first));
  EXPECT_GT(scrapes, 10);
  // Each stage of a step came, and the states that are not in DRAM were read and written.
  for (const char* stage : {"push", "log_sync", "state_read", "kernel", "state_write"}) {
    EXPECT_GT(after.at(stages + ",stage=\"" + stage + "\"}"), 0) << stage;
  }
  for (const char* part : {"state", "working", "slices", "staging"}) {
    EXPECT_GT(after.at(absl::StrCat("ballast_tier_part_bytes{tier=\"dram\",part=\"", part, "\"}")), 0) << part;
  }
  for (const char* part : {"state", "log", "spare"}) {
    EXPECT_GT(after.at(absl::StrCat("ballast_tier_part_bytes{tier=\"nvme\",part=\"", part, "\"}")), 0) << part;
  }
  const std::string moved = "ballast_moved_bytes_total{from=";
  EXPECT_GT(after.at(moved + "\"nvme\",to=\"dram\",why=\"update\"}"), 0);
  EXPECT_GT(after.at(moved + "\"dram\",to=\"nvme\",why=\"update\"}"), 0);
  EXPECT_GT(after.at(moved + "\"dram\",to=\"nvme\",why=\"flush\"}"), 0);
  EXPECT_GT(after.at("ballast_flushed_chunks_total{training_job=\"job\"}"), 0);
  EXPECT_GT(after.at("ballast_log_capacity_bytes{training_job=\"job\"}"),
            after.at("ballast_log_used_bytes{training_job=\"job\"}"));
  EXPECT_GT(after.at("ballast_disk_operation_seconds_count{op=\"sync\"}"), 29);
  EXPECT_GT(after.at("ballast_disk_bytes_total{op=\"write\"}"), 1e6);
  EXPECT_EQ(after.at("ballast_disk_inflight"), 0);
  EXPECT_EQ(after.at("ballast_step_seconds_count{training_job=\"job\"}"), 30);
}

TEST_F(LoadedMetricsTest, AStepsStagesSumToItsTime) {
  ASSERT_NO_FATAL_FAILURE(Start());
  for (int i = 0; i < 10; ++i) ASSERT_EQ(Step(), absl::OkStatus());
  const std::vector<SeenStep> steps = loaded_->Figures().jobs.at("job")->steps.Steps();
  ASSERT_EQ(steps.size(), 11u);
  for (size_t i = 1; i < steps.size(); ++i) {
    const SeenStep& step = steps[i];
    EXPECT_EQ(step.step, static_cast<int64_t>(i));
    EXPECT_EQ(step.began, steps[i - 1].decided);
    absl::Duration sum;
    for (const absl::Duration stage : step.stages) sum += stage;
    EXPECT_LT(absl::AbsDuration(sum - (step.decided - step.began)), 0.05 * (step.decided - step.began)) << i;
    EXPECT_LE(step.first_push, step.first_seal);
    EXPECT_LE(step.first_seal, step.last_seal);
    EXPECT_LE(step.last_seal, step.prepared);
    EXPECT_LE(step.prepared, step.decided);
    EXPECT_LE(steps[i - 1].update_began, steps[i - 1].updated);
    EXPECT_GE(steps[i - 1].update_began, steps[i - 1].decided);
    EXPECT_EQ(step.ranks, 1u);
  }
}

TEST_F(LoadedMetricsTest, ExportsWhatTheReadmeLists) {
  ASSERT_NO_FATAL_FAILURE(Start());
  ASSERT_EQ(Step(), absl::OkStatus());
  const std::string scrape = Scrape(loaded_.get());
  const char* const path = std::getenv("METRICS_README");
  ASSERT_NE(path, nullptr) << "METRICS_README must name services/monitoring/README.md; ctest sets it";
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  std::set<std::string> listed;
  const std::regex row("\\| (`[^|]*`) \\|");
  const std::regex name("`((ballast|process)_[a-z_]+)`");
  const std::string readme = text.str();
  for (std::sregex_iterator r(readme.begin(), readme.end(), row), end; r != end; ++r) {
    const std::string cell = (*r)[1];
    for (std::sregex_iterator n(cell.begin(), cell.end(), name); n != end; ++n) listed.insert((*n)[1]);
  }
  listed.erase("ballast_job_predicted_step_seconds");  // without a machine profile there is none
  // This server has no HBM.
  Families families;
  AddGpu(storage::GpuCounters(), &families);
  for (const prometheus::MetricFamily& family : families) EXPECT_EQ(listed.erase(family.name), 1u) << family.name;
  EXPECT_EQ(FamiliesOf(scrape), listed);
}

TEST(GpuFamilies, TellWhatWasCopiedAndWaitedFor) {
  storage::GpuCounters gpu;
  gpu.in.bytes = 100, gpu.in.count = 2, gpu.out.bytes = 30, gpu.out.count = 1, gpu.kernels = 7;
  gpu.update_wait_nanoseconds = 1'500'000'000, gpu.copy_wait_nanoseconds = 250'000'000;
  Families families;
  AddGpu(gpu, &families);
  const auto series = Series(prometheus::TextSerializer().Serialize(families));
  EXPECT_EQ(series.at("ballast_gpu_copied_bytes_total{direction=\"in\"}"), 100);
  EXPECT_EQ(series.at("ballast_gpu_copied_bytes_total{direction=\"out\"}"), 30);
  EXPECT_EQ(series.at("ballast_gpu_copies_total{direction=\"in\"}"), 2);
  EXPECT_EQ(series.at("ballast_gpu_copies_total{direction=\"out\"}"), 1);
  EXPECT_EQ(series.at("ballast_gpu_kernels_total"), 7);
  EXPECT_DOUBLE_EQ(series.at("ballast_gpu_wait_seconds_total{work=\"update\"}"), 1.5);
  EXPECT_DOUBLE_EQ(series.at("ballast_gpu_wait_seconds_total{work=\"copy\"}"), 0.25);
}

}  // namespace
}  // namespace ballast::services
