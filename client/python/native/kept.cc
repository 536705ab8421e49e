#include "ballast/client/python/native/kept.h"

#include <deque>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace ballast::python {
namespace {

class Ends {
 public:
  Ends() {
    std::thread([this] { Run(); }).detach();
  }

  void Add(absl::AnyInvocable<void() &&> end) {
    absl::MutexLock lock(&mutex_);
    ends_.push_back(std::move(end));
  }

 private:
  void Run() {
    for (;;) {
      std::deque<absl::AnyInvocable<void() &&>> ends;
      {
        absl::MutexLock lock(&mutex_);
        mutex_.Await(absl::Condition(
            +[](decltype(ends)* waiting) { return !waiting->empty(); }, &ends_));
        ends.swap(ends_);
      }
      const nanobind::gil_scoped_acquire lock;
      for (auto& end : ends) std::move(end)();
    }
  }

  absl::Mutex mutex_;
  std::deque<absl::AnyInvocable<void() &&>> ends_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

void EndLater(absl::AnyInvocable<void() &&> end) {
  static Ends* const ends = new Ends;  // never destroyed: its thread waits until the process ends
  ends->Add(std::move(end));
}

}  // namespace ballast::python
