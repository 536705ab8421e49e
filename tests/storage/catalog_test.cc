#include "ballast/storage/catalog/catalog.h"

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "ballast/proto/model/status.h"
#include "ballast/tests/scratch_directory.h"
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
  kill(child, SIGKILL);
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  EXPECT_TRUE(Catalog::Open(directory.path()).ok());
  close(ready[0]);
  close(ready[1]);
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
