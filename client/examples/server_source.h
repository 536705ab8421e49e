// Parameters on state servers: each unit is prefetched, acquired, and dropped when the next unit comes.
#pragma once

#include <memory>
#include <vector>

#include "ballast/client/examples/bytes_lm/model.h"
#include "ballast/client/examples/parameter_source.h"
#include "ballast/client/session.h"

namespace ballast::client {

// The model's tensors as Session::Open wants them.
std::vector<TensorSpec> SessionTensors(const ModelShape& shape);

class ServerSource : public ParameterSource {
 public:
  // COLLECTIVE. A new job gets the initial values of `seed`. `session` was opened with SessionTensors(shape) and
  // kGroupCount groups.
  static absl::StatusOr<std::unique_ptr<ServerSource>> Create(std::unique_ptr<Session> session, const ModelShape& shape,
                                                              uint64_t seed);

  // The number of training steps that the model has taken. A restore is a transaction of its own, and a job's version
  // only grows: after a restore the session's version is larger than this count.
  int64_t version() const override { return session_->version() - ahead_; }
  void SetAhead(int64_t ahead) { ahead_ = ahead; }
  uint64_t unit_elements(uint32_t unit) const override { return session_->unit_elements(units_[unit]); }
  absl::StatusOr<uint64_t> Locate(const std::string& tensor) const override;
  std::vector<Ranges> OwnedRanges(uint32_t unit) const override;
  void Prefetch(uint32_t unit) override { session_->Prefetch(units_[unit]); }
  absl::Status Acquire(uint32_t unit, absl::Span<float> parameters) override;
  absl::Status Push(uint32_t unit, absl::Span<const float> gradient) override;
  absl::StatusOr<v1::Verdict> FinishStep(const v1::StepHeader& header, const std::string& blob) override;
  absl::Status ReadMaster(const std::string& tensor, absl::Span<float> to) override;

  const Session& session() const { return *session_; }

 private:
  explicit ServerSource(std::unique_ptr<Session> session) : session_(std::move(session)) {}

  std::unique_ptr<Session> session_;
  int64_t ahead_ = 0;
  std::vector<uint32_t> units_;  // the session's index of each of the model's units
  std::vector<bf16> rounded_;
};

}  // namespace ballast::client
