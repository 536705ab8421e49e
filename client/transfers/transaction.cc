#include "ballast/client/transfers/transaction.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/verdict.h"

namespace ballast::client {
namespace {

// How long a server may hold a seal's answer back: long enough that polling costs nothing, short enough to report
// missing ranks in time.
constexpr uint32_t kSealWaitMs = 1000;

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

void Transaction::Send(uint32_t server, const std::shared_ptr<const v1::SealRequest>& request, absl::Time deadline,
                       const std::shared_ptr<Answers>& answers) {
  seat_->router->Call<v1::SealRequest, v1::SealResponse>(
      &Transport::Seal, server, absl::StrCat("Seal of step ", request->step()), request, deadline,
      [answers, server](absl::StatusOr<v1::SealResponse> answer) { answers->Add(server, std::move(answer)); });
}

absl::Status Transaction::SendMissing(const v1::SealResponse::Pending& pending, uint32_t server,
                                      const Resend& resend) const {
  std::vector<const OwnedSlice*> mine;
  for (const v1::RankRange& missing : pending.missing()) {
    if (missing.rank() != seat_->rank()) continue;
    const OwnedSlice* owned = seat_->units->Find(missing.unit(), {missing.begin(), missing.end()});
    if (owned == nullptr || !seat_->units->plan().Has(server, owned->slice.chunk)) continue;
    mine.push_back(owned);
  }
  // Its gradient and its value may both be missing.
  std::sort(mine.begin(), mine.end());
  mine.erase(std::unique(mine.begin(), mine.end()), mine.end());
  return mine.empty() ? absl::OkStatus() : resend(mine);
}

absl::Status Transaction::Late(uint32_t server, int64_t step, const v1::SealResponse::Pending& pending) const {
  const std::string context =
      absl::StrCat("server ", seat_->router->name(server), ": step ", step, " was not prepared within ",
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

absl::StatusOr<v1::Decision> Transaction::SealAndDecide(const v1::SealRequest& request, absl::Time deadline,
                                                        const Resend& resend) {
  const uint32_t servers = seat_->router->server_count();
  auto shared = std::make_shared<v1::SealRequest>(request);
  shared->set_wait_ms(kSealWaitMs);
  const std::shared_ptr<const v1::SealRequest> seal = shared;
  const auto answers = std::make_shared<Answers>();
  for (uint32_t i = 0; i < servers; ++i) Send(i, seal, deadline, answers);

  std::vector<v1::PreparedRecord> records(servers);
  std::vector<v1::SealResponse::Pending> pending(servers);  // what each server last waited for
  uint32_t prepared = 0;
  while (prepared < servers) {
    for (auto& [server, answer] : answers->Take()) {
      if (!answer.ok()) {
        const bool told = pending[server].unsealed_ranks_size() > 0 || pending[server].missing_size() > 0;
        return absl::IsDeadlineExceeded(answer.status()) && told ? Late(server, request.step(), pending[server])
                                                                 : answer.status();
      }
      switch (answer->outcome_case()) {
        case v1::SealResponse::kPrepared:
          records[server] = std::move(*answer->mutable_prepared());
          ++prepared;
          break;
        case v1::SealResponse::kDecided:
          // Another rank was faster: its decision follows from the same records.
          return std::move(*answer->mutable_decided());
        default:
          pending[server] = std::move(*answer->mutable_pending());
          if (absl::Now() >= deadline) return Late(server, request.step(), pending[server]);
          if (pending[server].unsealed_ranks_size() > 0) {
            seat_->router->Report(absl::StrCat("waiting for ", Unsealed(pending[server]), " to seal step ",
                                               request.step(), " on server ", seat_->router->name(server)));
          }
          BALLAST_RETURN_IF_ERROR(SendMissing(pending[server], server, resend));
          Send(server, seal, deadline, answers);
      }
    }
  }
  return model::Decide(records);
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
  const uint32_t servers = seat_->router->server_count();
  commits_->Start(static_cast<int>(servers));
  for (uint32_t i = 0; i < servers; ++i) {
    seat_->router->Call<v1::CommitRequest, v1::CommitResponse>(
        &Transport::Commit, i, absl::StrCat("Commit of step ", decision.step()), request, seat_->Deadline(),
        [tally = commits_](const absl::StatusOr<v1::CommitResponse>& answer) { tally->Finish(answer.status()); });
  }
}

}  // namespace ballast::client
