// What a run says of itself.
#include "ballast/client/examples/report.h"

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <limits>
#include <sstream>
#include <string>

#include "ballast/tests/scratch_directory.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast::client {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class ReportTest : public ::testing::Test {
 protected:
  ReportTest() { options_.stream = stream_; }
  ~ReportTest() override { std::fclose(stream_); }
  std::string Said() {
    std::rewind(stream_);
    std::string said(1 << 16, '\0');
    said.resize(std::fread(said.data(), 1, said.size(), stream_));
    std::fseek(stream_, 0, SEEK_END);
    return said;
  }
  std::string Json(const Report& report) {
    const std::string path = directory_ / "figures.json";
    EXPECT_EQ(report.WriteJson(path, std::nullopt), absl::OkStatus());
    std::ifstream in(path);
    std::ostringstream text;
    text << in.rdbuf();
    return text.str();
  }

  ScratchDirectory directory_;
  std::FILE* const stream_ = std::tmpfile();
  ReportOptions options_;
};

TEST_F(ReportTest, ALineComesEverySoManySteps) {
  options_.log_every = 3;
  options_.steps_total = 7;
  Report report(options_);
  for (int64_t version = 1; version <= 7; ++version) report.Add({.version = version, .loss = 2});
  const std::string said = Said();
  EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 3) << said;  // 3, 6 and the last
}

TEST_F(ReportTest, ASkippedStepIsAlwaysTold) {
  options_.log_every = 1000;
  Report report(options_);
  report.Add({.version = 1, .loss = 2});
  EXPECT_EQ(Said(), "");
  report.Add({.version = 2, .loss = 2, .skipped = true});
  EXPECT_NE(Said(), "");
}

TEST_F(ReportTest, QuietRanksSayNothing) {
  options_.quiet = true;
  options_.log_every = 1;
  Report report(options_);
  report.Add({.version = 1, .loss = 2});
  report.Summarise(std::nullopt);
  EXPECT_EQ(Said(), "");
}

TEST_F(ReportTest, FiguresForProgramsAreJsonWhateverTheLoss) {
  options_.quiet = true;
  Report report(options_);
  for (int i = 1; i <= 30; ++i) {
    report.Add({.version = i, .loss = i <= 10 ? 4.0 : i > 20 ? 1.5 : std::numeric_limits<double>::infinity()});
  }
  std::string json = Json(report);
  EXPECT_THAT(json, HasSubstr("\"loss_first\": 4"));
  EXPECT_THAT(json, HasSubstr("\"loss_last\": 1.5"));
  report.Add({.version = 31, .loss = std::numeric_limits<double>::quiet_NaN()});
  json = Json(report);
  EXPECT_THAT(json, HasSubstr("null"));
  EXPECT_THAT(json, Not(HasSubstr("nan")));
  EXPECT_FALSE(report.WriteJson(directory_ / "nowhere/figures.json", std::nullopt).ok());
}

}  // namespace
}  // namespace ballast::client
