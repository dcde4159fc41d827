// SPDX-License-Identifier: Apache-2.0
#include "fixtures.h"

namespace ikbo::runtime::testing {
namespace {

TEST(Manifest, HoldsEveryField) {
  const std::string json = replaced(
      replaced(
          manifest_json(), R"("ops": [])",
          R"("ops": [{"name": "ikbo::linear", "schema": "ikbo::linear(Tensor x) -> Tensor"}])"),
      R"("replay": [])",
      R"("replay": [{"id": "small", "num_users": 2, "num_candidates": 3,
          "inputs": ["a", "b", "c", "d", "e"], "outputs": ["f", "g"], "atol": 1e-5, "rtol": 0,
          "kernels": [{"op": "linear", "kernel": "gemm"}]}])");
  const Manifest parsed = parse_manifest(json, "manifest");
  EXPECT_EQ(parsed.model_name, "ranker");
  EXPECT_EQ(parsed.model_version, "3");
  EXPECT_EQ(parsed.torch_version, "2.11.0+cpu");
  EXPECT_EQ(parsed.device, "cpu");
  EXPECT_EQ(parsed.max_users, 4);
  EXPECT_EQ(parsed.max_candidates, 16);
  ASSERT_EQ(parsed.inputs.size(), 5U);
  EXPECT_EQ(parsed.inputs[kHistory].name, "history");
  EXPECT_EQ(parsed.inputs[kHistory].dtype, DType::kFloat32);
  EXPECT_EQ(parsed.inputs[kHistory].shape, (Shape{-1, 3}));
  EXPECT_EQ(parsed.inputs[kHistory].role, Role::kUser);
  EXPECT_EQ(parsed.inputs[kHistory].row_bytes(), 12U);
  EXPECT_FALSE(parsed.inputs[kHistory].values.has_value());
  ASSERT_TRUE(parsed.inputs[kAge].values.has_value());
  EXPECT_EQ(parsed.inputs[kAge].values->min, 0);
  EXPECT_EQ(parsed.inputs[kAge].values->max, 120);
  EXPECT_EQ(parsed.inputs[kIndex].role, Role::kIndex);
  ASSERT_EQ(parsed.outputs.size(), 2U);
  EXPECT_EQ(parsed.outputs[kProfile].role, Role::kUser);
  ASSERT_EQ(parsed.ops.size(), 1U);
  EXPECT_EQ(parsed.ops[0].name, "ikbo::linear");
  EXPECT_EQ(parsed.ops[0].schema, "ikbo::linear(Tensor x) -> Tensor");
  ASSERT_EQ(parsed.replay.size(), 1U);
  EXPECT_EQ(parsed.replay[0].id, "small");
  EXPECT_EQ(parsed.replay[0].num_users, 2);
  EXPECT_EQ(parsed.replay[0].num_candidates, 3);
  EXPECT_EQ(parsed.replay[0].inputs[4], "e");
  EXPECT_EQ(parsed.replay[0].outputs[1], "g");
  EXPECT_EQ(parsed.replay[0].atol, 1e-5);
  EXPECT_EQ(parsed.replay[0].rtol, 0);
  ASSERT_EQ(parsed.replay[0].kernels.size(), 1U);
  EXPECT_EQ(parsed.replay[0].kernels[0].kernel, "gemm");
  EXPECT_EQ(parsed.spec_json, R"({"rows":[1,2.5]})");
}

TEST(Manifest, HasNoSpecWhereNoneIsGiven) {
  EXPECT_EQ(
      parse_manifest(replaced(manifest_json(), R"({"rows": [1, 2.5]})", "null"), "m").spec_json,
      "");
}

TEST(Manifest, NamesTheGpuThatItIsFor) {
  const std::string json = replaced(manifest_json(), R"("device": "cpu")",
                                    R"("device": "cuda", "compute_capability": 90)");
  const Manifest parsed = parse_manifest(json, "manifest");
  EXPECT_EQ(parsed.device, "cuda");
  EXPECT_EQ(parsed.compute_capability, 90);
  EXPECT_EQ(manifest().compute_capability, 0);
}

