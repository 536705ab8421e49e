#include "ballast/services/gateway/grpc_threads.h"

#include <grpc/support/cpu.h>
#include <grpcpp/alarm.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/base/threads.h"

namespace ballast::services {
namespace {

// A thread of its executor gets a third piece of work only once there is a further thread, if there may be one.
constexpr int kPiecesPerThread = 3;
// Pieces that end at once; the machine may be busy.
constexpr absl::Duration kThreadPatience = absl::Minutes(1);

int Processors() { return std::max(1, static_cast<int>(gpr_cpu_num_cores())); }
int ExecutorThreads() { return 2 * Processors(); }

// Its pools for events and for completions, and those for timers and names.
int ThreadsOfGrpc() {
  return ExecutorThreads() + std::clamp(Processors(), 2, 32) + std::clamp(Processors() / 2, 2, 16) + 5;
}

// Pieces that hold up their threads until all are given out. One that has no thread never runs, and keeps this.
class Pieces {
 public:
  explicit Pieces(int count) : left_(count) {}
  void RunOne() {
    given_out_.WaitForNotification();
    absl::MutexLock lock(&mu_);
    --left_;
  }
  // False: not all run.
  bool RunAll() {
    given_out_.Notify();
    absl::MutexLock lock(&mu_);
    const auto none = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return left_ == 0; };
    return mu_.AwaitWithTimeout(absl::Condition(&none), kThreadPatience);
  }

 private:
  absl::Notification given_out_;
  absl::Mutex mu_;
  int left_ ABSL_GUARDED_BY(mu_);
};

absl::Status NeededByGrpc(const absl::Status& refused) {
  return model::Annotate(refused, absl::StrCat("gRPC makes up to ", ThreadsOfGrpc(), " threads on a machine of ",
                                               Processors(), " processors"));
}

}  // namespace

absl::Status CheckRoomForGrpc() {
  const absl::Status status = model::CheckThreads(ThreadsOfGrpc());
  return status.ok() ? status : NeededByGrpc(status);
}

absl::Status MakeThreadsOfGrpc() {
  const int count = kPiecesPerThread * ExecutorThreads();
  const auto pieces = std::make_shared<Pieces>(count);
  std::vector<grpc::Alarm> alarms(static_cast<size_t>(count));
  for (grpc::Alarm& alarm : alarms) {
    alarm.Set(absl::ToChronoTime(absl::UnixEpoch()), [pieces](bool) { pieces->RunOne(); });
  }
  if (pieces->RunAll()) return absl::OkStatus();
  const model::ThreadLimit limit = model::ThreadsAllowed();
  return NeededByGrpc(model::Error(
      absl::StatusCode::kResourceExhausted, model::kLimit,
      absl::StrCat("a thread of gRPC's was not made; the lowest limit is ", limit.name, " = ", limit.max)));
}

}  // namespace ballast::services
