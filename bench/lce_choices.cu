// SPDX-License-Identifier: Apache-2.0
// Times what lce_sm90 chose against what it could have chosen, on an H200: the kernel with other
// tiles, pipelines and stages, compiled from the same sources, and with the changes that
// lce_designs.patch makes to a copy of them. Prints a line of JSON a case; called by
// bench_lce_choices.py. Each alternative is compared with the chosen form first.
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/lce/lce_generic.h"
#include "kernels/lce/lce_sm90_instance.cuh"

namespace {

using namespace ikbo;
using lce_impl::Sm90Traits;
using lce_impl::Stage;
using lce_impl::StageLaunch;

constexpr int kRounds = 120;
constexpr int kUntimedRounds = 10;
constexpr std::size_t kFlushedBytes = std::size_t{256} << 20;

void check(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

struct FreeDevice {
  void operator()(void* data) const { cudaFree(data); }
};
using DeviceBuffer = std::unique_ptr<void, FreeDevice>;

DeviceBuffer allocate(std::size_t bytes) {
  void* data = nullptr;
  check(cudaMalloc(&data, std::max<std::size_t>(bytes, 1)));
  return DeviceBuffer(data);
}

__global__ void fill_kernel(__half* values, std::int64_t count, std::uint32_t seed, float scale) {
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    std::uint32_t bits = (static_cast<std::uint32_t>(i) + seed) * 2654435761u;
    bits = (bits ^ bits >> 15) * 2246822519u;
    bits ^= bits >> 13;
    values[i] = __float2half(scale * (static_cast<float>(bits & 0xffff) / 32768.0f - 1.0f));
  }
}

DeviceBuffer random_halves(std::int64_t count, std::uint32_t seed, float scale) {
  DeviceBuffer values = allocate(count * sizeof(__half));
  fill_kernel<<<512, 256>>>(static_cast<__half*>(values.get()), count, seed, scale);
  check(cudaGetLastError());
  return values;
}

struct Case {
  int num_candidates;
  double ratio;
  bool is_shuffled = false;
};
constexpr int kM = 433;
constexpr int kN = 256;
constexpr int kKUser = 1178;
constexpr int kKCand = 866;

// The operator's tensors of a case.
struct Problem {
  LceParams params;
  DeviceLimits limits = query_device_limits(0);
  std::vector<DeviceBuffer> buffers;

