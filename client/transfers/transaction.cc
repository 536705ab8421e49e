#include "ballast/client/transfers/transaction.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/copies.h"
#include "ballast/proto/model/verdict.h"

namespace ballast::client {
namespace {

// How long a server may hold a seal's answer back: long enough that polling costs nothing, short enough to report
// missing ranks in time, and shorter than the router's tries.
constexpr uint32_t kSealWaitMs = 500;

// The ranks that a server waits for: it names the first of them.
std::string Unsealed(const v1::SealResponse::Pending& pending) {
  const uint32_t named = static_cast<uint32_t>(pending.unsealed_ranks_size());
  const std::string ranks = absl::StrCat("rank(s) ", absl::StrJoin(pending.unsealed_ranks(), ", "));
  return pending.unsealed_count() <= named ? ranks
                                           : absl::StrCat(ranks, " and ", pending.unsealed_count() - named, " more");
}

}  // namespace

// Seal answers that have come and were not looked at yet.
struct Transaction::Answers {
  using Answer = std::pair<uint32_t, absl::StatusOr<v1::SealResponse>>;
  absl::Mutex mutex;
  std::vector<Answer> come ABSL_GUARDED_BY(mutex);

  void Add(uint32_t server, absl::StatusOr<v1::SealResponse> answer) {
    absl::MutexLock lock(&mutex);
    come.emplace_back(server, std::move(answer));
  }
  std::vector<Answer> Take() {
    absl::MutexLock lock(&mutex);
    mutex.Await(absl::Condition(
        +[](std::vector<Answer>* c) { return !c->empty(); }, &come));
    return std::exchange(come, {});
  }
};

struct Transaction::Sealing {
  std::shared_ptr<const Routes> routes;
  std::shared_ptr<const v1::SealRequest> request;
  absl::Time deadline;
  std::shared_ptr<Answers> answers = std::make_shared<Answers>();
};

void Transaction::Send(const Sealing& sealing, uint32_t server) {
  seat_->router->Call<v1::SealRequest, v1::SealResponse>(
      &Transport::Seal, sealing.routes->servers[server], absl::StrCat("Seal of step ", sealing.request->step()),
      sealing.request, sealing.deadline,
      [answers = sealing.answers, server](absl::StatusOr<v1::SealResponse> answer) {
        answers->Add(server, std::move(answer));
      },
      sealing.routes);
}

absl::Status Transaction::SendMissing(const v1::SealResponse::Pending& pending, const Sealing& sealing, uint32_t server,
                                      const Resend& resend) const {
  std::vector<const OwnedSlice*> mine;
  for (const v1::RankRange& missing : pending.missing()) {
    if (missing.rank() != seat_->rank()) continue;
    const OwnedSlice* owned = seat_->units->Find(missing.unit(), {missing.begin(), missing.end()});
    if (owned == nullptr || !sealing.routes->plan->Has(server, owned->slice.chunk)) continue;
    mine.push_back(owned);
  }
  // Its gradient and its value may both be missing.
  std::sort(mine.begin(), mine.end());
  mine.erase(std::unique(mine.begin(), mine.end()), mine.end());
  return mine.empty() ? absl::OkStatus() : resend(mine);
}

absl::Status Transaction::Late(const Transport& server, int64_t step, const v1::SealResponse::Pending& pending) const {
  const std::string context = absl::StrCat("server ", server.name(), ": step ", step, " was not prepared within ",
                                           absl::FormatDuration(seat_->step_timeout), ": ");
  if (pending.unsealed_ranks_size() > 0) {
    return model::Error(absl::StatusCode::kDeadlineExceeded, model::kRankMissing,
                        absl::StrCat(context, Unsealed(pending), " have not sealed; are they alive?"));
  }
  if (pending.missing_size() > 0) {
    const v1::RankRange& first = pending.missing(0);
    return model::Error(
        absl::StatusCode::kDeadlineExceeded, model::kRankMissing,
        absl::StrCat(context, pending.missing_count(), " slice(s) have not come, the first is [", first.begin(), ", ",
                     first.end(), ") of unit ", first.unit(), " from rank ", first.rank()));
  }
  return model::Error(
      absl::StatusCode::kDeadlineExceeded, model::kServerDown,
      absl::StrCat(
          context,
          "the server still waits for its disk (the log, or with durability every-K a pin); check the disk, or "
          "give a longer step_timeout"));
}

absl::StatusOr<v1::Decision> Transaction::SealOn(const std::shared_ptr<const Routes>& routes,
                                                 const std::shared_ptr<const v1::SealRequest>& seal,
                                                 absl::Time deadline, const Resend& resend) {
  const auto servers = static_cast<uint32_t>(routes->servers.size());
  const Sealing sealing{routes, seal, deadline};
  // A server may wait for a rank that goes by later routes, without it.
  seat_->router->WaitsSince(model::SteadyTime::Now());
  const absl::Cleanup end = [this] { seat_->router->WaitsSince(model::SteadyTime::Never()); };
  for (uint32_t i = 0; i < servers; ++i) Send(sealing, i);

  std::vector<v1::PreparedRecord> records(servers);
  std::vector<v1::SealResponse> told(servers);              // digests alone
  std::vector<v1::SealResponse::Pending> pending(servers);  // what each server last waited for
  uint32_t prepared = 0;
  while (prepared < servers) {
    for (auto& [server, answer] : sealing.answers->Take()) {
      const Transport& asked = *routes->servers[server];
      if (!answer.ok()) {
        const bool told = pending[server].unsealed_ranks_size() > 0 || pending[server].missing_size() > 0;
        return absl::IsDeadlineExceeded(answer.status()) && told ? Late(asked, seal->step(), pending[server])
                                                                 : answer.status();
      }
      switch (answer->outcome_case()) {
        case v1::SealResponse::kPrepared:
          records[server] = std::move(*answer->mutable_prepared());
          told[server].mutable_digests()->Swap(answer->mutable_digests());
          ++prepared;
          break;
        case v1::SealResponse::kDecided:
          // Another rank was faster: its decision follows from the same records.
          return std::move(*answer->mutable_decided());
        default:
          pending[server] = std::move(*answer->mutable_pending());
          if (absl::Now() >= deadline) return Late(asked, seal->step(), pending[server]);
          if (pending[server].unsealed_ranks_size() > 0) {
            seat_->router->Report(absl::StrCat("waiting for ", Unsealed(pending[server]), " to seal step ",
                                               seal->step(), " on server ", asked.name()));
          }
          BALLAST_RETURN_IF_ERROR(SendMissing(pending[server], sealing, server, resend));
          Send(sealing, server);
      }
    }
  }
  auto decision = model::Decide(records);
  if (decision.ok()) Compare(*routes, records, told);
  return decision;
}

void Transaction::Compare(const Routes& routes, absl::Span<const v1::PreparedRecord> records,
                          absl::Span<const v1::SealResponse> told) {
  std::vector<model::ToldDigests> digests;
  for (size_t i = 0; i < told.size(); ++i) digests.push_back({records[i].server_id(), &told[i].digests()});
  const std::vector<v1::DifferingCopies> differing = model::FindDiffering(digests);
  if (differing.empty()) return;
  for (const v1::DifferingCopies& found : differing) {
    for (size_t i = 0; i < told.size(); ++i) {
      const bool has = std::any_of(found.copies().begin(), found.copies().end(),
                                   [&](const auto& copy) { return copy.server_id() == records[i].server_id(); });
      if (has) differing_[routes.servers[i]].push_back(found);
    }
  }
  seat_->router->Report(absl::StrCat("copies of ", differing.size(), " chunk(s) differ, the first is ",
                                     model::ShowDiffering(differing.front()),
                                     ". One of these servers has damaged state: see BallastReplicasDiffer in the "
                                     "runbook"));
}

absl::StatusOr<v1::Decision> Transaction::SealAndDecide(const v1::SealRequest& request, absl::Time deadline,
                                                        const Resend& resend) {
  auto shared = std::make_shared<v1::SealRequest>(request);
  shared->set_wait_ms(kSealWaitMs);
  const std::shared_ptr<const v1::SealRequest> seal = shared;
  for (;;) {
    auto decision = SealOn(seat_->router->routes(), seal, deadline, resend);
    if (!AreRoutesChanged(decision.status())) return decision;
  }
}

void Transaction::CommitAgain() {
  if (decision_.has_value()) Commit(v1::Decision(*decision_));
}

void Transaction::Commit(const v1::Decision& decision) {
  decision_ = decision;
  auto request = std::make_shared<v1::CommitRequest>();
  request->set_job(seat_->job);
  *request->mutable_decision() = decision;
  request->mutable_decision()->clear_blobs();  // servers have them from the seal
  seat_->router->SetCommit(request);
  const auto differing = std::exchange(differing_, {});
  const std::vector<Transport*> servers = seat_->router->servers_now();
  commits_->Start(static_cast<int>(servers.size()));
  for (Transport* const server : servers) {
    auto own = request;
    if (const auto found = differing.find(server); found != differing.end()) {
      own = std::make_shared<v1::CommitRequest>(*request);
      own->mutable_differing()->Add(found->second.begin(), found->second.end());
    }
    seat_->router->Call<v1::CommitRequest, v1::CommitResponse>(
        &Transport::Commit, server, absl::StrCat("Commit of step ", decision.step()), std::move(own), seat_->Deadline(),
        [tally = commits_](const absl::StatusOr<v1::CommitResponse>& answer) {
          // Who left needs it no more.
          tally->Finish(AreRoutesChanged(answer.status()) ? absl::OkStatus() : answer.status());
        });
  }
}

}  // namespace ballast::client
