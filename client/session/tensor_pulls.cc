// Pulls of single tensors, for parameters that live on the servers alone.
#include <map>
#include <utility>

#include "ballast/client/tensors.h"
#include "ballast/kernels/kernels.h"
#include "ballast/proto/model/status.h"

namespace ballast::client {

absl::StatusOr<std::vector<PendingPull>> Tensors::StartPull(absl::Span<const size_t> which,
                                                            absl::Span<std::byte* const> to,
                                                            absl::Span<const model::Box> boxes) {
  BALLAST_RETURN_IF_ERROR(CheckCurrent());
  const uint64_t width = kernels::ElementBytes(session_->optimizer().working);
  std::map<uint32_t, std::vector<PullRun>> runs;  // by unit of the session
  for (size_t i = 0; i < which.size(); ++i) {
    const Part& part = parts_[which[i]];
    if (boxes.empty() && part.elements == 0) continue;
    BALLAST_ASSIGN_OR_RETURN(const Session::Location at, session_->Locate(names_[which[i]]));
    for (const model::BoxRun& run : boxes.empty() ? part.runs : session_->RunsOf(part.index, boxes[i])) {
      const uint64_t begin = part.begin + run.in_tensor;
      runs[at.unit].push_back({{begin, begin + run.count}, {to[i] + run.in_box * width, run.count * width}});
    }
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
