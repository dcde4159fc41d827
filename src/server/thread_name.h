// SPDX-License-Identifier: Apache-2.0
// What `top -H`, perf and debuggers call the server's threads.
#pragma once

#include <pthread.h>

namespace ikbo::server {

// `name` has at most 15 characters. Threads that the caller starts afterwards inherit it.
inline void name_this_thread(const char* name) { pthread_setname_np(pthread_self(), name); }

}  // namespace ikbo::server
