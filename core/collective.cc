#include "core/collective.h"

#include <bit>
#include <cmath>
#include <string>

namespace farandole {
namespace {

template <class Enum>
Status ReadEnum(const char* field, int64_t number, Enum last, Enum* value) {
  FARANDOLE_RETURN_IF_ERROR(CheckRange(field, number, static_cast<int64_t>(last)));
  *value = static_cast<Enum>(number);
  return {};
}

// NaN differs from itself, so that ranks which all passed it would be refused as disagreeing.
Status ReadFactor(const char* field, double number, double* value) {
  if (!std::isfinite(number)) {
    return InvalidArgument(std::string(field) + " is " + std::to_string(number) +
                           "; expected a finite number");
  }
  *value = number;
  return {};
}

}  // namespace

Status CheckRange(const char* field, int64_t number, int64_t last) {
  if (number >= 0 && number <= last) return {};
  return InvalidArgument(std::string(field) + " is " + std::to_string(number) + "; expected 0 to " +
                         std::to_string(last));
}

Result<Collective> ToCollective(const CollectiveNumbers& numbers) {
  Collective collective;
  FARANDOLE_RETURN_IF_ERROR(
      ReadEnum("collective kind", numbers.kind, kLastOpKind, &collective.kind));
  FARANDOLE_RETURN_IF_ERROR(ReadEnum("reduce op", numbers.op, kLastReduceOp, &collective.op));
  FARANDOLE_RETURN_IF_ERROR(
      ReadEnum("wire format", numbers.wire_format, kLastWireFormat, &collective.wire_format));
  FARANDOLE_RETURN_IF_ERROR(
      ReadEnum("device", numbers.device, kLastDeviceKind, &collective.device));
  FARANDOLE_RETURN_IF_ERROR(ReadFactor("prescale", numbers.prescale, &collective.prescale));
  FARANDOLE_RETURN_IF_ERROR(ReadFactor("postscale", numbers.postscale, &collective.postscale));
  collective.root = numbers.root;
  return collective;
}

// Goes into the digest of what a rank has applied (coordinator/protocol/applier.cc), which the
// simulation compares between ranks: every field counts, and no address or padding. Enumerations
// have a byte each and the root the upper half, so that these fields cannot collide.
uint64_t Hash(const Collective& collective) {
  uint64_t hash = static_cast<uint64_t>(collective.op) |
                  static_cast<uint64_t>(collective.device) << 8 |
                  static_cast<uint64_t>(collective.wire_format) << 16 |
                  static_cast<uint64_t>(collective.kind) << 24 |
                  static_cast<uint64_t>(static_cast<uint32_t>(collective.root)) << 32;
  // + 0.0 makes -0.0, which compares equal, the same bits.
  hash = Mix(hash, std::bit_cast<uint64_t>(collective.prescale + 0.0));
  return Mix(hash, std::bit_cast<uint64_t>(collective.postscale + 0.0));
}

uint64_t Mix(uint64_t digest, uint64_t value) {
  // The finaliser of splitmix64, doi:10.1145/2660193.2660195.
  uint64_t z = digest + 0x9e3779b97f4a7c15u + value;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

}  // namespace farandole
