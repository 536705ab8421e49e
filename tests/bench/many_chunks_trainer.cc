// A job of many small chunks on servers that etcd names: each tensor is a unit of its own, and so a chunk. Each step
// pushes the gradient of one of them. Prints a line per step until SIGTERM. members.py changes the job's servers
// meanwhile.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ballast/client/collective/loopback_collective.h"
#include "ballast/client/grpc_transport.h"
#include "ballast/client/session.h"
#include "ballast/proto/base/status.h"

namespace ballast::client {
namespace {

constexpr uint64_t kElements = 256;  // of a chunk: the alignment of tensors

std::atomic<bool> stop{false};

struct Flags {
  std::vector<std::string> servers;
  std::string job;
  uint32_t chunks = 10000;
};

absl::Status Run(const Flags& flags) {
  TuneProgram();
  std::vector<TensorSpec> tensors;
  for (uint32_t i = 0; i < flags.chunks; ++i) {
    const std::string name = absl::StrCat("t", i);
    tensors.push_back({.name = name, .unit = name, .shape = {kElements}});
  }
  SessionOptions options;
  options.job = flags.job;
  options.chunk_elements = uint64_t{1} << 16;
  options.replicas = 2;
  options.durability = v1::DURABILITY_NONE;  // a log would have a block of the disk for each chunk and step
  options.progress = [](const std::string& line) { std::fprintf(stderr, "%s\n", line.c_str()); };
  const std::unique_ptr<Collective> collective = std::move(MakeLoopbackGroup(1).front());
  BALLAST_ASSIGN_OR_RETURN(const auto session, Session::Connect(options, tensors, flags.servers, collective.get()));
  BALLAST_RETURN_IF_ERROR(session->Initialise(
      [](absl::string_view, uint64_t, absl::Span<float> values) { std::fill(values.begin(), values.end(), 1.0f); }));
  const std::vector<bf16> gradient(kElements, 0x3c00);
  while (!stop.load()) {
    const auto unit = static_cast<uint32_t>(session->version() % flags.chunks);
    BALLAST_RETURN_IF_ERROR(session->Push(unit, gradient));
    BALLAST_ASSIGN_OR_RETURN(const StepReport report, session->Step({.groups = {GroupHyper()}}));
    std::printf("step %lld/\n", static_cast<long long>(report.version));
    std::fflush(stdout);
  }
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  Flags flags;
  CLI::App app("Trains a job of many small chunks until SIGTERM.", "many_chunks_trainer");
  app.add_option("--servers", flags.servers)->required()->delimiter(',');
  app.add_option("--job", flags.job)->required();
  app.add_option("--chunks", flags.chunks)->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  std::signal(SIGTERM, [](int) { stop.store(true); });
  const absl::Status status = Run(flags);
  if (status.ok()) return 0;
  std::fprintf(stderr, "many_chunks_trainer: %s [%s]\n", std::string(status.message()).c_str(),
               model::ReasonOf(status).c_str());
  return 1;
}

}  // namespace
}  // namespace ballast::client

int main(int argc, char** argv) { return ballast::client::Main(argc, argv); }
