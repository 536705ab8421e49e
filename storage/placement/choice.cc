#include "ballast/storage/placement/choice.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace ballast::storage {

std::string Choice::Describe() const {
  std::vector<std::string> parts;
  switch (order) {
    case ChunkOrder::kByTier:
      parts.push_back("the first chunks in the fastest tier");
      break;
    case ChunkOrder::kSpread:
      parts.push_back("chunks of each tier spread evenly over the update");
      break;
    case ChunkOrder::kStay:
      parts.push_back("chunks stay, and leave where room is short");
      break;
    case ChunkOrder::kStayAndFill:
      parts.push_back("chunks stay, and further ones fill faster tiers");
      break;
  }
  if (hbm == HbmUse::kNone) parts.push_back("hbm left empty");
  if (hbm == HbmUse::kPairs) parts.push_back("in hbm only state with its working copy");
  if (hbm == HbmUse::kState) parts.push_back("in hbm state before working copies");
  if (hbm != HbmUse::kNone && hbm_quarters < 4) parts.push_back(absl::StrCat(hbm_quarters, "/4 of the hbm budget"));
  if (reads_back) parts.push_back("slices read back");
  if (rounds_masters) parts.push_back("no working copies beside state in dram");
  return absl::StrJoin(parts, ", ");
}

}  // namespace ballast::storage
