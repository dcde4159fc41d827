// SPDX-License-Identifier: Apache-2.0
// ikbo::bmm on a GPU against an fp64 reference: every output of every case.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "device_inputs.cuh"
#include "device_memory.h"
#include "ikbo/bmm_cuda.h"
#include "repeated_launches.cuh"
#include "two_streams.cuh"

namespace ikbo::test {
namespace {

enum class Order { kSorted, kShuffled };

struct BmmCase {
  int num_users;
  int num_candidates;
  int p = 40;
  int r = 64;
  int n = 16;
  bool transpose_a = false;
  bool transpose_b = false;
  DType dtype = DType::kFloat16;
  Order order = Order::kShuffled;
  Values values = Values::kNormal;
  int padding = 0;                      // elements after each row of a_user and b_cand
  int offset = 0;                       // elements before the first of a_user and b_cand
  BmmKernel kernel = BmmKernel::kSm90;  // that must be chosen on Hopper

  std::string id() const {
    return "U" + std::to_string(num_users) + "_B" + std::to_string(num_candidates) + "_P" +
           std::to_string(p) + "_R" + std::to_string(r) + "_N" + std::to_string(n) + "_t" +
           std::to_string(transpose_a) + std::to_string(transpose_b) + "_" +
           std::string(name_of(dtype)) + "_o" + std::to_string(static_cast<int>(order)) + "_v" +
           std::to_string(static_cast<int>(values)) + "_p" + std::to_string(padding) + "_f" +
           std::to_string(offset);
  }
};

struct FillArgs {
  void* data;
  std::int64_t count;
  DType dtype;
  Values values;
  std::int64_t row;     // elements that count in a row
  std::int64_t stride;  // between rows
  std::int64_t rows_of_matrix;
  const std::uint8_t* is_read;  // of each matrix; nullptr: all are
  std::uint64_t seed;
};

// Random values; what no candidate may read is left as it is: NaN.
__global__ void fill_kernel(FillArgs f) {
  for (std::int64_t i = blockIdx.x * std::int64_t{256} + threadIdx.x; i < f.count;
       i += gridDim.x * std::int64_t{256}) {
    const std::int64_t matrix = i / f.stride / f.rows_of_matrix;
    const bool counts = i % f.stride < f.row && (f.is_read == nullptr || f.is_read[matrix] != 0);
    if (counts) store_value(f.data, i, f.dtype, random_value(f.values, 1.0f, f.seed + i));
  }
}

// One thread per output: the fp64 sum of exact products, and its magnitude for the budget.
__global__ void compare_kernel(BmmParams p, double roundoff, bool is_exact, int* g_worst) {
  const std::int64_t count = std::int64_t{p.num_candidates} * p.p * p.n;
  for (std::int64_t at = blockIdx.x * std::int64_t{128} + threadIdx.x; at < count;
       at += gridDim.x * std::int64_t{128}) {
    const std::int64_t column = at % p.n;
    const std::int64_t row = at / p.n % p.p;
    const std::int64_t b = at / p.n / p.p;
    const std::int64_t a = p.cand_to_user[b] * p.stride_a_u + row * p.stride_a_p;
    double sum = 0;
    double magnitude = 0;
    for (int r = 0; r < p.r; ++r) {
      const double product =
          load_value(p.a_user, a + r * p.stride_a_r, p.dtype) *
          load_value(p.b_cand, b * p.stride_b_b + r * p.stride_b_r + column * p.stride_b_n,
                     p.dtype);
      sum += product;
      magnitude += fabs(product);
    }
    const double got = load_value(p.out, at, p.dtype);
    // One rounding of the result, and those of a sum of R products in fp32.
    const double budget = 1.05 * roundoff * fabs(sum) + 3e-7 * p.r * 0.25 * magnitude + 1e-6;
    const double expected = is_exact ? rounded_value(static_cast<float>(sum), p.dtype) : sum;
    WorstExcess::report(g_worst, fabs(got - expected) - (is_exact ? 0 : budget));
  }
}

std::vector<std::int32_t> make_index(const BmmCase& c) {
  std::mt19937 random(static_cast<unsigned>(c.num_candidates * 131 + c.num_users));
  std::vector<std::int32_t> index(static_cast<std::size_t>(c.num_candidates));
  for (std::size_t b = 0; b < index.size(); ++b) {
    // Uneven: the square puts more candidates on the first users; some users have none.
    const double at = static_cast<double>(b) / static_cast<double>(index.size());
    index[b] = static_cast<std::int32_t>(at * at * c.num_users);
  }
  if (c.order == Order::kShuffled) std::shuffle(index.begin(), index.end(), random);
  return index;
}

template <typename T>
std::unique_ptr<GuardedBuffer> copy_of(const std::vector<T>& values) {
  auto buffer = std::make_unique<GuardedBuffer>(values.size() * sizeof(T));
  IKBO_CUDA_CHECK(
      cudaMemcpy(buffer->data(), values.data(), buffer->bytes(), cudaMemcpyHostToDevice), "values");
  return buffer;
}

// One operand: matrices of rows x columns, rows `padding` elements apart from each other.
struct Operand {
  Operand(const BmmCase& c, std::int64_t batch, std::int64_t rows_of_matrix, std::int64_t row,
          const std::uint8_t* is_read, std::uint64_t seed)
      : stride(row + c.padding),
        matrix(rows_of_matrix * stride),
        memory((batch * matrix + c.offset) * size_of(c.dtype)),
        data(memory.data<unsigned char>() + c.offset * size_of(c.dtype)) {
    fill_kernel<<<512, 256>>>({.data = data,
                               .count = batch * matrix,
                               .dtype = c.dtype,
                               .values = c.values,
                               .row = row,
                               .stride = stride,
                               .rows_of_matrix = rows_of_matrix,
                               .is_read = is_read,
                               .seed = seed << 40});
  }

