// A network of two layers with its own backward pass and its own SGD: what a trainer without a
// framework looks like.
#pragma once

#include <farandole/optimizer.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>
#include <string>
#include <vector>

/// Softmax(W2 relu(W1 x + b1) + b2), trained on the cross entropy.
class Mlp {
 public:
  Mlp(int inputs, int hidden, int classes, unsigned seed)
      : inputs_(inputs), hidden_(hidden), classes_(classes) {
    const int counts[] = {hidden * inputs, hidden, classes * hidden, classes};
    std::mt19937 random(seed);
    for (int k = 0; k < 4; ++k) {
      values_.emplace_back(counts[k]);
      gradients_.emplace_back(counts[k]);
      const float range = k % 2 == 0 ? std::sqrt(6.0f / (k == 0 ? inputs : hidden)) : 0.0f;
      std::uniform_real_distribution<float> uniform(-range, range);
      for (float& value : values_.back()) value = range > 0 ? uniform(random) : 0.0f;
    }
  }

  std::vector<farandole::Parameter<float>> parameters() {
    static const char* const kNames[] = {"layer1.weight", "layer1.bias", "layer2.weight",
                                         "layer2.bias"};
    std::vector<farandole::Parameter<float>> all;
    for (std::size_t k = 0; k < 4; ++k) all.push_back({kNames[k], values_[k], gradients_[k]});
    return all;
  }

  /// Class scores of one image: classes() logits.
  const std::vector<float>& forward(const float* x) {
    x_ = x;
    h_.assign(static_cast<std::size_t>(hidden_), 0.0f);
    z_.assign(static_cast<std::size_t>(classes_), 0.0f);
    affine(values_[0], values_[1], x, inputs_, h_);
    for (float& value : h_) value = std::max(value, 0.0f);
    affine(values_[2], values_[3], h_.data(), hidden_, z_);
    return z_;
  }

  /// Adds the gradients of the last forward's loss, divided by `batch`. @return the loss.
  float backward(int label, int batch) {
    std::vector<float> dz = softmax(z_);
    const float loss = -std::log(std::max(dz[static_cast<std::size_t>(label)], 1e-12f));
    dz[static_cast<std::size_t>(label)] -= 1.0f;
    for (float& value : dz) value /= static_cast<float>(batch);
    std::vector<float> dh(h_.size(), 0.0f);
    accumulate(dz, h_.data(), hidden_, gradients_[2], gradients_[3], &values_[2], dh.data());
    for (std::size_t i = 0; i < dh.size(); ++i) dh[i] = h_[i] > 0 ? dh[i] : 0.0f;
    accumulate(dh, x_, inputs_, gradients_[0], gradients_[1], nullptr, nullptr);
    return loss;
  }

  void zero_grad() {
    for (std::vector<float>& gradient : gradients_)
      std::fill(gradient.begin(), gradient.end(), 0.0f);
  }

 private:
  using Vector = std::vector<float>;

  static void affine(const Vector& weight, const Vector& bias, const float* x, int columns,
                     Vector& y) {
    for (std::size_t row = 0; row < y.size(); ++row) {
      const float* w = weight.data() + row * static_cast<std::size_t>(columns);
      float sum = bias[row];
      for (int i = 0; i < columns; ++i) sum += w[i] * x[i];
      y[row] = sum;
    }
  }

  static Vector softmax(const Vector& z) {
    const float top = *std::max_element(z.begin(), z.end());
    Vector p(z.size());
    float sum = 0;
    for (std::size_t i = 0; i < z.size(); ++i) sum += p[i] = std::exp(z[i] - top);
    for (float& value : p) value /= sum;
    return p;
  }

  /// dW += dy x^T, db += dy, and dx += W^T dy if it is wanted.
  static void accumulate(const Vector& dy, const float* x, int columns, Vector& dw, Vector& db,
                         const Vector* weight, float* dx) {
    for (std::size_t row = 0; row < dy.size(); ++row) {
      if (dy[row] == 0.0f) continue;
      float* const g = dw.data() + row * static_cast<std::size_t>(columns);
      for (int i = 0; i < columns; ++i) g[i] += dy[row] * x[i];
      db[row] += dy[row];
      if (weight == nullptr) continue;
      const float* const w = weight->data() + row * static_cast<std::size_t>(columns);
      for (int i = 0; i < columns; ++i) dx[i] += dy[row] * w[i];
    }
  }

  int inputs_, hidden_, classes_;
  std::vector<Vector> values_, gradients_;
  const float* x_ = nullptr;
  Vector h_, z_;
};

/// Stochastic gradient descent with momentum.
class Sgd {
 public:
  Sgd(std::vector<farandole::Parameter<float>> parameters, float rate, float momentum)
      : parameters_(std::move(parameters)), rate_(rate), momentum_(momentum) {
    for (const auto& parameter : parameters_) velocity_.emplace_back(parameter.value.size());
  }

  std::vector<farandole::Parameter<float>>& parameters() { return parameters_; }

  void step() {
    for (std::size_t k = 0; k < parameters_.size(); ++k) {
      for (std::size_t i = 0; i < velocity_[k].size(); ++i) {
        velocity_[k][i] = momentum_ * velocity_[k][i] + parameters_[k].gradient[i];
        parameters_[k].value[i] -= rate_ * velocity_[k][i];
      }
    }
  }

 private:
  std::vector<farandole::Parameter<float>> parameters_;
  std::vector<std::vector<float>> velocity_;
  float rate_, momentum_;
};
