#include "ballast/tests/sim_server/sim_catalog.h"

#include "absl/strings/match.h"
#include "ballast/proto/base/status.h"

namespace ballast::sim {
namespace {

absl::Status Gone() {
  return model::Error(absl::StatusCode::kInternal, model::kIo, "the catalog cannot be written: the machine is off");
}

}  // namespace

class SimCatalog::Handle : public storage::Catalog {
 public:
  Handle(SimCatalog* catalog, uint64_t life) : catalog_(catalog), life_(life) {}

  absl::Status Put(absl::string_view key, absl::string_view value, Sync sync) override {
    return catalog_->Write(life_, {{std::string(key), std::string(value)}}, sync);
  }
  absl::Status PutAll(absl::Span<const std::pair<std::string, std::string>> pairs) override {
    if (life_ == catalog_->life_ && catalog_->watch_) catalog_->watch_(Watched::kPutAll);
    return catalog_->Write(life_, {pairs.begin(), pairs.end()}, Sync::kSynced);
  }
  absl::StatusOr<std::optional<std::string>> Get(absl::string_view key) const override {
    if (life_ != catalog_->life_) return Gone();
    const auto found = catalog_->newest_.find(std::string(key));
    return found == catalog_->newest_.end() ? std::nullopt : std::make_optional(found->second);
  }
  absl::Status ErasePrefix(absl::string_view prefix) override { return catalog_->Erase(life_, std::string(prefix)); }
  absl::Status Erase(absl::Span<const std::string> keys) override {
    if (life_ == catalog_->life_ && catalog_->watch_) catalog_->watch_(Watched::kErase);
    return catalog_->Erase(life_, keys);
  }
  absl::Status Replace(absl::Span<const std::string> prefixes,
                       absl::Span<const std::pair<std::string, std::string>> pairs) override {
    return catalog_->Replace(life_, prefixes, {pairs.begin(), pairs.end()});
  }
  absl::StatusOr<Pairs> List(absl::string_view prefix) const override {
    if (life_ != catalog_->life_) return Gone();
    Pairs out;
    for (const auto& pair : catalog_->newest_) {
      if (absl::StartsWith(pair.first, prefix)) out.push_back(pair);
    }
    return out;
  }

 private:
  SimCatalog* const catalog_;
  const uint64_t life_;
};

std::unique_ptr<storage::Catalog> SimCatalog::Open() { return std::make_unique<Handle>(this, ++life_); }

std::unique_ptr<storage::Catalog> SimCatalog::Look() { return std::make_unique<Handle>(this, life_); }

void SimCatalog::Crash() {
  ++life_;
  writes_to_crash_ = writes_to_failure_ = 0;
  unsynced_.resize(random_.Below(unsynced_.size() + 1));
  newest_ = durable_;
  for (const auto& [key, value] : unsynced_) newest_[key] = value;
  Flush();
}

void SimCatalog::CrashAfter(uint64_t writes, std::function<void()> lose, Count count) {
  writes_to_crash_ = writes;
  lose_ = std::move(lose);
  crash_counts_ = count;
}

absl::Status SimCatalog::Begin(uint64_t life) {
  if (life != life_ || life == failed_life_) return Gone();
  ++writes_;
  if (writes_to_failure_ > 0 && --writes_to_failure_ == 0) {
    failed_life_ = life;
    return Gone();
  }
  return absl::OkStatus();
}

bool SimCatalog::Strikes(Count kind) {
  const bool counts = kind == Count::kPuts || crash_counts_ == Count::kAll;
  return counts && writes_to_crash_ > 0 && --writes_to_crash_ == 0;
}

absl::Status SimCatalog::Write(uint64_t life, const Pairs& pairs, storage::Catalog::Sync sync) {
  BALLAST_RETURN_IF_ERROR(Begin(life));
  const bool crash = Strikes(Count::kPuts);
  if (!crash || random_.Percent(50)) {
    for (const auto& [key, value] : pairs) {
      newest_[key] = value;
      unsynced_.emplace_back(key, value);
    }
    if (sync != storage::Catalog::Sync::kUnsynced) Flush();
  }
  if (!crash) return absl::OkStatus();
  ++life_;
  lose_();
  return Gone();
}

absl::Status SimCatalog::Change(uint64_t life, absl::FunctionRef<void()> change) {
  BALLAST_RETURN_IF_ERROR(Begin(life));
  const bool crash = Strikes(Count::kAll);
  if (!crash || random_.Percent(50)) {
    change();
    Flush();
  }
  if (!crash) return absl::OkStatus();
  ++life_;
  lose_();
  return Gone();
}

absl::Status SimCatalog::Erase(uint64_t life, const std::string& prefix) {
  return Change(
      life, [&] { std::erase_if(newest_, [&](const auto& pair) { return absl::StartsWith(pair.first, prefix); }); });
}

absl::Status SimCatalog::Erase(uint64_t life, absl::Span<const std::string> keys) {
  return Change(life, [&] {
    for (const std::string& key : keys) newest_.erase(key);
  });
}

absl::Status SimCatalog::Replace(uint64_t life, absl::Span<const std::string> prefixes, const Pairs& pairs) {
  return Change(life, [&] {
    for (const std::string& prefix : prefixes) {
      std::erase_if(newest_, [&](const auto& pair) { return absl::StartsWith(pair.first, prefix); });
    }
    for (const auto& [key, value] : pairs) newest_[key] = value;
  });
}

}  // namespace ballast::sim