TEST(Manifest, IgnoresUnknownFields) {
  EXPECT_NO_THROW(parse_manifest(
      replaced(manifest_json(), R"("device")", R"("written_by": "a newer ikbo", "device")"), "m"));
}

TEST(Manifest, TakesAPackageWithoutUsers) {
  const std::string json = R"({
    "format_version": 1, "model": {"name": "replicated", "version": "1"},
    "torch_version": "2.11.0", "device": "cpu",
    "inputs": [{"name": "x", "dtype": "float32", "shape": [-1], "role": "candidate"}],
    "outputs": [{"name": "y", "dtype": "float32", "shape": [-1], "role": "candidate"}],
    "max_users": 0, "max_candidates": 8, "ops": [], "replay": []})";
  EXPECT_FALSE(parse_manifest(json, "manifest").has_users());
  const std::string with_user = replaced(json, R"([-1], "role": "candidate"}],
    "outputs")",
                                         R"([-1], "role": "user"}],
    "outputs")");
  expect_contains(error_of([&] { parse_manifest(with_user, "manifest"); }),
                  R"(inputs[0].role must be candidate, since max_users is 0; got "user")");
}

struct Broken {
  const char* id;
  const char* from;
  const char* to;
  const char* message;
};

std::ostream& operator<<(std::ostream& out, const Broken& broken) { return out << broken.id; }

// A manifest of format version 2 with this object as its user_stage.
std::string staged_json(const std::string& stage) {
  return replaced(replaced(manifest_json(), R"("format_version": 1)", R"("format_version": 2)"),
                  R"("ops": [])", R"("user_stage": )" + stage + R"(, "ops": [])");
}

TEST(Manifest, SaysWhatTheUserStageHandsOver) {
  const Manifest manifest = parse_manifest(
      staged_json(R"({"state": [{"name": "s", "dtype": "int8", "shape": [-1, 3], "role": "user"}],
                      "passed": ["history"]})"),
      "m");
  ASSERT_TRUE(manifest.user_stage.has_value());
  ASSERT_EQ(manifest.user_stage->state.size(), 1U);
  EXPECT_EQ(manifest.user_stage->state[0].name, "s");
  EXPECT_EQ(manifest.user_stage->state[0].row_bytes(), 3U);
  EXPECT_EQ(manifest.user_stage->passed, (std::vector<std::string>{"history"}));
}

TEST(Manifest, OfFormatVersion1HasNoUserStage) {
  const std::string json =
      replaced(manifest_json(), R"("ops": [])", R"("user_stage": 7, "ops": [])");
  EXPECT_FALSE(parse_manifest(json, "m").user_stage.has_value());
}

