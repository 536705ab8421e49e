// Every kernel against a plain loop over memory that reads and writes as many bytes, interleaved in one run: a ratio of
// 1 is memory speed. Usage: kernels_bench [--json FILE] [--filter TEXT] [--rounds N] [--elements N] [--guard]
//
// Rows: kernel/dtype/isa/threads. The ratio is the median over rounds of (kernel's GB/s / reference's GB/s); in each
// round both run, in alternating order, on the same threads and on DRAM-sized, huge-page memory.
//
// --guard: instead, all instruction sets of this processor take turns at each kernel, the scalar path too. Prints the
// sets that are slower than a narrower one, and exits with 1 if there are any.
#include <sys/mman.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "CLI/CLI.hpp"
#include "ballast/kernels/cpu/highway_targets.h"
#include "ballast/kernels/kernels.h"
#include "ballast/kernels/optimizer.h"
#include "ballast/tests/bench/isa_guard.h"
#include "ballast/tests/bench/memory_loops.h"
#include "hwy/highway.h"

namespace ballast::bench {
namespace {

using kernels::Dtype;
using kernels::MomentFormat;

constexpr uint64_t kHugePage = uint64_t{2} << 20;

// Huge-page memory, touched: what a server's arenas are.
class Arena {
 public:
  explicit Arena(uint64_t bytes) : bytes_((bytes / kHugePage + 2) * kHugePage) {
    base_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base_ == MAP_FAILED) {
      std::fprintf(stderr, "kernels_bench: cannot map %llu bytes: use fewer --elements\n",
                   static_cast<unsigned long long>(bytes_));
      std::exit(1);
    }
    madvise(base_, bytes_, MADV_HUGEPAGE);
    data_ = reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(base_) + kHugePage - 1) / kHugePage * kHugePage);
    std::memset(data_, 0, bytes);
  }
  ~Arena() { munmap(base_, bytes_); }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  std::byte* data() const { return data_; }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }

 private:
  uint64_t bytes_;
  void* base_;
  std::byte* data_;
};

// All that the kernels work on: element i of every array belongs together.
struct Arrays {
  explicit Arrays(uint64_t count)
      : n(count),
        gradient(5 * n),
        master(4 * n),
        moment{Arena(5 * n), Arena(5 * n)},
        scales{Arena(n / 32), Arena(n / 32)},
        working(4 * n) {
    Reset();
  }
  // As at the start of a job: small numbers of both signs, different in each element; moments zero in every format.
  void Reset() const {
    for (uint64_t i = 0; i < n; ++i) {
      const auto hash = static_cast<uint32_t>(i * 2654435761u);
      const float x = (static_cast<float>(hash >> 8) / (1 << 24) - 0.5f) * 0.02f;
      gradient.as<uint16_t>()[i] = kernels::ToBf16(x);
      master.as<float>()[i] = x * 3;
    }
    for (size_t k = 0; k < 2; ++k) {
      std::memset(moment[k].data(), 0, 4 * n);
      std::memset(scales[k].data(), 0, n / 64);
    }
  }
  uint64_t n;
  Arena gradient, master, moment[2], scales[2], working;
};

// Work on elements [begin, end).
using Work = std::function<void(uint64_t begin, uint64_t end)>;

double Seconds(const Work& work, uint64_t n, int threads) {
  const auto clock = [] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  };
  if (threads == 1) {
    const double start = clock();
    work(0, n);
    return clock() - start;
  }
  // The clock starts when all threads stand ready and stops when the last is done.
  std::barrier<> ready(threads + 1), done(threads + 1);
  std::vector<std::thread> pool;
  const uint64_t piece = n / static_cast<uint64_t>(threads) / 4096 * 4096;
  for (int i = 0; i < threads; ++i) {
    const uint64_t begin = piece * static_cast<uint64_t>(i);
    const uint64_t end = i + 1 == threads ? n : begin + piece;
    pool.emplace_back([&, begin, end] {
      ready.arrive_and_wait();
      work(begin, end);
      done.arrive_and_wait();
    });
  }
  ready.arrive_and_wait();
  const double start = clock();
  done.arrive_and_wait();
  const double seconds = clock() - start;
  for (std::thread& thread : pool) thread.join();
  return seconds;
}

struct Row {
  std::string name, reference;
  double bytes_per_element, gb_per_s, elements_per_s, ratio;
};

struct Case {
  std::string kernel;  // "adamw/f32"
  double bytes_per_element;
  Work work;
  std::string reference;
  double reference_bytes_per_element;
  Work reference_work;
  bool per_element = false;       // ratio of elements per second, where moving fewer bytes is the point
  const Arrays* state = nullptr;  // reset first: each format of a moment reads its own bytes only
};

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

