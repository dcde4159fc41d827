// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "fixtures.h"
#include "ikbo/error.h"
#include "server/access.h"

namespace ikbo::server {
namespace {

using testing::expect_contains;

class AccessTest : public ::testing::Test {
 protected:
  AccessTest() { std::filesystem::create_directories(folder_); }
  ~AccessTest() override { std::filesystem::remove_all(folder_); }

  std::string write(const std::string& name, const std::string& text) const {
    const std::string path = (folder_ / name).string();
    std::ofstream(path, std::ios::binary) << text;
    return path;
  }

  static void expect_accepted(const AccessTokens& tokens, Access needed, const std::string& value) {
    EXPECT_NO_THROW(tokens.check(needed, value)) << value;
  }

  static void expect_refused(const AccessTokens& tokens, Access needed, const std::string& value) {
    const RequestError error = testing::error_of([&] { tokens.check(needed, value); });
    EXPECT_EQ(error.kind(), ErrorKind::kUnauthenticated) << value;
    expect_contains(error.what(), "the request must have a header 'Authorization: Bearer <");
  }

  std::string file_error(const std::string& text) const {
    try {
      AccessTokens({.infer_tokens = write("bad", text), .admin_tokens = ""});
    } catch (const Error& error) {
      return error.what();
    }
    ADD_FAILURE() << "expected an error for " << text;
    return "";
  }

  const std::filesystem::path folder_ =
      std::filesystem::temp_directory_path() / ("ikbo_access_" + std::to_string(getpid()));
};

TEST_F(AccessTest, AsksNothingWithoutTokens) {
  const AccessTokens tokens;
  for (const Access needed : {Access::kOpen, Access::kInfer, Access::kAdmin}) {
    expect_accepted(tokens, needed, "");
  }
}

TEST_F(AccessTest, AsksForTheTokenOfTheKind) {
  const AccessTokens tokens({.infer_tokens = write("i",
                                                   "# of today\ninfer-infer-infer\n\n"
                                                   "infer-of-yesterday \r\n"),
                             .admin_tokens = write("a", "admin-admin-admin")});
  expect_accepted(tokens, Access::kOpen, "");
  expect_accepted(tokens, Access::kInfer, "Bearer infer-infer-infer");
  expect_accepted(tokens, Access::kInfer, "bEARER infer-of-yesterday");
  expect_accepted(tokens, Access::kAdmin, "Bearer admin-admin-admin");
  for (const char* value :
       {"", "Bearer", "Bearer ", "Bearer admin-admin-admin", "infer-infer-infer",
        "Basic infer-infer-infer", "Bearer infer-infer-infe", "Bearer infer-infer-infer2",
        "Bearer  infer-infer-infer", "Bearer # of today", "Bearer INFER-INFER-INFER"}) {
    expect_refused(tokens, Access::kInfer, value);
  }
  expect_refused(tokens, Access::kAdmin, "Bearer infer-infer-infer");
  expect_refused(tokens, Access::kAdmin, "");
}

TEST_F(AccessTest, EachKindMayBeOpen) {
  const AccessTokens tokens({.infer_tokens = "", .admin_tokens = write("a", "admin-admin-admin")});
  expect_accepted(tokens, Access::kInfer, "");
  expect_refused(tokens, Access::kAdmin, "");
}

TEST_F(AccessTest, RefusesUnusableFiles) {
  expect_contains(file_error(""), "--infer-token-file: must be a readable file with one token");
  expect_contains(file_error("# only\n\n"), "must be a readable file with one token a line");
  expect_contains(file_error("\nshort\n"), "that of line 2 of ");
  expect_contains(file_error("with a space in between\n"), "visible ASCII characters");
  expect_contains(file_error("with-an-\xc3\xa4-in-between\n"), "visible ASCII characters");
  EXPECT_THROW(AccessTokens({.infer_tokens = "", .admin_tokens = "/nowhere"}), Error);
}

}  // namespace
}  // namespace ikbo::server
