// Opens that leave their spec out: an Open that changes only the table says no more than that. A spec of 100,000
// tensors takes megabytes, and a tenth of a second at each end.
#pragma once

#include "absl/strings/string_view.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::model {

// Does the Open name only its job in the spec? The receiver has the spec by an Open that came whole: the digest is the
// same, and was compared with the spec then. It has to know the tiling, too.
bool IsBrief(const v1::OpenRequest& open);
// The same Open, brief. REQUIRES: spec_digest, a table and a group.
v1::OpenRequest MakeBrief(const v1::OpenRequest& open);
// What a server tells `group` of an Open: it is brief if that group opened it, and so has the spec.
v1::OpenRequest TellOpen(const v1::OpenRequest& open, absl::string_view group);
// Do both have one spec? At most one of them may be brief.
bool SameSpec(const v1::OpenRequest& a, const v1::OpenRequest& b);

}  // namespace ballast::model
