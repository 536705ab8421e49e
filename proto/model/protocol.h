// Refuses trainers and servers of different versions, which would misunderstand each other without an error. All errors
// have the reason VERSIONS_DIFFER and name the fix.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::model {

// The version of the calls and of their meaning. proto/README.md says when it rises.
inline constexpr uint32_t kProtocolVersion = 7;

// Metadata of each call of a trainer: its kProtocolVersion, and the server that the call is meant for (TargetOf).
inline constexpr char kVersionMetadata[] = "ballast-protocol";
inline constexpr char kServerMetadata[] = "ballast-server";

// The release, "0.1.0": CMake's PROJECT_VERSION. Releases with one protocol version work together.
const char* Version();

// Member.disk for messages: 16 hexadecimal digits.
std::string ShowDisk(uint64_t disk);
// "id/number": a server by its id and Member.disk.
std::string TargetOf(absl::string_view server_id, uint64_t disk);

// Bound on a message about a job: its Open, with the norms of a server's chunks, step counts and blobs.
inline constexpr uint64_t kMessageBytesMax = uint64_t{16} << 20;

// FAILED_PRECONDITION unless `version` is kProtocolVersion. `server` names the server in the message. Version 0: the
// server does not know Identify.
absl::Status CheckServerVersion(absl::string_view server, uint32_t version);

// INVALID_ARGUMENT unless `version`, of the trainer that sent `what`, is kProtocolVersion.
absl::Status CheckSentVersion(absl::string_view what, uint32_t version);

// INVALID_ARGUMENT if `message`, or a message within it, has fields that this version does not know: names that message
// and the field's number. `checked`: a message within it that has passed.
absl::Status CheckKnown(const google::protobuf::Message& message, const google::protobuf::Message* checked = nullptr);

// SHA-256 over the fields of `spec`, each with its number. Fields with default values are left out: a field that a
// later version adds changes the digest only of jobs that use it. 32 bytes.
std::string SpecDigest(const v1::JobSpec& spec);

// INVALID_ARGUMENT if an Open has unknown fields, is of a later version, or has a spec_digest that is not its spec's.
// An Open without spec_digest passes, because logs of version 0 have such Opens; logs of versions before 5 have Opens
// without a version. kChecked: spec and digest are those of an Open that has passed, and cost nothing again.
enum class SpecIs { kUnknown, kChecked };
absl::Status CheckOpen(const v1::OpenRequest& open, SpecIs spec = SpecIs::kUnknown);

// CheckKnown and CheckSentVersion for an Open that a trainer sent. It must have a spec_digest, which EpochPlan::Make
// compares.
absl::Status CheckSentOpen(const v1::OpenRequest& open);

}  // namespace ballast::model
