#include "ballast/proto/base/text_file.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "ballast/proto/base/status.h"
#include "ballast/tests/scratch_directory.h"

namespace ballast::model {
namespace {

void Write(const std::string& path, const std::string& text) { std::ofstream(path, std::ios::binary) << text; }

TEST(TextFileTest, AFileHasAByteToAMebibyte) {
  const ScratchDirectory directory;
  const std::string path = directory / "file";
  const auto reason = [&] { return ReasonOf(ReadTextFile(path).status()); };
  EXPECT_EQ(reason(), kBadConfig) << "there is none";
  Write(path, "");
  EXPECT_EQ(reason(), kBadConfig);
  Write(path, std::string("a\0b", 3));
  EXPECT_EQ(*ReadTextFile(path), std::string("a\0b", 3));
  Write(path, std::string(1 << 20, 'a'));
  EXPECT_EQ(ReadTextFile(path)->size(), 1u << 20);
  Write(path, std::string((1 << 20) + 1, 'a'));
  EXPECT_EQ(reason(), kBadConfig);
  EXPECT_EQ(ReasonOf(ReadTextFile(directory.path()).status()), kBadConfig);
}

TEST(TextFileTest, AStampChangesWithItsFiles) {
  const ScratchDirectory directory;
  const std::string file = directory / "file", other = directory / "other";
  const std::string none = StampOf({file});
  Write(file, "a");
  const std::string first = StampOf({file}), of_directory = StampOf({directory.path()});
  EXPECT_NE(first, none);
  EXPECT_EQ(StampOf({"", file, ""}), first);
  Write(file, "ab");
  EXPECT_NE(StampOf({file}), first);
  EXPECT_NE(StampOf({directory.path()}), of_directory);
  const std::string before = StampOf({file});
  Write(other, "ab");
  std::filesystem::rename(other, file);  // exchanged
  EXPECT_NE(StampOf({file}), before);
}

}  // namespace
}  // namespace ballast::model
