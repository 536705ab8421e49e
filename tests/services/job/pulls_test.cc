// Pulls of versions, and the pins that keep a version readable.
#include "ballast/services/job/pulls.h"

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/job/damaged_chunks.h"
#include "ballast/services/job/filling.h"
#include "ballast/services/job/kept_copies.h"
#include "ballast/services/job/kept_versions.h"
#include "ballast/services/job/read_pins.h"
#include "ballast/services/journal/flushes.h"
#include "ballast/tests/services/job_part.h"

namespace ballast::services {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class PullsTest : public JobPartTest {
 protected:
  ~PullsTest() override {
    EndTimers();
    core_.JoinThreads();
    pulls_.JoinThreads();
  }
  // A pull of the first `count` elements of the first chunk.
  struct Pulled {
    std::string bytes;
    AnswerRoom::Lease room;
    Answer<uint32_t> answer;
  };
  static uint32_t DigestOf(const Pulled& pulled) {
    return kernels::Crc32c({reinterpret_cast<const std::byte*>(pulled.bytes.data()), pulled.bytes.size()});
  }
  v1::PullRequest RequestOf(int64_t version, v1::Content content = v1::CONTENT_MASTER, uint64_t count = 8) const {
    v1::PullRequest request;
    request.set_job("job");
    request.set_version(version);
    request.set_content(content);
    request.set_end(count);
    return request;
  }
  void Send(const v1::PullRequest& request, Pulled* pulled, bool keeps_room = false) {
    pulls_.Pull(
        request, absl::InfiniteFuture(),
        [pulled, keeps_room](uint64_t bytes, AnswerRoom::Lease room) {
          if (keeps_room) pulled->room = std::move(room);
          pulled->bytes.resize(bytes);
          return absl::MakeSpan(reinterpret_cast<std::byte*>(pulled->bytes.data()), bytes);
        },
        pulled->answer.reply(), Checksum::kCrc32c);
    RunAll();
  }
  absl::Status Pull(const v1::PullRequest& request, Pulled* pulled) {
    Send(request, pulled);
    return pulled->answer.arrived() ? pulled->answer.Wait().status() : absl::UnavailableError("it waits");
  }
  // The value of all pulled masters.
  absl::StatusOr<float> Master(int64_t version) {
    Pulled pulled;
    BALLAST_RETURN_IF_ERROR(Pull(RequestOf(version), &pulled));
    EXPECT_EQ(*pulled.answer.Wait(), DigestOf(pulled));
    std::vector<float> values(8);
    EXPECT_EQ(pulled.bytes.size(), values.size() * sizeof(float));
    std::memcpy(values.data(), pulled.bytes.data(), pulled.bytes.size());
    for (const float value : values) EXPECT_EQ(value, values[0]);
    return values[0];
  }
  void ExpectRefused(const v1::PullRequest& request, const char* reason, const char* words) {
    Pulled pulled;
    const absl::Status status = Pull(request, &pulled);
    EXPECT_EQ(model::ReasonOf(status), reason) << status;
    EXPECT_THAT(status.ToString(), HasSubstr(words));
  }

  model::LeasedBytes Lease(const v1::PullRequest& request) {
    Answer<model::LeasedBytes> answer;
    pulls_.Lease(request, absl::InfiniteFuture(), answer.reply());
    RunAll();
    const auto leased = answer.Wait();
    EXPECT_TRUE(leased.ok()) << leased.status();
    return leased.ok() ? *leased : model::LeasedBytes();
  }

