#include "ballast/client/examples/master_weights.h"

#include <bit>
#include <fstream>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ballast/kernels/kernels.h"
#include "ballast/proto/base/status.h"

namespace ballast::client {

static_assert(std::endian::native == std::endian::little, "the file's bytes are those of memory");

absl::StatusOr<uint32_t> SaveMasterWeights(const ModelShape& shape, ParameterSource& source, const std::string& path) {
  std::ofstream file;
  if (!path.empty()) file.open(path, std::ios::binary | std::ios::trunc);
  uint32_t digest = 0;
  const auto append = [&](const void* data, size_t bytes) {
    digest = kernels::Crc32c(absl::MakeConstSpan(static_cast<const std::byte*>(data), bytes), digest);
    if (!path.empty()) file.write(static_cast<const char*>(data), static_cast<std::streamsize>(bytes));
  };
  for (const ModelTensor& tensor : TensorsOf(shape)) {
    std::vector<float> values(tensor.elements());
    BALLAST_RETURN_IF_ERROR(source.ReadMaster(tensor.name, absl::MakeSpan(values)));
    const std::string head = absl::StrCat(tensor.name, " ", values.size(), "\n");
    append(head.data(), head.size());
    append(values.data(), values.size() * sizeof(float));
  }
  if (!path.empty()) {
    file.close();
    if (!file) {
      return model::Error(absl::StatusCode::kInternal, model::kIo,
                          absl::StrCat("master weights could not be written to '", path,
                                       "'; is the directory there, and has it room?"));
    }
  }
  return digest;
}

}  // namespace ballast::client
