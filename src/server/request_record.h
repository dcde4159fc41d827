// SPDX-License-Identifier: Apache-2.0
// What an infer request went through. Whoever has the request writes its part: the transport, the
// router, a worker of the batcher; the transport reads it all at the end.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "server/trace_context.h"

namespace ikbo::server {

struct RunSizes {
  std::size_t requests = 0;
  std::int64_t users = 0;
  std::int64_t candidates = 0;
};

// One run of the model.
struct RunSample {
  using Duration = std::chrono::steady_clock::duration;

  RunSizes sizes;
  Duration input{};   // merging the requests
  Duration infer{};   // the model
  Duration output{};  // splitting the results
};

struct RequestRecord {
  using Clock = std::chrono::steady_clock;

  std::string_view protocol;  // "http" or "grpc"
  // Its trace, and its span in there; no trace id: of no trace.
  SpanContext span;
  SpanId parent{};

  std::string model;  // empty: not an infer request, or not one of a model that is here
  std::string version;
  std::string id;  // the client's
  std::int64_t users = 0;
  std::int64_t candidates = 0;
  unsigned status = 0;  // of HTTP, or the one of the same row in the table of errors

  // When each step ended; a step that was not reached has Clock::time_point{}.
  Clock::time_point begin = Clock::now();  // the first byte is here
  Clock::time_point read{};                // and the last one
  Clock::time_point queued{};              // decoded, handed to the batcher
  Clock::time_point run_begin{};           // of the first run, if it is split over several
  Clock::time_point run_end{};             // of the last
  Clock::time_point answered{};            // the reply is made
  Clock::time_point end{};                 // and sent; over gRPC: handed to the library

  Clock::duration infer{};                // in the model, without merging and splitting
  RunSizes run;                           // of the run that it was part of
  std::vector<SpanContext> run_mates{};   // sampled requests of that run, at most kMaxRunMates
  std::size_t num_unnamed_run_mates = 0;  // those beyond

  int num_runs = 0;  // more than one: it is split

  static constexpr std::size_t kMaxRunMates = 32;

  void begin_run(Clock::time_point time);
  // Before the record is read. Runs do not change it any more: when one part of a split request
  // fails, the request is answered while others run.
  void close();

 private:
  friend void note_run(const std::vector<RequestRecord*>& records, const RunSample& run);
  void end_run(const RunSample& sample, Clock::time_point time,
               const std::vector<const RequestRecord*>& sampled);

  std::mutex mutex_;        // of what a run writes: parts of one request may run at once
  bool is_closed_ = false;  // guarded by mutex_
};

// After a run: writes it into the records of its requests, which may be null.
void note_run(const std::vector<RequestRecord*>& records, const RunSample& run);

}  // namespace ikbo::server
