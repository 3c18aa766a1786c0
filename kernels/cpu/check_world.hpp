// Random models for the program that `make sanitize` runs.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "data/matrix.hpp"
#include "data/model.hpp"
#include "weights/pack.hpp"

namespace kvferry {

inline std::mt19937 rng(11);

constexpr int kLongest = 700;  // maximum number of tokens of a sequence

inline int draw(int low, int high) { return std::uniform_int_distribution<int>(low, high)(rng); }
inline int one_of(const std::vector<int>& choices) { return choices[size_t(draw(0, int(choices.size()) - 1))]; }
inline std::vector<float> floats(size_t n, float scale) {
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> values(n);
  for (auto& v : values) v = normal(rng);
  return values;
}

struct Packed {
  Matrix matrix;
  std::vector<uint8_t> data;
};

inline Packed random_matrix(const std::string& wanted, RowType type, int rows, int cols) {
  Packed p;
  p.matrix = packed_layout(wanted, {type}, rows, cols);
  p.data.resize(p.matrix.panel_bytes * size_t(p.matrix.panels));
  std::vector<uint8_t> raw(row_bytes(type, cols) * size_t(rows));
  if (type == RowType::f32) {
    const auto values = floats(size_t(rows) * cols, 0.1f);
    std::memcpy(raw.data(), values.data(), raw.size());
  } else {  // random quantized values with scales of about 0.01
    for (auto& byte : raw) byte = uint8_t(draw(0, 255));
    const size_t block = row_bytes(type, type == RowType::q6_k ? 256 : 32);
    for (size_t at = type == RowType::q6_k ? 208 : 0; at < raw.size(); at += block) {
      raw[at] = uint8_t(draw(0, 255));
      raw[at + 1] = type == RowType::q6_k ? 0x0c : 0x20;
      if (type == RowType::q4_1) raw[at + 3] = 0x9c;
    }
  }
  std::vector<int64_t> order(static_cast<size_t>(rows));
  for (int r = 0; r < rows; ++r) order[size_t(r)] = r;
  pack(p.matrix, {{type, raw.data(), rows}}, order.data(), p.data.data());
  p.matrix.data = p.data.data();
  return p;
}

// A random model, and the memory that it points to.
struct World {
  Model model;
  std::vector<Packed> matrices;
  std::vector<std::vector<float>> vectors;
  std::vector<Layer> layers;
  std::vector<Expert> experts;

