// SPDX-License-Identifier: Apache-2.0
// Where the time of a request goes.
#pragma once

#include <chrono>

namespace ikbo::server {

struct RequestTimes {
  using Clock = std::chrono::steady_clock;

  Clock::time_point received;  // its last byte
  Clock::duration queued{};    // from its arrival in the queue to the start of its run
  Clock::duration ran{};       // in the model, without merging and splitting

  // What the server itself took until now.
  double overhead_seconds() const {
    return std::chrono::duration<double>(Clock::now() - received - queued - ran).count();
  }
};

}  // namespace ikbo::server
