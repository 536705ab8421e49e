// A user's program outside the tree: installed headers and Ballast::client, nothing else.
#include <cstdio>

#include "ballast/client/collective/file_rendezvous.h"
#include "ballast/client/collective/gloo_collective.h"
#include "ballast/client/collective/gradient_tree.h"
#include "ballast/client/collective/loopback_collective.h"
#include "ballast/client/grpc_transport.h"
#include "ballast/client/session.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/status.h"  // where the header was: forwards until 0.2.0

int main(int argc, char** argv) {
  const std::string server = argc > 1 ? argv[1] : "127.0.0.1:1";
  const auto seats = ballast::client::MakeLoopbackGroup(1);
  ballast::client::SessionOptions options;
  options.job = "consumer";
  options.open_timeout = absl::Milliseconds(300);
  const auto session = ballast::client::Session::Connect(options, {{.name = "w", .unit = "layer", .shape = {16, 16}}},
                                                         {server}, seats[0].get());
  std::printf("%s\n", session.ok() ? "connected" : std::string(session.status().message()).c_str());
  return session.ok() || ballast::model::ReasonOf(session.status()) == ballast::model::kServerDown ? 0 : 1;
}