Row Measure(const Case& c, const std::string& isa, uint64_t n, int threads, int rounds) {
  std::vector<double> ratios, speeds;
  if (c.state != nullptr) c.state->Reset();
  Seconds(c.work, n, threads);
  Seconds(c.reference_work, n, threads);
  for (int round = 0; round < rounds; ++round) {
    double own, reference;
    if (round % 2 == 0) {
      own = Seconds(c.work, n, threads);
      reference = Seconds(c.reference_work, n, threads);
    } else {
      reference = Seconds(c.reference_work, n, threads);
      own = Seconds(c.work, n, threads);
    }
    const double weight = c.per_element ? 1 : c.bytes_per_element / c.reference_bytes_per_element;
    ratios.push_back(reference / own * weight);
    speeds.push_back(static_cast<double>(n) / own);
  }
  const double speed = Median(speeds);
  return {.name = c.kernel + "/" + isa + "/" + std::to_string(threads) + "t",
          .reference = c.reference,
          .bytes_per_element = c.bytes_per_element,
          .gb_per_s = speed * c.bytes_per_element / 1e9,
          .elements_per_s = speed,
          .ratio = Median(ratios)};
}

Work UpdateWork(const Arrays& a, kernels::OptimizerSpec spec) {
  const kernels::Hyper hyper{
      .learning_rate = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .epsilon = 1e-8, .weight_decay = 0.01};
  const kernels::Coefficients c = MakeCoefficients(spec, hyper, 10, 0.5f);
  return [&a, spec, c](uint64_t begin, uint64_t end) {
    kernels::UpdateSpan span{.n = end - begin,
                             .gradient = a.gradient.data() + begin * ElementBytes(spec.gradient),
                             .master = a.master.as<float>() + begin,
                             .moments = {},
                             .working = a.working.data() + begin * ElementBytes(spec.working)};
    for (size_t i = 0; i < 2; ++i) {
      span.moments[i] = {.values = a.moment[i].data() + MomentBytes(spec.moments, begin),
                         .scales = a.scales[i].as<float>() + begin / kernels::kMomentBlock};
    }
    Update(spec, c, {.seed = 1, .unit = 0, .step = 10, .first_element = begin}, span);
  };
}

