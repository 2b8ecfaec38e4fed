// Sets of tensors as training moves them: element counts, for the benchmark of the cast kernel.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace farandole {

struct TensorSet {
  std::string name;
  std::vector<int64_t> counts;  ///< Elements of each tensor.
  int64_t total() const;
};

/// As many tensors of one size in float32 as a launch takes, 256 MiB at most.
TensorSet UniformSet(int64_t tensor_bytes);
/// The gradients of ResNet-50 from test/data/resnet50_backward.csv; empty if it cannot be read.
TensorSet ResNet50Set(const std::string& csv_path);
/// The parameters of a model shaped like BERT-large: 24 layers, hidden 1024, 30,522 words.
TensorSet BertLargeSet();

}  // namespace farandole
