// The same request to all of a job's servers.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ballast/client/transport.h"
#include "ballast/client/transport/answers.h"
#include "ballast/client/transport/router.h"
#include "ballast/client/transport/routes.h"
#include "ballast/client/transport/tally.h"

namespace ballast::client {

// Sends the same request to every server, or to the first `servers`. Returns all answers in order of servers, or the
// first error. If the job's servers change meanwhile, it asks the new servers. AskAll does not.
template <typename Request, typename Response>
absl::StatusOr<std::vector<Response>> CallAll(Router* router, Router::Method<Request, Response> method,
                                              const std::string& what, const Request& request, absl::Time deadline,
                                              uint32_t servers = std::numeric_limits<uint32_t>::max()) {
  struct State {
    Tally tally;
    std::vector<Response> answers;
  };
  const auto shared = std::make_shared<const Request>(request);
  for (;;) {
    auto state = std::make_shared<State>();
    const std::shared_ptr<const Routes> chosen_by = router->routes();
    std::vector<Transport*> called =
        chosen_by != nullptr && chosen_by->may_change() ? chosen_by->servers : router->servers_now();
    called.resize(std::min<size_t>(servers, called.size()));
    state->answers.resize(called.size());
    state->tally.Start(static_cast<int>(called.size()));
    for (size_t i = 0; i < called.size(); ++i) {
      router->Call<Request, Response>(
          method, called[i], what, shared, deadline,
          [state, i](absl::StatusOr<Response> answer) {
            if (answer.ok()) state->answers[i] = std::move(*answer);
            state->tally.Finish(answer.status());
          },
          chosen_by);
    }
    const absl::Status status = state->tally.Wait();
    if (status.ok()) return std::move(state->answers);
    if (!AreRoutesChanged(status)) return status;
  }
}

// Sends the same request to every server and returns at once.
template <typename Request, typename Response>
std::shared_ptr<Answers<Response>> AskAll(Router* router, Router::Method<Request, Response> method,
                                          const std::string& what, const Request& request, absl::Time deadline) {
  const std::vector<Transport*> servers = router->servers_now();
  auto answers = std::make_shared<Answers<Response>>(static_cast<uint32_t>(servers.size()));
  const auto shared = std::make_shared<const Request>(request);
  for (uint32_t i = 0; i < servers.size(); ++i) {
    router->Call<Request, Response>(
        method, servers[i], what, shared, deadline,
        [answers, i](absl::StatusOr<Response> answer) { answers->Add(i, std::move(answer)); });
  }
  return answers;
}

}  // namespace ballast::client