TEST(Manifest, OfABrokenUserStageIsRefused) {
  const std::string state = R"("state": [{"name": "s", "dtype": "int8", "shape": [-1],)";
  const std::pair<std::string, std::string> broken[] = {
      {"7", "user_stage must be an object; got 7"},
      {R"({"passed": []})", "user_stage.state is missing"},
      {R"({"state": [], "passed": []})",
       "user_stage.state must be an array with at least one tensor; got []"},
      {"{" + state + R"("role": "candidate"}], "passed": []})",
       R"(user_stage.state[0].role must be user; got "candidate")"},
      {R"({"state": [{"name": "s", "dtype": "int8", "shape": [-1, 2305843009213693951],
           "role": "user"}, {"name": "t", "dtype": "int8", "shape": [-1, 2305843009213693951],
           "role": "user"}, {"name": "u", "dtype": "int8", "shape": [-1, 2305843009213693951],
           "role": "user"}, {"name": "v", "dtype": "int8", "shape": [-1, 2305843009213693951],
           "role": "user"}, {"name": "w", "dtype": "int8", "shape": [-1, 2305843009213693951],
           "role": "user"}], "passed": []})",
       "user_stage.state must be small enough for one user's rows to have fewer than 2^63 bytes"},
      {"{" + state + R"("role": "user"}]})", "user_stage.passed is missing"},
      {"{" + state + R"("role": "user"}], "passed": ["item"]})",
       R"(user_stage.passed[0] must be the name of an input of role user; got "item")"},
      {"{" + state + R"("role": "user"}], "passed": ["age", "age"]})",
       R"(user_stage.passed must be an array of different names; got ["age","age"])"},
  };
  for (const auto& [stage, message] : broken) {
    expect_contains(error_of([&, &json = stage] { parse_manifest(staged_json(json), "m"); }),
                    "m: " + message);
  }
  const std::string without =
      replaced(manifest_json(), R"("format_version": 1)", R"("format_version": 2)");
  expect_contains(error_of([&] { parse_manifest(without, "m"); }), "m: user_stage is missing");
}

class BrokenManifest : public ::testing::TestWithParam<Broken> {};

TEST_P(BrokenManifest, IsRefusedWithTheFieldNamed) {
  const Broken& broken = GetParam();
  const std::string json = replaced(manifest_json(), broken.from, broken.to);
  const std::string error = error_of([&] { parse_manifest(json, "file.pt2: manifest"); });
  expect_contains(error, "file.pt2: manifest");
  expect_contains(error, broken.message);
}

const char* const kOneReplay =
    R"("replay": [{"id": "a", "num_users": 1, "num_candidates": 1,
       "inputs": ["a", "b", "c", "d", "e"], "outputs": ["f", "g"],
       "atol": 0, "rtol": 0, "kernels": []}])";

INSTANTIATE_TEST_SUITE_P(
    Fields, BrokenManifest,
    ::testing::Values(
        Broken{"version_unknown", R"("format_version": 1)", R"("format_version": 3)",
               "format_version must be an integer in [1, 2]; got 3"},
        Broken{"version_missing", R"("format_version": 1,)", "", "format_version is missing"},
        Broken{"version_text", R"("format_version": 1)", R"("format_version": "1")",
               "format_version must be an integer in [1, 2]; got \"1\""},
        Broken{"model_name_is_a_path", R"("name": "ranker")", R"("name": "../ranker")",
               R"(model.name must be letters, digits, '.', '_' or '-', but not '.' or '..'; )"
               R"(got "../ranker")"},
        Broken{"model_name_is_a_path_segment", R"("name": "ranker")", R"("name": "..")",
               R"(model.name must be letters, digits, '.', '_' or '-', but not '.' or '..'; )"
               R"(got "..")"},
        Broken{"model_not_object", R"({"name": "ranker", "version": "3"})", "7",
               "model must be an object; got 7"},
        Broken{"model_name_empty", R"("ranker")", R"("")",
               "model.name must be a non-empty string; got \"\""},
        Broken{"model_version_number", R"("version": "3")", R"("version": 3)",
               "model.version must be a non-empty string; got 3"},
        Broken{"torch_version_missing", R"("torch_version": "2.11.0+cpu",)", "",
               "torch_version is missing"},
        Broken{"device_unknown", R"("device": "cpu")", R"("device": "tpu")",
               "device must be cpu or cuda; got \"tpu\""},
        Broken{"capability_missing", R"("device": "cpu")", R"("device": "cuda")",
               "compute_capability is missing"},
        Broken{"capability_text", R"("device": "cpu")",
               R"("device": "cuda", "compute_capability": "9.0")",
               "compute_capability must be an integer in [10, 999]; got \"9.0\""},
        Broken{"capability_below_any", R"("device": "cpu")",
               R"("device": "cuda", "compute_capability": 9)",
               "compute_capability must be an integer in [10, 999]; got 9"},
        Broken{"capability_of_a_cpu", R"("device": "cpu")",
               R"("device": "cpu", "compute_capability": 90)",
               "compute_capability must be absent, since device is cpu; got 90"},
        Broken{"max_users_negative", R"("max_users": 4)", R"("max_users": -4)",
               "max_users must be an integer in [0, 2147483647]; got -4"},
        Broken{"max_users_fraction", R"("max_users": 4)", R"("max_users": 4.5)",
               "max_users must be an integer in [0, 2147483647]; got 4.5"},
        Broken{"max_candidates_zero", R"("max_candidates": 16)", R"("max_candidates": 0)",
               "max_candidates must be an integer in [1, 2147483647]; got 0"},
        Broken{"max_candidates_beyond_int32", R"("max_candidates": 16)",
               R"("max_candidates": 2147483648)",
               "max_candidates must be an integer in [1, 2147483647]; got 2147483648"},
        Broken{"max_candidates_beyond_int64", R"("max_candidates": 16)",
               R"("max_candidates": 18446744073709551615)",
               "max_candidates must be an integer in [1, 2147483647]; got 18446744073709551615"}));

