#include "ballast/storage/tier/ledger.h"

#include <string>
#include <utility>

#include "ballast/proto/base/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

using ::testing::HasSubstr;

TEST(LedgerTest, ALeaseReturnsItsBytes) {
  Ledger ledger(TierBytes{.dram = 100});
  {
    BudgetLease lease = *ledger.Lease(TierKind::kDram, 70, "a test");
    EXPECT_EQ(ledger.used().dram, 70u);
    const absl::Status refused = ledger.Lease(TierKind::kDram, 31, "another test").status();
    EXPECT_EQ(model::ReasonOf(refused), model::kBudget);
    EXPECT_THAT(std::string(refused.message()), HasSubstr("another test"));
    const BudgetLease split = lease.Split(30);
    EXPECT_EQ(lease.bytes(), 40u);
    EXPECT_EQ(split.bytes(), 30u);
    EXPECT_EQ(ledger.used().dram, 70u);
  }
  EXPECT_EQ(ledger.used().dram, 0u);
}

TEST(LedgerTest, BytesBeyondALoweredBudgetStayTaken) {
  Ledger ledger(TierBytes{.dram = 100});
  BudgetLease lease = *ledger.Lease(TierKind::kDram, 80, "a test");
  ledger.SetBudget({.dram = 50});
  EXPECT_EQ(ledger.used().dram, 80u);
  EXPECT_FALSE(ledger.Lease(TierKind::kDram, 1, "a test").ok());
  EXPECT_EQ(ledger.LeaseBeyond(TierKind::kDram, 5, TierPart::kStaging).bytes(), 5u);
  { const BudgetLease returned = lease.Split(40); }
  EXPECT_TRUE(ledger.Lease(TierKind::kDram, 10, "a test").ok());
}

TEST(LedgerTest, AccountsHaveWhatIsChargedToThem) {
  Ledger ledger(TierBytes{.dram = 100});
  const auto mine = std::make_shared<Account>(), other = std::make_shared<Account>();
  BudgetLease lease = *ledger.Lease(TierKind::kDram, 10, "a test", TierPart::kStaging);
  const auto of = [&](const Account& account) {
    return ledger.taken(account)[static_cast<size_t>(TierPart::kStaging)].dram;
  };
  lease.Charge(mine);
  EXPECT_EQ(of(*mine), 10u);
  BudgetLease joined = *ledger.Lease(TierKind::kDram, 5, "a test", TierPart::kState);
  joined.Charge(other);
  lease.Join(std::move(joined));
  EXPECT_EQ(of(*mine), 15u);
  EXPECT_EQ(of(*other), 0u);
}

TEST(LedgerTest, BytesOfNvmeAreTakenFromAShare) {
  Ledger ledger(TierBytes{.nvme = 100}, {{"/a", 60}, {"/b", 40}});
  EXPECT_FALSE(ledger.Lease(TierKind::kNvme, 61, "a test", TierPart::kState, 0).ok()) << "no device has so much";
  const BudgetLease lease = *ledger.Lease(TierKind::kNvme, 30, "a test", TierPart::kState, 0);
  EXPECT_EQ(ledger.NvmeFree(0), 30u);
  EXPECT_EQ(ledger.NvmeFree(1), 40u);
  ledger.DropShare(1);
  EXPECT_EQ(ledger.budget().nvme, 60u);
  EXPECT_EQ(ledger.NvmeFree(1), 0u);
}

}  // namespace
}  // namespace ballast::storage
