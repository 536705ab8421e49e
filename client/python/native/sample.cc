#include "ballast/client/python/native/sample.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <system_error>
#include <thread>
#include <utility>

namespace ballast::python {
namespace {

constexpr uint64_t kWholeBytes = 16 << 10;
constexpr uint64_t kLineBytes = 64;
// Of large tensors, the distance from one line to the next is drawn from so many lines: irregular, so that no column of
// a matrix lies between them in all rows, and never longer than 16, which a row of 1 KiB cannot lie between.
constexpr uint64_t kStepMin = 9, kStepMax = 16;
// Processors expect no such steps by themselves: so many loads are under way.
constexpr size_t kLinesAhead = 8;
// A thread is worth its start, some 20 us, from so many bytes of tensors on; more threads than this only wait for
// memory.
constexpr uint64_t kThreadBytes = 64 << 20;
constexpr uint64_t kThreadsMax = 8;

// Odd, so that a change of one word always shows.
constexpr std::array<uint64_t, 8> kFactors = {0x9e3779b97f4a7c15, 0xbf58476d1ce4e5b9, 0x94d049bb133111eb,
                                              0xd6e8feb86659fd93, 0xff51afd7ed558ccd, 0xc4ceb9fe1a85ec53,
                                              0xa0761d6478bd642f, 0xe7037ed1a0b428db};

uint64_t AddLine(uint64_t hash, const std::byte* line) {
  std::array<uint64_t, 8> words;
  std::memcpy(words.data(), line, kLineBytes);
  uint64_t sum = 0;
  for (size_t i = 0; i < words.size(); ++i) sum += words[i] * kFactors[i];
  hash = (hash ^ sum) * kFactors[0];
  return hash ^ (hash >> 32);
}

// The places of a sample's lines, one after another.
class Lines {
 public:
  Lines(uint64_t turn, bool all) : all_(all), state_(turn * kFactors[1]) {
    if (!all) at_ = Step() % kStepMax;
  }
  uint64_t Next() {
    const uint64_t at = at_;
    at_ += all_ ? 1 : Step();
    return at * kLineBytes;
  }

 private:
  uint64_t Step() {
    state_ = state_ * 6364136223846793005 + 1442695040888963407;  // Knuth's, of MMIX
    return kStepMin + (state_ >> 33) % (kStepMax - kStepMin + 1);
  }
  bool all_;
  uint64_t state_;
  uint64_t at_ = 0;
};

}  // namespace

uint64_t SampleOf(absl::Span<const std::byte> bytes, uint64_t turn) {
  Lines lines(turn, turn == kEveryLine || bytes.size() <= kWholeBytes);
  std::array<uint64_t, kLinesAhead> ahead;
  for (uint64_t& place : ahead) place = lines.Next();
  uint64_t hash = bytes.size();
  for (size_t i = 0;; i = (i + 1) % kLinesAhead) {
    const uint64_t at = std::exchange(ahead[i], lines.Next());
    if (at + kLineBytes > bytes.size()) {
      if (at >= bytes.size()) return hash;
      std::array<std::byte, kLineBytes> last{};
      std::copy(bytes.begin() + at, bytes.end(), last.begin());
      return AddLine(hash, last.data());
    }
    if (ahead[i] < bytes.size()) __builtin_prefetch(bytes.data() + ahead[i]);
    hash = AddLine(hash, bytes.data() + at);
  }
}

std::vector<uint64_t> SamplesOf(absl::Span<const absl::Span<const std::byte>> tensors,
                                absl::Span<const uint64_t> turns) {
  std::vector<uint64_t> samples(tensors.size());
  uint64_t total = 0;
  for (const auto& tensor : tensors) total += tensor.size();
  const uint64_t processors = std::max(1U, std::thread::hardware_concurrency());
  const uint64_t parts = std::clamp(total / kThreadBytes, uint64_t{1}, std::min(kThreadsMax, processors));
  std::vector<std::jthread> threads;
  uint64_t before = 0;
  for (size_t part = 1, begin = 0, end = 0; begin < tensors.size(); ++part, begin = end) {
    for (const uint64_t until = part * total / parts; end < tensors.size() && before <= until; ++end) {
      before += tensors[end].size();
    }
    if (begin == end) continue;  // a large tensor took this part too
    const auto take = [&samples, tensors, turns, begin, end] {
      for (size_t i = begin; i < end; ++i) samples[i] = SampleOf(tensors[i], turns[i]);
    };
    bool started = false;
    if (end < tensors.size()) {
      try {
        threads.emplace_back(take);
        started = true;
      } catch (const std::system_error&) {  // no more threads are to be had
      }
    }
    if (!started) take();
  }
  threads.clear();  // waits
  return samples;
}

}  // namespace ballast::python
