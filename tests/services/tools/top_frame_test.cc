#include "ballast/services/tools/top/top_frame.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace ballast::services {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

ClusterView Cluster(int jobs) {
  ServerView server{.address = "one:7070", .error = absl::OkStatus(), .status = {}};
  server.status.set_server_id("one");
  v1::TierStatus* tier = server.status.add_tiers();
  tier->set_tier("dram");
  tier->set_capacity_bytes(100 << 20);
  tier->set_used_bytes(75 << 20);
  for (const auto& [part, mebibytes] : {std::pair{"state", 50}, {"working", 25}, {"log", 0}}) {
    v1::TierPart* added = tier->add_parts();
    added->set_part(part);
    added->set_bytes(static_cast<uint64_t>(mebibytes) << 20);
  }
  for (int i = 0; i < jobs; ++i) {
    v1::JobStatus* job = server.status.add_jobs();
    job->set_name(absl::StrCat("job", i));
    job->set_committed(10 * (jobs - i));
    job->set_parameters(static_cast<uint64_t>(i));
  }
  return Judge({server});
}

std::string Show(const ClusterView& cluster, const TopLook& look, const VersionHistory& history = {}) {
  std::string out;
  for (const StyledLine& line : DrawTop(cluster, history, absl::UnixEpoch(), look)) {
    absl::StrAppend(&out, line.Show(look.columns, false), "\n");
  }
  return out;
}

TEST(TopFrame, FillsAScreenExactly) {
  for (const auto& [columns, rows] : {std::pair<size_t, size_t>{80, 24}, {200, 50}, {40, 8}, {20, 4}, {1, 1}}) {
    for (const int jobs : {0, 1, 300}) {
      for (const bool per_server : {false, true}) {
        ClusterView cluster = Cluster(jobs);
        for (int i = 0; i < 20; ++i) cluster.problems.push_back("a problem");
        for (JobView& job : cluster.jobs) job.waits = {"a wait", "another"};
        TopLook look{.columns = columns, .rows = rows, .per_server = per_server, .keys = true};
        const auto lines = DrawTop(cluster, {}, absl::UnixEpoch(), look);
        EXPECT_EQ(lines.size(), rows) << columns << "x" << rows << ", " << jobs << " jobs";
        for (const StyledLine& line : lines) EXPECT_LE(WidthOf(line.Show(columns, false)), columns);
        EXPECT_THAT(lines.back().Show(80, false), StartsWith("q quit"));
      }
    }
  }
}

TEST(TopFrame, ShowsVerdictTiersAndJobs) {
  const std::string text = Show(Cluster(2), {.columns = 100});
  EXPECT_THAT(text, StartsWith("Ballast  HEALTHY  1 server(s), 2 job(s)"));
  EXPECT_THAT(text, HasSubstr("  75 %  75.0 MiB of 100.0 MiB"));
  EXPECT_THAT(text, HasSubstr("job0"));
  EXPECT_THAT(Show(Cluster(2), {.columns = 100, .per_server = true}), HasSubstr("one:7070  one"));
  EXPECT_THAT(Show(Cluster(0), {.columns = 100}), HasSubstr("no job"));
  EXPECT_THAT(Show(Cluster(50), {.columns = 100, .rows = 24}), HasSubstr("more jobs; a taller terminal shows them"));
}

TEST(TopFrame, SaysHowFarAJobsCopiesAre) {
  ClusterView cluster = Cluster(2);
  EXPECT_THAT(Show(cluster, {.columns = 100}), Not(HasSubstr("copied")));
  JobView& job = cluster.jobs[1];
  job.replicas = 2;
  job.filled_chunks = 12;
  job.unfilled_chunks = 28;
  job.unfilled_bytes = uint64_t{480} << 20;
  job.short_chunks = 30;
  job.waits = {"rank 1 has not sealed"};
  EXPECT_THAT(Show(cluster, {.columns = 100}),
              HasSubstr("~ job1: 12 of 40 chunks copied, 480.0 MiB left; 30 chunks have one copy\n"
                        "~ job1: rank 1 has not sealed\n"));
}

TEST(TopFrame, SaysWhatBindsAJob) {
  ClusterView cluster = Cluster(2);
  cluster.jobs[0].bound = Bound{"state_write", 1, 0};
  EXPECT_THAT(Show(cluster, {.columns = 80}), HasSubstr("  state_write 100 %     0       0     1\n"));
  EXPECT_THAT(Show(cluster, {.columns = 80}), HasSubstr("  -                     0       1     1\n"));
  EXPECT_THAT(Show(cluster, {.columns = 120}), HasSubstr("  state_write 100 % "));
  EXPECT_THAT(Show(cluster, {.columns = 200}), HasSubstr("  state to disk 100 % "));
  for (const size_t columns : {80, 100, 130, 150, 200}) {
    const std::string text = Show(cluster, {.columns = columns});
    const size_t header = text.find("JOB "), row = text.find("\n", header) + 1;
    EXPECT_EQ(text.find("BOUND BY") - header, text.find("state", row) - row) << text;
  }
}