  World(const std::string& wanted, RowType type, int input_bits, bool may_be_latent) {
    model.input_bits = input_bits;
    model.kv_heads = draw(1, 3);
    model.heads = model.kv_heads * one_of({1, 2, 3, 4, 5, 7, 8, 16, 20, 70});
    model.head_dim = model.heads > 16 ? one_of({16, 48}) : one_of({16, 32, 48, 64, 80, 112, 128, 256});
    Latent& latent = model.latent;
    if (may_be_latent && !draw(0, 2)) {
      latent = {32 * draw(1, 16), 16 * draw(1, 4), 32 * draw(1, 4), 16 * draw(1, 6), draw(0, 1) * 16 * draw(1, 4)};
      model.kv_heads = 1;
      model.heads = one_of({1, 2, 5, 16, 40});
      model.head_dim = latent.plain + latent.rotated;
    }
    model.hidden = one_of({64, 72, 80, 96, 128, 256});
    model.intermediate = draw(0, 1) ? draw(1, 300) : 32 * draw(1, 16);
    model.vocabulary = model.all_tokens = draw(20, 200);
    model.page_kv_heads = model.kv_heads;
    model.max_tokens = kLongest + 20;
    model.epsilon = 1e-5f;
    model.scale = 1.0f / std::sqrt(float(model.head_dim));
    const bool has_experts = draw(0, 1);
    matrices.reserve(128);
    experts.reserve(32);
    vectors.reserve(64);
    const auto norm = [&](int n) { return vectors.emplace_back(floats(size_t(n), 1.0f)).data(); };
    const auto matrix = [&](int rows, int cols) {
      RowType t = type;
      if (wanted == "mixed")
        t = RowType(one_of({int(RowType::f32), int(RowType::q4_1), int(RowType::q8_0), int(type)}));
      if (row_bytes(t, cols) == 0) t = RowType::f32;  // the inputs are not a multiple of the block
      std::string form = wanted;
      if (t != RowType::f32) {
        form = "shipped";
      } else if (wanted == "mixed" || type != RowType::f32) {
        form = std::array<const char*, 3>{"f32", "f16", "bf16"}[size_t(draw(0, 2))];
      }
      return matrices.emplace_back(random_matrix(form, t, rows, cols)).matrix;
    };
    const int width = model.heads * model.head_dim;
    for (int i = 0; i < 2; ++i) {
      Layer layer;
      layer.attention_norm = norm(model.hidden);
      if (latent.rank) {
        layer.qkv = matrix((latent.query_rank ? latent.query_rank : width) + latent.width(), model.hidden);
        layer.query_norm = norm(latent.query_rank);
        layer.latent_norm = norm(latent.rank);
        if (latent.query_rank) layer.query_up = matrix(width, latent.query_rank);
        layer.absorb = matrix(model.heads * latent.rank, latent.plain);
        layer.value_up = matrix(model.heads * latent.value, latent.rank);
      } else {
        layer.qkv = matrix((model.heads + 2 * model.kv_heads) * model.head_dim, model.hidden);
        layer.q_norm = i ? norm(model.head_dim) : nullptr;
        layer.k_norm = i ? norm(model.head_dim) : nullptr;
      }
      layer.output = matrix(model.hidden, model.attended_width());
      layer.mlp_norm = norm(model.hidden);
      const auto gate_up_rows = [](int inner) { return 2 * ((inner + kPanel - 1) / kPanel * kPanel); };
      if (i && has_experts) {
        layer.mixture.count = draw(1, 20);
        layer.mixture.active = draw(1, std::min(layer.mixture.count, 6));
        layer.mixture.renormalizes = draw(0, 1);
        layer.mixture.has_shared = draw(0, 1);
        layer.mixture.has_shared_gate = layer.mixture.has_shared && draw(0, 1);
        layer.mixture.weight_scale = draw(0, 1) ? 1.0f : 1.7f;
        if (layer.mixture.count % 2 == 0 && layer.mixture.active * 2 <= layer.mixture.count && draw(0, 1))
          layer.mixture.groups = 2;
        layer.mixture.is_sigmoid = draw(0, 1);
        if (layer.mixture.is_sigmoid) layer.mixture.correction = norm(layer.mixture.count);
        const int all = layer.mixture.count + (layer.mixture.has_shared ? 1 : 0), inner = 32 * draw(1, 4);
        layer.mixture.router = matrix(layer.mixture.count + layer.mixture.has_shared_gate, model.hidden);
        for (int e = 0; e < all; ++e) {
          const int size = e < layer.mixture.count ? inner : draw(1, 90);
          experts.push_back({matrix(gate_up_rows(size), model.hidden), matrix(model.hidden, size)});
        }
        layer.mixture.experts = experts.data();
      } else {
        layer.gate_up = matrix(gate_up_rows(model.intermediate), model.hidden);
        layer.down = matrix(model.hidden, model.intermediate);
      }
      layers.push_back(layer);
    }
    model.layers = layers.data();
    model.num_layers = 2;
    model.embedding = model.head = matrix(model.vocabulary, model.hidden);
    model.final_norm = model.head_norm = norm(model.hidden);
    const float* cos = vectors.emplace_back(floats(size_t(model.max_tokens) * model.head_dim, 0.7f)).data();
    const float* sin = vectors.emplace_back(floats(size_t(model.max_tokens) * model.head_dim, 0.7f)).data();
    model.attention_soft_cap = draw(0, 2) ? 0.0f : 2.0f;
    model.logit_soft_cap = draw(0, 2) ? 0.0f : 3.0f;
    model.residual_scale = draw(0, 2) ? 1.0f : 0.5f;
    model.embedding_scale = draw(0, 2) ? 1.0f : 3.0f;
    model.gate = Gate(std::max(0, draw(-2, 2)));
    model.swiglu_alpha = 1.7f;
    model.swiglu_limit = 0.5f;
    const int placement = draw(0, 3);  // norms on the inputs, on the outputs, or on both
    for (Layer& layer : layers) {
      if (draw(0, 2) || latent.rank) layer.cos = cos, layer.sin = sin;
      if (!draw(0, 2)) layer.sinks = vectors.emplace_back(floats(size_t(model.heads), 2.0f)).data();
      layer.window = draw(0, 2) ? 0 : one_of({1, 7, 16, 100, 256, 300});
      if (placement > 1) layer.attention_output_norm = layer.mlp_output_norm = norm(model.hidden);
      if (layer.mixture.count) layer.mlp_output_norm = nullptr;
      if (placement == 2) layer.attention_norm = layer.mlp_norm = nullptr;
      if (!draw(0, 3) && !latent.rank) {
        layer.q_norm_whole = norm(width);
        layer.k_norm_whole = norm(model.kv_heads * model.head_dim);
      }
    }
  }
};

}  // namespace kvferry
