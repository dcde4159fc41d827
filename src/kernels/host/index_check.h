// SPDX-License-Identifier: Apache-2.0
// What an operator launches before its kernels in a build with IKBO_CHECK_INDICES; nothing in any
// other one.
#pragma once

#include <cstdint>

#include "ikbo/stream.h"

namespace ikbo::host {

#ifdef IKBO_CHECK_INDICES
// Enqueues a check that every value lies in [0, num_users). On the first that does not, operator,
// row and value are written to standard error and the stream traps, so that no result of it can be
// used; each later call throws ikbo::Error with the same text.
void check_indices(const char* op, const std::int32_t* cand_to_user, std::int32_t num_candidates,
                   std::int32_t num_users, Stream stream);
#else
inline void check_indices(const char*, const std::int32_t*, std::int32_t, std::int32_t, Stream) {}
#endif

}  // namespace ikbo::host
