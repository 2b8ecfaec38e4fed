// The key of a job, which a process proves before a rank listens to it, and the MACs made with it.
#pragma once

#include <array>
#include <cstddef>
#include <initializer_list>
#include <span>
#include <string_view>

namespace farandole {

using JobKey = std::array<std::byte, 32>;
using Digest = std::array<std::byte, 32>;
using ByteSpan = std::span<const std::byte>;

inline ByteSpan TextBytes(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

/// SHA-256, FIPS 180-4; OpenSSL's.
Digest Sha256(std::initializer_list<ByteSpan> parts);

/// HMAC-SHA-256 (RFC 2104) under one key, whose part of the work is done once. A value.
class Hmac {
 public:
  explicit Hmac(const JobKey& key);
  /// Of the parts, one after the other.
  Digest Of(std::initializer_list<ByteSpan> parts) const;

 private:
  // A SHA256_CTX each, after its block of the key; OpenSSL's header stays out of this one.
  struct alignas(8) State {
    std::array<std::byte, 112> bytes;
  };
  State inner_;
  State outer_;
};

/// Takes the same time wherever they differ.
bool EqualDigests(ByteSpan a, ByteSpan b);

/// From the kernel's generator.
void FillRandom(std::span<std::byte> bytes);
JobKey RandomKey();
/// For a job without a secret, which keeps strangers out as little as its name is unknown.
JobKey PublicKey(std::string_view job);
/// Of the job's name: processes of different jobs find out by it before they compare keys.
uint32_t JobTag(std::string_view job);

}  // namespace farandole
