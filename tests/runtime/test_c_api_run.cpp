// SPDX-License-Identifier: Apache-2.0
// Runs through the C header, on the stub executor.
#include <array>
#include <utility>

#include "fixtures.h"
#include "ikbo/ikbo.h"

namespace ikbo::runtime::testing {
namespace {

// The tensors of a Request as C has them.
class CRequest {
 public:
  explicit CRequest(Request request) : request_(std::move(request)) {
    for (const TensorView& view : request_.tensors) {
      tensors_.push_back({view.data, view.bytes, view.shape.data(),
                          static_cast<std::int32_t>(view.shape.size()),
                          static_cast<ikbo_dtype>(view.dtype)});
    }
  }

  CRequest(const CRequest&) = delete;
  CRequest& operator=(const CRequest&) = delete;

  ikbo_request get() const {
    return {request_.num_users, request_.num_candidates, tensors_.data(), tensors_.size()};
  }
  const Request& cpp() const { return request_; }
  ikbo_tensor& tensor(std::size_t i) { return tensors_[i]; }

 private:
  Request request_;
  std::vector<ikbo_tensor> tensors_;
};

std::vector<float> floats_of(const ikbo_tensor& tensor) {
  const auto* data = static_cast<const float*>(tensor.data);
  return {data, data + tensor.bytes / sizeof(float)};
}

class CApiRunTest : public ::testing::Test {
 protected:
  CApiRunTest() {
    const std::string path =
        folder_.write("m.pt2", archive_bytes({{"m/extra/ikbo/manifest.json", manifest_json()}}));
    ikbo_package* package = nullptr;
    ikbo_model* model = nullptr;
    check(ikbo_package_open(path.c_str(), nullptr, &package));
    check(ikbo_model_load(package, nullptr, &model));
    check(ikbo_session_create(model, &session_));
    // A session needs neither any more.
    ikbo_model_free(model);
    ikbo_package_free(package);
  }
  ~CApiRunTest() override {
    ikbo_result_free(result_);
    ikbo_session_free(session_);
  }

  static void check(ikbo_error* error) {
    EXPECT_EQ(error, nullptr) << ikbo_error_message(error);
    ikbo_error_free(error);
  }

  std::string refused(const CRequest& request) {
    const ikbo_request given = request.get();
    ikbo_error* error = ikbo_session_run(session_, &given, 1, &result_);
    EXPECT_NE(error, nullptr);
    EXPECT_EQ(result_, nullptr);
    const std::string text = ikbo_error_message(error);
    ikbo_error_free(error);
    return text;
  }

  // What the C++ runtime answers.
  static std::vector<float> scores_of(const CRequest& request) {
    const auto bytes = archive_bytes({{"m/extra/ikbo/manifest.json", manifest_json()}});
    const TempFolder folder;
    const auto model = Model::load(Package::open(folder.write("m.pt2", bytes)), {});
    const RunInputs inputs{request.cpp().num_users, request.cpp().num_candidates,
                           request.cpp().tensors};
    return values_of<float>(Session(model).run(inputs)[kScore]);
  }

  const TempFolder folder_;
  ikbo_session* session_ = nullptr;
  ikbo_result* result_ = nullptr;
};

TEST_F(CApiRunTest, RunsOneRequest) {
  const CRequest request(make_request(2, 5, 1));
  const ikbo_request given = request.get();
  check(ikbo_session_run(session_, &given, 1, &result_));
  const ikbo_tensor* outputs = ikbo_result_get_outputs(result_, 0);
  ASSERT_NE(outputs, nullptr);
  EXPECT_EQ(outputs[kScore].dtype, IKBO_FLOAT32);
  EXPECT_EQ(Shape(outputs[kScore].shape, outputs[kScore].shape + outputs[kScore].rank),
            (Shape{5, 2}));
  EXPECT_EQ(floats_of(outputs[kScore]), scores_of(request));
  EXPECT_EQ(outputs[kProfile].shape[0], 2);
  EXPECT_EQ(ikbo_result_get_outputs(result_, 1), nullptr);
}

TEST_F(CApiRunTest, RunsSeveralTogether) {
  const std::array<CRequest, 3> requests = {CRequest(make_request(1, 3, 1)),
                                            CRequest(make_request(2, 0, 2)),
                                            CRequest(make_request(1, 7, 3))};
  std::vector<ikbo_request> given;
  for (const CRequest& request : requests) {
    given.push_back(request.get());
  }
  check(ikbo_session_run(session_, given.data(), given.size(), &result_));
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const ikbo_tensor& score = ikbo_result_get_outputs(result_, i)[kScore];
    EXPECT_EQ(score.shape[0], given[i].num_candidates);
    EXPECT_EQ(floats_of(score), scores_of(requests[i])) << "request " << i;
  }
}

TEST_F(CApiRunTest, MakesTheIndexOfOneUser) {
  CRequest request(make_request(1, 4, 1));
  const std::vector<float> expected = scores_of(request);
  request.tensor(kIndex) = {nullptr, 0, nullptr, 0, IKBO_INT32};
  const ikbo_request given = request.get();
  check(ikbo_session_run(session_, &given, 1, &result_));
  EXPECT_EQ(floats_of(ikbo_result_get_outputs(result_, 0)[kScore]), expected);
}

TEST_F(CApiRunTest, RefusesWhatDoesNotFit) {
  CRequest request(make_request(1, 4, 1));
  request.tensor(kItem).dtype = IKBO_FLOAT64;
  expect_contains(refused(request), "item");
  request.tensor(kItem).dtype = static_cast<ikbo_dtype>(10);
  expect_contains(refused(request), "input 3: dtype must be an ikbo_dtype; got 10");
  request.tensor(kItem).dtype = IKBO_FLOAT32;
  request.tensor(kItem).bytes -= 1;
  expect_contains(refused(request), "item");
  request.tensor(kItem).bytes += 1;
  const void* data = std::exchange(request.tensor(kItem).data, nullptr);
  expect_contains(refused(request), "input 3: data must not be NULL, since bytes is 32");
  request.tensor(kItem).data = data;
  const std::int64_t* shape = std::exchange(request.tensor(kItem).shape, nullptr);
  expect_contains(refused(request), "input 3: shape must have rank extents; got rank 2 and no");
  request.tensor(kItem).shape = shape;
  request.tensor(kItem).rank = -1;
  expect_contains(refused(request), "got rank -1");
  request.tensor(kItem).rank = 2;
  // And runs when all is well again.
  const ikbo_request given = request.get();
  check(ikbo_session_run(session_, &given, 1, &result_));
}

TEST_F(CApiRunTest, RefusesMoreThanARunMayHave) {
  const CRequest request(make_request(1, 9, 1));
  const std::vector<ikbo_request> given = {request.get(), request.get()};
  ikbo_error* error = ikbo_session_run(session_, given.data(), given.size(), &result_);
  ASSERT_NE(error, nullptr);
  expect_contains(ikbo_error_message(error), "16");
  ikbo_error_free(error);
  error = ikbo_session_run(session_, given.data(), 0, &result_);
  ASSERT_NE(error, nullptr);
  ikbo_error_free(error);
}

}  // namespace
}  // namespace ikbo::runtime::testing
