// Whole models, as readers read them and as direct calls of the kernels make them.
#pragma once

#include <cstddef>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "ballast/client/reader.h"
#include "ballast/kernels/kernels.h"
#include "ballast/proto/base/status.h"
#include "ballast/tests/client/session/session_fixture.h"

namespace ballast::client {

using TensorBytes = std::map<std::string, std::vector<std::byte>>;  // by name

template <typename T>
std::vector<std::byte> BytesOf(const std::vector<T>& values) {
  std::vector<std::byte> bytes(values.size() * sizeof(T));
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

inline TensorBytes Expected(Reference& reference, bool masters = false) {
  TensorBytes expected;
  for (const TensorSpec& tensor : TestTensors()) {
    const Reference::State& state = reference.at(tensor.name);
    expected[tensor.name] = masters ? BytesOf(state.master) : BytesOf(state.working);
  }
  return expected;
}

inline absl::StatusOr<TensorBytes> ReadAll(Reader& reader, bool masters = false) {
  TensorBytes read;
  std::vector<Reader::Place> places;
  for (const ReadableTensor& tensor : reader.tensors()) {
    uint64_t elements = 1;
    for (const uint64_t extent : tensor.shape) elements *= extent;
    std::vector<std::byte>& bytes = read[tensor.name];
    bytes.resize(elements * kernels::ElementBytes(masters ? kernels::Dtype::kF32 : reader.working()));
    places.push_back({tensor.name, absl::MakeSpan(bytes)});
  }
  BALLAST_RETURN_IF_ERROR(reader.Read(places, masters));
  return read;
}

}  // namespace ballast::client
