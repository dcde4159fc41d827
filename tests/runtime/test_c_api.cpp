// SPDX-License-Identifier: Apache-2.0
// The C header: packages and errors. test_c_api_run.cpp runs models.
#include "fixtures.h"
#include "ikbo/ikbo.h"

namespace ikbo::runtime::testing {
namespace {

std::string text_of(ikbo_error* error) {
  if (error == nullptr) {
    ADD_FAILURE() << "expected an error";
    return "";
  }
  const std::string text = ikbo_error_message(error);
  ikbo_error_free(error);
  return text;
}

class CApiTest : public ::testing::Test {
 protected:
  ~CApiTest() override { ikbo_package_free(package_); }

  const TempFolder folder_;
  const std::string path_ =
      folder_.write("m.pt2", archive_bytes({{"m/extra/ikbo/manifest.json", manifest_json()}}));
  ikbo_package* package_ = nullptr;
};

TEST_F(CApiTest, SaysItsVersion) {
  EXPECT_EQ(ikbo_abi_version(), IKBO_ABI_VERSION);
  EXPECT_EQ(std::string(ikbo_version()).find("0."), 0U);
}

TEST_F(CApiTest, DescribesAPackage) {
  ASSERT_EQ(ikbo_package_open(path_.c_str(), nullptr, &package_), nullptr);
  const ikbo_package_info* info = ikbo_package_get_info(package_);
  EXPECT_STREQ(info->model_name, "ranker");
  EXPECT_STREQ(info->model_version, "3");
  EXPECT_STREQ(info->torch_version, "2.11.0+cpu");
  EXPECT_STREQ(info->device, "cpu");
  EXPECT_EQ(info->max_users, 4);
  EXPECT_EQ(info->max_candidates, 16);
  EXPECT_EQ(info->has_digests, 0);
  ASSERT_EQ(info->num_inputs, 5U);
  const ikbo_tensor_spec& age = info->inputs[kAge];
  EXPECT_STREQ(age.name, "age");
  EXPECT_EQ(age.dtype, IKBO_INT64);
  EXPECT_EQ(age.role, IKBO_USER);
  EXPECT_EQ(Shape(age.shape, age.shape + age.rank), (Shape{-1, 1}));
  EXPECT_EQ(age.has_range, 1);
  EXPECT_EQ(age.max, 120);
  EXPECT_EQ(info->inputs[kIndex].role, IKBO_INDEX);
  EXPECT_EQ(info->inputs[kItem].has_range, 0);
  ASSERT_EQ(info->num_outputs, 2U);
  EXPECT_STREQ(info->outputs[kProfile].name, "profile");
  EXPECT_EQ(info->outputs[kProfile].dtype, IKBO_FLOAT64);
}

TEST_F(CApiTest, ReturnsErrorsWithTheirText) {
  expect_contains(text_of(ikbo_package_open("/nowhere.pt2", nullptr, &package_)),
                  "/nowhere.pt2: cannot be opened as a .pt2 archive (No such file");
  expect_contains(text_of(ikbo_package_open(nullptr, nullptr, &package_)),
                  "ikbo_package_open: path must not be NULL");
  expect_contains(text_of(ikbo_package_open(path_.c_str(), nullptr, nullptr)),
                  "ikbo_package_open: package must not be NULL");
  EXPECT_EQ(package_, nullptr);
  expect_contains(text_of(ikbo_model_load(nullptr, nullptr, nullptr)),
                  "ikbo_model_load: package must not be NULL");
  expect_contains(text_of(ikbo_session_create(nullptr, nullptr)), "model must not be NULL");
  expect_contains(text_of(ikbo_session_run(nullptr, nullptr, 0, nullptr)),
                  "session must not be NULL");
}

TEST_F(CApiTest, ChecksOptions) {
  ikbo_package_options options{};
  expect_contains(text_of(ikbo_package_open(path_.c_str(), &options, &package_)),
                  "options->size must be the size of the struct");
  options.size = sizeof(options) + 8;
  expect_contains(text_of(ikbo_package_open(path_.c_str(), &options, &package_)), "; got ");
  options.size = sizeof(options);
  options.num_trusted_keys = 1;
  expect_contains(text_of(ikbo_package_open(path_.c_str(), &options, &package_)),
                  "trusted_keys must not be NULL");
  const char* key = "/nowhere.pem";
  options.trusted_keys = &key;
  expect_contains(text_of(ikbo_package_open(path_.c_str(), &options, &package_)),
                  "must be signed by a trusted key");
  options.num_trusted_keys = 0;
  options.require_digests = 1;
  expect_contains(text_of(ikbo_package_open(path_.c_str(), &options, &package_)),
                  "must list the digests of its files");
  // A header that ended before require_digests.
  options.size = offsetof(ikbo_package_options, require_digests);
  EXPECT_EQ(ikbo_package_open(path_.c_str(), &options, &package_), nullptr);
}

TEST_F(CApiTest, BoundsSessionsAndThreads) {
  ASSERT_EQ(ikbo_package_open(path_.c_str(), nullptr, &package_), nullptr);
  ikbo_model* model = nullptr;
  const auto error_of = [&](std::int32_t num_sessions, std::int32_t threads_per_run) {
    ikbo_model_options options{};
    options.size = sizeof(options);
    options.num_sessions = num_sessions;
    options.threads_per_run = threads_per_run;
    return text_of(ikbo_model_load(package_, &options, &model));
  };
  expect_contains(error_of(-1, 0), "num_sessions must be from 1 to 1024; got -1");
  expect_contains(error_of(1025, 0), "num_sessions must be from 1 to 1024; got 1025");
  expect_contains(error_of(1, -1), "threads_per_run must be from 0 to 1024; got -1");
  expect_contains(error_of(1, 1025), "threads_per_run must be from 0 to 1024; got 1025");
  EXPECT_EQ(model, nullptr);
}

TEST_F(CApiTest, FreesNothing) {
  ikbo_error_free(nullptr);
  ikbo_package_free(nullptr);
  ikbo_model_free(nullptr);
  ikbo_session_free(nullptr);
  ikbo_result_free(nullptr);
  EXPECT_EQ(ikbo_package_get_info(nullptr), nullptr);
  EXPECT_EQ(ikbo_result_get_outputs(nullptr, 0), nullptr);
  EXPECT_STREQ(ikbo_error_message(nullptr), "");
}

}  // namespace
}  // namespace ikbo::runtime::testing
