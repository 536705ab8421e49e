// One rank's open job over a server that answers as the test says.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ballast/client/transactions/norms.h"
#include "ballast/client/transactions/transactions.h"
#include "ballast/kernels/float_formats.h"
#include "ballast/tests/client/fake_server.h"
#include "gtest/gtest.h"

namespace ballast::client {

// One rank's session of a job on one server.
struct RankOfJob {
  RankOfJob(Collective* collective, uint32_t world_size, int64_t base) {
    SessionOptions options;
    options.job = "job";
    auto transport = std::make_unique<FakeServer>("s0");
    server = transport.get();
    std::vector<std::unique_ptr<Transport>> servers;
    servers.push_back(std::move(transport));
    job = std::make_unique<OpenJob>(options, std::move(servers), collective);
    v1::OpenRequest open = OpenOnFakes(1, world_size);
    open.set_base(base);
    EXPECT_EQ(job->Adopt(std::make_shared<const v1::OpenRequest>(open)), absl::OkStatus());
    gradients = std::make_unique<Gradients>(&job->seat());
    gradients->Resize();
    values = std::make_unique<Values>(&job->seat());
    parameters = std::make_unique<Parameters>(&job->seat(), job->group());
    transactions = std::make_unique<Transactions>(job.get(), gradients.get(), values.get(), parameters.get());
    norms = std::make_unique<Norms>(job.get(), gradients.get(), transactions.get());
    server->on_seal = [this](const v1::SealRequest& request) {
      seals.push_back(request);
      v1::SealResponse response;
      v1::PreparedRecord* record = response.mutable_prepared();
      record->set_step(request.step());
      record->set_server_id("s0");
      *record->mutable_epoch() = request.epoch();
      record->set_attempt(request.attempt());
      record->set_plan_hash(request.plan_hash());
      *record->mutable_header() = request.header();
      return response;
    };
  }
  ~RankOfJob() {
    norms.reset();
    transactions.reset();
    parameters.reset();
    values.reset();
    gradients.reset();
  }
  absl::Status PushUnit(uint32_t unit) {
    const std::vector<kernels::bf16> gradient(job->seat().units->unit(unit).owned_elements, 1);
    return gradients->Push(unit, {reinterpret_cast<const std::byte*>(gradient.data()), 2 * gradient.size()}, {});
  }
  v1::StepHeader Update() const {
    v1::StepHeader header;
    header.set_kind(v1::STEP_KIND_UPDATE);
    header.set_gradient_scale(1);
    header.set_value_presence(model::MakeBitmap(3, {}));
    v1::GroupHyper* hyper = header.add_groups();
    hyper->set_learning_rate(rate);
    hyper->set_beta1(0.9);
    hyper->set_beta2(0.99);
    hyper->set_epsilon(1e-8);
    return header;
  }
  absl::StatusOr<StepReport> Step(absl::Status mine = absl::OkStatus(), const std::string& blob = "cursor") {
    return transactions->Transact("Step", std::move(mine), Update(), blob, values->written());
  }

  double rate = 0.1;
  FakeServer* server = nullptr;
  std::vector<v1::SealRequest> seals;
  std::unique_ptr<OpenJob> job;
  std::unique_ptr<Gradients> gradients;
  std::unique_ptr<Values> values;
  std::unique_ptr<Parameters> parameters;
  std::unique_ptr<Transactions> transactions;
  std::unique_ptr<Norms> norms;
};

}  // namespace ballast::client
