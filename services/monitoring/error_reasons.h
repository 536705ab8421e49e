// The errors that each call can return, except to a client that breaks the API's rules.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "ballast/services/counters/counters.h"

namespace ballast::services {

// Call and reason. Errors outside the list are counted as well, from the first one on.
const std::vector<std::pair<Call, std::string>>& ExpectedErrors();

}  // namespace ballast::services
