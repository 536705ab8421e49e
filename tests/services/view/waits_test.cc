#include "ballast/services/view/waits.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ballast/services/view/cluster_view.h"

namespace ballast::services {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

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

}  // namespace
}  // namespace ballast::services
