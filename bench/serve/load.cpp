// SPDX-License-Identifier: Apache-2.0
#include "load.h"

#include <simdjson.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <stdexcept>

#include "server/json_writer.h"

namespace ikbo::load {
namespace {

double microseconds(Clock::duration time) {
  return std::chrono::duration<double, std::micro>(time).count();
}

Clock::duration from_seconds(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    throw std::runtime_error("--requests: " + path.string() + " must be a file that can be read");
  }
  return {std::istreambuf_iterator<char>(file), {}};
}

std::vector<float> floats_of(std::string_view bytes, const std::filesystem::path& path) {
  if (bytes.size() % sizeof(float) != 0) {
    throw std::runtime_error("--requests: " + path.string() + " must hold float32 values; it has " +
                             std::to_string(bytes.size()) + " bytes");
  }
  std::vector<float> values(bytes.size() / sizeof(float));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

// The largest difference; NaN where one of both is NaN, infinity where the counts differ.
double largest_difference(const std::vector<float>& expected, std::span<const std::byte> outputs) {
  if (outputs.size() != expected.size() * sizeof(float)) {
    return HUGE_VAL;
  }
  double largest = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    float got = 0;
    std::memcpy(&got, outputs.data() + i * sizeof(float), sizeof(float));
    const double difference = std::abs(double{got} - double{expected[i]});
    if (!(difference <= largest)) {
      largest = difference;
    }
    if (std::isnan(difference)) {
      break;
    }
  }
  return largest;
}

// By nearest rank.
double percentile(const std::vector<double>& sorted, double share) {
  if (sorted.empty()) {
    return 0;
  }
  const auto rank = static_cast<std::size_t>(std::ceil(share * static_cast<double>(sorted.size())));
  return sorted[std::clamp<std::size_t>(rank, 1, sorted.size()) - 1];
}

void write_times(std::string_view name, std::vector<double> times, server::JsonWriter& writer) {
  std::sort(times.begin(), times.end());
  writer.key(name).begin_object();
  writer.key("p50").number(percentile(times, 0.5));
  writer.key("p90").number(percentile(times, 0.9));
  writer.key("p99").number(percentile(times, 0.99));
  writer.key("p999").number(percentile(times, 0.999));
  writer.key("max").number(times.empty() ? 0 : times.back());
  writer.end_object();
}

}  // namespace

std::vector<LoadRequest> load_requests(const LoadOptions& options) {
  const std::string& path = options.requests;
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  std::vector<LoadRequest> requests;
  try {
    simdjson::dom::parser parser;
    const simdjson::dom::element document = parser.parse(read_file(path));
    for (const simdjson::dom::element item : document["requests"].get_array()) {
      LoadRequest& request = requests.emplace_back();
      request.body = read_file(folder / std::string_view(item["body"]));
      std::uint64_t json_size = 0;
      if (item["json_size"].get(json_size) == simdjson::SUCCESS) {
        request.json_size = json_size;
      }
      std::string_view expected;
      if (!options.ignores_answers && item["expected"].get(expected) == simdjson::SUCCESS) {
        request.expected = floats_of(read_file(folder / expected), folder / expected);
      }
    }
  } catch (const simdjson::simdjson_error& error) {
    throw std::runtime_error("--requests: " + path + " must be a list of requests; " +
                             error.what());
  }
  if (requests.empty()) {
    throw std::runtime_error("--requests: " + path + " must have at least one request; got none");
  }
  return requests;
}

std::vector<Clock::duration> poisson_arrivals(double rate, double seconds, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::exponential_distribution<double> gap(rate);
  std::vector<Clock::duration> arrivals;
  for (double at = gap(random); at < seconds; at += gap(random)) {
    arrivals.push_back(from_seconds(at));
  }
  return arrivals;
}

Schedule::Schedule(const LoadOptions& options)
    : warm_up_(from_seconds(options.warm_up_seconds)),
      arrivals_(poisson_arrivals(options.rate, options.warm_up_seconds + options.seconds,
                                 options.seed)) {}

LoadRecord::LoadRecord(const LoadOptions& options, const Schedule& schedule)
    : options_(options), schedule_(schedule) {}

void LoadRecord::answered(const LoadRequest& request, Clock::time_point due, Clock::time_point sent,
                          Clock::time_point done, std::span<const std::byte> outputs) {
  const double difference =
      request.expected.has_value() ? largest_difference(*request.expected, outputs) : 0;
  const std::lock_guard lock(mutex_);
  if (!(difference <= max_difference_)) {
    max_difference_ = difference;
  }
  if (!(difference <= options_.tolerance)) {
    ++errors_["wrong_answer"];  // during the warm-up, too
    return;
  }
  if (due < schedule_.counts_from()) {
    return;
  }
  latencies_.push_back(microseconds(done - due));
  lateness_.push_back(microseconds(sent - due));
  last_done_ = std::max(last_done_, done);
}

void LoadRecord::failed(Clock::time_point due, std::string_view kind) {
  const std::lock_guard lock(mutex_);
  if (due >= schedule_.counts_from()) {
    ++errors_[std::string(kind)];
  }
}

std::string LoadRecord::summary() const {
  const std::lock_guard lock(mutex_);
  const double spent = microseconds(last_done_ - schedule_.counts_from()) / 1e6;
  std::string json;
  server::JsonWriter writer(json);
  writer.begin_object();
  writer.key("protocol").string(options_.protocol);
  writer.key("rate").number(options_.rate);
  // Over the time until the last answer: below the rate when the server falls behind.
  writer.key("achieved_rate")
      .number(latencies_.empty()
                  ? 0
                  : static_cast<double>(latencies_.size()) / std::max(spent, options_.seconds));
  writer.key("answered").number(latencies_.size());
  writer.key("errors").begin_object();
  for (const auto& [kind, count] : errors_) {
    writer.key(kind).number(count);
  }
  writer.end_object();
  writer.key("max_difference");
  if (std::isfinite(max_difference_)) {
    writer.number(max_difference_);
  } else {
    writer.string("not finite");
  }
  write_times("latency_us", latencies_, writer);
  write_times("lateness_us", lateness_, writer);
  writer.end_object();
  return json;
}

}  // namespace ikbo::load
