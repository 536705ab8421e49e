// Threads and a catalog for tests of a job's parts: what is posted runs when the test says so.
#pragma once

#include <algorithm>
#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/synchronization/mutex.h"
#include "ballast/services/job_state/foundation.h"

namespace ballast::services {

// Threads: any may post; one runs.
class OneThread : public Foundation {
 public:
  explicit OneThread(storage::Disk* disk) : disk_(disk) {}

  storage::Disk* disk() override { return disk_; }
  absl::StatusOr<std::unique_ptr<storage::Catalog>> OpenCatalog(const std::string&) override {
    return absl::UnimplementedError("a test has a catalog of its own");
  }
  std::unique_ptr<Executor> MakeExecutor(int) override { return std::make_unique<Queue>(this); }
  absl::Status Pump(storage::GradientLog* log, std::function<void()> progress) override {
    log->set_progress(std::move(progress));
    logs_.push_back(log);
    return absl::OkStatus();
  }
  void StopPumping(storage::GradientLog* log) override { std::erase(logs_, log); }

  // Runs what was posted, and writes what was logged, until nothing is left to do.
  void RunAll() {
    for (bool busy = true; busy;) {
      busy = RunOne(nullptr);
      for (storage::GradientLog* log : std::vector(logs_)) busy = log->Pump(/*wait=*/true) || busy;
    }
  }

 private:
  class Queue : public Executor {
   public:
    explicit Queue(OneThread* thread) : thread_(thread) {}
    ~Queue() override { Join(); }
    void Join() override {
      while (thread_->RunOne(this)) {
      }
      ended_ = true;
    }
    void Post(std::function<void()> work) override {
      if (ended_) return;
      absl::MutexLock lock(&thread_->mu_);
      thread_->posted_.emplace_back(this, std::move(work));
    }

   private:
    OneThread* const thread_;
    std::atomic<bool> ended_ = false;
  };

  // The first of `queue`, or of all. False if there is none.
  bool RunOne(const Queue* queue) {
    std::function<void()> work;
    {
      absl::MutexLock lock(&mu_);
      const auto first = std::find_if(posted_.begin(), posted_.end(),
                                      [&](const auto& each) { return queue == nullptr || each.first == queue; });
      if (first == posted_.end()) return false;
      work = std::move(first->second);
      posted_.erase(first);
    }
    work();
    return true;
  }

  storage::Disk* const disk_;
  std::vector<storage::GradientLog*> logs_;
  absl::Mutex mu_;
  std::deque<std::pair<const Queue*, std::function<void()>>> posted_ ABSL_GUARDED_BY(mu_);
};

// Threads: one.
class MapCatalog : public storage::Catalog {
 public:
  absl::Status Put(absl::string_view key, absl::string_view value, Sync) override {
    if (fails.ok()) entries[std::string(key)] = std::string(value);
    return fails;
  }
  absl::Status PutAll(absl::Span<const std::pair<std::string, std::string>> pairs) override {
    for (const auto& [key, value] : pairs) (void)Put(key, value, Sync::kSynced);
    return fails;
  }
  absl::StatusOr<std::optional<std::string>> Get(absl::string_view key) const override {
    const auto found = entries.find(std::string(key));
    return found == entries.end() ? std::nullopt : std::optional(found->second);
  }
  absl::Status ErasePrefix(absl::string_view prefix) override {
    if (fails.ok()) std::erase_if(entries, [&](const auto& entry) { return absl::StartsWith(entry.first, prefix); });
    return fails;
  }
  absl::Status Erase(absl::Span<const std::string> keys) override {
    for (const std::string& key : keys) {
      if (fails.ok()) entries.erase(key);
    }
    return fails;
  }
  absl::Status Replace(absl::Span<const std::string> prefixes,
                       absl::Span<const std::pair<std::string, std::string>> pairs) override {
    for (const std::string& prefix : prefixes) (void)ErasePrefix(prefix);
    return PutAll(pairs);
  }
  absl::StatusOr<std::vector<std::pair<std::string, std::string>>> List(absl::string_view prefix) const override {
    std::vector<std::pair<std::string, std::string>> found;
    for (const auto& entry : entries) {
      if (absl::StartsWith(entry.first, prefix)) found.emplace_back(entry);
    }
    return found;
  }

  std::map<std::string, std::string> entries;
  absl::Status fails;  // what every write returns
};

}  // namespace ballast::services
