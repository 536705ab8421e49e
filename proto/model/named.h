// A table of what users choose by name: each choice as messages have it, as code has it, and its one spelling.
#pragma once

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "ballast/proto/base/status.h"

namespace ballast::model {

template <typename Proto, typename Value>
struct Named {
  Proto proto;
  Value value;
  const char* name;
};

// Null: the table has no such row.
template <typename Proto, typename Value, size_t n>
const Named<Proto, Value>* Find(const Named<Proto, Value> (&table)[n], Proto proto) {
  const auto row =
      std::find_if(std::begin(table), std::end(table), [&](const auto& each) { return each.proto == proto; });
  return row == std::end(table) ? nullptr : row;
}
template <typename Proto, typename Value, size_t n>
const Named<Proto, Value>* Find(const Named<Proto, Value> (&table)[n], Value value) {
  const auto row =
      std::find_if(std::begin(table), std::end(table), [&](const auto& each) { return each.value == value; });
  return row == std::end(table) ? nullptr : row;
}

// "unknown": the table has no such row.
template <typename Proto, typename Value, size_t n>
absl::string_view NameIn(const Named<Proto, Value> (&table)[n], Value value) {
  const auto row =
      std::find_if(std::begin(table), std::end(table), [&](const auto& each) { return each.value == value; });
  return row == std::end(table) ? "unknown" : row->name;
}
// INVALID_ARGUMENT (BAD_CONFIG), with all names, for an unknown one. `what`: of what it is the name.
template <typename Proto, typename Value, size_t n>
absl::StatusOr<Value> ByName(const Named<Proto, Value> (&table)[n], const char* what, const std::string& name) {
  for (const Named<Proto, Value>& each : table) {
    if (name == each.name) return each.value;
  }
  const auto append = [](std::string* out, const Named<Proto, Value>& each) { *out += each.name; };
  return Error(absl::StatusCode::kInvalidArgument, kBadConfig,
               absl::StrCat(what, " '", name, "': expected one of ", absl::StrJoin(table, ", ", append)));
}

}  // namespace ballast::model
