#include "ballast/client/transactions/agreement.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/layout.h"

namespace ballast::client {
namespace {

std::string DifferenceOf(const v1::SealRequest& other, const v1::SealRequest& first) {
  if (other.job() != first.job()) return absl::StrCat("called ", other.job(), " against ", first.job());
  if (other.step() != first.step()) return absl::StrCat("is at step ", other.step(), " against ", first.step());
  if (other.attempt() != first.attempt()) {
    return absl::StrCat("has dropped ", other.attempt(), " time(s) against ", first.attempt());
  }
  if (other.header().value_presence() != first.header().value_presence()) return "has written other tensors";
  if (other.header().value_array() != first.header().value_array()) return "writes another array";
  const auto& steps = first.header().value_tensor_steps();
  if (!std::equal(steps.begin(), steps.end(), other.header().value_tensor_steps().begin(),
                  other.header().value_tensor_steps().end())) {
    return "writes other step counts";
  }
  const int groups = std::min(other.header().groups_size(), first.header().groups_size());
  for (int i = 0; i < groups; ++i) {
    if (other.header().groups(i).SerializeAsString() != first.header().groups(i).SerializeAsString()) {
      return absl::StrCat("has other hyper-parameters for group ", i, ": ", other.header().groups(i).ShortDebugString(),
                          " against ", first.header().groups(i).ShortDebugString());
    }
  }
  return absl::StrCat("has another header: groups, gradient_scale, max_norm = ", other.header().groups_size(), ", ",
                      other.header().gradient_scale(), ", ", other.header().max_norm(), " against ",
                      first.header().groups_size(), ", ", first.header().gradient_scale(), ", ",
                      first.header().max_norm());
}

void AddBits(const std::string& bits, std::string* to) {
  for (size_t i = 0; i < to->size() && i < bits.size(); ++i) (*to)[i] = static_cast<char>((*to)[i] | bits[i]);
}

// Adds the tensors of whose values `other` tells, with their step counts.
void AddValues(const v1::StepHeader& other, v1::StepHeader* to) {
  for (int i = 0; i < other.value_tensor_steps_size() && i < to->value_tensor_steps_size(); ++i) {
    if (model::HasBit(other.value_presence(), i)) to->set_value_tensor_steps(i, other.value_tensor_steps(i));
  }
  AddBits(other.value_presence(), to->mutable_value_presence());
}

}  // namespace

absl::StatusOr<Offers> ParseOffers(absl::Span<const std::string> said) {
  Offers offers(said.size());
  for (size_t r = 0; r < said.size(); ++r) {
    if (offers[r].ParseFromString(said[r]) && offers[r].blobs_size() == 1) continue;
    return model::Error(absl::StatusCode::kInternal, model::kBadRequest, absl::StrCat("rank ", r, " sent no offer"));
  }
  return offers;
}

absl::Status CheckSameOffers(const Offers& offers, bool places) {
  const auto common = [places](v1::SealRequest offer) {
    offer.clear_rank();
    offer.clear_blobs();
    offer.mutable_header()->clear_gradient_presence();
    if (places) {
      offer.mutable_header()->clear_value_presence();
      offer.mutable_header()->clear_value_tensor_steps();
    }
    return offer.SerializeAsString();
  };
  const std::string first = common(offers[0]);
  for (size_t r = 1; r < offers.size(); ++r) {
    if (common(offers[r]) == first) continue;
    return model::Error(absl::StatusCode::kFailedPrecondition, model::kPlanMismatch,
                        absl::StrCat("rank ", r, " ", DifferenceOf(offers[r], offers[0]),
                                     " on rank 0; nothing was sealed: all ranks must make the same calls with the same "
                                     "options"));
  }
  return absl::OkStatus();
}

Agreement Join(const Offers& offers, bool places) {
  Agreement agreed{offers[0].header(), {}};
  for (const v1::SealRequest& offer : offers) {
    AddBits(offer.header().gradient_presence(), agreed.header.mutable_gradient_presence());
    if (places) AddValues(offer.header(), &agreed.header);
    agreed.blobs.push_back(offer.blobs(0));
  }
  return agreed;
}

absl::Status CheckWritten(const UnitMap& units, const v1::StepHeader& own, const v1::StepHeader& agreed) {
  for (const model::Tensor& tensor : units.layout().tensors()) {
    const uint32_t i = tensor.index;
    if (units.Held(i) == nullptr || !model::HasBit(agreed.value_presence(), i)) continue;
    const bool same_steps = agreed.value_tensor_steps_size() == 0 || agreed.value_tensor_steps(static_cast<int>(i)) ==
                                                                         own.value_tensor_steps(static_cast<int>(i));
    if (model::HasBit(own.value_presence(), i) && same_steps) continue;
    return model::Error(absl::StatusCode::kFailedPrecondition, model::kPlanMismatch,
                        absl::StrCat("another rank has written values or another step count of tensor '", tensor.name,
                                     "', and this rank, which has a part of the tensor, has not; all ranks that have "
                                     "a part must write it"));
  }
  return absl::OkStatus();
}

bool GradientsDiffer(const Offers& offers, const v1::StepHeader& agreed) {
  return std::any_of(offers.begin(), offers.end(), [&](const v1::SealRequest& offer) {
    return offer.header().gradient_presence() != agreed.gradient_presence();
  });
}

bool AnyBit(const std::string& bitmap) {
  return std::any_of(bitmap.begin(), bitmap.end(), [](char c) { return c != '\0'; });
}

}  // namespace ballast::client
