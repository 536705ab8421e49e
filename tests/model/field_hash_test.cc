#include "ballast/proto/model/field_hash.h"

#include <gtest/gtest.h>

#include "absl/strings/escaping.h"

namespace ballast::model {
namespace {

TEST(FieldHashTest, IsSha256OverFixedWidths) {
  FieldHash hash;
  hash.Add(uint64_t{7});
  hash.Add(0.5);
  hash.Add(absl::string_view("abc"));
  // sha256 of 7 and the bits of 0.5 in 8 bytes each, little-endian, the length 3, and "abc".
  EXPECT_EQ(absl::BytesToHexString(hash.Finish()), "ca22ef2ade1ea712dfbb71f687b3f7c981cf481bbc3b7e0e1d80c3369027801b");
  EXPECT_EQ(absl::BytesToHexString(FieldHash().Finish()),
            "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
}

TEST(FieldHashTest, ACopyGoesOnByItself) {
  FieldHash first;
  first.Add(uint64_t{1});
  FieldHash copy = first;
  copy.Add(uint64_t{2});
  first.Add(uint64_t{2});
  EXPECT_EQ(first.Finish(), copy.Finish());
}

TEST(FieldHashTest, WhereAFieldEndsCounts) {
  FieldHash one, two;
  one.Add(absl::string_view("ab"));
  one.Add(absl::string_view("c"));
  two.Add(absl::string_view("a"));
  two.Add(absl::string_view("bc"));
  EXPECT_NE(one.Finish(), two.Finish());
}

}  // namespace
}  // namespace ballast::model
