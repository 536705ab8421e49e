#include "ballast/storage/catalog/catalog.h"

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/tests/scratch_directory.h"
#include "ballast/tests/small_disk.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

TEST(CatalogTest, KeepsWhatWasPutAcrossReopening) {
  ScratchDirectory directory;
  const std::string binary("\0\xff value", 8);
  {
    auto catalog = Catalog::Open(directory / "new/data");
    ASSERT_TRUE(catalog.ok()) << catalog.status();
    ASSERT_TRUE((*catalog)->Put("job/b", "2").ok());
    ASSERT_TRUE((*catalog)->Put("job/a", binary).ok());
    ASSERT_TRUE((*catalog)->Put("other", "3").ok());
    ASSERT_TRUE((*catalog)->Put("other", "4").ok());
  }
  auto catalog = *Catalog::Open(directory / "new/data");
  EXPECT_EQ(**catalog->Get("other"), "4");
  EXPECT_EQ(*catalog->Get("missing"), std::nullopt);
  EXPECT_THAT(*catalog->List("job/"), ElementsAre(Pair("job/a", binary), Pair("job/b", "2")));
}

TEST(CatalogTest, ErasePrefixLeavesTheRest) {
  ScratchDirectory directory;
  auto catalog = *Catalog::Open(directory.path());
  for (const char* key : {"job/a/1", "job/a/2", "job/ab", "job/b/1"}) ASSERT_TRUE(catalog->Put(key, "x").ok());
  ASSERT_TRUE(catalog->ErasePrefix("job/a/").ok());
  EXPECT_THAT(*catalog->List(""), ElementsAre(Pair("job/ab", "x"), Pair("job/b/1", "x")));
}

TEST(CatalogTest, ReplaceTakesPrefixesAwayAndPutsPairs) {
  ScratchDirectory directory;
  {
    auto catalog = *Catalog::Open(directory.path());
    for (const char* key : {"job/a/1", "job/a/2", "job/ab", "job/b/1"}) ASSERT_TRUE(catalog->Put(key, "x").ok());
    ASSERT_TRUE(catalog->Replace({"job/a/", "job/b/"}, {{"job/a/2", "y"}, {"other", "z"}}).ok());
  }
  EXPECT_THAT(*(*Catalog::Open(directory.path()))->List(""),
              ElementsAre(Pair("job/a/2", "y"), Pair("job/ab", "x"), Pair("other", "z")));
}

