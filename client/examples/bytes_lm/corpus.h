// The text to train on, as bytes, and the choice of bytes for each micro-batch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace ballast::client {

// Licence texts that every Debian machine carries: about a quarter of a megabyte of English.
inline constexpr char kDefaultTextPath[] = "/usr/share/common-licenses";
// Limit, because every rank holds the whole text in memory.
inline constexpr uint64_t kCorpusBytesMax = uint64_t{1} << 30;

class Corpus {
 public:
  // Loads the files in `paths` and all files below the directories in `paths`. Sorts them by resolved path, and loads a
  // file once however many links lead to it. Errors: NOT_FOUND; INVALID_ARGUMENT if there is no text, or more than
  // kCorpusBytesMax; INTERNAL if a file cannot be read.
  static absl::StatusOr<Corpus> Load(const std::vector<std::string>& paths);
  explicit Corpus(std::string text) : text_(std::move(text)) {}

  const std::string& text() const { return text_; }
  uint64_t file_count() const { return file_count_; }
  uint32_t Digest() const;
  // Entropy of the byte frequencies, in nats per byte: the loss of the best model without context.
  double UnigramEntropy() const;

  // The sequences of a micro-batch depend on this key alone, never on ranks or threads.
  struct SampleKey {
    uint64_t seed = 0;
    uint64_t step = 0;
    uint64_t micro_batch = 0;
  };
  // Fills `inputs` with sequences of `context` bytes from the text. targets[n] is the byte that follows inputs[n] in
  // the text. REQUIRES: inputs and targets have the same length, a multiple of `context`; the text is longer than that.
  void Sample(const SampleKey& key, uint64_t context, absl::Span<uint8_t> inputs, absl::Span<uint8_t> targets) const;

 private:
  std::string text_;
  uint64_t file_count_ = 0;
};

}  // namespace ballast::client
