#include "ballast/proto/registry/registry.h"

#include <google/protobuf/util/json_util.h>

#include <memory>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "ballast/proto/base/address.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/names.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/proto/model/table.h"

namespace ballast::registry {
namespace {

constexpr int64_t kEntriesMax = 4096;

std::string ToJson(const google::protobuf::Message& message) {
  std::string json;
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  (void)google::protobuf::util::MessageToJsonString(message, &json, options);
  return json;
}

// Passes over fields of a later release.
auto FromJson(const std::string& json, google::protobuf::Message* message) {
  google::protobuf::util::JsonParseOptions options;
  options.ignore_unknown_fields = true;
  return google::protobuf::util::JsonStringToMessage(json, message, options);
}

// Whether this version knows all that the value says. Whoever writes it anew would lose the rest.
bool IsWhollyKnown(const std::string& json, const google::protobuf::Message& value) {
  const std::unique_ptr<google::protobuf::Message> known(value.New());
  return google::protobuf::util::JsonStringToMessage(json, known.get()).ok();
}

// Why a key that was read says not where a job is; empty: it does.
std::string TroubleWith(const v1::JobKey& key) {
  if (key.table().members().empty()) return "it names no members";
  if (key.table().shards().empty()) return "";
  return absl::CEscape(model::CheckTable(key.table()).message());
}
// A wish may be of any servers.
std::string TroubleWith(const v1::Wish&) { return ""; }

std::string HowToMend(const v1::JobKey&, const std::string& key) {
  return absl::StrCat(
      "expected what a trainer writes there. If all servers of the job run, remove the key by `etcdctl ", "del ", key,
      "`: the next start makes a new one, or for a job with copies `ballastctl members --restore`");
}
std::string HowToMend(const v1::Wish&, const std::string& key) {
  return absl::StrCat("expected what ballastctl writes there. Remove the key by `etcdctl del ", key,
                      "`, and say again what you want");
}

// The entry in a value that somebody wrote there, whoever that was.
absl::StatusOr<v1::ServerEntry> ParseEntry(const v1::EtcdKeyValue& pair, absl::string_view folder) {
  absl::string_view id = pair.key();
  absl::ConsumePrefix(&id, folder);
  v1::ServerEntry entry;
  const auto parsed = FromJson(pair.value(), &entry);
  std::string trouble;
  if (!parsed.ok()) {
    trouble = absl::CEscape(std::string(parsed.message()));
  } else if (entry.server_id() != id || !model::IsServerId(id)) {
    trouble = absl::StrCat("server_id is '", absl::CEscape(entry.server_id()), "'");
  } else {
    trouble = absl::CEscape(model::ParseAddress(entry.address(), model::AddressUse::kConnect).status().message());
  }
  if (trouble.empty()) return entry;
  return model::Error(absl::StatusCode::kInvalidArgument, model::kBadConfig,
                      absl::StrCat("etcd's key ", absl::CEscape(pair.key()), " holds no entry of that server: ",
                                   trouble, "; expected what ballastd writes there. Remove it by `etcdctl del ",
                                   absl::CEscape(pair.key()), "`"));
}

absl::StatusOr<Registry::Found<v1::DirectoryMark>> ParseMark(const v1::EtcdKeyValue& pair) {
  Registry::Found<v1::DirectoryMark> found{.value = {}, .revision = pair.mod_revision(), .lease = pair.lease()};
  const auto parsed = FromJson(pair.value(), &found.value);
  if (!parsed.ok() || found.value.disk() == 0) {
    return model::Error(absl::StatusCode::kInvalidArgument, model::kBadConfig,
                        absl::StrCat("etcd's key ", absl::CEscape(pair.key()), " holds no mark of a data directory: ",
                                     absl::CEscape(std::string(parsed.message())),
                                     "; expected what ballastd writes there. If no copy of the directory may start by "
                                     "mistake, remove it by `etcdctl del ",
                                     absl::CEscape(pair.key()), "`"));
  }
  if (IsWhollyKnown(pair.value(), found.value)) return found;
  return model::Error(absl::StatusCode::kFailedPrecondition, model::kLaterVersion,
                      absl::StrCat("a later version of Ballast wrote etcd's key ", absl::CEscape(pair.key()),
                                   "; use that version for this data directory"));
}

// etcd says what it refuses, and not of which key.
absl::Status OfMarks(const std::string& folder, const absl::Status& status) {
  if (status.ok() || absl::IsUnavailable(status)) return status;
  return model::Annotate(status, absl::StrCat("the marks of data directories, which servers must be allowed to read "
                                              "and to write (",
                                              folder, ")"));
}

}  // namespace

std::string Registry::KeyOf(const std::string& server_id) const {
  return absl::StrCat("/", url().prefix, "/servers/", server_id);
}

Registry::Registry(RegistryUrl url) : etcd_(std::move(url)) {}

absl::StatusOr<std::vector<v1::ServerEntry>> Registry::List(absl::Time deadline, OnUnreadable on_unreadable) {
  const std::string folder = KeyOf("");
  BALLAST_ASSIGN_OR_RETURN(const auto pairs, etcd_.List(folder, kEntriesMax, deadline));
  std::vector<v1::ServerEntry> entries;  // etcd sorts by key
  for (const v1::EtcdKeyValue& pair : pairs) {
    auto entry = ParseEntry(pair, folder);
    if (entry.ok()) {
      entries.push_back(*std::move(entry));
    } else if (on_unreadable == OnUnreadable::kRefuse) {
      return entry.status();
    }
  }
  return entries;
}

absl::StatusOr<std::optional<Registry::Found<v1::ServerEntry>>> Registry::Find(const std::string& server_id,
                                                                               absl::Time deadline) {
  BALLAST_ASSIGN_OR_RETURN(const auto pair, etcd_.Read(KeyOf(server_id), deadline));
  if (!pair.has_value()) return std::nullopt;
  Found<v1::ServerEntry> found{.value = {}, .revision = pair->mod_revision(), .lease = pair->lease()};
  if (auto entry = ParseEntry(*pair, KeyOf("")); entry.ok()) found.value = *std::move(entry);
  return found;
}

absl::StatusOr<bool> Registry::Put(const v1::ServerEntry& entry, int64_t lease, int64_t revision, absl::Time deadline) {
  v1::EtcdTxnRequest::Operation operation;
  operation.mutable_put()->set_key(KeyOf(entry.server_id()));
  operation.mutable_put()->set_lease(lease);
  operation.mutable_put()->set_value(ToJson(entry));
  return etcd_.Swap(operation.put().key(), revision, operation, deadline);
}

std::string Registry::JobKeyName(const std::string& job) const {
  return absl::StrCat("/", url().prefix, "/jobs/", job);
}

// etcd says what it refuses, and not of which key.
absl::Status Registry::OfJob(const std::string& job, const absl::Status& status) const {
  if (status.ok() || absl::IsUnavailable(status)) return status;
  return model::Annotate(status, absl::StrCat("the key of job '", job, "', which trainers must be allowed to read and ",
                                              "to write (", JobKeyName(job), ")"));
}

template <typename Value>
absl::StatusOr<std::optional<Registry::Found<Value>>> Registry::FindOf(const std::string& job, const std::string& key,
                                                                       absl::Time deadline) {
  const auto read = etcd_.Read(key, deadline);
  BALLAST_RETURN_IF_ERROR(OfJob(job, read.status()));
  if (!read->has_value()) return std::nullopt;
  const v1::EtcdKeyValue& pair = **read;
  Found<Value> found{.value = {}, .revision = pair.mod_revision(), .lease = pair.lease()};
  const auto parsed = FromJson(pair.value(), &found.value);
  if (parsed.ok() && !IsWhollyKnown(pair.value(), found.value)) {
    return model::Error(absl::StatusCode::kFailedPrecondition, model::kLaterVersion,
                        absl::StrCat("a later version of Ballast wrote etcd's key ", key, ", which says more of job '",
                                     job, "' than this version knows; use that version for this job"));
  }
  const std::string trouble = parsed.ok() ? TroubleWith(found.value) : absl::CEscape(std::string(parsed.message()));
  if (trouble.empty()) return found;
  return model::Error(absl::StatusCode::kInvalidArgument, model::kBadConfig,
                      absl::StrCat("etcd's key ", key, " does not say which servers have job '", job, "': ", trouble,
                                   "; ", HowToMend(found.value, key)));
}

absl::StatusOr<bool> Registry::PutOf(const std::string& job, const std::string& key,
                                     const google::protobuf::Message& value, int64_t revision, absl::Time deadline) {
  v1::EtcdTxnRequest::Operation operation;
  operation.mutable_put()->set_key(key);
  operation.mutable_put()->set_value(ToJson(value));
  const auto put = etcd_.Swap(key, revision, operation, deadline);
  BALLAST_RETURN_IF_ERROR(OfJob(job, put.status()));
  return *put;
}

absl::StatusOr<bool> Registry::EraseOf(const std::string& job, const std::string& key, int64_t revision,
                                       absl::Time deadline) {
  v1::EtcdTxnRequest::Operation operation;
  operation.mutable_delete_range()->set_key(key);
  const auto erased = etcd_.Swap(key, revision, operation, deadline);
  BALLAST_RETURN_IF_ERROR(OfJob(job, erased.status()));
  if (*erased) return true;
  const auto left = etcd_.Read(key, deadline);
  BALLAST_RETURN_IF_ERROR(OfJob(job, left.status()));
  return !left->has_value();
}

absl::StatusOr<std::optional<Registry::Found<v1::JobKey>>> Registry::FindJob(const std::string& job,
                                                                             absl::Time deadline) {
  return FindOf<v1::JobKey>(job, JobKeyName(job), deadline);
}

absl::StatusOr<bool> Registry::PutJob(const std::string& job, const v1::JobKey& key, int64_t revision,
                                      absl::Time deadline) {
  return PutOf(job, JobKeyName(job), key, revision, deadline);
}

absl::StatusOr<bool> Registry::EraseJob(const std::string& job, int64_t revision, absl::Time deadline) {
  return EraseOf(job, JobKeyName(job), revision, deadline);
}

// No job's name has a slash.
std::string Registry::WishKeyName(const std::string& job) const { return absl::StrCat(JobKeyName(job), "/want"); }

absl::StatusOr<std::optional<Registry::Found<v1::Wish>>> Registry::FindWish(const std::string& job,
                                                                            absl::Time deadline) {
  return FindOf<v1::Wish>(job, WishKeyName(job), deadline);
}

absl::StatusOr<bool> Registry::PutWish(const std::string& job, const v1::Wish& wish, int64_t revision,
                                       absl::Time deadline) {
  return PutOf(job, WishKeyName(job), wish, revision, deadline);
}

absl::StatusOr<bool> Registry::EraseWish(const std::string& job, int64_t revision, absl::Time deadline) {
  return EraseOf(job, WishKeyName(job), revision, deadline);
}

std::string Registry::MarksOf(const std::string& server_id) const {
  return absl::StrCat("/", url().prefix, "/directories/", server_id, "/");
}

std::string Registry::MarkKeyName(const std::string& server_id, uint64_t disk) const {
  return absl::StrCat(MarksOf(server_id), model::ShowDisk(disk));
}

absl::StatusOr<std::optional<Registry::Found<v1::DirectoryMark>>> Registry::FindMark(const std::string& server_id,
                                                                                     uint64_t disk,
                                                                                     absl::Time deadline) {
  const auto read = etcd_.Read(MarkKeyName(server_id, disk), deadline);
  BALLAST_RETURN_IF_ERROR(OfMarks(MarksOf(server_id), read.status()));
  if (!read->has_value()) return std::nullopt;
  return ParseMark(**read);
}

absl::StatusOr<std::vector<Registry::Found<v1::DirectoryMark>>> Registry::ListMarks(const std::string& server_id,
                                                                                    absl::Time deadline) {
  const auto pairs = etcd_.List(MarksOf(server_id), kEntriesMax, deadline);
  BALLAST_RETURN_IF_ERROR(OfMarks(MarksOf(server_id), pairs.status()));
  std::vector<Found<v1::DirectoryMark>> marks;
  for (const v1::EtcdKeyValue& pair : *pairs) {
    BALLAST_ASSIGN_OR_RETURN(auto mark, ParseMark(pair));
    marks.push_back(std::move(mark));
  }
  return marks;
}

absl::StatusOr<bool> Registry::PutMark(const std::string& server_id, const v1::DirectoryMark& mark, int64_t revision,
                                       absl::Time deadline) {
  v1::EtcdTxnRequest::Operation operation;
  operation.mutable_put()->set_key(MarkKeyName(server_id, mark.disk()));
  operation.mutable_put()->set_value(ToJson(mark));
  const auto put = etcd_.Swap(operation.put().key(), revision, operation, deadline);
  BALLAST_RETURN_IF_ERROR(OfMarks(MarksOf(server_id), put.status()));
  return *put;
}

}  // namespace ballast::registry
