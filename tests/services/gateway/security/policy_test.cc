#include "ballast/services/gateway/security/policy.h"

#include <gtest/gtest.h>

#include <random>

#include "ballast/proto/base/status.h"

namespace ballast::services {
namespace {

constexpr RightSet kTrain = static_cast<RightSet>(Right::kTrain), kRead = static_cast<RightSet>(Right::kRead),
                   kBudget = static_cast<RightSet>(Right::kBudget);
constexpr char kDigest[] = "9b1bd9b3f8bb2a2fa0a4c7e8c1a2c4ba0a3d0e2bfb2dc3b7f0d4ba2fd0c1a2b3";

template <typename T>
void ExpectBad(const absl::StatusOr<T>& parsed, const std::string& said) {
  ASSERT_FALSE(parsed.ok()) << said;
  EXPECT_EQ(model::ReasonOf(parsed.status()), model::kBadConfig);
  EXPECT_NE(std::string(parsed.status().message()).find(said), std::string::npos) << parsed.status();
}

TEST(Tokens, KnowsAHolderByTheDigest) {
  const auto good = Tokens::Parse(
      "tokens:\n- identity: alice\n  sha256: BA7816BF8F01CFEA414140DE5DAE2223B00361A396177A9CB410FF61F20015AD\n", "t");
  ASSERT_TRUE(good.ok()) << good.status();
  ASSERT_NE(good->IdentityOf("abc"), nullptr) << "the digest of FIPS 180's example";
  EXPECT_EQ(*good->IdentityOf("abc"), "alice");
  EXPECT_EQ(good->IdentityOf("abc\n"), nullptr);
  EXPECT_EQ(good->IdentityOf(""), nullptr);
  EXPECT_EQ(good->IdentityOf("BA7816BF8F01CFEA414140DE5DAE2223B00361A396177A9CB410FF61F20015AD"), nullptr)
      << "whoever reads the file has no token";
}

TEST(Tokens, RefusesByLine) {
  const std::string digest = kDigest;
  ExpectBad(Tokens::Parse("", "t.yaml"), "t.yaml");
  ExpectBad(Tokens::Parse("[]", "t.yaml"), "expected `tokens:` with a list, got a list");
  ExpectBad(Tokens::Parse("tokens:\n- {identity: a, sha256: @}\n", "t.yaml"), "t.yaml:2: not YAML");
  ExpectBad(Tokens::Parse("tokens: x", "t.yaml"), "t.yaml:1: tokens: expected a list, got 'x'");
  ExpectBad(Tokens::Parse("tokens:\n- {identity: a}\n", "t.yaml"), "t.yaml:2: sha256: expected the 64 hexadecimal");
  ExpectBad(Tokens::Parse("tokens:\n- {identity: a, sha256: 12}\n", "t.yaml"), "got '12'");
  ExpectBad(Tokens::Parse("tokens:\n- {identity: a, token: " + digest + "}\n", "t.yaml"), "unknown key 'token'");
  ExpectBad(Tokens::Parse("tokens:\n- {identity: 'a b', sha256: " + digest + "}\n", "t.yaml"),
            "identity: expected letters");
  ExpectBad(Tokens::Parse("tokens:\n- {identity: a, identity: b, sha256: " + digest + "}\n", "t.yaml"), "comes twice");
  ExpectBad(Tokens::Parse("tokens:\n- {identity: a, sha256: " + digest + "}\n- {identity: b, sha256: " + digest + "}\n",
                          "t.yaml"),
            "t.yaml:3: sha256: this token is listed twice");
  ExpectBad(Tokens::Parse(std::string(2 << 20, '#'), "t.yaml"), "at most 1 MiB");
  EXPECT_TRUE(Tokens::Parse("tokens: []", "t.yaml").ok()) << "nobody";
}

TEST(Rights, GrantsWhatIsWrittenAndNothingElse) {
  const auto rights = Rights::Parse(
      "rights:\n"
      "- {identity: 'spiffe://x/a', jobs: 'team-a-*', can: [train, read]}\n"
      "- {identity: 'spiffe://x/a', jobs: 'shared', can: [read]}\n"
      "- {identity: op, jobs: '*', can: [budget, status, drop]}\n"
      "quotas:\n- {identity: 'spiffe://x/a', jobs: 2, dram: 64GiB}\n",
      "r.yaml");
  ASSERT_TRUE(rights.ok()) << rights.status();
  EXPECT_TRUE(rights->MayAny("spiffe://x/a", kTrain, "team-a-1"));
  EXPECT_FALSE(rights->MayAny("spiffe://x/a", kTrain, "team-b-1"));
  EXPECT_FALSE(rights->MayAny("spiffe://x/a", kTrain, "shared"));
  EXPECT_TRUE(rights->MayAny("spiffe://x/a", kTrain | kRead, "shared"));
  EXPECT_FALSE(rights->MayAny("spiffe://x/a", kRead, "shared2")) << "a pattern is the whole name";
  EXPECT_FALSE(rights->MayAny("spiffe://x/A", kTrain, "team-a-1"));
  EXPECT_FALSE(rights->MayAny("", kTrain, "team-a-1"));
  EXPECT_FALSE(rights->MayAny("op", kTrain, "team-a-1"));
  EXPECT_FALSE(rights->MayAny("spiffe://x/a", kTrain, std::string("team-a-1\0/evil", 14))) << "no name of a job";
  EXPECT_FALSE(rights->MayAny("spiffe://x/a", kTrain, ""));
  EXPECT_TRUE(rights->MayAnywhere("op", kBudget));
  EXPECT_FALSE(rights->MayAnywhere("spiffe://x/a", kBudget));
  EXPECT_TRUE(rights->Knows("op"));
  EXPECT_FALSE(rights->Knows("nobody"));
  ASSERT_NE(rights->QuotaOf("spiffe://x/a"), nullptr);
  EXPECT_EQ(rights->QuotaOf("spiffe://x/a")->jobs, 2u);
  EXPECT_EQ(rights->QuotaOf("spiffe://x/a")->bytes[1], uint64_t{64} << 30);
  EXPECT_FALSE(rights->QuotaOf("spiffe://x/a")->bytes[0].has_value());
  EXPECT_EQ(rights->QuotaOf("op"), nullptr);
}

TEST(Rights, RefusesByLine) {
  const auto parse = [](const std::string& entry) { return Rights::Parse("rights:\n- " + entry + "\n", "r.yaml"); };
  ExpectBad(Rights::Parse("quotas: []", "r.yaml"), "expected `rights:` with a list");
  ExpectBad(Rights::Parse("rights: []\nright: []", "r.yaml"), "unknown key 'right'; expected one of rights, quotas");
  ExpectBad(parse("{identity: a, jobs: '*', can: [fly]}"), "r.yaml:2: can: expected a list of train, read");
  ExpectBad(parse("{identity: a, jobs: '*', can: []}"), "can: expected a list");
  ExpectBad(parse("{identity: a, jobs: '*', can: train}"), "can: expected a list");
  ExpectBad(parse("{identity: a, can: [read]}"), "jobs: expected a pattern");
  ExpectBad(parse("{jobs: '*', can: [read]}"), "identity: expected a SPIFFE ID");
  ExpectBad(parse("{identity: a, jobs: 'x*', can: [budget]}"), "give it in an entry with jobs: '*'");
  ExpectBad(parse("plain"), "got 'plain'");
  ExpectBad(parse("{identity: a, jobs: \"*\\0-mine\", can: [read]}"), "jobs: expected a pattern of names of jobs");
  ExpectBad(parse("{identity: a, jobs: 'team/*', can: [read]}"), "jobs: expected a pattern of names of jobs");
  const auto quota = [](const std::string& entry) {
    return Rights::Parse("rights: []\nquotas:\n- " + entry + "\n", "r.yaml");
  };
  ExpectBad(quota("{identity: a, jobs: -1}"), "r.yaml:3: jobs: expected a number, got '-1'");
  ExpectBad(quota("{identity: a, dram: 5GB}"), "dram: expected bytes");
  ExpectBad(quota("{identity: a, ram: 5GiB}"), "unknown key 'ram'");
  ExpectBad(quota("{identity: a}\n- {identity: a}"), "has a quota above");
  ExpectBad(Rights::Parse("rights:\n- {identity: team-a, jobs: '*', can: [train]}\n"
                          "quotas:\n- {identity: team_a, jobs: 1}\n",
                          "r.yaml"),
            "r.yaml: the quota of 'team_a' has no effect");
}

// Any bytes give an answer or an error that names the file; no crash, no hang.
TEST(PolicyFiles, TakeAnyBytes) {
  constexpr uint64_t kSeed = 20261126;
  std::mt19937_64 random(kSeed);
  const std::string seeds[] = {"tokens:\n- {identity: alice, sha256: " + std::string(kDigest) + "}\n",
                               "rights:\n- {identity: 'spiffe://x/a', jobs: 'a-*', can: [train, read]}\nquotas:\n- "
                               "{identity: 'spiffe://x/a', dram: 1GiB}\n"};
  const std::string pieces[] = {"{",       "}",       "[",          "]",         ": ",     "- ",
                                "\n",      "&a ",     "*a",         "!!binary ", "<<: ",   "\"",
                                "'",       "|\n",     "? ",         "%",         "\x00",   "\xff",
                                "rights:", "tokens:", "identity: ", "jobs: ",    "can: [", "99999999999999999999",
                                "\t",      "#",       "---\n",      "...\n"};
  for (int round = 0; round < 20000; ++round) {
    std::string text = round % 3 == 2 ? "" : seeds[round % 2];
    for (uint64_t edits = 1 + random() % 8; edits > 0; --edits) {
      const size_t at = text.empty() ? 0 : random() % text.size();
      switch (random() % 3) {
        case 0:
          text.insert(at, pieces[random() % std::size(pieces)]);
          break;
        case 1:
          if (!text.empty()) text[at] = static_cast<char>(random());
          break;
        default:
          text.erase(at, random() % 20);
      }
    }
    SCOPED_TRACE(testing::Message() << "seed " << kSeed << ", round " << round);
    const auto tokens = Tokens::Parse(text, "t.yaml");
    const auto rights = Rights::Parse(text, "r.yaml");
    if (!tokens.ok()) {
      ASSERT_EQ(tokens.status().message().substr(0, 6), "t.yaml") << tokens.status();
    }
    if (!rights.ok()) {
      ASSERT_EQ(rights.status().message().substr(0, 6), "r.yaml") << rights.status();
    }
    if (rights.ok()) {
      ASSERT_FALSE(rights->MayAny("nobody", kTrain, "job"));
    }
  }
}

TEST(PolicyFiles, TakeDeepNesting) {
  for (const char* piece : {"[", "{a: ", "- "}) {
    std::string deep = "rights: ";
    for (int i = 0; i < 100'000; ++i) deep += piece;
    ExpectBad(Rights::Parse(deep, "r.yaml"), "r.yaml");
  }
}

}  // namespace
}  // namespace ballast::services
