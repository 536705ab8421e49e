#include "ballast/storage/catalog/directory_format.h"

#include <filesystem>
#include <string>

#include "ballast/proto/base/status.h"
#include "ballast/storage/catalog/catalog.h"
#include "ballast/storage/io/small_file.h"
#include "ballast/tests/directory_content.h"
#include "ballast/tests/scratch_directory.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class DirectoryFormatTest : public ::testing::Test {
 protected:
  void Write(const std::string& text) { ASSERT_EQ(WriteSmallFile(directory_ / kFormatFile, text), absl::OkStatus()); }
  std::string Text() const { return ReadSmallFile(directory_ / kFormatFile).value_or(""); }

  ScratchDirectory directory_;
};

TEST_F(DirectoryFormatTest, AProgramThatWritesGivesADirectoryItsFile) {
  EXPECT_EQ(CheckDirectoryFormat(directory_.path()), absl::OkStatus());
  EXPECT_TRUE(std::filesystem::is_empty(directory_.path())) << "a look writes nothing";
  { ASSERT_TRUE(Catalog::Open(directory_.path()).ok()); }
  EXPECT_THAT(Text(), AllOf(HasSubstr("\nversion: 2\n"), HasSubstr("\nleast_reader: 2\n")));
  EXPECT_FALSE(std::filesystem::exists(directory_ / "ballast-format.new"));
  // From before the file, and only to be read.
  std::filesystem::remove(directory_ / kFormatFile);
  { ASSERT_TRUE(Catalog::Open(directory_.path(), Catalog::Access::kReadOnly).ok()); }
  EXPECT_EQ(Text(), "");
}

TEST_F(DirectoryFormatTest, TheFirstFormatRisesWhenItIsOpenedForWriting) {
  { ASSERT_TRUE(Catalog::Open(directory_.path()).ok()); }
  const std::string first = "version: 1\nleast_reader: 1\n";
  Write(first);
  { ASSERT_TRUE(Catalog::Open(directory_.path(), Catalog::Access::kReadOnly).ok()); }
  EXPECT_EQ(Text(), first) << "a look writes nothing";
  { ASSERT_TRUE(Catalog::Open(directory_.path()).ok()); }
  // An earlier program takes 1 for its own number, and would call this one's records damaged.
  EXPECT_THAT(Text(), AllOf(HasSubstr("\nversion: 2\n"), HasSubstr("\nleast_reader: 2\n")));
}

TEST_F(DirectoryFormatTest, ALaterFormatThatAsksForALaterProgramIsRefusedUntouched) {
  { ASSERT_TRUE(Catalog::Open(directory_.path()).ok()); }
  Write("version: 4\nleast_reader: 3\nfurther: words\n");
  const auto before = ContentOf(directory_.path());
  for (const auto access : {Catalog::Access::kReadWrite, Catalog::Access::kReadOnly}) {
    const absl::Status status = Catalog::Open(directory_.path(), access).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_EQ(model::ReasonOf(status), model::kLaterVersion);
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr(directory_.path()), HasSubstr("format 4"), HasSubstr("a program of format 3"),
                      HasSubstr("of format 2"), HasSubstr("Run the version that used it last")));
  }
  EXPECT_TRUE(ContentOf(directory_.path()) == before);
}

TEST_F(DirectoryFormatTest, ALaterFormatThatThisProgramMayUseStays) {
  const std::string later = "version: 3\nleast_reader: 1\n";
  Write(later);
  EXPECT_TRUE(Catalog::Open(directory_.path()).ok());
  EXPECT_EQ(Text(), later);
}

TEST_F(DirectoryFormatTest, ADamagedFileIsNotTakenForAnyFormat) {
  for (const char* const text : {"", "version: 1\n", "version: 1\nleast_reader: x\n", "version: 1\nleast_reader: 2\n",
                                 "version: 1\nleast_reader: 0\n", "version: 99999999999\nleast_reader: 1\n"}) {
    Write(text);
    const auto before = ContentOf(directory_.path());
    const absl::Status status = Catalog::Open(directory_.path()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << text << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("ballast-format is damaged")) << text;
    EXPECT_TRUE(ContentOf(directory_.path()) == before) << text;
  }
}

TEST(SmallFileTest, AFileIsReplacedWholeOrStays) {
  ScratchDirectory directory;
  const std::string path = directory / "file";
  EXPECT_EQ(ReadSmallFile(path).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(WriteSmallFile(path, "old"), absl::OkStatus());
  const std::string large(100'000, 'x');
  EXPECT_EQ(WriteSmallFile(path, large), absl::OkStatus());
  EXPECT_TRUE(ReadSmallFile(path).value_or("") == large);
  std::filesystem::create_directory(path + ".new");  // in the way
  EXPECT_EQ(model::ReasonOf(WriteSmallFile(path, "new")), model::kIo);
  EXPECT_TRUE(ReadSmallFile(path).value_or("") == large);
}

}  // namespace
}  // namespace ballast::storage
