// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "server/admission.h"

namespace ikbo::server {
namespace {

using std::chrono::milliseconds;
using Clock = Admission::Clock;

constexpr Clock::time_point kStart = Clock::time_point{} + std::chrono::hours(1);

// Every run takes 10 ms, whatever its size.
Admission make_admission(int num_workers = 1) {
  Admission admission(num_workers, 4, 16);
  for (const auto& [users, candidates] : {std::pair{1, 1}, {4, 16}, {1, 16}, {4, 4}}) {
    admission.measured(users, candidates, milliseconds(10));
  }
  return admission;
}

bool is_near(Clock::duration time, milliseconds expected) {
  return time > expected - milliseconds(1) && time < expected + milliseconds(1);
}

TEST(Admission, KnowsWhatRunsTake) {
  const Admission admission = make_admission();
  EXPECT_TRUE(is_near(admission.time(1, 1), milliseconds(10)));
  EXPECT_TRUE(is_near(admission.time(4, 16), milliseconds(10)));
  EXPECT_EQ(Admission(1, 4, 16).time(4, 16), Clock::duration::zero());
}

TEST(Admission, RunsWithoutCandidatesTellNothing) {
  Admission admission = make_admission();
  for (int i = 0; i < 100; ++i) {
    admission.measured(1, 0, milliseconds(0));
  }
  EXPECT_TRUE(is_near(admission.time(1, 1), milliseconds(10)));
}

TEST(Admission, KnowsWhenAWorkerIsFree) {
  Admission admission = make_admission(2);
  EXPECT_EQ(admission.first_free(kStart), kStart);
  admission.begin(0, 1, 1, kStart);
  EXPECT_EQ(admission.first_free(kStart), kStart);
  admission.begin(1, 1, 1, kStart + milliseconds(4));
  EXPECT_TRUE(is_near(admission.first_free(kStart + milliseconds(4)) - kStart, milliseconds(10)));
  // One that takes longer than expected may end at any time.
  EXPECT_EQ(admission.first_free(kStart + milliseconds(12)), kStart + milliseconds(12));
  admission.end(1);
  EXPECT_EQ(admission.first_free(kStart + milliseconds(5)), kStart + milliseconds(5));
}

TEST(Admission, RefusesWhatCannotBeInTime) {
  Admission admission = make_admission();
  const auto is_too_late = [&](milliseconds begin, milliseconds deadline) {
    return admission.is_too_late(kStart, kStart + begin, milliseconds(10), kStart + deadline);
  };
  EXPECT_FALSE(is_too_late(milliseconds(0), milliseconds(10)));
  EXPECT_TRUE(is_too_late(milliseconds(0), milliseconds(9)));
  EXPECT_TRUE(is_too_late(milliseconds(5), milliseconds(14)));
  EXPECT_FALSE(is_too_late(milliseconds(5), milliseconds(15)));
  EXPECT_FALSE(
      admission.is_too_late(kStart, kStart, std::chrono::hours(1), Clock::time_point::max()));
}

TEST(Admission, DoubtsItselfAfterASecondOfRefusals) {
  Admission admission = make_admission();
  const auto is_refused_after = [&](milliseconds time) {
    const auto now = kStart + time;
    return admission.is_too_late(now, now, milliseconds(9), now + milliseconds(5));
  };
  EXPECT_TRUE(is_refused_after(milliseconds(0)));
  EXPECT_TRUE(is_refused_after(milliseconds(999)));
  EXPECT_FALSE(is_refused_after(milliseconds(1000)));
  // The run that was let through took what it was expected to.
  admission.measured(1, 1, milliseconds(10));
  EXPECT_TRUE(is_refused_after(milliseconds(1001)));
}

TEST(Admission, ASmallerRunDoesNotEndTheDoubt) {
  Admission admission(1, 4, 16);
  admission.measured(1, 1, milliseconds(1));
  admission.measured(4, 16, milliseconds(16));
  admission.measured(1, 16, milliseconds(16));
  const auto needed = admission.time(4, 16);
  const auto is_refused_after = [&](milliseconds time) {
    const auto now = kStart + time;
    return admission.is_too_late(now, now, needed, now + milliseconds(5));
  };
  EXPECT_TRUE(is_refused_after(milliseconds(0)));
  admission.measured(1, 1, milliseconds(1));
  EXPECT_FALSE(is_refused_after(milliseconds(1500)));
  admission.measured(4, 16, milliseconds(16));
  EXPECT_TRUE(is_refused_after(milliseconds(1500)));
}

}  // namespace
}  // namespace ikbo::server
