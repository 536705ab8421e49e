// An absl::Status as a C++ exception; the module turns it into Python's ballast.Error.
#pragma once

#include <stdexcept>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ballast/proto/base/status.h"

namespace ballast::python {

class StatusError : public std::runtime_error {
 public:
  explicit StatusError(const absl::Status& status)
      : std::runtime_error(std::string(status.message())),
        reason_(model::ReasonOf(status)),
        details_(model::DetailsOf(status)),
        code_(absl::StatusCodeToString(status.code())) {}
  const std::string& reason() const { return reason_; }
  const model::Details& details() const { return details_; }
  const std::string& code() const { return code_; }

 private:
  std::string reason_;
  model::Details details_;
  std::string code_;
};

inline void Check(const absl::Status& status) {
  if (!status.ok()) throw StatusError(status);
}

template <typename T>
T Take(absl::StatusOr<T> value) {
  Check(value.status());
  return *std::move(value);
}

}  // namespace ballast::python