INSTANTIATE_TEST_SUITE_P(
    Tensors, BrokenManifest,
    ::testing::Values(
        Broken{"name_twice", R"("name": "history")", R"("name": "age")",
               "inputs[1].name must be unique; got \"age\""},
        Broken{"output_name_twice", R"("name": "profile")", R"("name": "score")",
               "outputs[1].name must be unique; got \"score\""},
        Broken{"dtype_unknown", R"("dtype": "int64")", R"("dtype": "complex64")",
               "inputs[0].dtype must be one of bool, uint8, int8, int16, int32, int64, float16, "
               "bfloat16, float32, float64; got \"complex64\""},
        Broken{"role_unknown", R"([-1, 3], "role": "user")", R"([-1, 3], "role": "item")",
               "inputs[1].role must be one of user, candidate, index; got \"item\""},
        Broken{"role_missing", R"([-1, 3], "role": "user")", "[-1, 3]",
               "inputs[1].role is missing"},
        Broken{"shape_empty", R"("shape": [-1, 3])", R"("shape": [])",
               "inputs[1].shape must be a shape whose first extent is the batch (-1); got []"},
        Broken{"shape_fixed_batch", R"("shape": [-1, 3])", R"("shape": [7, 3])",
               "inputs[1].shape[0] must be an integer in [-1, -1]; got 7"},
        Broken{"shape_negative", R"("shape": [-1, 3])", R"("shape": [-1, -3])",
               "inputs[1].shape[1] must be an integer in [0, 9223372036854775807]; got -3"},
        Broken{"shape_overflows", R"("shape": [-1, 3])", R"("shape": [-1, 4294967296, 4294967296])",
               "inputs[1].shape must be small enough for 4 rows to have fewer than 2^63 bytes; got "
               "[-1,4294967296,4294967296]"},
        Broken{"shape_overflows_by_rows", R"("shape": [-1, 3])",
               R"("shape": [-1, 1152921504606846976])", "inputs[1].shape must be small enough"},
        Broken{"values_reversed", R"("max": 120)", R"("max": -1)",
               "inputs[0].values.max must be an integer in [0, 9223372036854775807]; got -1"},
        Broken{"values_one_sided", R"("min": 0, )", "", "inputs[0].values.min is missing"},
        Broken{"values_of_floats", R"("dtype": "int64")", R"("dtype": "float64")",
               "inputs[0].values must be absent: the tensor is an index or has no integer dtype; "
               "got {\"min\":0,\"max\":120}"},
        Broken{"index_int64", R"("dtype": "int32")", R"("dtype": "int64")",
               "inputs[4].dtype must be int32, since the role is index; got \"int64\""},
        Broken{"index_2d", R"("dtype": "int32", "shape": [-1])",
               R"("dtype": "int32", "shape": [-1, 1])",
               "inputs[4].shape must be [-1], since the role is index; got [-1,1]"},
        Broken{"index_missing", R"("role": "index")", R"("role": "candidate")",
               "inputs must be an array with one tensor of role index, since max_users is not 0"},
        Broken{"index_in_outputs", R"("float64", "shape": [-1, 2], "role": "user")",
               R"("int32", "shape": [-1], "role": "index")",
               "outputs must be an array without an index"},
        Broken{"users_without_max", R"("max_users": 4)", R"("max_users": 0)",
               "inputs[0].role must be candidate, since max_users is 0; got \"user\""}));