TEST(TopFrame, SortsJobs) {
  ClusterView cluster = Cluster(3);  // versions 30, 20, 10; parameters 0, 1, 2
  VersionHistory history;
  history.Add(cluster, absl::UnixEpoch());
  cluster.jobs[1].committed_max += 5;
  history.Add(cluster, absl::UnixEpoch() + absl::Seconds(1));
  const auto first = [&](JobOrder order) {
    const std::string text = Show(cluster, {.columns = 100, .order = order}, history);
    return text.substr(text.find("\njob") + 1, 4);
  };
  EXPECT_EQ(first(JobOrder::kName), "job0");
  EXPECT_EQ(first(JobOrder::kRate), "job1");
  EXPECT_EQ(first(JobOrder::kVersion), "job0");
  EXPECT_EQ(first(JobOrder::kParameters), "job2");
}

TEST(VersionHistory, KnowsTheRateOfTheLastSeconds) {
  VersionHistory history;
  ClusterView cluster = Cluster(1);
  cluster.jobs[0].committed_max = 0;
  history.Add(cluster, absl::UnixEpoch());
  EXPECT_FALSE(history.StepsPerMinute("job0").has_value());
  EXPECT_FALSE(history.StepsPerMinute("unknown").has_value());
  for (int second = 1; second <= 100; ++second) {
    cluster.jobs[0].committed_max += second <= 50 ? 1 : 2;
    history.Add(cluster, absl::UnixEpoch() + absl::Seconds(second));
    if (second == 50) {
      EXPECT_DOUBLE_EQ(*history.StepsPerMinute("job0"), 60);
    }
  }
  EXPECT_DOUBLE_EQ(*history.StepsPerMinute("job0"), 120);
  EXPECT_EQ(history.Steps("job0").size(), 60u);
  // Pauses longer than the span, as of a laptop that slept.
  history.Add(cluster, absl::UnixEpoch() + absl::Seconds(400));
  EXPECT_DOUBLE_EQ(*history.StepsPerMinute("job0"), 0);
}

TEST(Bar, StacksPartsWithTheirNames) {
  const std::vector<BarPart> parts = {{"state", 50}, {"working", 25}, {"log", 0}, {"pins", 5}};
  EXPECT_EQ(DrawBar(parts, 100, 42).Show(80, false), "[state...............working...pi        ]");
  EXPECT_EQ(DrawBar(parts, 80, 12).Show(80, false), "[state.worp]");
  EXPECT_EQ(DrawBar({}, 100, 5).Show(80, false), "[   ]");
  EXPECT_EQ(DrawBar({{"state", 300}}, 100, 7).Show(80, false), "[state]");
}

TEST(Sparkline, BrailleAndPlain) {
  EXPECT_EQ(DrawSparkline({0, 1, 2, 4}, 20, true), "\u2880\u28fc");
  EXPECT_EQ(DrawSparkline({0, 1, 2, 7}, 20, false), " .:#");
  EXPECT_EQ(DrawSparkline({5, 0, 0, 7}, 2, false), " #");
  EXPECT_EQ(DrawSparkline({}, 5, true), "");
}

TEST(Quote, IsJsonWhateverTheBytes) {
  EXPECT_EQ(Quote("a\"b\\\n\u00e4"), "\"a\\\"b\\\\\\u000a\u00e4\"");
  EXPECT_EQ(Quote("\xff|\xc3|\xc0\xaf|\xed\xa0\x80"), R"("\ufffd|\ufffd|\ufffd\ufffd|\ufffd\ufffd\ufffd")");
}

TEST(StyledLine, TextsCannotSteerTheTerminal) {
  EXPECT_EQ(Printable("a\x1b[31m\n\x7f\xc2\x9b"
                      "2J\u00e4"),
            "a?[31m???2J\u00e4");
  // An 8-bit terminal takes a lone 0x9b for the start of a sequence; marks of direction show a name as another.
  EXPECT_EQ(Printable("a\x9b"
                      "2J\xc3"),
            "a?2J?");
  EXPECT_EQ(Printable("\xe0\x80\x9b|\xed\xa0\x80|\xf4\x90\x80\x80|\u202e|\u2028|\u20ac\U0001f600"),
            "???|???|????|?|?|\u20ac\U0001f600");
  StyledLine line;
  line.Add("\u00e4\u00f6\x1b", kBad).Add("xyz", kGood);
  EXPECT_EQ(line.width(), 6u);
  EXPECT_EQ(line.Show(4, false), "\u00e4\u00f6?x");
  EXPECT_EQ(line.Show(4, true), "\x1b[1;31m\u00e4\u00f6?\x1b[0m\x1b[1;32mx\x1b[0m");
}

}  // namespace
}  // namespace ballast::services
