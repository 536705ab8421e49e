// Self-test of a processor: a server runs only on processors that compute this release's bits.
#pragma once

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "ballast/kernels/self_test.h"

namespace ballast::storage {

// INTERNAL (WRONG_BITS) names the functions of `processor` with different bits. `name`: for the message, such as "CPU
// (AVX2)".
absl::Status CheckProcessor(const kernels::Processor& processor, absl::string_view name);

}  // namespace ballast::storage
