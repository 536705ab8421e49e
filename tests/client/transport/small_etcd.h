// An etcd of a test's own, which loses answers, refuses or is silent, and has other writers.
#pragma once

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/impl/codegen/proto_utils.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>

#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "ballast/proto/registry/registry.h"
#include "ballast/v1/registry.pb.h"

namespace ballast::client {

// Ranges, transactions that compare one key's mod_revision, and leases, which end by Revoke alone.
class SmallEtcd final : public grpc::CallbackGenericService {
 public:
  SmallEtcd() {
    int port = 0, other = 0;
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &other);
    builder.RegisterCallbackGenericService(this);
    server_ = builder.BuildAndStart();
    // As of two members: a call is tried at each.
    url_ = absl::StrCat("etcd://127.0.0.1:", port, ",127.0.0.1:", other, "/test");
  }
  ~SmallEtcd() override { server_->Shutdown(absl::ToChronoTime(absl::Now())); }

  registry::Registry Connect() const { return registry::Registry(*registry::ParseRegistryUrl(url_)); }
  // The answer to the next transaction is lost: it is carried out, and UNAVAILABLE.
  void LoseAnAnswer() {
    absl::MutexLock lock(&mutex_);
    lose_ = true;
  }
  void Set(const std::string& key, std::string bytes) {
    absl::MutexLock lock(&mutex_);
    values_[key] = {std::move(bytes), ++revision_};
  }
  // Every call is UNAVAILABLE.
  void SetSilent(bool silent) {
    absl::MutexLock lock(&mutex_);
    silent_ = silent;
  }
  // Reads and transactions of keys that contain `part` are refused.
  void Refuse(std::string part) {
    absl::MutexLock lock(&mutex_);
    refused_ = std::move(part);
  }
  // Empty: absent.
  std::string Get(const std::string& key) const {
    absl::MutexLock lock(&mutex_);
    const auto found = values_.find(key);
    return found == values_.end() ? "" : found->second.bytes;
  }
  int64_t kept_leases() const {
    absl::MutexLock lock(&mutex_);
    return kept_leases_;
  }
  const std::string& url() const { return url_; }
  // Called before the next transaction.
  void BeforeTheNext(std::function<void()> what) {
    absl::MutexLock lock(&mutex_);
    before_ = std::move(what);
  }

  grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext* context) override {
    return new Answer(this, context->method());
  }

 private:
  struct Value {
    std::string bytes;
    int64_t revision = 0;
    int64_t lease = 0;
  };

  class Answer final : public grpc::ServerGenericBidiReactor {
   public:
    Answer(SmallEtcd* etcd, std::string method) : etcd_(etcd), method_(std::move(method)) { StartRead(&question_); }
    void OnReadDone(bool ok) override {
      if (!ok) return Finish(grpc::Status::CANCELLED);  // the client gave up before its question came
      grpc::Slice question;
      (void)question_.DumpToSingleSlice(&question);
      const std::string bytes(reinterpret_cast<const char*>(question.begin()), question.size());
      std::string answer;
      if (const grpc::Status status = etcd_->Carry(method_, bytes, &answer); !status.ok()) return Finish(status);
      const grpc::Slice slice(answer);
      answer_ = grpc::ByteBuffer(&slice, 1);
      StartWriteAndFinish(&answer_, grpc::WriteOptions(), grpc::Status::OK);
    }
    void OnDone() override { delete this; }

   private:
    SmallEtcd* const etcd_;
    const std::string method_;
    grpc::ByteBuffer question_, answer_;
  };

  grpc::Status Carry(const std::string& method, const std::string& question, std::string* answer) {
    {
      absl::MutexLock lock(&mutex_);
      if (silent_) return grpc::Status(grpc::StatusCode::UNAVAILABLE, "silent");
    }
    if (absl::StrContains(method, "/Lease")) return CarryLease(method, question, answer);
    if (absl::EndsWith(method, "/Range")) {
      v1::EtcdRangeRequest range;
      (void)range.ParseFromString(question);
      absl::MutexLock lock(&mutex_);
      if (IsRefused(range.key())) return Denied();
      v1::EtcdRangeResponse response;
      const std::string end = range.range_end().empty() ? range.key() + '\0' : range.range_end();
      for (auto value = values_.lower_bound(range.key()); value != values_.end() && value->first < end; ++value) {
        v1::EtcdKeyValue* const pair = response.add_kvs();
        pair->set_key(value->first);
        pair->set_value(value->second.bytes);
        pair->set_mod_revision(value->second.revision);
        pair->set_lease(value->second.lease);
      }
      *answer = response.SerializeAsString();
      return grpc::Status::OK;
    }
    std::function<void()> before;
    {
      absl::MutexLock lock(&mutex_);
      before = std::exchange(before_, nullptr);
    }
    if (before) before();
    v1::EtcdTxnRequest txn;
    (void)txn.ParseFromString(question);
    absl::MutexLock lock(&mutex_);
    if (IsRefused(txn.compare(0).key())) return Denied();
    Value& value = values_[txn.compare(0).key()];
    v1::EtcdTxnResponse response;
    response.set_succeeded(value.revision == txn.compare(0).mod_revision());
    if (response.succeeded() && txn.success(0).has_put()) {
      value = {txn.success(0).put().value(), ++revision_, txn.success(0).put().lease()};
    }
    if (value.revision == 0 || (response.succeeded() && txn.success(0).has_delete_range())) {
      values_.erase(txn.compare(0).key());
    }
    *answer = response.SerializeAsString();
    if (!std::exchange(lose_, false)) return grpc::Status::OK;
    return grpc::Status(grpc::StatusCode::UNAVAILABLE, "the answer is lost");
  }

  grpc::Status CarryLease(const std::string& method, const std::string& question, std::string* answer) {
    absl::MutexLock lock(&mutex_);
    if (absl::EndsWith(method, "/LeaseGrant")) {
      v1::EtcdLeaseGrantResponse response;
      response.set_id(++leases_);
      *answer = response.SerializeAsString();
    } else if (absl::EndsWith(method, "/LeaseKeepAlive")) {
      v1::EtcdLeaseKeepAliveResponse response;
      response.set_ttl_seconds(10);
      ++kept_leases_;
      *answer = response.SerializeAsString();
    } else {
      v1::EtcdLeaseRevokeRequest revoke;
      (void)revoke.ParseFromString(question);
      for (auto value = values_.begin(); value != values_.end();) {
        value = value->second.lease == revoke.id() ? values_.erase(value) : std::next(value);
      }
    }
    return grpc::Status::OK;
  }

  bool IsRefused(const std::string& key) const ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return !refused_.empty() && absl::StrContains(key, refused_);
  }
  static grpc::Status Denied() { return grpc::Status(grpc::StatusCode::PERMISSION_DENIED, "permission denied"); }

  std::string url_;
  std::unique_ptr<grpc::Server> server_;
  mutable absl::Mutex mutex_;
  std::map<std::string, Value> values_ ABSL_GUARDED_BY(mutex_);
  int64_t revision_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t leases_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t kept_leases_ ABSL_GUARDED_BY(mutex_) = 0;
  bool lose_ ABSL_GUARDED_BY(mutex_) = false;
  bool silent_ ABSL_GUARDED_BY(mutex_) = false;
  std::string refused_ ABSL_GUARDED_BY(mutex_);  // empty: nothing is
  std::function<void()> before_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ballast::client
