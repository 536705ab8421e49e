#include "ballast/tests/sim_server/change_cuts.h"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ballast/tests/sim/intent.h"
#include "ballast/tests/sim/random.h"

namespace ballast::sim {
namespace {

std::vector<ChangeCut> PlacesOf(const ChangeRunResult& run) {
  std::vector<ChangeCut> places;
  for (int server = 0; server < kServers; ++server) {
    for (uint64_t n = 1; n <= run.disk_operations[server]; ++n) places.push_back({server, CutAt::kDiskOperation, n});
    for (uint64_t n = 1; n <= run.catalog_writes[server]; ++n) places.push_back({server, CutAt::kCatalogWrite, n});
  }
  return places;
}

std::string Show(const ChangeCut& cut) {
  return absl::StrCat(cut.at == CutAt::kDiskOperation ? "disk operation " : "catalog write ", cut.n, " of server ",
                      cut.server);
}

void AddTo(const ChangeRunResult& run, ChangeCutsTally* tally) {
  ++tally->runs;
  tally->cut += run.cut ? 1 : 0;
  tally->cuts_in_recovery += run.cuts_in_recovery;
  tally->left_out += run.left_out;
  tally->copies += run.copies;
  tally->given_up += run.given_up;
  tally->steps += run.steps;
  tally->pulls += run.pulls;
}

// Indices of places, in the order of their runs.
std::vector<uint64_t> Chosen(const ChangeCutsOptions& options, uint64_t places) {
  std::vector<uint64_t> chosen(places);
  std::iota(chosen.begin(), chosen.end(), 0);
  if (options.only > places) return {};
  if (options.only > 0) return {options.only - 1};
  if (options.cuts_max == 0 || options.cuts_max >= places) return chosen;
  Random random(Mix(options.seed, 77));
  for (uint64_t i = 0; i < options.cuts_max; ++i) std::swap(chosen[i], chosen[i + random.Below(places - i)]);
  chosen.resize(options.cuts_max);
  return chosen;
}

}  // namespace

std::string SearchCuts(const ChangeCutsOptions& options, ChangeCutsTally* tally) {
  TakenByFresh taken;
  ChangeRunOptions run{.seed = options.seed, .cut = {}, .taken = &taken, .directory = options.directory};
  const ChangeRunResult undisturbed = RunChanges(run);
  if (!undisturbed.violation.empty()) return absl::StrCat("seed ", options.seed, ", no cut: ", undisturbed.violation);
  const std::vector<ChangeCut> places = PlacesOf(undisturbed);
  tally->places += places.size();
  for (const uint64_t place : Chosen(options, places.size())) {
    run.cut = places[place];
    const ChangeRunResult result = RunChanges(run);
    AddTo(result, tally);
    if (result.violation.empty()) continue;
    return absl::StrCat("seed ", options.seed, ", place ", place + 1, " (", Show(run.cut), "): ", result.violation);
  }
  return "";
}

}  // namespace ballast::sim
