// Servers that have different bytes of a chunk: rank 0 finds it in the digests that they tell, and they tell operators.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "ballast/kernels/kernels.h"
#include "ballast/proto/model/copies.h"
#include "ballast/tests/services/members_fixture.h"

namespace ballast::services {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// A bit of an element flips on the way, and nobody sees it: the digest is that of what arrives.
void FlipBit(v1::ExportResponse* copy, int array) {
  std::string& bytes = *copy->mutable_arrays(array)->mutable_payload();
  bytes[4 * 1000] = static_cast<char>(bytes[4 * 1000] ^ 4);
  copy->mutable_arrays(array)->set_crc32c(
      kernels::Crc32c({reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()}));
}

class DifferingCopiesTest : public MembersFixture {
 protected:
  // Server b leaves, misses a step, and copies all chunks again, as `changes` changes them, before the next one.
  void CopyAnew(const std::function<void(uint64_t, v1::ExportResponse*)>& changes) {
    source_.changes = changes;
    ASSERT_EQ(Reconfigure({"a"}, 2, {"b"}), absl::OkStatus());
    Steps(1);
    ASSERT_EQ(Reconfigure({"a", "b"}, 2), absl::OkStatus());
    AwaitFilled("b");
  }
  uint64_t Counted(const std::string& name) { return (*servers_.at(name))->Figures().jobs.at("job")->differing_copies; }
};

TEST_P(DifferingCopiesTest, CopiesThatAreTheSameAreComparedInTurn) {
  Begin({"a", "b"}, 2);
  const auto chunks = static_cast<int64_t>(layout_.chunks().size());
  for (int64_t step = 1; step < model::kDigestLag + chunks + 2; ++step) {
    Steps(1);
    const int64_t version = step - model::kDigestLag;
    ASSERT_EQ(group_->told().size(), 2u);
    for (const auto& [server, digests] : group_->told()) {
      ASSERT_EQ(digests.size(), 0 <= version && version < chunks ? 1 : 0) << server << " at step " << step;
      if (digests.empty()) continue;
      EXPECT_EQ(digests[0].chunk(), static_cast<uint64_t>(version));
      EXPECT_EQ(digests[0].version(), version);
      EXPECT_EQ(digests[0].crc32c_size(), 3);
    }
  }
  for (const char* name : {"a", "b"}) {
    EXPECT_EQ(Counted(name), 0u);
    EXPECT_EQ(StatusOf(name).differing_chunks(), 0u);
  }
  ExpectSameBits();
}

TEST_P(DifferingCopiesTest, ADamagedMasterIsNamedUntilItIsCopiedAnew) {
  Begin({"a", "b"}, 2);
  CopyAnew([](uint64_t chunk, v1::ExportResponse* copy) {
    if (chunk == 3) FlipBit(copy, 0);
  });
  Steps(3 + model::kDigestLag - 1 - 1);
  for (const char* name : {"a", "b"}) EXPECT_EQ(Counted(name), 0u);
  Steps(3);  // training goes on
  for (const char* name : {"a", "b"}) {
    EXPECT_EQ(Counted(name), 1u) << name;
    EXPECT_EQ(StatusOf(name).differing_chunks(), 1u);
    EXPECT_THAT(StatusOf(name).differing(), ElementsAre(AllOf(HasSubstr("chunk 3 at version 3: the master has CRC32C "),
                                                              HasSubstr(" on 'a', "), HasSubstr(" on 'b'"))));
  }
  ExpectSameBits();  // a's, from which the group reads
  CopyAnew(nullptr);
  EXPECT_THAT(StatusOf("a").differing(), IsEmpty());
  EXPECT_THAT(StatusOf("b").differing(), IsEmpty());
  ASSERT_EQ(Reconfigure({"a", "b"}, 2), absl::OkStatus());
  ASSERT_EQ(Reconfigure({"b"}, 2), absl::OkStatus());
  ExpectSameBits();
}

// The chunk's turn comes before the master shows it.
TEST_P(DifferingCopiesTest, ADamagedMomentIsNamedToo) {
  Begin({"a", "b"}, 2);
  CopyAnew([](uint64_t chunk, v1::ExportResponse* copy) {
    if (chunk == 2) FlipBit(copy, 2);
  });
  Steps(1 + model::kDigestLag);
  EXPECT_THAT(StatusOf("b").differing(), ElementsAre(HasSubstr("chunk 2 at version 2: ")));
  EXPECT_EQ(StatusOf("a").differing_chunks(), 1u);
}

INSTANTIATE_TEST_SUITE_P(Places, DifferingCopiesTest, ::testing::ValuesIn(kMembersCases),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace ballast::services
