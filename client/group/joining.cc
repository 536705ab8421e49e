#include "ballast/client/group/joining.h"

#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "ballast/client/group/job_spec.h"
#include "ballast/client/group/pins.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/epoch_plan.h"
#include "ballast/proto/model/field_hash.h"
#include "ballast/proto/model/names.h"
#include "ballast/proto/model/optimizer.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/proto/model/table.h"
#include "ballast/proto/model/tiling.h"
#include "ballast/proto/model/verdict.h"

namespace ballast::client {
namespace {

const char* Name(Resume resume) {
  return resume == Resume::kNever ? "never" : resume == Resume::kAuto ? "auto" : "must";
}

// The deadline passed while a server was busy with the request, not while it was down.
bool IsAtWork(const absl::Status& status) {
  return absl::IsDeadlineExceeded(status) && model::ReasonOf(status) == model::kBusy;
}

absl::Status JobExists(const std::string& job, int64_t version) {
  return model::Error(
      absl::StatusCode::kAlreadyExists, model::kJobExists,
      absl::StrCat("job '", job, "' exists, at version ", version,
                   ", and resume=never (the default) leaves it as it is. To train the weights that this model has now, "
                   "choose another job name, or drop the old job (ballast.drop, ballastctl drop). To continue the old "
                   "job, choose resume=auto or resume=must: its weights then replace this model's"));
}

absl::Status JobMissing(const std::string& job) {
  return model::Error(absl::StatusCode::kNotFound, model::kJobMissing,
                      absl::StrCat("resume=must, but the servers have no job '", job,
                                   "'; check the name and the servers, or choose resume=auto to create it"));
}

absl::Status KeyGone(const std::string& job) {
  return model::Error(absl::StatusCode::kFailedPrecondition, model::kKeyLost,
                      absl::StrCat("etcd says which servers have the chunks of job '", job,
                                   "', and has no key of the job any more. ", model::kHowToRestoreKey,
                                   ". If the job was dropped while a server was away, drop it there too: `ballastctl "
                                   "drop --job ",
                                   job, " --servers ADDRESS`"));
}

// The copies that a session asks for, against those of the job that exists; `newest`: null if it does not.
absl::Status CheckCopies(const SessionOptions& options, const v1::OpenRequest* newest, const JobKey& key) {
  if (newest == nullptr && key.exists() && options.replicas > 0) {
    const uint32_t said = key.has_places() ? key.value().table().replicas() : 1;
    if (said == options.replicas) return absl::OkStatus();
    return model::Error(
        absl::StatusCode::kFailedPrecondition, model::kBadConfig,
        absl::StrCat("no server has job '", options.job, "', and its key in etcd is still there and says ", said,
                     " copies of each chunk, not replicas=", options.replicas, ": remove it by `ballastctl drop --job ",
                     options.job, " --servers etcd://...`, or leave replicas out"));
  }
  if (newest == nullptr) return absl::OkStatus();
  if (newest->has_table() && !key.is_kept()) {
    return model::Error(absl::StatusCode::kFailedPrecondition, model::kBadConfig,
                        absl::StrCat("job '", options.job, "' has copies on several servers, and etcd says where; ",
                                     "expected servers named by etcd (etcd://host:port/prefix), got a list"));
  }
  if (newest->has_table() && !key.has_places()) return KeyGone(options.job);
  const uint32_t has = newest->has_table() ? newest->table().replicas() : 1;
  if (options.replicas == 0 || options.replicas == has) return absl::OkStatus();
  return model::Error(absl::StatusCode::kUnimplemented, model::kUnsupported,
                      absl::StrCat("job '", options.job, "' has ", has, " copies of each chunk, and replicas=",
                                   options.replicas, " asks for others: a job keeps its number. Leave replicas out"));
}

std::string WithoutTensors(v1::OpenRequest named) {
  named.mutable_spec()->mutable_registrations(0)->clear_tensors();
  named.mutable_tiling()->clear_placements();
  named.mutable_tiling()->clear_placement_of();
  return named.SerializeAsString();
}

absl::Status Differs(const v1::OpenRequest& other, uint32_t rank, const v1::OpenRequest& first) {
  std::string what =
      "options differ: job name, group_count, chunk_elements, seed, split, replicas, or the order or placement of "
      "tensors";
  if (other.tiling().world_size() != first.tiling().world_size()) {
    what = absl::StrCat(other.tiling().world_size(), " servers against ", first.tiling().world_size());
  } else if (other.base() != first.base()) {
    what = absl::StrCat("resume=", Name(static_cast<Resume>(other.base())),
                        " against resume=", Name(static_cast<Resume>(first.base())));
  } else if (const auto mine = model::OptimizerOf(other.spec()), its = model::OptimizerOf(first.spec());
             mine.ok() && its.ok() && !(*mine == *its)) {
    what = absl::StrCat(model::Show(*mine), " against ", model::Show(*its));
  } else if (const absl::Status same = CheckSameSpec(other.spec(), first.spec()); !same.ok()) {
    what = std::string(same.message());
  }
  return BadSpec(absl::StrCat("ranks ", rank, " and 0 open different sessions: ", what,
                              "; all ranks must pass the same options, tensors and servers"));
}

}  // namespace

absl::Status Opening::TryOpen(v1::OpenRequest open, absl::Time deadline) {
  BALLAST_RETURN_IF_ERROR(model::EpochPlan::Make(open).status());
  open.set_dry_run(true);
  return router_
      ->CallAll<v1::OpenRequest, v1::OpenResponse>(
          &Transport::Open, absl::StrCat("Space for job '", open.spec().name(), "'"), open, deadline)
      .status();
}

absl::Status Opening::SendOpen(const v1::OpenRequest& open, absl::Time deadline) {
  return router_
      ->CallAll<v1::OpenRequest, v1::OpenResponse>(
          &Transport::Open, absl::StrCat("Open of job '", open.spec().name(), "'"), open, deadline)
      .status();
}

absl::Status Opening::SendFirstOpen(const v1::OpenRequest& open, absl::Duration timeout) {
  for (;;) {
    const absl::Status opened = SendOpen(open, absl::Now() + timeout);
    if (!IsAtWork(opened)) return opened;
  }
}

absl::StatusOr<TensorUnion> Opening::Unite(const std::string& what, const absl::Status& mine,
                                           const v1::OpenRequest& named) {
  // Hashes first: usually few ranks name anything different, and each then tells it once.
  model::FieldHash hash;
  const std::string bytes = named.SerializeAsString();
  hash.Add(absl::string_view(bytes));
  BALLAST_ASSIGN_OR_RETURN(const auto hashes, group_->Agree(what, mine, hash.Finish()));
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

absl::StatusOr<Sight> Opening::Look(const SessionOptions& options, const JobKey& key, absl::Time deadline) {
  BALLAST_ASSIGN_OR_RETURN(Sight sight, LookAt(router_, options.job, /*with_open=*/true, deadline));
  if (key.has_places()) LeaveLostOut(&sight);
  if (options.resume == Resume::kNever && sight.version >= 0) return JobExists(options.job, sight.version);
  if (options.resume == Resume::kMust && !sight.exists) return JobMissing(options.job);
  // A job's table is in its key, and members of an earlier one may be gone.
  if (const v1::OpenRequest* newest = NewestOpen(sight.answers); newest != nullptr && !newest->has_table()) {
    BALLAST_RETURN_IF_ERROR(LeaveOthersOut(*newest, options.job, &members_, &sight));
  }
  return sight;
}

absl::Status Opening::CheckBeforeFence(const v1::JobSpec& spec, const Sight& sight, const v1::Table& table,
                                       const v1::Epoch& epoch, absl::Time deadline) {
  const v1::OpenRequest* const newest = NewestOpen(sight.answers);
  if (newest == nullptr) {
    v1::OpenRequest open;
    *open.mutable_epoch() = epoch;
    open.set_base(-1);
    BALLAST_RETURN_IF_ERROR(Lay(spec, nullptr, table, &open));
    return TryOpen(open, deadline);
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

void Opening::LeaveLostOut(Sight* sight) {
  const auto lost = [](const v1::GetJobResponse& answer) { return answer.state_lost(); };
  std::vector<std::string> kept;
  for (const v1::GetJobResponse& answer : sight->answers) {
    if (!lost(answer)) kept.push_back(answer.server_id());
  }
  if (kept.size() == sight->answers.size() || kept.empty()) return;
  std::erase_if(sight->answers, lost);
  members_.KeepOnly(kept);
}

absl::StatusOr<v1::Table> Opening::GoOnWithout(const SessionOptions& options, const JobKey& key,
                                               std::vector<v1::GetJobResponse>* fenced) {
  const v1::Table& table = key.value().table();
  // Another group may have written a smaller table since the servers were asked.
  std::erase_if(*fenced, [&](const v1::GetJobResponse& answer) { return !key.Has(answer.server_id(), answer.disk()); });
  std::vector<std::string> members;
  for (const v1::GetJobResponse& answer : *fenced) members.push_back(answer.server_id());
  members_.KeepOnly(members);
  std::vector<bool> there;
  for (const v1::Member& member : table.members()) {
    there.push_back(std::any_of(fenced->begin(), fenced->end(), [&](const v1::GetJobResponse& answer) {
      return answer.server_id() == member.server_id() && answer.disk() == member.disk();
    }));
  }
  BALLAST_RETURN_IF_ERROR(key.CheckEnough(there));
  v1::Table left = model::LeaveOut(table, there);
  if (left.members_size() < table.members_size() && options.progress) {
    options.progress(absl::StrCat("job '", options.job, "' goes on without ", key.ShowMissing(there),
                                  ", which did not answer within ", absl::FormatDuration(options.failover_after),
                                  " or lost its memory: the job has forgotten them; ", model::ShortShards(left), " of ",
                                  left.shards_size(), " shards now have fewer than ", left.replicas(), " copies"));
  }
  return left;
}

absl::StatusOr<v1::OpenRequest> Opening::OpenAsFirst(const SessionOptions& options, const v1::JobSpec& spec) {
  const absl::Time deadline = absl::Now() + options.open_timeout;
  JobKey key(router_->transport(0)->registry(), options.job);
  BALLAST_RETURN_IF_ERROR(key.Read(deadline));
  BALLAST_RETURN_IF_ERROR(members_.FollowKey(options.job, key));
  BALLAST_ASSIGN_OR_RETURN(const Sight sight, Look(options, key, deadline));
  BALLAST_RETURN_IF_ERROR(CheckCopies(options, NewestOpen(sight.answers), key));
  BALLAST_RETURN_IF_ERROR(key.CheckClaimed(sight.answers, deadline));
  Fencing fencing(router_, options.job, Fencing::Promised(sight.answers), members_.peers());
  BALLAST_ASSIGN_OR_RETURN(v1::Table table, FirstTableOf(options, spec, NewestOpen(sight.answers) == nullptr));
  BALLAST_RETURN_IF_ERROR(
      CheckBeforeFence(spec, sight, key.has_places() ? key.value().table() : table, fencing.epoch(), deadline));

  v1::OpenRequest open;
  BALLAST_ASSIGN_OR_RETURN(*open.mutable_epoch(), key.Claim(table, fencing.epoch(), deadline));
  // Another group may have made the key meanwhile: its table is the job's.
  if (key.is_kept()) table = key.value().table();
  fencing.Raise(open.epoch());
  auto fenced = fencing.Fence(options.resume == Resume::kNever, deadline);
  if (model::ReasonOf(fenced.status()) == model::kJobExists) return JobExists(options.job, sight.version);
  BALLAST_RETURN_IF_ERROR(fenced.status());
  BALLAST_RETURN_IF_ERROR(members_.CheckAnswers(*fenced));
  if (key.has_places()) {
    BALLAST_ASSIGN_OR_RETURN(table, GoOnWithout(options, key, &*fenced));
  }
  BALLAST_ASSIGN_OR_RETURN(const model::Resolution resolution, model::Resolve(*fenced));
  if (options.resume == Resume::kNever && resolution.base >= 0) return JobExists(options.job, resolution.base);
  if (options.resume == Resume::kMust && resolution.base < 0) return JobMissing(options.job);

  open.set_base(resolution.base);
  if (resolution.decision.has_value()) *open.mutable_base_decision() = *resolution.decision;
  if (resolution.restores.has_value()) open.set_restores(*resolution.restores);
  const v1::OpenRequest* const newest = NewestOpen(*fenced);
  BALLAST_RETURN_IF_ERROR(Lay(spec, newest, table, &open));
  BALLAST_RETURN_IF_ERROR(members_.Match(open));
  // All servers or none: a job opened by one server, with no room on another, could not be changed any more.
  const bool tried = newest == nullptr && NewestOpen(sight.answers) == nullptr;
  if (!tried) BALLAST_RETURN_IF_ERROR(TryOpen(open, deadline));
  // Before the Opens: whoever comes next goes by this table, and finds its servers in it.
  if (key.has_places()) BALLAST_RETURN_IF_ERROR(key.WriteTable(table, open.epoch(), deadline));
  BALLAST_RETURN_IF_ERROR(newest == nullptr ? SendFirstOpen(open, options.open_timeout) : SendOpen(open, deadline));
  // A pin that an older group was making is complete by now, or is given up by its server. A failure here may wait.
  (void)DropPartialPins(router_, open, absl::Now() + options.open_timeout);
  return open;
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
  BALLAST_RETURN_IF_ERROR(TryOpen(open, deadline));

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
  return SendOpen(*open, deadline);
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
  return members_.Identify(key, options.failover_after, deadline);
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
