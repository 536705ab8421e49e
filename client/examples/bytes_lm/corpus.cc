#include "ballast/client/examples/bytes_lm/corpus.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "ballast/client/examples/bytes_lm/counter_random.h"
#include "ballast/kernels/kernels.h"
#include "ballast/proto/base/status.h"

namespace ballast::client {
namespace {

namespace fs = std::filesystem;

absl::Status BadText(absl::string_view message) {
  return model::Error(absl::StatusCode::kInvalidArgument, model::kBadConfig, message);
}

// Adds the files at or below `path`, by their resolved paths: a set, so that links count once.
absl::Status CollectFiles(const std::string& path, std::set<fs::path>& files) {
  std::error_code error;
  const fs::path resolved = fs::canonical(path, error);
  if (error) {
    return model::Error(
        absl::StatusCode::kNotFound, model::kBadConfig,
        absl::StrCat("text path '", path, "': ", error.message(), "; name an existing file or directory"));
  }
  if (fs::is_regular_file(resolved, error)) {
    files.insert(resolved);
    return absl::OkStatus();
  }
  fs::recursive_directory_iterator entries(resolved, error);
  if (error) return BadText(absl::StrCat("text path '", path, "': ", error.message()));
  for (const fs::recursive_directory_iterator end; entries != end; entries.increment(error)) {
    if (error) break;
    std::error_code dangling;
    const fs::path file = fs::canonical(entries->path(), dangling);
    if (!dangling && fs::is_regular_file(file, dangling)) files.insert(file);
  }
  if (error) return BadText(absl::StrCat("text path '", path, "': ", error.message()));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Corpus> Corpus::Load(const std::vector<std::string>& paths) {
  std::set<fs::path> files;
  for (const std::string& path : paths) BALLAST_RETURN_IF_ERROR(CollectFiles(path, files));

  std::string text;
  for (const fs::path& file : files) {
    std::error_code error;
    const uintmax_t bytes = fs::file_size(file, error);
    if (error) return BadText(absl::StrCat("text file '", file.string(), "': ", error.message()));
    if (bytes > kCorpusBytesMax - text.size()) {
      return BadText(absl::StrCat("text up to '", file.string(), "' exceeds ", kCorpusBytesMax,
                                  " bytes, which every rank would hold in memory; name fewer files"));
    }
    const size_t start = text.size();
    text.resize(start + bytes);
    std::ifstream stream(file, std::ios::binary);
    if (!stream.read(text.data() + start, static_cast<std::streamsize>(bytes))) {
      return model::Error(absl::StatusCode::kInternal, model::kIo,
                          absl::StrCat("text file '", file.string(), "' could not be read: expected ", bytes,
                                       " bytes, got ", stream.gcount()));
    }
  }
  if (text.empty()) {
    return BadText("no text to train on: the text paths hold no bytes; name files with --text");
  }
  Corpus corpus(std::move(text));
  corpus.file_count_ = files.size();
  return corpus;
}

uint32_t Corpus::Digest() const {
  return kernels::Crc32c(absl::MakeConstSpan(reinterpret_cast<const std::byte*>(text_.data()), text_.size()));
}

double Corpus::UnigramEntropy() const {
  std::array<uint64_t, 256> counts{};
  for (const char c : text_) ++counts[static_cast<unsigned char>(c)];
  double entropy = 0;
  for (const uint64_t count : counts) {
    if (count == 0) continue;
    const double p = static_cast<double>(count) / static_cast<double>(text_.size());
    entropy -= p * std::log(p);
  }
  return entropy;
}

void Corpus::Sample(const SampleKey& key, uint64_t context, absl::Span<uint8_t> inputs,
                    absl::Span<uint8_t> targets) const {
  const uint64_t base = MixKey(MixKey(MixKey(MixBits(key.seed), "sample"), key.step), key.micro_batch);
  for (uint64_t begin = 0; begin < inputs.size(); begin += context) {
    const uint64_t offset = MixKey(base, begin / context) % (text_.size() - context);
    std::memcpy(inputs.data() + begin, text_.data() + offset, context);
    std::memcpy(targets.data() + begin, text_.data() + offset + 1, context);
  }
}

}  // namespace ballast::client
