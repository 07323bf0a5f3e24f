// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The protocol between the store and its clients: handshake, frames, limits.
///
/// Handshake: the server sends a magic word (its last character is the version) and a nonce; the
/// client answers with its own nonce and a keyed hash of both; the server with another. Each side
/// thus proves that it knows the job's secret, which is never sent.
///
/// Frames: a length of four bytes, the request's number, a tag, the body; integers are
/// little-endian. A reply starts with its status. Replies come in any order: pending requests block
/// no others. The tag proves who has sent the frame, and that it is the next one (`FrameKey`).
/// Frames are not encrypted.

#include <bit>
#include <cstring>

#include "lockstep/detail/core/bytes.hpp"
#include "lockstep/detail/core/text.hpp"
#include "lockstep/detail/core/utility.hpp"

namespace lockstep::detail {

using SipKey = std::array<std::uint64_t, 2>;

/// Aumasson and Bernstein, "SipHash: a fast short-input PRF", INDOCRYPT 2012: SipHash-2-4, eight
/// bytes at a time, since values are large. One loop without calls, because rare code is compiled
/// without optimisation.
inline std::uint64_t sip_hash(SipKey key, std::string_view message) {
  static_assert(std::endian::native == std::endian::little);
  std::uint64_t v0 = key[0] ^ 0x736f6d6570736575u;
  std::uint64_t v1 = key[1] ^ 0x646f72616e646f6du;
  std::uint64_t v2 = key[0] ^ 0x6c7967656e657261u;
  std::uint64_t v3 = key[1] ^ 0x7465646279746573u;
  const std::size_t words = message.size() / 8;
  for (std::size_t i = 0; i != words + 2; ++i) {
    std::uint64_t word = 0;
    if (i < words) {
      std::memcpy(&word, message.data() + 8 * i, 8);
    } else if (i == words) {
      const std::size_t rest = message.size() % 8;
      if (rest != 0) std::memcpy(&word, message.data() + 8 * i, rest);
      word |= static_cast<std::uint64_t>(message.size()) << 56;
    } else {
      v2 ^= 0xff;
    }
    v3 ^= word;
    for (int rounds = i > words ? 4 : 2; rounds != 0; --rounds) {
      v0 += v1;
      v2 += v3;
      v1 = (v1 << 13 | v1 >> 51) ^ v0;
      v3 = (v3 << 16 | v3 >> 48) ^ v2;
      v0 = v0 << 32 | v0 >> 32;
      v2 += v1;
      v0 += v3;
      v1 = (v1 << 17 | v1 >> 47) ^ v2;
      v3 = (v3 << 21 | v3 >> 43) ^ v0;
      v2 = v2 << 32 | v2 >> 32;
    }
    v0 ^= word;
  }
  return v0 ^ v1 ^ v2 ^ v3;
}

/// A key from a secret of any length, as hard to guess as the secret.
inline SipKey derive_key(std::string_view secret) {
  return {sip_hash({0, 0}, secret), sip_hash({1, 0}, secret)};
}

}  // namespace lockstep::detail

namespace lockstep::detail::store_protocol {

inline constexpr std::string_view magic = "LOCKSTP5";
inline constexpr std::size_t nonce_bytes = 16;
inline constexpr std::size_t tag_bytes = 8;
inline constexpr std::size_t hello_bytes = magic.size() + nonce_bytes;
inline constexpr std::size_t answer_bytes = nonce_bytes + tag_bytes;

inline constexpr std::size_t max_key_bytes = 4_KiB;
inline constexpr std::size_t max_value_bytes = 16_MiB;
inline constexpr std::size_t max_frame_bytes = 2 * max_value_bytes + max_key_bytes + 64;
/// The limit for all ranks together: the reply, with four bytes for each rank, is one frame.
inline constexpr std::size_t max_gathered_bytes = max_value_bytes;
inline constexpr std::size_t max_world = 1u << 20;

inline constexpr std::chrono::milliseconds handshake_limit{2000};

/// `change` is a get that waits for another value. `cancel` ends a request; only that has a reply.
enum class Operation : std::uint8_t {
  set = 1,
  get,
  change,
  add,
  compare_set,
  erase,
  gather,
  cancel
};

/// `missing`: no value, or cancelled; lists the missing ranks of a gather. `rejected`: invalid.
enum class Status : std::uint8_t { ok = 1, missing, rejected };

class Writer {
 public:
  Writer& byte(std::uint8_t n) { return integer(n, 1); }
  Writer& u32(std::uint32_t n) { return integer(n, 4); }
  Writer& u64(std::uint64_t n) { return integer(n, 8); }
  Writer& text(std::string_view text) {
    return u32(static_cast<std::uint32_t>(text.size())).raw(text);
  }
  Writer& raw(std::string_view text) {
    bytes_ += text;
    return *this;
  }
  const std::string& bytes() const { return bytes_; }

 private:
  Writer& integer(std::uint64_t n, std::size_t count) {
    char bytes[8];
    for (std::size_t i = 0; i < count; ++i) bytes[i] = static_cast<char>(n >> (8 * i));
    bytes_.append(bytes, count);
    return *this;
  }

  std::string bytes_;
};

/// Past the end every field is empty and `ok()` is false: one check after reading is enough.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}

