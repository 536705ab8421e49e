#include "ballast/proto/model/copies.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ballast::model {
namespace {

using Copy = v1::DifferingCopies::Copy;

bool SameDigests(const Copy& a, const Copy& b) {
  return std::equal(a.crc32c().begin(), a.crc32c().end(), b.crc32c().begin(), b.crc32c().end());
}

}  // namespace

std::vector<v1::DifferingCopies> FindDiffering(absl::Span<const ToldDigests> told) {
  std::map<std::pair<uint64_t, int64_t>, v1::DifferingCopies> all;  // by chunk and version
  for (const ToldDigests& server : told) {
    for (const v1::ChunkDigest& digest : *server.digests) {
      Copy* const copy = all[{digest.chunk(), digest.version()}].add_copies();
      copy->set_server_id(std::string(server.server_id));
      *copy->mutable_crc32c() = digest.crc32c();
    }
  }
  std::vector<v1::DifferingCopies> differing;
  for (auto& [key, found] : all) {
    const Copy& first = found.copies(0);
    if (std::all_of(found.copies().begin(), found.copies().end(),
                    [&](const Copy& copy) { return SameDigests(first, copy); })) {
      continue;
    }
    found.set_chunk(key.first);
    found.set_version(key.second);
    differing.push_back(std::move(found));
  }
  return differing;
}

std::string ShowDiffering(const v1::DifferingCopies& differing) {
  int arrays = 0;
  for (const Copy& copy : differing.copies()) arrays = std::max(arrays, copy.crc32c_size());
  const auto shown = [](const Copy& copy, int array) {
    return array < copy.crc32c_size() ? absl::StrCat(absl::Hex(copy.crc32c(array), absl::kZeroPad8)) : "none";
  };
  int array = 0;
  const auto same = [&](const Copy& copy) { return shown(copy, array) == shown(differing.copies(0), array); };
  while (array + 1 < arrays && std::all_of(differing.copies().begin(), differing.copies().end(), same)) ++array;
  std::string text = absl::StrCat("chunk ", differing.chunk(), " at version ", differing.version(), ": ",
                                  array == 0 ? "the master" : absl::StrCat("moment ", array), " has CRC32C ");
  for (int i = 0; i < differing.copies_size(); ++i) {
    const Copy& copy = differing.copies(i);
    absl::StrAppend(&text, i > 0 ? ", " : "", shown(copy, array), " on '", copy.server_id(), "'");
  }
  return text;
}

}  // namespace ballast::model
