// Checks a session's options against the job that exists.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "ballast/client/discovery/job_key.h"
#include "ballast/client/session_types.h"
#include "ballast/v1/registry.pb.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::client {

// ALREADY_EXISTS (JOB_EXISTS).
absl::Status JobExists(const std::string& job, int64_t version);
// NOT_FOUND (JOB_MISSING).
absl::Status JobMissing(const std::string& job);
// Whether a job at `base` (-1: it is new) may be opened with the session's `resume`. JOB_EXISTS, JOB_MISSING.
absl::Status CheckResume(const SessionOptions& options, int64_t base);
// Checks that the session's `replicas`, if it names a number, is the job's. `newest`: the job's newest Open; null if no
// server has the job. If an operator wishes for a number (`wish`), the session's is ignored. FAILED_PRECONDITION
// (BAD_CONFIG, KEY_LOST); UNIMPLEMENTED (UNSUPPORTED).
absl::Status CheckCopies(const SessionOptions& options, const v1::OpenRequest* newest, const JobKey& key,
                         const v1::Wish& wish);
// INVALID_ARGUMENT (BAD_SPEC): rank `rank` asks for `other`, and rank 0 for `first`.
absl::Status Differs(const v1::OpenRequest& other, uint32_t rank, const v1::OpenRequest& first);

}  // namespace ballast::client