  explicit Problem(const Case& c) {
    params.num_candidates = c.num_candidates;
    params.num_users = static_cast<int>(std::ceil(c.num_candidates / c.ratio));
    params.m = kM;
    params.n = kN;
    params.k_user = kKUser;
    params.k_cand = kKCand;
    const auto keep = [&](DeviceBuffer buffer) {
      return buffers.emplace_back(std::move(buffer)).get();
    };
    params.e_user = keep(random_halves(std::int64_t{params.num_users} * kKUser * kN, 1, 1.0f));
    params.e_cand = keep(random_halves(std::int64_t{params.num_candidates} * kKCand * kN, 2, 1.0f));
    const float scale = 1.0f / std::sqrt(static_cast<float>(kKUser + kKCand));
    params.w_user = keep(random_halves(std::int64_t{kM} * kKUser, 3, scale));
    params.w_cand = keep(random_halves(std::int64_t{kM} * kKCand, 4, scale));
    std::vector<std::int32_t> users(params.num_candidates);
    for (int b = 0; b < params.num_candidates; ++b) {
      users[b] = static_cast<int>(std::int64_t{b} * params.num_users / params.num_candidates);
    }
    if (c.is_shuffled) std::shuffle(users.begin(), users.end(), std::mt19937(0));
    void* index = keep(allocate(users.size() * sizeof(std::int32_t)));
    check(cudaMemcpy(index, users.data(), users.size() * sizeof(std::int32_t), cudaMemcpyDefault));
    params.cand_to_user = static_cast<const std::int32_t*>(index);
    params.out = keep(allocate(out_bytes()));
    params.stride_e_user_u = std::int64_t{kKUser} * kN;
    params.stride_e_user_k = kN;
    params.stride_e_cand_b = std::int64_t{kKCand} * kN;
    params.stride_e_cand_k = kN;
    params.stride_w_user_m = kKUser;
    params.stride_w_cand_m = kKCand;
  }
  std::size_t out_bytes() const {
    return std::size_t(params.num_candidates) * kM * kN * sizeof(__half);
  }
};

// A form of the operator: what a call launches. Both weights are packed ahead.
struct Form {
  std::string name;
  std::function<void(cudaStream_t)> launch;
  bool has_same_sums = true;  // bit for bit those of the chosen form
};

// `config` with weights packed for it, launched by `launch`.
using LaunchPacked = std::function<void(const LceParams&, const LceConfig&, cudaStream_t)>;
Form make_form(Problem& problem, const std::string& name, const LceConfig& config,
               const LaunchPacked& launch) {
  LceParams params = problem.params;
  if (config.kernel == LceKernel::kSm90) {
    const auto pack = [&](const void* w, int k) {
      void* packed = problem.buffers.emplace_back(allocate(lce_packed_bytes(k, config))).get();
      lce_pack(w, k, 1, kM, k, params.dtype, config, packed, nullptr);
      return packed;
    };
    params.w_user_packed = pack(params.w_user, kKUser);
    params.w_cand_packed = pack(params.w_cand, kKCand);
  }
  params.workspace =
      problem.buffers.emplace_back(allocate(lce_workspace_bytes(params, config))).get();
  return {name, [=](cudaStream_t stream) { launch(params, config, stream); }};
}

Form plain_form(Problem& problem, const std::string& name, const LceConfig& config) {
  const DeviceLimits limits = problem.limits;
  return make_form(problem, name, config,
                   [limits](const LceParams& params, const LceConfig& used, cudaStream_t stream) {
                     lce(params, used, limits, stream);
                   });
}

LceConfig with_tile(LceConfig config, int tile_m) {
  config.tile_m = tile_m;
  config.num_tiles_m = (kM + tile_m - 1) / tile_m;
  return config;
}

// The candidate stage with another pipeline.
template <typename Base, int kStages, int kPendingBlocks>
struct OtherPipeline : Base {
  static constexpr int kPending = kPendingBlocks;
  static constexpr int kNumStages = kStages;
  static_assert(kStages <= Base::kNumStages && kStages > kPending + 1);
  struct SharedStorage {
    alignas(Base::kAlignment) unsigned char stages[kStages][Base::kStageBytes];
    alignas(Base::kAlignment) unsigned char staging[Base::kConsumers][Base::kStagingBytes];
    alignas(16) unsigned char partial[Base::kConsumers][std::max(Base::kPartialBytes, 1)];
    alignas(8) std::uint64_t full[kStages];
    std::uint64_t empty[kStages];
    std::uint64_t partial_full[Base::kConsumers];
  };
  static constexpr int kSharedBytes = sizeof(SharedStorage);
};

constexpr int kChosenTile = 224;
template <int kConsumers>
using Candidate = Sm90Traits<__half, kChosenTile, kConsumers, Stage::kCandidate, 1>;

// The candidate stage in clusters whose CTAs share the weight tile by multicast, with 216 columns
// for the second half of 433, or with one consumer behind the other (all in lce_designs.patch).
// With the defaults it is the kernel as it is.
template <int kClusterT = 1, bool kNarrowsT = false, int kLagT = 0>
struct OtherDesign : Candidate<2> {
  static constexpr int kCluster = kClusterT;
  static constexpr bool kNarrows = kNarrowsT;
  static constexpr int kLag = kLagT;
};

// The user stage as it is, then the candidate stage of `Traits`.
template <typename Traits>
Form stage_form(Problem& problem, const std::string& name, const LceConfig& config,
                bool overlaps = true) {
  const int num_sms = problem.limits.num_sms;
  return make_form(
      problem, name, config,
      [=](const LceParams& params, const LceConfig& used, cudaStream_t stream) {
        StageLaunch stage{.params = params,
                          .config = used,
                          .num_sms = num_sms,
                          .w_user_packed = params.w_user_packed,
                          .w_cand_packed = params.w_cand_packed,
                          .user_partial = static_cast<float4*>(params.workspace),
                          .overlaps_previous = false,
                          .stream = stream};
        const auto instance = lce_impl::make_sm90_instance<kChosenTile>(params.dtype);
        (used.user_units_per_cta == 2 ? instance.user_wide : instance.user_narrow)(stage);
        stage.overlaps_previous = overlaps;
        lce_impl::launch_stage<Traits>(stage);
      });
}

std::vector<Form> pipeline_forms(Problem& problem, const LceConfig& chosen) {
  using Chosen = Candidate<2>;
  std::vector<Form> forms;
  for (const int tile_m : {128, 160, 192, 256}) {
    forms.push_back(
        plain_form(problem, "tile_m=" + std::to_string(tile_m), with_tile(chosen, tile_m)));
  }
  forms.push_back(stage_form<OtherPipeline<Chosen, 3, 1>>(problem, "3 stages", chosen));
  forms.push_back(stage_form<OtherPipeline<Chosen, 5, 1>>(problem, "5 stages", chosen));
  forms.push_back(stage_form<OtherPipeline<Chosen, Chosen::kNumStages, 0>>(
      problem, "0 blocks pending", chosen));
  forms.push_back(stage_form<OtherPipeline<Chosen, Chosen::kNumStages, 2>>(
      problem, "2 blocks pending", chosen));
  forms.push_back(stage_form<Candidate<1>>(problem, "1 consumer", chosen));
  forms.push_back(stage_form<OtherDesign<>>(problem, "stages one after the other", chosen, false));
  forms.push_back(stage_form<OtherDesign<2>>(problem, "clusters of 2", chosen));
  forms.push_back(stage_form<OtherDesign<1, true>>(problem, "216 columns", chosen));
  forms.push_back(stage_form<OtherDesign<1, false, 3>>(problem, "3 blocks apart", chosen));
  forms.push_back(plain_form(problem, "lce_mma",
                             lce_impl::select_generic_config(problem.params, problem.limits)));
  forms.back().has_same_sums = false;
  return forms;
}

Form other_k_form(Problem& problem, LceConfig config) {
  config.dual_k = !config.dual_k;
  Form form = plain_form(problem, config.dual_k ? "dual_k" : "two stages", config);
  form.has_same_sums = false;
  return form;
}

std::vector<__half> result_of(const Problem& problem, const Form& form) {
  check(cudaMemset(problem.params.out, 0xff, problem.out_bytes()));  // NaN
  form.launch(nullptr);
  std::vector<__half> values(problem.out_bytes() / sizeof(__half));
  check(cudaMemcpy(values.data(), problem.params.out, problem.out_bytes(), cudaMemcpyDefault));
  return values;
}

void compare(const Problem& problem, const std::vector<Form>& forms) {
  const std::vector<__half> expected = result_of(problem, forms.front());
  for (const Form& form : forms) {
    const std::vector<__half> got = result_of(problem, form);
    for (std::size_t i = 0; i < got.size(); ++i) {
      const float a = __half2float(got[i]);
      const float b = __half2float(expected[i]);
      // Another order of sums may round the other way: two steps of fp16.
      const float allowed = form.has_same_sums ? 0.0f : 2.0f / 1024 * std::max(std::abs(b), 0.25f);
      if (std::abs(a - b) <= allowed) continue;
      throw std::runtime_error(form.name + ": element " + std::to_string(i) + " is " +
                               std::to_string(a) + ", of the chosen form " + std::to_string(b));
    }
  }
}

// Median ms of each form, in another random order each round, each with a cold L2.
std::vector<double> time_forms(const std::vector<Form>& forms) {
  const DeviceBuffer flushed = allocate(kFlushedBytes);
  cudaEvent_t begin;
  cudaEvent_t end;
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  std::vector<std::vector<float>> times(forms.size());
  std::vector<std::size_t> order(forms.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::mt19937 random(0);
  for (int round = 0; round < kUntimedRounds + kRounds; ++round) {
    std::shuffle(order.begin(), order.end(), random);
    for (const std::size_t f : order) {
      check(cudaMemsetAsync(flushed.get(), round, kFlushedBytes));
      check(cudaEventRecord(begin));
      forms[f].launch(nullptr);
      check(cudaEventRecord(end));
      check(cudaEventSynchronize(end));
      float ms = 0;
      check(cudaEventElapsedTime(&ms, begin, end));
      if (round >= kUntimedRounds) times[f].push_back(ms);
    }
  }
  check(cudaEventDestroy(begin));
  check(cudaEventDestroy(end));
  std::vector<double> medians;
  for (std::vector<float>& t : times) {
    std::nth_element(t.begin(), t.begin() + kRounds / 2, t.end());
    medians.push_back(t[kRounds / 2]);
  }
  return medians;
}

void run(const Case& c, bool has_pipelines) {
  Problem problem(c);
  const LceConfig chosen = select_lce_config(problem.params, problem.limits);
  std::vector<Form> forms{plain_form(problem, to_string(chosen), chosen)};
  if (has_pipelines) {
    for (Form& form : pipeline_forms(problem, chosen)) forms.push_back(std::move(form));
  }
  const bool is_narrow = chosen.tile_m != kChosenTile;
  if (is_narrow) {
    forms.push_back(plain_form(problem, "tile_m=224", with_tile(chosen, kChosenTile)));
  }
  if (!is_narrow && !has_pipelines) forms.push_back(other_k_form(problem, chosen));
  compare(problem, forms);
  const std::vector<double> times = time_forms(forms);
  std::printf(R"({"B": %d, "ratio": %g, "order": "%s", "chosen": "%s", "ms": {)", c.num_candidates,
              c.ratio, c.is_shuffled ? "shuffled" : "sorted", forms.front().name.c_str());
  for (std::size_t f = 0; f < forms.size(); ++f) {
    std::printf(R"(%s"%s": %.6g)", f > 0 ? ", " : "", f > 0 ? forms[f].name.c_str() : "chosen",
                times[f]);
  }
  std::printf("}}\n");
  std::fflush(stdout);
}

}  // namespace

int main() {
  try {
    run({.num_candidates = 1024, .ratio = 70}, true);
    run({.num_candidates = 1024, .ratio = 70, .is_shuffled = true}, true);
    for (const double ratio : {1.0, 1.25, 1.5, 2.0}) {
      run({.num_candidates = 1024, .ratio = ratio}, false);
    }
    for (const int candidates : {4, 16}) {
      run({.num_candidates = candidates, .ratio = static_cast<double>(candidates)}, false);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "lce_choices: %s\n", error.what());
    return 1;
  }
  return 0;
}
