#include "ballast/client/group/joining.h"

#include <algorithm>
#include <map>
#include <random>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "ballast/client/group/job_spec.h"
#include "ballast/client/group/open_checks.h"
#include "ballast/client/group/opens.h"
#include "ballast/client/group/pins.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/epoch_plan.h"
#include "ballast/proto/model/field_hash.h"
#include "ballast/proto/model/names.h"
#include "ballast/proto/model/next_table.h"
#include "ballast/proto/model/optimizer.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/proto/model/table.h"
#include "ballast/proto/model/tiling.h"
#include "ballast/proto/model/verdict.h"

namespace ballast::client {
namespace {

// Names this group, so that the servers keep its gradients from one of its epochs to the next.
std::string NewGroup() {
  constexpr size_t kGroupBytes = 16;
  std::random_device random;
  std::string group(kGroupBytes, '\0');
  std::generate(group.begin(), group.end(), [&] { return static_cast<char>(random()); });
  return group;
}

std::string WithoutTensors(v1::OpenRequest named) {
  named.mutable_spec()->mutable_registrations(0)->clear_tensors();
  named.mutable_tiling()->clear_placements();
  named.mutable_tiling()->clear_placement_of();
  return named.SerializeAsString();
}

}  // namespace

namespace {

constexpr size_t kHashBytes = 32;
// For servers that may join to answer, once all members have. One that is slower joins while the group trains.
constexpr absl::Duration kSparesGrace = absl::Seconds(1);

// Takes the ranks' spares off their parts.
std::set<std::string> ReachedByAll(std::vector<std::string>* parts) {
  std::map<std::string, size_t> ranks;
  for (std::string& part : *parts) {
    const std::string spares = part.substr(std::min(kHashBytes, part.size()));
    part.resize(part.size() - spares.size());
    for (const absl::string_view spare : absl::StrSplit(spares, ',', absl::SkipEmpty())) ++ranks[std::string(spare)];
  }
  std::set<std::string> reached;
  for (const auto& [spare, count] : ranks) {
    if (count == parts->size()) reached.insert(spare);
  }
  return reached;
}

}  // namespace

absl::StatusOr<TensorUnion> Opening::Unite(const std::string& what, const absl::Status& mine,
                                           const v1::OpenRequest& named) {
  // Hashes first: usually few ranks name anything different, and each then tells it once.
  model::FieldHash hash;
  const std::string bytes = named.SerializeAsString();
  hash.Add(absl::string_view(bytes));
  // Servers may join that all ranks reach: the hash has 32 bytes, and spares follow.
  BALLAST_ASSIGN_OR_RETURN(auto hashes,
                           group_->Agree(what, mine, absl::StrCat(hash.Finish(), absl::StrJoin(spares_, ","))));
  reached_ = ReachedByAll(&hashes);
  std::vector<NamedAlike> all;
  std::map<std::string, size_t> known;
  for (uint32_t rank = 0; rank < hashes.size(); ++rank) {
    const auto [it, is_new] = known.try_emplace(hashes[rank], all.size());
    if (is_new) all.emplace_back();
    all[it->second].ranks.push_back(rank);
  }
  const NamedAlike& alike = all[known.at(hashes[group_->rank()])];
  if (all.size() == 1) {
    all[0].named = named;
  } else {
    const bool tells = static_cast<int>(alike.ranks[0]) == group_->rank();
    BALLAST_ASSIGN_OR_RETURN(const auto said, group_->Agree(what, absl::OkStatus(), tells ? bytes : ""));
    for (NamedAlike& each : all) {
      if (!each.named.ParseFromString(said[each.ranks[0]]) || each.named.spec().registrations_size() != 1 ||
          each.named.tiling().placement_of_size() != each.named.spec().registrations(0).tensors_size()) {
        return model::Error(absl::StatusCode::kInternal, model::kBadRequest,
                            absl::StrCat("rank ", each.ranks[0], " sent no tensors"));
      }
      const bool differs = split_ != Split::kPlaced || WithoutTensors(each.named) != WithoutTensors(all[0].named);
      if (&each != &all[0] && differs) return Differs(each.named, each.ranks[0], all[0].named);
    }
  }
  return TensorUnion::Make(all);
}

absl::Status Opening::Divide(v1::OpenRequest* open) const {
  BALLAST_ASSIGN_OR_RETURN(const model::Layout layout, model::Layout::Make(open->spec()));
  const auto world_size = static_cast<uint32_t>(group_->world_size());
  *open->mutable_tiling() =
      split_ == Split::kPlaced ? union_.TilingOf(layout, world_size) : model::EvenTiling(world_size);
  open->set_spec_digest(model::SpecDigest(open->spec()));
  open->set_protocol_version(model::kProtocolVersion);
  return absl::OkStatus();
}

absl::StatusOr<Sight> Opening::Look(const SessionOptions& options, const JobKey& key, const v1::JobSpec& spec,
                                    Change* change, absl::Time deadline) {
  BALLAST_ASSIGN_OR_RETURN(Sight sight, key.has_places() ? change->Look(spec, deadline)
                                                         : LookAt(router_, options.job, /*with_open=*/true, deadline));
  if (options.resume == Resume::kNever && sight.version >= 0) return JobExists(options.job, sight.version);
  if (options.resume == Resume::kMust && !sight.exists) return JobMissing(options.job);
  // A job's table is in its key, and members of an earlier one may be gone.
  if (const v1::OpenRequest* newest = NewestOpen(sight.answers); newest != nullptr && !newest->has_table()) {
    BALLAST_RETURN_IF_ERROR(LeaveOthersOut(*newest, options.job, &members_, &sight));
  }
  return sight;
}

absl::Status Opening::CheckBeforeFence(const v1::JobSpec& spec, const Sight& sight, const JobKey& key,
                                       const v1::Table& table, const v1::Epoch& epoch, absl::Time deadline) {
  const v1::OpenRequest* const newest = NewestOpen(sight.answers);
  if (newest == nullptr && key.has_places())
    return absl::OkStatus();  // the table may change: tried before it is written
  if (newest == nullptr) {
    v1::OpenRequest open;
    *open.mutable_epoch() = epoch;
    open.set_base(-1);
    BALLAST_RETURN_IF_ERROR(Lay(spec, nullptr, table, &open));
    return TryOpen(router_, open, deadline);
  }
  const absl::Status same = CheckSameSpec(spec, newest->spec());
  if (same.ok() || sight.version >= 0) return same;
  return model::Annotate(same,
                         absl::StrCat("job '", spec.name(),
                                      "' was opened with another spec and never initialised; open it with that spec, "
                                      "drop it, or choose another name"));
}

absl::StatusOr<v1::Table> Opening::FirstTableOf(const SessionOptions& options, const v1::JobSpec& spec,
                                                bool is_new) const {
  v1::Table table;
  const std::vector<v1::Member> members = members_.all();
  if (!is_new || options.replicas <= 1) {
    table.set_replicas(1);
    table.mutable_members()->Assign(members.begin(), members.end());
    return table;
  }
  if (router_->transport(0)->registry() == nullptr) {
    return BadSpec(absl::StrCat("replicas=", options.replicas, " needs servers that etcd names (etcd://host:port/",
                                "prefix), since etcd keeps which server has which copy; got a list of servers. Name ",
                                "them by etcd, or leave replicas out"));
  }
  if (options.replicas > model::kReplicasMax || members.size() < options.replicas) {
    return BadSpec(absl::StrCat("replicas=", options.replicas, ": expected 1 to ", model::kReplicasMax,
                                ", and a server for each copy, got ", members.size(),
                                " server(s): ", absl::StrJoin(members_.ids(), ", ")));
  }
  BALLAST_ASSIGN_OR_RETURN(const model::Layout layout, model::Layout::Make(spec));
  const std::vector<uint64_t> elements = model::ShardElements(layout, model::kShards);
  return model::FirstTable({.servers = members, .replicas = options.replicas, .shard_elements = elements}, v1::Epoch());
}

absl::Status Opening::Lay(const v1::JobSpec& spec, const v1::OpenRequest* newest, const v1::Table& table,
                          v1::OpenRequest* open) {
  const bool has_places = !table.shards().empty();
  if (newest == nullptr) {
    *open->mutable_spec() = spec;
    if (!has_places) *open->mutable_members() = members_.Weighed();
  } else {
    // Chunks lie by this spec and these members, even where the job was opened and never initialised.
    BALLAST_RETURN_IF_ERROR(CheckSameSpec(spec, newest->spec()));
    *open->mutable_spec() = newest->spec();
    *open->mutable_members() = newest->members();
  }
  if (has_places) *open->mutable_table() = table;
  return Divide(open);
}

absl::StatusOr<v1::OpenRequest> Opening::OpenAsFirst(const SessionOptions& options, const v1::JobSpec& spec) {
  const absl::Time deadline = absl::Now() + options.open_timeout;
  JobKey key(router_->transport(0)->registry(), options.job);
  BALLAST_RETURN_IF_ERROR(key.Read(deadline));
  BALLAST_RETURN_IF_ERROR(members_.FollowKey(options.job, key));
  // The servers were asked who they are before the slowest rank was there.
  if (key.has_places()) {
    BALLAST_RETURN_IF_ERROR(members_.CheckNoneIsNew(options.job, members_.asked_by(), key.value().table()));
  }
  Change change(router_, &members_, &key, options, reached_, kSparesGrace);
  BALLAST_ASSIGN_OR_RETURN(Sight sight, Look(options, key, spec, &change, deadline));
  // Another group may have made the key, and opened the job by it, since the key was read.
  if (const v1::OpenRequest* newest = NewestOpen(sight.answers);
      newest != nullptr && newest->has_table() && !key.has_places()) {
    BALLAST_RETURN_IF_ERROR(key.Read(deadline));
    if (key.has_places()) {
      BALLAST_ASSIGN_OR_RETURN(sight, Look(options, key, spec, &change, deadline));
    }
  }
  BALLAST_RETURN_IF_ERROR(CheckCopies(options, NewestOpen(sight.answers), key, change.wish()));
  BALLAST_RETURN_IF_ERROR(key.CheckClaimed(sight.answers, deadline));
  Fencing fencing(router_, options.job, Fencing::Promised(sight.answers), members_.peers());
  BALLAST_ASSIGN_OR_RETURN(v1::Table table, FirstTableOf(options, spec, NewestOpen(sight.answers) == nullptr));
  BALLAST_RETURN_IF_ERROR(CheckBeforeFence(spec, sight, key, table, fencing.epoch(), deadline));

  v1::OpenRequest open;
  const bool had_places = key.has_places();
  BALLAST_ASSIGN_OR_RETURN(*open.mutable_epoch(), key.Claim(table, fencing.epoch(), deadline));
  // Another group may have made the key meanwhile: its table is the job's.
  if (key.is_kept()) table = key.value().table();
  if (key.has_places()) {
    if (!had_places) BALLAST_RETURN_IF_ERROR(change.Look(spec, deadline).status());
    BALLAST_RETURN_IF_ERROR(OpenByTable(options, spec, &key, &change, deadline, &open));
  } else {
    fencing.Raise(open.epoch());
    const bool is_new = NewestOpen(sight.answers) == nullptr;
    BALLAST_RETURN_IF_ERROR(OpenFixed(options, spec, table, is_new, &fencing, deadline, &open));
  }
  // A pin that an older group was making is complete by now, or is given up by its server. A failure here may wait.
  (void)DropPartialPins(router_, open, absl::Now() + options.open_timeout);
  return open;
}

absl::Status Opening::OpenFixed(const SessionOptions& options, const v1::JobSpec& spec, const v1::Table& table,
                                bool is_new, Fencing* fencing, absl::Time deadline, v1::OpenRequest* open) {
  const auto fenced = fencing->Fence(options.resume == Resume::kNever, deadline);
  if (model::ReasonOf(fenced.status()) == model::kJobExists) return JobExists(options.job, -1);
  BALLAST_RETURN_IF_ERROR(fenced.status());
  BALLAST_RETURN_IF_ERROR(members_.CheckAnswers(*fenced));
  BALLAST_ASSIGN_OR_RETURN(const model::Resolution resolution, model::Resolve(*fenced));
  BALLAST_RETURN_IF_ERROR(CheckResume(options, resolution.base));
  open->set_base(resolution.base);
  if (resolution.decision.has_value()) *open->mutable_base_decision() = *resolution.decision;
  if (resolution.restores.has_value()) open->set_restores(*resolution.restores);
  const v1::OpenRequest* const newest = NewestOpen(*fenced);
  BALLAST_RETURN_IF_ERROR(Lay(spec, newest, table, open));
  BALLAST_RETURN_IF_ERROR(members_.Match(*open));
  // All servers or none: a job opened by one server, with no room on another, could not be changed any more.
  const bool tried = newest == nullptr && is_new;
  if (!tried) BALLAST_RETURN_IF_ERROR(TryOpen(router_, *open, deadline));
  return newest == nullptr ? SendFirstOpen(router_, *open, options.open_timeout) : SendOpen(router_, *open, deadline);
}

absl::Status Opening::OpenByTable(const SessionOptions& options, const v1::JobSpec& spec, JobKey* key, Change* change,
                                  absl::Time deadline, v1::OpenRequest* open) {
  BALLAST_RETURN_IF_ERROR(change->Claimed(open->epoch(), deadline));
  open->set_group(NewGroup());
  const absl::Status fenced = change->Fence(open->group(), options.resume == Resume::kNever, deadline);
  if (model::ReasonOf(fenced) == model::kJobExists) return JobExists(options.job, -1);
  BALLAST_RETURN_IF_ERROR(fenced);
  BALLAST_RETURN_IF_ERROR(CheckResume(options, change->found().base));
  BALLAST_RETURN_IF_ERROR(Lay(spec, change->newest(), key->value().table(), open));
  BALLAST_RETURN_IF_ERROR(OpenNext(router_, &members_, key, change, options, deadline, open));
  change->DropLeft(open->table());
  std::vector<std::string> stay;
  for (const v1::Member& member : open->table().members()) stay.push_back(member.server_id());
  members_.KeepOnly(stay);
  return absl::OkStatus();
}

absl::Status Opening::ClaimNext(const v1::OpenRequest& current, Fencing* fencing, absl::Time deadline) {
  if (!current.has_table()) return absl::OkStatus();
  JobKey key(router_->transport(0)->registry(), current.spec().name());
  BALLAST_RETURN_IF_ERROR(key.Read(deadline));
  BALLAST_ASSIGN_OR_RETURN(const v1::Epoch epoch,
                           key.Claim(current.table(), fencing->epoch(), deadline, &current.epoch()));
  fencing->Raise(epoch);
  return absl::OkStatus();
}

absl::StatusOr<v1::OpenRequest> Opening::ExtendAsFirst(const v1::OpenRequest& current, int64_t version,
                                                       absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  v1::OpenRequest open = current;
  if (!union_.tensors().empty()) {
    v1::Registration* registration = open.mutable_spec()->add_registrations();
    registration->set_version(version);
    registration->mutable_tensors()->Assign(union_.tensors().begin(), union_.tensors().end());
  }
  // Before the fence: a bad tensor, or one without room, must not cost the group its epoch.
  BALLAST_RETURN_IF_ERROR(Divide(&open));
  open.set_base(version);
  open.clear_restores();
  open.clear_continues();
  open.clear_tensor_steps();  // nobody begins here
  BALLAST_RETURN_IF_ERROR(TryOpen(router_, open, deadline));

  Fencing fencing(router_, open.spec().name(),
                  std::vector<uint64_t>(router_->server_count(), current.epoch().counter()), members_.peers());
  BALLAST_RETURN_IF_ERROR(ClaimNext(current, &fencing, deadline));
  *open.mutable_epoch() = fencing.epoch();
  absl::Status moved = MoveEpoch(std::move(fencing), &open, version, deadline);
  if (moved.ok()) return open;
  // From the fence on the old epoch is over, whatever went wrong: the code says so.
  return model::Error(
      absl::StatusCode::kAborted, model::ReasonOf(moved),
      absl::StrCat("the move to a new epoch was interrupted, and this group's epoch is over. Exit, and start "
                   "again with resume=auto. ",
                   moved.message()));
}

absl::Status Opening::MoveEpoch(Fencing fencing, v1::OpenRequest* open, int64_t version, absl::Time deadline) {
  BALLAST_ASSIGN_OR_RETURN(const auto fenced, fencing.Fence(/*expect_empty=*/false, deadline));
  BALLAST_ASSIGN_OR_RETURN(const model::Resolution resolution, model::Resolve(fenced));
  if (resolution.restores.has_value()) {
    return model::Error(absl::StatusCode::kFailedPrecondition, model::kStateLost,
                        "a server was restarted and lost its state since its newest pin (durability every-K)");
  }
  if (resolution.base != version) {
    return model::Error(absl::StatusCode::kFailedPrecondition, model::kStaleEpoch,
                        absl::StrCat("the job is at version ", resolution.base, ", this group at ", version,
                                     "; another group has taken over"));
  }
  open->clear_base_decision();
  if (resolution.decision.has_value()) *open->mutable_base_decision() = *resolution.decision;
  return SendOpen(router_, *open, deadline);
}

absl::StatusOr<std::shared_ptr<const v1::OpenRequest>> Opening::Share(absl::StatusOr<v1::OpenRequest> open,
                                                                      bool match_members) {
  const bool first = group_->rank() == 0;
  BALLAST_ASSIGN_OR_RETURN(const auto said, group_->Agree("Open", first ? open.status() : absl::OkStatus(),
                                                          first && open.ok() ? open->SerializeAsString() : ""));
  auto shared = std::make_shared<v1::OpenRequest>();
  absl::Status mine;
  if (!shared->ParseFromString(said[0])) {
    mine = model::Error(absl::StatusCode::kInternal, model::kBadRequest, "rank 0 sent no Open");
  } else if (mine = model::CheckOpen(*shared); mine.ok() && !first && match_members) {
    mine = members_.LeaveOthersOut(shared->spec().name(), model::MembersOf(*shared));
    if (mine.ok()) mine = members_.Match(*shared);  // names members: a rank with other servers gets an error
  }
  BALLAST_RETURN_IF_ERROR(group_->Agree("Open", mine));
  router_->SetOpen(shared);
  return std::shared_ptr<const v1::OpenRequest>(std::move(shared));
}

absl::Status Opening::Identify(const SessionOptions& options) {
  const absl::Time deadline = absl::Now() + options.open_timeout;
  JobKey key(router_->transport(0)->registry(), options.job);
  BALLAST_RETURN_IF_ERROR(key.Read(deadline));
  BALLAST_RETURN_IF_ERROR(
      members_.Identify(key, Spares::kConnect, {.members = options.failover_after, .spares = kSparesGrace}, deadline));
  spares_ = members_.spares(key);
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const v1::OpenRequest>> Opening::Open(const SessionOptions& options,
                                                                     const std::vector<TensorSpec>& tensors) {
  v1::JobSpec spec = MakeSpec(options, tensors);
  absl::Status bad = model::CheckJobName(options.job);
  if (bad.ok()) bad = model::OptimizerOf(spec).status();
  // A rank may train none of the tensors: rank 0 checks the union.
  if (bad.ok() && !(tensors.empty() && split_ == Split::kPlaced)) bad = model::Layout::Make(spec).status();
  if (bad.ok()) bad = Identify(options);
  v1::OpenRequest named = Named(spec, tensors);
  named.set_base(static_cast<int64_t>(options.resume));
  named.mutable_tiling()->set_world_size(members_.asked());
  named.mutable_epoch()->set_counter(static_cast<uint64_t>(options.split));
  named.mutable_table()->set_replicas(options.replicas);
  BALLAST_ASSIGN_OR_RETURN(union_, Unite("Open", bad, named));
  spec.mutable_registrations(0)->mutable_tensors()->Assign(union_.tensors().begin(), union_.tensors().end());
  absl::StatusOr<v1::OpenRequest> open = v1::OpenRequest();
  if (group_->rank() == 0) open = OpenAsFirst(options, spec);
  return Share(std::move(open), true);
}

absl::StatusOr<std::shared_ptr<const v1::OpenRequest>> Opening::Extend(const v1::OpenRequest& current, int64_t version,
                                                                       const std::vector<TensorSpec>& added,
                                                                       const absl::Status& mine,
                                                                       absl::Duration timeout) {
  v1::JobSpec spec;
  v1::Registration* const registration = spec.add_registrations();
  for (const TensorSpec& tensor : added) *registration->add_tensors() = ToProto(tensor);
  BALLAST_ASSIGN_OR_RETURN(union_, Unite("Register", mine, Named(spec, added)));
  if (split_ == Split::kPlaced) {
    BALLAST_ASSIGN_OR_RETURN(const model::Layout layout, model::Layout::Make(current.spec()));
    union_.AddPlacementsOf(current, layout);
  }
  absl::StatusOr<v1::OpenRequest> open = v1::OpenRequest();
  if (group_->rank() == 0) open = ExtendAsFirst(current, version, timeout);
  return Share(std::move(open), false);
}

}  // namespace ballast::client
