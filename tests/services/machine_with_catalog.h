// This machine with a catalog that counts its writes.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "ballast/tests/services/machine_with_disk.h"

namespace ballast::services {

// For one server at a time.
class MachineWithCatalog : public ThisMachine {
 public:
  absl::StatusOr<std::unique_ptr<storage::Catalog>> OpenCatalog(const std::string& directory) override;
  // How often the key was put.
  int writes(const std::string& key) const ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    const auto found = writes_.find(key);
    return found == writes_.end() ? 0 : found->second;
  }
  // While the server runs.
  std::vector<std::string> Keys(absl::string_view prefix) const {
    std::vector<std::string> keys;
    const auto pairs = catalog_->List(prefix);
    if (!pairs.ok()) return keys;
    for (const auto& [key, value] : *pairs) keys.push_back(key);
    return keys;
  }

 private:
  using Pairs = absl::Span<const std::pair<std::string, std::string>>;
  class Counted;
  void Note(absl::string_view key) ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    ++writes_[std::string(key)];
  }

  storage::Catalog* catalog_ = nullptr;
  mutable absl::Mutex mu_;
  std::map<std::string, int> writes_ ABSL_GUARDED_BY(mu_);
};

class MachineWithCatalog::Counted : public storage::Catalog {
 public:
  Counted(std::unique_ptr<storage::Catalog> catalog, MachineWithCatalog* machine)
      : catalog_(std::move(catalog)), machine_(machine) {}
  absl::Status Put(absl::string_view key, absl::string_view value, Sync sync) override {
    machine_->Note(key);
    return catalog_->Put(key, value, sync);
  }
  absl::Status PutAll(Pairs pairs) override {
    for (const auto& [key, value] : pairs) machine_->Note(key);
    return catalog_->PutAll(pairs);
  }
  absl::StatusOr<std::optional<std::string>> Get(absl::string_view key) const override { return catalog_->Get(key); }
  absl::Status ErasePrefix(absl::string_view prefix) override { return catalog_->ErasePrefix(prefix); }
  absl::Status Erase(absl::Span<const std::string> keys) override { return catalog_->Erase(keys); }
  absl::Status Replace(absl::Span<const std::string> prefixes, Pairs pairs) override {
    for (const auto& [key, value] : pairs) machine_->Note(key);
    return catalog_->Replace(prefixes, pairs);
  }
  absl::StatusOr<std::vector<std::pair<std::string, std::string>>> List(absl::string_view prefix) const override {
    return catalog_->List(prefix);
  }

 private:
  const std::unique_ptr<storage::Catalog> catalog_;
  MachineWithCatalog* const machine_;
};

inline absl::StatusOr<std::unique_ptr<storage::Catalog>> MachineWithCatalog::OpenCatalog(const std::string& directory) {
  auto catalog = ThisMachine::OpenCatalog(directory);
  if (!catalog.ok()) return catalog;
  auto counted = std::make_unique<Counted>(*std::move(catalog), this);
  catalog_ = counted.get();
  return counted;
}

}  // namespace ballast::services