  std::int64_t stride;
  std::int64_t matrix;
  GuardedBuffer memory;
  void* data;
};

struct BmmProblem {
  explicit BmmProblem(const BmmCase& c)
      : host_index(make_index(c)),
        index(copy_of(host_index)),
        is_read(copy_of(users_with_candidates(c, host_index))),
        a(c, c.num_users, c.transpose_a ? c.r : c.p, c.transpose_a ? c.p : c.r,
          is_read->data<std::uint8_t>(), 1),
        b(c, c.num_candidates, c.transpose_b ? c.n : c.r, c.transpose_b ? c.r : c.n, nullptr, 2),
        out(size_of(c.dtype) * c.num_candidates * c.p * c.n) {
    params = {.num_users = c.num_users,
              .num_candidates = c.num_candidates,
              .p = c.p,
              .r = c.r,
              .n = c.n,
              .dtype = c.dtype,
              .a_user = a.data,
              .b_cand = b.data,
              .cand_to_user = index->data<std::int32_t>(),
              .out = out.data(),
              .stride_a_u = a.matrix,
              .stride_a_p = c.transpose_a ? 1 : a.stride,
              .stride_a_r = c.transpose_a ? a.stride : 1,
              .stride_b_b = b.matrix,
              .stride_b_r = c.transpose_b ? 1 : b.stride,
              .stride_b_n = c.transpose_b ? b.stride : 1};
  }

  static std::vector<std::uint8_t> users_with_candidates(const BmmCase& c,
                                                         const std::vector<std::int32_t>& index) {
    std::vector<std::uint8_t> has(static_cast<std::size_t>(c.num_users));
    for (const std::int32_t user : index) has[static_cast<std::size_t>(user)] = 1;
    return has;
  }

  std::vector<std::int32_t> host_index;
  std::unique_ptr<GuardedBuffer> index, is_read;
  Operand a, b;
  GuardedBuffer out;
  BmmParams params;
};

struct BmmRun {
  explicit BmmRun(const BmmCase& c, int num_sms = 0) : problem(c), limits(query_device_limits(0)) {
    if (num_sms > 0) limits.num_sms = num_sms;
    config = select_bmm_cuda_config(problem.params, query_device_limits(0));
    workspace.emplace(bmm_workspace_bytes(problem.params, config));
  }
  void operator()(cudaStream_t stream = nullptr) {
    bmm(problem.params, config, limits, workspace->data(), stream);
  }
  void poison() const { problem.out.poison(); }
  std::vector<std::uint16_t> result() {
    poison();
    workspace->poison();
    (*this)();
    return read_back();
  }
  std::vector<std::uint16_t> read_back() const {
    std::vector<std::uint16_t> values(problem.out.bytes() / 2);
    IKBO_CUDA_CHECK(
        cudaMemcpy(values.data(), problem.out.data(), problem.out.bytes(), cudaMemcpyDeviceToHost),
        "out");
    return values;
  }

