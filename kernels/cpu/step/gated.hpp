// Projections that several kinds of layers share. Each is one function, since code that is inlined twice is slower.
#pragma once
#include <cstddef>

#include "data/matrix.hpp"
#include "data/model.hpp"
#include "data/rows.hpp"
#include "simd/simd.hpp"
#include "products/blocking.hpp"
#include "products/inputs.hpp"
#include "products/low_rank.hpp"
#include "products/products.hpp"
#include "products/tiles.hpp"
#include "step/elementwise.hpp"

namespace kvferry::KVFERRY_LEVEL {

// Writes the gated values of one tile of the fused gate/up projection (interleaved panels).
template <Gate Kind>
static inline void write_gated(const Model& model, const Matrix& m, const Rows& to, bool rough, const Tile& tile) {
  const auto gated = [&](V gate, V up) {
    if constexpr (Kind == Gate::clamped_swiglu) return clamped_swiglu(gate, up, model.swiglu_alpha, model.swiglu_limit);
    return v_mul(Kind == Gate::gelu_tanh ? gelu_tanh(gate) : silu(gate, rough), up);
  };
  const auto finish = [&](int row, int pair, V gate, V up) {
    const size_t at = size_t(row) * to.stride + size_t(pair) * kPanel;
    if (to.forms.f32) prefetch_for_write(to.f32 + at, size_t(to.stride));
    if (to.forms.bf16) prefetch_for_write(to.bf16 + at, size_t(to.stride));
    store_input(to, row, pair * kPanel, gated(gate, up));
    // Padding inputs are multiplied by zero weights, but stale memory there may contain non-finite values, so it is
    // zeroed.
    for (int i = (pair + 1) * kPanel; 2 * pair + 2 == m.panels && i < to.stride; i += kPanel)
      store_input(to, row, i, v_zero());
  };
  for (int r = 0; r < tile.rows; ++r) {
    const int row = tile.row + r;
    for (int c = 0; c + 1 < tile.columns; c += 2) finish(row, (tile.panel + c) / 2, tile.at(r, c), tile.at(r, c + 1));
    if (tile.columns > 1) continue;
    float* gate = to.f32 + size_t(row) * to.stride + size_t(tile.panel / 2) * kPanel;
    if (tile.panel % 2 == 0) {  // stored until the up panel, the next panel of the same chunk, is computed
      v_store(gate, tile.at(r, 0));
    } else {
      finish(row, tile.panel / 2, v_load(gate), tile.at(r, 0));
    }
  }
}

// Not inlined: next to an inlined GELU, or in a second instance of the product, the code for SiLU was 7 % slower.
[[gnu::noinline]] static void write_other_gated(const Model& model, const Matrix& m, const Rows& to, bool rough,
                                                const Tile& tile) {
  model.gate == Gate::gelu_tanh ? write_gated<Gate::gelu_tanh>(model, m, to, rough, tile)
                                : write_gated<Gate::clamped_swiglu>(model, m, to, rough, tile);
}

// Computes one chunk of the fused gate/up projection, applies the gate, and stores the result in `to` as input of the
// down projection.
[[gnu::noinline]] static void gated_product(const Matrix& m, const Rows& x, int rows, const Blocking& blocking,
                                            const Expansion* expansion, int chunk, uint8_t* scratch, const Rows& to,
                                            const Model& model) {
  const bool rough = !to.forms.f32 || to.forms.bytes;
  product_chunk(m, x, rows, blocking, chunk, scratch, expansion, [=, &m, &model](const Tile& tile) {
    model.gate != Gate::silu ? write_other_gated(model, m, to, rough, tile)
                             : write_gated<Gate::silu>(model, m, to, rough, tile);
  });
}

// Computes one chunk of a product and stores it in `to` [rows][stride].
[[gnu::noinline]] static void store_product(const Matrix& m, const Rows& x, int rows, const Blocking& blocking,
                                            const Expansion* expansion, int chunk, uint8_t* scratch, float* to,
                                            size_t stride) {
  product_chunk(m, x, rows, blocking, chunk, scratch, expansion,
                [to, stride](const Tile& tile) { store_tile(tile, to, stride, int(stride)); });
}

}  // namespace kvferry::KVFERRY_LEVEL
