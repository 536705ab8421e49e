#include "ballast/client/group/joining.h"

#include <algorithm>
#include <map>
#include <set>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "ballast/client/group/job_spec.h"
#include "ballast/client/group/peers.h"
#include "ballast/proto/model/epoch_plan.h"
#include "ballast/proto/model/field_hash.h"
#include "ballast/proto/model/names.h"
#include "ballast/proto/model/optimizer.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/proto/model/status.h"
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

// The newest Open that any server has, or nullptr.
const v1::OpenRequest* NewestOpen(absl::Span<const v1::GetJobResponse> answers) {
  const v1::OpenRequest* newest = nullptr;
  for (const v1::GetJobResponse& answer : answers) {
    if (answer.has_open() && (newest == nullptr || model::Compare(answer.open().epoch(), newest->epoch()) > 0)) {
      newest = &answer.open();
    }
  }
  return newest;
}

// Makes `open` the Open of a new job, spread over the servers by their budgets: `bytes`, by server id.
void SetNewJob(const v1::JobSpec& spec, absl::Span<const v1::GetJobResponse> answers,
               const std::map<std::string, uint64_t>& bytes, v1::OpenRequest* open) {
  *open->mutable_spec() = spec;
  open->clear_members();
  const bool all_tell = std::all_of(answers.begin(), answers.end(), [&](const v1::GetJobResponse& answer) {
    const auto told = bytes.find(answer.server_id());
    return told != bytes.end() && told->second > 0;
  });
  for (const v1::GetJobResponse& answer : answers) {
    v1::Member* member = open->add_members();
    member->set_server_id(answer.server_id());
    member->set_weight(all_tell ? static_cast<double>(bytes.at(answer.server_id())) / (1 << 30) : 1);
  }
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

std::string WithoutTensors(v1::OpenRequest named) {
  named.mutable_spec()->mutable_registrations(0)->clear_tensors();
  named.mutable_tiling()->clear_placements();
  named.mutable_tiling()->clear_placement_of();
  return named.SerializeAsString();
}

absl::Status Differs(const v1::OpenRequest& other, uint32_t rank, const v1::OpenRequest& first) {
  std::string what =
      "options differ: job name, group_count, chunk_elements, seed, split, or the order or placement of tensors";
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

absl::StatusOr<Pins> AskPins(Router* router, const std::string& job, absl::Time deadline) {
  v1::GetJobRequest ask;
  ask.set_job(job);
  ask.set_without_open(true);
  BALLAST_ASSIGN_OR_RETURN(const auto answers, (router->CallAll<v1::GetJobRequest, v1::GetJobResponse>(
                                                   &Transport::GetJob, "GetJob", ask, deadline)));
  Pins pins;
  bool told = true;
  std::map<int64_t, PinnedOn> versions;
  std::set<int64_t> not_told;  // versions of which some server does not tell the epoch
  for (const v1::GetJobResponse& answer : answers) {
    told = told && answer.life() != 0;
    pins.life ^= answer.life();  // whatever the order of servers
    for (int i = 0; i < answer.durable_versions_size(); ++i) {
      const v1::Epoch decided_by = i < answer.decided_by_size() ? answer.decided_by(i) : v1::Epoch();
      const int64_t version = answer.durable_versions(i);
      PinnedOn& pin = versions[version];
      ++pin.servers;
      pin.kept.version = version;
      pin.differs = pin.differs || !model::MayBeSame(pin.kept.decided_by, decided_by);
      if (decided_by.counter() == 0) {
        not_told.insert(version);
      } else if (pin.kept.decided_by.counter() == 0) {
        pin.kept.decided_by = decided_by;
      }
    }
  }
  if (!told) pins.life = 0;
  for (auto& [version, pin] : versions) {
    pin.kept.life = pins.life;
    if (not_told.contains(version)) pin.kept.decided_by.Clear();  // all servers tell, or it is not known
    pins.versions.push_back(std::move(pin));
  }
  return pins;
}

absl::Status Opening::Identify(absl::Time deadline) {
  struct State {
    Tally tally;
    std::vector<v1::IdentifyResponse> answers;
  };
  auto state = std::make_shared<State>();
  state->answers.resize(router_->server_count());
  state->tally.Start(static_cast<int>(router_->server_count()));
  const auto request = std::make_shared<const v1::IdentifyRequest>();
  for (uint32_t i = 0; i < router_->server_count(); ++i) {
    router_->Call<v1::IdentifyRequest, v1::IdentifyResponse>(
        &Transport::Identify, i, "Identify", request, deadline,
        [state, i](const absl::StatusOr<v1::IdentifyResponse>& answer) {
          if (answer.ok()) state->answers[i] = *answer;
          // Protocol version 0 has no Identify: the answer stays empty.
          state->tally.Finish(absl::IsUnimplemented(answer.status()) ? absl::OkStatus() : answer.status());
        });
  }
  BALLAST_RETURN_IF_ERROR(state->tally.Wait());
  server_ids_.clear();
  peers_.clear();
  absl::flat_hash_set<std::string> seen;
  for (uint32_t i = 0; i < router_->server_count(); ++i) {
    const v1::IdentifyResponse& answer = state->answers[i];
    const std::string id = answer.server_id().empty() ? "" : absl::StrCat("'", answer.server_id(), "' at ");
    BALLAST_RETURN_IF_ERROR(model::CheckServerVersion(absl::StrCat(id, router_->name(i)), answer.protocol_version()));
    if (!seen.insert(answer.server_id()).second) {
      return BadSpec(absl::StrCat("server '", answer.server_id(), "' is named twice; name each server once"));
    }
    router_->transport(i)->MeanFor(model::TargetOf(answer.server_id(), answer.disk()));
    server_ids_.push_back(answer.server_id());
    peers_.push_back(MakePeer(answer, router_->name(i)));
    budget_bytes_[answer.server_id()] = answer.budget_bytes();
    v1::Member& member = identified_[answer.server_id()];
    member.set_server_id(answer.server_id());
    member.set_disk(answer.disk());
    member.set_address(router_->name(i));
  }
  return absl::OkStatus();
}

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

v1::Tiling Opening::MakeTiling(const model::Layout& layout) const {
  const auto world_size = static_cast<uint32_t>(group_->world_size());
  switch (split_) {
    case Split::kEven:
      return model::EvenTiling(world_size);
    case Split::kRows:
      return model::RowTiling(layout, world_size);
    case Split::kPlaced:
      return union_.TilingOf(layout, world_size);
  }
  return {};
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
  *open->mutable_tiling() = MakeTiling(layout);
  open->set_spec_digest(model::SpecDigest(open->spec()));
  open->set_protocol_version(model::kProtocolVersion);
  return absl::OkStatus();
}

absl::StatusOr<v1::OpenRequest> Opening::OpenAsFirst(const SessionOptions& options, const v1::JobSpec& spec) {
  const absl::Time deadline = absl::Now() + options.open_timeout;
  JobKey key(router_->transport(0)->registry(), options.job);
  BALLAST_RETURN_IF_ERROR(key.Read(deadline));
  BALLAST_RETURN_IF_ERROR(FollowKey(options.job, key));
  v1::GetJobRequest ask;
  ask.set_job(options.job);
  BALLAST_ASSIGN_OR_RETURN(auto seen,
                           (router_->CallAll<v1::GetJobRequest, v1::GetJobResponse>(
                               &Transport::GetJob, absl::StrCat("GetJob of job '", options.job, "'"), ask, deadline)));
  int64_t highest = -1;
  bool exists = false;
  for (const v1::GetJobResponse& answer : seen) {
    if (answer.exists()) highest = std::max(highest, answer.committed());
    exists = exists || answer.exists();
  }
  if (options.resume == Resume::kNever && highest >= 0) return JobExists(options.job, highest);
  if (options.resume == Resume::kMust && !exists) return JobMissing(options.job);
  if (const v1::OpenRequest* newest = NewestOpen(seen); newest != nullptr) {
    BALLAST_RETURN_IF_ERROR(LeaveOthersOut(options.job, newest->members()));
    std::erase_if(seen, [this](const v1::GetJobResponse& answer) {
      return std::find(server_ids_.begin(), server_ids_.end(), answer.server_id()) == server_ids_.end();
    });
  }

  Fencing fencing(router_, options.job, Fencing::Promised(seen), peers_);
  v1::OpenRequest open;
  *open.mutable_epoch() = fencing.epoch();
  // Checked before the fence where possible: a mistake here must not end a group at work, and a job that finds no space
  // must not be left on the servers.
  const bool is_new = NewestOpen(seen) == nullptr;
  if (is_new) {
    SetNewJob(spec, seen, budget_bytes_, &open);
    open.set_base(-1);
    BALLAST_RETURN_IF_ERROR(Divide(&open));
    BALLAST_RETURN_IF_ERROR(TryOpen(open, deadline));
  }
  if (const v1::OpenRequest* newest = NewestOpen(seen); newest != nullptr) {
    absl::Status same = CheckSameSpec(spec, newest->spec());
    if (!same.ok() && highest < 0) {
      same = model::Annotate(same, absl::StrCat("job '", options.job,
                                                "' was opened with another spec and never initialised; open it with "
                                                "those, drop it, or choose another name"));
    }
    BALLAST_RETURN_IF_ERROR(same);
  }

  BALLAST_ASSIGN_OR_RETURN(*open.mutable_epoch(), key.Claim(Members(), fencing.epoch(), deadline));
  fencing.Raise(open.epoch());
  auto fenced = fencing.Fence(options.resume == Resume::kNever, deadline);
  if (!fenced.ok() && model::ReasonOf(fenced.status()) == model::kJobExists) return JobExists(options.job, highest);
  BALLAST_RETURN_IF_ERROR(fenced.status());
  BALLAST_RETURN_IF_ERROR(CheckAnswers(*fenced));
  BALLAST_ASSIGN_OR_RETURN(const model::Resolution resolution, model::Resolve(*fenced));
  if (options.resume == Resume::kNever && resolution.base >= 0) return JobExists(options.job, resolution.base);
  if (options.resume == Resume::kMust && resolution.base < 0) return JobMissing(options.job);

  open.set_base(resolution.base);
  if (resolution.decision.has_value()) *open.mutable_base_decision() = *resolution.decision;
  if (resolution.restores.has_value()) open.set_restores(*resolution.restores);
  std::vector<std::string> server_ids;
  for (const v1::GetJobResponse& answer : *fenced) server_ids.push_back(answer.server_id());
  const v1::OpenRequest* const newest = NewestOpen(*fenced);
  if (newest != nullptr) {
    // Chunks lie by this spec and these members, even where the job was opened and never initialised.
    BALLAST_RETURN_IF_ERROR(CheckSameSpec(spec, newest->spec()));
    *open.mutable_spec() = newest->spec();
    *open.mutable_members() = newest->members();
    BALLAST_RETURN_IF_ERROR(MatchMembers(open, server_ids));
  } else {
    SetNewJob(spec, *fenced, budget_bytes_, &open);
  }
  BALLAST_RETURN_IF_ERROR(Divide(&open));
  // All servers or none: a job opened by one server, with no room on another, could not be changed any more.
  if (!is_new || newest != nullptr) BALLAST_RETURN_IF_ERROR(TryOpen(open, deadline));
  BALLAST_RETURN_IF_ERROR(newest == nullptr ? SendFirstOpen(open, options.open_timeout) : SendOpen(open, deadline));
  // A pin that an older group was making is complete by now, or is given up by its server. A failure here may wait.
  (void)DropPartialPins(open, absl::Now() + options.open_timeout);
  return open;
}

absl::Status Opening::DropPartialPins(const v1::OpenRequest& open, absl::Time deadline) {
  if (open.spec().durability() == v1::DURABILITY_NONE) return absl::OkStatus();
  BALLAST_ASSIGN_OR_RETURN(const Pins pins, AskPins(router_, open.spec().name(), deadline));
  for (const PinnedOn& pin : pins.versions) {
    if (pin.servers == router_->server_count()) continue;
    v1::UnpinRequest request;
    request.set_job(open.spec().name());
    request.set_version(pin.kept.version);
    request.set_durable(true);
    *request.mutable_epoch() = open.epoch();
    const std::string what = absl::StrCat("Unpin of version ", pin.kept.version, ", which only some servers have");
    BALLAST_RETURN_IF_ERROR(
        (router_->CallAll<v1::UnpinRequest, v1::UnpinResponse>(&Transport::Unpin, what, request, deadline)).status());
  }
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
                  std::vector<uint64_t>(router_->server_count(), current.epoch().counter()), peers_);
  *open.mutable_epoch() = fencing.epoch();
  absl::Status moved = MoveEpoch(std::move(fencing), &open, version, deadline);
  if (moved.ok()) return open;
  // From the fence on the old epoch is over, whatever went wrong: the code says so.
  return model::Error(
      absl::StatusCode::kAborted, model::ReasonOf(moved),
      absl::StrCat("the move to a new epoch was cut short, and this group's epoch is over: exit and start "
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

absl::Status Opening::FollowKey(const std::string& job, const JobKey& key) {
  if (!key.exists()) return absl::OkStatus();
  BALLAST_RETURN_IF_ERROR(key.CheckServers(Members()));
  return LeaveOthersOut(job, key.value().table().members());
}

std::vector<v1::Member> Opening::Members() const {
  std::vector<v1::Member> members;
  for (const std::string& id : server_ids_) members.push_back(identified_.at(id));
  return members;
}

absl::Status Opening::CheckAnswers(const std::vector<v1::GetJobResponse>& answers) const {
  for (const v1::GetJobResponse& answer : answers) {
    const auto known = identified_.find(answer.server_id());
    if (known != identified_.end() && known->second.disk() == answer.disk()) continue;
    return model::Error(
        absl::StatusCode::kFailedPrecondition, model::kOtherServer,
        absl::StrCat(
            "server '", answer.server_id(), "' with data directory number ", model::ShowDisk(answer.disk()),
            " answered the fence, but was not among the servers at the start of this call; a server was replaced ",
            "meanwhile. Start again"));
  }
  return absl::OkStatus();
}

absl::Status Opening::LeaveOthersOut(const std::string& job,
                                     const google::protobuf::RepeatedPtrField<v1::Member>& members) {
  absl::flat_hash_set<std::string> missing;
  for (const v1::Member& member : members) missing.insert(member.server_id());
  std::vector<uint32_t> stay;
  std::vector<std::string> ids;
  bool discovered = false;
  for (uint32_t i = 0; i < server_ids_.size(); ++i) {
    const bool found = router_->transport(i)->registry() != nullptr;
    discovered = discovered || found;
    if (missing.erase(server_ids_[i]) == 0 && found) continue;
    stay.push_back(i);
    ids.push_back(server_ids_[i]);
  }
  if (discovered && !missing.empty()) {
    return BadSpec(absl::StrCat("job '", job, "' has chunks on server '", *missing.begin(),
                                "', which is not registered now (", absl::StrJoin(server_ids_, ", "),
                                " are); start it, or end the URL with ?servers=", members.size(), " to wait for all"));
  }
  if (stay.size() == server_ids_.size()) return absl::OkStatus();
  router_->Reorder(stay);
  server_ids_ = std::move(ids);
  std::erase_if(peers_, [this](const v1::Peer& peer) {
    return std::find(server_ids_.begin(), server_ids_.end(), peer.server_id()) == server_ids_.end();
  });
  return absl::OkStatus();
}

absl::Status Opening::MatchMembers(const v1::OpenRequest& open, absl::Span<const std::string> server_ids) {
  if (static_cast<size_t>(open.members_size()) != server_ids.size()) {
    return BadSpec(
        absl::StrCat("the job lies on ", open.members_size(), " servers, this session names ", server_ids.size()));
  }
  std::vector<uint32_t> order;
  for (const v1::Member& member : open.members()) {
    const auto it = std::find(server_ids.begin(), server_ids.end(), member.server_id());
    if (it == server_ids.end()) {
      return BadSpec(absl::StrCat("the job has chunks on server '", member.server_id(),
                                  "', which is not among the servers of this session (",
                                  absl::StrJoin(server_ids, ", "),
                                  "): name that server in place of one that has nothing of the job; if it was named, "
                                  "its data directory was replaced, so put the old one back"));
    }
    order.push_back(static_cast<uint32_t>(it - server_ids.begin()));
  }
  router_->Reorder(order);
  return absl::OkStatus();
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
    mine = LeaveOthersOut(shared->spec().name(), shared->members());
    if (mine.ok()) mine = MatchMembers(*shared, server_ids_);  // names members: a rank with other servers gets an error
  }
  BALLAST_RETURN_IF_ERROR(group_->Agree("Open", mine));
  router_->SetOpen(shared);
  return std::shared_ptr<const v1::OpenRequest>(std::move(shared));
}

absl::StatusOr<std::shared_ptr<const v1::OpenRequest>> Opening::Open(const SessionOptions& options,
                                                                     const std::vector<TensorSpec>& tensors) {
  v1::JobSpec spec = MakeSpec(options, tensors);
  absl::Status bad = model::CheckJobName(options.job);
  if (bad.ok()) bad = model::OptimizerOf(spec).status();
  // A rank may train none of the tensors: rank 0 checks the union.
  if (bad.ok() && !(tensors.empty() && split_ == Split::kPlaced)) bad = model::Layout::Make(spec).status();
  if (bad.ok()) bad = Identify(absl::Now() + options.open_timeout);
  v1::OpenRequest named = Named(spec, tensors);
  named.set_base(static_cast<int64_t>(options.resume));
  named.mutable_tiling()->set_world_size(router_->server_count());
  named.mutable_epoch()->set_counter(static_cast<uint64_t>(options.split));
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
