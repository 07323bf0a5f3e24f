// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A client's connection to the store: authenticated, and used for one request at a time.

#include <string>
#include <string_view>

#include "lockstep/launch/random.hpp"
#include "lockstep/launch/socket.hpp"
#include "lockstep/launch/store_protocol.hpp"

namespace lockstep::detail {

/// A connection to a store that has proved that it knows the key; otherwise empty, with the reason.
inline Descriptor connect_to_store(const std::string& host, std::uint16_t port, SipKey key,
                                   Deadline deadline, std::string& why) {
  using namespace store_protocol;
  // Each attempt has its own limit: a port that accepts and says nothing must not use up all the
  // time.
  const Deadline limit = sooner(deadline, Deadline::after(handshake_limit));
  Descriptor socket = try_connect(host, port, limit, why);
  if (!socket) return {};
  char hello[hello_bytes];
  const Transfer heard = read_exact(socket.get(), hello, sizeof hello, limit);
  if (heard != Transfer::complete || std::string_view(hello, magic.size()) != magic) {
    why = "what listens there is not a lockstep store";
    return {};
  }
  const std::string_view server_nonce(hello + magic.size(), nonce_bytes);
  const std::string client_nonce = random_bytes(nonce_bytes);
  const std::string answer = text({client_nonce, tag(key, "client", server_nonce, client_nonce)});
  char proof[tag_bytes];
  if (write_exact(socket.get(), answer.data(), answer.size(), limit) != Transfer::complete ||
      read_exact(socket.get(), proof, sizeof proof, limit) != Transfer::complete ||
      !same_tag({proof, sizeof proof}, tag(key, "server", server_nonce, client_nonce))) {
    why = "the store there has another secret: it is another job's";
    return {};
  }
  return socket;
}

/// Sends a request and reads its reply. A reply that is too long counts as a closed connection.
inline Transfer exchange(int socket, std::string_view request, std::string& reply,
                         Deadline deadline) {
  const std::string out = store_protocol::frame(request);
  char header[4];
  Transfer done = write_exact(socket, out.data(), out.size(), deadline);
  if (done == Transfer::complete) done = read_exact(socket, header, sizeof header, deadline);
  if (done != Transfer::complete) return done;
  const std::size_t size = store_protocol::Reader({header, sizeof header}).u32();
  if (size > store_protocol::max_frame_bytes) return Transfer::closed;
  reply.resize(size);
  return read_exact(socket, reply.data(), size, deadline);
}

}  // namespace lockstep::detail
