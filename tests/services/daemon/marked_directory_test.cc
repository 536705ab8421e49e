#include "ballast/services/daemon/marked_directory.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <random>
#include <set>
#include <vector>

namespace ballast::services {
namespace {

v1::DirectoryMark Mark(uint64_t count, uint64_t draw, bool accepts_any = false) {
  v1::DirectoryMark mark;
  mark.set_count(count);
  mark.set_draw(draw);
  mark.set_accepts_any(accepts_any);
  return mark;
}

TEST(MarkedDirectory, ACopyBehindEtcdIsOlder) {
  EXPECT_TRUE(IsNewestCopy(Mark(5, 1), Mark(5, 1)));
  EXPECT_TRUE(IsNewestCopy(Mark(6, 2), Mark(5, 1))) << "it ended before the mark got to etcd";
  EXPECT_FALSE(IsNewestCopy(Mark(4, 1), Mark(5, 1)));
  EXPECT_FALSE(IsNewestCopy(Mark(5, 2), Mark(5, 1))) << "two copies that counted alike";
  EXPECT_FALSE(IsNewestCopy(v1::DirectoryMark(), Mark(1, 1))) << "a copy from before there were marks";
  EXPECT_TRUE(IsNewestCopy(v1::DirectoryMark(), std::nullopt));
  EXPECT_TRUE(IsNewestCopy(Mark(4, 1), std::nullopt)) << "etcd lost its data";
  EXPECT_TRUE(IsNewestCopy(Mark(4, 1), Mark(5, 1, /*accepts_any=*/true)));
}

TEST(MarkedDirectory, TheNextMarkIsAboveBothOrTheOneThatEtcdLacks) {
  EXPECT_EQ(NextMark(v1::DirectoryMark(), std::nullopt, 7).count(), 1u);
  EXPECT_EQ(NextMark(Mark(5, 1), Mark(5, 1), 7).count(), 6u);
  EXPECT_EQ(NextMark(Mark(5, 1), Mark(5, 1), 7).draw(), 7u);
  EXPECT_EQ(NextMark(Mark(6, 2), Mark(5, 1), 7).count(), 6u);
  EXPECT_EQ(NextMark(Mark(6, 2), Mark(5, 1), 7).draw(), 2u);
  const v1::DirectoryMark accepted = NextMark(Mark(4, 1), Mark(500, 2, /*accepts_any=*/true), 7);
  EXPECT_EQ(accepted.count(), 501u) << "the copy that served last is behind from now on";
  EXPECT_FALSE(accepted.accepts_any());
}

// A copy of a directory, and how far its server is with a mark.
struct Copy {
  v1::DirectoryMark own;
  std::set<uint64_t> seen;  // draws of all marks that its state came after
  enum { kIdle, kLooked, kWritten } at = kIdle;
  std::optional<v1::DirectoryMark> looked;
  int revision = 0;  // of etcd's, when it looked
  v1::DirectoryMark next;
};

class World {
 public:
  explicit World(uint64_t seed) : random_(seed), copies_(1) {}

  // One thing happens: copies are made, servers take a step of their mark or crash, an operator accepts any copy.
  void Step() {
    const size_t which = random_() % copies_.size();
    switch (random_() % 10) {
      case 0:
        if (copies_.size() < 6) copies_.push_back({.own = copies_[which].own, .seen = copies_[which].seen});
        break;
      case 1:
        copies_[which].at = Copy::kIdle;
        break;
      case 2:
        if (etcds_.has_value() && random_() % 20 == 0) {
          etcds_->set_accepts_any(true);
          ++revision_;
        }
        break;
      default:
        Go(&copies_[which]);
    }
  }

  int raised = 0, refused = 0;

 private:
  void Go(Copy* copy) {
    if (copy->at == Copy::kIdle) {
      copy->looked = etcds_;
      copy->revision = revision_;
      if (!IsNewestCopy(copy->own, etcds_)) {
        ++refused;
        return;
      }
      copy->at = Copy::kLooked;
    } else if (copy->at == Copy::kLooked) {
      copy->next = NextMark(copy->own, copy->looked, random_());
      copy->own = copy->next;
      copy->seen.insert(copy->next.draw());
      copy->at = Copy::kWritten;
    } else {
      copy->at = Copy::kIdle;
      if (copy->revision != revision_) return;
      if (etcds_.has_value() && !etcds_->accepts_any()) {
        EXPECT_TRUE(copy->seen.contains(etcds_->draw()))
            << "a copy serves that lacks what was done until the last mark";
      }
      ++raised;
      etcds_ = copy->next;
      ++revision_;
    }
  }

  std::mt19937_64 random_;
  std::vector<Copy> copies_;
  std::optional<v1::DirectoryMark> etcds_;
  int revision_ = 0;
};

TEST(MarkedDirectory, WhateverHappensNoOlderCopyServes) {
  int raised = 0, refused = 0;
  for (uint64_t seed = 0; seed < 300 && !HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    World world(seed);
    for (int i = 0; i < 400; ++i) world.Step();
    raised += world.raised;
    refused += world.refused;
  }
  EXPECT_GT(raised, 3000);
  EXPECT_GT(refused, 3000);
}

}  // namespace
}  // namespace ballast::services