  BmmProblem problem;
  DeviceLimits limits;
  BmmCudaConfig config;
  std::optional<GuardedBuffer> workspace;
};

bool is_hopper() { return query_device_limits(0).compute_capability == 90; }

class BmmTest : public testing::TestWithParam<BmmCase> {};

TEST_P(BmmTest, MatchesFp64Reference) {
  const BmmCase& c = GetParam();
  BmmRun run(c);
  if (is_hopper()) ASSERT_EQ(run.config.kernel, c.kernel) << to_string(run.config);
  run();
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess) << to_string(run.config);
  const WorstExcess worst;
  const double roundoff = c.dtype == DType::kFloat16    ? 1.0 / 2048
                          : c.dtype == DType::kBFloat16 ? 1.0 / 256
                                                        : 1.0 / (1 << 24);
  compare_kernel<<<4096, 128>>>(run.problem.params, roundoff, c.values == Values::kTernary,
                                worst.device());
  EXPECT_EQ(worst.read(), 0.0f) << to_string(run.config);
  EXPECT_TRUE(run.problem.out.guards_are_intact());
  EXPECT_TRUE(run.workspace->guards_are_intact());
}

// Both forms of each operand.
void add_all_forms(std::vector<BmmCase>& all, BmmCase c) {
  for (const bool transpose_a : {false, true}) {
    for (const bool transpose_b : {false, true}) {
      c.transpose_a = transpose_a;
      c.transpose_b = transpose_b;
      all.push_back(c);
    }
  }
}

std::vector<BmmCase> hopper_cases() {
  std::vector<BmmCase> all;
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (const Values values : {Values::kTernary, Values::kNormal}) {
      for (const int n : {8, 16, 24, 64, 72, 128}) {
        add_all_forms(all, {.num_users = 5,
                            .num_candidates = 70,
                            .p = 72,
                            .r = 96,
                            .n = n,
                            .dtype = dtype,
                            .values = values});
      }
    }
  }
  for (const int p : {8, 64, 120, 128, 192, 256, 320, 1000}) {
    add_all_forms(
        all, {.num_users = 9, .num_candidates = 300, .p = p, .n = 32, .values = Values::kTernary});
  }
  for (const int r : {8, 16, 24, 56, 64, 72, 128, 200, 512, 1024}) {
    add_all_forms(all, {.num_users = 4,
                        .num_candidates = 200,
                        .p = 200,
                        .r = r,
                        .n = 32,
                        .values = Values::kTernary});
    add_all_forms(all, {.num_users = 4, .num_candidates = 90, .p = 104, .r = r, .n = 192});
  }
  for (const int b : {1, 2, 3, 63, 64, 65, 131, 3000}) {
    add_all_forms(all, {.num_users = std::min(b, 40), .num_candidates = b, .n = 8});
    add_all_forms(
        all, {.num_users = std::min(b, 40), .num_candidates = b, .n = 64, .order = Order::kSorted});
  }
  return all;
}

