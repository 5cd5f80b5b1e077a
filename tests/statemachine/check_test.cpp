#include "statemachine/check.h"

#include <gtest/gtest.h>

namespace amem {
namespace {

// The text without the place, which begins it, and the advice, which ends it.
std::string Text(const Status& status) {
  const std::string& all = status.message();
  const auto from = all.find(": "), to = all.find("; ");
  return from == std::string::npos || to == std::string::npos ? all : all.substr(from + 2, to - from - 2);
}

TEST(Check, lets_what_holds_pass) {
  const auto body = []() -> Status {
    const int value = 3;
    AMEM_CHECK(value == 3);
    AMEM_CHECK(value + 1 > 3, value);
    AMEM_CHECK(&value != nullptr);
    AMEM_CHECK(true);
    return {};
  };
  EXPECT_TRUE(body().ok());
}

TEST(Check, names_the_file_without_its_path_the_expression_and_the_operands) {
  const auto body = [](std::uint32_t mappings) -> Status {
    AMEM_CHECK(mappings > 0U);
    return {};
  };
  const Status failed = body(0);
  EXPECT_EQ(failed.code(), Code::kInvalid);
  EXPECT_EQ(Text(failed), "mappings > 0U (0 > 0)");
  EXPECT_EQ(failed.message().find("check failed at check_test.cpp:"), 0U) << failed.message();
  EXPECT_NE(failed.message().find("defect of AMem"), std::string::npos) << failed.message();
}

TEST(Check, prints_every_kind_of_operand) {
  const auto body = [](int which) -> Status {
    const AllocationId id{7}, other{8};
    const Address place{0x7f00};
    const std::string text = "direct";
    const int* nowhere = nullptr;
    switch (which) {
      case 0:
        AMEM_CHECK(id == other);
        return {};
      case 1:
        AMEM_CHECK(place == Address{}, id, text);
        return {};
      case 2:
        AMEM_CHECK(text != "direct");
        return {};
      case 3:
        AMEM_CHECK(nowhere != nullptr, id);
        return {};
      case 4:
        AMEM_CHECK(Code::kOk >= Code::kInvalid);
        return {};
      default:
        AMEM_CHECK(id.value - 8 <= 1 - 2ULL - 1);
        AMEM_CHECK(-1 == which);
        return {};
    }
  };
  EXPECT_EQ(Text(body(0)), "id == other (7 == 8)");
  EXPECT_EQ(Text(body(1)), "place == Address{} (0x7f00 == 0x0), id, text = 7, \"direct\"");
  EXPECT_EQ(Text(body(2)), "text != \"direct\" (\"direct\" != \"direct\")");
  EXPECT_EQ(Text(body(3)), "nowhere != nullptr (null != null), id = 7");
  EXPECT_EQ(Text(body(4)), "Code::kOk >= Code::kInvalid (0 >= 1)");
  EXPECT_EQ(Text(body(5)), "id.value - 8 <= 1 - 2ULL - 1 (18446744073709551615 <= 18446744073709551614)");
}

TEST(Check, ends_a_function_that_returns_a_result) {
  const auto body = [](bool open) -> Result<int> {
    AMEM_CHECK(open);
    return 4;
  };
  EXPECT_EQ(*body(true), 4);
  EXPECT_EQ(Text(body(false).status()), "open (false)");
}

TEST(Check, evaluates_its_expression_once) {
  int times = 0;
  const auto body = [&]() -> Status {
    AMEM_CHECK(++times > 5);
    return {};
  };
  EXPECT_FALSE(body().ok());
  EXPECT_EQ(times, 1);
}

}  // namespace
}  // namespace amem
