#include "test/gpu/move_sets.h"

#include <algorithm>
#include <fstream>
#include <numeric>
#include <sstream>

#include "ops/device.h"

namespace farandole {

int64_t TensorSet::total() const {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

TensorSet UniformSet(int64_t tensor_bytes) {
  const int64_t most = (int64_t{256} << 20) / tensor_bytes;
  const int64_t tensors = std::min<int64_t>(most, Device::kItemsPerLaunch);
  return {std::to_string(tensors) + " x " + std::to_string(tensor_bytes >> 10) + " KiB",
          std::vector<int64_t>(static_cast<size_t>(tensors), tensor_bytes / 4)};
}

TensorSet ResNet50Set(const std::string& csv_path) {
  TensorSet set{"ResNet-50", {}};
  std::ifstream file(csv_path);
  std::string line;
  std::getline(file, line);  // the columns: name, elements, ready_us
  while (std::getline(file, line)) {
    std::istringstream fields(line);
    std::string name, elements;
    std::getline(fields, name, ',');
    std::getline(fields, elements, ',');
    set.counts.push_back(std::stoll(elements));
  }
  return set;
}

TensorSet BertLargeSet() {
  constexpr int64_t kHidden = 1024;
  constexpr int64_t kInner = 4 * kHidden;
  constexpr int64_t kWords = 30522;
  constexpr int64_t kPositions = 512;
  TensorSet set{"BERT-large",
                {kWords * kHidden, kPositions * kHidden, 2 * kHidden, kHidden, kHidden}};
  for (int layer = 0; layer < 24; ++layer) {
    for (int projection = 0; projection < 4; ++projection) {  // query, key, value, output
      set.counts.insert(set.counts.end(), {kHidden * kHidden, kHidden});
    }
    set.counts.insert(set.counts.end(), {kHidden, kHidden});  // the norm after attention
    set.counts.insert(set.counts.end(), {kHidden * kInner, kInner, kInner * kHidden, kHidden});
    set.counts.insert(set.counts.end(), {kHidden, kHidden});  // the norm after the inner layers
  }
  set.counts.insert(set.counts.end(), {kHidden * kHidden, kHidden});  // the pooler
  return set;
}

}  // namespace farandole