// Matrices that do not fit into shared memory are streamed, for pairs of tiles and for odd ones.
std::vector<BmmCase> streamed_cases() {
  std::vector<BmmCase> all;
  for (const int r : {1032, 1536}) {
    BmmCase c{.num_users = 5, .num_candidates = 130, .p = 264, .r = r, .n = 32};
    c.values = Values::kTernary;
    add_all_forms(all, c);
    c.dtype = DType::kBFloat16;
    c.n = 64;
    add_all_forms(all, c);
    c.num_users = 40;
    c.p = 72;
    add_all_forms(all, c);
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Streamed, BmmTest, testing::ValuesIn(streamed_cases()),
                         [](const auto& info) { return info.param.id(); });

// One column of a candidate, R contiguous; results that are not whole rows of a box.
std::vector<BmmCase> column_cases() {
  std::vector<BmmCase> all;
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (const bool transpose_a : {false, true}) {
      for (const bool transpose_b : {false, true}) {
        for (const int p : {8, 64, 200, 320}) {
          all.push_back({.num_users = 7,
                         .num_candidates = 900,
                         .p = p,
                         .r = 72,
                         .n = 1,
                         .transpose_a = transpose_a,
                         .transpose_b = transpose_b,
                         .dtype = dtype});
        }
      }
    }
    for (const int n : {8, 16, 32}) {
      for (const bool transpose_b : {false, true}) {
        for (const int p : {1, 33, 79, 257}) {
          all.push_back({.num_users = 5,
                         .num_candidates = 130,
                         .p = p,
                         .r = 136,
                         .n = n,
                         .transpose_b = transpose_b,
                         .dtype = dtype,
                         .values = Values::kTernary});
        }
      }
    }
  }
  all.push_back({.num_users = 300,
                 .num_candidates = 700,
                 .p = 136,
                 .r = 130,
                 .n = 1,
                 .transpose_b = true,
                 .padding = 6});
  return all;
}

INSTANTIATE_TEST_SUITE_P(Columns, BmmTest, testing::ValuesIn(column_cases()),
                         [](const auto& info) { return info.param.id(); });

INSTANTIATE_TEST_SUITE_P(Hopper, BmmTest, testing::ValuesIn(hopper_cases()),
                         [](const auto& info) { return info.param.id(); });

