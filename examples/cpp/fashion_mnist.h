// Fashion-MNIST as Debian's package dataset-fashion-mnist installs it: gzipped idx files.
#pragma once

#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

namespace fashion_mnist {

constexpr int kPixels = 28 * 28;
constexpr int kClasses = 10;

/// Images as bytes, row after row, and their labels 0..9.
struct Dataset {
  std::vector<std::uint8_t> images;  // kPixels per image
  std::vector<std::uint8_t> labels;
  std::size_t size() const { return labels.size(); }
};

/// A whole idx file without its header of `header` bytes. @throws std::runtime_error naming the
/// file.
inline std::vector<std::uint8_t> read_idx(const std::string& path, std::size_t header) {
  std::FILE* pipe = popen(("gzip -dc '" + path + "'").c_str(), "r");
  if (pipe == nullptr) throw std::runtime_error("cannot run gzip");
  std::vector<std::uint8_t> bytes;
  std::uint8_t block[1 << 16];
  for (std::size_t n; (n = std::fread(block, 1, sizeof block, pipe)) > 0;)
    bytes.insert(bytes.end(), block, block + n);
  if (pclose(pipe) != 0 || bytes.size() <= header)
    throw std::runtime_error("cannot read \"" + path + "\"; install dataset-fashion-mnist");
  bytes.erase(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(header));
  return bytes;
}

/// `part` is "train" (60,000 images) or "t10k" (10,000).
inline Dataset load(const std::string& part) {
  const std::string prefix = "/usr/share/datasets/fashion-mnist/" + part;
  Dataset data{read_idx(prefix + "-images-idx3-ubyte.gz", 16),
               read_idx(prefix + "-labels-idx1-ubyte.gz", 8)};
  if (data.images.size() != data.size() * kPixels)
    throw std::runtime_error(prefix + ": " + std::to_string(data.images.size()) + " pixels for " +
                             std::to_string(data.size()) + " labels");
  return data;
}

}  // namespace fashion_mnist
