#include "ballast/client/group/open_checks.h"

#include "absl/strings/str_cat.h"
#include "ballast/client/group/job_spec.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/optimizer.h"
#include "ballast/proto/model/protocol.h"

namespace ballast::client {
namespace {

const char* Name(Resume resume) {
  return resume == Resume::kNever ? "never" : resume == Resume::kAuto ? "auto" : "must";
}

absl::Status KeyGone(const std::string& job) {
  return model::Error(absl::StatusCode::kFailedPrecondition, model::kKeyLost,
                      absl::StrCat("etcd says which servers have the chunks of job '", job,
                                   "', and has no key of the job any more. ", model::kHowToRestoreKey,
                                   ". If the job was dropped while a server was away, drop it there too: `ballastctl "
                                   "drop --job ",
                                   job, " --servers ADDRESS`"));
}

}  // namespace

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

absl::Status CheckResume(const SessionOptions& options, int64_t base) {
  if (options.resume == Resume::kNever && base >= 0) return JobExists(options.job, base);
  if (options.resume == Resume::kMust && base < 0) return JobMissing(options.job);
  return absl::OkStatus();
}

absl::Status CheckCopies(const SessionOptions& options, const v1::OpenRequest* newest, const JobKey& key,
                         const v1::Wish& wish) {
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
  // An operator's number goes before that of the trainer's program, which stays as it is.
  if (options.replicas == 0 || options.replicas == has || wish.replicas() > 0) return absl::OkStatus();
  return model::Error(
      absl::StatusCode::kUnimplemented, model::kUnsupported,
      absl::StrCat("job '", options.job, "' has ", has, " copies of each chunk, and replicas=", options.replicas,
                   " asks for others: leave replicas out, or change the job by `ballastctl replicas`"));
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

}  // namespace ballast::client