std::vector<Case> Cases(const Arrays& a, const Arrays& reference) {
  std::vector<Case> cases;
  const Work three = [&reference](uint64_t begin, uint64_t end) {
    UpdateThreeArrays(reference.master.as<float>() + begin, reference.moment[0].as<float>() + begin,
                      reference.moment[1].as<float>() + begin, end - begin);
  };
  const kernels::OptimizerSpec adamw;
  cases.push_back({"adamw/f32", 28, UpdateWork(a, adamw), "update of three arrays", 24, three, false, &a});
  for (const auto& [name, format, bytes] : {std::tuple{"adamw/bf16", MomentFormat::kBf16, 20.0},
                                            std::tuple{"adamw/f8", MomentFormat::kF8, 12 + 4 + 4.0 / 64},
                                            std::tuple{"adamw/i8", MomentFormat::kI8, 12 + 4 + 4.0 / 64}}) {
    kernels::OptimizerSpec spec = adamw;
    spec.moments = format;
    cases.push_back({name, bytes, UpdateWork(a, spec), "adamw/f32", 28, UpdateWork(reference, adamw), true, &a});
  }
  // The rest is compared with a loop that reads and writes as many bytes: lines per `step` elements.
  const auto add = [&](const std::string& name, int read, int write, uint64_t step, Work work) {
    const double bytes = 64.0 * (read + write) / static_cast<double>(step);
    cases.push_back({name, bytes, std::move(work), write == 0 ? "read" : "copy", bytes,
                     [&a, read, write, step](uint64_t begin, uint64_t end) {
                       const uint64_t first = begin / step, steps = end / step - first;
                       Move(a.moment[0].data() + first * 64 * static_cast<uint64_t>(read), read,
                            a.moment[1].data() + first * 64 * static_cast<uint64_t>(write), write, steps);
                     }});
  };
  const auto floats = [&a](uint64_t begin, uint64_t end) {
    return absl::MakeSpan(a.master.as<float>() + begin, end - begin);
  };
  for (const auto& [name, dtype] :
       {std::pair{"bf16", Dtype::kBf16}, {"f16", Dtype::kF16}, {"e4m3", Dtype::kE4m3}, {"e5m2", Dtype::kE5m2}}) {
    const uint64_t bytes = ElementBytes(dtype);
    add(std::string("from_f32/") + name, 4, static_cast<int>(bytes), 64,
        [&a, floats, dtype = dtype, bytes](uint64_t begin, uint64_t end) {
          kernels::FromF32(floats(begin, end), dtype, a.working.data() + begin * bytes);
        });
    add(std::string("to_f32/") + name, static_cast<int>(bytes), 4, 64,
        [&a, dtype = dtype, bytes](uint64_t begin, uint64_t end) {
          kernels::ToF32(dtype, a.gradient.data() + begin * bytes,
                         absl::MakeSpan(a.moment[0].as<float>() + begin, end - begin));
        });
  }
  for (const auto& [name, dtype] :
       {std::pair{"norm/bf16", Dtype::kBf16}, {"norm/f16", Dtype::kF16}, {"norm/f32", Dtype::kF32}}) {
    const uint64_t bytes = ElementBytes(dtype);
    add(name, 1, 0, 64 / bytes, [&a, dtype = dtype, bytes](uint64_t begin, uint64_t end) {
      volatile double keep = kernels::SquaredNorm(dtype, a.gradient.data() + begin * bytes, end - begin).squared_norm;
      static_cast<void>(keep);
    });
  }
  add("sum/bf16", 3, 2, 32, [&a, floats](uint64_t begin, uint64_t end) {
    kernels::AddInto(Dtype::kBf16, a.gradient.data() + begin * 2, floats(begin, end));
  });
  for (const auto& [name, format] :
       {std::pair{"int8", kernels::QuantFormat::kInt8}, {"int4", kernels::QuantFormat::kInt4}}) {
    const int lines = format == kernels::QuantFormat::kInt8 ? 2 : 4;  // of bf16 to a line of codes
    const auto step = static_cast<uint64_t>(32 * lines);
    add(std::string("quantize/bf16/") + name, lines, 1, step, [&a, format = format](uint64_t begin, uint64_t end) {
      kernels::Quantize(format, Dtype::kBf16, a.gradient.data() + begin * 2, end - begin,
                        a.working.data() + QuantBytes(format, begin),
                        a.scales[0].as<float>() + begin / kernels::kQuantBlock);
    });
    add(std::string("dequantize/bf16/") + name, 1, lines, step, [&a, format = format](uint64_t begin, uint64_t end) {
      kernels::Dequantize(format, a.working.data() + QuantBytes(format, begin),
                          a.scales[0].as<float>() + begin / kernels::kQuantBlock, end - begin, Dtype::kBf16,
                          a.gradient.data() + begin * 2);
    });
  }
  add("crc32c/f32", 1, 0, 16, [floats](uint64_t begin, uint64_t end) {
    const auto bytes = floats(begin, end);
    volatile uint32_t keep = kernels::Crc32c({reinterpret_cast<const std::byte*>(bytes.data()), 4 * bytes.size()});
    static_cast<void>(keep);
  });
  add("copy_crc32c/f32", 1, 1, 16, [&a](uint64_t begin, uint64_t end) {
    volatile uint32_t keep =
        kernels::CopyCrc32c({a.master.data() + 4 * begin, 4 * (end - begin)}, a.moment[0].data() + 4 * begin);
    static_cast<void>(keep);
  });
  return cases;
}

void Print(const Row& row) {
  std::printf("%-28s %6.2f B %8.2f GB/s %7.3f G/s   %6.3f of %s\n", row.name.c_str(), row.bytes_per_element,
              row.gb_per_s, row.elements_per_s / 1e9, row.ratio, row.reference.c_str());
  std::fflush(stdout);
}

void WriteJson(const std::string& path, const std::vector<Row>& rows) {
  std::ofstream out(path);
  out << "{\"rows\": [";
  for (size_t i = 0; i < rows.size(); ++i) {
    const Row& row = rows[i];
    out << (i == 0 ? "\n" : ",\n") << "  {\"name\": \"" << row.name
        << "\", \"bytes_per_element\": " << row.bytes_per_element << ", \"gb_per_s\": " << row.gb_per_s
        << ", \"reference\": \"" << row.reference << "\", \"ratio\": " << row.ratio << "}";
  }
  out << "\n]}\n";
}

using Isa = std::pair<std::string, int64_t>;  // the name in rows, Highway's target

void Choose(const Isa& isa) {
  hwy::SetSupportedTargetsForTest(isa.second);
  hwy::GetChosenTarget().Update(isa.second);
}

// The instruction sets of this processor that the kernels are compiled for, the widest first.
std::vector<Isa> Isas() {
  std::vector<Isa> isas;
  const int64_t supported = hwy::SupportedTargets() & HWY_TARGETS;
  int64_t avx512 = 0;
  for (const int64_t target : {HWY_AVX3, HWY_AVX3_DL}) avx512 = (supported & target) != 0 ? target : avx512;
  if (avx512 != 0) isas.emplace_back("avx512", avx512);
  if ((supported & HWY_AVX2) != 0) isas.emplace_back("avx2", HWY_AVX2);
  if ((supported & HWY_SVE2_128) != 0) isas.emplace_back("sve2_128", HWY_SVE2_128);
  if ((supported & HWY_SVE_256) != 0) isas.emplace_back("sve_256", HWY_SVE_256);
  if ((supported & HWY_NEON) != 0) isas.emplace_back("neon", HWY_NEON);
  return isas;
}

