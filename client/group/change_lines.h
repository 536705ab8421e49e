// A change of a job's servers, in lines for people.
#pragma once

#include <string>
#include <vector>

#include "absl/time/time.h"
#include "ballast/proto/model/members.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::client {

// "'e1' (last seen at host:port), 'e2'"
std::string ShowServers(const std::vector<v1::Member>& servers);

// Who left, joins, copies or has copied, from the table `was` to `next`. `found`: in the fence, by `was`. `patience`:
// how long silent servers were waited for. `removed`: which members of `was` an operator removed at once; shorter:
// none. Empty if nothing changed.
std::vector<std::string> ShowChange(const std::string& job, const v1::Table& was, const v1::Table& next,
                                    const model::Found& found, absl::Duration patience,
                                    const std::vector<bool>& removed = {});

}  // namespace ballast::client
