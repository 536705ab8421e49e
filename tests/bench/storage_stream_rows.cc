// The rows of sequential transfers: see storage_bench.cc.
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "ballast/proto/base/status.h"
#include "ballast/tests/bench/storage_rows.h"
#include "ballast/tests/bench/storage_streams.h"

namespace ballast::bench {

using storage::IoRequest;

absl::Status MeasureStreams(const StorageBenchOptions& options, const std::string& directory, std::vector<Row>* rows) {
  StreamShape shape = options.stream;
  shape.bytes = options.bytes / shape.block_bytes * shape.block_bytes;
  BALLAST_ASSIGN_OR_RETURN(StreamComparison streams, StreamComparison::Make(shape, directory + "/stream"));
  for (const auto& [name, kind] :
       {std::pair{"stream/read", IoRequest::Kind::kRead}, {"stream/write", IoRequest::Kind::kWrite}}) {
    for (int round = 0; round <= options.rounds; ++round) {
      std::fprintf(stderr, "\rstorage_bench: %s, round %d of %d", name, round, options.rounds);
      BALLAST_RETURN_IF_ERROR(streams.Round(kind, /*ours_first=*/round % 2 == 0));
      if (round == 0) streams.Forget();
    }
    std::fprintf(stderr, "\n");
    const auto median = [](const std::vector<StreamSpeed>& speeds, double StreamSpeed::*field) {
      std::vector<double> values;
      for (const StreamSpeed& speed : speeds) values.push_back(speed.*field);
      return Median(values);
    };
    rows->push_back(
        {.name = name,
         .bytes_per_element = static_cast<double>(shape.block_bytes),
         .gb_per_s = median(streams.ours(), &StreamSpeed::gb_per_s),
         .reference = streams.reference(),
         .ratio = Median(streams.ratios()),
         .bar = 0.95,
         .more = {{"reference_gb_per_s", median(streams.theirs(), &StreamSpeed::gb_per_s)},
                  {"cpu_seconds_per_gb", median(streams.ours(), &StreamSpeed::cpu_seconds_per_gb)},
                  {"reference_cpu_seconds_per_gb", median(streams.theirs(), &StreamSpeed::cpu_seconds_per_gb)}}});
    streams.Forget();
  }
  return absl::OkStatus();
}

}  // namespace ballast::bench