TEST(CatalogTest, SecondOpeningInThisProcessIsRefused) {
  ScratchDirectory directory;
  auto first = *Catalog::Open(directory.path());
  const absl::Status status = Catalog::Open(directory.path()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(status.ToString(),
              HasSubstr(absl::StrCat("data directory ", directory.path(), " is in use by process ", getpid())));
  first.reset();
  EXPECT_TRUE(Catalog::Open(directory.path()).ok());
}

// GoogleTest runs suites of this name first: a fork after RocksDB started its threads would lose them.
TEST(CatalogDeathTest, DirectoryOfAnotherProcessIsRefusedUntilItDies) {
  ScratchDirectory directory;
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    auto held = Catalog::Open(directory.path());
    const std::vector<char> memory(size_t{256} << 20, 1);  // which the system takes a while to get back
    const char answer = held.ok() ? 'y' : 'n';
    if (write(ready[1], &answer, 1) != 1) _exit(2);
    while (true) pause();
  }
  char answer = 0;
  ASSERT_EQ(read(ready[0], &answer, 1), 1);
  ASSERT_EQ(answer, 'y');
  const absl::Status status = Catalog::Open(directory.path()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(status.ToString(), HasSubstr(absl::StrCat("is in use by process ", child)));
  // At once, before anybody knows that the child has ended.
  kill(child, SIGKILL);
  const auto next = Catalog::Open(directory.path());
  EXPECT_TRUE(next.ok()) << next.status();
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  close(ready[0]);
  close(ready[1]);
}

TEST(CatalogTest, KeepsNoLogFileOfRocksDb) {
  ScratchDirectory directory;
  for (int opened = 0; opened < 2; ++opened) {
    auto catalog = *Catalog::Open(directory.path());
    ASSERT_TRUE(catalog->Put("key", "value").ok());
  }
  for (const auto& file : std::filesystem::directory_iterator(directory / "catalog")) {
    const std::string name = file.path().filename();
    EXPECT_TRUE(name == "LOCK" || name.rfind("LO", 0) != 0) << name;
  }
}

TEST(CatalogTest, UnsyncedValuesAreReadBack) {
  ScratchDirectory directory;
  {
    auto catalog = *Catalog::Open(directory.path());
    ASSERT_TRUE(catalog->Put("key", "value", Catalog::Sync::kUnsynced).ok());
    EXPECT_EQ(**catalog->Get("key"), "value");
  }
  EXPECT_EQ(**(*Catalog::Open(directory.path()))->Get("key"), "value");
}

TEST(CatalogTest, AFullDiskIsAnErrorAndStaysOne) {
  SmallDisk disk(4 << 20);
  if (!disk.mounted()) GTEST_SKIP() << "a tmpfs cannot be mounted here: " << disk.why_not();
  for (const Catalog::Sync sync : {Catalog::Sync::kSynced, Catalog::Sync::kUnsynced}) {
    const std::string directory = absl::StrCat(disk.path(), "/", static_cast<int>(sync));
    auto catalog = *Catalog::Open(directory);
    ASSERT_TRUE(catalog->Put("before", "1").ok());
    disk.Fill();
    const std::string large(1 << 20, 'x');
    absl::Status status;
    for (int i = 0; i < 16 && status.ok(); ++i) status = catalog->Put(absl::StrCat("large", i), large, sync);
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
    EXPECT_EQ(model::ReasonOf(status), model::kDiskFull);
    EXPECT_THAT(status.ToString(), HasSubstr("No space left on device"));
    EXPECT_EQ(catalog->Put("small", "1"), status);
    disk.Empty();
    EXPECT_EQ(catalog->Put("small", "1"), status) << "until somebody looks";
    EXPECT_EQ(**catalog->Get("before"), "1");
  }
}

// A catalog's log with the one value of a test at its end.
class CatalogRotTest : public ::testing::Test {
 protected:
  static constexpr char kKey[] = "job/a/promise", kValue[] = "the newest promise";

  CatalogRotTest() {
    {
      auto catalog = *Catalog::Open(directory_ / "written");
      EXPECT_TRUE(catalog->Put(kKey, "an older promise").ok());
      EXPECT_TRUE(catalog->Put(kKey, kValue, Catalog::Sync::kTwice).ok());
    }
    for (const auto& file : std::filesystem::directory_iterator(directory_ / "written/catalog")) {
      if (file.path().extension() == ".log") log_ = file.path().filename();
    }
    std::ifstream in(directory_ / "written/catalog/" + log_, std::ios::binary);
    content_.assign(std::istreambuf_iterator<char>(in), {});
  }

  // A catalog with this log knows the value, or cannot be opened.
  void ExpectKnownOrRefused(const std::string& log, const std::string& damage) {
    std::filesystem::remove_all(directory_ / "damaged");
    std::filesystem::copy(directory_ / "written", directory_ / "damaged", std::filesystem::copy_options::recursive);
    std::ofstream(directory_ / "damaged/catalog/" + log_, std::ios::binary | std::ios::trunc) << log;
    const auto catalog = Catalog::Open(directory_ / "damaged");
    if (!catalog.ok()) {
      EXPECT_EQ(catalog.status().code(), absl::StatusCode::kDataLoss) << damage << ": " << catalog.status();
      ++refused_;
      return;
    }
    const auto found = (*catalog)->Get(kKey);
    ASSERT_TRUE(found.ok()) << found.status();
    EXPECT_EQ(found->value_or("none"), kValue) << damage;
    ++known_;
  }

  ScratchDirectory directory_;
  std::string log_, content_;
  int known_ = 0, refused_ = 0;
};

TEST_F(CatalogRotTest, WhatIsPutTwiceIsKnownAfterAnyDamageOrRefused) {
  const uint64_t bytes = content_.size();
  const uint64_t last = bytes - std::min<uint64_t>(bytes, 120), first = std::min<uint64_t>(bytes, 240);
  for (uint64_t at = 0; at < bytes; at = at + 1 == first ? std::max(first, last) : at + 1) {
    std::string rotten = content_;
    rotten[at] ^= 0x40;
    ExpectKnownOrRefused(rotten, absl::StrCat("a bit flipped in byte ", at, " of ", bytes));
  }
  for (uint64_t at = 0; at < bytes; at += 512) {
    std::string zeroed = content_;
    std::fill(zeroed.begin() + static_cast<std::ptrdiff_t>(at),
              zeroed.begin() + static_cast<std::ptrdiff_t>(std::min(bytes, at + 4096)), '\0');
    ExpectKnownOrRefused(zeroed, absl::StrCat("zeros from byte ", at, " of ", bytes));
  }
  for (uint64_t lost = 1; lost <= uint64_t{32} << 10 && lost < bytes; lost *= 2) {
    ExpectKnownOrRefused(content_.substr(0, bytes - lost), absl::StrCat("without the last ", lost, " of ", bytes));
  }
  EXPECT_GT(known_, 0);
  EXPECT_GT(refused_, 0);
}

// Nobody sees the gap, and values put twice again and again do not make the log longer than its buffer.
TEST_F(CatalogRotTest, WhatIsPutTwiceTakesBoundedSpace) {
  auto catalog = *Catalog::Open(directory_ / "written");
  for (int i = 0; i < 400; ++i) ASSERT_TRUE(catalog->Put(kKey, absl::StrCat(i), Catalog::Sync::kTwice).ok());
  EXPECT_THAT(*catalog->List(""), ElementsAre(Pair(kKey, "399")));
  uint64_t bytes = 0;
  for (const auto& file : std::filesystem::directory_iterator(directory_ / "written/catalog"))
    bytes += file.file_size();
  EXPECT_LT(bytes, 8 << 20);
}

TEST(CatalogTest, UnwritableDirectoryIsNamed) {
  ScratchDirectory directory;
  std::ofstream(directory / "file") << "x";
  const absl::Status status = Catalog::Open(directory / "file/below").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_EQ(model::ReasonOf(status), model::kIo);
  EXPECT_THAT(status.ToString(), HasSubstr("file/below failed: Not a directory"));
}

TEST(CatalogTest, DamagedIndexIsRefused) {
  ScratchDirectory directory;
  { auto catalog = *Catalog::Open(directory.path()); }
  std::ofstream(directory / "catalog/CURRENT", std::ios::trunc) << "nonsense";
  const absl::Status status = Catalog::Open(directory.path()).status();
  EXPECT_FALSE(status.ok());
  EXPECT_THAT(status.ToString(), HasSubstr("catalog " + directory.path()));
}

}  // namespace
}  // namespace ballast::storage
