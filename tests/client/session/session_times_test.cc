// Where trainers' time goes, as their seals tell the servers.
#include <gtest/gtest.h>

#include <thread>

#include "absl/time/clock.h"
#include "ballast/services/counters/job_counters.h"
#include "ballast/tests/client/session/session_fixture.h"

namespace ballast::client {
namespace {

double Seconds(const services::TrainerTimes& times, size_t span) { return absl::ToDoubleSeconds(times[span]); }

// Two ranks, of which one computes for `slow` seconds in each of two steps. Returns whether no server counts more than
// that, beyond the slower rank's, as the faster rank's computing: waits for the other rank are none.
bool WaitsAreNotComputing(double slow) {
  bool apart = true;
  SessionFixture servers(2);
  const absl::Time began = absl::Now();
  EXPECT_EQ(SessionFixture::RunRanks(2,
                                     [&](Collective* collective) -> absl::Status {
                                       BALLAST_ASSIGN_OR_RETURN(auto session,
                                                                servers.Open(collective, TestOptions(), TestTensors()));
                                       BALLAST_RETURN_IF_ERROR(InitialiseAll(*session));
                                       for (int64_t step = 1; step <= 2; ++step) {
                                         for (uint32_t unit = 0; unit < session->unit_count(); ++unit) {
                                           BALLAST_RETURN_IF_ERROR(session->Acquire(unit).status());
                                         }
                                         if (session->rank() == 1) absl::SleepFor(absl::Seconds(slow));
                                         BALLAST_RETURN_IF_ERROR(TrainStep(*session, step).status());
                                       }
                                       return absl::OkStatus();
                                     }),
            absl::OkStatus());
  const double wall = absl::ToDoubleSeconds(absl::Now() - began);
  for (int i = 0; i < 2; ++i) {
    const auto jobs = servers.server(i)->Figures().jobs;
    EXPECT_EQ(jobs.size(), 1u);
    const services::StepLog& log = jobs.begin()->second->steps;
    const services::TrainerTimes sum = log.trainers_sum(), max = log.trainers_max();
    EXPECT_GE(Seconds(max, 0), 2 * slow);  // compute: the slower rank of each step
    EXPECT_GE(Seconds(sum, 0), Seconds(max, 0));
    apart &= Seconds(sum, 0) < Seconds(max, 0) + slow;
    EXPECT_GT(Seconds(sum, 2), 0);  // gather: rank 0 waits there for nobody, yet takes some time
    EXPECT_GT(Seconds(sum, 3), 0);  // push
    double all = 0;
    for (size_t span = 0; span < services::kTrainerSpans; ++span) all += Seconds(sum, span);
    EXPECT_LE(all, 2 * wall);
    EXPECT_EQ(log.newest()->ranks, 2u);
  }
  return apart;
}

TEST(TrainerTimes, ServersHearThemInTheSeals) {
  // On a busy machine the faster rank may take longer than the slower one sleeps.
  bool apart = false;
  for (double slow = 0.2; !apart && slow < 20; slow *= 4) apart = WaitsAreNotComputing(slow);
  EXPECT_TRUE(apart) << "the faster rank did not compute that long";
}

}  // namespace
}  // namespace ballast::client
