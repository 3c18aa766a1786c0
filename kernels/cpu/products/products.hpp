// Matrix products over packed panels, as the phases of a step call them. One translation unit of a level has the
// kernels (dispatch.hpp), so that they are compiled once and beside the phases.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "data/matrix.hpp"
#include "data/rows.hpp"
#include "simd/simd.hpp"
#include "products/blocking.hpp"
#include "products/low_rank.hpp"
#include "products/tiles.hpp"

namespace kvferry::KVFERRY_LEVEL {

// Bytes of scratch memory that `product` needs for a matrix.
static inline size_t unpacked_bytes(const Matrix& m) { return size_t(kChunkPanels) * m.depth * kPanel * 4; }

constexpr int kPrivateCacheInputs = 2560;  // inputs of float panels, 64 bytes each, that fit the L2 cache

// Panels per call of `product`. For many rows and float panels, all rows of the chunk are multiplied by as many panels
// as fit the L2 cache.
static inline int panels_per_pass(const Matrix& m, int rows) {
  if (KVFERRY_PAIRS || m.has_codes() || rows <= kFusedRows) return kChunkPanels;
  const int max_panels = kPrivateCacheInputs / m.depth;
  return max_panels < 1 ? 1 : max_panels < kChunkPanels ? max_panels : kChunkPanels;
}

// Multiplies `rows` rows of x by panels [panel, panel + panels), at most kChunkPanels. `epilogue(tile)` receives every
// result.
void product(const Matrix& m, const Rows& x, int rows, int panel, int panels, uint8_t* scratch,
             const Epilogue& epilogue);

// Computes one chunk of a blocked product. `receive(tile)` receives results with the bias and updates added.
template <class Receiver>
static inline void product_chunk(const Matrix& m, const Rows& rows, int num_rows, const Blocking& blocking, int chunk,
                                 uint8_t* scratch, const Expansion* expansion, const Receiver& receive) {
  // Consecutive chunks share rows or panels, which one core loads into the shared cache for all cores.
  const int first_row =
      (blocking.rows_first ? chunk / blocking.panel_blocks : chunk % blocking.row_blocks) * blocking.rows;
  const int first_panel =
      (blocking.rows_first ? chunk % blocking.panel_blocks : chunk / blocking.row_blocks) * blocking.panels;
  const int count = num_rows - first_row < blocking.rows ? num_rows - first_row : blocking.rows;
  const int last_panel = m.panels < first_panel + blocking.panels ? m.panels : first_panel + blocking.panels;
  const Rows x = rows.from(first_row);
  const int at_a_time = panels_per_pass(m, count);
  for (int panel = first_panel; panel < last_panel; panel += at_a_time) {
    const int panels = last_panel - panel < at_a_time ? last_panel - panel : at_a_time;
    const auto finish = [&](Tile tile) {
      tile.row += first_row;
      if (m.bias)
        for (int r = 0; r < tile.rows; ++r)
          for (int c = 0; c < tile.columns; ++c)
            v_store(tile.values + (r * tile.columns + c) * kPanel,
                    v_add(tile.at(r, c), v_load(m.bias + size_t(tile.panel + c) * kPanel)));
      if (expansion) expand(*expansion, tile);
      receive(tile);
    };
    product(m, x, count, panel, panels, scratch, Epilogue(finish));
  }
}

// Stores a tile into `to` [..][stride], of which the first `valid` columns exist, and prefetches the lines that a later
// tile writes.
static inline void store_tile(const Tile& tile, float* to, size_t stride, int valid) {
  to += size_t(tile.row) * stride + size_t(tile.panel) * kPanel;
  valid -= tile.panel * kPanel;
  for (int r = 0; r < tile.rows; ++r, to += stride)
    for (int c = 0; c < tile.columns; ++c) {
      if (valid - c * kPanel >= kPanel) {
        prefetch_for_write(to + c * kPanel, stride);
        v_store(to + c * kPanel, tile.at(r, c));
      } else if (valid > c * kPanel) {
        alignas(64) float lanes[kPanel];
        v_store(lanes, tile.at(r, c));
        std::memcpy(to + c * kPanel, lanes, size_t(valid - c * kPanel) * 4);
      }
    }
}

}  // namespace kvferry::KVFERRY_LEVEL
