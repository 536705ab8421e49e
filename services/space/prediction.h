// How long a job's step takes on this server, as its newest plan predicts.
#pragma once

#include <optional>
#include <utility>

#include "ballast/services/job_state/job_mutex.h"
#include "ballast/storage/placement/step_prediction.h"
#include "ballast/storage/store/chunk_store.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::services {

class JobCore;

v1::StepPrediction PredictionMessage(const storage::StepPrediction& prediction);

class Prediction {
 public:
  explicit Prediction(JobCore* core) : core_(core) {}

  // Everything that a prediction needs beside the places of the chunks; of_job() lacks what the store tells.
  storage::StepShape of_job() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  storage::StepShape ShapeOf(const storage::ChunkStore& store) const ABSL_LOCKS_EXCLUDED(job_lock);

  // The newest plan's prediction; none before the first plan, and where the machine was not measured.
  const std::optional<storage::StepPrediction>& newest() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) {
    return newest_;
  }
  void Set(std::optional<storage::StepPrediction> prediction) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) {
    newest_ = std::move(prediction);
  }

 private:
  JobCore* const core_;
  std::optional<storage::StepPrediction> newest_ ABSL_GUARDED_BY(job_lock);
};

}  // namespace ballast::services
