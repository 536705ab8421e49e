#include "ballast/services/gateway/security/served_certificates.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ballast/proto/base/status.h"

namespace ballast::services {
namespace {

absl::Status NotWritten(absl::string_view what, absl::string_view why) {
  return model::Error(absl::StatusCode::kInternal, model::kIo,
                      absl::StrCat("the server's copy of its certificates cannot be written: ", what, ": ", why));
}

bool WriteAll(int fd, const std::string& content) {
  for (size_t done = 0; done < content.size();) {
    const ssize_t written = ::write(fd, content.data() + done, content.size() - done);
    if (written <= 0) return false;
    done += static_cast<size_t>(written);
  }
  return true;
}

// Clients that know the server by a name which is not in the certificate any more refuse the server from now on.
void WarnOfNames(const std::string& path, const std::vector<std::string>& before,
                 const std::vector<std::string>& after) {
  std::vector<std::string> gone;
  std::copy_if(before.begin(), before.end(), std::back_inserter(gone),
               [&](const std::string& name) { return std::find(after.begin(), after.end(), name) == after.end(); });
  if (gone.empty()) return;
  spdlog::warn(
      "{}: the new certificate is for {}, and no longer for {}: clients that connect by these names refuse this server "
      "from now on. Write a certificate that has them too, unless no client uses them",
      path, after.empty() ? "no host" : absl::StrJoin(after, ", "), absl::StrJoin(gone, ", "));
}

int64_t Seconds(absl::Time time) { return time == absl::InfiniteFuture() ? 0 : absl::ToUnixSeconds(time); }

}  // namespace

MemoryFile::~MemoryFile() {
  if (fd_ >= 0) ::close(fd_);
}

absl::Status MemoryFile::Replace(const std::string& content, int64_t number) {
  const int fresh = ::memfd_create("ballast-tls", MFD_CLOEXEC);
  const timespec time = {number, 0};
  const timespec times[] = {time, time};
  if (fresh < 0 || !WriteAll(fresh, content) || ::futimens(fresh, times) != 0) {
    const int error = errno;
    if (fresh >= 0) ::close(fresh);
    return NotWritten("memfd_create", std::strerror(error));
  }
  if (fd_ < 0) {
    fd_ = fresh;
    return absl::OkStatus();
  }
  // The path keeps its number, and names the new content from here on.
  const int placed = ::dup3(fresh, fd_, O_CLOEXEC);
  const int error = errno;
  ::close(fresh);
  return placed == fd_ ? absl::OkStatus() : NotWritten("dup3", std::strerror(error));
}

std::string MemoryFile::path() const { return absl::StrCat("/proc/self/fd/", fd_); }

ServedCertificates::ServedCertificates(CertificatePaths paths) : paths_(std::move(paths)) {}

void ServedCertificates::Keep(Certificates read) {
  absl::MutexLock lock(&mu_);
  current_ = std::make_shared<const Certificates>(std::move(read));
}

absl::Status ServedCertificates::Read(absl::Time now) {
  BALLAST_ASSIGN_OR_RETURN(Certificates read, ReadCertificates(paths_, now));
  Keep(std::move(read));
  return absl::OkStatus();
}

absl::Status ServedCertificates::Load(absl::Time now, SecurityCounters* counters) {
  BALLAST_ASSIGN_OR_RETURN(Certificates read, ReadCertificates(paths_, now));
  number_ = std::max(number_ + 1, absl::ToUnixSeconds(now));
  // A comment changes the CAs when nothing else does: gRPC begins anew with them, and old tickets become void.
  if (!paths_.client_ca.empty()) {
    BALLAST_RETURN_IF_ERROR(client_ca_.Replace(absl::StrCat("# ", number_, "\n", read.client_ca), number_));
  }
  BALLAST_RETURN_IF_ERROR(pair_.Replace(read.pair, number_));
  if (const auto before = current(); before != nullptr) WarnOfNames(paths_.certificate, before->names, read.names);
  counters->certificate_not_after = Seconds(read.certificate_not_after);
  counters->client_ca_not_after = Seconds(read.client_ca_not_after);
  counters->crl_not_after = Seconds(read.crl_not_after);
  Keep(std::move(read));
  return absl::OkStatus();
}

}  // namespace ballast::services
