#include "ballast/services/journal/flush_pace.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <vector>

namespace ballast::services {
namespace {

// Runs `steps` steps on a log with room for `log_steps` steps; a step changes the chunks chosen by `changes`. Returns
// the number of chunks flushed with each step. Fails at a step for which the log has no room.
std::vector<uint64_t> Flushes(uint64_t chunks, uint64_t log_steps, uint64_t steps,
                              const std::function<bool(uint64_t chunk, uint64_t step)>& changes) {
  struct Chunk {
    bool dirty = false;
    int64_t needed_from = 0;
  };
  std::vector<Chunk> all(chunks);
  std::vector<uint64_t> flushes;
  int64_t cut = 0;
  for (uint64_t step = 1; step <= steps; ++step) {
    const uint64_t used = step - static_cast<uint64_t>(cut);
    EXPECT_LE(used, log_steps) << "the log is full at step " << step;
    std::vector<Chunk*> dirty;
    for (uint64_t i = 0; i < chunks; ++i) {
      if (changes(i, step) && !all[i].dirty) all[i] = {true, static_cast<int64_t>(step) - 1};
      if (all[i].dirty) dirty.push_back(&all[i]);
    }
    std::stable_sort(dirty.begin(), dirty.end(),
                     [](const Chunk* a, const Chunk* b) { return a->needed_from < b->needed_from; });
    std::vector<int64_t> needed_from;
    for (const Chunk* chunk : dirty) needed_from.push_back(chunk->needed_from);
    const uint64_t due = FlushesDue(needed_from, log_steps - std::min(used, log_steps));
    EXPECT_LE(due, dirty.size());
    for (uint64_t i = 0; i < std::min<uint64_t>(due, dirty.size()); ++i) dirty[i]->dirty = false;
    flushes.push_back(due);
    cut = static_cast<int64_t>(step);
    for (const Chunk& chunk : all) {
      if (chunk.dirty) cut = std::min(cut, chunk.needed_from);
    }
  }
  return flushes;
}

const auto kAll = [](uint64_t, uint64_t) { return true; };

TEST(FlushPace, NothingToFlush) { EXPECT_EQ(FlushesDue({}, 5), 0u); }

TEST(FlushPace, AFullLogWantsWhatHoldsUpItsCut) {
  EXPECT_EQ(FlushesDue({3, 3, 4, 5, 9}, 0), 3u) << "two for a cut at 4, and the third so that the next can follow";
  EXPECT_EQ(FlushesDue({3, 3, 3, 3, 3}, 1), 5u);
}

TEST(FlushPace, SpreadsOverTheStepsThatAreFree) {
  EXPECT_EQ(FlushesDue({0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, 6), 2u);
  EXPECT_EQ(FlushesDue({0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, 6), 3u);
}

// Every chunk goes to the disk once in about as many steps as the log holds, as many with each step.
TEST(FlushPace, UsesTheWholeLogWhereEveryStepChangesAll) {
  for (const uint64_t chunks : {1u, 7u, 64u, 1000u}) {
    for (const uint64_t log_steps : {3u, 5u, 10u, 11u}) {
      SCOPED_TRACE(testing::Message() << chunks << " chunks, a log of " << log_steps);
      const std::vector<uint64_t> flushes = Flushes(chunks, log_steps, 200, kAll);
      const uint64_t per_step = (chunks + log_steps - 3) / (log_steps - 2);
      EXPECT_LE(*std::max_element(flushes.begin(), flushes.end()), per_step + 1);
    }
  }
}

TEST(FlushPace, NeverFullWhateverStepsChange) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    const auto some = [seed](uint64_t chunk, uint64_t step) {
      return ((chunk * 2654435761u) ^ (step * 40503u) ^ (seed * 97u)) % 5 == 0;
    };
    Flushes(60, 4 + seed % 7, 300, some);
  }
}

// Experts that no step touched for long, all at once.
TEST(FlushPace, ChunksThatWereCleanForLongAreSpreadToo) {
  const auto late = [](uint64_t chunk, uint64_t step) { return chunk < 10 || step == 100; };
  const std::vector<uint64_t> flushes = Flushes(110, 10, 140, late);
  EXPECT_LE(*std::max_element(flushes.begin(), flushes.end()), 20u);
}

}  // namespace
}  // namespace ballast::services
