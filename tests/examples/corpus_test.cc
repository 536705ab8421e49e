#include "ballast/client/examples/bytes_lm/corpus.h"

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "ballast/tests/scratch_directory.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast::client {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class CorpusTest : public ::testing::Test {
 protected:
  std::string Write(const std::string& name, const std::string& text) {
    const fs::path path = scratch_ / name;
    fs::create_directories(path.parent_path());
    std::ofstream(path, std::ios::binary) << text;
    return path.string();
  }

  ScratchDirectory scratch_;
};

TEST_F(CorpusTest, ReadsDirectoriesInOrderAndLinksOnce) {
  Write("b", "second ");
  const std::string a = Write("a", "first ");
  Write("sub/c", "third");
  fs::create_symlink("a", scratch_ / "z");
  fs::create_symlink("nowhere", scratch_ / "dangling");
  const auto corpus = Corpus::Load({scratch_.path(), a});
  ASSERT_TRUE(corpus.ok()) << corpus.status();
  EXPECT_EQ(corpus->text(), "first second third");
  EXPECT_EQ(corpus->file_count(), 3u);
}

TEST_F(CorpusTest, MissingAndEmptyTextAreNamed) {
  const auto missing = Corpus::Load({scratch_ / "no_such_file"});
  EXPECT_EQ(missing.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(missing.status().message(), HasSubstr("no_such_file"));

  const auto empty = Corpus::Load({Write("empty", "")});
  EXPECT_EQ(empty.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(empty.status().message(), HasSubstr("no text to train on"));
}

TEST(UnigramEntropyTest, OfKnownTexts) {
  EXPECT_EQ(Corpus("aaaa").UnigramEntropy(), 0);
  EXPECT_NEAR(Corpus("abab").UnigramEntropy(), std::log(2.0), 1e-12);
  // Half a, a quarter each of b and c: 1.5 bits.
  EXPECT_NEAR(Corpus("aabc").UnigramEntropy(), 1.5 * std::log(2.0), 1e-12);
}

TEST(SampleTest, DependsOnItsKeyAloneAndTargetsFollowInputs) {
  std::string text;
  for (int i = 0; i < 5000; ++i) text.push_back(static_cast<char>((i * 7 + i / 256) % 251));
  const Corpus corpus(text);
  constexpr uint64_t kContext = 32;
  const auto sample = [&](uint64_t seed, uint64_t step, uint64_t micro_batch) {
    std::vector<uint8_t> inputs(4 * kContext), targets(4 * kContext);
    corpus.Sample({seed, step, micro_batch}, kContext, absl::MakeSpan(inputs), absl::MakeSpan(targets));
    for (size_t begin = 0; begin < inputs.size(); begin += kContext) {
      const std::string sequence(inputs.begin() + begin, inputs.begin() + begin + kContext);
      const std::string next(targets.begin() + begin, targets.begin() + begin + kContext);
      EXPECT_EQ(sequence.substr(1), next.substr(0, kContext - 1));
      EXPECT_NE(text.find(sequence), std::string::npos);
    }
    return inputs;
  };
  const auto first = sample(1, 2, 3);
  EXPECT_NE(first, sample(2, 2, 3));
  EXPECT_NE(first, sample(1, 3, 3));
  EXPECT_NE(first, sample(1, 2, 4));
  EXPECT_EQ(first, sample(1, 2, 3));
}

TEST(SampleTest, ShortestTextHasOnePlace) {
  const Corpus corpus("abcde");
  std::vector<uint8_t> inputs(8), targets(8);
  corpus.Sample({1, 1, 1}, 4, absl::MakeSpan(inputs), absl::MakeSpan(targets));
  EXPECT_EQ(std::string(inputs.begin(), inputs.end()), "abcdabcd");
  EXPECT_EQ(std::string(targets.begin(), targets.end()), "bcdebcde");
}

}  // namespace
}  // namespace ballast::client
