// Gradients that a session was given for the step in the making, and their norms.
#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/client/session/session_impl.h"
#include "ballast/proto/model/status.h"
#include "ballast/proto/model/verdict.h"

namespace ballast::client {
namespace {

// Rank 0's message to the other ranks: norms follow, or all send their gradients again first.
constexpr char kNorms[] = "n", kResend[] = "r";
constexpr int kNormTriesMax = 4;

template <typename T>
absl::Span<const std::byte> Bytes(absl::Span<const T> values) {
  return {reinterpret_cast<const std::byte*>(values.data()), values.size() * sizeof(T)};
}

}  // namespace

absl::Status Session::Impl::Push(uint32_t unit, absl::Span<const std::byte> gradient, uint64_t element_bytes,
                                 absl::Span<const std::string> absent) {
  BALLAST_RETURN_IF_ERROR(CheckReadable(unit));
  BALLAST_RETURN_IF_ERROR(CheckElement("gradients", seat.optimizer.gradient, element_bytes));
  const absl::Time start = absl::Now();
  const absl::Status status = gradients.Push(unit, gradient, absent);
  push_seconds += absl::ToDoubleSeconds(absl::Now() - start);
  return status;
}

absl::Status Session::Push(uint32_t unit, absl::Span<const bf16> gradient, absl::Span<const std::string> absent) {
  return impl_->Push(unit, Bytes(gradient), sizeof(bf16), absent);
}

absl::Status Session::Push(uint32_t unit, absl::Span<const float> gradient, absl::Span<const std::string> absent) {
  return impl_->Push(unit, Bytes(gradient), sizeof(float), absent);
}

absl::Status Session::PushBorrowed(uint32_t unit, std::vector<GradientRun> runs, absl::Span<const std::string> absent,
                                   const std::shared_ptr<const void>& owner) {
  BALLAST_RETURN_IF_ERROR(impl_->CheckReadable(unit));
  const absl::Time start = absl::Now();
  const absl::Status status = impl_->gradients.PushBorrowed(unit, std::move(runs), absent, owner);
  impl_->push_seconds += absl::ToDoubleSeconds(absl::Now() - start);
  return status;
}

void Session::ReturnGradients() {
  if (!impl_->forked()) impl_->gradients.Return();
}

absl::Status Session::Accumulate(uint32_t unit, absl::Span<const float> gradient,
                                 absl::Span<const std::string> absent) {
  BALLAST_RETURN_IF_ERROR(impl_->CheckReadable(unit));
  const absl::Time start = absl::Now();
  const absl::Status status = impl_->gradients.Accumulate(unit, gradient, absent);
  impl_->push_seconds += absl::ToDoubleSeconds(absl::Now() - start);
  return status;
}

absl::StatusOr<v1::NormResponse> Session::Impl::AskNorms(const std::string& presence) {
  v1::NormRequest request;
  request.set_job(seat.job);
  *request.mutable_epoch() = seat.epoch();
  request.set_step(seat.version + 1);
  request.set_attempt(seat.attempt);
  request.set_gradient_presence(presence);
  BALLAST_ASSIGN_OR_RETURN(
      auto answers, (router->CallAll<v1::NormRequest, v1::NormResponse>(
                        &Transport::Norm, absl::StrCat("Norm of step ", request.step()), request, seat.Deadline())));
  v1::NormResponse all;
  for (v1::NormResponse& answer : answers) {
    for (v1::ChunkNorm& norm : *answer.mutable_norms()) *all.add_norms() = std::move(norm);
  }
  return all;
}

absl::StatusOr<const std::vector<v1::ChunkNorm>*> Session::Impl::Norms(const std::string& what, absl::Status mine) {
  std::string presence, answered;
  for (int tries = 1; answered.empty(); ++tries) {
    v1::StepHeader header;
    header.set_kind(v1::STEP_KIND_UPDATE);
    auto agreed = Settle(what, std::exchange(mine, absl::OkStatus()), std::move(header), "", nullptr);
    if (!agreed.ok()) return Conclude(agreed.status());
    presence = agreed->header.gradient_presence();
    if (norm_cache.version == seat.version && norm_cache.attempt == seat.attempt && norm_cache.presence == presence) {
      return &norm_cache.norms;
    }
    // Rank 0 asks for all ranks: if each asked for itself, a faster rank could drop the gradients that a slower rank
    // asks about.
    absl::StatusOr<v1::NormResponse> answer = v1::NormResponse();
    if (seat.rank() == 0 && std::any_of(presence.begin(), presence.end(), [](char c) { return c != 0; })) {
      answer = AskNorms(presence);
    }
    // A restarted server has lost slices that were not yet in its log.
    const bool lost = model::ReasonOf(answer.status()) == model::kIncomplete && tries < kNormTriesMax;
    auto shared = group.Agree(what, lost ? absl::OkStatus() : answer.status(),
                              lost || !answer.ok() ? kResend : absl::StrCat(kNorms, answer->SerializeAsString()));
    if (!shared.ok()) return Conclude(shared.status());
    if ((*shared)[0] == kResend) {
      if (absl::Status sent = gradients.ResendAll(presence); !sent.ok()) return Conclude(std::move(sent));
    } else {
      answered = (*shared)[0];
    }
  }
  v1::NormResponse all;
  if (!absl::StartsWith(answered, kNorms) || !all.ParseFromString(answered.substr(1))) {
    return model::Error(absl::StatusCode::kInternal, model::kBadRequest, "rank 0 sent no norms");
  }
  norm_cache = {seat.version, seat.attempt, presence, {all.norms().begin(), all.norms().end()}};
  std::sort(norm_cache.norms.begin(), norm_cache.norms.end(),
            [](const v1::ChunkNorm& a, const v1::ChunkNorm& b) { return a.chunk() < b.chunk(); });
  return &norm_cache.norms;
}

absl::StatusOr<double> Session::Norm() {
  BALLAST_RETURN_IF_ERROR(impl_->CheckReadable(0));
  BALLAST_ASSIGN_OR_RETURN(const auto* norms, impl_->Norms("Norm", absl::OkStatus()));
  std::vector<const v1::ChunkNorm*> list;
  for (const v1::ChunkNorm& norm : *norms) {
    if (norm.overflow()) return std::numeric_limits<double>::infinity();
    list.push_back(&norm);
  }
  BALLAST_ASSIGN_OR_RETURN(const double squared, model::GlobalSquaredNorm(list));
  return std::sqrt(squared);
}

absl::StatusOr<double> Session::TensorNorm(absl::string_view tensor) {
  BALLAST_RETURN_IF_ERROR(impl_->CheckReadable(0));
  const auto index = impl_->seat.units->layout().FindTensor(tensor);
  BALLAST_ASSIGN_OR_RETURN(const auto* norms,
                           impl_->Norms(absl::StrCat("TensorNorm of '", tensor, "'"), index.status()));
  double squared = 0;
  for (const v1::ChunkNorm& norm : *norms) {
    for (const v1::SegmentNorm& segment : norm.segments()) {
      if (segment.tensor() != *index) continue;
      if (norm.overflow()) return std::numeric_limits<double>::infinity();
      squared += segment.squared_norm();
    }
  }
  return std::sqrt(squared);
}

}  // namespace ballast::client
