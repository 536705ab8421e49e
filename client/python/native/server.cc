#include "ballast/client/python/native/server.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <pthread.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <future>

#include "absl/strings/str_cat.h"
#include "ballast/client/group/job_spec.h"
#include "ballast/client/python/native/status_error.h"
#include "ballast/services/server/estimate.h"

namespace ballast::python {
namespace {

// Waits for the answer of `call`, which gets a callback for its reply.
template <typename Response, typename Call>
Response Await(const Call& call) {
  std::promise<absl::StatusOr<Response>> answered;
  call([&](absl::StatusOr<Response> answer) { answered.set_value(std::move(answer)); });
  return Take(answered.get_future().get());
}

}  // namespace

// on_exit takes a lock of the C library: if another thread registers a handler in the instant of the fork, the child
// hangs.
void LetForkedChildrenExit() {
  static const int once = pthread_atfork(nullptr, nullptr, [] {
    on_exit(
        [](int status, void*) {
          std::fflush(nullptr);
          _exit(status);
        },
        nullptr);
  });
  (void)once;
}

PythonServer::PythonServer(const std::string& directory, uint64_t dram, uint64_t nvme, int threads, bool working_copies)
    : pid_(getpid()), threads_(threads) {
  LetForkedChildrenExit();
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (error) {
    throw StatusError(model::Error(absl::StatusCode::kInvalidArgument, model::kBadConfig,
                                   absl::StrCat("directory '", directory, "' cannot be made: ", error.message())));
  }
  services::StateServerOptions options;
  options.data_directory = directory;
  options.budget.dram = dram;
  options.budget.nvme = nvme;
  options.compute_threads = threads;
  options.read_threads = threads;
  options.working_copies = working_copies;
  server_ = Take(services::StateServer::Start(options));
}

uint64_t StagingBytes(uint64_t dram) {
  services::StateServerOptions options;
  options.budget.dram = dram;
  return services::StagingBytes(options);
}

EstimateReport EstimateFor(const std::vector<client::TensorSpec>& tensors, const OpenOptions& options, uint64_t dram,
                           uint64_t nvme, int threads, uint32_t servers, const std::string& profile,
                           bool working_copies) {
  services::EstimateRequest request;
  request.ranks = static_cast<uint32_t>(std::max(options.world_size, 0));
  request.servers = std::max<uint32_t>(servers, 1);
  request.server.budget = {.hbm = 0, .dram = dram, .nvme = nvme};
  request.server.compute_threads = threads;
  request.server.machine_profile = profile;
  request.server.working_copies = working_copies;
  request.spec = client::MakeSpec(options, tensors);
  request.spec.set_name("estimate");
  const services::Estimate estimate = Take(services::EstimateJob(request));
  EstimateReport report{.fits = estimate.fits.ok(),
                        .text = estimate.Explain(request),
                        .step_seconds = estimate.server.prediction().total_seconds(),
                        .tiers = {},
                        .parts = {},
                        .server_parameters = estimate.server_parameters,
                        .rank_bytes = estimate.whole.all(),
                        .rank_bytes_sharded = estimate.sharded.all()};
  for (const v1::PlannedTier& tier : estimate.server.tiers()) {
    report.tiers.emplace_back(tier.tier(), tier.state_bytes() + tier.working_bytes() + tier.other_bytes());
    report.parts.emplace_back(tier.tier(), tier.state_bytes(), tier.working_bytes(), tier.other_bytes());
  }
  return report;
}

PythonServer::~PythonServer() {
  if (getpid() != pid_) LeaveToParent(&server_);
}

std::shared_ptr<services::StateServer> PythonServer::server() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (server_ != nullptr) return server_;
  throw StatusError(model::Error(absl::StatusCode::kFailedPrecondition, model::kBadRequest, "the server was stopped"));
}

void PythonServer::Stop() {
  std::shared_ptr<services::StateServer> server;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    server = std::move(server_);
  }
  if (server != nullptr) server->Stop();
}

std::vector<std::string> PythonServer::Jobs() const {
  std::vector<std::string> names;
  const v1::GetServerStatusResponse status = server()->Status();
  for (const v1::JobStatus& job : status.jobs()) names.push_back(job.name());
  return names;
}

void PythonServer::Drop(const std::string& job) {
  const std::shared_ptr<services::StateServer> server = this->server();
  const v1::GetServerStatusResponse status = server->Status();
  for (const v1::JobStatus& known : status.jobs()) {
    if (known.name() != job) continue;
    v1::DropJobRequest drop;
    drop.set_job(job);
    *drop.mutable_epoch() = known.epoch();
    (void)Await<v1::DropJobResponse>([&](auto reply) { server->DropJob(drop, reply); });
  }
}

std::vector<std::pair<uint64_t, uint64_t>> PythonServer::Tiers() const {
  const v1::GetServerStatusResponse status = server()->Status();
  std::vector<std::pair<uint64_t, uint64_t>> tiers;
  for (const v1::TierStatus& tier : status.tiers()) {
    if (tier.tier() != "hbm") tiers.emplace_back(tier.capacity_bytes(), tier.used_bytes());
  }
  return tiers;
}

void BindServer(nanobind::module_& m) {
  namespace nb = nanobind;
  using nb::literals::operator""_a;
  nb::class_<PythonServer>(m, "Server")
      .def(nb::init<const std::string&, uint64_t, uint64_t, int, bool>(), "directory"_a, "dram"_a, "nvme"_a,
           "threads"_a, "working_copies"_a = false, nb::call_guard<nb::gil_scoped_release>())
      .def("stop", &PythonServer::Stop, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("jobs", &PythonServer::Jobs, nb::call_guard<nb::gil_scoped_release>())
      .def("drop", &PythonServer::Drop, "job"_a, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("tiers", &PythonServer::Tiers);
  nb::class_<EstimateReport>(m, "EstimateReport")
      .def_ro("fits", &EstimateReport::fits)
      .def_ro("text", &EstimateReport::text)
      .def_ro("step_seconds", &EstimateReport::step_seconds)
      .def_ro("tiers", &EstimateReport::tiers)
      .def_ro("parts", &EstimateReport::parts)
      .def_ro("server_parameters", &EstimateReport::server_parameters)
      .def_ro("rank_bytes", &EstimateReport::rank_bytes)
      .def_ro("rank_bytes_sharded", &EstimateReport::rank_bytes_sharded);
  m.def("staging", &StagingBytes, "dram"_a);
  m.def("estimate", &EstimateFor, "tensors"_a, "options"_a, "dram"_a, "nvme"_a, "threads"_a, "servers"_a, "profile"_a,
        "working_copies"_a, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace ballast::python
