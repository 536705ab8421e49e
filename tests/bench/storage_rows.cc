#include "ballast/tests/bench/storage_rows.h"

#include <chrono>
#include <cstdio>
#include <fstream>

#include "ballast/proto/base/status.h"

namespace ballast::bench {

absl::StatusOr<double> Seconds(const Work& work) {
  const auto start = std::chrono::steady_clock::now();
  BALLAST_RETURN_IF_ERROR(work());
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

absl::StatusOr<std::vector<std::vector<double>>> Measure(const char* what, const std::vector<Work>& works, int rounds) {
  std::vector<std::vector<double>> seconds(works.size());
  for (int round = 0; round <= rounds; ++round) {
    std::fprintf(stderr, "\rstorage_bench: %s, round %d of %d", what, round, rounds);
    for (size_t i = 0; i < works.size(); ++i) {
      const size_t which = (i + static_cast<size_t>(round)) % works.size();
      BALLAST_ASSIGN_OR_RETURN(const double taken, Seconds(works[which]));
      if (round > 0) seconds[which].push_back(taken);
    }
  }
  std::fprintf(stderr, "\n");
  return seconds;
}

void Print(const Row& row) {
  std::printf("%-20s %10.2f B %7.2f GB/s   %6.3f of %s (1/ratio %.3f, bar %.3f)\n", row.name.c_str(),
              row.bytes_per_element, row.gb_per_s, row.ratio, row.reference.c_str(), 1 / row.ratio, row.bar);
  for (const auto& [name, value] : row.more) std::printf("  %s %.5g", name.c_str(), value);
  std::printf("\n");
  std::fflush(stdout);
}

void WriteJson(const std::string& path, const std::vector<Row>& rows) {
  std::ofstream out(path);
  out << "{\"rows\": [";
  for (size_t i = 0; i < rows.size(); ++i) {
    const Row& row = rows[i];
    out << (i == 0 ? "\n" : ",\n") << "  {\"name\": \"" << row.name
        << "\", \"bytes_per_element\": " << row.bytes_per_element << ", \"gb_per_s\": " << row.gb_per_s
        << ", \"reference\": \"" << row.reference << "\", \"ratio\": " << row.ratio << ", \"bar\": " << row.bar;
    for (const auto& [name, value] : row.more) out << ", \"" << name << "\": " << value;
    out << "}";
  }
  out << "\n]}\n";
}

}  // namespace ballast::bench
