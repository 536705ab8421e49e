#include "ballast/services/monitoring/waits.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ballast/services/monitoring/bound.h"
#include "ballast/services/monitoring/cluster_view.h"
#include "ballast/services/monitoring/page/page.h"
#include "ballast/services/monitoring/show.h"
#include "ballast/services/monitoring/trace.h"

namespace ballast::services {
namespace {

using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

v1::JobStatus Flying(uint32_t unsealed_count, const std::vector<uint32_t>& named) {
  v1::JobStatus job;
  job.set_name("job");
  v1::StepInFlight* step = job.mutable_in_flight();
  step->set_step(412);
  step->set_unsealed_count(unsealed_count);
  step->mutable_unsealed_ranks()->Assign(named.begin(), named.end());
  step->set_seconds_since_first_slice(20);
  return job;
}

TEST(Waits, NamesRanksThatHaveNotSealed) {
  v1::JobStatus job = Flying(1, {3});
  job.mutable_in_flight()->set_seconds_since_first_seal(14);
  EXPECT_THAT(ShowWaits(job), ElementsAre("rank 3 has not sealed step 412 for 14 s"));
  job = Flying(2, {3, 5});
  job.mutable_in_flight()->set_seconds_since_first_seal(14);
  EXPECT_THAT(ShowWaits(job), ElementsAre("ranks 3 and 5 have not sealed step 412 for 14 s"));
  job = Flying(15, {0, 1, 2});
  job.mutable_in_flight()->set_seconds_since_first_seal(14);
  EXPECT_THAT(ShowWaits(job), ElementsAre("ranks 0, 1, 2 and 12 more have not sealed step 412 for 14 s"));
}

TEST(Waits, TellsTheLatestMilestone) {
  v1::JobStatus job = Flying(2, {0, 1});
  EXPECT_THAT(ShowWaits(job), ElementsAre("no rank has sealed step 412, whose slices have come for 20 s"));
  job = Flying(0, {});
  job.mutable_in_flight()->set_seconds_since_first_seal(9);
  EXPECT_THAT(ShowWaits(job),
              ElementsAre("slices of step 412, which all ranks have sealed, have been missing for 9 s"));
  job.mutable_in_flight()->set_seconds_since_complete(8);
  EXPECT_THAT(ShowWaits(job), ElementsAre("the log's disk has not synced step 412 for 8 s"));
  job.mutable_in_flight()->set_seconds_since_prepared(7);
  EXPECT_THAT(ShowWaits(job), ElementsAre("rank 0 has not decided step 412, prepared here, for 7 s"));
  job.mutable_in_flight()->set_seconds_of_update(6);
  EXPECT_THAT(ShowWaits(job), ElementsAre("rank 0 has not decided step 412, prepared here, for 7 s",
                                          "pulls of version 411 wait for its update, decided 6 s ago"));
}

TEST(Waits, HealthyStepsAndIdleJobsTellNothing) {
  v1::JobStatus job;
  EXPECT_THAT(ShowWaits(job), IsEmpty());
  job.mutable_in_flight()->set_step(1);
  EXPECT_THAT(ShowWaits(job), IsEmpty());
  job.mutable_in_flight()->set_seconds_since_first_slice(0.9);
  EXPECT_THAT(ShowWaits(job), IsEmpty());
  // A late milestone is what is waited for: the earlier ones are behind the step.
  job.mutable_in_flight()->set_seconds_since_first_slice(20);
  job.mutable_in_flight()->set_seconds_since_prepared(0.1);
  EXPECT_THAT(ShowWaits(job), IsEmpty());
}

ServerView Server(const std::string& id, const v1::JobStatus& job) {
  ServerView view{.address = id + ":7070", .error = absl::OkStatus(), .status = {}};
  view.status.set_server_id(id);
  *view.status.add_jobs() = job;
  return view;
}

TEST(ClusterView, HasWaitsOnceAndPeersThatWereNotAsked) {
  v1::JobStatus one = Flying(1, {3});
  one.mutable_in_flight()->set_seconds_since_first_seal(14);
  v1::JobStatus two = one;
  for (const auto& [job, ids] : {std::pair{&one, std::vector<std::string>{"b", "c"}}, {&two, {"a", "c"}}}) {
    for (const std::string& id : ids) job->add_peers()->set_server_id(id);
  }
  two.mutable_peers(1)->set_page("c:9090");
  const ClusterView cluster = Judge({Server("a", one), Server("b", two)});
  EXPECT_THAT(cluster.peers, ElementsAre(std::pair<const std::string, std::string>("c", "c:9090")));
  EXPECT_THAT(cluster.jobs.at(0).waits, ElementsAre("rank 3 has not sealed step 412 for 14 s"));
  const std::string json = ShowJson(cluster);
  EXPECT_THAT(json, HasSubstr("\"waits\":[\"rank 3 has not sealed step 412 for 14 s\"]"));
  EXPECT_THAT(json, HasSubstr("\"peers\":[{\"server_id\":\"c\",\"page\":\"c:9090\"}]"));
  EXPECT_THAT(ShowText(cluster), HasSubstr("\nWaiting\n  job: rank 3 has not sealed step 412 for 14 s\n"));
}

v1::JobStatus Stages(const std::vector<std::pair<std::string, double>>& seconds) {
  v1::JobStatus job;
  job.set_name("job");
  for (const auto& [stage, time] : seconds) {
    job.add_last_stages()->set_stage(stage);
    job.mutable_last_stages()->rbegin()->set_seconds(time);
  }
  return job;
}

// What a server says of its jobs, and of other servers, neither steers the terminal nor begins a line of its own.
// A server that was lost, and comes back with what it had, is no member any more: it is neither counted nor behind.
TEST(ClusterView, AServerThatAJobWentOnWithoutIsNamedAndNotCounted) {
  v1::JobStatus job;
  job.set_name("job");
  job.set_replicas(2);
  job.set_life(7);
  for (const char* id : {"a", "b", "c"}) job.add_member_ids(id);
  v1::JobStatus left = job;
  left.mutable_epoch()->set_counter(3);
  left.set_committed(10);
  left.set_chunks(4);
  left.set_short_chunks(4);
  job.mutable_epoch()->set_counter(4);
  job.mutable_member_ids()->RemoveLast();
  job.set_committed(20);
  job.set_chunks(5);
  job.set_short_chunks(3);
  const ClusterView cluster = Judge({Server("a", job), Server("b", job), Server("c", left)});
  ASSERT_EQ(cluster.jobs.size(), 1u);
  EXPECT_EQ(cluster.jobs[0].committed_min, 20);
  EXPECT_EQ(cluster.jobs[0].chunks, 10u);
  EXPECT_THAT(cluster.problems,
              ElementsAre("job 'job' has 6 chunk(s) with fewer than 2 copies",
                          ::testing::AllOf(HasSubstr("server c:7070 keeps a part of job 'job' at version 10"),
                                           HasSubstr("ballastctl drop --job job --servers c:7070"))));
  left.set_life(8);
  EXPECT_THAT(Judge({Server("a", job), Server("c", left)}).problems,
              ::testing::Each(Not(HasSubstr("ballastctl drop --job job --servers"))))
      << "another job of that name";
  left.set_life(7);
  // A member that is behind is no such server.
  left.mutable_member_ids()->RemoveLast();
  EXPECT_THAT(Judge({Server("a", job), Server("b", left)}).problems,
              ::testing::Contains(HasSubstr("expected at most one apart")));
}

TEST(ClusterView, ServersThatCopyChunksSayHowManyTheyHave) {
  v1::JobStatus job;
  job.set_name("job");
  job.set_replicas(2);
  job.set_chunks(64);
  job.add_member_ids("a");
  job.add_member_ids("b");
  v1::JobStatus fills = job;
  fills.set_unfilled_chunks(28);
  fills.set_unfilled_bytes(uint64_t{480} << 20);
  fills.set_filled_chunks(12);
  const ClusterView cluster = Judge({Server("a", job), Server("b", fills)});
  EXPECT_THAT(cluster.problems, ::testing::IsEmpty()) << "it is on its way";
  EXPECT_THAT(ShowText(cluster), HasSubstr("\nFilling\n  job: b:7070 fills: 12 of 40 chunks, 480.0 MiB left\n"));
  EXPECT_THAT(ShowJson(cluster), HasSubstr("\"unfilled_chunks\":28,\"filled_chunks\":12,\"short_chunks\":0,"
                                           "\"copies\":\"12 of 40 chunks copied, 480.0 MiB left\""));
  EXPECT_THAT(ShowText(Judge({Server("a", job)})), Not(HasSubstr("Filling")));
}

TEST(ClusterView, CopiesThatDifferAreAProblemOfTheServersThatHaveThem) {
  v1::JobStatus job;
  job.set_name("job");
  job.set_replicas(2);
  v1::JobStatus differs = job;
  differs.set_differing_chunks(2);
  differs.add_differing("chunk 5 at version 69: the master has CRC32C 00000001 on 'a', 00000002 on 'b'");
  EXPECT_THAT(
      Judge({Server("a", differs), Server("c", job)}).problems,
      ElementsAre("job 'job' has 2 chunk(s) whose copy on a:7070 differs from another server's, the first: chunk "
                  "5 at version 69: the master has CRC32C 00000001 on 'a', 00000002 on 'b'"));
}

TEST(ClusterView, AJobsCopiesAreToldInOneLine) {
  v1::JobStatus job;
  job.set_name("job");
  job.set_replicas(2);
  EXPECT_EQ(ShowCopies(Judge({Server("a", job)}).jobs[0]), "");
  job.set_short_chunks(9);
  v1::JobStatus fills = job;
  fills.set_short_chunks(1);
  EXPECT_EQ(ShowCopies(Judge({Server("a", job), Server("b", fills)}).jobs[0]), "10 chunks have one copy");
  fills.set_unfilled_chunks(28);
  fills.set_unfilled_bytes(uint64_t{480} << 20);
  fills.set_filled_chunks(12);
  EXPECT_EQ(ShowCopies(Judge({Server("a", job), Server("b", fills), Server("c", fills)}).jobs[0]),
            "24 of 80 chunks copied, 960.0 MiB left; 11 chunks have one copy");
  fills.set_replicas(3);
  EXPECT_EQ(ShowCopies(Judge({Server("b", fills)}).jobs[0]),
            "12 of 40 chunks copied, 480.0 MiB left; 1 chunk has fewer than 3 copies");
}

TEST(ClusterView, TextsOfServersAreMadePrintable) {
  v1::JobStatus job = Flying(0, {});
  job.set_name("job\x1b[2J");
  job.set_failure("full\nHEALTHY: 1 server(s)");
  job.add_member_ids("\x1b]0;title\x07");
  ServerView down{.address = "b:7070", .error = absl::UnavailableError("no\x1b[1m answer"), .status = {}};
  const std::string text = ShowText(Judge({Server("a\x1b[31m", job), down}));
  EXPECT_EQ(text.find('\x1b'), std::string::npos) << text;
  EXPECT_EQ(text.find("\nHEALTHY"), std::string::npos) << text;
  EXPECT_THAT(text, HasSubstr("job?[2J"));
}

TEST(ClusterView, ShowsTheDisksOfAServerThatHasSeveral) {
  ServerView server = Server("a", Flying(0, {}));
  v1::TierStatus* const nvme = server.status.add_tiers();
  nvme->set_tier("nvme");
  EXPECT_THAT(ShowText(Judge({server})), Not(HasSubstr("Disks")));
  v1::NvmeDeviceStatus* const disk = nvme->add_devices();
  disk->set_directory("/mnt/1\x1b[2J");
  disk->set_capacity_bytes(8192);
  disk->set_used_bytes(4096);
  const std::string text = ShowText(Judge({server}));
  EXPECT_THAT(text, HasSubstr("Disks of the nvme tier"));
  EXPECT_THAT(text, ContainsRegex("a:7070 +/mnt/1.*4.0 KiB +8.0 KiB"));
  EXPECT_THAT(text, Not(HasSubstr("\x1b")));
}

TEST(ClusterView, DamageThatAScrubFoundIsAProblem) {
  v1::JobStatus job = Flying(0, {});
  job.mutable_scrub()->set_passes(3);
  EXPECT_THAT(ShowText(Judge({Server("a", job)})), HasSubstr("HEALTHY"));
  job.mutable_scrub()->set_damaged(2);
  job.mutable_scrub()->add_damage("chunk 7 is rotten");
  const std::string text = ShowText(Judge({Server("a", job)}));
  EXPECT_THAT(text, HasSubstr("on the disk of a:7070 2 states of job 'job' are damaged, the first: chunk 7 is rotten"));
  EXPECT_EQ(text.find("HEALTHY"), std::string::npos) << text;
}

TEST(Trace, HasOnlyNumbersThatJsonHas) {
  v1::JobSteps job;
  v1::StepTimes* step = job.add_steps();
  step->set_began_seconds(std::nan(""));
  step->set_decided_seconds(std::numeric_limits<double>::infinity());
  for (const double seconds : {std::nan(""), 2.0}) {
    step->add_stages()->set_stage(seconds == 2 ? "kernel" : "push");
    step->mutable_stages()->rbegin()->set_seconds(seconds);
  }
  *job.add_steps() = job.steps(0);
  job.mutable_steps(1)->set_began_seconds(1);
  *job.add_steps() = job.steps(1);
  job.mutable_steps(2)->set_decided_seconds(3);
  const std::string trace = ShowTrace({{"a:1", job}});
  EXPECT_EQ(trace.find("nan"), std::string::npos) << trace;
  EXPECT_EQ(trace.find("inf"), std::string::npos) << trace;
  EXPECT_THAT(trace, HasSubstr("\"kernel\":2.000000"));
}

TEST(Bound, IsTheStageWithTheLargestShare) {
  EXPECT_FALSE(BoundOf(Stages({})).has_value());
  EXPECT_FALSE(BoundOf(Stages({{"kernel", 0}, {"idle", -1}, {"push", std::nan("")}})).has_value());
  const auto bound = BoundOf(Stages({{"push", 1}, {"kernel", 5}, {"seal_wait", 2}, {"idle", 2}}));
  ASSERT_TRUE(bound.has_value());
  EXPECT_EQ(bound->stage, "kernel");
  EXPECT_DOUBLE_EQ(bound->share, 0.5);
  EXPECT_DOUBLE_EQ(bound->waiting, 0.4);
  EXPECT_EQ(ShowBound(*bound, false), "kernel 50 %");
  EXPECT_EQ(ShowBound(*bound, true), "computing 50 %");
}

// A server that waits for another one does not bind the job.
TEST(Bound, OfSeveralServersTheOneThatWaitsLeast) {
  const v1::JobStatus fast = Stages({{"kernel", 1}, {"idle", 9}}), slow = Stages({{"state_read", 6}, {"idle", 4}});
  for (const bool slow_first : {false, true}) {
    const ClusterView cluster = Judge({Server("a", slow_first ? slow : fast), Server("b", slow_first ? fast : slow)});
    ASSERT_TRUE(cluster.jobs.at(0).bound.has_value());
    EXPECT_EQ(cluster.jobs[0].bound->stage, "state_read");
    EXPECT_THAT(ShowJson(cluster), HasSubstr(absl::StrCat("\"bound_by\":{\"stage\":\"state_read\",\"words\":\"state "
                                                          "from disk\",\"share\":0.6000,\"server\":\"",
                                                          slow_first ? "a" : "b", ":7070\"}")));
  }
  EXPECT_THAT(ShowJson(Judge({Server("a", Stages({}))})), HasSubstr("\"bound_by\":null"));
}

// The page has the words in its legend, where nobody asks a server for them.
TEST(Bound, ThePageSaysTheSameWords) {
  const auto files = PageFiles();
  const auto script = std::find_if(files.begin(), files.end(), [](const PageFile& f) { return f.path == "/page.js"; });
  ASSERT_NE(script, files.end());
  for (const char* stage :
       {"push", "seal_wait", "log_sync", "state_read", "kernel", "state_write", "flush", "pin", "move", "idle"}) {
    EXPECT_NE(WordsOf(stage), stage);
    EXPECT_THAT(std::string(script->bytes), HasSubstr(absl::StrCat(stage, ": '", WordsOf(stage), "'")));
  }
  EXPECT_EQ(WordsOf("of a newer server"), "of a newer server");
}

TEST(Durability, IsWrittenInOneWay) {
  v1::JobStatus job;
  EXPECT_EQ(ShowDurability(job, "-"), "-");
  for (const auto& [durability, text] :
       {std::pair{v1::DURABILITY_NONE, "none"}, {v1::DURABILITY_STEP, "step"}, {v1::DURABILITY_EVERY_K, "every-7"}}) {
    job.set_durability(durability);
    job.set_pin_interval(7);
    EXPECT_EQ(ShowDurability(job, "-"), text);
  }
}

}  // namespace
}  // namespace ballast::services