INSTANTIATE_TEST_SUITE_P(
    OpsAndReplay, BrokenManifest,
    ::testing::Values(
        Broken{"ops_missing", R"("ops": [],)", "", "ops is missing"},
        Broken{"ops_object", R"("ops": [])", R"("ops": {})", "ops must be an array; got {}"},
        Broken{"op_foreign", R"("ops": [])", R"("ops": [{"name": "aten::mm", "schema": "x"}])",
               "ops[0].name must be the name of an ikbo operator; got \"aten::mm\""},
        Broken{"op_twice", R"("ops": [])",
               R"("ops": [{"name": "ikbo::a", "schema": "x"}, {"name": "ikbo::a", "schema": "x"}])",
               "ops[1].name must be unique; got \"ikbo::a\""},
        Broken{"op_without_schema", R"("ops": [])", R"("ops": [{"name": "ikbo::a"}])",
               "ops[0].schema is missing"},
        Broken{"replay_missing", R"("replay": [],)", "", "replay is missing"},
        Broken{"replay_users", R"("replay": [])", R"("replay": [{"id": "a", "num_users": 5}])",
               "replay[0].num_users must be an integer in [1, 4]; got 5"},
        Broken{"replay_inputs", R"("replay": [])",
               R"("replay": [{"id": "a", "num_users": 1, "num_candidates": 1, "inputs": ["a"]}])",
               "replay[0].inputs must be an array with one entry per input; got [\"a\"]"}));

TEST(Manifest, ChecksReplayTolerancesAndIds) {
  const std::string json = replaced(manifest_json(), R"("replay": [])", kOneReplay);
  EXPECT_NO_THROW(parse_manifest(json, "m"));
  expect_contains(
      error_of([&] { parse_manifest(replaced(json, R"("atol": 0)", R"("atol": -1)"), "m"); }),
      "replay[0].atol must be a number >= 0; got -1");
  expect_contains(
      error_of([&] { parse_manifest(replaced(json, R"(["f", "g"])", R"(["f", 3])"), "m"); }),
      "replay[0].outputs[1] must be a non-empty string; got 3");
  const std::string one = std::string(kOneReplay).substr(11, std::string(kOneReplay).size() - 12);
  expect_contains(error_of([&] { parse_manifest(replaced(json, one, one + ", " + one), "m"); }),
                  "replay[1].id must be unique; got \"a\"");
}

TEST(Manifest, RefusesWhatIsNotADocument) {
  expect_contains(error_of([] { parse_manifest("{\"format_version\": 1", "m"); }), "m is not JSON");
  expect_contains(error_of([] { parse_manifest("", "m"); }), "m is not JSON");
  expect_contains(error_of([] { parse_manifest("[]", "m"); }),
                  "m: the document must be an object; got []");
  expect_contains(error_of([] { parse_manifest(std::string(100'000, '['), "m"); }),
                  "m is not JSON");
}

TEST(Manifest, ShortensLongValues) {
  const std::string json = replaced(manifest_json(), R"("device": "cpu")",
                                    R"("device": ")" + std::string(10'000, 'x') + "\"");
  EXPECT_LT(error_of([&] { parse_manifest(json, "m"); }).size(), 400U);
}

}  // namespace
}  // namespace ikbo::runtime::testing
