// SPDX-License-Identifier: Apache-2.0
// A Beast body that writes an HttpReply from where it lies: its text, then its tensors' bytes.
#pragma once

#include <boost/asio/buffer.hpp>
#include <boost/beast/http/message.hpp>
#include <boost/optional.hpp>
#include <cstdint>
#include <utility>
#include <vector>

#include "server/http_message.h"

namespace ikbo::server {

struct ReplyBody {
  using value_type = HttpReply;

  static std::uint64_t size(const value_type& reply) {
    std::uint64_t bytes = reply.text.size();
    for (const runtime::Tensor& blob : reply.blobs) {
      bytes += blob.bytes;
    }
    return bytes;
  }

  class writer {
   public:
    using const_buffers_type = std::vector<boost::asio::const_buffer>;

    template <bool isRequest, class Fields>
    writer(const boost::beast::http::header<isRequest, Fields>&, const value_type& reply)
        : reply_(reply) {}

    void init(boost::system::error_code& error) { error = {}; }

    boost::optional<std::pair<const_buffers_type, bool>> get(boost::system::error_code& error) {
      error = {};
      const_buffers_type buffers = {boost::asio::buffer(reply_.text)};
      for (const runtime::Tensor& blob : reply_.blobs) {
        buffers.emplace_back(blob.data, blob.bytes);
      }
      return {{std::move(buffers), false}};
    }

   private:
    const value_type& reply_;
  };
};

}  // namespace ikbo::server