  std::uint8_t byte() { return static_cast<std::uint8_t>(integer(1)); }
  std::uint32_t u32() { return static_cast<std::uint32_t>(integer(4)); }
  std::uint64_t u64() { return integer(8); }
  std::string_view raw(std::size_t count) {
    if (count > bytes_.size()) {
      ok_ = false;
      bytes_ = {};
      return {};
    }
    const std::string_view taken = bytes_.substr(0, count);
    bytes_.remove_prefix(count);
    return taken;
  }
  std::string_view text() { return raw(u32()); }

  bool at_end() const { return bytes_.empty(); }
  bool ok() const { return ok_; }

 private:
  std::uint64_t integer(std::size_t count) {
    std::uint64_t n = 0;
    int shift = 0;
    for (char c : raw(count)) {
      n |= static_cast<std::uint64_t>(static_cast<unsigned char>(c)) << shift;
      shift += 8;
    }
    return n;
  }

  std::string_view bytes_;
  bool ok_ = true;
};

struct Request {
  Operation operation = Operation::set;
  std::string_view key{};
  std::string_view value{};     // to set, of this rank in a gather, or known to a change
  std::string_view expected{};  // of a compare_set
  std::uint64_t number = 0;     // to add, or of the request to cancel
  std::uint32_t rank = 0;       // in a gather
  std::uint32_t world = 0;
  bool waits = false;  // for an answer, instead of being cancelled at once

  std::string bytes() const {
    Writer out;
    out.byte(static_cast<std::uint8_t>(operation)).text(key).text(value).text(expected);
    return out.u64(number).u32(rank).u32(world).byte(waits ? 1 : 0).bytes();
  }

  static std::optional<Request> from_bytes(std::string_view bytes) {
    Reader in(bytes);
    Request request;
    request.operation = static_cast<Operation>(in.byte());
    request.key = in.text();
    request.value = in.text();
    request.expected = in.text();
    request.number = in.u64();
    request.rank = in.u32();
    request.world = in.u32();
    request.waits = in.byte() != 0;
    const bool fits = request.key.size() <= max_key_bytes &&
                      request.value.size() <= max_value_bytes &&
                      request.expected.size() <= max_value_bytes;
    return in.ok() && fits ? std::optional(request) : std::nullopt;
  }
};

/// A keyed hash of both nonces of a connection, for a proof of the secret or for a key. The purpose
/// names the side, so that neither can echo what the other has sent.
inline std::uint64_t tag(SipKey key, std::string_view purpose, std::string_view server_nonce,
                         std::string_view client_nonce) {
  return sip_hash(key, Writer{}.text(purpose).raw(server_nonce).raw(client_nonce).bytes());
}

/// Authenticates the frames of one direction of a connection. A tag is a keyed hash of the frame's
/// position among all that were sent, of the request's number and of the body's digest. The key
/// belongs to the secret, the sender and both nonces. So a frame that is altered, left out,
/// reordered, replayed, reflected to its sender or recorded on another connection has a wrong tag.
/// The digest has a key of the job, so that a reply to thousands of ranks is hashed once.
class FrameKey {
 public:
  FrameKey() = default;

  /// `sender` is "server" or "client".
  FrameKey(SipKey secret, std::string_view sender, std::string_view server_nonce,
           std::string_view client_nonce)
      : key_{tag(secret, text({sender, " frames 0"}), server_nonce, client_nonce),
             tag(secret, text({sender, " frames 1"}), server_nonce, client_nonce)},
        body_key_{tag(secret, "bodies 0", "", ""), tag(secret, "bodies 1", "", "")} {}

  std::uint64_t digest(std::string_view body) const { return sip_hash(body_key_, body); }

  /// The header of the next frame: the length of what follows it, the request's number, the tag.
  std::string header(std::uint32_t request, std::size_t body_bytes, std::uint64_t digest) {
    const auto size = static_cast<std::uint32_t>(after_length + body_bytes);
    return Writer{}.u32(size).u32(request).u64(next_tag(request, digest)).bytes();
  }

  std::string frame(std::uint32_t request, std::string_view body) {
    return header(request, body.size(), digest(body)).append(body);
  }

  /// Calls `take(request, body)` for each whole frame at the front of `received`, until it returns
  /// false, and removes them. False where the data are not the sender's next frame.
  bool take_frames(std::string& received, FunctionRef<bool(std::uint32_t, std::string_view)> take) {
    std::size_t taken = 0;
    bool is_next = true;
    for (bool wants_more = true; wants_more && received.size() - taken >= 4;) {
      Reader rest(std::string_view(received).substr(taken));
      const std::size_t size = rest.u32();
      is_next = size >= after_length && size <= max_frame_bytes;
      if (!is_next || received.size() - taken - 4 < size) break;
      const std::uint32_t request = rest.u32();
      const std::uint64_t given = rest.u64();
      const std::string_view body = rest.raw(size - after_length);
      // One comparison of words takes the same time wherever they differ.
      is_next = given == next_tag(request, digest(body));
      if (!is_next) break;
      taken += 4 + size;
      wants_more = take(request, body);
    }
    received.erase(0, taken);
    return is_next;
  }

 private:
  static constexpr std::size_t after_length = 4 + tag_bytes;

  std::uint64_t next_tag(std::uint32_t request, std::uint64_t digest) {
    return sip_hash(key_, Writer{}.u64(count_++).u64(digest).u32(request).bytes());
  }

  SipKey key_{};
  SipKey body_key_{};
  std::uint64_t count_ = 0;
};

}  // namespace lockstep::detail::store_protocol
