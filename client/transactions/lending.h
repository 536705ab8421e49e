// Lends the trainer's memory to a server in its process, in place of pushes and pulls.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "ballast/client/transactions/transactions.h"
#include "ballast/proto/base/lent_memory.h"

namespace ballast::client {

class Lending {
 public:
  // Borrows all.
  Lending(OpenJob* job, Values* values, Transactions* transactions)
      : job_(job), values_(values), transactions_(transactions) {}

  // One rank, and one server in this process that takes loans; of_values: loans of values and gradients, too.
  bool possible() const;
  bool of_values() const;
  // For the step in the making, or for the last one.
  bool active() const { return loan_ != nullptr; }
  // The loan includes written values if loans of values are possible.
  absl::Status Lend(std::vector<model::LentTensor> tensors);
  // Blocks until all lent parameters, or the unit's, are at the job's version.
  absl::Status Await(std::optional<uint32_t> unit);
  // Blocks until all lent parameters are at the job's version, then ends the loan. An error ends it, too.
  absl::Status AwaitApplied();
  // Does nothing in a forked child: the loan belongs to the parent.
  void End();

 private:
  OpenJob* job_;
  Values* values_;
  Transactions* transactions_;
  std::unique_ptr<model::Loan> loan_;
};

}  // namespace ballast::client
