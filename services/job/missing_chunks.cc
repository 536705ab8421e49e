#include "ballast/services/job/missing_chunks.h"

namespace ballast::services {

void MissingChunks::Update(const Sight& sight, const std::function<CopyNeed(uint64_t chunk)>& need) {
  if (plan_ == sight.plan && changes_ == sight.changes) return;
  plan_ = sight.plan;
  changes_ = sight.changes;
  lacking_ = moving_ = {};
  for (const auto& [chunk, least] : *sight.unfilled) {
    std::set<uint64_t>& chunks = of(need(chunk)).chunks;
    chunks.insert(chunks.end(), chunk);  // ascending
  }
}

void MissingChunks::Filled(uint64_t chunk) {
  lacking_.chunks.erase(chunk);
  moving_.chunks.erase(chunk);
}

}  // namespace ballast::services
