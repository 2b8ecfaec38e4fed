// OpenSSL's EVP would bring its providers along, several MiB; the functions of SHA-256 alone are
// those that OpenSSL 3 calls deprecated.
#define OPENSSL_SUPPRESS_DEPRECATED

#include "core/net/job_key.h"

#include <openssl/crypto.h>
#include <openssl/sha.h>
#include <sys/random.h>

#include <bit>
#include <cstdlib>
#include <cstring>

namespace farandole {
namespace {

constexpr size_t kBlockBytes = SHA256_CBLOCK;

void Update(SHA256_CTX& context, ByteSpan part) {
  SHA256_Update(&context, part.data(), part.size());
}

Digest Final(SHA256_CTX context) {
  Digest digest;
  SHA256_Final(reinterpret_cast<unsigned char*>(digest.data()), &context);
  return digest;
}

SHA256_CTX StartWithKey(const JobKey& key, std::byte pad) {
  std::array<std::byte, kBlockBytes> block{};
  std::memcpy(block.data(), key.data(), key.size());
  for (std::byte& byte : block) byte ^= pad;
  SHA256_CTX context;
  SHA256_Init(&context);
  Update(context, block);
  return context;
}

}  // namespace

Digest Sha256(std::initializer_list<ByteSpan> parts) {
  SHA256_CTX context;
  SHA256_Init(&context);
  for (const ByteSpan part : parts) Update(context, part);
  return Final(context);
}

Hmac::Hmac(const JobKey& key)
    : inner_(std::bit_cast<State>(StartWithKey(key, std::byte{0x36}))),
      outer_(std::bit_cast<State>(StartWithKey(key, std::byte{0x5c}))) {}

Digest Hmac::Of(std::initializer_list<ByteSpan> parts) const {
  auto inner = std::bit_cast<SHA256_CTX>(inner_);
  for (const ByteSpan part : parts) Update(inner, part);
  auto outer = std::bit_cast<SHA256_CTX>(outer_);
  Update(outer, Final(inner));
  return Final(outer);
}

bool EqualDigests(ByteSpan a, ByteSpan b) {
  return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

// It gives at most 256 bytes at once uninterrupted, which is more than anybody wants here. Without
// it there is no key, and nothing to go on with.
void FillRandom(std::span<std::byte> bytes) {
  if (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) std::abort();
}

JobKey RandomKey() {
  JobKey key;
  FillRandom(key);
  return key;
}

JobKey PublicKey(std::string_view job) {
  return Sha256({TextBytes("farandole public job key"), TextBytes(job)});
}

uint32_t JobTag(std::string_view job) {
  const Digest digest = Sha256({TextBytes(job)});
  uint32_t tag = 0;
  std::memcpy(&tag, digest.data(), sizeof tag);
  return tag;
}

}  // namespace farandole