  // A pin of the version; none: it waits.
  Outcome<v1::PinResponse> Pin(int64_t version, uint64_t holder = 0, uint64_t lease_ms = 0, uint64_t* waits = nullptr) {
    v1::PinRequest request;
    request.set_version(version);
    request.set_holder(holder);
    request.set_lease_ms(lease_ms);
    Outcome<v1::PinResponse> outcome;
    uint64_t fresh = 0;
    if (waits == nullptr) waits = &fresh;
    Locked([&] { outcome = pins_.Pin(request, waits); });
    if (!outcome.ok() || outcome->has_value()) return outcome;
    if (waits != &fresh) return outcome;
    RunAll();
    Locked([&] { outcome = pins_.Pin(request, waits); });
    return outcome;
  }
  absl::Status PinAs(int64_t version, uint64_t holder) {
    return Pin(version, holder, holder == 0 ? 0 : 60'000).status();
  }
  void Unpin(int64_t version, uint64_t holder) {
    Locked([&] { pins_.Unpin(version, holder); });
    RunAll();
  }
  std::vector<int64_t> Pinned() {
    std::vector<int64_t> versions;
    Locked([&] { versions = pins_.Versions(); });
    return versions;
  }

  ReadPins pins_{&core_};
  Flushes flushes_{&core_, &journal_};
  KeptCopies kept_copies_{&core_, &journal_};
  KeptVersions kept_versions_{&core_, &journal_, &flushes_, &kept_copies_};
  Filling filling_{&core_, &kept_copies_, &kept_versions_};
  DamagedChunks damaged_{&core_, &filling_, &kept_copies_};
  Pulls pulls_{&core_, &pins_, &damaged_};
};

TEST_F(PullsTest, ALeaseIsThePlaceOfTheCurrentWorkingCopy) {
  Open();
  Answer<model::LeasedBytes> early;
  pulls_.Lease(RequestOf(0, v1::CONTENT_WORKING), absl::InfiniteFuture(), early.reply());
  RunAll();
  EXPECT_FALSE(early.arrived());
  StepOfValues(3);
  auto leased = *early.Wait();
  ASSERT_NE(leased.held, nullptr);
  ASSERT_EQ(leased.bytes.size(), 8 * sizeof(kernels::bf16));
  kernels::bf16 value = 0;
  std::memcpy(&value, leased.bytes.data(), sizeof(value));
  EXPECT_EQ(value, kernels::ToBf16(3));
  EXPECT_EQ(core_.counters.sent_bytes, 0u);
  v1::PullRequest tail = RequestOf(0, v1::CONTENT_WORKING);
  tail.set_begin(6);
  EXPECT_EQ(Lease(tail).bytes.data(), leased.bytes.data() + 6 * sizeof(value));
  EXPECT_EQ(chunks_[0]->leases.held(), 1u);
}

TEST_F(PullsTest, WhatIsNotACurrentWorkingCopyIsNotLeased) {
  Open();
  StepOfValues(3);
  EXPECT_EQ(Lease(RequestOf(0)).held, nullptr) << "masters";
  ASSERT_EQ(PinAs(0, 0), absl::OkStatus());
  StepOfValues(4);
  EXPECT_EQ(Lease(RequestOf(0, v1::CONTENT_WORKING)).held, nullptr) << "a pinned version";
  EXPECT_NE(Lease(RequestOf(1, v1::CONTENT_WORKING)).held, nullptr);
  {
    const std::shared_ptr<void> shut = core_.leases->ShutOut();
    EXPECT_EQ(Lease(RequestOf(1, v1::CONTENT_WORKING)).held, nullptr) << "copies are being dropped";
  }
  Locked([&] { ASSERT_EQ(core_.state.store()->DropWorkingCopies({0, 1}), absl::OkStatus()); });
  EXPECT_EQ(Lease(RequestOf(1, v1::CONTENT_WORKING)).held, nullptr) << "it was dropped";
  EXPECT_EQ(core_.leases->held(), 0u);
  Answer<model::LeasedBytes> gone;
  v1::PullRequest nowhere = RequestOf(1, v1::CONTENT_WORKING);
  nowhere.set_unit(9);
  pulls_.Lease(nowhere, absl::InfiniteFuture(), gone.reply());
  EXPECT_FALSE(gone.Wait().ok());
}

TEST_F(PullsTest, NoLeaseIsTakenOnceAnUpdateHasBegun) {
  Open();
  StepOfValues(3);
  Locked([&] {
    chunks_[0]->AwaitUpdate();
    chunks_[0]->BeginUpdate();
  });
  Answer<model::LeasedBytes> old, next;
  pulls_.Lease(RequestOf(0, v1::CONTENT_WORKING), absl::InfiniteFuture(), old.reply());
  EXPECT_EQ(model::ReasonOf(old.Wait().status()), model::kVersionGone);
  pulls_.Lease(RequestOf(1, v1::CONTENT_WORKING), absl::InfiniteFuture(), next.reply());
  RunAll();
  EXPECT_FALSE(next.arrived()) << "it waits as a pull does";
  Locked([&](Replies* replies) {
    chunks_[0]->EndUpdate(1);
    core_.waiting.Wake(&chunks_[0]->pulls, replies);
  });
  EXPECT_NE(next.Wait()->held, nullptr);
}

TEST_F(PullsTest, AVersionIsPulledOnceItIsThere) {
  Open();
  Pulled early;
  Send(RequestOf(0), &early);
  EXPECT_FALSE(early.answer.arrived());
  StepOfValues(3);
  EXPECT_EQ(early.answer.Wait().status(), absl::OkStatus());
  EXPECT_EQ(early.bytes.size(), 8 * sizeof(float));
  EXPECT_EQ(*Master(0), 3);
  Pulled working;
  ASSERT_EQ(Pull(RequestOf(0, v1::CONTENT_WORKING), &working), absl::OkStatus());
  EXPECT_EQ(working.bytes.size(), 8 * sizeof(kernels::bf16));
  EXPECT_EQ(*working.answer.Wait(), DigestOf(working));
  ASSERT_EQ(PinAs(0, 0), absl::OkStatus());
  StepOfValues(4);
  Pulled pinned;
  ASSERT_EQ(Pull(RequestOf(0, v1::CONTENT_WORKING), &pinned), absl::OkStatus());
  EXPECT_EQ(pinned.bytes, working.bytes);
  EXPECT_EQ(*pinned.answer.Wait(), *working.answer.Wait());
}

TEST_F(PullsTest, AVersionThatIsPastIsGoneUnlessItIsPinned) {
  Open();
  StepOfValues(3);
  StepOfValues(4);
  ExpectRefused(RequestOf(0), model::kVersionGone, "is not pinned");
  ASSERT_EQ(PinAs(1, 0), absl::OkStatus());
  StepOfValues(5);
  EXPECT_EQ(*Master(1), 4);
  EXPECT_EQ(*Master(2), 5);
  Unpin(1, 0);
  ExpectRefused(RequestOf(1), model::kVersionGone, "is not pinned");
}

TEST_F(PullsTest, AnUpdateUnderWayLeavesOnlyThePinnedVersion) {
  Open();
  StepOfValues(3);
  Locked([&] {
    chunks_[0]->AwaitUpdate();
    chunks_[0]->BeginUpdate();
  });
  ExpectRefused(RequestOf(0), model::kVersionGone, "(at 1)");
}

TEST_F(PullsTest, WhatNoChunkHasIsRefused) {
  ExpectRefused(RequestOf(0), model::kNotOpen, "was not opened on server 's' yet");
  Open();
  StepOfValues(3);
  ExpectRefused(RequestOf(-1), model::kBadRequest, "versions count from 0");
  ExpectRefused(RequestOf(0, v1::CONTENT_UNSPECIFIED), model::kBadRequest, "is neither WORKING nor MASTER");
  ExpectRefused(RequestOf(0, static_cast<v1::Content>(v1::CONTENT_MASTER + 3)), model::kBadRequest, "one of 2 moment");
  ExpectRefused(RequestOf(0, v1::CONTENT_MASTER, 65537), model::kBadRange, "it touches 2");
}

TEST_F(PullsTest, AnAnswerWaitsForItsRoom) {
  Open();
  StepOfValues(3);
  // Half of 1 MiB for this job: two chunks' masters of 256 KiB each.
  Pulled first, second, third;
  Send(RequestOf(0, v1::CONTENT_MASTER, 65536), &first, /*keeps_room=*/true);
  Send(RequestOf(0, v1::CONTENT_MASTER, 65536), &second, /*keeps_room=*/true);
  ASSERT_TRUE(first.answer.arrived() && second.answer.arrived());
  Send(RequestOf(0, v1::CONTENT_MASTER, 65536), &third);
  EXPECT_FALSE(third.answer.arrived());
  first.room.reset();
  RunAll();
  ASSERT_TRUE(third.answer.arrived());
  EXPECT_EQ(third.answer.Wait().status(), absl::OkStatus());
  EXPECT_EQ(third.bytes, second.bytes);
}

TEST_F(PullsTest, ADroppedJobRefusesThePullsThatWait) {
  Open();
  Pulled waits;
  Send(RequestOf(0), &waits);
  Locked([&](Replies* replies) { core_.Refuse(absl::CancelledError("dropped"), replies); });
  RunAll();
  EXPECT_EQ(waits.answer.Wait().status(), absl::CancelledError("dropped"));
  Pulled late;
  EXPECT_EQ(Pull(RequestOf(0), &late), absl::CancelledError("dropped"));
}

using ReadPinsOfAJobTest = PullsTest;

TEST_F(ReadPinsOfAJobTest, OnlyTheLastDecidedStepIsPinned) {
  Open();
  StepOfValues(3);
  StepOfValues(4);
  EXPECT_EQ(model::ReasonOf(PinAs(0, 0)), model::kVersionGone);
  EXPECT_EQ(model::ReasonOf(PinAs(2, 0)), model::kBehind);
  const auto pinned = Pin(1);
  ASSERT_TRUE(pinned.ok() && pinned->has_value()) << pinned.status();
  EXPECT_EQ((*pinned)->tensor_steps_size(), static_cast<int>(tensors()));
  EXPECT_THAT(Pinned(), ElementsAre(1));
}

TEST_F(ReadPinsOfAJobTest, APinWaitsForTheWorker) {
  Open();
  StepOfValues(3);
  uint64_t waits = 0;
  EXPECT_FALSE((*Pin(0, 0, 0, &waits)).has_value());
  EXPECT_NE(waits, 0);
  EXPECT_TRUE(Pinned().empty());
  EXPECT_FALSE((*Pin(0, 0, 0, &waits)).has_value());
  Locked([&] { EXPECT_FALSE(*pins_.Readable(0)); });
  RunAll();
  EXPECT_TRUE((*Pin(0, 0, 0, &waits)).has_value());
}

TEST_F(ReadPinsOfAJobTest, AWaitingRequestHearsThatItsPinIsGone) {
  Open();
  StepOfValues(3);
  uint64_t waits = 0;
  EXPECT_FALSE((*Pin(0, 0, 0, &waits)).has_value());
  Unpin(0, 0);
  EXPECT_EQ(Pin(0, 0, 0, &waits).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(PinAs(0, 0), absl::OkStatus()) << "asked for again";
}

TEST_F(ReadPinsOfAJobTest, AVersionStaysWhileAnybodyHoldsIt) {
  Open();
  StepOfValues(3);
  ASSERT_EQ(PinAs(0, 0), absl::OkStatus());
  ASSERT_EQ(PinAs(0, 7), absl::OkStatus());
  StepOfValues(4);
  Unpin(0, 0);
  Unpin(0, 0);
  EXPECT_EQ(*Master(0), 3);
  Unpin(0, 8);
  EXPECT_EQ(*Master(0), 3);
  Unpin(0, 7);
  EXPECT_TRUE(Pinned().empty());
  EXPECT_FALSE(Master(0).ok());
}

TEST_F(ReadPinsOfAJobTest, ALeaseIsAReadersAndHasABound) {
  Open();
  StepOfValues(3);
  EXPECT_EQ(model::ReasonOf(Pin(0, /*holder=*/7, /*lease_ms=*/0).status()), model::kBadRequest);
  EXPECT_EQ(model::ReasonOf(Pin(0, /*holder=*/0, /*lease_ms=*/1000).status()), model::kBadRequest);
  EXPECT_EQ(model::ReasonOf(Pin(0, /*holder=*/7, /*lease_ms=*/600'001).status()), model::kBadRequest);
  EXPECT_EQ(Pin(0, /*holder=*/7, /*lease_ms=*/600'000).status(), absl::OkStatus());
}

TEST_F(ReadPinsOfAJobTest, AReaderThatEndsWithoutAWordHoldsNothingForLong) {
  Open();
  StepOfValues(3);
  ASSERT_EQ(PinAs(0, 8), absl::OkStatus());
  ASSERT_EQ(Pin(0, /*holder=*/7, /*lease_ms=*/1).status(), absl::OkStatus());
  Unpin(0, 8);
  for (const absl::Time end = absl::Now() + absl::Minutes(1); !Pinned().empty() && absl::Now() < end;) {
    absl::SleepFor(absl::Milliseconds(1));
    RunAll();
  }
  EXPECT_TRUE(Pinned().empty());
}

TEST_F(ReadPinsOfAJobTest, ReadersLeaveTheGroupHalfOfThePins) {
  Open();
  for (int64_t version = 0; version < 8; ++version) {
    StepOfValues(1);
    ASSERT_EQ(PinAs(version, 7), absl::OkStatus());
  }
  StepOfValues(1);
  const absl::Status refused = PinAs(8, 7);
  EXPECT_EQ(model::ReasonOf(refused), model::kBudget);
  EXPECT_THAT(refused.ToString(), HasSubstr("readers of job 'job' hold 8 versions"));
  EXPECT_EQ(PinAs(8, 0), absl::OkStatus());
  EXPECT_EQ(model::ReasonOf(PinAs(8, 7)), model::kBudget) << "the group's version too would be one more";
  for (int64_t version = 9; version < 16; ++version) {
    StepOfValues(1);
    ASSERT_EQ(PinAs(version, 0), absl::OkStatus());
  }
  StepOfValues(1);
  const absl::Status full = PinAs(16, 0);
  EXPECT_EQ(model::ReasonOf(full), model::kBudget);
  EXPECT_THAT(full.ToString(), HasSubstr("holds 16 pins"));
  Unpin(3, 7);
  EXPECT_EQ(PinAs(16, 0), absl::OkStatus());
}

TEST_F(ReadPinsOfAJobTest, AReadersPinYieldsBeforeTheGroupsOlderOne) {
  Open();
  StepOfValues(3);
  ASSERT_EQ(PinAs(0, 0), absl::OkStatus());
  StepOfValues(4);
  ASSERT_EQ(PinAs(1, 7), absl::OkStatus());
  StepOfValues(5);
  std::shared_ptr<storage::ChunkStore> store;
  Locked([&] { store = core_.state.store(); });
  const absl::Status cause = absl::ResourceExhaustedError("no room for a copy");
  EXPECT_TRUE(pins_.GiveUpOldest(store.get(), cause));
  EXPECT_THAT(Pinned(), ElementsAre(0));
  ExpectRefused(RequestOf(1), model::kVersionGone, "given up so that training could go on: no room for a copy");
  EXPECT_EQ(model::ReasonOf(PinAs(1, 7)), model::kVersionGone);
  EXPECT_EQ(*Master(0), 3);
  EXPECT_TRUE(pins_.GiveUpOldest(store.get(), cause));
  EXPECT_FALSE(pins_.GiveUpOldest(store.get(), cause));
  Unpin(1, 7);
  ExpectRefused(RequestOf(1), model::kVersionGone, "is not pinned");
}

}  // namespace
}  // namespace ballast::services
