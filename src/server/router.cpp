// SPDX-License-Identifier: Apache-2.0
#include "server/router.h"

#include <algorithm>
#include <initializer_list>
#include <new>
#include <utility>
#include <vector>

#include "server/repository_codec.h"
#include "server/status_page.h"
#include "server/v2_codec.h"

namespace ikbo::server {
namespace {

int hex_value(char c) {
  if (c >= '0' && c <= '9') {
    return c - '0';
  }
  const char lower = static_cast<char>(c | 0x20);
  return lower >= 'a' && lower <= 'f' ? lower - 'a' + 10 : -1;
}

std::string percent_decode(std::string_view text) {
  std::string decoded;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '%') {
      decoded += text[i];
      continue;
    }
    const int high = i + 2 < text.size() ? hex_value(text[i + 1]) : -1;
    const int low = high >= 0 ? hex_value(text[i + 2]) : -1;
    if (low < 0) {
      refuse(ErrorKind::kBadRequest, "path: '%' must be followed by two hexadecimal digits; got ",
             text);
    }
    decoded += static_cast<char>(high * 16 + low);
    i += 2;
  }
  return decoded;
}

HttpReply json_reply(std::string text) {
  HttpReply reply;
  reply.text = std::move(text);
  return reply;
}

HttpReply status_page() {
  HttpReply reply;
  reply.content_type = "text/html; charset=utf-8";
  reply.headers.emplace_back("Content-Security-Policy", kStatusPagePolicy);
  reply.text = kStatusPage;
  return reply;
}

void finish_now(const Finish& finish, HttpReply reply) {
  finish({[reply = std::move(reply)] { return reply; }, true});
}

}  // namespace

// The decoded segments of a path, without its query.
struct Router::Path {
  explicit Path(std::string_view target) {
    target = target.substr(0, target.find('?'));
    while (!target.empty()) {
      const std::size_t end = target.find('/', 1);
      const std::string_view segment = target.substr(0, end).substr(target[0] == '/' ? 1 : 0);
      if (!segment.empty()) {
        segments.push_back(percent_decode(segment));
      }
      target = end == std::string_view::npos ? "" : target.substr(end);
    }
  }

  bool is(std::initializer_list<std::string_view> other) const {
    return std::equal(segments.begin(), segments.end(), other.begin(), other.end());
  }

  bool is_of_repository() const {
    return segments.size() >= 2 && segments[0] == "v2" && segments[1] == "repository";
  }

  bool is_status_page() const { return segments.empty() || is({"status"}); }

  // What is not there is nobody's business either. The page of the browser is open: it asks for the
  // token that its requests need.
  Access access() const {
    const auto at = [&](std::size_t i) { return i < segments.size() ? segments[i] : ""; };
    if (at(0) != "v2") {
      return is_status_page() ? Access::kOpen : Access::kInfer;
    }
    const bool is_model_ready = at(1) == "models" &&
                                (segments.size() == 4 || segments.size() == 6) &&
                                segments.back() == "ready";
    return at(1) == "health" || is_model_ready ? Access::kOpen
           : is_of_repository()                ? Access::kAdmin
                                               : Access::kInfer;
  }

  // HEAD is GET whose reply's body the connection leaves out.
  std::string_view allowed_methods() const {
    const bool is_infer = !segments.empty() && segments.back() == "infer";
    return is_infer || is_of_repository() ? "POST" : "GET, HEAD";
  }

  void require_method(const HttpRequest& request) const {
    const std::string_view allowed = allowed_methods();
    const bool is_allowed = allowed == "POST" ? request.method == "POST"
                                              : request.method == "GET" || request.method == "HEAD";
    if (!is_allowed) {
      refuse(ErrorKind::kMethodNotAllowed, request.target, ": method must be ", allowed, "; got ",
             request.method);
    }
  }

  std::vector<std::string> segments;
};

void Router::authorize(std::string_view target, std::string_view authorization) const {
  core_.access.check(Path(target).access(), authorization);
}

void Router::handle(HttpRequest request, const Finish& finish) {
  std::string allow;
  try {
    const Path path(request.target);
    allow = path.allowed_methods();
    route(path, request, finish);
  } catch (const RequestError& error) {
    HttpReply reply = error_reply(error);
    if (error.kind() == ErrorKind::kMethodNotAllowed) {
      reply.headers.emplace_back("Allow", allow);
    }
    finish_now(finish, std::move(reply));
  } catch (const std::bad_alloc&) {
    finish_now(finish, error_reply(out_of_memory()));
  }
}

