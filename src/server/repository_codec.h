// SPDX-License-Identifier: Apache-2.0
// The model repository extension of the Open Inference Protocol: bodies of its requests and
// replies over HTTP.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "server/model_repository.h"
#include "server/request_body.h"

namespace ikbo::server {

// Whether an index request asks for the models that are ready alone. A body may be empty. The
// functions throw RequestError(kBadRequest).
bool read_ready_only(const RequestBody& body);

// A load request has no parameters here, an unload request those that say nothing here.
void check_repository_parameter(std::string_view action, std::string_view parameter);
void check_repository_parameters(std::string_view action, const RequestBody& body);

std::string encode_index(const std::vector<IndexEntry>& entries);

}  // namespace ikbo::server
