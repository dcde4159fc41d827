// SPDX-License-Identifier: Apache-2.0
// Spans of requests as OTLP's JSON: the body of an ExportTraceServiceRequest.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "server/request_record.h"

namespace ikbo::server {

// Spans of one request: the request itself, its time in the queue, its run, as far as it came.
std::size_t num_spans(const RequestRecord& record);

// The records must be of sampled requests that have ended.
std::string encode_spans(const std::vector<std::shared_ptr<const RequestRecord>>& records,
                         std::string_view service_name);

}  // namespace ikbo::server