// From 1 to 1000 candidates a user; more users than candidates; rows apart from each other.
std::vector<BmmCase> ratio_cases() {
  std::vector<BmmCase> all;
  for (const int users : {2000, 1000, 200, 30, 2, 1}) {
    for (const int n : {8, 64}) {
      add_all_forms(all, {.num_users = users, .num_candidates = 2000, .p = 96, .n = n});
    }
  }
  add_all_forms(all, {.num_users = 20000, .num_candidates = 500, .p = 64, .n = 8});
  for (const auto& [n, padding, offset] : {std::array{24, 8, 8}, {128, 24, 16}}) {
    BmmCase c{.num_users = 20, .num_candidates = 400, .p = 136, .r = 136, .n = n};
    c.padding = padding;
    c.offset = offset;
    add_all_forms(all, c);
  }
  // NaN in the 16 bytes of the last elements of a row.
  for (const int n : {24, 64}) {
    for (const bool transpose_a : {false, true}) {
      BmmCase c{.num_users = 20, .num_candidates = 400, .r = 130, .n = n, .transpose_b = true};
      c.p = transpose_a ? 130 : 135;
      c.transpose_a = transpose_a;
      c.padding = 6;
      all.push_back(c);
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Ratios, BmmTest, testing::ValuesIn(ratio_cases()),
                         [](const auto& info) { return info.param.id(); });

// As many users and candidates as each CTA groups by itself, and one more.
std::vector<BmmCase> grouping_cases() {
  std::vector<BmmCase> all;
  for (const Order order : {Order::kSorted, Order::kShuffled}) {
    for (const auto& [users, candidates] : {std::pair{512, 8192}, {513, 8192}, {512, 8193}}) {
      for (const int n : {1, 24, 64}) {
        all.push_back({.num_users = users, .num_candidates = candidates, .p = 72, .n = n});
        all.back().order = order;
      }
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Grouping, BmmTest, testing::ValuesIn(grouping_cases()),
                         [](const auto& info) { return info.param.id(); });

// function size waiver: tables of cases, one field a line.
std::vector<BmmCase> generic_cases() {
  std::vector<BmmCase> all;
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32}) {
    const BmmKernel kernel = dtype == DType::kFloat32 ? BmmKernel::kSimt : BmmKernel::kMma;
    for (const Values values : {Values::kTernary, Values::kNormal}) {
      add_all_forms(all, {.num_users = 7,
                          .num_candidates = 90,
                          .p = 33,
                          .r = 47,
                          .n = 5,
                          .dtype = dtype,
                          .values = values,
                          .kernel = kernel});
    }
    for (const int size : {1, 2, 15, 17, 63, 65, 130}) {
      for (int BmmCase::* const dimension : {&BmmCase::p, &BmmCase::r, &BmmCase::n}) {
        BmmCase c{.num_users = 3, .num_candidates = 40, .p = 9, .r = 33, .n = 3, .dtype = dtype};
        c.kernel = kernel;
        c.*dimension = size;
        add_all_forms(all, c);
      }
    }
    add_all_forms(all, {.num_users = 3,
                        .num_candidates = 40,
                        .p = 64,
                        .r = 64,
                        .n = 64,
                        .dtype = dtype,
                        .padding = 3,
                        .offset = 1,
                        .kernel = kernel});
    all.push_back({.num_users = 3, .num_candidates = 40, .r = 0, .dtype = dtype, .kernel = kernel});
    all.push_back({.num_users = 1500,
                   .num_candidates = 1500,
                   .p = 20,
                   .r = 1104,
                   .n = 8,
                   .dtype = dtype,
                   .kernel = kernel});
    all.push_back({.num_users = 2,
                   .num_candidates = 1000,
                   .p = 70,
                   .r = 33,
                   .n = 1,
                   .dtype = dtype,
                   .kernel = kernel});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Generic, BmmTest, testing::ValuesIn(generic_cases()),
                         [](const auto& info) { return info.param.id(); });

// For tools that make a kernel a hundred times slower.
std::vector<BmmCase> small_cases() {
  std::vector<BmmCase> all;
  add_all_forms(all, {.num_users = 3, .num_candidates = 20, .p = 72, .r = 72, .n = 24});
  add_all_forms(all, {.num_users = 3, .num_candidates = 7, .p = 40, .r = 40, .n = 64});
  add_all_forms(all, {.num_users = 3, .num_candidates = 9, .p = 80, .r = 72, .n = 32});
  add_all_forms(all, {.num_users = 3, .num_candidates = 70, .p = 80, .r = 72, .n = 1});
  add_all_forms(all, {.num_users = 2, .num_candidates = 5, .p = 72, .r = 1032, .n = 64});
  for (const auto& [users, candidates] : {std::pair{3, 70}, {513, 20}, {3, 8193}}) {
    for (const Order order : {Order::kSorted, Order::kShuffled}) {
      all.push_back({.num_users = users, .num_candidates = candidates, .p = 8, .r = 8, .n = 8});
      all.back().order = order;
    }
  }
  add_all_forms(
      all,
      {.num_users = 3, .num_candidates = 9, .p = 40, .r = 23, .n = 5, .kernel = BmmKernel::kMma});
  all.push_back({.num_users = 3,
                 .num_candidates = 9,
                 .p = 40,
                 .r = 23,
                 .n = 5,
                 .dtype = DType::kFloat32,
                 .kernel = BmmKernel::kSimt});
  return all;
}

INSTANTIATE_TEST_SUITE_P(Small, BmmTest, testing::ValuesIn(small_cases()),
                         [](const auto& info) { return info.param.id(); });

// Offsets beyond 2^31 elements, in the candidates and in the result.
TEST(BmmOffsets, Of64Bits) {
  constexpr BmmCase kVectors{
      .num_users = 50, .num_candidates = 40000, .p = 1024, .r = 1024, .n = 56};
  BmmCase boxes = kVectors;
  boxes.n = 64;
  BmmCase elements = kVectors;
  elements.dtype = DType::kFloat32;
  for (const BmmCase& c : {kVectors, boxes, elements}) {
    const DType dtype = c.dtype;
    std::size_t free = 0;
    std::size_t total = 0;
    IKBO_CUDA_CHECK(cudaMemGetInfo(&free, &total), "memory");
    const std::size_t needed = size_of(dtype) * c.num_candidates * c.n * (c.p + c.r) + (1u << 30);
    if (free < needed) GTEST_SKIP() << "needs " << needed << " free bytes; " << free << " are";
    BmmRun run(c);
    run();
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess) << to_string(run.config);
    // The last candidates against the reference.
    BmmParams p = run.problem.params;
    constexpr std::int64_t kFew = 20;
    const std::int64_t skipped = c.num_candidates - kFew;
    const auto bytes = static_cast<std::int64_t>(size_of(dtype));
    ASSERT_GT(skipped * p.stride_b_b, std::int64_t{1} << 31);
    ASSERT_GT(skipped * c.p * c.n, std::int64_t{1} << 31);
    p.b_cand = static_cast<const unsigned char*>(p.b_cand) + skipped * p.stride_b_b * bytes;
    p.out = static_cast<unsigned char*>(p.out) + skipped * c.p * c.n * bytes;
    p.cand_to_user += skipped;
    p.num_candidates = kFew;
    const WorstExcess worst;
    compare_kernel<<<4096, 128>>>(p, dtype == DType::kFloat16 ? 1.0 / 2048 : 1.0 / (1 << 24), false,
                                  worst.device());
    EXPECT_EQ(worst.read(), 0.0f) << to_string(run.config);
  }
}

const BmmCase kBoxes{.num_users = 15, .num_candidates = 1025, .p = 300, .r = 136, .n = 64};
const BmmCase kCopies{.num_users = 15, .num_candidates = 2049, .p = 300, .r = 136, .n = 24};
const BmmCase kNarrowBoxes{.num_users = 15, .num_candidates = 1025, .p = 300, .r = 136, .n = 32};
const BmmCase kLargeMatrix{.num_users = 15, .num_candidates = 1025, .p = 300, .r = 1024, .n = 64};
const BmmCase kSingle{
    .num_users = 15, .num_candidates = 9001, .p = 304, .r = 136, .n = 1, .transpose_b = true};
const BmmCase kElements{
    .num_users = 15, .num_candidates = 1025, .p = 90, .r = 130, .n = 7, .kernel = BmmKernel::kMma};

class BmmEveryWay : public testing::TestWithParam<BmmCase> {};
INSTANTIATE_TEST_SUITE_P(Middle, BmmEveryWay,
                         testing::Values(kBoxes, kCopies, kNarrowBoxes, kLargeMatrix, kSingle,
                                         kElements),
                         [](const auto& info) { return info.param.id(); });

TEST_P(BmmEveryWay, LaunchesAreBitwiseEqual) {
  BmmRun run(GetParam());
  const auto launch = [&run](void* out) {
    run.problem.params.out = out;
    run();
  };
  EXPECT_EQ(first_difference(run.problem.out, *run.workspace, launch), "");
}

TEST_P(BmmEveryWay, ResultsDoNotDependOnTheSharingOfWork) {
  BmmRun run(GetParam());
  const std::vector<std::uint16_t> all = run.result();
  for (const int num_sms : {1, 7, 66}) {
    BmmRun narrow(GetParam(), num_sms);
    EXPECT_EQ(all, narrow.result()) << num_sms << " multiprocessors";
  }
}

TEST_P(BmmEveryWay, CandidatesDoNotDependOnTheirBatch) {
  const BmmCase& c = GetParam();
  BmmRun run(c);
  const std::vector<std::uint16_t> all = run.result();
  // The last 100 candidates alone, with all users.
  constexpr int kFew = 100;
  const int skipped = c.num_candidates - kFew;
  BmmParams& p = run.problem.params;
  p.b_cand = static_cast<const std::uint16_t*>(p.b_cand) + skipped * p.stride_b_b;
  p.cand_to_user += skipped;
  p.num_candidates = kFew;
  const std::vector<std::uint16_t> few = run.result();
  const std::size_t size = static_cast<std::size_t>(c.p) * c.n;
  EXPECT_TRUE(std::equal(few.begin(), few.begin() + kFew * size, all.begin() + skipped * size));
}

TEST_P(BmmEveryWay, TwoStreamsAndAGraphAtOnce) {
  BmmRun one(GetParam());
  BmmRun two({.num_users = 30, .num_candidates = 900, .p = 100, .r = 64, .n = 32});
  expect_no_change_by_the_other(one, two);
}

}  // namespace
}  // namespace ikbo::test
