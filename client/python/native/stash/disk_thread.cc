#include "ballast/client/python/native/stash/disk_thread.h"

#include <algorithm>
#include <future>

#include "absl/status/status.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/base/threads.h"

namespace ballast::stash {

using storage::IoCompletion;
using storage::IoQueue;
using storage::IoRequest;

absl::StatusOr<std::unique_ptr<DiskThread>> DiskThread::Start(storage::Disk* disk, absl::Span<std::byte> registered,
                                                              Done done) {
  std::unique_ptr<DiskThread> made(new DiskThread(std::move(done)));
  const auto started = std::make_shared<std::promise<absl::Status>>();
  BALLAST_ASSIGN_OR_RETURN(made->thread_, model::MakeThread([started, made = made.get(), disk, registered] {
                             absl::StatusOr<std::unique_ptr<IoQueue>> queue =
                                 disk->MakeQueue({.registered = registered});
                             started->set_value(queue.status());
                             if (queue.ok()) made->Run(queue->get());
                           }));
  const absl::Status status = started->get_future().get();
  if (!status.ok()) return status;
  return made;
}

DiskThread::~DiskThread() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  if (thread_.joinable()) thread_.join();
}

void DiskThread::Hand(const IoRequest& request, Turn turn) {
  absl::MutexLock lock(&mutex_);
  turn == Turn::kFirst ? waiting_.push_front(request) : waiting_.push_back(request);
}

bool DiskThread::Withdraw(uint64_t tag) {
  absl::MutexLock lock(&mutex_);
  const auto found = std::find_if(waiting_.begin(), waiting_.end(), [&](const auto& r) { return r.tag == tag; });
  if (found == waiting_.end()) return false;
  waiting_.erase(found);
  return true;
}

bool DiskThread::Next(uint64_t in_flight, std::vector<IoRequest>* requests) {
  absl::MutexLock lock(&mutex_);
  if (in_flight == 0) mutex_.Await(absl::Condition(this, &DiskThread::HasNews));
  while (!waiting_.empty() && in_flight + requests->size() < storage::kIoRequestsMax) {
    requests->push_back(waiting_.front());
    waiting_.pop_front();
  }
  return in_flight > 0 || !requests->empty();
}

void DiskThread::Run(IoQueue* queue) {
  std::vector<IoRequest> requests;
  std::vector<IoCompletion> completions;
  while (Next(queue->in_flight(), &requests)) {
    for (const IoRequest& request : requests) {
      const absl::Status submitted = queue->Submit(request);
      if (!submitted.ok()) completions.push_back({.tag = request.tag, .status = submitted});
    }
    requests.clear();
    queue->Reap(/*wait=*/completions.empty(), &completions);
    for (const IoCompletion& completion : completions) done_(completion);
    completions.clear();
  }
}

}  // namespace ballast::stash
