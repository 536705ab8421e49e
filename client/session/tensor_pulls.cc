// Pulls of single tensors, for parameters that live on the servers alone.
#include <map>
#include <utility>

#include "ballast/client/tensors.h"
#include "ballast/kernels/kernels.h"
#include "ballast/proto/model/status.h"

namespace ballast::client {

absl::StatusOr<std::vector<PendingPull>> Tensors::StartPull(absl::Span<const size_t> which,
                                                            absl::Span<std::byte* const> to) {
  BALLAST_RETURN_IF_ERROR(CheckCurrent());
  const uint64_t width = kernels::ElementBytes(session_->optimizer().working);
  std::map<uint32_t, std::vector<PullRun>> runs;  // by unit of the session
  for (size_t i = 0; i < which.size(); ++i) {
    const size_t tensor = which[i];
    if (local_elements_[tensor] == 0) continue;
    BALLAST_ASSIGN_OR_RETURN(const Session::Location at, session_->Locate(names_[tensor]));
    const uint64_t begin = at.begin + local_begins_[tensor];
    const UnitRange range{begin, begin + local_elements_[tensor]};
    runs[at.unit].push_back({range, {to[i], local_elements_[tensor] * width}});
  }
  std::vector<PendingPull> pulls;
  pulls.reserve(runs.size());
  for (const auto& [unit, of_unit] : runs) {
    BALLAST_ASSIGN_OR_RETURN(PendingPull pull, session_->StartPull(unit, of_unit));
    pulls.push_back(std::move(pull));
  }
  return pulls;
}

}  // namespace ballast::client