// A measurement of the guard ends after this many rounds, or when its time is over.
constexpr int kGuardRounds = 15;
constexpr double kGuardSeconds = 0.4;
// A set that needs this many times the widest set's time needs no second look.
constexpr double kFarSlower = 3;

// Each set's best time for one kernel, on one thread; `isas` take turns, in alternating order.
std::vector<IsaTime> TakeTurns(const Case& c, const std::vector<Isa>& isas, uint64_t n) {
  std::vector<IsaTime> times;
  for (const Isa& isa : isas) times.push_back({.isa = isa.first, .seconds = std::numeric_limits<double>::infinity()});
  double spent = 0;
  for (int round = 0; round < kGuardRounds && spent < kGuardSeconds; ++round) {
    for (size_t k = 0; k < isas.size(); ++k) {
      const size_t at = round % 2 == 0 ? k : isas.size() - 1 - k;
      if (round > 0 && times[at].seconds > kFarSlower * times.front().seconds) continue;
      Choose(isas[at]);
      const double seconds = Seconds(c.work, n, 1);
      times[at].seconds = std::min(times[at].seconds, seconds);
      spent += seconds;
    }
  }
  return times;
}

// An EPYC with AVX-512 packs 4-bit codes at 0.78 of its AVX2 speed. They are made once, when a frozen tensor comes.
double SpeedMin(const Case& c) { return c.kernel == "quantize/bf16/int4" ? 0.7 : kWiderSpeedMin; }

// A set counts as slow only if as many measurements, one behind the other, find it slow.
constexpr int kGuardTries = 10;

// True if no set is slower than a narrower set. No set is blamed for other work on the machine.
bool Guard(const std::vector<Case>& cases, const std::string& filter, uint64_t n) {
  std::vector<Isa> isas = Isas();
  isas.emplace_back("scalar", HWY_BASELINE_SCALAR);
  bool good = true;
  for (const Case& c : cases) {
    if (c.kernel.find(filter) == std::string::npos) continue;
    if (c.state != nullptr) c.state->Reset();
    std::vector<SlowIsa> slow;
    for (int tries = 0; tries < kGuardTries && (tries == 0 || !slow.empty()); ++tries) {
      slow = SlowerThanNarrower(TakeTurns(c, isas, n), SpeedMin(c));
    }
    for (const SlowIsa& set : slow) {
      std::printf("%s: %s runs at %.2f of the speed of %s; expected at least %.2f\n", c.kernel.c_str(), set.isa.c_str(),
                  set.ratio, set.narrower.c_str(), SpeedMin(c));
    }
    good = good && slow.empty();
  }
  std::string names;
  for (const Isa& isa : isas) names += " " + isa.first;
  std::printf("kernels_bench --guard: %s:%s\n", good ? "no set is slower than a narrower one" : "FAILED",
              names.c_str());
  return good;
}

}  // namespace
}  // namespace ballast::bench

int main(int argc, char** argv) {
  using namespace ballast::bench;
  std::string json, filter;
  int rounds = 11;
  uint64_t elements = 0;
  bool guard = false;
  CLI::App app("Kernels against memory speed, as ratios within one run");
  app.add_option("--json", json, "also write the rows to this file");
  app.add_option("--filter", filter, "only kernels whose name contains this");
  app.add_option("--rounds", rounds, "pairs per row")->check(CLI::Range(1, 1001));
  app.add_flag("--guard", guard, "compare instruction sets; exit 1 if one is slower than a narrower one");
  app.add_option("--elements", elements, "per array; the default, 128 Mi, or 16 Mi with --guard, is beyond any cache")
      ->check(CLI::Range(uint64_t{4096}, uint64_t{1} << 32));
  CLI11_PARSE(app, argc, argv);
  if (elements == 0) elements = uint64_t{guard ? 16u : 128u} << 20;
  const int all = static_cast<int>(std::thread::hardware_concurrency());
  const Arrays arrays(elements);
  if (guard) return Guard(Cases(arrays, arrays), filter, elements) ? 0 : 1;
  const Arrays reference(elements);
  std::vector<Row> rows;
  for (const Isa& isa : Isas()) {
    Choose(isa);
    for (const int threads : all > 1 ? std::vector<int>{1, all} : std::vector<int>{1}) {
      for (const Case& c : Cases(arrays, reference)) {
        if (c.kernel.find(filter) == std::string::npos) continue;
        rows.push_back(Measure(c, isa.first, elements, threads, rounds));
        Print(rows.back());
      }
    }
  }
  if (!json.empty()) WriteJson(json, rows);
  return 0;
}