HttpReply Router::error_reply(const RequestError& error) const {
  core_.metrics.count(error.kind());
  HttpReply reply = json_reply(encode_error(error.what()));
  reply.status = info_of(error.kind()).status;
  if (error.kind() == ErrorKind::kUnauthenticated) {
    reply.headers.emplace_back("WWW-Authenticate", "Bearer");
  }
  if (error.kind() == ErrorKind::kQueueFull || error.kind() == ErrorKind::kModelUnavailable) {
    reply.headers.emplace_back("Retry-After", "1");
  }
  return reply;
}

HttpReply Router::ready_reply(bool is_ready, std::string text) {
  HttpReply reply = json_reply(std::move(text));
  reply.status = is_ready ? 200 : 503;
  return reply;
}

void Router::route(const Path& path, HttpRequest& request, const Finish& finish) {
  if (path.segments.size() >= 3 && path.segments[0] == "v2" && path.segments[1] == "models") {
    return route_model(path, request, finish);
  }
  if (path.is_of_repository()) {
    return route_repository(path, request, finish);
  }
  HttpReply reply;
  if (path.is({"v2"})) {
    reply = json_reply(encode_server_metadata(IKBO_VERSION, core_.extensions()));
  } else if (path.is({"v2", "health", "live"})) {
    reply = json_reply(encode_flag("live", true));
  } else if (path.is({"v2", "health", "ready"})) {
    const bool is_ready = core_.is_ready();
    reply = ready_reply(is_ready, encode_flag("ready", is_ready));
  } else if (path.is({"metrics"})) {
    reply = json_reply(write_metrics(core_.metrics, core_.models.metrics()));
    reply.content_type = "text/plain; version=0.0.4";
  } else if (path.is_status_page()) {
    reply = status_page();
  } else {
    refuse(ErrorKind::kNotFound, "there is nothing at ", request.target);
  }
  path.require_method(request);
  finish_now(finish, std::move(reply));
}

void Router::route_model(const Path& path, HttpRequest& request, const Finish& finish) {
  const std::vector<std::string>& segments = path.segments;
  const bool has_version = segments.size() >= 5 && segments[3] == "versions";
  const std::size_t action_at = has_version ? 5 : 3;
  const std::string action = segments.size() > action_at ? segments[action_at] : "";
  if (segments.size() > action_at + 1 ||
      !(action.empty() || action == "ready" || action == "infer" || action == "stats")) {
    refuse(ErrorKind::kNotFound, "there is nothing at ", request.target);
  }
  const auto model = core_.models.find(segments[2], has_version ? segments[4] : "");
  path.require_method(request);
  if (action == "infer") {
    infer(model, request, finish);
  } else if (action == "ready") {
    const bool is_ready = !core_.is_stopping && model->is_ready();
    finish_now(finish, ready_reply(is_ready, encode_model_ready(model->manifest(), is_ready)));
  } else if (action == "stats") {
    finish_now(finish, json_reply(encode_stats(core_.models.metrics(), segments[2],
                                               has_version ? segments[4] : "")));
  } else {
    finish_now(finish, json_reply(encode_model_metadata(model->manifest(),
                                                        core_.models.versions(segments[2]))));
  }
}

void Router::route_repository(const Path& path, HttpRequest& request, const Finish& finish) {
  const std::vector<std::string>& segments = path.segments;
  const bool is_index = path.is({"v2", "repository", "index"});
  const std::string action = segments.size() == 5 && segments[2] == "models" ? segments[4] : "";
  if (!is_index && action != "load" && action != "unload") {
    refuse(ErrorKind::kNotFound, "there is nothing at ", request.target);
  }
  path.require_method(request);
  ModelRepository& repository = core_.changeable_repository();
  if (is_index) {
    return finish_now(finish,
                      json_reply(encode_index(repository.index(read_ready_only(*request.body)))));
  }
  check_repository_parameters(action, *request.body);
  const auto done = [this, finish](const std::optional<RequestError>& error) {
    finish_now(finish, error.has_value() ? error_reply(*error) : json_reply(""));
  };
  if (action == "load") {
    repository.load(segments[3], done);
  } else {
    repository.unload(segments[3], done);
  }
}

}  // namespace ikbo::server
