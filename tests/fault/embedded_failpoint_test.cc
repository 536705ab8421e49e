// A trainer with its durable server in its process (embedded_trainer.cc) dies at each failpoint, also with leases and
// loans in flight. It starts again, and must end with the bits of an undisturbed run; no acknowledged step of a job
// with durability `step` may be lost.
//
//   embedded_failpoint_test [--passings N]
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "ballast/tests/scratch_directory.h"
#include "ballast/tests/seeded/failpoint.h"
#include "ballast/tests/services/daemon.h"

namespace ballast {
namespace {

uint64_t wanted_passings = 2;

struct Mode {
  const char* durability;
  const char* memory;
  bool steps() const { return absl::string_view(durability) == "step"; }
  bool leases() const { return absl::string_view(memory) == "leases"; }
};
constexpr Mode kModes[] = {{"step", "leases"}, {"step", "loans"}, {"every-k", "leases"}, {"every-k", "loans"}};

// For each passing that is asked for: so many steps pass every point.
constexpr uint64_t kStepsEach = 8;

// Passed as a server starts, or as a second group begins: the trainer dies at one of these before.
constexpr const char* kDeathsBefore[] = {"step/updated:4", "journal/decision:5", "journal/prepared:5",
                                         "log/written:20"};

bool IsOfARestart(absl::string_view point) {
  return absl::StartsWith(point, "recovery/") || absl::StartsWith(point, "fence/");
}

// Whether the trainer passes the point in this mode. The server's own points are asked of durability `step` alone,
// whose log most of them belong to; failpoint_test drops jobs and lengthens logs.
bool IsPassed(absl::string_view point, const Mode& mode) {
  if (absl::StartsWith(point, "lease/")) return mode.leases();
  if (absl::StartsWith(point, "loan/")) return !mode.leases();
  // Slices that a log takes are copied; a loan of gradients has none.
  if (absl::StartsWith(point, "lent/")) return mode.leases() && !mode.steps();
  return mode.steps() && !absl::StartsWith(point, "drop/") && !absl::StartsWith(point, "lengthen/");
}

int LastAfter(const std::string& word, const std::string& output) {
  int last = -1;
  for (size_t at = 0; (at = output.find(word, at)) != std::string::npos;) {
    at += word.size();
    (void)absl::SimpleAtoi(absl::string_view(output).substr(at, output.find('\n', at) - at), &last);
  }
  return last;
}

std::string Digest(const std::string& output) {
  const size_t at = output.find("digest ");
  return at == std::string::npos ? output : output.substr(at, output.find('\n', at) - at);
}

class EmbeddedFailpointTest : public ::testing::Test {
 protected:
  // `armed`: "point:n", or empty.
  services::Finished Train(const std::string& directory, const Mode& mode, const std::string& armed) const {
    if (!armed.empty()) setenv("FAILPOINT", armed.c_str(), /*overwrite=*/1);
    services::Process trainer(
        {std::getenv("TRAINER"), directory, mode.durability, mode.memory, absl::StrCat(kStepsEach * wanted_passings)});
    unsetenv("FAILPOINT");
    return trainer.Wait();
  }
  // Dies at each of `points` in turn, and then finishes. False: it does not pass one of them.
  bool Disturbed(const Mode& mode, const std::vector<std::string>& points);
  bool DiesAt(absl::string_view point, uint64_t passing, const Mode& mode);

  std::string reference_;
  int deaths_ = 0;
};

bool EmbeddedFailpointTest::Disturbed(const Mode& mode, const std::vector<std::string>& points) {
  SCOPED_TRACE(absl::StrCat(mode.durability, " ", mode.memory, " ", points.back()));
  const ScratchDirectory directory;
  const std::string data = directory.path() + "/data";
  int acknowledged = -1;
  for (const std::string& point : points) {
    const services::Finished died = Train(data, mode, point);
    if (died.code == 0) return false;
    EXPECT_EQ(died.code, -1) << died.err;
    acknowledged = std::max(acknowledged, LastAfter("step ", died.out));
    ++deaths_;
  }
  const services::Finished restarted = Train(data, mode, "");
  EXPECT_EQ(restarted.code, 0) << restarted.err;
  const int continued = LastAfter("continued after ", restarted.out);
  EXPECT_GE(continued, mode.steps() ? acknowledged : 0);
  EXPECT_EQ(Digest(restarted.out), reference_);
  return true;
}

bool EmbeddedFailpointTest::DiesAt(absl::string_view point, uint64_t passing, const Mode& mode) {
  // A log is made once.
  const std::string armed = absl::StrCat(point, ":", absl::StartsWith(point, "create/") ? 1 : passing);
  if (!IsOfARestart(point)) return Disturbed(mode, {armed});
  return std::any_of(std::begin(kDeathsBefore), std::end(kDeathsBefore), [&](const char* before) {
    return Disturbed(mode, {before, absl::StrCat(point, ":1")});
  });
}

TEST_F(EmbeddedFailpointTest, ADeathAtEachChangesNothing) {
  for (const Mode& mode : kModes) {
    const ScratchDirectory directory;
    const services::Finished whole = Train(directory.path() + "/data", mode, "");
    ASSERT_EQ(whole.code, 0) << whole.err;
    ASSERT_TRUE(absl::StartsWith(Digest(whole.out), "digest ")) << whole.out;
    if (reference_.empty()) reference_ = Digest(whole.out);
    ASSERT_EQ(Digest(whole.out), reference_) << mode.durability << " " << mode.memory;
  }
  for (uint64_t passing = 1; passing <= wanted_passings; ++passing) {
    size_t turn = passing;
    for (const absl::string_view point : storage::kFailpoints) {
      std::vector<Mode> passes;
      std::copy_if(std::begin(kModes), std::end(kModes), std::back_inserter(passes),
                   [&](const Mode& mode) { return IsPassed(point, mode); });
      // Points of the server's own take turns: failpoint_test has each of them, too.
      if (!storage::IsOfTrainersMemory(point) && !passes.empty()) passes = {passes[turn++ % passes.size()]};
      for (const Mode& mode : passes) {
        EXPECT_TRUE(DiesAt(point, passing, mode))
            << point << " was not passed " << passing << " times: " << mode.durability << " " << mode.memory;
      }
    }
  }
  std::printf("%d deaths\n", deaths_);
}

}  // namespace
}  // namespace ballast

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  if (argc == 3 && std::strcmp(argv[1], "--passings") == 0 && absl::SimpleAtoi(argv[2], &ballast::wanted_passings)) {
    return RUN_ALL_TESTS();
  }
  if (argc == 1) return RUN_ALL_TESTS();
  std::fprintf(stderr, "usage: embedded_failpoint_test [--passings N]\n");
  return 2;
}
