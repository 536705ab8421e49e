#include "ballast/proto/model/brief_open.h"

namespace ballast::model {

bool IsBrief(const v1::OpenRequest& open) {
  return open.has_table() && !open.group().empty() && !open.spec_digest().empty() &&
         open.spec().registrations().empty();
}

v1::OpenRequest MakeBrief(const v1::OpenRequest& open) {
  v1::OpenRequest brief;
  brief.mutable_spec()->set_name(open.spec().name());
  if (open.has_epoch()) *brief.mutable_epoch() = open.epoch();
  brief.set_base(open.base());
  if (open.has_base_decision()) *brief.mutable_base_decision() = open.base_decision();
  if (open.has_tiling()) *brief.mutable_tiling() = open.tiling();
  *brief.mutable_members() = open.members();
  brief.set_dry_run(open.dry_run());
  if (open.has_restores()) brief.set_restores(open.restores());
  brief.set_spec_digest(open.spec_digest());
  brief.set_protocol_version(open.protocol_version());
  if (open.has_table()) *brief.mutable_table() = open.table();
  brief.set_group(open.group());
  *brief.mutable_tensor_steps() = open.tensor_steps();
  brief.set_continues(open.continues());
  return brief;
}

v1::OpenRequest TellOpen(const v1::OpenRequest& open, absl::string_view group) {
  const bool opened_it = open.has_table() && !open.spec_digest().empty() && !group.empty() && open.group() == group;
  return opened_it ? MakeBrief(open) : open;
}

bool SameSpec(const v1::OpenRequest& a, const v1::OpenRequest& b) {
  if (&a.spec() == &b.spec()) return true;
  if (a.spec_digest() != b.spec_digest()) return false;
  const bool brief = IsBrief(a) || IsBrief(b);
  const auto shown = [brief](const v1::OpenRequest& open) {
    if (!brief || IsBrief(open)) return open.spec().SerializeAsString();
    v1::JobSpec named;
    named.set_name(open.spec().name());
    return named.SerializeAsString();
  };
  return shown(a) == shown(b);
}

}  // namespace ballast::model
